#include "cuda/host/launch.h"
#include "cuda/sm80/mask_classes.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// The numbers of the mask that are told apart, and the tiles of keys that a warp reads at a time.
struct Extent {
  int batches, heads, rows, keys;
  int row_tiles, key_tiles, tiles_at_once;

  __host__ __device__ int64_t warps() const {
    return int64_t{batches} * heads * row_tiles * ((key_tiles + tiles_at_once - 1) / tiles_at_once);
  }
};

Extent extent_of(const Problem& p, const LogitTerms& t, int rows, int keys) {
  Extent e{.batches = t.mask_stride[0] ? static_cast<int>(p.batch) : 1,
           .heads = t.mask_stride[1] ? static_cast<int>(p.heads) : 1,
           .rows = t.mask_stride[2] ? static_cast<int>(p.tokens_q) : 1,
           .keys = static_cast<int>(p.tokens_k)};
  e.row_tiles = (e.rows + rows - 1) / rows, e.key_tiles = (e.keys + keys - 1) / keys;
  e.tiles_at_once = 32 * kMaskChunkBytes / (keys * t.mask_bytes);
  return e;
}

// A lane has a chunk of each row of a tile; the warp stops where all of its tiles are mixed.
__global__ void __launch_bounds__(kThreads)
    classify_kernel(const __grid_constant__ LogitTerms t, const Extent e, const MaskClasses classes) {
  constexpr int kAtOnce = 4;  // rows
  const int lane = threadIdx.x % 32, lanes_of_tile = classes.keys * t.mask_bytes / kMaskChunkBytes;
  for (int64_t of = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; of < e.warps();
       of += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int runs = (e.key_tiles + e.tiles_at_once - 1) / e.tiles_at_once;
    const int key_tile = static_cast<int>(of % runs) * e.tiles_at_once + lane / lanes_of_tile;
    const int row_tile = static_cast<int>(of / runs % e.row_tiles);
    const int head = static_cast<int>(of / runs / e.row_tiles % e.heads);
    const int batch = static_cast<int>(of / runs / e.row_tiles / e.heads);
    const int first = row_tile * classes.rows, last = min(first + classes.rows, e.rows);
    const bool present = lane < e.tiles_at_once * lanes_of_tile && key_tile < e.key_tiles;
    int found = 0;
    with_mask_type(t.element, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      constexpr int kNumbers = kMaskChunkBytes / sizeof(T);
      const int key = key_tile * classes.keys + lane % lanes_of_tile * kNumbers;
      const int numbers = present ? min(e.keys - key, kNumbers) : 0;
      const T* const start = reinterpret_cast<const T*>(t.mask_at(batch, head, 0, key));
      const auto add = [&](const T* x) {
        const float number = MaskNumbers<T>::one(x, 0);
        found |= (number != -INFINITY ? 1 : 0) | (number != 0.f ? 2 : 0);
      };
      for (int row = first; row < last; row += kAtOnce) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const T* const from = start + min(row + i, last - 1) * t.mask_stride[2];
          if (numbers == kNumbers) {
            const uint4 chunk = *reinterpret_cast<const uint4*>(from);
#pragma unroll
            for (int j = 0; j < kNumbers; ++j) add(reinterpret_cast<const T*>(&chunk) + j);
          } else {
            for (int j = 0; j < numbers; ++j) add(from + j);
          }
        }
        if (__all_sync(~0u, numbers <= 0 || found == kMixed)) break;
      }
    });
    const unsigned of_tile = (~0u >> (32 - lanes_of_tile)) << lane / lanes_of_tile * lanes_of_tile;
    const int visible = (__ballot_sync(~0u, found & 1) & of_tile) ? 1 : 0;
    const int other = (__ballot_sync(~0u, found & 2) & of_tile) ? 2 : 0;
    if (present && lane % lanes_of_tile == 0) classes.of(batch, head, row_tile)[key_tile] = visible | other;
  }
}

}  // namespace

MaskClasses mask_classes(const Problem& p, const LogitTerms& t, int rows, int keys, WorkspaceAllocator& workspace) {
  const Extent e = extent_of(p, t, rows, keys);
  const int64_t tiles = int64_t{e.row_tiles} * e.key_tiles;
  MaskClasses classes{.rows = rows,
                      .keys = keys,
                      .stride = {e.batches > 1 ? e.heads * tiles : 0, e.heads > 1 ? tiles : 0},
                      .row_stride = e.row_tiles > 1 ? e.key_tiles : 0};
  classes.data = workspace.take<int>(static_cast<std::size_t>(e.batches * e.heads * tiles));
  return classes;
}

void classify(const Problem& p, const LogitTerms& t, const MaskClasses& classes, cudaStream_t stream) {
  const Extent e = extent_of(p, t, classes.rows, classes.keys);
  classify_kernel<<<blocks_for(e.warps(), kWarps), kThreads, 0, stream>>>(t, e, classes);
  check(cudaGetLastError(), "classify_kernel");
}

}  // namespace octet::cuda::sm80
