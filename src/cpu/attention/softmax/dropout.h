// Dropout in tiles of P: which elements are kept, as a bit for each key of a row, and rows without the others.
#pragma once
#include <cstring>

#include "core/dropout.h"
#include "cpu/attention/job.h"
#include "cpu/gemm/simd.h"

namespace octet::cpu::OCTET_ISA {

// Leaves in bit j of kept[i] whether dropout keeps key `key` + j of query `token` + i, for whole sixteens of rows.
// `token` is a multiple of 16, `key` of kKeys; `dropped`: the probability times kDropoutOne.
static inline __attribute__((noinline)) void find_kept(const DropoutStream& stream, uint32_t dropped, int64_t token,
                                                       int64_t rows, int64_t key, uint64_t* kept) {
  constexpr int kGroups = static_cast<int>(kKeys) / 4;  // of keys
  static_assert(kQueries % 16 == 0 && kMaxBlockRows % 16 == 0 && kKeys == 64);
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t pair = 0; pair < 8; pair += 2) {  // queries i + pair, the next, and those 8 further
      uint32_t words[4][kGroups], addends[kGroups];
      // Loops over the groups become vector instructions.
      for (int g = 0; g < kGroups; ++g) {
        const PhiloxWords x = dropout_counter(stream, dropout_group(token + i + pair), dropout_group(key) + g);
        for (int w = 0; w < 4; ++w) words[w][g] = x.word[w];
      }
      for (uint32_t round = 0; round < kPhiloxRounds; ++round)
        for (int g = 0; g < kGroups; ++g) {
          const PhiloxWords x =
              philox_round({{words[0][g], words[1][g], words[2][g], words[3][g]}},
                           stream.key0 + round * kPhiloxKeyStep0, stream.key1 + round * kPhiloxKeyStep1);
          for (int w = 0; w < 4; ++w) words[w][g] = x.word[w];
        }
      for (int g = 0; g < kGroups; ++g)
        addends[g] = dropout_addend({{words[0][g], words[1][g], words[2][g], words[3][g]}}, dropped);
      // The 32 keys of half a tile: bits of each group, which have places of their own, then all of them together.
      uint32_t bits[2][2][kGroups] = {};  // [8 queries further][next query]
      for (int w = 0; w < 4; ++w)
        for (int g = 0; g < kGroups; ++g) {
          const uint32_t top = dropout_kept(words[w][g], addends[g]);
          const int first = g / 4 % 2 * 16 + w % 2 * 8 + g % 4 * 2;  // of two keys
          bits[w / 2][0][g] |= ((top >> 7 & 1) | (top >> 14 & 2)) << first;
          bits[w / 2][1][g] |= ((top >> 23 & 1) | (top >> 30 & 2)) << first;
        }
      for (int far = 0; far < 2; ++far)
        for (int next = 0; next < 2; ++next) {
          uint32_t halves[2] = {};
          for (int g = 0; g < kGroups; ++g) halves[g / 8] |= bits[far][next][g];
          kept[i + 8 * far + pair + next] = uint64_t{halves[1]} << 32 | halves[0];
        }
    }
}

// A row of a tile without the elements that are dropped, whatever they hold.
template <class Element>
OCTET_INLINE void drop(uint64_t kept, Element* row) {
  for (int64_t j = 0; j < kKeys; ++j) row[j] = kept >> j & 1 ? row[j] : Element{};
}

// The same, and the others times `scale`.
OCTET_INLINE void drop(uint64_t kept, float scale, float* row) {
  for (int64_t j = 0; j < kKeys; j += kLanes) {
    const Vi bit = splat(static_cast<int32_t>(1)) << iota();
    const Vi own = splat(static_cast<int32_t>(kept >> j)) & bit;
    store(row + j, own == Vi{} ? Vf{} : load(row + j) * scale);
  }
}

}  // namespace octet::cpu::OCTET_ISA
