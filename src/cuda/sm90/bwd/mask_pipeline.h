// A mask tensor in the backward pass: its pipelines of units in shared memory, one of each warpgroup, and P with them.
#pragma once
#include "cuda/bwd/params.h"
#include "cuda/fragment/finish.h"
#include "cuda/ptx/mma_sync.h"
#include "cuda/sm90/bwd/config.h"
#include "cuda/sm90/bwd/tiles.h"
#include "cuda/sm90/pipeline.h"

namespace octet::cuda::sm90 {

// Each warpgroup has a ring of its own, as a wait for a phase is right only for who has seen the phase before. An
// iteration takes kUnits units of kMaskQueries queries and the 64 keys of the warpgroup.
template <class T, int kQueries>
struct MaskPipeline {
  static constexpr int kWarpgroups = 2, kUnits = kQueries / kMaskQueries, kColumns = kWarpgroupRows;
  using Tile = SharedTile<T, kMaskQueries, kColumns>;  // rows are queries

  struct alignas(kSwizzleBytes) Tiles {
    unsigned char mask[kWarpgroups][kMaskStages][Tile::kBytes];
  };
  struct Pipes {
    Pipeline<kMaskStages> mask_pipe[kWarpgroups];
    __device__ void init() {
      for (auto& pipe : mask_pipe) pipe.init(kBackwardWarps / kWarpgroups);
    }
  };

  // The place of a ring's unit.
  struct Place {
    unsigned stage, phase;
    // That of the first unit of iteration n.
    __device__ explicit Place(unsigned n) : stage(n * kUnits % kMaskStages), phase(n * kUnits / kMaskStages % 2) {}
    __device__ void advance() {
      if (++stage == kMaskStages) stage = 0, phase ^= 1;
    }
  };

  // Calls load(tile, query, key, full) for the units of iteration n, once there is room for each.
  template <class Shared, class Load>
  static __device__ void fetch(Shared& shared, unsigned n, const Load& load) {
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      auto& pipe = shared.mask_pipe[warpgroup];
      Place at(n);
#pragma unroll 1
      for (int i = 0; i < kUnits; ++i, at.advance()) {
        pipe.empty[at.stage].wait(at.phase ^ 1);
        Barrier& full = pipe.full[at.stage];
        full.arrive_expecting(Tile::kBytes);
        load(Tile{shared.mask[warpgroup][at.stage]}, i * kMaskQueries, warpgroup * kColumns, full);
      }
    }
  }

  // Turns s into p = exp(scale s + mask - row bias - lse): rows are keys, columns are queries. lse, in base 2, lacks
  // the row bias, which lies in dq_row_scale. What the mask hides has a p of 0, or NaN where s is not finite.
  template <class Shared>
  static __device__ void take_P(Shared& shared, Accumulator<kQueries>& s, float factor, const QueryRows<kQueries>& rows,
                                int warpgroup, unsigned n) {
    // opaque() stops ptxas from keeping addresses in registers throughout the kernel.
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x)), lane = thread % 32;
    const int chunk = thread % kWarpgroup / 32 * 2 + lane / 8 % 2;  // of the warp's 16 keys
    const int offset = (lane / 16 * 8 + lane % 8) * kPanelRowBytes + (chunk ^ lane % 8) * 16;
    const float *const lse = rows.lse + lane % 4 * 2, *const row_bias = rows.dq_row_scale + lane % 4 * 2;
    Place at(n);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit, at.advance()) {
      shared.mask_pipe[warpgroup].full[at.stage].wait(at.phase);
      const uint32_t address = Tile{shared.mask[warpgroup][at.stage]}.address() + offset;
#pragma unroll
      for (int i = 0; i < kMaskQueries / 8; i += 2) {  // 8 queries each
        uint32_t words[4];
        ptx::ldmatrix_trans(words, address + i * 8 * kPanelRowBytes);
        __syncwarp();  // keeps ptxas from loading all numbers at once, for want of registers
#pragma unroll
        for (int of_pair = 0; of_pair < 2; ++of_pair) {
          const int group = unit * (kMaskQueries / 8) + i + of_pair;
          const auto lse_of_both = *reinterpret_cast<const float2*>(lse + 8 * group);
          const auto bias_of_both = *reinterpret_cast<const float2*>(row_bias + 8 * group);
#pragma unroll
          for (int row = 0; row < kRowsPerThread; ++row) {
            const float2 numbers = ptx::unpack<T>(words[2 * of_pair + row]);
            float* const x = &s.x[4 * group + 2 * row];
            const float of_first = __fmaf_rn(numbers.x - bias_of_both.x, kLog2e, -lse_of_both.x);
            const float of_second = __fmaf_rn(numbers.y - bias_of_both.y, kLog2e, -lse_of_both.y);
            x[0] = ptx::exp2(__fmaf_rn(x[0], factor, of_first)), x[1] = ptx::exp2(__fmaf_rn(x[1], factor, of_second));
          }
        }
      }
      arrive_as_warp(shared.mask_pipe[warpgroup].empty[at.stage]);
    }
  }
};

}  // namespace octet::cuda::sm90
