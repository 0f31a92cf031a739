// Tiles of keys on the device, and the step of a group of codes.
#pragma once
#include <cfloat>
#include <cmath>

#include "cuda/quant/codes.h"

namespace octet::cuda {

__device__ inline int first_tile(const KeyTiles& k, int sequence) { return k.cu_seqlens[sequence] / k.tile + sequence; }

__device__ inline int tokens_of(const KeyTiles& k, int sequence) {
  return k.cu_seqlens ? k.cu_seqlens[sequence + 1] - k.cu_seqlens[sequence] : k.tokens;
}

// The last of `count` + 1 ascending numbers f(0), f(1), ... that is at most x.
template <class F>
__device__ int last_at_most(int x, int count, const F& f) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (f(middle) <= x ? low : high) = middle;
  }
  return low;
}

// Of a batch element: the first token of a tile, or of `tiles` of one sequence, and how many tokens they hold, 0 for
// one between two sequences.
struct TileOfKeys {
  int sequence;  // packed ones; else 0
  int first, tokens;
};
__device__ inline TileOfKeys tile_of_keys(const KeyTiles& k, int tile, int tiles = 1) {
  if (!k.cu_seqlens) return {0, tile * k.tile, min(tiles * k.tile, k.tokens - tile * k.tile)};
  const int sequence = last_at_most(tile, k.sequences, [&](int s) { return first_tile(k, s); });
  const int within = (tile - first_tile(k, sequence)) * k.tile;
  return {sequence, k.cu_seqlens[sequence] + within, min(tiles * k.tile, max(tokens_of(k, sequence) - within, 0))};
}

// octet::step_of (cpu/rows.h) of a finite largest number.
struct Step {
  float step, inverse;
};
__device__ inline Step step_of(float amax, float top) {
  constexpr float kSmallest = 0x1p-110f;
  if (amax == 0.f) return {0.f, 0.f};
  const float range = amax > kSmallest ? amax : kSmallest;
  return {__fdiv_rn(range, top), __fdiv_rn(top, range)};
}

}  // namespace octet::cuda
