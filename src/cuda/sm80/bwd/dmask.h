// The gradient of a mask tensor: ds, before the derivative of a softcap, summed in float32 over what the mask
// broadcasts.
//
// Kernels of its own compute s and dp of the backward pass once more. A thread block has a tile of dmask, so that the
// mask of all its pairs is one tile too, and goes through the tiles of logits that add to it, batch elements, heads
// and, where the mask is the same for all queries or keys, tiles of them. Sums stay in its registers: their order is
// fixed, and nothing of [batch, head, query, key] is in memory that dmask does not have. Where dmask has too few tiles
// for the device, thread blocks share those that add to a tile (`splits`), and a last kernel sums what they have.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "core/problem.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/strided.h"
#include "cuda/host/workspace.h"
#include "cuda/operands/mask_tensor.h"

namespace octet::cuda::sm80 {

// What of one dimension adds to a tile of dmask, [first, last), and how many tiles dmask has of it: 1 where the mask is
// the same for all.
struct DmaskDimension {
  int all, tiles;
  __host__ __device__ bool shared() const { return tiles == 1; }
  __host__ __device__ int64_t of_tile() const { return shared() ? all : 1; }
};

struct DmaskParams {
  Strided to;
  float* sums;                // [split][batch, head, query, key] of dmask; null: one split, which writes dmask
  int splits, queries, keys;  // queries, keys: of a tile
  DmaskDimension batches, heads, query_tiles, key_tiles;
  int tokens_q, tokens_k;
  Mask positional;
  MaskTensor mask;

  __host__ __device__ int64_t tiles() const {
    return int64_t{batches.tiles} * heads.tiles * query_tiles.tiles * key_tiles.tiles;
  }
  // Returns how many tiles of logits add to a tile.
  __host__ __device__ int64_t steps() const {
    return batches.of_tile() * heads.of_tile() * query_tiles.of_tile() * key_tiles.of_tile();
  }
  // Returns false where dmask has no element, or none of its elements has a pair of a query and a key.
  bool any_pair() const { return elements() && steps(); }
  __host__ __device__ int64_t elements() const { return to.shape[0] * to.shape[1] * to.shape[2] * to.shape[3]; }

  // Returns an element from the sum of what adds to it. Where the mask hides it, ds is 0, but 0 times NaN in kernels.
  __device__ float element(int batch, int head, int query, int key, float sum) const {
    if (!isnan(sum)) return sum;
    const float number =
        mask_number(mask.element, mask.data, mask.row(batch, head, query) + int64_t{key} * mask.stride[3]);
    if (number == -INFINITY) return 0.f;
    if (to.shape[2] == 1 || to.shape[3] == 1) return sum;
    const Interval seen = positional.keys_of(query, tokens_q, tokens_k);
    return seen.first <= key && key < seen.last ? sum : 0.f;
  }
  // Writes what a split has of an element, or the element where there is one split.
  __device__ void write(int split, int batch, int head, int query, int key, float sum) const {
    if (sums) {
      const int64_t row = (int64_t{batch} * to.shape[1] + head) * to.shape[2] + query;
      sums[split * elements() + row * to.shape[3] + key] = sum;
    } else {
      static_cast<float*>(
          to.data)[batch * to.stride[0] + head * to.stride[1] + query * to.stride[2] + key * to.stride[3]] =
          element(batch, head, query, key, sum);
    }
  }
};

// The tiles of logits that a thread block adds up. One thread goes through them.
struct DmaskWalk {
  // The first tile of logits that adds to the tile of dmask, and the one that comes now.
  int first_batch, first_head, first_query_tile, first_key_tile;
  int batch, head, query_tile, key_tile;
  int split;
  int64_t left;  // tiles that come later

  // Begins the part of thread block `block`, before its first tile. All threads of the block wait for the one that
  // calls it, so it divides numbers of 64 bits only where there is something to divide.
  __device__ void start(const DmaskParams& d, unsigned block) {
    const auto next = [&](auto& rest, int count) {
      if (count == 1) return 0;
      const auto at = static_cast<int>(rest % count);
      rest /= count;
      return at;
    };
    const auto first = [&](const DmaskDimension& x) { return next(block, x.tiles); };
    split = next(block, d.splits);
    first_key_tile = first(d.key_tiles), first_query_tile = first(d.query_tiles);
    first_head = first(d.heads), first_batch = first(d.batches);
    const int64_t steps = d.steps();
    const auto start_of_split = [&](int i) { return d.splits == 1 ? i * steps : steps * i / d.splits; };
    int64_t from = start_of_split(split);
    left = start_of_split(split + 1) - from;
    const auto start_of = [&](int first_of_tile, const DmaskDimension& x) {
      return first_of_tile + next(from, static_cast<int>(x.of_tile()));
    };
    key_tile = start_of(first_key_tile, d.key_tiles) - 1, query_tile = start_of(first_query_tile, d.query_tiles);
    head = start_of(first_head, d.heads), batch = start_of(first_batch, d.batches);
  }

  // Goes on to the next tile of which some query sees some key; returns false if there is none.
  __device__ bool advance(const DmaskParams& d) {
    while (left > 0) {
      --left;
      const auto carries = [](int& at, int first, const DmaskDimension& x) {
        if (++at < first + x.of_tile()) return false;
        at = first;
        return true;
      };
      carries(key_tile, first_key_tile, d.key_tiles) && carries(query_tile, first_query_tile, d.query_tiles) &&
          carries(head, first_head, d.heads) && carries(batch, first_batch, d.batches);
      const int query = query_tile * d.queries, key = key_tile * d.keys;
      const Interval seen =
          d.positional.keys_of_all(query, min(query + d.queries, d.tokens_q), d.tokens_q, d.tokens_k).any;
      if (max(seen.first, key) < min(seen.last, key + d.keys)) return true;
    }
    return false;
  }
};

// A row of a tile of sums in shared memory. What follows its columns puts the pairs of a fragment into banks of their
// own, and leaves rows at multiples of 16 bytes.
template <int Columns>
using DmaskRow = float[Columns + 8];

// Writes the first rows and columns of a tile of sums, in words of four columns. Returns false where it cannot.
template <int Threads, int Columns>
__device__ bool write_dmask_words(const DmaskRow<Columns>* sums, const DmaskParams& d, const DmaskWalk& walk, int query,
                                  int key, int rows, int columns) {
  constexpr int kWord = 4, kLanes = Columns / kWord, kRowsAtOnce = Threads / kLanes;
  const Strided& to = d.to;
  const int64_t row_stride = d.sums ? to.shape[3] : to.stride[2];
  const int64_t first =
      d.sums
          ? walk.split * d.elements() +
                ((int64_t{walk.first_batch} * to.shape[1] + walk.first_head) * to.shape[2] + query) * to.shape[3] + key
          : walk.first_batch * to.stride[0] + walk.first_head * to.stride[1] + query * to.stride[2] + key;
  float* const at = (d.sums ? d.sums : static_cast<float*>(to.data)) + first;
  if (reinterpret_cast<uintptr_t>(at) % (kWord * sizeof(float)) || row_stride % kWord || columns % kWord ||
      (!d.sums && to.stride[3] != 1))
    return false;
  const int column = static_cast<int>(threadIdx.x) % kLanes * kWord;
  if (column >= columns) return true;
#pragma unroll 2
  for (int row = static_cast<int>(threadIdx.x) / kLanes; row < rows; row += kRowsAtOnce) {
    float4 x = *reinterpret_cast<const float4*>(&sums[row][column]);
    if (!d.sums && isnan(x.x + x.y + x.z + x.w)) {
      float* const numbers = &x.x;
#pragma unroll
      for (int i = 0; i < kWord; ++i)
        numbers[i] = d.element(walk.first_batch, walk.first_head, query + row, key + column + i, sums[row][column + i]);
    }
    *reinterpret_cast<float4*>(at + row * row_stride + column) = x;
  }
  return true;
}

// Writes a tile of sums that all of `Threads` threads have filled. Rows and columns of a mask that is the same for all
// are summed first.
template <int Threads, int Rows, int Columns>
__device__ void write_dmask_tile(DmaskRow<Columns>* sums, const DmaskParams& d, const DmaskWalk& walk) {
  static_assert(Columns <= Threads && Rows <= Threads);
  const int thread = static_cast<int>(threadIdx.x);
  int rows = min(Rows, d.tokens_q - walk.first_query_tile * Rows),
      columns = min(Columns, d.tokens_k - walk.first_key_tile * Columns);
  __syncthreads();
  if (d.to.shape[2] == 1) {
    rows = 1;
    if (thread < Columns) {
      float sum = sums[0][thread];
#pragma unroll 4
      for (int row = 1; row < Rows; ++row) sum += sums[row][thread];
      sums[0][thread] = sum;
    }
    __syncthreads();
  }
  if (d.to.shape[3] == 1) {
    columns = 1;
    if (thread < rows) {
      float sum = sums[thread][0];
#pragma unroll 4
      for (int column = 1; column < Columns; ++column) sum += sums[thread][column];
      sums[thread][0] = sum;
    }
    __syncthreads();
  }
  const int query = d.to.shape[2] == 1 ? 0 : walk.first_query_tile * Rows,
            key = d.to.shape[3] == 1 ? 0 : walk.first_key_tile * Columns;
  if (write_dmask_words<Threads, Columns>(sums, d, walk, query, key, rows, columns)) return;
#pragma unroll 1
  for (int i = thread; i < Rows * Columns; i += Threads) {
    const int row = i / Columns, column = i % Columns;
    if (row < rows && column < columns)
      d.write(walk.split, walk.first_batch, walk.first_head, query + row, key + column, sums[row][column]);
  }
}

// Returns the parameters for tiles of that many queries and keys, and allocates the sums of splits.
DmaskParams dmask_params(const Problem& p, int queries, int keys, WorkspaceAllocator& workspace);
// Returns what the description of a plan says of it; nothing where no gradient is wanted.
std::string description(const DmaskParams& d);
// Writes dmask from the sums of splits, where there are any.
void sum_splits(const DmaskParams& d, cudaStream_t stream);
// Sets dmask to 0, if it has elements.
void clear_dmask(const DmaskParams& d, cudaStream_t stream);

}  // namespace octet::cuda::sm80
