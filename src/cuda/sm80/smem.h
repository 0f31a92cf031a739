// Tiles of 16-bit elements in shared memory: rows of `Columns` columns, in chunks of 8 columns (16 bytes). Chunk c of
// row r lies at c xor r mod 8 (the lower three bits of c), so that the 8 rows that ldmatrix reads at a time lie in
// different banks. A tile starts at a multiple of 128 bytes.
#pragma once
#include <cstdint>

#include "cuda/fragment/output.h"
#include "cuda/preprocess/panel.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/types.h"
#include "cuda/ptx/warpgroup.h"

namespace octet::cuda::sm80 {

// The most that a thread block can have on every GPU since compute capability 8.0 (8.6, 8.9 and 12.0 have the least).
constexpr int kMostSharedBytes = 99 * 1024;

constexpr int kChunkColumns = 8, kChunkBytes = 16;

template <class T, int Rows_, int Columns_>
struct SharedTile {
  using Element = T;
  static constexpr int kRows = Rows_, kColumns = Columns_;
  static constexpr int kRowBytes = Columns_ * sizeof(T), kBytes = Rows_ * kRowBytes;
  static_assert(sizeof(T) == 2 && Columns_ % 64 == 0 && Rows_ % 16 == 0);

  unsigned char* data;

  __device__ uint32_t address() const { return ptx::shared_address(data); }
  // Returns the offset of columns [8 chunk, 8 chunk + 8) of a row.
  static __device__ int offset(int row, int chunk) { return row * kRowBytes + (chunk ^ row % 8) * kChunkBytes; }
  __device__ unsigned char* at(int row, int chunk) const { return data + offset(row, chunk); }

  // Where this lane's row of four 8 x 8 matrices, two by two, lies in the tile's first 16 rows and 16 columns. For
  // `lane_down` the second matrix lies below the first, else to its right.
  __device__ uint32_t lane_down() const {
    const int lane = threadIdx.x % 32;
    return address() + offset(lane % 16, lane / 16);
  }
  __device__ uint32_t lane_right() const {
    const int lane = threadIdx.x % 32;
    return address() + offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  // Returns the address that lies 16 `rows` rows down and 16 `columns` columns to the right of one of these two.
  static __device__ uint32_t step(uint32_t lane, int rows, int columns) {
    return (lane ^ columns % 4 * 32) + columns / 4 * 128 + rows * 16 * kRowBytes;
  }
};

// Loads rows [0, Rows) of a [token, dim] matrix, whose rows are `stride` elements apart, into a tile by cp.async, with
// all `Threads` threads of the block. Rows from `rows` on and columns from `columns` on, a multiple of 8, become zeros.
// The caller closes the group.
template <int Threads, class Tile>
__device__ void load_async(const Tile& tile, const typename Tile::Element* from, int64_t stride, int rows,
                           int columns) {
  constexpr int kChunks = Tile::kColumns / kChunkColumns, kRowsAtOnce = Threads / kChunks;
  static_assert(Threads % kChunks == 0 && Tile::kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks, first = static_cast<int>(threadIdx.x) / kChunks;
  const bool inside = chunk * kChunkColumns < columns;
  const uint32_t to = tile.address() + Tile::offset(first, chunk);
  const auto* const source = from + chunk * kChunkColumns;
#pragma unroll
  for (int i = 0; i < Tile::kRows / kRowsAtOnce; ++i) {
    const int row = first + i * kRowsAtOnce;
    const bool present = inside && row < rows;
    ptx::cp_async(to + i * kRowsAtOnce * Tile::kRowBytes, present ? source + row * stride : from,
                  present ? kChunkBytes : 0);
  }
}

// A tile in panels of 64 columns, as preprocessing writes them (preprocess/panel.h). It starts at a multiple of 128
// bytes.
template <class T, int Rows_, int Columns_>
struct PanelTile {
  using Element = T;
  static constexpr int kRows = Rows_, kColumns = Columns_;
  static constexpr int kPanels = Columns_ / kPanelColumns;
  static constexpr int kPanelBytes = Rows_ * kPanelRowBytes, kBytes = kPanels * kPanelBytes;
  static_assert(sizeof(T) == 2 && Columns_ % kPanelColumns == 0 && Rows_ % 16 == 0);

  unsigned char* data;

  __device__ uint32_t address() const { return ptx::shared_address(data); }
  // The same as in SharedTile. opaque() stops the compiler from keeping the addresses of all operands in registers.
  static __device__ int offset(int row, int chunk) {
    return chunk / 8 * kPanelBytes + row * kPanelRowBytes + (chunk % 8 ^ row % 8) * kChunkBytes;
  }
  __device__ uint32_t lane_down() const {
    const int lane = threadIdx.x % 32;
    return address() + ptx::opaque(offset(lane % 16, lane / 16));
  }
  __device__ uint32_t lane_right() const {
    const int lane = threadIdx.x % 32;
    return address() + ptx::opaque(offset(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  }
  static __device__ uint32_t step(uint32_t lane, int rows, int columns) {
    return (lane ^ columns % 4 * 32) + columns / 4 * kPanelBytes + rows * 16 * kPanelRowBytes;
  }
};

// Loads rows [row, row + Rows) of a preprocessed tile of `FromRows` rows by cp.async, with all `Threads` threads of the
// block. `row` is a multiple of 8. The caller closes the group.
template <int Threads, int FromRows, class Tile>
__device__ void load_async(const Tile& tile, const unsigned char* from, int row) {
  constexpr int kChunks = Tile::kPanelBytes / kChunkBytes;
  static_assert(kChunks % Threads == 0);
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x) * kChunkBytes);
  const uint32_t to = tile.address() + thread;
  from += row * kPanelRowBytes + thread;
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel)
#pragma unroll
    for (int i = 0; i < kChunks; i += Threads)
      ptx::cp_async(to + panel * Tile::kPanelBytes + i * kChunkBytes,
                    from + panel * FromRows * kPanelRowBytes + i * kChunkBytes, kChunkBytes);
}

}  // namespace octet::cuda::sm80
