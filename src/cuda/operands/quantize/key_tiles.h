// Tiles of keys on the device, and the scale of quantized values.
#pragma once
#include <cfloat>
#include <cmath>

#include "cuda/fragment/mask.h"
#include "cuda/operands/quantize/quantize.h"

namespace octet::cuda {

__device__ inline int first_tile(const KeyTiles& k, int sequence) { return k.cu_seqlens[sequence] / k.tile + sequence; }

__device__ inline int tokens_of(const KeyTiles& k, int sequence) {
  return k.cu_seqlens ? k.cu_seqlens[sequence + 1] - k.cu_seqlens[sequence] : k.tokens;
}

// Returns the index of the last of `count` + 1 ascending numbers f(0), f(1), ... that is at most x.
template <class F>
__device__ int last_at_most(int x, int count, const F& f) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (f(middle) <= x ? low : high) = middle;
  }
  return low;
}

// Returns the keys of a sequence that some query sees.
__device__ inline Interval seen_of(const KeyTiles& k, int sequence) {
  const int queries = k.cu_seqlens_q ? k.cu_seqlens_q[sequence + 1] - k.cu_seqlens_q[sequence] : k.queries;
  return k.mask.seen(queries, tokens_of(k, sequence));
}

// A tile of a batch element, or `tiles` tiles of one sequence: its first token, the number of tokens from there to the
// last one that is seen, and how many of these come before the first that is seen. A tile between two sequences has no
// tokens. The range is one word, as kernels are short of registers.
struct TileOfKeys {
  int sequence;  // 0 unless sequences are packed
  int first;
  unsigned range;  // first_seen * 2^16 + tokens

  // The tokens up to the last that is seen; the first `first_seen()` of them are not seen.
  __device__ int tokens() const { return range & 0xffff; }
  __device__ int first_seen() const { return range >> 16; }
  __device__ bool sees(int i) const {
    return static_cast<unsigned>(i - first_seen()) < static_cast<unsigned>(tokens() - first_seen());
  }
};
__device__ inline TileOfKeys tile_of_keys(const KeyTiles& k, int tile, int tiles = 1) {
  const bool packed = k.cu_seqlens;
  const int sequence = packed ? last_at_most(tile, k.sequences, [&](int s) { return first_tile(k, s); }) : 0;
  const int within = (packed ? tile - first_tile(k, sequence) : tile) * k.tile;
  const Interval seen = seen_of(k, sequence);
  const int tokens = min(max(seen.last - within, 0), tiles * k.tile);
  const int first_seen = min(max(seen.first - within, 0), tokens);
  return {sequence, (packed ? k.cu_seqlens[sequence] : 0) + within, static_cast<unsigned>(first_seen << 16 | tokens)};
}

// A block of tokens, also where nobody sees them: its sequence, 0 unless sequences are packed, and its tokens.
struct TokenBlock {
  int sequence, first, tokens;  // first: in the tensor
  int within;                   // the first, in the sequence
};
__device__ inline TokenBlock block_of(const KeyTiles& blocks, int block) {
  const bool packed = blocks.cu_seqlens;
  const int sequence = packed ? last_at_most(block, blocks.sequences, [&](int s) { return first_tile(blocks, s); }) : 0;
  const int within = (packed ? block - first_tile(blocks, sequence) : block) * blocks.tile;
  const int tokens = min(max(tokens_of(blocks, sequence) - within, 0), blocks.tile);
  return {sequence, (packed ? blocks.cu_seqlens[sequence] : 0) + within, tokens, within};
}

// octet::scale_of (core/quant/scale.h) of a finite amax.
struct Scale {
  float scale, inverse;
};
__device__ inline Scale scale_of(float amax, float top) {
  constexpr float kSmallest = 0x1p-110f;
  if (amax == 0.f) return {0.f, 0.f};
  const float range = amax > kSmallest ? amax : kSmallest;
  return {__fdiv_rn(range, top), __fdiv_rn(top, range)};
}

}  // namespace octet::cuda
