// The f32 backward kernels with or without general logits.
#pragma once
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/f32_kernel.h"

namespace octet::cuda::sm80 {

template <int Dim, F32Sums which, Logits logits>
__global__ void __launch_bounds__(F32Backward<Dim, which, logits>::kThreads, F32Tile<Dim>::kBlocks)
    f32_backward(const __grid_constant__ F32Params a) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Kernel = F32Backward<Dim, which, logits>;
  constexpr bool kOfKeys = Kernel::kOfKeys;
  const Blocks &blocks = kOfKeys ? a.k_blocks : a.q_blocks, &other_blocks = kOfKeys ? a.q_blocks : a.k_blocks;
  const int heads = kOfKeys ? a.kv_heads : a.heads, i = static_cast<int>(blockIdx.x) % blocks.count;
  const int head = static_cast<int>(blockIdx.x) / blocks.count % heads;
  const int batch = static_cast<int>(blockIdx.x) / blocks.count / heads;
  const int block = kOfKeys ? i : blocks.count - 1 - i;  // the longest first, where the mask is causal
  const Blocks::Sequence own = blocks.sequence_of(block);
  if (own.index < 0) return;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  const Kernel kernel{a, shared};
  if (threadIdx.x == 0) {
    shared.batch = batch, shared.kv_head = kOfKeys ? head : head / (a.heads / a.kv_heads);
    shared.first = (block - own.first_block) * Kernel::kRows, shared.own = own;
    shared.others = other_blocks.cu_seqlens ? other_blocks.sequence(own.index) : other_blocks.sequence_of(0);
    kernel.start(head);
  }
  __syncthreads();
  kernel.run(head);
}

template <int Dim, F32Sums which, Logits logits>
void launch(const F32Params& a, int64_t blocks, cudaStream_t stream) {
  using Kernel = F32Backward<Dim, which, logits>;
  const auto kernel = f32_backward<Dim, which, logits>;
  allow_shared_bytes(kernel, Kernel::kSharedBytes);
  kernel<<<static_cast<unsigned>(blocks), Kernel::kThreads, Kernel::kSharedBytes, stream>>>(a);
  check(cudaGetLastError(), "f32_backward");
}

template <Logits logits>
void launch_f32(int dim, const F32Params& a, int64_t key_blocks, int64_t query_blocks, cudaStream_t stream) {
  with_tile_dim(dim, [&](auto tile_dim) {
    constexpr int kDim = tile_dim;
    if (key_blocks) {
      if constexpr (kDim < (logits == Logits::general ? 128 : 256)) {
        launch<kDim, F32Sums::dk_and_dv, logits>(a, key_blocks, stream);
      } else {
        launch<kDim, F32Sums::dk, logits>(a, key_blocks, stream);
        launch<kDim, F32Sums::dv, logits>(a, key_blocks, stream);
      }
    }
    if (query_blocks) launch<kDim, F32Sums::dq, logits>(a, query_blocks, stream);
  });
}

}  // namespace octet::cuda::sm80
