// Converts k and v of a block of keys in shared memory from the caller's numbers to operands of the backward kernel: k
// is centred by its mean, both are multiplied by powers of two, and rounded to the operands' type. Three warps convert
// in place. The exponents are those of the head. For sums in floats they come from a sample, and a block with larger
// numbers takes smaller ones; for sums in integers they come from all keys of the head.
#pragma once
#include <type_traits>

#include "cuda/bwd/exponents.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {

// The conversion by one thread, which has a column of four channels (eight would need too many registers). `kFlagged`:
// flags say which keys a mask tensor leaves to some query.
template <class T, int kKeys, int Dim, bool kFlagged>
struct KeyConverter {
  static constexpr int kThreads = 96, kBarrier = 1;
  static constexpr int kChannels = 4, kColumns = Dim / kChannels, kRowsAtOnce = kThreads / kColumns;
  // The number of rows that a thread reads before it writes the first, as reads are slow while products run. Registers
  // allow no more.
  static constexpr int kBatch = Dim == 64 ? 2 : 3;
  static constexpr float kLargest = 65504.f;  // the largest f16
  static constexpr int kLargestExponent = 15;
  using TileK = SharedTile<T, kKeys, Dim>;

  unsigned thread;
  TileK tile;
  unsigned first_row, rows;  // the rows of keys that some query sees; all others become 0
  bool bf16;
  const float* mean;  // of this thread's channels, or null
  uint32_t seen;      // if kFlagged: a bit for each row of this thread, 0 for one that becomes 0

  static __device__ int channel(int thread) { return thread % kColumns * kChannels; }
  // Returns `seen` of rows [first_row, first_row + rows) by their flags.
  static __device__ uint32_t seen_of(unsigned thread, unsigned first_row, unsigned rows, const unsigned char* flags) {
    static_assert(!kFlagged || kKeys <= 32 * kRowsAtOnce);
    uint32_t seen = 0;
#pragma unroll 4
    for (unsigned i = 0, row = thread / kColumns; row < kKeys; ++i, row += kRowsAtOnce)
      if (row - first_row < rows && flags[row]) seen |= 1u << i;
    return seen;
  }

  struct Fitted {
    int exponent;  // the operand is 2^exponent times the caller's numbers
    int largest;   // these are all below 2^largest; kNone where this was not computed
  };
  static constexpr int kNone = -150;  // `largest` of zeros
  // Converts with 2^exponent if all converted numbers are at most `limit`, else with a smaller exponent that fits. With
  // `may_grow`, the exponent always becomes the largest that fits. `fetch_again` loads the caller's rows again.
  template <class FetchAgain>
  __device__ Fitted fit(int exponent, float limit, bool may_grow, const FetchAgain& fetch_again) const {
    if (convert(exponent, limit) && !may_grow) return {exponent, kNone};
    fetch_again();
    const int largest = exponent_of_largest();
    exponent = may_grow ? kLargestExponent - largest : min(exponent, kLargestExponent - largest);
    exponent = min(exponent, kMaxExponent);
    convert(exponent, limit);
    return {exponent, largest};
  }

  // Converts with an exponent that all numbers fit.
  __device__ void convert(int exponent) const { convert(exponent, INFINITY); }

 private:
  // Converts the tile; returns true if all numbers are at most `limit`. Products may read the tile afterwards.
  __device__ bool convert(int exponent, float limit) const {
    const bool fits = bf16 ? convert_from<Bf16>(exponent, limit) : convert_from<F16>(exponent, limit);
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    return ptx::all_of<kThreads>(fits, kBarrier);
  }
  template <class In>
  __device__ bool convert_from(int exponent, float limit) const {
    constexpr bool kConverts = std::is_same_v<T, F16>;
    if (!kConverts && !kFlagged && rows == kKeys) return true;
    const float scale = power_of_two(exponent);
    float4 offset = mean_or_zeros();
    offset = {-scale * offset.x, -scale * offset.y, -scale * offset.z, -scale * offset.w};
    uint32_t largest = 0;  // magnitudes as bits, whose order is that of the numbers, with NaN last
    uint32_t left = seen;
#pragma unroll 1
    for (unsigned first = thread / kColumns; first < kKeys; first += kBatch * kRowsAtOnce, left >>= kBatch) {
      uint2 pairs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const unsigned row = first + i * kRowsAtOnce;
        pairs[i] = at(row < kKeys ? row : first);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const unsigned row = first + i * kRowsAtOnce;
        if constexpr (kConverts) {
          const float2 low = ptx::unpack<In>(pairs[i].x), high = ptx::unpack<In>(pairs[i].y);
          pairs[i].x = ptx::pack<T>(__fmaf_rn(low.x, scale, offset.x), __fmaf_rn(low.y, scale, offset.y));
          pairs[i].y = ptx::pack<T>(__fmaf_rn(high.x, scale, offset.z), __fmaf_rn(high.y, scale, offset.w));
        }
        if (kFlagged ? !(left >> i & 1) : row - first_row >= rows) pairs[i] = {};
        if constexpr (kConverts)
          largest = __vmaxu2(largest, __vmaxu2(pairs[i].x & 0x7fff7fffu, pairs[i].y & 0x7fff7fffu));
        if (row < kKeys) at(row) = pairs[i];
      }
    }
    const float2 most = ptx::unpack<F16>(largest);
    return most.x <= limit && most.y <= limit;
  }

  // Returns the smallest n with |x| < 2^n for all finite numbers before conversion, or kNone where all are 0.
  __device__ int exponent_of_largest() const {
    const float4 less = mean_or_zeros();
    float most = 0.f;
    uint32_t left = seen;
#pragma unroll 1
    for (unsigned row = thread / kColumns; row < kKeys; row += kRowsAtOnce, left >>= 1) {
      if (kFlagged ? !(left & 1) : row - first_row >= rows) continue;
      const uint2 pairs = at(row);
      const float2 low = unpack(pairs.x), high = unpack(pairs.y);
      for (const float x : {low.x - less.x, low.y - less.y, high.x - less.z, high.y - less.w})
        if (isfinite(x)) most = fmaxf(most, fabsf(x));
    }
    const int of_thread = most > 0.f ? exponent_above(most) : kNone;
    int all = kNone;
    while (!ptx::all_of<kThreads>(of_thread <= all, kBarrier)) ++all;
    return all;
  }

  __device__ uint2& at(unsigned row) const {
    const int column = channel(thread);
    return *reinterpret_cast<uint2*>(tile.at(row % kKeys, column / 8) + column % 8 * sizeof(T));
  }
  __device__ float4 mean_or_zeros() const { return mean ? *reinterpret_cast<const float4*>(mean) : float4{}; }
  __device__ float2 unpack(uint32_t pair) const { return bf16 ? ptx::unpack<Bf16>(pair) : ptx::unpack<F16>(pair); }
};

}  // namespace octet::cuda::sm90
