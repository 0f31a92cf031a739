// Tiles of 8-bit or 16-bit elements in shared memory: rows of `Columns` columns, in chunks of 16 bytes. Chunk c of row
// r lies at c xor r mod 8 (the lower three bits of c), so that the 8 rows that ldmatrix reads at a time lie in
// different banks; where two rows are 128 bytes, at c xor (r / 2) mod 4. A tile starts at a multiple of 128 bytes.
#pragma once
#include <cstdint>

#include "cuda/fragment/positional_mask.h"
#include "cuda/operands/panel.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/types.h"
#include "cuda/ptx/warpgroup.h"

namespace octet::cuda::sm80 {

// The most that a thread block can have on every GPU since compute capability 8.0 (8.6, 8.9 and 12.0 have the least).
constexpr int kMostSharedBytes = 99 * 1024;

constexpr int kChunkBytes = 16;
template <class T>
constexpr int kChunkColumns = kChunkBytes / sizeof(T);
// Columns of a step: what one matrix product (mma.sync) takes of the index of summation, two chunks.
template <class T>
constexpr int kStepColumns = 2 * kChunkColumns<T>;

template <class T, int Rows_, int Columns_>
struct SharedTile {
  using Element = T;
  static constexpr int kRows = Rows_, kColumns = Columns_;
  static constexpr int kRowBytes = Columns_ * sizeof(T), kBytes = Rows_ * kRowBytes;
  static_assert((kRowBytes == 64 || kRowBytes % 128 == 0) && Rows_ % 16 == 0);

  unsigned char* data;

  __device__ uint32_t address() const { return ptx::shared_address(data); }
  // Returns the offset of a chunk of a row.
  static __device__ int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (kRowBytes == 64 ? row / 2 % 4 : row % 8)) * kChunkBytes;
  }
  __device__ unsigned char* at(int row, int chunk) const { return data + offset(row, chunk); }

  // Returns where this lane's row of four 8 x 8 matrices of 16 bits, two by two, lies in the tile's first 16 rows and
  // its first step of columns. For `lane_down` the second matrix lies below the first, else to its right. opaque()
  // stops the compiler from keeping all addresses of a loop in registers.
  __device__ uint32_t lane_down() const {
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
    return address() + offset(lane % 16, lane / 16);
  }
  __device__ uint32_t lane_right() const {
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
    return address() + offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  // Returns what lies 16 `rows` rows down and `columns` steps to the right of one of these two.
  static __device__ uint32_t move(uint32_t lane, int rows, int columns) {
    return (lane ^ columns % 4 * 32) + columns / 4 * 128 + rows * 16 * kRowBytes;
  }
  // Returns the address of what lies there.
  static __device__ uint32_t step(uint32_t lane, int rows, int columns) { return move(lane, rows, columns); }
};

// Loads tiles by cp.async with all `Threads` threads of the block, from a [token, dim] matrix whose rows are `stride`
// elements apart. A thread has the same chunk of every kRowsAtOnce-th row. Index is the type of its number; as an
// unsigned one it has no sign, for which ptxas would keep a register or two throughout the kernel.
template <int Threads, class Tile, class Index = int>
struct TileLoader {
  static constexpr int kChunk = kChunkColumns<typename Tile::Element>;
  static constexpr int kChunks = Tile::kColumns / kChunk, kRowsAtOnce = Threads / kChunks;
  static constexpr int kLoads = Tile::kRows / kRowsAtOnce;
  static_assert(Threads % kChunks == 0 && Tile::kRows % kRowsAtOnce == 0);
  // Where the rows of a thread lie a multiple of the swizzle's period apart, their offsets differ by a constant.
  static constexpr int kPeriod = kRowsAtOnce % 8 ? 8 / kRowsAtOnce : 1;

  // opaque() stops the compiler from keeping the addresses of all rows in registers.
  static __device__ int chunk() { return static_cast<Index>(ptx::opaque(static_cast<int>(threadIdx.x))) % kChunks; }
  static __device__ int first() { return static_cast<Index>(ptx::opaque(static_cast<int>(threadIdx.x))) / kChunks; }
  // Returns where this thread starts in the tile whose first row is `from`.
  static __device__ const typename Tile::Element* source(const typename Tile::Element* from, int64_t stride) {
    return from + first() * stride + chunk() * kChunk;
  }
  // Loads a whole tile. The caller closes the group.
  static __device__ void load(const Tile& tile, const typename Tile::Element* source, int64_t stride) {
    each(tile, [&](int, uint32_t to) {
      ptx::cp_async(to, source);
      source += kRowsAtOnce * stride;
    });
  }
  // The same where rows of all columns lie one after the other, so that addresses differ by constants.
  static __device__ void load_dense(const Tile& tile, const typename Tile::Element* from) {
    static_assert(kPeriod == 1);
    const uint32_t to = tile.address() + Tile::offset(first(), chunk());
    const auto* const source =
        reinterpret_cast<const uint4*>(from) + static_cast<unsigned>(ptx::opaque(static_cast<int>(threadIdx.x)));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) ptx::cp_async(to + i * kRowsAtOnce * Tile::kRowBytes, source + i * Threads);
  }
  // The same as load() where rows outside of `rows` and columns from `columns` on, in whole chunks, become zeros. Those
  // rows are not read.
  static __device__ void load_part(const Tile& tile, const typename Tile::Element* source, int64_t stride,
                                   const Interval& rows, int columns) {
    const auto* const anywhere = source - first() * stride - chunk() * kChunk;
    each(tile, [&](int i, uint32_t to) {
      const int row = first() + i * kRowsAtOnce;
      const bool present = row >= rows.first && row < rows.last && chunk() * kChunk < columns;
      ptx::cp_async(to, present ? source : anywhere, present ? kChunkBytes : 0);
      source += kRowsAtOnce * stride;
    });
  }

 private:
  template <class F>
  static __device__ void each(const Tile& tile, const F& f) {
    uint32_t to[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) to[i] = tile.address() + Tile::offset(first() + i * kRowsAtOnce, chunk());
    constexpr int kUnrolled = kLoads > 8 ? 1 : kLoads / kPeriod;
#pragma unroll kUnrolled
    for (int period = 0; period < kLoads / kPeriod; ++period)
#pragma unroll
      for (int i = 0; i < kPeriod; ++i)
        f(period * kPeriod + i, to[i] + period * kPeriod * kRowsAtOnce * Tile::kRowBytes);
  }
};

// Loads rows [0, Rows) of a matrix into a tile as TileLoader does.
template <int Threads, class Tile>
__device__ void load_async(const Tile& tile, const typename Tile::Element* from, int64_t stride, const Interval& rows,
                           int columns) {
  using Loader = TileLoader<Threads, Tile>;
  const auto* const source = Loader::source(from, stride);
  if (rows.first <= 0 && rows.last >= Tile::kRows && columns == Tile::kColumns)
    Loader::load(tile, source, stride);
  else
    Loader::load_part(tile, source, stride, rows, columns);
}

// A tile in panels of 64 columns, as preprocessing writes them (operands/panel.h). It starts at a multiple of 128
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
  // Offsets within the tile: step() adds the address of the tile, which the loads of all warps and lanes have in common
  // and take from a uniform register.
  static __device__ uint32_t lane_down() {
    const int lane = threadIdx.x % 32;
    return ptx::opaque(offset(lane % 16, lane / 16));
  }
  static __device__ uint32_t lane_right() {
    const int lane = threadIdx.x % 32;
    return ptx::opaque(offset(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  }
  static __device__ uint32_t move(uint32_t lane, int rows, int columns) {
    return (lane ^ columns % 4 * 32) + columns / 4 * kPanelBytes + rows * 16 * kPanelRowBytes;
  }
  __device__ uint32_t step(uint32_t lane, int rows, int columns) const { return address() + move(lane, rows, columns); }
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
