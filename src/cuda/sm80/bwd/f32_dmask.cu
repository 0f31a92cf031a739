#include "cuda/bwd/tile_sizes.h"
#include "cuda/host/launch.h"
#include "cuda/sm80/bwd/f32_dmask.h"

namespace octet::cuda::sm80 {
namespace {

// A thread block computes s and dp of its queries and of a tile of keys as the kernel of dq does. Nothing is loaded
// beside its products: two thread blocks or more of a multiprocessor fill each other's gaps.
template <int Dim>
struct F32Dmask {
  using Of = F32Backward<Dim, F32Sums::dmask, Logits::general>;
  using Shared = typename Of::Shared;
  static constexpr int kRows = Of::kRows, kTokens = Of::kTokens, kThreads = Of::kThreads;
  using Sums = DmaskRow<kTokens>;
  static_assert(kRows * sizeof(Sums) <= sizeof(Shared::x));

  const DmaskParams& d;
  const Of& of;
  DmaskWalk& walk;
  bool& there;

  __device__ void advance() const {
    there = walk.advance(d);
    if (!there) return;
    Shared& s = of.shared;
    s.batch = walk.batch, s.kv_head = walk.head / (of.a.heads / of.a.kv_heads), s.first = walk.query_tile * kRows;
    s.own = of.a.q_blocks.sequence_of(0), s.others = of.a.k_blocks.sequence_of(0);
    s.start = 0, s.end = 1, s.last_head = walk.head + 1;  // the tile exists
  }

  __device__ void run() const {
    Shared& shared = of.shared;
    typename Of::Pairs sums;
    for (auto& block : sums) block.zero();
    if (threadIdx.x == 0) walk.start(d, blockIdx.x), advance();
    __syncthreads();
#pragma unroll 1
    while (there) {
      const typename Of::At at{walk.head, walk.key_tile * kTokens};
      of.load_block(at), of.load_w(at), of.load_u(at);
      ptx::cp_async_wait<0>();
      __syncthreads();
      typename Of::Pairs s, dp;
      of.multiply(dp, shared.y, shared.y_factor, of.y(), shared.w, shared.w_factor, of.w(), at);
      of.multiply(s, shared.x, shared.x_factor, of.x(), shared.u, shared.u_factor, of.u(), at);
      of.take_p_and_ds(s, dp, at);
#pragma unroll
      for (int m = 0; m < Of::kRowBlocks; ++m)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sums[m].x[i] += dp[m].x[i];
      __syncthreads();
      if (threadIdx.x == 0) advance();
      __syncthreads();
    }
    auto* const tile = reinterpret_cast<Sums*>(shared.x);
#pragma unroll
    for (int m = 0; m < Of::kRowBlocks; ++m)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i)
        tile[Of::first_row() + Of::row_of(m, i)][Of::first_token() + Of::token_of(i)] = sums[m].x[i];
    write_dmask_tile<kThreads, kRows, kTokens>(tile, d, walk);
  }
};

template <int Dim>
__global__ void __launch_bounds__(F32Dmask<Dim>::kThreads, F32Tile<Dim>::kBlocks)
    f32_dmask(const __grid_constant__ F32Params a, const __grid_constant__ DmaskParams d) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ DmaskWalk walk;
  __shared__ bool there;
  using Kernel = F32Dmask<Dim>;
  const typename Kernel::Of of{a, *reinterpret_cast<typename Kernel::Shared*>(memory)};
  Kernel{d, of, walk, there}.run();
}

}  // namespace

DmaskParams f32_dmask_params(const Problem& p, int dim, WorkspaceAllocator& workspace) {
  return with_tile_dim(dim,
                       [&](auto d) { return dmask_params(p, F32Dmask<d>::kRows, F32Dmask<d>::kTokens, workspace); });
}

void sum_f32_dmask(int dim, const F32Params& a, const DmaskParams& d, cudaStream_t stream) {
  with_tile_dim(dim, [&](auto tile_dim) {
    using Kernel = F32Dmask<tile_dim>;
    const auto kernel = f32_dmask<tile_dim>;
    allow_shared_bytes(kernel, Kernel::Of::kSharedBytes);
    kernel<<<static_cast<unsigned>(d.tiles() * d.splits), Kernel::kThreads, Kernel::Of::kSharedBytes, stream>>>(a, d);
    check(cudaGetLastError(), "f32_dmask");
  });
  sum_splits(d, stream);
}

}  // namespace octet::cuda::sm80
