// Tiles in shared memory, in the layout that TMA writes and wgmma reads: `Columns` columns of 16 bits in panels of 64,
// each panel `Rows` rows of 128 bytes under the 128-byte swizzle (chunk c of row r lies at c xor r mod 8). A tile
// starts at a multiple of 1024 bytes, the period of the swizzle. Panels are whole in memory: products leave out what
// the last has beyond `Columns`. 8-bit tiles have panels of 128, 64 or 32 columns, the widest that divides their
// columns, under the swizzle of that width.
#pragma once
#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "cuda/operands/panel.h"
#include "cuda/ptx/types.h"

namespace octet::cuda {

constexpr int kMostSharedBytes = 227 * 1024;  // that a thread block can have

// A tile of 16-bit elements. `InCluster`: its thread block is one of several in a cluster.
template <class T, int Rows_, int Columns_, bool InCluster = false>
struct SharedTile {
  using Element = T;
  static constexpr bool kInCluster = InCluster;
  static constexpr int kRows = Rows_, kColumns = Columns_;
  static constexpr int kPanelWidth = kPanelColumns;
  static constexpr int kPanels = (Columns_ + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = Rows_ * kPanelRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(Columns_ % 16 == 0 && Rows_ % kSwizzleRows == 0);

  unsigned char* data;

  __device__ uint32_t address() const { return static_cast<uint32_t>(__cvta_generic_to_shared(data)); }
  // Returns the address of columns [8 chunk, 8 chunk + 8) of a row.
  __device__ unsigned char* at(int row, int chunk) const {
    return data + chunk / 8 * kPanelBytes + row * kPanelRowBytes + (chunk % 8 ^ row % kSwizzleRows) * 16;
  }

  // Returns the wgmma descriptor (PTX ISA, 9.7.15.5.1.2) of a 16-bit operand under the 128-byte swizzle, from `offset`
  // bytes into the tile. `across`: bytes from one panel to the next, where the columns of the operand do not run along
  // the index of summation. Shared addresses are small, so the sums stay within their fields once the rank in the
  // cluster is masked off.
  __device__ uint64_t descriptor(int offset, int across) const {
    constexpr uint32_t kWindow = (1 << 18) - 1;
    const uint32_t start = kInCluster ? address() & kWindow : address();
    const uint32_t low = (start >> 4) + (static_cast<uint32_t>(across >> 4) << 16) + (offset >> 4);
    constexpr uint32_t high = kSwizzleBytes >> 4 | 1u << 30;
    return static_cast<uint64_t>(high) << 32 | low;
  }
  // Describes columns [16 k_step, 16 k_step + 16) of the rows from `row` on: an operand that is summed along its
  // columns.
  __device__ uint64_t along(int row, int k_step) const {
    return descriptor((k_step / 4) * kPanelBytes + row * kPanelRowBytes + (k_step % 4) * 32, 16);
  }
  // Describes rows [16 k_step, 16 k_step + 16), columns from 64 `panel` on: an operand that is summed along its rows.
  __device__ uint64_t across(int k_step, int panel = 0) const {
    return descriptor(panel * kPanelBytes + k_step * 16 * kPanelRowBytes, kPanelBytes);
  }
};

// Returns the widest panel, in bytes, that divides a row.
constexpr int panel_bytes(int columns) { return columns % 128 == 0 ? 128 : columns % 64 == 0 ? 64 : 32; }

// A tile of 8-bit elements. TMA fills the first `LoadedRows` rows.
template <class T, int Rows_, int Columns_, int LoadedRows_ = Rows_>
struct SharedTile8Bit {
  using Element = T;
  static constexpr int kRows = Rows_, kColumns = Columns_, kLoadedRows = LoadedRows_;
  static constexpr int kPanelWidth = panel_bytes(Columns_);
  static constexpr int kPanels = Columns_ / kPanelWidth;
  static constexpr int kPanelBytes = Rows_ * kPanelWidth;
  static constexpr int kBytes = kPanels * kPanelBytes, kLoadedBytes = LoadedRows_ * Columns_;
  static constexpr int kSwizzlePeriod = kSwizzleRows * kPanelWidth;  // bytes; a tile starts at a multiple of it
  static constexpr int kDepth = 32;                                  // columns that one wgmma sums
  static_assert(sizeof(T) == 1 && Columns_ % kDepth == 0 && Rows_ % kSwizzleRows == 0);

  unsigned char* data;

  // Describes columns [32 k_step, 32 k_step + 32) of the rows from `row` on; PTX ISA, 9.7.15.5.1.2.
  __device__ uint64_t along(int row, int k_step) const {
    constexpr int kSteps = kPanelWidth / kDepth;
    constexpr uint32_t kSwizzle = kPanelWidth == 128 ? 1 : kPanelWidth == 64 ? 2 : 3;
    const auto start = static_cast<uint32_t>(__cvta_generic_to_shared(data));
    const int offset = k_step / kSteps * kPanelBytes + row * kPanelWidth + k_step % kSteps * kDepth;
    // Shared addresses are small, so the sum stays within its field.
    const uint32_t low = (start >> 4) + (offset >> 4) + (1u << 16);
    constexpr uint32_t high = kSwizzlePeriod >> 4 | kSwizzle << 30;
    return static_cast<uint64_t>(high) << 32 | low;
  }
};

// Loads columns [column, column + Columns) of rows [row, row + LoadedRows) of a [column, row, head, batch] tensor into
// a tile by TMA.
template <class Tile>
__device__ void load(const Tile& tile, const CUtensorMap& map, int column, int row, int head, int batch,
                     uint64_t* full) {
  namespace ptx = ::cuda::ptx;
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    const int32_t at[4] = {column + panel * Tile::kPanelWidth, row, head, batch};
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, tile.data + panel * Tile::kPanelBytes, &map, at,
                              full);
  }
}

// Loads rows [row, row + Rows) of a [dim, token, head, batch] tensor into a tile; `full` counts the bytes. Elements
// beyond the tensor arrive as zeros.
template <class Tile>
__device__ void load(const Tile& tile, const CUtensorMap& map, int row, int head, int batch, uint64_t* full) {
  load(tile, map, 0, row, head, batch, full);
}

// Returns dynamic shared memory at a multiple of kSwizzleBytes. It is aligned by hand where there is room, as
// otherwise it starts at any 16 bytes.
template <bool AlignsByHand = true>
__device__ unsigned char* shared_memory() {
  if constexpr (AlignsByHand) {
    extern __shared__ unsigned char memory[];
    const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
    return memory + (-base & (kSwizzleBytes - 1));
  } else {
    extern __shared__ __align__(kSwizzleBytes) unsigned char swizzled_memory[];
    return swizzled_memory;
  }
}

}  // namespace octet::cuda
