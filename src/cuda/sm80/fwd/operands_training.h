// The operands of the forward pass of int8's training. operands.h has the list of their verbs.
#pragma once
#include "cuda/sm80/fwd/operands_8bit.h"

namespace octet::cuda::sm80 {

// The forward pass of int8's training. k is centred by the means of blocks of 64 keys. A row of logits thus lacks the
// product of q and the mean of the tile's block, by which the maximum moves while the tile is computed; where logits
// have more terms, the product is added. The products with eight means are computed at a time, by tensor cores, from q
// in f16 in global memory. v comes from int8, as f16 without its mean, which the epilogue adds to o.
template <>
struct ForwardOperands<PrecisionInt8Training> : ForwardOperands<PrecisionInt8F16> {
  using Base = ForwardOperands<PrecisionInt8F16>;
  template <class Dims, Logits logits, TileRows>
  using Tile = Int8TrainingTile<Dims, logits>;
  using WidestDims = Dims128;
  static constexpr bool kHasPairs = false, kHasDropout = false, kTakesCodes = false;
  template <class Kernel>
  static constexpr int kLaidOutKeys = kBlockKeys;
  static constexpr int kMeans = 8;
  template <int Rows, int Keys, int Stages>
  struct Factors : Base::Factors<Rows, Keys, Stages> {
    // q times the means of the current blocks; with plain logits in units of the products s.
    float mean_products[Rows][kMeans + 1];
    int first_block;  // the first mean of the sequence
  };

  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    Base::start_factors(f, kv_head);
    const TileInfo& tile = f.shared.q_tile;
    const int head = tile.batch * (f.a.scheduler.heads / f.a.group) + kv_head;
    f.shared.factors.first_block = head * f.a.mean_factors.blocks + first_key(f) / kBlockKeys;
  }
  template <class Kernel>
  static __device__ const F16* start_v(const Kernel& f, int kv_head) {
    return f.a.v.template row<F16>(f.shared.q_tile.batch, kv_head, first_key(f));
  }
  template <class Kernel>
  static __device__ float mean_logit(const Kernel&, int) {
    return 0.f;
  }
  template <class Kernel>
  static __device__ float2 v_mean(const Kernel& f, int, int channel) {
    const TileInfo& tile = f.shared.q_tile;
    const int64_t head = int64_t{tile.sequence} * (f.a.scheduler.heads / f.a.group) + tile.head / f.a.group;
    return *reinterpret_cast<const float2*>(f.a.v_mean + head * f.a.dim + channel);
  }

  // Returns the index of a row among the queries of all heads.
  template <class Kernel>
  static __device__ int64_t token_of(const Kernel& f, int row) {
    const int query = min(row, f.shared.q_tile.q_tokens - 1);
    return f.a.q_factors.at(f.shared.q_tile.batch, f.shared.q_tile.head, int64_t{f.shared.q_tile.q_first} + query) -
           f.a.q_factors.data;
  }
  // Multiplies this warp's queries and the means of the blocks around a tile.
  template <class Kernel>
  static __device__ void multiply_means(const Kernel& f, int tile) {
    constexpr int kDim = Kernel::Dims::kDim;
    const auto& factors = f.a.mean_factors;
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32, column = lane % 4 * 2;
    const int first = tile * Kernel::kKeys / kBlockKeys / kMeans * kMeans,
              last = (f.shared.q_tile.k_tokens - 1) / kBlockKeys;
    const int start = f.shared.factors.first_block;
    const F16* const means = factors.mean + int64_t{start + min(first + lane / 4, last)} * kDim + column;
    const float mean_factor[] = {factors.mean_factor[start + min(first + column, last)],
                                 factors.mean_factor[start + min(first + column + 1, last)]};
    const auto word = [](const F16* x) { return *reinterpret_cast<const uint32_t*>(x); };
    __syncwarp();
#pragma unroll 1
    for (int block = 0; block < Kernel::kRowBlocks; ++block) {
      const int row = f.thread_row(block);
      const F16 *const q = factors.q + token_of(f, row) * kDim + column, *const q_below = factors.q +
                                                                                          token_of(f, row + 8) * kDim +
                                                                                          column;
      float sums[4] = {};
#pragma unroll 4
      for (int c = 0; c < kDim; c += 16) {
        const uint32_t left[4] = {word(q + c), word(q_below + c), word(q + c + 8), word(q_below + c + 8)};
        const uint32_t right[2] = {word(means + c), word(means + c + 8)};
        ptx::mma_m16n8k16<F16>(sums, left, right);
      }
#pragma unroll
      for (int below = 0; below < kRowsPerThread; ++below) {
        const int at = row + 8 * below - f.shared.q_tile.q_start;
        float by = factors.q_factor[token_of(f, row + 8 * below)];
        if constexpr (Kernel::kPlain) by = by / (f.shared.factors.q[at] * kUnitsOfSum);
        for (int i = 0; i < 2; ++i)
          f.shared.factors.mean_products[at][column + i] = sums[2 * below + i] * by * mean_factor[i];
      }
    }
    __syncwarp();
  }
  template <class Kernel>
  static __device__ float lacking(const Kernel& f, int row, int tile) {
    return f.shared.factors.mean_products[row][tile * Kernel::kKeys / kBlockKeys % kMeans];
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s,
                                     int tile) {
    static_assert(kBlockKeys % Kernel::kKeys == 0);
    if (tile == f.warp_tiles().last - 1 || (tile + 1) % (kMeans * kBlockKeys / Kernel::kKeys) == 0)
      multiply_means(f, tile);
    Base::multiply_qk(f, q, s, tile);
  }

  template <int Blocks>
  struct Shifts {
    RowValues by[Blocks], from[Blocks];  // the maximum was `from`, and is less by `by` now
  };
  template <class Kernel>
  static __device__ auto shift_max(const Kernel& f, typename Kernel::Softmax (&softmax)[Kernel::kRowBlocks], int tile) {
    if constexpr (!Kernel::kPlain) {
      return Shift{};
    } else {
      Shifts<Kernel::kRowBlocks> shifts;
#pragma unroll
      for (int block = 0; block < Kernel::kRowBlocks; ++block)
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) {
          float& m = softmax[block].m[row];
          shifts.from[block][row] = m;
          m -= shifts.by[block][row] = lacking(f, f.thread_row(block) + 8 * row - f.shared.q_tile.q_start, tile);
        }
      return shifts;
    }
  }
  // A maximum that has not moved gets its bits back.
  template <int Blocks, class Softmax>
  static __device__ void unshift_max(const Shifts<Blocks>& shifts, Softmax (&softmax)[Blocks]) {
#pragma unroll
    for (int block = 0; block < Blocks; ++block)
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        float& m = softmax[block].m[row];
        const float by = shifts.by[block][row], from = shifts.from[block][row];
        m = m == from - by ? from : m + by;
      }
  }
  template <class Softmaxes>
  static __device__ void unshift_max(const Shift&, Softmaxes&) {}

  template <class Kernel>
  static __device__ float product(const Kernel& f, const S8* q, const S8* k, int row, int key) {
    const int at = row - f.shared.q_tile.q_start, block = f.shared.factors.first_block + key / kBlockKeys;
    const float scale = f.shared.factors.q[at] * f.shared.factors.of_k[key / 2].scale[key % 2];
    const auto& factors = f.a.mean_factors;
    constexpr int kDim = Kernel::Dims::kDim;
    const int64_t token = token_of(f, row);
    const float mean = dot(factors.q + token * kDim, factors.mean + int64_t{block} * kDim, kDim) *
                       factors.q_factor[token] * factors.mean_factor[block];
    return __fmaf_rn(dot(q, k, f.a.dim), scale, mean);
  }
};

}  // namespace octet::cuda::sm80
