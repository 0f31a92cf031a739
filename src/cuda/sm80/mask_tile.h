// Tiles of a mask tensor in shared memory, in the mask's own type. Only masks whose rows are contiguous and start at
// multiples of 16 bytes (MaskTensor::chunks) are loaded as tiles.
#pragma once
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/max.h"
#include "cuda/ptx/mma_sync.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

// Rows are padded, so that the eight rows that a warp reads at a time lie in different banks: of elements of 4 bytes it
// reads four at a time, 32 bytes of each.
__host__ __device__ constexpr int mask_row_bytes(int columns, int element_bytes) {
  return element_bytes == 4 ? (columns / 8 | 1) * 32 : (columns * element_bytes / 16 | 1) * 16;
}

// Loads rows [i, i + Rows) of n and keys [key, key + Columns) of m with `Threads` threads, of which this one is
// `thread`. What lies beyond becomes zeros. The caller closes the group.
template <int Threads, int Rows, int Columns>
__device__ void load_mask_tile(unsigned char* tile, int thread, const LogitTerms& t, int batch, int head, int i, int n,
                               int key, int m) {
  // Neighbouring threads have neighbouring chunks of a row, as many as the largest power of 2 that divides their count.
  constexpr int kPieces = Columns / (Columns & -Columns);
  const int bytes = t.mask_bytes, chunks = Columns / kPieces * bytes / kMaskChunkBytes, shift = 31 - __clz(chunks);
  const int inside = (m - key) * bytes, row_bytes = mask_row_bytes(Columns, bytes), row = thread >> shift;
  const int offset = (thread & (chunks - 1)) * kMaskChunkBytes, step = Threads >> shift;
  const auto* const start = static_cast<const unsigned char*>(t.mask);
  const auto* from = t.mask_at(batch, head, i + row, key) + offset;
  uint32_t to = ptx::shared_address(tile) + row * row_bytes + offset;
#pragma unroll 1
  for (int left = min(n - i, Rows) - row, rows = Rows - row; rows > 0; rows -= step, left -= step) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int at = piece * chunks * kMaskChunkBytes;
      const int size = left > 0 ? min(max(inside - offset - at, 0), kMaskChunkBytes) : 0;
      // Through L1: where a mask is the same for all queries, all rows are the same bytes.
      ptx::cp_async_through_l1(to + at, size ? from + at : start, size);
    }
    from += step * t.mask_stride[2] * bytes, to += step * row_bytes;
  }
}

// The same for a tile that lies within the mask and starts at `from`, with one warp: `stride` bytes lie between two
// rows of the mask, and all other distances are constants.
template <int Rows, int Columns>
__device__ void load_whole_mask_tile(unsigned char* tile, int element_bytes, const unsigned char* from,
                                     int64_t stride) {
  const auto load = [&]<int kBytes>(std::integral_constant<int, kBytes>) {
    constexpr int kPieces = Columns / (Columns & -Columns), kRowBytes = mask_row_bytes(Columns, kBytes);
    constexpr int kChunks = Columns / kPieces * kBytes / kMaskChunkBytes, kRowsAtOnce = 32 / kChunks;
    static_assert(Rows % kRowsAtOnce == 0);
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32, row = lane / kChunks;
    const int offset = lane % kChunks * kMaskChunkBytes;
    const uint32_t to = ptx::shared_address(tile) + row * kRowBytes + offset;
    from += row * stride + offset;
#pragma unroll
    for (int i = 0; i < Rows; i += kRowsAtOnce, from += kRowsAtOnce * stride)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int at = piece * kChunks * kMaskChunkBytes;
        ptx::cp_async_through_l1(to + i * kRowBytes + at, from + at, kMaskChunkBytes);
      }
  };
  if (element_bytes == 1) return load(std::integral_constant<int, 1>{});
  if (element_bytes == 2) return load(std::integral_constant<int, 2>{});
  load(std::integral_constant<int, 4>{});
}

// This thread's numbers of a tile of `TileColumns` keys: those of a fragment whose first row and column of this thread
// are `row` and `column` of the tile.
template <int TileColumns>
struct MaskFragment {
  const unsigned char* tile;
  MaskElement element;
  int row, column;

  // Calls f(type, x, y, numbers, row) for each pair x, y of elements of s, where `row` is 0 or 1.
  template <int Columns, class F>
  __device__ void each_pair(Accumulator<Columns>& s, const F& f) const {
    with_mask_type(element, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      using Word = typename MaskNumbers<T>::Word;
      constexpr int kBytes = sizeof(Word) / 2, kRowBytes = mask_row_bytes(TileColumns, kBytes);
      const unsigned char* const start = tile + row * kRowBytes + column * kBytes;
#pragma unroll
      for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
        for (int below = 0; below < kRowsPerThread; ++below)
          f(type, s.x[4 * i + 2 * below], s.x[4 * i + 2 * below + 1],
            MaskNumbers<T>::two(*reinterpret_cast<const Word*>(start + below * 8 * kRowBytes + i * 8 * kBytes)), below);
    });
  }
  // s = scale s + mask - row bias. The row bias is 0 where the mask is bool. Where the mask hides a key, this is -inf
  // if s is finite.
  template <int Columns>
  __device__ void add(Accumulator<Columns>& s, float scale, const float (&row_bias)[kRowsPerThread]) const {
    each_pair(s, [&](auto* type, float& x, float& y, const float2& numbers, int below) {
      const float by = std::is_same_v<bool*, decltype(type)> ? 0.f : row_bias[below];
      x = __fmaf_rn(x, scale, numbers.x - by), y = __fmaf_rn(y, scale, numbers.y - by);
    });
  }
  // Sets what the mask hides to -inf, whatever s is.
  template <int Columns>
  __device__ void hide(Accumulator<Columns>& s) const {
    each_pair(s, [](auto*, float& x, float& y, const float2& numbers, int) {
      x = numbers.x == -INFINITY ? -INFINITY : x, y = numbers.y == -INFINITY ? -INFINITY : y;
    });
  }
};

// This thread's numbers of a tile of 32 keys, where keys are the rows of s.
struct MaskFragmentByKeys {
  static constexpr int kKeys = 32;
  const unsigned char* tile;
  MaskElement element;

  // s^T = scale s^T + mask - row bias, with the row biases of the columns.
  template <int M, int Columns>
  __device__ void add(Accumulator<Columns> (&s)[M], float scale, const float* row_bias) const {
    static_assert(M * 16 == kKeys);
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
    with_mask_type(element, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      constexpr int kBytes = sizeof(typename MaskNumbers<T>::Word) / 2, kRowBytes = mask_row_bytes(kKeys, kBytes);
      const uint32_t lane_right = ptx::shared_address(tile) + lane % 8 * kRowBytes + lane / 8 * kMaskChunkBytes;
      const unsigned char* const first = tile + lane % 4 * 2 * kRowBytes + lane / 4 * kBytes;
#pragma unroll
      for (int i = 0; i < Columns / 8; ++i) {
        float2 numbers[2 * M];  // of the two queries of each key
        if constexpr (kBytes == 2) {
          uint32_t words[4];
          ptx::ldmatrix_trans(words, lane_right + i * 8 * kRowBytes);
#pragma unroll
          for (int key = 0; key < 2 * M; ++key) numbers[key] = MaskNumbers<T>::two(words[key]);
        } else {
#pragma unroll
          for (int key = 0; key < 2 * M; ++key)
            numbers[key] = {MaskNumbers<T>::one(first + i * 8 * kRowBytes, 8 * key),
                            MaskNumbers<T>::one(first + (i * 8 + 1) * kRowBytes, 8 * key)};
        }
        const auto of_columns = *reinterpret_cast<const float2*>(row_bias + 8 * i);
#pragma unroll
        for (int key = 0; key < 2 * M; ++key) {
          float* const x = &s[key / 2].x[4 * i + key % 2 * 2];
          x[0] = __fmaf_rn(x[0], scale, numbers[key].x - of_columns.x);
          x[1] = __fmaf_rn(x[1], scale, numbers[key].y - of_columns.y);
        }
      }
    });
  }
};

// s = scale s - row bias: what MaskFragment::add does where the mask is 0.
template <int Columns>
__device__ void subtract_row_bias(Accumulator<Columns>& s, float scale, const float (&row_bias)[kRowsPerThread]) {
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) s.x[i] = __fmaf_rn(s.x[i], scale, 0.f - row_bias[i / 2 % kRowsPerThread]);
}

// Returns the largest of this thread's elements of a row, or NaN if one is.
template <int Columns>
__device__ float row_max_or_nan(const Accumulator<Columns>& s, int row) {
  float most[2] = {s.x[2 * row], s.x[2 * row + 1]};
#pragma unroll
  for (int i = 1; i < Columns / 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c) most[c] = ptx::max_or_nan(most[c], s.x[4 * i + 2 * row + c]);
  return ptx::max_or_nan(most[0], most[1]);
}

}  // namespace octet::cuda::sm80
