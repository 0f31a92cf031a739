// Each precision loads and multiplies the operands of s = q k^T and dp = do v^T in its own way. The kernel (backward.h)
// calls these verbs of its operands, and is otherwise the same for all:
//
//   Element            the type of q, k, do, P and ds as operands of dv, dk and dq
//   kReadsV            v is in shared memory as the other operands are
//   kRecomputes        what an inf or NaN reaches from behind a mask is computed again by a kernel that follows
//   kSubtractsLse      with plain logits s lacks lse, in base 2
//   Shared             what else is in shared memory
//   load_keys, load_q, load_do
//   start_bin          what depends on the exponents of a bin
//   q_k_scale          q.k = s q_k_scale
//   product_scale      dp times it is do v^T in the scale of delta
//   kScalesRows        rows of dp have factors of their own, row_scale, which takes its place
//   kPrepares, prepare   whether, and how, what depends on q alone is found once q of an iteration has arrived
//   kTileScales        tiles of P and ds are integers with a scale of their own (operands_blocks.h)
//   multiply_s, multiply_dp
//   multiply_s_by_keys, multiply_dp_by_keys   the same where keys are rows, of 32 queries from row block `block` on
//   Terms              the parameters of the kernel that belong to the operands
#pragma once
#include "cuda/bwd/params.h"
#include "cuda/fragment/rows.h"
#include "cuda/sm80/mma.h"

namespace octet::cuda::sm80 {

// The scales of a tile of P and of ds.
struct TileScales {
  float p, ds;
};

// 16 bits: the tiles that cuda/bwd has written.
template <class T>
struct BackwardOperands {
  using Element = T;
  static constexpr bool kReadsV = true, kRecomputes = true, kSubtractsLse = false, kScalesRows = false,
                        kTileScales = false;
  template <class Kernel>
  static constexpr bool kPrepares = false;
  template <class Kernel>
  struct Shared {};
  struct Terms {};

  template <class Kernel>
  static __device__ void load_keys(const Kernel&) {}
  template <class Kernel, class Step>
  static __device__ void load_q(const Kernel&, const Step&, int) {}
  template <class Kernel, class Step>
  static __device__ void load_do(const Kernel&, const Step&, int) {}
  template <class Kernel>
  static __device__ void start_bin(const Kernel&) {}
  static __device__ float q_k_scale(const Exponents& e) { return exp2f(static_cast<float>(-e.q - e.k)); }
  static __device__ float product_scale(const Exponents& e) { return exp2f(static_cast<float>(e.product)); }
  template <class Kernel>
  static __device__ void multiply_s(const Kernel& f, typename Kernel::TileS& s, int stage) {
    for (auto& block : s) block.zero();
    mma_ABt(s, typename Kernel::TileQ{f.shared.q[stage]}, Kernel::PartS::row_block(f.warp),
            typename Kernel::TileK{f.shared.k}, Kernel::PartS::column_block(f.warp));
  }
  template <class Kernel>
  static __device__ void multiply_dp(const Kernel& f, typename Kernel::TileS& dp, int do_stage) {
    for (auto& block : dp) block.zero();
    mma_ABt(dp, typename Kernel::TileQ{f.shared.do_[do_stage]}, Kernel::PartS::row_block(f.warp),
            typename Kernel::TileK{f.shared.v}, Kernel::PartS::column_block(f.warp));
  }
  template <class Kernel>
  static __device__ void multiply_s_by_keys(const Kernel& f, typename Kernel::TileS& s, int stage, int block) {
    for (auto& rows : s) rows.zero();
    mma_ABt(s, typename Kernel::TileK{f.shared.k}, Kernel::PartS::row_block(f.warp),
            typename Kernel::TileQ{f.shared.q[stage]}, block);
  }
  template <class Kernel>
  static __device__ void multiply_dp_by_keys(const Kernel& f, typename Kernel::TileS& dp, int stage, int block) {
    for (auto& rows : dp) rows.zero();
    mma_ABt(dp, typename Kernel::TileK{f.shared.v}, Kernel::PartS::row_block(f.warp),
            typename Kernel::TileQ{f.shared.do_[stage]}, block);
  }
};

}  // namespace octet::cuda::sm80
