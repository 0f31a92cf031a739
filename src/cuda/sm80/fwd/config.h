// The tiles of the forward pass.
//
// A warp computes 16 kRowBlocks queries: each load of k and v from shared memory serves all of them. A thread holds,
// for each row block, s (keys / 2 registers) and o (dim_v / 2). With 128 threads and two thread blocks on a
// multiprocessor it can have 255 registers.
#pragma once
#include "cuda/fragment/precision.h"

namespace octet::cuda::sm80 {

// The head dims that kernels are built for. Smaller ones are padded with zeros.
template <int Dim_, int DimV_>
struct HeadDims {
  static constexpr int kDim = Dim_, kDimV = DimV_;
};
using Dims64 = HeadDims<64, 64>;
using Dims128 = HeadDims<128, 128>;
using Dims256 = HeadDims<256, 256>;
using Dims256x128 = HeadDims<256, 128>;  // f32, for up to 128 channels of v at a time

// Few queries over many keys: rows of a tile are pairs of a query and one of the heads that share k and v, and the keys
// are split among thread blocks, whose results fwd/combine.h combines.
template <class Dims>
struct Short : Dims {};
template <class Dims>
constexpr bool kShort = false;
template <class Dims>
constexpr bool kShort<Short<Dims>> = true;

// The mask tensor is the only term beside scale q.k, and its rows start at multiples of 16 bytes.
template <class Dims>
struct Masked : Dims {};
template <class Dims>
constexpr bool kMasked = false;
template <class Dims>
constexpr bool kMasked<Masked<Dims>> = true;

//   kWarps        warps of a thread block
//   kRowBlocks    blocks of 16 queries of a warp
//   kKeys         keys of a tile
//   kQRegisters   true: q is kept in registers; false: it is read from shared memory for each tile of keys
//   kRepeats      true: exponentials do not wait for a look at the maximum; where it was too small, q k^T is repeated
//   kStagesMask   true: the tile of a mask tensor passes through shared memory
//   kStages       stages of k and v
//   kBlocks       thread blocks that a multiprocessor's registers must have room for
template <class Dims, bool General, int Parts>
struct ForwardTile;
template <bool General>
struct ForwardTile<Dims64, General, 1> {
  static constexpr int kWarps = 4, kRowBlocks = 2, kKeys = 64, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = true, kStagesMask = General, kRepeats = !General;
};
template <bool General>
struct ForwardTile<Dims128, General, 1> {
  static constexpr int kWarps = 4, kRowBlocks = 2, kKeys = General ? 32 : 48, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = General, kRepeats = false;
};
template <bool General>
struct ForwardTile<Dims256, General, 1> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = General ? 16 : 32, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = General, kRepeats = false;
};

// Tiles as large as those without a mask.
template <class Dims>
struct ForwardTile<Masked<Dims>, true, 1> : ForwardTile<Dims, false, 1> {
  static constexpr bool kStagesMask = true, kRepeats = false;
};

// Few queries: reading k and v is what takes time. A multiprocessor of an H200 must have about 30 KB on the way to
// shared memory; with three stages a thread block has 16 to 32 KB.
template <bool General>
struct ForwardTile<Short<Dims64>, General, 1> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 64, kBlocks = 3, kStages = 3;
  static constexpr bool kQRegisters = true, kStagesMask = false, kRepeats = false;
};
template <bool General>
struct ForwardTile<Short<Dims128>, General, 1> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 32, kBlocks = 3, kStages = 3;
  static constexpr bool kQRegisters = true, kStagesMask = false, kRepeats = false;
};
template <bool General>
struct ForwardTile<Short<Dims256>, General, 1> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 16, kBlocks = 2, kStages = 3;
  static constexpr bool kQRegisters = false, kStagesMask = false, kRepeats = false;
};

// f32, in two parts.
template <bool General>
struct ForwardTile<Dims64, General, 2> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 32, kBlocks = 3, kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = false, kRepeats = false;
};
template <bool General>
struct ForwardTile<Dims128, General, 2> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kKeys = 32, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = false, kRepeats = false;
};
template <bool General>
struct ForwardTile<Dims256x128, General, 2> {
  static constexpr int kWarps = 2, kRowBlocks = 1, kKeys = 16, kBlocks = 2, kStages = 2;
  static constexpr bool kQRegisters = false, kStagesMask = false, kRepeats = false;
};
template <class Dims, bool General>
struct ForwardTile<Short<Dims>, General, 2> : ForwardTile<Dims, General, 2> {};

}  // namespace octet::cuda::sm80
