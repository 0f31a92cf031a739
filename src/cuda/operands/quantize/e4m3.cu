#include <utility>

#include "cuda/fragment/e4m3.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/quantize/e4m3.h"
#include "cuda/operands/quantize/key_tiles.h"
#include "cuda/operands/quantize/parameters.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/max.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// The place of a row: its token, and the index of its sequence and head among means and scales of channels.
struct Place {
  Index4 at;
  int64_t channels;
  bool present;
};

__device__ Place place_of(const E4m3Rows& a, int64_t index, int channel) {
  const int heads = static_cast<int>(a.from.shape[1]), row = static_cast<int>(index % a.rows);
  const int head = static_cast<int>(index / a.rows % heads), batch = static_cast<int>(index / a.rows / heads);
  int token = row, sequence = batch;
  bool present = channel < a.from.shape[3];
  if (a.keys.tile) {
    const TileOfKeys tile = tile_of_keys(a.keys, row / a.keys.tile);
    const int i = row % a.keys.tile;
    token = tile.first + i, present &= tile.sees(i);
    if (a.keys.cu_seqlens) sequence = tile.sequence;
  } else if (a.cu_seqlens) {
    sequence = last_at_most(token, a.sequences, [&](int s) { return a.cu_seqlens[s]; });
  }
  const int kv_head = head / (heads / a.kv_heads);
  return {{batch, head, token, channel}, (int64_t{sequence} * a.kv_heads + kv_head) * a.dim + channel, present};
}

// Saturates; NaN stays NaN.
__device__ float nearest_e4m3(float x) {
  return isnan(x) ? x : copysignf(round_to_e4m3(fminf(fabsf(x), kLargestE4m3)), x);
}

// Writes eight numbers of e4m3 from element `at` on.
__device__ void write(const E4m3Rows& a, int64_t at, const float (&y)[kVec8]) {
  if (a.as == E4m3Form::bytes) {
    uint2 words{};
    for (int c = 0; c < kVec8; ++c) (&words.x)[c / 4] |= e4m3_code(y[c]) << 8 * (c % 4);
    *reinterpret_cast<uint2*>(static_cast<E4m3*>(a.to) + at) = words;
  } else {
    uint4 words;
    for (int c = 0; c < kVec8; c += 2) (&words.x)[c / 2] = ptx::pack<F16>(y[c], y[c + 1]);
    *reinterpret_cast<uint4*>(static_cast<F16*>(a.to) + at) = words;
  }
}

// A group of lanes has a row.
__global__ void __launch_bounds__(kThreads) e4m3_rows_kernel(const __grid_constant__ E4m3Rows a) {
  const int lanes = a.dim / kVec8, lane = threadIdx.x % lanes, rows_at_once = kThreads / lanes;
  const int64_t rows = a.from.shape[0] * a.from.shape[1] * a.rows;
  for (int64_t first = int64_t{blockIdx.x} * rows_at_once; first < rows; first += int64_t{gridDim.x} * rows_at_once) {
    const int64_t row = first + threadIdx.x / lanes;
    Place place{};
    if (row < rows) place = place_of(a, row, lane * kVec8);
    Vec8 x{};
    if (place.present) read(a.from, place.at, x);
    const bool has_scale = place.present && a.how.scale.data;
    const float input_scale = has_scale ? parameter_of(a.how.scale, place.at.batch, place.at.head,
                                                       a.how.group_in_32_bits(static_cast<int>(place.at.token)), 0)
                                        : 1.f;
    if (a.inverse)
      for (float& y : x) y = __fmul_rn(y, input_scale);
    if (a.mean && place.present)
      for (int c = 0; c < kVec8; ++c) x[c] -= a.mean[place.channels + c];
    float product = 0.f, most = 0.f;
    for (int c = 0; c < kVec8; ++c) {
      if (a.mean_logit && place.present) product = fmaf(x[c], a.key_mean[place.channels + c], product);
      most = ptx::max_or_nan(most, fabsf(x[c]));
    }
    for (int offset = lanes / 2; offset; offset /= 2) {
      product += __shfl_xor_sync(~0u, product, offset);
      most = ptx::max_or_nan(most, __shfl_xor_sync(~0u, most, offset));
    }
    if (row >= rows) continue;
    Scale scale{1.f, 1.f};
    if (a.as_they_are)
      scale.scale = input_scale;
    else if (a.scale)
      scale = most <= FLT_MAX ? scale_of(most, kLargestE4m3) : Scale{NAN, 0.f};
    float y[kVec8];
    for (int c = 0; c < kVec8; ++c) {
      float by = scale.inverse;
      if (a.inverse && place.present) by = a.inverse[place.channels + c];
      // Infinite numbers of v become NaN; rows with a scale that are not finite, or that came with a scale of 0, are 0.
      y[c] = isnan(scale.scale) || scale.scale == 0.f ? 0.f
             : a.inverse && isinf(x[c])               ? NAN
                                                      : nearest_e4m3(__fmul_rn(x[c], by));
    }
    write(a, row * a.dim + lane * kVec8, y);
    if (lane > 0) continue;
    if (a.scale) a.scale[row] = scale.scale;
    if (a.mean_logit) a.mean_logit[row] = product * input_scale;
  }
}

}  // namespace

View E4m3Rows::view() const {
  const int64_t heads = from.shape[1];
  return {as == E4m3Form::bytes ? OCTET_E4M3 : OCTET_F16,
          to,
          {from.shape[0], heads, rows, dim},
          {heads * rows * dim, int64_t{rows} * dim, dim, 1},
          nullptr};
}

void quantize_to_e4m3(const E4m3Rows& rows, cudaStream_t stream) {
  if (!rows.count()) return;
  e4m3_rows_kernel<<<blocks_for(static_cast<int64_t>(rows.count()), kThreads * kVec8 / rows.dim), kThreads, 0,
                     stream>>>(rows);
  check(cudaGetLastError(), "e4m3_rows_kernel");
}

void E4m3Rows::allocate(WorkspaceAllocator& workspace) {
  const std::size_t numbers = count() * static_cast<std::size_t>(dim);
  to = as == E4m3Form::bytes ? workspace.take(numbers) : workspace.take<F16>(numbers);
}

E4m3Rows e4m3_values(const View& v, E4m3Form as, const KeyTiles& keys, const Channels& channels, int dim,
                     WorkspaceAllocator& workspace) {
  E4m3Rows x{.from = strided(v),
             .as = as,
             .rows = keys.count() * keys.tile,
             .dim = dim,
             .kv_heads = static_cast<int>(v.shape[1])};
  x.keys = keys, x.inverse = channels.v_inverse;
  x.allocate(workspace);
  return x;
}

E4m3Operands::E4m3Operands(const Problem& p, E4m3Form as, const KeySide& key_side, bool scaled, int dim,
                           WorkspaceAllocator& workspace)
    : stats_(quantize_params(p, key_side, dim, kBlockKeys)) {
  const bool q_came = p.q.dtype == OCTET_E4M3, k_came = p.k.dtype == OCTET_E4M3;
  const auto channels = static_cast<std::size_t>((p.packed() ? sequences_of(p) : p.batch) * p.kv_heads * dim);
  const bool smooths_k = scaled && !k_came;
  if (scaled) {
    if (smooths_k) stats_.channels.k_mean = workspace.take<float>(channels);
    stats_.channels.v_scale = workspace.take<float>(channels);
    stats_.channels.v_inverse = workspace.take<float>(channels);
    scratch_ = workspace.take(quantize_scratch_bytes(stats_));
  }
  const auto rows = [&](const Strided& from) {
    E4m3Rows x{
        .from = from, .as = as, .rows = static_cast<int>(from.shape[2]), .dim = dim, .kv_heads = stats_.kv_heads};
    x.cu_seqlens = stats_.cu_seqlens_q, x.sequences = stats_.keys.sequences;
    return x;
  };
  q_ = rows(stats_.q), k_ = rows(stats_.k), v_ = rows(stats_.v);
  q_.key_mean = k_.mean = stats_.channels.k_mean, v_.inverse = stats_.channels.v_inverse;
  q_.as_they_are = q_came, k_.as_they_are = k_came;
  for (const auto& [x, t] : {std::pair{&q_, &p.q}, {&k_, &p.k}, {&v_, &p.v}})
    if (t->quantization) x->how = quantization_of(*t).in_32_bits(t->shape[2]);
  if (scaled)
    for (E4m3Rows* x : {&k_, &v_}) x->keys = stats_.keys, x->rows = stats_.keys.count() * kBlockKeys;
  for (E4m3Rows* x : {&q_, &k_, &v_}) {
    x->allocate(workspace);
    if (scaled && x != &v_) x->scale = workspace.take<float>(x->count());
  }
  const bool keeps_mean = scaled && k_came && p.k.quantization && p.k.quantization->mean;
  if (keeps_mean) {
    k_mean_ = {.from = k_.how.mean,
               .seed = k_.how.hadamard_seed,
               .sequences = static_cast<int>(p.packed() ? sequences_of(p) : p.batch),
               .heads = stats_.kv_heads,
               .packed = p.packed(),
               .dim = dim,
               .to = workspace.take<float>(channels)};
    q_.key_mean = k_mean_->to;
  }
  if ((smooths_k || keeps_mean) && wants_mean_logit(p)) q_.mean_logit = workspace.take<float>(q_.count());
}

void E4m3Operands::quantize(cudaStream_t stream) const {
  if (scratch_ && k_.rows) cuda::quantize(stats_, scratch_, stream);
  if (k_mean_) copy_means(*k_mean_, stream);
  for (const E4m3Rows* x : {&q_, &k_, &v_}) quantize_to_e4m3(*x, stream);
}

}  // namespace octet::cuda
