// Rows in registers, eight channels of a row in each of `Lanes` lanes, for tensors whose rows are whole words. The
// operations are those of rows.h in their order, so that the bits are the same. All lanes of a warp call these
// functions together.
#pragma once
#include <algorithm>
#include <bit>
#include <type_traits>

#include "cuda/quantizers/rows.h"

namespace octet::cuda::quantizers {

constexpr int kLaneChannels = 8;
using LaneRow = float[kLaneChannels];

// The channels of this lane: four from `first` on, and four from `first + apart` on. They are neighbours but where RoPE
// turns halves of a row and `Halves` puts both numbers of a pair into one lane.
template <int Lanes, bool Halves = false>
struct LaneChannels {
  static constexpr int kHalf = kLaneChannels / 2;
  int first, apart;
  __device__ explicit LaneChannels(int pairs) : first(threadIdx.x % Lanes * kLaneChannels), apart(kHalf) {
    if (Halves && first < 2 * pairs) first /= 2, apart = pairs;
  }
  __device__ int of(int c) const { return first + c % kHalf + (c < kHalf ? 0 : apart); }
};

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

// The numbers of a lane as they lie in memory.
struct LaneWords {
  uint4 x[2];  // numbers of 16 bits are in the first
};
template <int Lanes, bool Halves>
__device__ LaneWords load_words(octet_dtype dtype, const LaneChannels<Lanes, Halves>& channels, const char* from) {
  LaneWords words{};
  if (dtype == OCTET_F32) {
    words.x[0] = *reinterpret_cast<const uint4*>(from);
    words.x[1] = *reinterpret_cast<const uint4*>(from + 4 * channels.apart);
  } else if constexpr (Halves) {
    const uint2 low = *reinterpret_cast<const uint2*>(from),
                high = *reinterpret_cast<const uint2*>(from + 2 * channels.apart);
    words.x[0] = {low.x, low.y, high.x, high.y};
  } else {
    words.x[0] = *reinterpret_cast<const uint4*>(from);
  }
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
template <int Lanes, bool Halves>
__device__ void store_row(octet_dtype dtype, const LaneChannels<Lanes, Halves>& channels, const LaneRow& row,
                          char* to) {
  const auto convert = [&](auto* elements, auto bits) {
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) elements[c] = bits(row[c]);
  };
  LaneWords words;
  auto* const of_16_bits = reinterpret_cast<uint16_t*>(words.x);
  if (dtype == OCTET_F32) {
    convert(reinterpret_cast<float*>(words.x), [](float x) { return x; });
    *reinterpret_cast<uint4*>(to) = words.x[0], *reinterpret_cast<uint4*>(to + 4 * channels.apart) = words.x[1];
    return;
  }
  if (dtype == OCTET_F16)
    convert(of_16_bits, f16_bits);
  else
    convert(of_16_bits, bf16_bits);
  const uint4 x = words.x[0];
  if constexpr (Halves)
    *reinterpret_cast<uint2*>(to) = {x.x, x.y}, *reinterpret_cast<uint2*>(to + 2 * channels.apart) = {x.z, x.w};
  else
    *reinterpret_cast<uint4*>(to) = x;
}

// `mean`: of this lane's first channel.
template <int Lanes, bool Halves>
__device__ void subtract(const LaneChannels<Lanes, Halves>& channels, const float* mean, int64_t stride, LaneRow& row) {
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) row[c] -= mean[(channels.of(c) - channels.first) * stride];
}

// Where the two numbers of a pair of RoPE lie.
enum class Pairs {
  none,        // there is no RoPE
  neighbours,  // interleaved, in the same lane
  halves,      // halves of a row, in the same lane
  across,      // halves of a row, in two lanes
};
constexpr bool in_a_lane(Pairs pairs) { return pairs == Pairs::neighbours || pairs == Pairs::halves; }

template <int Lanes>
constexpr int kLanePairs = Lanes* kLaneChannels / 2;  // the most pairs of a row

// Finds the cosines and sines of `Tokens` neighbouring tokens, with all threads of a block. `sines`: shared memory for
// kLanePairs of each.
template <int Lanes, int Tokens>
__device__ void find_sines(const RopeParams& rope, int first_token, float2* sines) {
  constexpr int kPairs = kLanePairs<Lanes>;
  for (int n = threadIdx.x; n < Tokens * kPairs; n += blockDim.x) {
    const int pair = n % kPairs;
    if (pair >= rope.pairs) continue;
    const CosSin both = cos_sin_at(rope.turns[pair], first_token + n / kPairs + rope.offset);
    sines[n] = {static_cast<float>(both.cosine), static_cast<float>(both.sine)};
  }
  __syncthreads();
}

// Turns the channels of a lane. Cosines and sines are kept as doubles where registers allow: conversions take longest.
// Products of two floats are exact as doubles, so that a fused product and sum rounds as core/quant/rope.h does.
template <int Lanes, Pairs Where>
class LaneTurns {
 public:
  __device__ explicit LaneTurns(const RopeParams& rope)
      : rope_(rope), turns_(Where != Pairs::none && lane() * kLaneChannels < 2 * rope.pairs) {}

  // Takes the cosines and sines of a token.
  __device__ void load(const float2* sines) {
    if constexpr (in_a_lane(Where)) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float2 both = turns_ ? sines[lane() * kOwn + i] : float2{1.f, 0.f};
        cosines_[i] = both.x, sines_[i] = both.y;
      }
    } else if constexpr (Where == Pairs::across) {
      // The second half of a row takes the sine as it is, the first its negative: x' = x cos - y sin, y' = y cos + x
      // sin.
      const float sign = lane() <= partner() ? -1.f : 1.f;
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) {
        const float2 both = turns_ ? sines[min(lane(), partner()) * kLaneChannels + c] : float2{1.f, 0.f};
        across_[c] = {both.x, both.y * sign};
      }
    }
  }

  __device__ void turn(LaneRow& row) const {
    if constexpr (in_a_lane(Where)) {
      if (!turns_) return;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float &first = row[Where == Pairs::halves ? i : 2 * i],
              &second = row[Where == Pairs::halves ? i + kOwn : 2 * i + 1];
        const double x = first, y = second;
        first = static_cast<float>(__fma_rn(-y, sines_[i], x * cosines_[i]));
        second = static_cast<float>(__fma_rn(y, cosines_[i], x * sines_[i]));
      }
    } else if constexpr (Where == Pairs::across) {
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) {
        const float other = __shfl_sync(~0u, row[c], partner(), Lanes);
        const double own = static_cast<double>(row[c]) * across_[c].x;
        const double turned = __fma_rn(static_cast<double>(other), static_cast<double>(across_[c].y), own);
        if (turns_) row[c] = static_cast<float>(turned);
      }
    }
  }

 private:
  static constexpr int kOwn = kLaneChannels / 2;

  __device__ static int lane() { return threadIdx.x % Lanes; }
  // The lane with the other numbers of this lane's pairs.
  __device__ int partner() const {
    const int lanes = rope_.pairs / kLaneChannels;
    return !turns_ ? lane() : lane() < lanes ? lane() + lanes : lane() - lanes;
  }

  const RopeParams& rope_;
  bool turns_;  // RoPE turns this lane's channels
  double cosines_[kOwn], sines_[kOwn];
  float2 across_[kLaneChannels];
};

// Several rows of the same lanes. A root or a quotient takes a lane as long as twenty sums, so lanes share the rows:
// each of `Rows` parts of the lanes computes for one of them, and tells the others.
//
// Combines a value of each row over all lanes. The first steps also divide the rows among the lanes: lanes exchange
// those that they leave to each other. The pairs that are combined are those of a butterfly from half the lanes on.
template <int Lanes, int Rows, class T, class Combine>
__device__ T reduce_rows(T (&values)[Rows], const Combine& combine) {
  static_assert(Rows <= Lanes && std::has_single_bit(static_cast<unsigned>(Rows)));
  int distance = Lanes / 2;
#pragma unroll
  for (int kept = Rows / 2; kept; kept /= 2, distance /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int r = 0; r < kept; ++r) {
      const T left = upper ? values[r] : values[r + kept], own = upper ? values[r + kept] : values[r];
      values[r] = combine(own, __shfl_xor_sync(~0u, left, distance));
    }
  }
  T value = values[0];
#pragma unroll
  for (; distance; distance /= 2) value = combine(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}

// A value of each row. A lane has that of the row which reduce_rows left it, and gets others from their lanes.
template <int Lanes, int Rows, class T>
struct OfRows {
  T own;
  __device__ T of(int row) const { return Rows == 1 ? own : __shfl_sync(~0u, own, row * (Lanes / Rows), Lanes); }
};

// Normalises rows (core/quant/norm.h), whose channels all lanes have. With `Halves` RoPE turns all of them.
template <int Lanes, bool Halves>
class LaneNorm {
 public:
  __device__ LaneNorm(const NormParams& p, int dim) : p_(p), dim_(dim) {
#pragma unroll
    for (float& weight : weights_) weight = 1.f;
  }

  // Takes the weights of a head, which begin at this lane's first channel.
  __device__ void load(const LaneChannels<Lanes, Halves>& channels, const char* weights) {
    if (channels.first < dim_) to_floats(p_.weight.dtype, load_words(p_.weight.dtype, channels, weights), weights_);
  }

  // Finds what rows are multiplied by before the weights.
  template <int Rows>
  __device__ OfRows<Lanes, Rows, float> factors(const LaneRow (&rows)[Rows]) const {
    // Two blocks of a lane are those of two neighbours, or of both halves of the row.
    float low[Rows], high[Rows];
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      low[r] = sum_of_block<float>([&](int i) { return rows[r][i]; });
      high[r] = sum_of_block<float>([&](int i) { return rows[r][kNormBlock + i]; });
      if constexpr (Halves) low[r] += high[r];
    }
    const auto sum = [](float a, float b) { return a + b; };
    float of_row = reduce_rows<Lanes>(low, sum);
    if constexpr (!Halves) of_row += reduce_rows<Lanes>(high, sum);
    return {inverse_rms(of_row, dim_, p_.eps, [](float x) { return sqrtf(x); })};
  }

  __device__ void normalise(LaneRow& row, float factor) const {
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) row[c] = row[c] * factor * weights_[c];
  }

 private:
  static_assert(kLaneChannels == 2 * kNormBlock);
  const NormParams& p_;
  int dim_;
  LaneRow weights_;
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
