// Classes of tiles of logits by what a mask tensor does to them. A kernel before the mainloop reads the mask once and
// writes the class of each tile, so that the mainloop leaves out tiles that the mask hides, and does not load the mask
// where it is 0.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/fragment/positional_mask.h"
#include "cuda/host/workspace.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

// Bit 0: some key is not hidden. Bit 1: some number is not 0. Only -inf and false hide.
enum MaskClass : int { kZeros = 1, kHidden = 2, kMixed = 3 };

struct MaskClasses {
  int* data;          // null: no tile has a class
  int rows, keys;     // of a tile
  int64_t stride[2];  // [batch, head]
  int row_stride;     // from tile to tile of rows; that of keys is 1. All are 0 where the mask does not vary

  // Returns the class of the first tile of keys.
  __device__ int* of(int batch, int head, int row_tile) const {
    return data + batch * stride[0] + head * stride[1] + row_tile * row_stride;
  }
};

// Allocates the classes of tiles of a mask whose rows start at multiples of 16 bytes.
MaskClasses mask_classes(const Problem& p, const LogitTerms& terms, int rows, int keys, WorkspaceAllocator& workspace);
// Finds them.
void classify(const Problem& p, const LogitTerms& terms, const MaskClasses& classes, cudaStream_t stream);

// Returns the tiles of [first, last) from the first to the last that is not hidden, or [last, first) if all are. The
// classes of tiles, from tile 0 on, lie `stride` apart. A warp calls it.
__device__ inline Interval seen_tiles(const int* classes, int stride, int first, int last) {
  Interval seen{last, first};
  for (int tile = first + static_cast<int>(threadIdx.x) % 32; tile < last; tile += 32)
    if (classes[tile * stride] != kHidden) seen = {min(seen.first, tile), tile + 1};
  for (int offset = 16; offset; offset /= 2) {
    seen.first = min(seen.first, __shfl_xor_sync(~0u, seen.first, offset));
    seen.last = max(seen.last, __shfl_xor_sync(~0u, seen.last, offset));
  }
  return seen;
}

}  // namespace octet::cuda::sm80
