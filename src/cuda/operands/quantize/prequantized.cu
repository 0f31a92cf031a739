#include "core/quant/hadamard.h"
#include "cuda/fragment/accumulator.h"
#include "cuda/host/launch.h"
#include "cuda/operands/quantize/key_tiles.h"
#include "cuda/operands/quantize/parameters.h"
#include "cuda/operands/quantize/prequantized.h"
#include "cuda/operands/quantize/value_scales.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// A token's scale and zero point among signed codes.
struct TokenScale {
  float scale;
  int zero;
  bool keeps;  // false: its codes are 0, as with a scale of 0
};
__device__ TokenScale scale_of_token(const View& codes, const Quantization& how, const Index4& at) {
  const int group = how.group_in_32_bits(static_cast<int>(at.token));
  const float scale = parameter_of(how.scale, at.batch, at.head, group, 0);
  const float zero = (how.zero_point.data ? parameter_of(how.zero_point, at.batch, at.head, group, 0) : 0.f) -
                     (codes.dtype == OCTET_U8 ? 128.f : 0.f);
  const bool is_code = zero >= -128.f && zero <= 127.f && rintf(zero) == zero;
  return {is_code ? scale : NAN, is_code ? static_cast<int>(zero) : 0, scale != 0.f};
}

// Eight codes of a token as signed bytes.
__device__ uint2 read_codes(const View& codes, const Index4& at) {
  const auto* const from = static_cast<const unsigned char*>(codes.data) + at.batch * codes.stride[0] +
                           at.head * codes.stride[1] + at.token * codes.stride[2] + at.channel * codes.stride[3];
  uint2 word{};
  if (codes.stride[3] == 1 && reinterpret_cast<uintptr_t>(from) % sizeof(uint2) == 0) {
    word = *reinterpret_cast<const uint2*>(from);
  } else {
    for (int c = 0; c < 4; ++c)
      word.x |= from[c * codes.stride[3]] << 8 * c, word.y |= from[(c + 4) * codes.stride[3]] << 8 * c;
  }
  const uint32_t flip = codes.dtype == OCTET_U8 ? 0x80808080u : 0u;
  return {word.x ^ flip, word.y ^ flip};
}

__global__ void __launch_bounds__(kThreads) means_kernel(const __grid_constant__ PrequantizedMeans a) {
  constexpr int kMostDim = 256;
  __shared__ float x[kMostDim];
  const int sequence = blockIdx.x / a.heads, head = blockIdx.x % a.heads, c = threadIdx.x;
  const int dim = static_cast<int>(a.from.shape[3]);
  const bool present = a.from.data && c < dim;
  x[c] = present ? parameter_of(a.from, a.packed ? 0 : sequence, head, 0, c) : 0.f;
  if (a.seed) {
    const int block = dim & -dim;
    x[c] *= hadamard_sign(a.seed, c);
    for (int half = 1; half < block; half *= 2) {
      __syncthreads();
      const float own = x[c], other = x[c ^ half];
      __syncthreads();
      x[c] = c & half ? other - own : own + other;
    }
    x[c] *= 1.f / sqrtf(static_cast<float>(block));
  }
  if (c < a.dim) a.to[static_cast<int64_t>(blockIdx.x) * a.dim + c] = present ? x[c] : 0.f;
}

// A group of lanes has a row.
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ PrequantizedRows a) {
  const int lanes = a.dim / kVec8, lane = threadIdx.x % lanes, rows_at_once = kThreads / lanes;
  const int heads = static_cast<int>(a.from.shape[1]), dim = static_cast<int>(a.from.shape[3]);
  const int64_t rows = a.from.shape[0] * heads * a.rows;
  for (int64_t first = int64_t{blockIdx.x} * rows_at_once; first < rows; first += int64_t{gridDim.x} * rows_at_once) {
    const int64_t row = first + threadIdx.x / lanes;
    const int batch_head = static_cast<int>(row / a.rows);
    Index4 at{batch_head / heads, batch_head % heads, row - int64_t{batch_head} * a.rows, lane * kVec8};
    bool present = row < rows;
    if (present && a.keys.tile) {
      const TileOfKeys tile = tile_of_keys(a.keys, static_cast<int>(at.token) / a.keys.tile);
      const int i = static_cast<int>(at.token) % a.keys.tile;
      present = tile.sees(i), at.token = tile.first + i;
    }
    const TokenScale token = present ? scale_of_token(a.from, a.how, at) : TokenScale{0.f, 0, false};
    uint2 word{};
    if (token.keeps && at.channel < dim) word = read_codes(a.from, at);
    const auto* const codes = reinterpret_cast<const signed char*>(&word);
    int sum = 0;
    float product = 0.f;
    for (int c = 0; c < kVec8; ++c) {
      sum += codes[c];
      if (a.mean_logit && present) {
        const int64_t kv = batch_head / (heads / a.kv_heads);
        const float number = at.channel < dim ? static_cast<float>(codes[c] - token.zero) : 0.f;
        product = fmaf(number, a.key_mean[kv * a.dim + at.channel + c], product);
      }
    }
    for (int offset = lanes / 2; offset; offset /= 2) {
      sum += __shfl_xor_sync(~0u, sum, offset);
      product += __shfl_xor_sync(~0u, product, offset);
    }
    if (row >= rows) continue;
    *reinterpret_cast<uint2*>(a.to + row * a.dim + at.channel) = word;
    if (lane) continue;
    a.scale[row] = token.scale;
    const int zero = token.keeps ? token.zero : 0;
    if (a.zero_point) a.zero_point[row] = ZeroPoint::of(zero, a.keys.tile ? sum : sum - zero * dim);
    if (a.mean_logit) a.mean_logit[row] = product * token.scale;
  }
}

// A thread block has a tile of a (batch, head).
__global__ void __launch_bounds__(kThreads) values_kernel(const __grid_constant__ PrequantizedValues a) {
  constexpr int kGroup = 16;
  extern __shared__ uint4 memory[];
  const int keys = a.keys.tile, heads = static_cast<int>(a.from.shape[1]), dim = static_cast<int>(a.from.shape[3]);
  const int row_bytes = a.dim + 4;  // so that threads read from different banks
  auto* const scales = reinterpret_cast<float*>(memory);
  auto* const zeros = reinterpret_cast<signed char*>(scales + keys);
  auto* const codes = zeros + keys;
  const int tiles = a.keys.count(), batch_head = static_cast<int>(blockIdx.x) / tiles,
            number = static_cast<int>(blockIdx.x) % tiles;
  const TileOfKeys tile = tile_of_keys(a.keys, number);
  Index4 at{batch_head / heads, batch_head % heads, 0, 0};
  for (int i = threadIdx.x; i < keys; i += kThreads) {
    at.token = tile.first + i;
    const TokenScale token = tile.sees(i) ? scale_of_token(a.from, a.how, at) : TokenScale{0.f, 0, false};
    scales[i] = token.scale, zeros[i] = static_cast<signed char>(token.keeps ? token.zero : 0);
  }
  __syncthreads();
  const int vecs = a.dim / kVec8;
  for (int item = threadIdx.x; item < keys * vecs; item += kThreads) {
    const int i = item / vecs;
    at.token = tile.first + i, at.channel = item % vecs * kVec8;
    uint2 word{};
    if (scales[i] != 0.f && at.channel < dim) word = read_codes(a.from, at);
    auto* const to = reinterpret_cast<uint32_t*>(codes + i * row_bytes + at.channel);
    to[0] = word.x, to[1] = word.y;
  }
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * keys;
  write_value_scales(scales, keys, a.scale + 2 * first, kThreads);
  const auto permuted = [](int i) { return i / kGroup * kGroup + key_permutation(i % kGroup); };
  for (int i = threadIdx.x; a.zero_point && i < keys; i += kThreads) a.zero_point[first + i] = zeros[permuted(i)];
  const int64_t length = int64_t{tiles} * keys;
  signed char* const to = a.to + int64_t{batch_head} * a.dim * length + int64_t{number} * keys;
  const int groups = keys / kGroup;
  for (int item = threadIdx.x; item < groups * a.dim; item += kThreads) {
    const int group = item % groups, channel = item / groups;
    union {
      uint4 word;
      signed char bytes[kGroup];
    };
#pragma unroll
    for (int i = 0; i < kGroup; ++i) bytes[i] = codes[(group * kGroup + key_permutation(i)) * row_bytes + channel];
    *reinterpret_cast<uint4*>(to + channel * length + group * kGroup) = word;
  }
}

}  // namespace

void copy_means(const PrequantizedMeans& means, cudaStream_t stream) {
  if (!means.to || !means.sequences) return;
  means_kernel<<<static_cast<unsigned>(means.sequences * means.heads), kThreads, 0, stream>>>(means);
  check(cudaGetLastError(), "means_kernel");
}

void copy_rows(const PrequantizedRows& rows, cudaStream_t stream) {
  const int64_t count = rows.from.shape[0] * rows.from.shape[1] * rows.rows;
  if (!count) return;
  rows_kernel<<<blocks_for(count, kThreads * kVec8 / rows.dim), kThreads, 0, stream>>>(rows);
  check(cudaGetLastError(), "rows_kernel");
}

void copy_values(const PrequantizedValues& values, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(values.keys.count() * values.from.shape[0] * values.from.shape[1]);
  if (!grid) return;
  const int bytes = values.keys.tile * static_cast<int>(values.dim + 4 + sizeof(float) + 1);
  values_kernel<<<grid, kThreads, bytes, stream>>>(values);
  check(cudaGetLastError(), "values_kernel");
}

}  // namespace octet::cuda
