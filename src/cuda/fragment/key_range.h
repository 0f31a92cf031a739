// Positional masks as launches describe them; what they do on the device is in fragment/mask.h.
#pragma once
#include <cuda_runtime_api.h>

namespace octet::cuda {

struct KeyRange {
  int first, last;  // [first, last)
};

// Which keys query i of n sees among m.
struct Mask {
  bool windowed, bottom_right;
  int left, right;  // keys seen left and right of the diagonal; at most kUnbounded

  static constexpr int kUnbounded = 1 << 29;  // sums with token counts stay in an int

  __device__ KeyRange keys_of(int i, int n, int m) const;
  // Those that any of the n queries sees.
  __device__ KeyRange seen(int n, int m) const;
  // The queries [first, last) that see any key.
  __device__ KeyRange seeing(int n, int m) const;
};

// Which tokens of a tensor of keys any query sees.
struct SeenKeys {
  int first, last;  // [first, last) of each batch element; not of packed sequences
  bool all;
  // Packed sequences, or null.
  const int *cu_seqlens_q, *cu_seqlens_k;
  int sequences;
  Mask mask;
};

}  // namespace octet::cuda
