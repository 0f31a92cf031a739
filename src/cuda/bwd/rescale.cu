// Third kernel of the preprocessing: computes the exponents of all heads from the largest of all their numbers, and
// writes the tiles again of heads whose numbers do not fit the exponents of the sample.
#include <algorithm>

#include "cuda/bwd/tile_writer.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = kPreprocessThreads;

// Returns the exponents of a bin of a (batch, kv head), and whether its tiles do not fit those of the sample.
__device__ Exponents settled(const PreprocessParams& p, int kv, int bin, bool& unfit) {
  const Sizes sampled = p.sampled[kv];
  Sizes sizes = p.sizes[kv];
  sizes.q_row = sampled.q_row, sizes.k_row = sampled.k_row;
  if (!p.measures_all_keys)
    sizes.k = sampled.k, sizes.v = sampled.v, sizes.v_row = sampled.v_row;  // no others are known
  const int bins = bins_of(p, sampled, sizes);
  const Sizes all = sizes;
  if (bins > 1) sizes = sizes_of_bin(p, sampled, all, bin, bins);
  const Exponents sample = exponents_for(p, sampled, kRoomOfSample), exact = exponents_for(p, sizes, kRoom);
  unfit = bins > 1 || !fits(sample, exact);
  Exponents exponents = unfit ? exact : sample;
  exponents.bins = bins;
  if (bin > 0) {
    const Exponents e = exponents_for(p, sizes_of_bin(p, sampled, all, 0, bins), kRoom);
    exponents.dq = e.product + e.do_ - exponents.product - exponents.do_;
  }
  exponents.dq_sums_scale = dq_sums_scale(p, sampled, sizes, exponents);
  exponents.largest_v = largest_v(p, sizes, exponents);
  return exponents;
}

// Every thread block computes the exponents of all heads and their bins; the tiles to write again are divided among
// them.
template <class In, int Dim>
__global__ void __launch_bounds__(kTileThreads<Dim>, 2 * kPreprocessThreads / kTileThreads<Dim>)
    rescale_kernel(const __grid_constant__ PreprocessParams p) {
  constexpr int kThreads = kTileThreads<Dim>;
  __shared__ bool again[kThreads];
  __shared__ Exponents of_head[kBins];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int all = static_cast<int>(p.k.shape[0] * p.k.shape[1]);
  for (int first = 0; first < all; first += kThreads) {
    const int kv = first + static_cast<int>(threadIdx.x);
    bool unfit = false;
    if (kv < all) {
      int bin = 0, bins = 1;
      for (; bin < bins; ++bin) {
        const Exponents exponents = settled(p, kv, bin, unfit);
        bins = exponents.bins;
        if (blockIdx.x == 0) p.exponents[bin * all + kv] = exponents;
      }
      if (blockIdx.x == 0 && bins > 1) p.divided[1 + atomicAdd(p.divided, 1u)] = kv;
    }
    again[threadIdx.x] = unfit;
    if (!__syncthreads_or(unfit)) continue;
    for (int i = 0; i < kThreads; ++i) {
      if (!again[i]) continue;
      const TileWriter<F16, In, Dim> writer{p, first + i};
      __syncthreads();  // of_head is no longer read for the head before
      if (threadIdx.x < kBins) of_head[threadIdx.x] = settled(p, first + i, threadIdx.x, unfit);
      __syncthreads();
      const auto exponents_of = [&](int bin) -> const Exponents& { return of_head[bin]; };
      for (int tile = blockIdx.x; tile < p.group * p.q_blocks.count; tile += gridDim.x)
        writer.template queries<false>((first + i) * p.group + tile / p.q_blocks.count, tile % p.q_blocks.count,
                                       exponents_of);
      for (int block = blockIdx.x; p.k_tiles && block < p.k_blocks.count; block += gridDim.x)
        writer.keys(block, false, exponents_of);
    }
    __syncthreads();
  }
}

// Tiles of bf16 are not scaled, so that they always fit.
__global__ void __launch_bounds__(kThreads) settle_unscaled_kernel(const __grid_constant__ PreprocessParams p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int kv = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  bool unfit;
  if (kv < p.k.shape[0] * p.k.shape[1]) p.exponents[kv] = settled(p, kv, 0, unfit);
}

}  // namespace

template <class T, class In>
void launch_rescale(const PreprocessParams& p, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, Bf16>) {
    const int64_t heads = p.k.shape[0] * p.k.shape[1];
    const auto blocks = static_cast<unsigned>(std::max<int64_t>((heads + kThreads - 1) / kThreads, 1));
    launch_general_pdl(settle_unscaled_kernel, blocks, kThreads, 0, stream, p);
  } else {
    constexpr unsigned kMostBlocks = 264;
    const unsigned blocks = std::clamp(preprocess_tiles(p), 1u, kMostBlocks);
    with_wide_tile_dim(p.tile_dim, [&](auto dim) {
      using Writer = TileWriter<T, In, dim>;
      launch_general_pdl(rescale_kernel<In, dim>, blocks, Writer::kThreads, Writer::kSharedBytes, stream, p);
    });
  }
}

template void launch_rescale<Bf16, Bf16>(const PreprocessParams&, cudaStream_t);
template void launch_rescale<Bf16, void>(const PreprocessParams&, cudaStream_t);
template void launch_rescale<F16, Bf16>(const PreprocessParams&, cudaStream_t);
template void launch_rescale<F16, F16>(const PreprocessParams&, cudaStream_t);
template void launch_rescale<F16, void>(const PreprocessParams&, cudaStream_t);

}  // namespace octet::cuda
