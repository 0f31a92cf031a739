// Every tile size and stage count of the backward pass.
#pragma once
#include "cuda/bwd/tile_sizes.h"
#include "cuda/sm80/bwd/operands_8bit.h"
#include "cuda/sm80/bwd/operands_blocks.h"
#include "cuda/sm80/kinds.h"

namespace octet::cuda::sm80 {

// The shared memory that a kernel needs: the 99 KB that every GPU has, or more. Of head dims from 65 to 128 and above
// 256, plain logits have the 227 KB of Hopper. Of those from 65 to 128, masked logits have the 163 KB of an A100, which
// take plain ones there too; int8 of head dims up to 64 has those, too.
enum class SharedMemory : int { small, large };

// A thread block computes dk and dv of `kKeys` keys, in iterations of `kQueries` queries, with `kStages` stages of q,
// `kDoStages` of do, and `kBuffers` of p and ds; `kBlocks` thread blocks share a multiprocessor that has shared memory
// for them. The warps divide a product into rows and columns: `kWarpRows` parts of the rows of s and dp, of dk and dv,
// and of dq. With `kKeysAsRows` (mainloop_by_keys.h) the rows of s and dp are keys, divided as those of dk and dv are.
template <int Dim, Logits logits, SharedMemory memory = SharedMemory::small>
struct BackwardConfig;
struct BackwardDefaults {
  static constexpr int kWarps = 4, kStages = 2, kBuffers = 1;
  static constexpr int kSWarpRows = 2, kKeyWarpRows = 2, kDqWarpRows = 2;
  // true: dq is computed before dv and dk, and added to its sums between their products, which takes registers
  static constexpr bool kSpreadsDq = false;
  static constexpr bool kDqHalves = false;  // true: dq is computed in two halves, which saves registers
  static constexpr bool kKeysAsRows = false;
  static constexpr int kQStages = 0;     // of q, if they are not kStages
  static constexpr int kBiasStages = 1;  // of the row biases
  // Warps that share numbers of s and dp, each with its part of the channels (mainloop_wide.h).
  static constexpr int kChannelWarps = 1;
  // true: ds is the gradient of what is added to a capped logit
  static constexpr bool kOfAdded = false;
};
template <>
struct BackwardConfig<64, Logits::plain> : BackwardDefaults {
  static constexpr int kQueries = 64, kKeys = 128, kDoStages = 2, kBlocks = 2;
  static constexpr int kKeyWarpRows = 4;
  static constexpr bool kKeysAsRows = true;
};
template <>
struct BackwardConfig<128, Logits::plain> : BackwardDefaults {
  static constexpr int kQueries = 64, kKeys = 64, kDoStages = 1, kBlocks = 2;
  static constexpr bool kDqHalves = true;
};
template <>
struct BackwardConfig<256, Logits::plain> : BackwardDefaults {
  static constexpr int kQueries = 32, kKeys = 32, kDoStages = 1, kBlocks = 2;
  static constexpr int kKeyWarpRows = 1, kDqWarpRows = 1;
  static constexpr bool kDqHalves = true;
};
// dk and dv of 32 keys take half of the registers.
template <>
struct BackwardConfig<512, Logits::plain> : BackwardDefaults {
  static constexpr int kWarps = 8, kQueries = 16, kKeys = 32, kStages = 1, kDoStages = 1, kBlocks = 1;
  static constexpr int kSWarpRows = 1, kKeyWarpRows = 1, kDqWarpRows = 1, kChannelWarps = 4;
  static constexpr bool kDqHalves = true;
};
template <>
struct BackwardConfig<512, Logits::plain, SharedMemory::large> : BackwardConfig<512, Logits::plain> {
  static constexpr int kQueries = 32, kStages = 2, kDoStages = 2, kSWarpRows = 2;
};
template <>
struct BackwardConfig<128, Logits::plain, SharedMemory::large> : BackwardDefaults {
  static constexpr int kWarps = 8, kQueries = 64, kKeys = 128, kBlocks = 1;
  static constexpr int kStages = 3, kDoStages = 3, kBuffers = 2;
  static constexpr int kKeyWarpRows = 4;
  static constexpr bool kKeysAsRows = true;
};
template <>
struct BackwardConfig<64, Logits::masked> : BackwardConfig<64, Logits::plain> {};
template <>
struct BackwardConfig<128, Logits::masked, SharedMemory::large> : BackwardDefaults {
  static constexpr int kWarps = 8, kQueries = 64, kKeys = 128, kDoStages = 2, kBlocks = 1;
  static constexpr int kKeyWarpRows = 4;
  static constexpr bool kSpreadsDq = true;
};
template <>
struct BackwardConfig<64, Logits::general> : BackwardDefaults {
  static constexpr int kQueries = 64, kKeys = 64, kDoStages = 2, kBlocks = 2;
};
template <>
struct BackwardConfig<128, Logits::general> : BackwardDefaults {
  static constexpr int kQueries = 32, kKeys = 64, kDoStages = 1, kBlocks = 2;
};
template <>
struct BackwardConfig<256, Logits::general> : BackwardConfig<256, Logits::plain> {};
template <>
struct BackwardConfig<512, Logits::general> : BackwardConfig<512, Logits::plain> {};

// int8: q and do are in shared memory in int8 and in f16, k too, v in int8 alone.
template <int Dim, Logits logits, SharedMemory memory = SharedMemory::small>
struct Int8BackwardConfig;
template <>
struct Int8BackwardConfig<64, Logits::plain> : BackwardDefaults {
  static constexpr int kQueries = 64, kKeys = 64, kDoStages = 2, kBlocks = 2;
};
template <>
struct Int8BackwardConfig<64, Logits::plain, SharedMemory::large> : BackwardConfig<64, Logits::plain> {};
template <>
struct Int8BackwardConfig<128, Logits::plain> : BackwardDefaults {
  static constexpr int kQueries = 32, kKeys = 64, kDoStages = 1, kBlocks = 2;
};
template <>
struct Int8BackwardConfig<128, Logits::plain, SharedMemory::large> : BackwardDefaults {
  static constexpr int kWarps = 8, kQueries = 64, kKeys = 128, kDoStages = 2, kBlocks = 1;
  static constexpr int kKeyWarpRows = 4;
  static constexpr bool kSpreadsDq = true;
};
template <>
struct Int8BackwardConfig<64, Logits::general> : BackwardDefaults {
  static constexpr int kQueries = 64, kKeys = 64, kDoStages = 1, kBlocks = 2;
};
template <>
struct Int8BackwardConfig<128, Logits::general> : Int8BackwardConfig<128, Logits::plain> {};

// Blocks of tokens, and tiles of 64 x 64 numbers of P and ds, that share a scale: what has a place in 99 KB. q and do
// have one stage, and the next ones are loaded as soon as all have read these.
template <int Dim>
struct BlockBackwardConfig : BackwardDefaults {
  static constexpr int kQueries = 64, kKeys = 64, kStages = 1, kDoStages = 1, kBlocks = 2;
};
template <>
struct BlockBackwardConfig<128> : BlockBackwardConfig<64> {
  static constexpr int kWarps = 8, kBlocks = 1;
  static constexpr int kSWarpRows = 4, kKeyWarpRows = 4, kDqWarpRows = 4;
};

// The kind of problem that a kernel is compiled for. Without a mask tensor, masked logits are plain.
template <class Operands_, int Dim, Logits logits, SharedMemory memory>
struct BackwardKind {
  using Operands = Operands_;
  using Config = BackwardConfig<Dim, logits, memory>;
  static constexpr int kDim = Dim;
  static constexpr Logits kLogits = logits;
  static constexpr SharedMemory kMemory = memory;
};

template <int Dim, Logits logits, SharedMemory memory>
struct Int8BackwardKind {
  using Operands = Int8Operands;
  using Config = Int8BackwardConfig<Dim, logits, memory>;
  static constexpr int kDim = Dim;
  static constexpr Logits kLogits = logits;
  static constexpr SharedMemory kMemory = memory;
};

template <int Dim, Logits logits>
struct BlockBackwardKind {
  using Operands = BlockOperands;
  using Config = BlockBackwardConfig<Dim>;
  static constexpr int kDim = Dim;
  static constexpr Logits kLogits = logits;
  static constexpr SharedMemory kMemory = SharedMemory::small;
};

// The part of a product of `Rows` x `Columns` numbers that one warp computes.
template <int Rows, int Columns, int Warps, int WarpRows>
struct WarpPart {
  static constexpr int kBlocks = Rows / WarpRows / 16;  // of 16 rows
  static constexpr int kColumns = Columns * WarpRows / Warps, kWarpColumns = Warps / WarpRows;
  static_assert(Rows % (16 * WarpRows) == 0 && Warps % WarpRows == 0 && kColumns % 16 == 0);
  static __device__ int row_block(int warp) { return warp % WarpRows * kBlocks; }
  static __device__ int column_block(int warp) { return kWarpColumns == 1 ? 0 : warp / WarpRows * (kColumns / 16); }
};

}  // namespace octet::cuda::sm80
