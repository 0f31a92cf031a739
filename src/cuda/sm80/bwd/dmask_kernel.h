// The kernel that sums dmask (dmask.h) of operands in 16 bits: the products, logits and ds of the backward kernel,
// whose functions it calls (backward.h), in another loop. Operands have one stage: once s and dp are in registers,
// those of the next tile are loaded beside the exponentials. What is loaded for each row has two.
#pragma once
#include "cuda/bwd/exponents.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm80/bwd/dmask.h"
#include "cuda/sm80/bwd/dmask_kernels.h"
#include "cuda/sm80/bwd/mainloop.h"

namespace octet::cuda::sm80 {

template <int Dim>
struct DmaskConfig : BackwardDefaults {
  static constexpr int kQueries = Dim == 256 ? 32 : 64, kKeys = Dim == 64 ? 128 : Dim == 128 ? 64 : 32;
  static constexpr int kStages = 2, kBiasStages = 2, kQStages = 1, kDoStages = 1, kBuffers = 0, kBlocks = 2;
  static constexpr bool kOfAdded = true;
};

template <class T, int Dim, Logits logits>
struct DmaskKind {
  using Operands = BackwardOperands<T>;
  using Config = DmaskConfig<Dim>;
  static constexpr int kDim = Dim;
  static constexpr Logits kLogits = logits;
  static constexpr SharedMemory kMemory = SharedMemory::small;
};

template <class Kind>
struct DmaskOf16Bits {
  using Of = Backward<Kind>;
  using Operands = typename Of::Operands;
  using Step = typename Of::Step;
  using TileS = typename Of::TileS;
  using PartS = typename Of::PartS;
  using Shared = typename Of::Shared;
  static constexpr int kQueries = Of::kQueries, kKeys = Of::kKeys, kThreads = Of::kThreads;

  // What one thread writes and all read.
  struct State {
    DmaskWalk walk;
    KeyBlockInfo next;  // of the tile that is loaded; `walk` is at it
    bool there;         // it exists
    Step next_step;
    float to_ds[2];  // ds of the kernel times these is ds
  };
  // Sums take the place of the operands.
  using Sums = DmaskRow<kKeys>;
  static_assert(kQueries * sizeof(Sums) <= offsetof(Shared, lse));

  const DmaskParams& d;
  const KernelParams& params;
  Shared& shared;
  State& state;
  int warp, lane;

  // The tile that is computed, and the one that is loaded. opaque() stops the compiler from keeping what it works out
  // from warp and lane in registers, which the three accumulators take.
  __device__ Of at(const KeyBlockInfo& w) const {
    return {params, params.a, shared, ptx::opaque(warp), ptx::opaque(lane), w, shared.exponents};
  }

  // Goes on to the next bin of a tile, or to the next tile. One thread calls it.
  __device__ void advance(bool next_bin) const {
    KeyBlockInfo& w = state.next;
    if (next_bin) {
      ++w.bin;
      return;
    }
    DmaskWalk& walk = state.walk;
    state.there = walk.advance(d);
    const BackwardParams& a = params.a;
    using Tiles = typename Of::Tiles;
    const int first_query = walk.query_tile * kQueries;
    w.batch = walk.batch, w.kv_head = walk.head / (a.heads / a.kv_heads), w.first_key = walk.key_tile * kKeys;
    w.block = w.first_key / Tiles::kKeys, w.bin = 0;
    w.q = a.q_blocks.sequence_of(0), w.k = a.k_blocks.sequence_of(0);
    state.next_step = {(walk.batch * a.heads + walk.head) * a.q_blocks.count + first_query / Tiles::kQueries,
                       first_query % Tiles::kQueries, first_query, walk.head};
  }

  // Begins the tile that has arrived, and finds the next one. One thread calls it.
  __device__ void begin(int n) const {
    const Exponents& e = shared.exponents;
    shared.key_block = state.next, shared.steps[n % 2] = state.next_step;
    shared.q_k_scale = Operands::q_k_scale(e), shared.scale_log2 = 1.44269504f;
    shared.product_scale = Operands::product_scale(e) * (Of::kGeneral ? params.dropout.scale : 1.f);
    const int exponent = -e.p - e.product - e.do_ - e.v, part = min(max(exponent, -126), 126);
    state.to_ds[0] = power_of_two(part), state.to_ds[1] = power_of_two(exponent - part);
    advance(shared.key_block.bin + 1 < e.bins);
  }

  // Starts the copies of the tile in `state`, if there is one.
  __device__ void load(int stage) const {
    if (state.there) {
      const Of next = at(state.next);
      const BackwardParams& a = params.a;
      next.load_q(state.next_step, stage), next.load_do(state.next_step, 0), next.load_keys();
      next.load_mask(state.next_step, false, stage);
      constexpr int kWords = sizeof(Exponents) / sizeof(int);
      const auto* const from = reinterpret_cast<const int*>(
          &a.exponents[(next.w.bin * a.batch + next.w.batch) * a.kv_heads + next.w.kv_head]);
      const int i = static_cast<int>(threadIdx.x);
      if (i < kWords) ptx::cp_async_word(ptx::shared_address(reinterpret_cast<int*>(&shared.exponents) + i), from + i);
    }
    ptx::cp_async_commit();
  }

  // Adds the ds of the current tile, of which s and dp are the products.
  __device__ void add(TileS& sums, TileS& s, TileS& dp, int stage) const {
    const Of now = at(shared.key_block);
    const Step& step = shared.steps[stage];
    if constexpr (Of::kGeneral) {
      typename Of::Kept kept;
      now.find_kept(step, kept), now.drop_from(dp, kept);
      now.add_logit_terms(s, dp, step, stage);
    } else {
      now.add_mask_tile(s, shared.q_k_scale * params.a.scale, true, stage);
    }
    now.take_p(s, stage), now.hide(s, step.query), now.take_ds(s, dp, stage);
    const float by = state.to_ds[0], rest = state.to_ds[1];
    if (rest != 1.f)
      for (auto& block : dp) block.scale(rest);
#pragma unroll
    for (int m = 0; m < PartS::kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < PartS::kColumns / 2; ++i) sums[m].x[i] = __fmaf_rn(dp[m].x[i], by, sums[m].x[i]);
  }

  // Returns whether the tile of the mask hides all pairs. All threads call it.
  __device__ bool hides_all() const {
    const int row = 16 * PartS::row_block(warp) + lane / 4, column = 16 * PartS::column_block(warp) + fragment_column();
    bool hides = true;
#pragma unroll 1
    for (int m = 0; m < PartS::kBlocks; ++m) {
      Accumulator<PartS::kColumns> none;
      MaskFragment<kKeys>{at(state.next).mask_tile(), params.terms.element, row + 16 * m, column}.each_pair(
          none, [&](auto*, float&, float&, const float2& numbers, int) {
            hides &= numbers.x == -INFINITY && numbers.y == -INFINITY;
          });
    }
    return __syncthreads_and(hides);
  }

  __device__ void write(const TileS& x) const {
    auto* const sums = reinterpret_cast<Sums*>(&shared);
    const int row = 16 * PartS::row_block(warp) + lane / 4, column = 16 * PartS::column_block(warp) + fragment_column();
#pragma unroll
    for (int m = 0; m < PartS::kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < PartS::kColumns / 2; i += 2)
        *reinterpret_cast<float2*>(&sums[row + 16 * m + i / 2 % 2 * 8][column + i / 4 * 8]) =
            float2{x[m].x[i], x[m].x[i + 1]};
    write_dmask_tile<kThreads, kQueries, kKeys>(sums, d, state.walk);
  }

  __device__ void run() const {
    if (threadIdx.x == 0) state.walk.start(d, blockIdx.x), advance(false);
    __syncthreads();
    // All tiles of logits have the same tile of the mask. One that is the same for all queries is loaded from the first
    // ones on, which are not fewer than those of another tile.
    if (state.there) {
      Step of_mask = state.next_step;
      if (d.query_tiles.shared()) of_mask.query = 0;
      at(state.next).load_mask(of_mask, true);
    }
    load(0);
    TileS sums;
    for (auto& block : sums) block.zero();
    for (int n = 0; state.there; ++n) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // the tile has arrived, and the last one's rows have been read
      if (!Of::kGeneral && n == 0 && hides_all()) break;
      if (threadIdx.x == 0) begin(n);
      TileS s, dp;
      const Of now = at(shared.key_block);
      Operands::multiply_dp(now, dp, 0), Operands::multiply_s(now, s, 0);
      __syncthreads();  // its operands have been read
      load((n + 1) % 2);
      add(sums, s, dp, n % 2);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    write(sums);
  }
};

template <class Kind>
__global__ void __launch_bounds__(DmaskOf16Bits<Kind>::kThreads, Kind::Config::kBlocks)
    dmask_by_mma_sync(const __grid_constant__ KernelParams params, const __grid_constant__ DmaskParams d) {
  using Kernel = DmaskOf16Bits<Kind>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ typename Kernel::State state;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  Kernel{d, params, *reinterpret_cast<typename Kernel::Shared*>(memory), state, warp, lane}.run();
}

template <class T, Logits logits>
DmaskKernel dmask_kernel(int dim) {
  return with_tile_dim(dim, [](auto tile_dim) {
    using Kind = DmaskKind<T, tile_dim, logits>;
    using Kernel = Backward<Kind>;
    return DmaskKernel{.function = dmask_by_mma_sync<Kind>,
                       .queries = Kernel::kQueries,
                       .keys = Kernel::kKeys,
                       .threads = Kernel::kThreads,
                       .shared_bytes = Kernel::kSharedBytes,
                       .mask_rows = Kernel::kMaskRows,
                       .mask_columns = Kernel::kMaskColumns};
  });
}

}  // namespace octet::cuda::sm80
