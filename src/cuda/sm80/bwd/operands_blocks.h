// The operands of a backward pass whose products are those of int8 with scales of blocks (SageBwd): the values of q, k
// and, for dv, do, and P and ds, of which 64 queries and 64 keys share a scale. operands.h has the list of the verbs.
//
// f16 has all of these integers, and so they are tiles and operands of f16, whose products float32 sums exactly. int8
// itself would need q, k and do in a second copy and ds in two orders, as ldmatrix transposes numbers of 16 bits alone.
// dp is the product of do and v in f16. NaN stays itself among the integers.
#pragma once
#include "cuda/operands/quantize/block_scales.h"
#include "cuda/operands/quantize/key_tiles.h"
#include "cuda/sm80/bwd/operands.h"

namespace octet::cuda::sm80 {

constexpr int kScaledTile = 64;  // queries, and keys, that share a scale of P and of ds

struct BlockOperands : BackwardOperands<F16> {
  using Base = BackwardOperands<F16>;
  static constexpr bool kRecomputes = false, kSubtractsLse = true, kTileScales = true;

  struct Terms {
    const unsigned char* do_values;             // tiles of do in int8, as those of f16
    const float *q_scale, *k_scale, *do_scale;  // [batch, head, block]
    int q_blocks, k_blocks, do_blocks;          // of a head
    const float* mean_logit;                    // [batch, head, token]: what q.k lacks; null: lse lacks it too
    const float* k_mean;                        // [sequence, kv_head, dim]
    bool adds_mean;                             // dq gets the sums of the rows of ds times the mean of k
  };

  template <class Kernel>
  struct Shared {
    static constexpr int kWarps = Kernel::C::kWarps, kRows = Kernel::kPlain ? 1 : Kernel::kQueries;
    alignas(kChunkBytes) float largest_p[kWarps], largest_ds[kWarps];
    float row_sums[Kernel::PartS::kWarpColumns][kRows];
    float mean_logit[kRows];
    float q_scale, k_scale, do_scale;
    float q_unit, k_unit, do_unit;  // the powers of two by which dk, dq and dv are multiplied
  };

  // Returns the number of a block of a packed sequence, or of a head, among those of all heads.
  static __device__ int64_t block_of(int64_t head, int blocks, const Blocks::Sequence& sequence, int token, int rows) {
    return head * blocks + sequence.first / rows + sequence.index + token / rows;
  }
  template <class Kernel>
  static __device__ void load_keys(const Kernel& f) {
    static_assert(Kernel::kQueries == kScaledTile && Kernel::kKeys == kScaledTile);
    const Terms& terms = f.params.blocks;
    const int64_t head = int64_t{f.w.batch} * f.a.kv_heads + f.w.kv_head;
    if (threadIdx.x == 0)
      f.shared.operands.k_scale = terms.k_scale[block_of(head, terms.k_blocks, f.w.k, f.w.first_key, kScaledKeys)];
  }
  template <class Kernel, class Step>
  static __device__ int64_t head_of(const Kernel& f, const Step& step) {
    return int64_t{f.w.batch} * f.a.heads + step.head;
  }
  template <class Kernel, class Step>
  static __device__ void load_q(const Kernel& f, const Step& step, int) {
    const Terms& terms = f.params.blocks;
    auto& shared = f.shared.operands;
    const int64_t head = head_of(f, step);
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    if (thread == 0)
      ptx::cp_async_word(ptx::shared_address(&shared.q_scale),
                         terms.q_scale + block_of(head, terms.q_blocks, f.w.q, step.query, kScaledQueries));
    if (!Kernel::kPlain && terms.mean_logit && thread < Kernel::kQueries)
      ptx::cp_async_word(
          ptx::shared_address(&shared.mean_logit[thread]),
          terms.mean_logit + head * f.a.q_blocks.tokens + f.w.q.first + min(step.query + thread, f.w.q.tokens - 1));
  }
  template <class Kernel, class Step>
  static __device__ void load_do(const Kernel& f, const Step& step, int) {
    const Terms& terms = f.params.blocks;
    if (threadIdx.x == 0)
      ptx::cp_async_word(ptx::shared_address(&f.shared.operands.do_scale),
                         terms.do_scale + block_of(head_of(f, step), terms.do_blocks, f.w.q, step.query, kScaledTile));
  }
  // Loads the values of do in int8 where do was.
  template <class Kernel, class Step>
  static __device__ void load_do_values(const Kernel& f, const Step& step) {
    constexpr int64_t kBytes = Kernel::Tiles::kQueries * Kernel::kDim * sizeof(F16);
    load_async<Kernel::kThreads, Kernel::Tiles::kQueries>(typename Kernel::TileQ{f.shared.do_[0]},
                                                          f.params.blocks.do_values + step.tile * kBytes, step.first);
  }

  template <class Kernel>
  static __device__ void start_bin(const Kernel& f) {
    auto& shared = f.shared.operands;
    shared.q_unit = exp2f(static_cast<float>(f.e.q)), shared.k_unit = exp2f(static_cast<float>(f.e.k));
    shared.do_unit = exp2f(static_cast<float>(f.e.do_));
  }
  static __device__ float q_k_scale(const Exponents&) { return 1.f; }

  template <class Kernel>
  static __device__ void multiply_s(const Kernel& f, typename Kernel::TileS& s, int stage) {
    Base::multiply_s(f, s, stage);
    const auto& shared = f.shared.operands;
    const float product = shared.q_scale * shared.k_scale;
    const float scale = Kernel::kPlain ? product * f.shared.scale_log2 : product;
#pragma unroll
    for (int m = 0; m < Kernel::PartS::kBlocks; ++m)
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half) {
        const int row = 16 * (Kernel::PartS::row_block(f.warp) + m) + ptx::opaque(f.lane) / 4 + 8 * half;
        float lacks = 0.f;
        if constexpr (Kernel::kPlain)
          lacks = -f.shared.lse[stage][row];
        else if (f.params.blocks.mean_logit)
          lacks = shared.mean_logit[row];
#pragma unroll
        for (int i = 0; i < Kernel::PartS::kColumns / 8; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = s[m].x[4 * i + 2 * half + c];
            x = __fmaf_rn(x, scale, lacks);
          }
      }
  }

  // Rounds to integers: those of at most 2^22 of float32.
  template <class Kernel>
  static __device__ void to_integers(typename Kernel::TileS& x, float inverse) {
    constexpr float kUnits = 0x1.8p23f;  // whose last place is 1
#pragma unroll
    for (auto& block : x)
#pragma unroll
      for (float& y : block.x) y = __fmaf_rn(y, inverse, kUnits) - kUnits;
  }
  // Finds the largest numbers of P and of ds in the tile, and where dq wants them the sums of the rows of ds, and
  // rounds both. All threads call it together; once it has returned, all have read do.
  template <class Kernel>
  static __device__ TileScales round(const Kernel& f, typename Kernel::TileS& p, typename Kernel::TileS& ds) {
    auto& shared = f.shared.operands;
    float most_p = 0.f, most_ds = 0.f;  // without NaN
#pragma unroll
    for (int m = 0; m < Kernel::PartS::kBlocks; ++m)
#pragma unroll
      for (int i = 0; i < Kernel::PartS::kColumns / 2; ++i)
        most_p = fmaxf(most_p, p[m].x[i]), most_ds = fmaxf(most_ds, fabsf(ds[m].x[i]));
    most_p = __int_as_float(__reduce_max_sync(~0u, __float_as_int(most_p)));
    most_ds = __int_as_float(__reduce_max_sync(~0u, __float_as_int(most_ds)));
    if (f.lane == 0) shared.largest_p[f.warp] = most_p, shared.largest_ds[f.warp] = most_ds;
    if constexpr (!Kernel::kPlain)
      if (f.params.blocks.adds_mean) sum_rows(f, ds);
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < Kernel::C::kWarps; ++warp)
      most_p = fmaxf(most_p, shared.largest_p[warp]), most_ds = fmaxf(most_ds, shared.largest_ds[warp]);
    const Scale of_p = scale_of(most_p, 127.f), of_ds = scale_of(most_ds, 127.f);
    to_integers<Kernel>(p, of_p.inverse), to_integers<Kernel>(ds, of_ds.inverse);
    return {of_p.scale, of_ds.scale};
  }
  template <class Kernel>
  static __device__ void sum_rows(const Kernel& f, const typename Kernel::TileS& ds) {
#pragma unroll
    for (int m = 0; m < Kernel::PartS::kBlocks; ++m)
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < Kernel::PartS::kColumns / 8; ++i)
          sum += ds[m].x[4 * i + 2 * half] + ds[m].x[4 * i + 2 * half + 1];
        sum = quad_sum(sum);
        const int row = 16 * (Kernel::PartS::row_block(f.warp) + m) + f.lane / 4 + 8 * half;
        if (f.lane % 4 == 0)
          f.shared.operands.row_sums[16 * Kernel::PartS::column_block(f.warp) / Kernel::PartS::kColumns][row] = sum;
      }
  }

  // Turns sums of integers into dq in the scale of operands of 16 bits, with what the mean of k adds.
  template <class Kernel>
  static __device__ void finish_dq(const Kernel& f, typename Kernel::TileDq& dq, float ds_scale) {
    const auto& shared = f.shared.operands;
    const float by = ds_scale * (shared.k_scale * shared.k_unit);
    for (auto& block : dq) block.scale(by);
    if constexpr (!Kernel::kPlain)
      if (f.params.blocks.adds_mean) add_mean(f, dq);
  }
  template <class Kernel>
  static __device__ void add_mean(const Kernel& f, typename Kernel::TileDq& dq) {
    const auto& shared = f.shared.operands;
    const float* const mean =
        f.params.blocks.k_mean +
        (int64_t{f.a.k_blocks.cu_seqlens ? f.w.k.index : f.w.batch} * f.a.kv_heads + f.w.kv_head) * Kernel::kDim +
        16 * Kernel::PartDq::column_block(f.warp) + fragment_column();
#pragma unroll
    for (int m = 0; m < Kernel::PartDq::kBlocks; ++m)
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half) {
        const int row = 16 * (Kernel::PartDq::row_block(f.warp) + m) + f.lane / 4 + 8 * half;
        float sum = 0.f;
        for (const auto& part : shared.row_sums) sum += part[row];
        sum *= shared.k_unit;
#pragma unroll
        for (int i = 0; i < Kernel::kDqColumns / 8; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = dq[m].x[4 * i + 2 * half + c];
            x = __fmaf_rn(sum, mean[8 * i + c], x);
          }
      }
  }
};

}  // namespace octet::cuda::sm80
