// Positional masks, as launches pass them to kernels. fragment/mask.h has the functions for the device.
#pragma once
#include <cuda_runtime_api.h>

namespace octet::cuda {

// Keys, queries or tiles [first, last).
struct Interval {
  int first, last;

  // The tiles of `size` that it meets.
  __device__ Interval tiles(int size) const { return {first / size, (last + size - 1) / size}; }
};

// The keys that any and that all of several queries see, or the queries that see any and all of several keys.
struct SeenIntervals {
  Interval any, all;
};

// A positional mask: which of m keys each of n queries sees.
struct Mask {
  bool windowed, bottom_right;
  int left, right;  // keys seen left and right of the diagonal; at most kUnbounded

  static constexpr int kUnbounded = 1 << 29;  // sums with token counts stay in an int

  // The key on the diagonal of query 0. Token counts that lie in shared memory are only read where they are needed.
  __device__ int shift(const int& n, const int& m) const { return bottom_right ? m - n : 0; }
  __device__ Interval keys_of(int i, int n, int m) const;
  // The queries that see key j; the interval may hold numbers that are no queries.
  __device__ Interval queries_of(int j, int n, int m) const;
  // The keys that queries [first, end) see, of which there is at least one.
  __device__ SeenIntervals keys_of_all(int first, int end, int n, int m) const;
  // The queries that see keys [first, end) under a windowed mask; those that see all of them may end beyond n.
  __device__ SeenIntervals queries_of_all(int first, int end, const int& n, const int& m) const;
  // The keys that any of the n queries sees.
  __device__ Interval seen(int n, int m) const;
  // The queries that see any key.
  __device__ Interval seeing(int n, int m) const;
};

// The tokens of k and v that any query sees.
struct SeenKeys {
  int first, last;  // [first, last) of each batch element; unused for packed sequences
  bool all;
  // Packed sequences, or null.
  const int *cu_seqlens_q, *cu_seqlens_k;
  int sequences;
  Mask mask;
};

}  // namespace octet::cuda
