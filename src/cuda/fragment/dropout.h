// Dropout in the fragments of tensor cores (core/dropout.h).
//
// A group of 16 elements belongs to the threads of two neighbouring rows: each thread has eight, two of each word. So
// the thread of an even row computes the random numbers of every second group, the one of an odd row those of the
// others, and they exchange what is the other's.
#pragma once
#include <cstdint>

#include "core/dropout.h"
#include "cuda/fragment/accumulator.h"
#include "cuda/ptx/warpgroup.h"

namespace octet::cuda {

constexpr int kDropoutBlock = 16, kGroupsOfBlock = kDropoutBlock / 4;  // tokens; groups of these

// The places of the keys of a sequence among all keys of a batch element, by which dropout counts packed keys
// (operands/key_mask.h). Where a block of them was no block of all keys, their places' complements are stored.
struct KeyPlaces {
  const int* places;  // null: each key is in its own place

  __device__ int of(int key) const {
    const int place = places ? places[key] : key;
    return place < 0 ? ~place : place;
  }
  // Returns the first group of a block of keys, or a negative number where they were no block.
  __device__ int first_group(int block) const {
    return places ? places[kDropoutBlock * block] >> 2 : kGroupsOfBlock * block;
  }
};

// Dropout of a problem, as kernels read it.
struct Dropout {
  const int32_t* seed;    // seed and offset; null: there is no dropout
  int64_t stride;         // numbers between those of two sequences
  bool shared;            // true: all sequences have the same, and numbers of their own
  uint32_t dropped;       // the probability times kDropoutOne
  float scale;            // of elements that are kept; without dropout 1
  const int* places;      // those of KeyPlaces, by sequence
  int64_t places_stride;  // places between those of two sequences

  __device__ DropoutStream stream(int sequence, int head) const {
    return dropout_stream(seed + sequence * stride, shared ? sequence : 0, head);
  }
  __device__ KeyPlaces places_of(int sequence) const { return {places ? places + sequence * places_stride : nullptr}; }
  __device__ bool drops(int sequence, int head, int query, int key) const {
    return seed && is_dropped(stream(sequence, head), dropped, query, places_of(sequence).of(key));
  }
};

// The tokens that the rows of a fragment are; its columns are the others.
enum class RowTokens { queries, keys };

// The elements of this thread in a fragment of 16 rows that dropout keeps. Both `row`, the thread's first row, less its
// place among the 16 rows, and `column`, the fragment's first column, are multiples of 16. All threads of a warp call
// find(), or draw() and exchange().
template <int Columns, RowTokens rows>
class KeptElements {
  static constexpr bool kKeyRows = rows == RowTokens::keys;
  static constexpr int kGroups = Columns / 16, kWords = (kGroups + 1) / 2;

 public:
  static_assert(Columns % 16 == 0);
  // The groups whose random numbers this thread draws, by the numbers of their queries and of their keys. The keys are
  // a negative number where they are packed and were no block.
  struct Groups {
    int queries[kWords], keys[kWords];
  };
  __device__ static Groups groups(int row, int column, const KeyPlaces& places = {}) {
    // opaque() stops hoisting: what follows would take registers from tile to tile.
    const unsigned thread = ptx::opaque(static_cast<int>(threadIdx.x));
    const int of_row = static_cast<unsigned>(row) % 8 / 2, of_column = thread % 4;
    Groups groups;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int query_block = (kKeyRows ? column_of(i, row, column) : row) / kDropoutBlock;
      const int keys = places.first_group((kKeyRows ? row : column_of(i, row, column)) / kDropoutBlock);
      groups.queries[i] = kGroupsOfBlock * query_block + (kKeyRows ? of_column : of_row);
      groups.keys[i] = places.places && keys < 0 ? keys : keys + (kKeyRows ? of_row : of_column);
    }
    return groups;
  }
  __device__ void draw(const DropoutStream& stream, uint32_t dropped, const Groups& groups) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) bits_[i] = group_bits(stream, dropped, groups.queries[i], groups.keys[i]);
  }
  // Completes what was drawn: packed keys that were no block, and the other groups' elements.
  __device__ void exchange(const DropoutStream& stream, uint32_t dropped, int row, int column, const Groups& groups,
                           const KeyPlaces& places = {}) {
    if (places.places) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        if (groups.keys[i] < 0)
          bits_[i] = scattered_bits(stream, dropped, groups.queries[i], first_key(i, row, column), places);
    }
    exchange(row);
  }
  // All of this at once.
  __device__ void find(const DropoutStream& stream, uint32_t dropped, int row, int column,
                       const KeyPlaces& places = {}) {
    if (places.places) {
      const Groups of_thread = groups(row, column, places);
      draw(stream, dropped, of_thread);
      exchange(stream, dropped, row, column, of_thread, places);
      pin();  // else the compiler would make one path of both, which would cost the other one a twentieth
    } else {
      draw(stream, dropped, groups(row, column));
      exchange(row);
    }
  }
  // Stops the compiler from computing later what has been found.
  __device__ void pin() {
#pragma unroll
    for (uint32_t& word : bits_) word = ptx::opaque(static_cast<int>(word));
  }

  // Returns 32 ones for element i of the accumulator if it is kept, else 0.
  __device__ uint32_t mask(int i) const { return spread(i, 0x1111 * (8 + byte_of(i))); }
  // Returns 16 ones for each of elements i and i + 1.
  __device__ uint32_t pair_mask(int i) const { return spread(i, 0x11 * (8 + byte_of(i)) + 0x1100 * (9 + byte_of(i))); }

 private:
  // A word for each two groups, with the first one in its lower half. Byte c of a half has the elements of column c of
  // each pair of columns; bit 7 - w of that byte tells whether the element of word w is kept.
  uint32_t bits_[kWords];

  static __device__ constexpr bool has_pair(int word) { return 2 * word + 1 < kGroups; }
  // The first column of the group of a word that a thread draws: the second one where its row is odd.
  static __device__ int column_of(int word, int row, int column) {
    return column + kDropoutBlock * (2 * word + (has_pair(word) ? row % 2 : 0));
  }
  // The first of the four keys of that group.
  static __device__ int first_key(int word, int row, int column) {
    return kKeyRows ? row - row % 2 : column_of(word, row, column) + static_cast<int>(threadIdx.x % 4) * 2;
  }
  __device__ void exchange(int row) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t other = has_pair(i) ? __shfl_xor_sync(~0u, bits_[i], 4) : bits_[i];
      bits_[i] = __byte_perm(bits_[i], other, row % 2 ? 0x3276 : 0x5410);
    }
  }
  static __device__ int byte_of(int i) { return i / 8 % 2 * 2 + i % 2; }
  // Returns four bytes of ones or zeros; each hexadecimal digit of `selector` is 8, for the sign of a byte
  // in the place of the byte, plus the number of the byte that tells which.
  __device__ uint32_t spread(int i, unsigned selector) const {
    const int word = rows == RowTokens::queries ? i / 4 % 2 + i / 2 % 2 * 2 : i / 2 % 2 + i / 4 % 2 * 2;
    uint32_t bytes;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bytes) : "r"(bits_[i / 16] << word), "r"(selector));
    return bytes;
  }
  // Returns the elements of a group, those of the even row in the lower half. The group is that of some queries and of
  // some keys.
  static __device__ uint32_t group_bits(const DropoutStream& stream, uint32_t dropped, uint32_t queries,
                                        uint32_t keys) {
    const PhiloxWords words = philox(stream.key0, stream.key1, dropout_counter(stream, queries, keys));
    const uint32_t addend = dropout_addend(words, dropped);
    uint32_t kept = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) kept |= dropout_kept(words.word[word], addend) >> word;
    return by_rows(kept);
  }
  // The same for packed keys of different groups: the first of the four is `key`.
  static __device__ uint32_t scattered_bits(const DropoutStream& stream, uint32_t dropped, uint32_t queries, int key,
                                            const KeyPlaces& places) {
    uint32_t kept = 0;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const bool next = i % 2, right = i / 2;
      const int place = places.of(key + next + 8 * right);
      const PhiloxWords words = philox(stream.key0, stream.key1,
                                       dropout_counter(stream, queries, dropout_group(static_cast<unsigned>(place))));
      const uint32_t addend = dropout_addend(words, dropped);
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const uint32_t word = words.word[2 * below + 0], right_word = words.word[2 * below + 1];
        const uint32_t both = dropout_kept(place / 8 % 2 ? right_word : word, addend) >> place % 2 * 8 & 0x00800080;
        kept |= both << next * 8 >> (2 * below + right);
      }
    }
    return by_rows(kept);
  }
  static __device__ uint32_t by_rows(uint32_t kept) { return kKeyRows ? __byte_perm(kept, 0, 0x3120) : kept; }
};

// Sets the elements that are not kept to 0.
template <int Columns, RowTokens rows>
__device__ void drop(Accumulator<Columns>& x, const KeptElements<Columns, rows>& kept) {
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) x.x[i] = __uint_as_float(__float_as_uint(x.x[i]) & kept.mask(i));
}
template <class T, int Columns, RowTokens rows>
__device__ void drop(Operand<T, Columns>& x, const KeptElements<Columns, rows>& kept) {
  static_assert(sizeof(T) == 2);
#pragma unroll
  for (int i = 0; i < Columns / 4; ++i) x.x[i] &= kept.pair_mask(2 * i);
}

// The same for M fragments below each other.
template <int M, int Columns, RowTokens rows>
__device__ void find_kept(KeptElements<Columns, rows> (&kept)[M], const DropoutStream& stream, uint32_t dropped,
                          int row, int column) {
#pragma unroll
  for (int m = 0; m < M; ++m) kept[m].find(stream, dropped, row + 16 * m, column);
}
template <int M, int Columns, RowTokens rows>
__device__ void drop(Accumulator<Columns> (&x)[M], const KeptElements<Columns, rows> (&kept)[M]) {
#pragma unroll
  for (int m = 0; m < M; ++m) drop(x[m], kept[m]);
}

}  // namespace octet::cuda
