// Reads rows that are quantized, centres and rotates them, and finds their scales. operands/quantize/rows.h has the
// order of operations, and how lanes share rows.
#pragma once
#include <climits>
#include <type_traits>

#include "cuda/operands/quantize/params.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

constexpr int kRowTile = 16;    // rows
constexpr int kGroupTile = 64;  // keys among which thread groups are formed
constexpr int kGroups = kGroupTile / kRowTile;

// Rows [first, end) in memory that a thread block quantizes; each of its warps has one row tile of every 64 rows. With
// groups, a row tile is a thread group of keys: those with equal (key mod 8) div 2.
struct RowTiles {
  static constexpr int kRows = kQuantizeWarps * kRowTile;  // from one row tile of a warp to its next
  static_assert(kRows == kGroupTile);

  Head rows;
  int first, end;
  bool groups;

  // Returns row j of this warp's first row tile, relative to `first`. A row tile consists of pairs of neighbouring
  // rows, `pair()` rows apart.
  __device__ int pair() const { return groups ? 8 : 2; }
  __device__ int row(int j) const { return (groups ? 2 : kRowTile) * (threadIdx.x / 32) + j / 2 * pair() + j % 2; }
};

template <int Dim>
struct RowsShared {
  static constexpr int kStages = 2, kWords = Dim / kVec8;  // 16-byte words of a row
  alignas(128) uint4 staged[kQuantizeWarps][kStages][kRowTile * kWords];
  alignas(16) float offset[Dim];
};

template <class VecLoader, int Dim>
struct RowReader {
  static constexpr int kHalf = Dim / 2;  // channels of a lane
  static constexpr int kWords = Dim / kVec8;
  static constexpr bool kStaged = VecLoader::kWhole && sizeof(typename VecLoader::Raw) == 16;
  using Shared = RowsShared<Dim>;

  Shared& shared;
  // The signs of the channels, in shared memory: where the loader has pairs, 16 bits for each channel, of which the
  // highest is set for -1; else 1 or -1 in float32.
  const uint4* signs;

  static __device__ int warp() { return threadIdx.x / 32; }
  static __device__ int row() { return threadIdx.x % 32 / 2; }
  static __device__ int half() { return threadIdx.x % 2; }
  // The index of this lane's vector v among those of its row.
  static __device__ int word(int v) { return v / 2 * 4 + half() * 2 + v % 2; }

  // Word w of a row is stored at w ^ swizzle(row) among its words, so that lanes read from different banks.
  static __device__ constexpr int swizzle(int row) { return (row & 1) | (row & 2) << 1; }
  static __device__ int swizzled(int v) { return ((half() * 2 + v % 2 + v / 2 % 2 * 4) ^ swizzle(row())) + v / 4 * 8; }

  // Loads the row tiles of the warp into the stages, one after the other. Rows that do not exist become zeros.
  struct Loader {
    static constexpr int kRows = 32 / kWords;  // that the warp loads at once

    const unsigned char* from;
    int64_t pair_bytes;  // from one pair of rows to the next
    uint32_t to;
    int rows_left;  // rows from this lane's first on; negative beyond the tensor's channels
    int log_pair;   // log2 of the rows from one pair to the next

    __device__ Loader(const RowTiles& s, Shared& shared) {
      if constexpr (kStaged) {
        const int r = threadIdx.x % 32 / kWords, w = threadIdx.x % kWords, row = s.first + s.row(r);
        from = reinterpret_cast<const unsigned char*>(VecLoader::at(s.rows, row, w * kVec8));
        log_pair = s.groups ? 3 : 1;
        pair_bytes = s.rows.token * static_cast<int64_t>(sizeof(typename VecLoader::Element)) << log_pair;
        rows_left = w * kVec8 < s.rows.dim ? s.end - row : INT_MIN / 2;
        to = ptx::shared_address(shared.staged[warp()][0] + r * kWords + (w ^ swizzle(r)));
      }
    }

    // These return the distance of the lane's row i of a row tile from its first, in rows and in bytes.
    __device__ int row(int i) const { return (i * kRows / 2 << log_pair) + i * kRows % 2; }
    __device__ int64_t distance(int i) const {
      return i * kRows / 2 * pair_bytes + (i * kRows % 2 ? pair_bytes >> log_pair : int64_t{0});
    }

    __device__ void fetch(int stage) {
      if constexpr (kStaged) {
        const auto copy = [&](int i, int bytes) {
          // w ^ swizzle(i kRows + r) is w ^ swizzle(r) ^ swizzle(i kRows).
          const uint32_t there = (to ^ swizzle(i * kRows) * 16) + (stage * kRowTile * kWords + i * 32) * 16;
          ptx::cp_async(there, from + distance(i), bytes);
        };
        constexpr int kTimes = kRowTile / kRows;
        if (__all_sync(~0u, row(kTimes - 1) < rows_left)) {
#pragma unroll
          for (int i = 0; i < kTimes; ++i) copy(i, 16);
        } else {
#pragma unroll 1
          for (int i = 0; i < kTimes; ++i) copy(i, row(i) < rows_left ? 16 : 0);
        }
        from += pair_bytes << (log_pair == 3 ? 3 : 5), rows_left -= RowTiles::kRows;
      }
      fetch_nothing();
    }
  };
  static __device__ void fetch_nothing() { ptx::cp_async_commit(); }

  // Waits until all but the last row tile have arrived.
  static __device__ void await() {
    ptx::cp_async_wait<1>();
    __syncwarp();
  }

  // Returns vector v of row `token`, which is this lane's; zeros where there is none.
  __device__ typename VecLoader::Raw vector(const RowTiles& s, int token, int stage, int v) const {
    if constexpr (kStaged) return (shared.staged[warp()][stage] + row() * kWords)[swizzled(v)];
    if (token < s.end && word(v) * kVec8 < s.rows.dim) return VecLoader::load(s.rows, token, word(v) * kVec8);
    return {};
  }

  // Reads this lane's channels of its row; with Signed and a loader of pairs, multiplied by their signs.
  template <bool Signed>
  __device__ void read(const RowTiles& s, int token, int stage, float (&x)[kHalf]) const {
#pragma unroll
    for (int v = 0; v < kHalf / kVec8; ++v) {
      typename VecLoader::Raw raw = vector(s, token, stage, v);
      if constexpr (Signed && VecLoader::kPairs) {
        const uint4 sign = signs[word(v)];
        raw = {raw.x ^ sign.x, raw.y ^ sign.y, raw.z ^ sign.z, raw.w ^ sign.w};
      }
      Vec8 eight;
      VecLoader::convert(raw, eight);
#pragma unroll
      for (int i = 0; i < kVec8; ++i) x[v * kVec8 + i] = eight[i];
    }
  }

  // Calls f(channel of x[i], i) for each group of four of this lane's channels.
  template <class F>
  static __device__ void for_fours(const F& f) {
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) f(i / 16 * 32 + half() * 16 + i % 16, i);
  }

  // Sets x to sign x + offset, each where it is wanted, in rows that exist; the product is exact. Pairs already have
  // their signs.
  template <bool Signed, bool Offset>
  __device__ void smooth(bool present, float (&x)[kHalf]) const {
    constexpr bool kSigned = Signed && !VecLoader::kPairs;
    for_fours([&](int c, int i) {
      float4 s{1.f, 1.f, 1.f, 1.f}, o{};
      if constexpr (kSigned) s = reinterpret_cast<const float4*>(signs)[c / 4];
      if constexpr (Offset) o = *reinterpret_cast<const float4*>(&shared.offset[c]);
      const auto apply = [](float y, float sign, float offset) {
        if constexpr (kSigned && Offset) return fmaf(y, sign, offset);
        return kSigned ? y * sign : Offset ? y + offset : y;
      };
      x[i] = apply(x[i], s.x, o.x), x[i + 1] = apply(x[i + 1], s.y, o.y);
      x[i + 2] = apply(x[i + 2], s.z, o.z), x[i + 3] = apply(x[i + 3], s.w, o.w);
    });
    if constexpr (Offset) {
      if (__all_sync(~0u, present)) return;
      for (float& y : x) y = present ? y : 0.f;
    }
  }

  template <int Distance>
  static __device__ void butterflies(float (&x)[kHalf]) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (i & Distance) continue;
      const float a = x[i], b = x[i + Distance];
      x[i] = a + b, x[i + Distance] = a - b;
    }
  }

  // octet::hadamard without its signs and norm: stages at distance 1, 2, 4, ... At distance 16 the partner is in the
  // other lane.
  static __device__ void rotate(int block, float (&x)[kHalf]) {
    if constexpr (kStaged)
      if (block == Dim) return rotate_whole(x);
    if (block == 0) return;
    butterflies<1>(x), butterflies<2>(x), butterflies<4>(x);
    if (block > 8) butterflies<8>(x);
    if (block > 16) exchange(x);
    if (block > 32) butterflies<16>(x);
    if constexpr (kHalf > 32)
      if (block > 64) butterflies<32>(x);
    if constexpr (kHalf > 64)
      if (block > 128) butterflies<64>(x);
  }
  static __device__ void rotate_whole(float (&x)[kHalf]) {
    butterflies<1>(x), butterflies<2>(x), butterflies<4>(x), butterflies<8>(x), exchange(x), butterflies<16>(x);
    if constexpr (kHalf > 32) butterflies<32>(x);
    if constexpr (kHalf > 64) butterflies<64>(x);
  }
  static __device__ void exchange(float (&x)[kHalf]) {
    const float sign = half() ? -1.f : 1.f;
#pragma unroll
    for (float& y : x) y = fmaf(y, sign, __shfl_xor_sync(~0u, y, 1));
  }

  // octet::amax of a row, times norm.
  static __device__ float amax(const float (&x)[kHalf], float norm) {
    float most[4] = {};
#pragma unroll
    for (int i = 0; i < kHalf; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most[i % 4]) : "f"(fabsf(x[i])));
    int bits = 0;  // NaN compares above infinity
    for (const float m : most) bits = max(bits, __float_as_int(m) & 0x7fffffff);
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    return __int_as_float(bits) * norm;
  }

  // Returns the quantized values of norm x, times `inverse`, of 16 channels from x[first] on.
  template <class QuantizedType>
  static __device__ uint4 encode(const float (&x)[kHalf], int first, float norm, float inverse) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(__fmul_rn(x[first + 4 * w + i], norm), inverse);
      words[w] = ptx::pack<QuantizedType>(y[0], y[1], y[2], y[3]);
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // Returns the scale of a row, or with `group` of its row tile, in all of its lanes. A row that is not finite gets
  // scale NaN and quantized values 0. In a group it does not count towards the scale, and its quantized values are NaN;
  // integers have no NaN, so there the scale of the group becomes NaN.
  template <class QuantizedType>
  static __device__ Scale scale_of_row(bool group, float norm, float (&x)[kHalf]) {
    const float most = amax(x, norm);
    const bool finite = most <= FLT_MAX;
    const bool all_finite = __all_sync(~0u, finite);
    int counts = finite ? __float_as_int(most) : 0;
    if (group) counts = __reduce_max_sync(~0u, counts);
    Scale scale = scale_of(__int_as_float(counts), std::is_same_v<QuantizedType, S8> ? 127.f : 448.f);
    if (all_finite) return scale;
    constexpr bool kHasNan = !std::is_same_v<QuantizedType, S8>;
    if (!finite)
      for (float& y : x) y = group && kHasNan ? NAN : 0.f;
    if (group ? !kHasNan : !finite) scale.scale = NAN;
    return scale;
  }
};

}  // namespace octet::cuda
