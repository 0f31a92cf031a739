// Second kernel of the preprocessing: writes the operands as tiles, with delta and zeros for dq, and finds the largest
// numbers of each head.
#include "cuda/bwd/tile_writer.h"

namespace octet::cuda {
namespace {

// Each thread block writes one tile, or reads one of keys that the backward kernel converts. Tiles of keys are numbered
// after those of queries, and the numbers are taken from the last one down, so that the first heads, with which the
// mainloop begins, are written last and are still in L2.
template <class T, class In, int Dim>
__global__ void __launch_bounds__(kTileThreads<Dim>,
                                  (std::is_void_v<In> ? 2 : 3) * kPreprocessThreads / kTileThreads<Dim>)
    tiles_kernel(const __grid_constant__ PreprocessParams p) {
  ptx::griddepcontrol_launch_dependents();
  const int heads = static_cast<int>(p.q.shape[0] * p.q.shape[1]), q_tiles = heads * p.q_blocks.count;
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int kv = tile < q_tiles ? tile / p.q_blocks.count / p.group : (tile - q_tiles) / p.k_blocks.count;
  const TileWriter<T, In, Dim> writer{p, kv};
  // Called after the first loads and after dq is set to 0, neither of which touches memory that the kernel before uses.
  __shared__ Exponents sample_exponents;
  const auto exponents_of = [&](int) -> const Exponents& {
    ptx::griddepcontrol_wait();
    if (threadIdx.x < 32) {
      const Exponents found = exponents_for(p, p.sampled[kv], kRoomOfSample);
      if (threadIdx.x == 0) sample_exponents = found;
    }
    __syncthreads();
    return sample_exponents;
  };
  if (tile < q_tiles)
    writer.template queries<true>(tile / p.q_blocks.count, tile % p.q_blocks.count, exponents_of);
  else
    writer.keys((tile - q_tiles) % p.k_blocks.count, true, exponents_of);
}

}  // namespace

template <class T, class In>
void launch_tiles(const PreprocessParams& p, cudaStream_t stream) {
  const unsigned tiles = preprocess_tiles(p);
  if (!tiles) return;
  with_wide_tile_dim(p.tile_dim, [&](auto dim) {
    using Writer = TileWriter<T, In, dim>;
    launch_general_pdl(tiles_kernel<T, In, dim>, tiles, Writer::kThreads, Writer::kSharedBytes, stream, p);
  });
}

template void launch_tiles<Bf16, Bf16>(const PreprocessParams&, cudaStream_t);
template void launch_tiles<Bf16, void>(const PreprocessParams&, cudaStream_t);
template void launch_tiles<F16, Bf16>(const PreprocessParams&, cudaStream_t);
template void launch_tiles<F16, F16>(const PreprocessParams&, cudaStream_t);
template void launch_tiles<F16, void>(const PreprocessParams&, cudaStream_t);

}  // namespace octet::cuda
