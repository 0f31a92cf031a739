// The layout of tiles of 16-bit elements that preprocessing writes: their columns in panels of 64, each panel as many
// rows of 128 bytes as the tile has, under the 128-byte swizzle: chunk c of row r, of 16 bytes, lies at c xor r mod 8.
#pragma once

namespace octet::cuda {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

// The period of the swizzle, in rows and in bytes.
constexpr int kSwizzleRows = 8;
constexpr int kSwizzleBytes = kSwizzleRows * kPanelRowBytes;

}  // namespace octet::cuda
