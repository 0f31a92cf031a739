// The tiles of the forward pass.
//
// A warp computes 16 kRowBlocks queries: each load of k and v from shared memory serves all of them. A thread holds,
// for each row block, s (keys / 2 registers) and o (dim_v / 2). With 128 threads and two thread blocks on a
// multiprocessor it can have 255 registers.
#pragma once
#include "cuda/sm80/kinds.h"

namespace octet::cuda::sm80 {

// The head dims that kernels are built for. Smaller ones are padded with zeros.
template <int Dim_, int DimV_>
struct HeadDims {
  static constexpr int kDim = Dim_, kDimV = DimV_;
};
using Dims64 = HeadDims<64, 64>;
using Dims128 = HeadDims<128, 128>;
using Dims256 = HeadDims<256, 256>;
using Dims256x128 = HeadDims<256, 128>;  // f32 and int8, for up to 128 channels of v at a time
using Dims512 = HeadDims<512, 512>;      // f16 and bf16

//   kWarps        warps of a thread block
//   kRowBlocks    blocks of 16 queries of a warp
//   kKeys         keys of a tile
//   kQRegisters   true: q is kept in registers; false: it is read from shared memory for each tile of keys
//   kRepeats      true: exponentials do not wait for a look at the maximum; where it was too small, q k^T is repeated
//   kStagesMask   true: the tile of a mask tensor passes through shared memory
//   kStages       stages of k and v; 1: of one each (fwd/mainloop_wide.h)
//   kLateV        true: v has one stage, and is loaded while q k^T of its tile is computed
//   kDoubles      two tiles are loaded and computed between two barriers; where it is not said, false
//   kBlocks       thread blocks that a multiprocessor's registers must have room for
//   kKeyWarps     warps that share the rows of a tile, each with its part of the keys; where it is not said, 1
//   kChannelWarps the same, each with its part of the channels
template <class Dims, Logits logits, TileRows rows>
struct ForwardTile;  // of 16 bits
template <Logits logits>
struct ForwardTile<Dims64, logits, TileRows::queries> {
  static constexpr int kWarps = 4, kRowBlocks = 2, kKeys = 64, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = true, kStagesMask = logits != Logits::plain, kRepeats = logits == Logits::plain,
                        kLateV = false;
};
template <Logits logits>
struct ForwardTile<Dims128, logits, TileRows::queries> {
  static constexpr int kWarps = 4, kRowBlocks = 2, kKeys = logits == Logits::general ? 32 : 48, kBlocks = 2;
  static constexpr int kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = logits != Logits::plain, kRepeats = false, kLateV = false;
};
template <Logits logits>
struct ForwardTile<Dims256, logits, TileRows::queries> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = logits == Logits::general ? 16 : 32, kBlocks = 2;
  static constexpr int kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = logits != Logits::plain, kRepeats = false, kLateV = false;
};

// 512 channels of o take two warps. q has no room in registers beside it, and k and v one stage each beside q.
template <Logits logits>
struct ForwardTile<Dims512, logits, TileRows::queries> {
  static constexpr int kWarps = 8, kRowBlocks = 1, kChannelWarps = 2, kKeys = 16, kBlocks = 1, kStages = 1;
  static constexpr bool kQRegisters = false, kStagesMask = false, kRepeats = false, kLateV = true;
};

// Half as many queries take half the registers, and with fewer keys at 128 half the shared memory.
template <Logits logits>
struct ForwardTile<Dims64, logits, TileRows::half_queries> : ForwardTile<Dims64, logits, TileRows::queries> {
  static constexpr int kRowBlocks = 1, kBlocks = 3;
};
template <Logits logits>
struct ForwardTile<Dims128, logits, TileRows::half_queries> : ForwardTile<Dims128, logits, TileRows::queries> {
  static constexpr int kRowBlocks = 1, kKeys = 32, kBlocks = 3;
};

// Few queries: reading k and v is what takes time. A multiprocessor of an H200 must have about 30 KB on the way to
// shared memory; with three stages a thread block has 16 to 32 KB.
template <Logits logits>
struct ForwardTile<Dims64, logits, TileRows::pairs> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 64, kBlocks = 3, kStages = 3;
  static constexpr bool kQRegisters = true, kStagesMask = false, kRepeats = false, kLateV = false;
};
template <Logits logits>
struct ForwardTile<Dims128, logits, TileRows::pairs> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 32, kBlocks = 3, kStages = 3;
  static constexpr bool kQRegisters = true, kStagesMask = false, kRepeats = false, kLateV = false;
};
template <Logits logits>
struct ForwardTile<Dims256, logits, TileRows::pairs> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 16, kBlocks = 2, kStages = 3;
  static constexpr bool kQRegisters = false, kStagesMask = false, kRepeats = false, kLateV = false;
};

template <Logits logits>
struct ForwardTile<Dims512, logits, TileRows::pairs> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kChannelWarps = 4, kKeys = 16, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = true, kStagesMask = false, kRepeats = false, kLateV = false;
};

template <class Dims, Logits logits>
struct ForwardTile<Dims, logits, TileRows::pages> : ForwardTile<Dims, logits, TileRows::pairs> {};

// One warp for up to 16 rows would leave three without work. A warp has 16 keys at least, 32 KB of k and v. With one v,
// which is loaded beside q k^T, four thread blocks have room on an H200, so that 512 of them, 64 sequences of 8 heads,
// are one round.
template <Logits logits>
struct ForwardTile<Dims64, logits, TileRows::few_pairs> : ForwardTile<Dims64, logits, TileRows::pairs> {
  static constexpr int kKeyWarps = 4, kKeys = 128, kStages = 2, kBlocks = 4;
  static constexpr bool kLateV = true;
};
template <Logits logits>
struct ForwardTile<Dims128, logits, TileRows::few_pairs> : ForwardTile<Dims128, logits, TileRows::pairs> {
  static constexpr int kKeyWarps = 4, kKeys = 64, kStages = 2, kBlocks = 4;
  static constexpr bool kLateV = true, kQRegisters = false;
};
template <class Dims, Logits logits>
struct ForwardTile<Dims, logits, TileRows::few_pages> : ForwardTile<Dims, logits, TileRows::few_pairs> {};

// Caches in 8 bits: tiles of up to 16 rows, whose keys the warps share. One warp alone would not turn codes into
// numbers as fast as they arrive. A stage has the 16 KB that it has in 16 bits, at 256 the double.
template <class Dims>
struct CodesTile {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeyWarps = 4, kKeys = 128, kBlocks = 3, kStages = 2;
  static constexpr bool kQRegisters = true, kStagesMask = false, kRepeats = false, kLateV = false;
};
template <>
struct CodesTile<Dims64> : CodesTile<Dims128> {
  static constexpr int kStages = 3;
};
template <>
struct CodesTile<Dims256> : CodesTile<Dims128> {
  static constexpr int kKeys = 64, kBlocks = 2;
  static constexpr bool kQRegisters = false;
};

// f32, in two f16 halves, whatever logits and rows are.
template <class Dims>
struct F16HalvesTile {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 32, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = false, kRepeats = false, kLateV = false;
};
template <>
struct F16HalvesTile<Dims64> : F16HalvesTile<Dims128> {
  static constexpr int kBlocks = 3;
};
template <>
struct F16HalvesTile<Dims256x128> : F16HalvesTile<Dims128> {
  static constexpr int kWarps = 2, kKeys = 16;
};

// q and k in int8, P and v in f16. At 64 and 128 a card with 99 KB of shared memory holds two thread blocks. At 256 a
// late v was slower.
template <class Dims, Logits logits, TileRows rows>
struct Int8QkTile : ForwardTile<Dims, logits, rows> {};
template <Logits logits>
struct Int8QkTile<Dims128, logits, TileRows::queries> : ForwardTile<Dims128, logits, TileRows::queries> {
  static constexpr bool kLateV = true;
};

// Two tiles between two barriers (fwd/mainloop_doubled.h), where multiprocessors have shared memory for two thread
// blocks.
template <>
struct Int8QkTile<Dims64, Logits::plain, TileRows::doubled> : ForwardTile<Dims64, Logits::plain, TileRows::queries> {
  static constexpr int kStages = 4;
  static constexpr bool kDoubles = true;
};
template <>
struct Int8QkTile<Dims128, Logits::plain, TileRows::doubled> : ForwardTile<Dims128, Logits::plain, TileRows::queries> {
  static constexpr int kStages = 4;
  static constexpr bool kDoubles = true;
};

// The same where a tile lies in a block of 64 keys that have one mean.
template <class Dims, Logits logits>
struct Int8TrainingTile : ForwardTile<Dims, logits, TileRows::queries> {};
template <Logits logits>
struct Int8TrainingTile<Dims128, logits> : ForwardTile<Dims128, logits, TileRows::queries> {
  static constexpr int kKeys = 32;
};

// P and v in e4m3, as f16: tiles lie in blocks of 64 keys. P is rounded once the maximum is known to fit.
template <class Dims, Logits logits>
struct E4m3Tile : ForwardTile<Dims, logits, TileRows::queries> {
  static constexpr bool kRepeats = false;
};
template <Logits logits>
struct E4m3Tile<Dims128, logits> : ForwardTile<Dims128, logits, TileRows::queries> {
  static constexpr int kKeys = 32;
};

// The same in bytes, of which a product takes 32 keys.
template <class Dims, Logits logits>
struct E4m3ProductTile : E4m3Tile<Dims, logits> {};
template <Logits logits>
struct E4m3ProductTile<Dims256, logits> : E4m3Tile<Dims256, logits> {
  static constexpr int kKeys = 32;
};

// P and v in 8 bits too. Each query has one scale of P for the keys of a tile, which are those of the recipe.
template <class Dims, Logits logits>
struct Int8Tile {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 64, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = logits != Logits::plain, kRepeats = false, kLateV = false;
};
template <Logits logits>
struct Int8Tile<Dims64, logits> : Int8Tile<Dims128, logits> {
  static constexpr int kRowBlocks = 2;
  static constexpr bool kQRegisters = true;
};

// The warps that share the rows of a tile, and have each its part of the keys, or of the channels.
template <class Tile>
constexpr int key_warps() {
  if constexpr (requires { Tile::kKeyWarps; })
    return Tile::kKeyWarps;
  else
    return 1;
}

template <class Tile>
constexpr int channel_warps() {
  if constexpr (requires { Tile::kChannelWarps; })
    return Tile::kChannelWarps;
  else
    return 1;
}

// Whether two tiles are loaded and computed between two barriers.
template <class Tile>
constexpr bool doubles() {
  if constexpr (requires { Tile::kDoubles; })
    return Tile::kDoubles;
  else
    return false;
}

// The kind of problem that a kernel is compiled for.
template <class Precision_, class Dims_, Logits logits, TileRows rows>
struct ForwardKind {
  using Precision = Precision_;
  using Dims = Dims_;
  static constexpr Logits kLogits = logits;
  static constexpr TileRows kTileRows = rows;
};

}  // namespace octet::cuda::sm80
