// Tiles in shared memory, as TMA writes and wgmma reads them: `Columns` columns of 16 bits in panels of 64, each panel
// `Rows` rows of 128 bytes under the 128-byte swizzle (chunk c of row r lies at c xor r mod 8). A tile starts at a
// multiple of 1024 bytes, the period of the swizzle.
#pragma once
#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "cuda/ptx/types.h"

namespace octet::cuda {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

// Rows of a group that the swizzle treats alike, and its bytes.
constexpr int kSwizzleRows = 8;
constexpr int kSwizzleBytes = kSwizzleRows * kPanelRowBytes;

template <class T, int Rows_, int Columns_>
struct SharedTile {
  using Element = T;
  static constexpr int kRows = Rows_, kColumns = Columns_;
  static constexpr int kPanels = Columns_ / kPanelColumns;
  static constexpr int kPanelBytes = Rows_ * kPanelRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(Columns_ % kPanelColumns == 0 && Rows_ % kSwizzleRows == 0);

  unsigned char* data;

  __device__ uint32_t address() const { return static_cast<uint32_t>(__cvta_generic_to_shared(data)); }

  // The wgmma descriptor (PTX ISA, 9.7.15.5.1.2) of 16-bit operands under the 128-byte swizzle, from `offset` bytes
  // into the tile. `across`: bytes from one panel to the next where the operand's columns do not run along the index of
  // summation. Shared addresses are short, so sums stay within their fields.
  __device__ uint64_t descriptor(int offset, int across) const {
    const uint32_t low = (address() >> 4) + (static_cast<uint32_t>(across >> 4) << 16) + (offset >> 4);
    constexpr uint32_t high = kSwizzleBytes >> 4 | 1u << 30;
    return static_cast<uint64_t>(high) << 32 | low;
  }
  // Columns [16 step, 16 step + 16) of the rows from `row`: an operand that is summed along its columns.
  __device__ uint64_t along(int row, int step) const {
    return descriptor((step / 4) * kPanelBytes + row * kPanelRowBytes + (step % 4) * 32, 16);
  }
  // Rows [16 step, 16 step + 16), columns from 64 `panel`: an operand that is summed along its rows.
  __device__ uint64_t across(int step, int panel = 0) const {
    return descriptor(panel * kPanelBytes + step * 16 * kPanelRowBytes, kPanelBytes);
  }
};

// Brings rows [row, row + Rows) of a [dim, token, head, batch] tensor into a tile; `full` counts its bytes. What lies
// beyond the tensor arrives as zeros.
template <class Tile>
__device__ void load(const Tile& tile, const CUtensorMap& map, int row, int head, int batch, uint64_t* full) {
  namespace ptx = ::cuda::ptx;
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    const int32_t at[4] = {panel * kPanelColumns, row, head, batch};
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, tile.data + panel * Tile::kPanelBytes, &map, at,
                              full);
  }
}

}  // namespace octet::cuda
