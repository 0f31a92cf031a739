// Rows in registers, eight neighbouring channels of a row in each of `Lanes` lanes, for tensors whose rows are whole
// words. The operations are those of rows.h in their order, so that the bits are the same. All lanes of a warp call
// these functions together.
#pragma once
#include <algorithm>
#include <type_traits>

#include "cuda/quantizers/rows.h"

namespace octet::cuda::quantizers {

constexpr int kLaneChannels = 8;
using LaneRow = float[kLaneChannels];

// Bytes from a (batch, head) to the next: within a batch, and from its last head. The host computes them, as parameters
// of a kernel take no registers.
struct HeadSteps {
  int64_t head, batch;
  HeadSteps(const View& t, int64_t size)
      : head(t.stride[1] * size), batch((t.stride[0] - (t.shape[1] - 1) * t.stride[1]) * size) {}
};

// Walks from a (batch, head) to the next, at this lane's part of the row of one token.
template <class T>
class HeadWalk {
 public:
  // `size`: of an element.
  __device__ HeadWalk(const View& t, const HeadSteps& steps, int size, const BatchHead& i, int token, int channel)
      : at_(static_cast<char*>(t.data) +
            (i.batch * t.stride[0] + i.head * t.stride[1] + token * t.stride[2] + channel * t.stride[3]) * size),
        steps_(steps) {}
  __device__ T* at() const { return reinterpret_cast<T*>(at_); }
  // `last`: this was the last head of its batch.
  __device__ void next(bool last) { at_ += last ? steps_.batch : steps_.head; }

 private:
  char* at_;
  const HeadSteps& steps_;
};
__host__ __device__ inline int float_bytes(octet_dtype dtype) { return dtype == OCTET_F32 ? 4 : 2; }

// A part as it lies in memory.
struct LaneWords {
  uint4 x[2];  // numbers of 16 bits are in the first
};
__device__ inline LaneWords load_words(octet_dtype dtype, const uint4* from) {
  LaneWords words{from[0], {}};
  if (dtype == OCTET_F32) words.x[1] = from[1];
  return words;
}
__device__ inline void to_floats(octet_dtype dtype, const LaneWords& words, LaneRow& row) {
  const auto convert = [&](const auto* elements, auto value) {
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) row[c] = value(elements[c]);
  };
  const auto* const of_16_bits = reinterpret_cast<const uint16_t*>(words.x);
  if (dtype == OCTET_F32)
    convert(reinterpret_cast<const float*>(words.x), [](float x) { return x; });
  else if (dtype == OCTET_F16)
    convert(of_16_bits, f16_value);
  else
    convert(of_16_bits, bf16_value);
}
__device__ inline void store_row(octet_dtype dtype, const LaneRow& row, uint4* to) {
  const auto convert = [&](auto* elements, auto bits) {
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) elements[c] = bits(row[c]);
  };
  LaneWords words;
  auto* const of_16_bits = reinterpret_cast<uint16_t*>(words.x);
  if (dtype == OCTET_F32)
    convert(reinterpret_cast<float*>(words.x), [](float x) { return x; });
  else if (dtype == OCTET_F16)
    convert(of_16_bits, f16_bits);
  else
    convert(of_16_bits, bf16_bits);
  to[0] = words.x[0];
  if (dtype == OCTET_F32) to[1] = words.x[1];
}

// `mean`: of this lane's first channel.
__device__ inline void subtract(const float* mean, int64_t stride, LaneRow& row) {
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) row[c] -= mean[c * stride];
}

// Turns this lane's channels. Where pairs are halves of a row, the other number of each pair is in one other lane.
template <int Lanes>
class LaneTurns {
 public:
  __device__ explicit LaneTurns(const RopeParams& rope) : rope_(rope) {
    const int lane = threadIdx.x % Lanes, lanes = rope.pairs / kLaneChannels;
    partner_ = lane;
    if (rope.style == OCTET_ROPE_HALF && lane < 2 * lanes) partner_ = lane < lanes ? lane + lanes : lane - lanes;
    turns_ = rope.style != OCTET_ROPE_NONE && lane * kLaneChannels < 2 * rope.pairs;
  }

  // Finds the cosines and sines of a token. Of pairs in two lanes, each lane computes a half.
  __device__ void seek(int token) {
    constexpr int kOwn = kLaneChannels / 2;
    const int lane = threadIdx.x % Lanes;
    const bool half = rope_.style == OCTET_ROPE_HALF, first = lane <= partner_;
    const int pair = half ? min(lane, partner_) * kLaneChannels + (first ? 0 : kOwn) : lane * kOwn;
    float2 own[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const CosSin both = turns_ ? cos_sin_at(rope_.turns[pair + i], token + rope_.offset) : CosSin{1.0, 0.0};
      own[i] = {static_cast<float>(both.cosine), static_cast<float>(both.sine)};
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float2 other = {__shfl_sync(~0u, own[i].x, partner_, Lanes), __shfl_sync(~0u, own[i].y, partner_, Lanes)};
      // The second half of a row takes the sine as it is, the first its negative: x' = x cos - y sin, y' = y cos + x
      // sin.
      const float sign = half && first ? -1.f : 1.f;
      const float2 low = first ? own[i] : other, high = first ? other : own[i];
      of_[i] = {low.x, low.y * sign}, of_[kOwn + i] = {high.x, high.y * sign};
    }
  }

  __device__ void turn(LaneRow& row) const {
    if (rope_.style == OCTET_ROPE_HALF) {
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) {
        const float other = __shfl_sync(~0u, row[c], partner_, Lanes);
        const double turned = static_cast<double>(row[c]) * of_[c].x + static_cast<double>(other) * of_[c].y;
        if (turns_) row[c] = static_cast<float>(turned);
      }
    } else if (turns_) {
#pragma unroll
      for (int i = 0; i < kLaneChannels / 2; ++i) rotate(row[2 * i], row[2 * i + 1], of_[i].x, of_[i].y);
    }
  }

 private:
  const RopeParams& rope_;
  int partner_;
  bool turns_;  // RoPE turns this lane's channels
  float2 of_[kLaneChannels];
};

// Rotates rows by signs and butterflies (core/quant/hadamard.h).
template <int Lanes>
class LaneRotation {
 public:
  __device__ explicit LaneRotation(const RowParams& p) : p_(p) {
    const int first = threadIdx.x % Lanes * kLaneChannels;
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c)
      if (p.seed) negative_ |= (hadamard_sign(p.seed, first + c) < 0.f) << c;
  }

  __device__ void rotate(LaneRow& row) const {
    if (!p_.seed) return;
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) row[c] *= negative_ >> c & 1 ? -1.f : 1.f;
#pragma unroll
    for (int half = 1; half < kLaneChannels; half *= 2)
#pragma unroll
      for (int i = 0; i < kLaneChannels / 2; ++i) {
        const int c = i / half * 2 * half + i % half;
        const float a = row[c], b = row[c + half];
        row[c] = a + b, row[c + half] = a - b;
      }
    for (int distance = 1; distance < p_.block / kLaneChannels; distance *= 2)
#pragma unroll
      for (float& x : row) {
        const float other = __shfl_xor_sync(~0u, x, distance);
        x = threadIdx.x & distance ? other - x : x + other;
      }
#pragma unroll
    for (float& x : row) x *= p_.norm;
  }

 private:
  const RowParams& p_;
  uint32_t negative_ = 0;  // a bit for each channel
};

// Returns whether the rows of a tensor are words of `bytes` bytes for every lane.
inline bool has_whole_words(const View& t, int64_t bytes) {
  const int64_t size = bytes / kLaneChannels;
  const int64_t word = std::min<int64_t>(bytes, 16);
  if (!t.shape[3] || t.shape[3] % kLaneChannels || t.shape[3] > 32 * kLaneChannels || t.stride[3] != 1 ||
      reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(word))
    return false;
  return std::all_of(t.stride, t.stride + 3, [&](int64_t stride) { return stride * size % word == 0; });
}
inline bool has_float_rows(const View& t) {
  if (t.dtype == OCTET_F32) return has_whole_words(t, kLaneChannels * 4);
  return (t.dtype == OCTET_F16 || t.dtype == OCTET_BF16) && has_whole_words(t, kLaneChannels * 2);
}
// Returns whether both tensors of a quantization are rows for lanes. Symmetric u8 has negative numbers to look for.
inline bool fits_lanes(const QuantizeParams& p) {
  return has_float_rows(p.rows.x) && has_whole_words(p.codes, kLaneChannels) &&
         !(p.how.zero_point_kind == OCTET_SYMMETRIC && p.codes.dtype == OCTET_U8);
}

// Calls f with the lanes of a row, a constant.
template <class F>
void with_lanes(const View& t, const F& f) {
  if (t.shape[3] <= 8 * kLaneChannels) return f(std::integral_constant<int, 8>{});
  if (t.shape[3] <= 16 * kLaneChannels) return f(std::integral_constant<int, 16>{});
  f(std::integral_constant<int, 32>{});
}

}  // namespace octet::cuda::quantizers
