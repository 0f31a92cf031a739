// Rows of a tensor in the shared memory of a warp, which loads, normalises, turns, smooths and rotates them by the
// operations of the CPU (core/quant) in their order. This code is compiled without contraction of products and sums.
#pragma once
#include "cuda/quantizers/params.h"

namespace octet::cuda::quantizers {

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }

// Rows begin at multiples of 16 bytes.
__host__ __device__ constexpr int row_stride(int dim) { return (dim + 3) / 4 * 4; }

// Calls f with the first address and the conversion of the element type of a tensor of floats.
template <class F>
__device__ void with_floats(const View& t, const F& f) {
  switch (t.dtype) {
    case OCTET_F64:
      return f(
          static_cast<double*>(t.data), [](double x) { return x; }, [](double x) { return x; });
    case OCTET_F32:
      return f(
          static_cast<float*>(t.data), [](float x) { return x; }, [](double x) { return static_cast<float>(x); });
    case OCTET_F16:
      return f(
          static_cast<uint16_t*>(t.data), [](uint16_t x) { return f16_value(x); },
          [](double x) { return f16_bits(static_cast<float>(x)); });
    case OCTET_BF16:
      return f(
          static_cast<uint16_t*>(t.data), [](uint16_t x) { return bf16_value(x); },
          [](double x) { return bf16_bits(static_cast<float>(x)); });
    default:
      return f(
          static_cast<uint8_t*>(t.data), [](uint8_t x) { return e4m3_value(x); },
          [](double x) { return e4m3_bits(static_cast<float>(x)); });
  }
}

__device__ inline int64_t offset(const View& t, const BatchHead& i, int token) {
  return i.batch * t.stride[0] + i.head * t.stride[1] + token * t.stride[2];
}

// Loads a row with words of 16 bytes where its memory allows.
__device__ inline void load_row(const View& t, const BatchHead& i, int token, float* row) {
  const int dim = static_cast<int>(t.shape[3]);
  with_floats(t, [&](auto* data, auto value, auto) {
    const auto* from = data + offset(t, i, token);
    using Element = std::remove_pointer_t<decltype(data)>;
    constexpr int kVec = 16 / sizeof(Element);
    int first = 0;
    if (t.stride[3] == 1 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      for (int v = lane(); v < dim / kVec; v += 32) {
        union {
          uint4 word;
          Element elements[kVec];
        };
        word = reinterpret_cast<const uint4*>(from)[v];
#pragma unroll
        for (int e = 0; e < kVec; ++e) row[v * kVec + e] = static_cast<float>(value(elements[e]));
      }
      first = dim / kVec * kVec;
    }
    for (int c = first + lane(); c < dim; c += 32) row[c] = static_cast<float>(value(from[c * t.stride[3]]));
  });
}

// Stores a row likewise, rounded to the type of its elements.
__device__ inline void store_row(const float* row, const View& t, const BatchHead& i, int token) {
  const int dim = static_cast<int>(t.shape[3]);
  with_floats(t, [&](auto* data, auto, auto bits) {
    auto* to = data + offset(t, i, token);
    using Element = std::remove_pointer_t<decltype(data)>;
    constexpr int kVec = 16 / sizeof(Element);
    int first = 0;
    if (t.stride[3] == 1 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
      for (int v = lane(); v < dim / kVec; v += 32) {
        union {
          uint4 word;
          Element elements[kVec];
        };
#pragma unroll
        for (int e = 0; e < kVec; ++e) elements[e] = bits(row[v * kVec + e]);
        reinterpret_cast<uint4*>(to)[v] = word;
      }
      first = dim / kVec * kVec;
    }
    for (int c = first + lane(); c < dim; c += 32) to[c * t.stride[3]] = bits(row[c]);
  });
}

// x <- H x, un-normalised, for each block of a row (core/quant/hadamard.h).
__device__ inline void butterflies(float* row, int dim, int block) {
  for (int half = 1; half < block; half *= 2) {
    __syncwarp();
    for (int i = lane(); i < dim / 2; i += 32) {
      const int c = i / half * 2 * half + i % half;
      const float a = row[c], b = row[c + half];
      row[c] = a + b, row[c + half] = a - b;
    }
  }
  __syncwarp();
}

// The signs of the channels lane + 32 i: a bit i is set for -1.
__device__ inline uint32_t negative_signs(uint64_t seed, int dim) {
  uint32_t negative = 0;
  for (int c = lane(); c < dim; c += 32) negative |= static_cast<uint32_t>(hadamard_sign(seed, c) < 0.f) << c / 32;
  return negative;
}
__device__ inline float sign_of(uint32_t negative, int channel) { return negative >> channel / 32 & 1 ? -1.f : 1.f; }

// The channels of a pair of RoPE.
__device__ inline int first_of_pair(const RopeParams& r, int pair) {
  return r.style == OCTET_ROPE_HALF ? pair : 2 * pair;
}
__device__ inline int second_of_pair(const RopeParams& r, int pair) {
  return r.style == OCTET_ROPE_HALF ? pair + r.pairs : 2 * pair + 1;
}

// Returns, in all lanes, the factor by which an RMS norm multiplies a row before its weights (core/quant/norm.h).
// channel(c): the number of channel c.
template <class T, class Channel>
__device__ T inverse_rms_of_row(const NormParams& p, int dim, const Channel& channel) {
  // Each lane adds its blocks as halving them does: of eight block i + 4 to i, then i + 2, then i + 1.
  static_assert(kMaxDim == 8 * 32 * kNormBlock);
  T sum = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    T part = 0;
#pragma unroll 1
    for (int j = i; j < 4; j += 2) {
      const auto block = [&](int s) {
        const int first = (lane() + 32 * s) * kNormBlock;
        return first < dim ? sum_of_block<T>([&](int c) { return first + c < dim ? channel(first + c) : T{0}; }) : T{0};
      };
      part += block(j) + block(j + 4);
    }
    sum += part;
  }
#pragma unroll
  for (int half = 16; half; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  return inverse_rms(sum, dim, p.eps, [](T x) { return sqrt(x); });
}
// The weight of a channel.
__device__ inline float norm_weight(const NormParams& p, const BatchHead& i, int channel) {
  float weight = 1.f;
  if (p.weight.data)
    with_floats(p.weight, [&](auto* data, auto value, auto) {
      weight = static_cast<float>(value(data[offset(p.weight, i, 0) + channel * p.weight.stride[3]]));
    });
  return weight;
}

// Makes rows, one at a time, with all lanes of a warp.
class Rows {
 public:
  // `turns`: shared memory for a pair of numbers of each pair of RoPE.
  __device__ Rows(const RowParams& p, float2* turns)
      : p_(p), turns_(turns), negative_(p.seed ? negative_signs(p.seed, static_cast<int>(p.x.shape[3])) : 0) {}

  // Loads the row of a token, normalises and turns it.
  __device__ __forceinline__ void embed(const BatchHead& i, int token, float* row) {
    __syncwarp();
    load_row(p_.x, i, token, row);
    if (p_.rms.present) {
      const int dim = static_cast<int>(p_.x.shape[3]);
      __syncwarp();
      const auto scale = inverse_rms_of_row<float>(p_.rms, dim, [&](int c) { return row[c]; });
      for (int c = lane(); c < dim; c += 32) row[c] = row[c] * scale * norm_weight(p_.rms, i, c);
    }
    if (p_.rope.style != OCTET_ROPE_NONE) {
      seek(token);
      __syncwarp();
      for (int pair = lane(); pair < p_.rope.pairs; pair += 32)
        rotate(row[first_of_pair(p_.rope, pair)], row[second_of_pair(p_.rope, pair)], turns_[pair].x, turns_[pair].y);
    }
    __syncwarp();
  }

  // The same, smoothed and rotated.
  __device__ __forceinline__ void prepare(const BatchHead& i, int token, float* row) {
    embed(i, token, row);
    const int dim = static_cast<int>(p_.x.shape[3]);
    if (p_.mean.data)
      for (int c = lane(); c < dim; c += 32) row[c] -= *at<float>(p_.mean, i, 0, c);
    if (p_.seed) {
      for (int c = lane(); c < dim; c += 32) row[c] *= sign_of(negative_, c);
      butterflies(row, dim, p_.block);
      for (int c = lane(); c < dim; c += 32) row[c] *= p_.norm;
    }
    __syncwarp();
  }

 private:
  // Cosines and sines of a token, unless they are those of the row before.
  __device__ void seek(int token) {
    if (token == token_) return;
    token_ = token;
    for (int pair = lane(); pair < p_.rope.pairs; pair += 32) {
      const CosSin both = cos_sin_at(p_.rope.turns[pair], token + p_.rope.offset);
      turns_[pair] = {static_cast<float>(both.cosine), static_cast<float>(both.sine)};
    }
  }

  const RowParams& p_;
  float2* turns_;
  int token_ = -1;
  uint32_t negative_;
};

// Adds a double of each lane, as octet::sum_over_channels does.
__device__ inline double sum_of_lanes(double x) {
  for (int half = kSumLanes / 2; half; half /= 2) x += __shfl_xor_sync(~0u, x, half);
  return x;
}

}  // namespace octet::cuda::quantizers
