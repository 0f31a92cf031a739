// octet_dequantize and octet_apply_rope on a GPU. A warp takes a row.
#include "cuda/quantizers/launch.h"
#include "cuda/quantizers/rows.h"

namespace octet::cuda::quantizers {
namespace {

constexpr int kWarps = 8;
constexpr int kHeadsInTurn = 8;  // rows of one token that a warp turns one after the other, for their sines

struct DequantizeParams {
  View codes, x;
  Quantization how;
  int block;  // of the rotation
  float norm;
};

__global__ void __launch_bounds__(32 * kWarps, kBlocks) dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  extern __shared__ float4 memory[];
  const int dim = static_cast<int>(p.x.shape[3]);
  float* const row = reinterpret_cast<float*>(memory) + warp() * row_stride(dim);
  const auto tokens = static_cast<unsigned>(p.x.shape[2]), rows = heads_of(p.x) * tokens;
  const octet_zero_point kind = p.how.zero_point_kind;
  const bool per_channel = p.how.per_channel();
  const uint32_t negative = p.how.hadamard_seed ? negative_signs(p.how.hadamard_seed, dim) : 0;
  for (unsigned n = blockIdx.x * kWarps + warp(); n < rows; n += gridDim.x * kWarps) {
    const BatchHead i(p.x, n / tokens);
    const int token = static_cast<int>(n % tokens), group = per_channel ? 0 : p.how.group_in_32_bits(token);
    __syncwarp();
    for (int c = lane(); c < dim; c += 32) {
      const int channel = per_channel ? c : 0;
      const float scale = *at<float>(p.how.scale, i, group, channel);
      const float zero = p.how.zero_point.data ? *at<float>(p.how.zero_point, i, group, channel) : 0.f;
      row[c] = affine_value(byte_value(p.codes.dtype, *at<uint8_t>(p.codes, i, token, c)), scale, zero, kind);
    }
    if (p.how.hadamard_seed) {
      butterflies(row, dim, p.block);
      for (int c = lane(); c < dim; c += 32) row[c] *= p.norm * sign_of(negative, c);
    }
    if (p.how.mean.data)
      for (int c = lane(); c < dim; c += 32) row[c] += *at<float>(p.how.mean, i, 0, c);
    __syncwarp();
    store_row(row, p.x, i, token);
  }
}

// Normalises and turns the rows of a token with a warp. T: float or double, in which it computes. x and y may be one
// tensor: each lane reads all that it overwrites, after the norm of all rows is known.
template <class T>
__global__ void __launch_bounds__(32 * kWarps, kBlocks) rope_kernel(const __grid_constant__ TurnParams p) {
  const View &x = p.x, &y = p.y;
  const RopeParams& rope = p.rope;
  const int dim = static_cast<int>(x.shape[3]);
  const int heads = heads_of(x);
  const unsigned head_groups = (heads + kHeadsInTurn - 1) / kHeadsInTurn, n = blockIdx.x * kWarps + warp();
  const int token = static_cast<int>(n / head_groups);
  if (token >= x.shape[2]) return;
  const auto copy = [&](const BatchHead& i, int channel, T* number) {
    with_floats(x, [&](auto* data, auto value, auto) {
      *number = static_cast<T>(value(data[offset(x, i, token) + channel * x.stride[3]]));
    });
  };
  const auto store = [&](const BatchHead& i, int channel, T number) {
    with_floats(y,
                [&](auto* data, auto, auto bits) { data[offset(y, i, token) + channel * y.stride[3]] = bits(number); });
  };
  const int first = static_cast<int>(n % head_groups) * kHeadsInTurn, end = min(first + kHeadsInTurn, heads);
  __shared__ T of_warps[kWarps][kHeadsInTurn];
  T* const scales = of_warps[warp()];
  if (p.rms.present) {
    for (int h = first; h < end; ++h) {
      const int64_t row = offset(x, BatchHead(x, h), token);
      with_floats(x, [&](auto* data, auto value, auto) {
        const T scale = inverse_rms_of_row<T>(
            p.rms, dim, [&](int c) { return static_cast<T>(value(data[row + c * x.stride[3]])); });
        if (lane() == 0) scales[h - first] = scale;
      });
    }
    __syncwarp();
  }
  const auto normalise = [&](const BatchHead& i, int h, int channel, T& number) {
    if (p.rms.present) number = number * scales[h - first] * static_cast<T>(norm_weight(p.rms, i, channel));
  };
  for (int pair = lane(); pair < rope.pairs; pair += 32) {
    const CosSin both = cos_sin_at(rope.turns[pair], token + rope.offset);
    const int a = first_of_pair(rope, pair), b = second_of_pair(rope, pair);
    for (int h = first; h < end; ++h) {
      const BatchHead i(x, h);
      T one, other;
      copy(i, a, &one), copy(i, b, &other);
      normalise(i, h, a, one), normalise(i, h, b, other);
      rotate(one, other, static_cast<T>(both.cosine), static_cast<T>(both.sine));
      store(i, a, one), store(i, b, other);
    }
  }
  for (int c = 2 * rope.pairs + lane(); c < dim; c += 32)
    for (int h = first; h < end; ++h) {
      const BatchHead i(x, h);
      T number;
      copy(i, c, &number);
      normalise(i, h, c, number);
      store(i, c, number);
    }
}

}  // namespace

void dequantize(const View& codes, const Quantization& how, const View& x, cudaStream_t stream) {
  if (!x.elements()) return;
  const int64_t dim = x.shape[3], rows = batch_heads(x) * x.shape[2];
  const DequantizeParams p{codes, x, how, static_cast<int>(hadamard_block(dim)), hadamard_norm(dim)};
  launch(dequantize_kernel, blocks_for(rows, kWarps), kWarps, kWarps * row_bytes(dim), stream, p);
}

void turn_rows(const TurnParams& p, cudaStream_t stream) {
  const View& x = p.x;
  const int64_t warps = x.shape[2] * ((batch_heads(x) + kHeadsInTurn - 1) / kHeadsInTurn);
  const int64_t blocks = (warps + kWarps - 1) / kWarps;
  if (x.dtype == OCTET_F64)
    launch(rope_kernel<double>, blocks, kWarps, 0, stream, p);
  else
    launch(rope_kernel<float>, blocks, kWarps, 0, stream, p);
}

}  // namespace octet::cuda::quantizers
