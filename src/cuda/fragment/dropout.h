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

// Dropout of a problem, as kernels read it.
struct Dropout {
  const int32_t* seed;  // seed and offset; null: there is no dropout
  int64_t stride;       // numbers between those of two sequences
  bool shared;          // true: all sequences have the same, and numbers of their own
  uint32_t dropped;     // the probability times kDropoutOne
  float scale;          // of elements that are kept; without dropout 1

  __device__ DropoutStream stream(int sequence, int head) const {
    return dropout_stream(seed + sequence * stride, shared ? sequence : 0, head);
  }
  __device__ bool drops(int sequence, int head, int query, int key) const {
    return seed && is_dropped(stream(sequence, head), dropped, query, key);
  }
};

// The tokens that the rows of a fragment are; its columns are the others.
enum class RowTokens { queries, keys };

// The elements of this thread in a fragment of 16 rows that dropout keeps. Both `row`, the thread's first row, less its
// place among the 16 rows, and `column`, the fragment's first column, are multiples of 16. All threads of a warp call
// find().
template <int Columns, RowTokens rows>
class KeptElements {
 public:
  static_assert(Columns % 16 == 0);
  __device__ void find(const DropoutStream& stream, uint32_t dropped, int row, int column) {
    const bool odd = row % 2;
#pragma unroll
    for (int group = 0; group < kGroups; group += 2) {
      const bool pair = group + 1 < kGroups;
      const uint32_t own = group_bits(stream, dropped, row, column + 16 * (group + (pair && odd)));
      const uint32_t other = pair ? __shfl_xor_sync(~0u, own, 4) : own;
      bits_[group / 2] = __byte_perm(own, other, odd ? 0x3276 : 0x5410);
    }
  }

  // Returns 32 ones for element i of the accumulator if it is kept, else 0.
  __device__ uint32_t mask(int i) const { return spread(i, 0x1111 * (8 + byte_of(i))); }
  // Returns 16 ones for each of elements i and i + 1.
  __device__ uint32_t pair_mask(int i) const { return spread(i, 0x11 * (8 + byte_of(i)) + 0x1100 * (9 + byte_of(i))); }

 private:
  static constexpr int kGroups = Columns / 16;
  // A word for each two groups, with the first one in its lower half. Byte c of a half has the elements of column c of
  // each pair of columns; bit 7 - w of that byte tells whether the element of word w is kept.
  uint32_t bits_[(kGroups + 1) / 2];

  static __device__ int byte_of(int i) { return i / 8 % 2 * 2 + i % 2; }
  // Returns four bytes of ones or zeros; each hexadecimal digit of `selector` is 8, for the sign of a byte
  // in the place of the byte, plus the number of the byte that tells which.
  __device__ uint32_t spread(int i, unsigned selector) const {
    const int word = rows == RowTokens::queries ? i / 4 % 2 + i / 2 % 2 * 2 : i / 2 % 2 + i / 4 % 2 * 2;
    uint32_t bytes;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(bytes) : "r"(bits_[i / 16] << word), "r"(selector));
    return bytes;
  }
  // Returns the elements of a group, those of the even row in the lower half.
  static __device__ uint32_t group_bits(const DropoutStream& stream, uint32_t dropped, int row, int column) {
    const unsigned thread = ptx::opaque(static_cast<int>(threadIdx.x));
    const uint32_t of_row = dropout_group(static_cast<unsigned>(row)),
                   of_column = dropout_group(static_cast<unsigned>(column) + thread % 4 * 2);
    const PhiloxWords counter = rows == RowTokens::queries ? dropout_counter(stream, of_row, of_column)
                                                           : dropout_counter(stream, of_column, of_row);
    const PhiloxWords words = philox(stream.key0, stream.key1, counter);
    const uint32_t addend = dropout_addend(words, dropped);
    uint32_t kept = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) kept |= dropout_kept(words.word[word], addend) >> word;
    return rows == RowTokens::queries ? kept : __byte_perm(kept, 0, 0x3120);
  }
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
