#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/mean_limit.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/operands/quantize/training.h"
#include "cuda/operands/v_slices.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// A group of lanes has a row.
__global__ void __launch_bounds__(kThreads)
    rows_to_f16_kernel(const __grid_constant__ Strided from, int dim, const __grid_constant__ F16Rows to) {
  const int lanes = dim / kVec8, lane = threadIdx.x % lanes, rows_at_once = kThreads / lanes;
  const int64_t heads = from.shape[1], tokens = from.shape[2], rows = from.shape[0] * heads * tokens;
  for (int64_t first = int64_t{blockIdx.x} * rows_at_once; first < rows; first += int64_t{gridDim.x} * rows_at_once) {
    const int64_t row = first + threadIdx.x / lanes;
    const Index4 at{row / tokens / heads, row / tokens % heads, row % tokens, lane * kVec8};
    Vec8 x{};
    if (row < rows && at.channel < from.shape[3]) read(from, at, x);
    float most = 0.f, nonfinite = 0.f;
    for (const float y : x) most = fmaxf(most, fabsf(y)), nonfinite = fmaf(y, 0.f, nonfinite);
    for (int offset = lanes / 2; offset; offset /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
      nonfinite += __shfl_xor_sync(~0u, nonfinite, offset);
    }
    const bool finite = nonfinite == 0.f;
    // The largest number comes into [2^14, 2^15).
    const int exponent = finite && most > 0.f ? max(ilogbf(most) - 14, -110) : 0;
    uint4 word;
    for (int i = 0; i < kVec8 / 2; ++i)
      (&word.x)[i] = finite ? ptx::pack<F16>(ldexpf(x[2 * i], -exponent), ldexpf(x[2 * i + 1], -exponent)) : 0u;
    if (row >= rows) continue;
    *reinterpret_cast<uint4*>(to.data + row * dim + lane * kVec8) = word;
    if (lane == 0) to.factor[row] = ldexpf(1.f, exponent);
  }
}

// Chooses the power of two of (batch, kv_head) blockIdx.x from the scales of its tokens.
__global__ void __launch_bounds__(kThreads) value_scales_kernel(const float* scales, int keys, float* scale) {
  constexpr int kSampled = 64;
  constexpr float kTop = 127.f;
  __shared__ float sample[kSampled], limit;
  __shared__ int largest;
  if (threadIdx.x == 0) largest = 0;
  scales += int64_t{blockIdx.x} * keys;
  float most = 0.f;
  for (int i = threadIdx.x; i < keys; i += kThreads)
    if (isfinite(scales[i])) most = fmaxf(most, scales[i] * kTop);
  if (threadIdx.x < kSampled) {
    const float x = scales[static_cast<int64_t>(threadIdx.x) * keys / kSampled] * kTop;
    sample[threadIdx.x] = isfinite(x) ? x : 0.f;
  }
  __syncthreads();
  atomicMax(&largest, __float_as_int(most));
  const float found = mean_limit(sample, limit);
  if (threadIdx.x == 0) scale[blockIdx.x] = ldexpf(1.f, -v_exponent(__int_as_float(largest), found));
}

__global__ void __launch_bounds__(kThreads) values_to_f16_kernel(const __grid_constant__ Int8Rows v, int64_t vecs,
                                                                 int keys, int dim, const float* scale, F16* to) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vecs; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i * kVec8 / dim;
    const float by = v.scale[row], inverse = 1.f / scale[row / keys];
    const uint2 word = *reinterpret_cast<const uint2*>(v.data + i * kVec8);
    const auto* const values = reinterpret_cast<const S8*>(&word);
    uint4 result;
    for (int c = 0; c < kVec8 / 2; ++c)
      (&result.x)[c] = ptx::pack<F16>(values[2 * c] * by * inverse, values[2 * c + 1] * by * inverse);
    *reinterpret_cast<uint4*>(to + i * kVec8) = result;
  }
}

}  // namespace

TrainingOperands::TrainingOperands(const Problem& p, const From& from, int dim, WorkspaceAllocator& workspace)
    : logits_{.q = from.q,
              .k = from.k,
              .v = from.k,
              .dim = dim,
              .heads = static_cast<int>(p.heads),
              .kv_heads = static_cast<int>(p.kv_heads),
              .keys = {static_cast<const int*>(p.cu_seqlens_k.data), sequences_of(p), static_cast<int>(p.tokens_k),
                       kBlockKeys, mask_of(p), static_cast<int>(p.tokens_q),
                       static_cast<const int*>(p.cu_seqlens_q.data)},
              .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data),
              .q_type = QuantizedFormat::s8,
              .k_type = QuantizedFormat::s8,
              .v_type = QuantizedFormat::none,
              .seen = from.seen},
      values_(logits_) {
  if (p.hadamard) logits_.rotation = rotation_of(p.dim);
  const bool has_do = from.do_.shape[2];  // its data is null while the workspace is measured
  values_.q = has_do ? from.do_ : from.v, values_.k = values_.v = from.v;
  if (!has_do) values_.q.shape[2] = 0;
  const int64_t rows = p.batch * p.heads * p.tokens_q, key_heads = p.batch * p.kv_heads, key_rows = key_heads * keys();
  const int64_t sequences = p.packed() ? sequences_of(p) : p.batch;
  values_.channels.k_mean = workspace.take<float>(sequences * p.kv_heads * dim);
  logits_.block_means.mean = workspace.take<F16>(key_rows / kBlockKeys * dim);
  logits_.block_means.factor = workspace.take<float>(key_rows / kBlockKeys);
  for (QuantizeParams* a : {&logits_, &values_}) {
    if (a->q.shape[2]) {
      a->q_quantized = workspace.take(rows * dim);
      a->q_scale = workspace.take<float>(rows);
    }
    a->k_quantized = workspace.take(key_rows * dim);
    a->k_scale = workspace.take<float>(key_rows);
  }
  logits_scratch_ = workspace.take(quantize_scratch_bytes(logits_));
  values_scratch_ = workspace.take(quantize_scratch_bytes(values_));
}

void TrainingOperands::quantize(cudaStream_t stream) const {
  if (!logits_.keys.count()) return;
  cuda::quantize(logits_, logits_scratch_, stream);
  cuda::quantize(values_, values_scratch_, stream);
}

void scale_rows_to_f16(const Strided& from, int dim, const F16Rows& to, cudaStream_t stream) {
  const int64_t rows = from.shape[0] * from.shape[1] * from.shape[2];
  if (!rows) return;
  rows_to_f16_kernel<<<blocks_for(rows, kThreads * kVec8 / dim), kThreads, 0, stream>>>(from, dim, to);
  check(cudaGetLastError(), "rows_to_f16_kernel");
}

void values_to_f16(const Int8Rows& v, int64_t heads, int keys, int dim, F16* to, float* scale, cudaStream_t stream) {
  const int64_t vecs = heads * keys * dim / kVec8;
  if (!vecs) return;
  value_scales_kernel<<<static_cast<unsigned>(heads), kThreads, 0, stream>>>(v.scale, keys, scale);
  check(cudaGetLastError(), "value_scales_kernel");
  values_to_f16_kernel<<<blocks_for(vecs, kThreads), kThreads, 0, stream>>>(v, vecs, keys, dim, scale, to);
  check(cudaGetLastError(), "values_to_f16_kernel");
}

}  // namespace octet::cuda
