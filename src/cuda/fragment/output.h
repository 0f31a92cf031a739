// Stores of fragments to global memory, in the caller's type.
#pragma once
#include <bit>
#include <cstdint>

#include "cuda/fragment/accumulator.h"
#include "cuda/fragment/strided.h"

namespace octet::cuda {

// A [batch, head, token, dim] tensor whose rows are contiguous and start at multiples of 16 bytes, of 8 where elements
// are bytes, or lse, whose rows are one number. Strides are in elements. A null `data` means that the output is absent.
struct Output {
  void* data;
  int64_t stride[3];
  Element element;

  __device__ int64_t offset(int batch, int head, int64_t token) const {
    return batch * stride[0] + head * stride[1] + token * stride[2];
  }
  template <class T>
  __device__ T* row(int batch, int head, int64_t token) const {
    return static_cast<T*>(data) + offset(batch, head, token);
  }
};

// Calls f with a null pointer of an output's element type: f32, f16, bf16 or, with kE4m3, e4m3.
template <bool kE4m3 = false, class F>
__device__ auto with_output_type(Element element, const F& f) {
  switch (element) {
    case Element::f32:
      return f(static_cast<float*>(nullptr));
    case Element::f16:
      return f(static_cast<F16*>(nullptr));
    case Element::e4m3:
      if constexpr (kE4m3) return f(static_cast<E4m3*>(nullptr));
    default:
      return f(static_cast<Bf16*>(nullptr));
  }
}

// Transposes 4 x 4 words among the four threads that share a row: word i of thread t becomes word t of thread i.
__device__ inline void transpose_quad(uint32_t (&w)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? w[i] : w[i + bit], bit);
      if (upper)
        w[i] = received;
      else
        w[i + bit] = received;
    }
  }
}

// The policy by which L2 keeps stored words: as any other, or first to be evicted, for outputs that would displace what
// the kernel reads again.
enum class CachePolicy { normal, evict_first };

template <CachePolicy policy, class Word>
__device__ void store_word(void* to, const Word& word) {
  if constexpr (policy == CachePolicy::evict_first)
    __stcs(static_cast<Word*>(to), word);
  else
    *static_cast<Word*>(to) = word;
}

// Stores this thread's part of a row of bytes, up to `columns` columns. `pack(low, high)` returns its two columns of
// block `low` of 8 columns in the lower half, and those of block `high`. Eight blocks are stored at a time, so that the
// threads of a row write 32 bytes side by side, twice. All threads of the warp call it together.
template <CachePolicy policy, int Columns, class T, class Pack>
__device__ void store_bytes(T* row, bool present, int columns, const Pack& pack) {
  static_assert(sizeof(T) == 1);
  constexpr int kBlocks = Columns / 8;
#pragma unroll
  for (int i = 0; i < kBlocks; i += 8) {
    uint32_t words[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int low = i + b, high = low + 4;
      words[b] = low < kBlocks ? pack(low, high < kBlocks ? high : low) : 0;
    }
    transpose_quad(words);
    const int column = 8 * (i + threadIdx.x % 4);
    if (present && column < columns)
      store_word<policy>(row + column,
                         uint2{__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410)});
    if (i + 4 < kBlocks && present && column + 32 < columns)
      store_word<policy>(row + column + 32,
                         uint2{__byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632)});
  }
}

// Stores this thread's part of row `which` of x, up to `columns` columns. `present` is false where the row does not
// exist. All threads of the warp call it together.
template <class T, CachePolicy policy = CachePolicy::normal, int Columns>
__device__ void store_row(T* row, bool present, const Accumulator<Columns>& x, int which, int columns) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
      if (present && 8 * i < columns)
        store_word<policy>(row + 8 * i + fragment_column(), float2{x.x[4 * i + 2 * which], x.x[4 * i + 2 * which + 1]});
  } else if constexpr (sizeof(T) == 1) {
    store_bytes<policy, Columns>(row, present, columns, [&](int low, int high) {
      const float *a = &x.x[4 * low + 2 * which], *b = &x.x[4 * high + 2 * which];
      return ptx::pack<T>(a[0], a[1], b[0], b[1]);
    });
  } else {
    // Four blocks of 8 columns at a time, so that each thread writes 16 bytes of one block.
#pragma unroll
    for (int i = 0; i < Columns / 8; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int b = 0; b < 4; ++b)
        words[b] =
            i + b < Columns / 8 ? ptx::pack<T>(x.x[4 * (i + b) + 2 * which], x.x[4 * (i + b) + 2 * which + 1]) : 0;
      transpose_quad(words);
      const int column = 8 * (i + threadIdx.x % 4);
      if (present && column < columns) store_word<policy>(row + column, uint4{words[0], words[1], words[2], words[3]});
    }
  }
}

// The lanes that store one row, a chunk of 8 columns each; the last have none where the chunks do not divide a warp.
template <int Columns>
constexpr int kRowLanes = std::bit_ceil(Columns / 8u);

// Stores the first `columns` columns of 64 rows to rows that are `stride` elements apart, of which the first `rows`
// exist. The rows pass through `tile`, in which each warp uses its own rows, so that neighbouring threads write
// neighbouring words. Returns the first word of this thread; the words of a warp are whole rows.
template <class T, int Columns, class Tile>
__device__ uint4 store_rows(T* to, int64_t stride, int rows, const Accumulator<Columns>& x, const Tile& tile,
                            int columns) {
  Operand<T, Columns> words;
  convert(x, words);
  store(words, tile, 0);
  __syncwarp();
  constexpr int kChunks = kRowLanes<Columns>, kRowsAtOnce = 32 / kChunks;  // of a warp
  static_assert(kChunks <= Tile::kPanels * 8);
  const int lane = threadIdx.x % 32, chunk = lane % kChunks;
  const int first = threadIdx.x % kWarpgroup / 32 * 16 + lane / kChunks;
  const int last = 8 * chunk < columns ? rows : 0;
  to += first * stride + 8 * chunk;
  uint4 first_word;
#pragma unroll
  for (int row = first; row < first + 16; row += kRowsAtOnce, to += kRowsAtOnce * stride) {
    const uint4 word = *reinterpret_cast<const uint4*>(tile.at(row, chunk));
    if (row < last) *reinterpret_cast<uint4*>(to) = word;
    if (row == first) first_word = 8 * chunk < Columns ? word : uint4{};
  }
  return first_word;
}

}  // namespace octet::cuda
