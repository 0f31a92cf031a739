// Recomputes rows of dq, dk and dv from only the pairs of a query and a key that it sees. Each row is computed by a
// warp that reads from global memory, as fragment/unmasked_row.h does for o. The mainloop sets a masked P to 0, but ds
// of such a pair is 0 times NaN where v, do or delta is not finite, and a ds of 0 is multiplied by k and q, which may
// not be finite.
//
// Each such number shows in dq. A tile of queries whose dq is not finite anywhere may have met masked keys: those of
// its key blocks that some of its queries do not see. Its rows, and the rows of dk and dv of these keys, are
// candidates.
//
// `Logits` makes logits of q.k, with the derivative that ds is multiplied by, and tells what dropout multiplies an
// element of P by, 1 without dropout. Where it kHides keys, a P of 0 stands for such a key, and all keys are
// candidates.
#pragma once
#include <algorithm>

#include "cuda/bwd/exponents.h"
#include "cuda/bwd/preprocess.h"
#include "cuda/bwd/wide_tiles.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {

// What `Logits` have in common that add to products, or take them as they are, and drop nothing.
struct AddedLogits {
  static constexpr bool kHides = false;
  struct Logit {
    float x;
    __device__ float derivative_of(float ds) const { return ds; }
  };
  template <class Gradients>
  __device__ float kept(const Gradients&, int, int, int) const {
    return 1.f;
  }
};

// The gradients of one head of k and v and of one sequence.
template <int kQueries, int Dim, class Logits>
struct UnmaskedGradients {
  static constexpr int kKeys = BackwardTile<Dim>::kKeys, kChannels = Dim / 32;

  const PreprocessParams& p;
  const BackwardParams& a;
  const Logits& logits;
  int batch, kv_head;
  Blocks::Sequence q, k;
  int lane = cold_lane();

  __device__ Index4 q_state(int head, int query) const { return {batch, head, int64_t{q.first} + query, 0}; }
  __device__ Index4 k_state(int key) const { return {batch, kv_head, int64_t{k.first} + key, 0}; }

  // Returns the dot product of two rows.
  static __device__ float dot(const Strided& x, Index4 at_x, const Strided& y, Index4 at_y) {
    float sum = 0.f;
#pragma unroll 1
    for (; at_x.channel < x.shape[3]; at_x.channel += kVec8, at_y.channel += kVec8) {
      Vec8 u, v;
      read(x, at_x, u), read(y, at_y, v);
      for (int c = 0; c < kVec8; ++c) sum = fmaf(u[c], v[c], sum);
    }
    return sum;
  }
  static __device__ float number(const Strided& x, Index4 at, int channel) {
    at.channel = channel;
    float number = 0.f;
    with_type(x.element, [&](auto* type) { number = float(static_cast<decltype(type)>(x.data)[at.offset(x)]); });
    return number;
  }

  struct Pair {
    float p, ds;
  };
  __device__ Pair pair(int head, int query, int key) const {
    const auto& rows = rows_of(head, query);
    const Exponents& e = a.exponents[batch * a.kv_heads + kv_head];
    const float lse = number(p.lse, q_state(head, query), 0);
    const float delta = rows.delta[query % kQueries] / power_of_two(e.do_ + e.v + e.product);
    const typename Logits::Logit logit =
        logits(*this, head, query, key, dot(p.q, q_state(head, query), p.k, k_state(key)));
    const float prob = lse == -INFINITY ? 0.f : expf(logit.x - lse);
    if (Logits::kHides && prob == 0.f) return {};
    const float kept = logits.kept(*this, head, query, key);
    const float dp = kept == 0.f ? 0.f : kept * dot(p.do_, q_state(head, query), p.v, k_state(key));
    return {kept * prob, logit.derivative_of(prob * (dp - delta))};
  }

  // Adds factor x to the sum, in this thread's channels.
  __device__ void add(float (&sum)[kChannels], float factor, const Strided& x, const Index4& at) const {
    if (Logits::kHides && factor == 0.f) return;
#pragma unroll
    for (int i = 0; i < kChannels; ++i)
      if (lane + 32 * i < x.shape[3]) sum[i] = fmaf(factor, number(x, at, lane + 32 * i), sum[i]);
  }
  // Returns true if all sums are NaN, so that no further pair can change them.
  __device__ bool lost(const float (&sum)[kChannels], const Strided& x) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) all &= isnan(sum[i]) || lane + 32 * i >= x.shape[3];
    return __all_sync(~0u, all);
  }

  __device__ const QueryRows<kQueries>& rows_of(int head, int query) const {
    const int64_t tile = (int64_t{batch} * a.heads + head) * a.q_blocks.count + q.first_block + query / kQueries;
    return reinterpret_cast<const QueryRows<kQueries>*>(a.rows)[tile];
  }

  // The two that write rows are not inlined, or ptxas takes minutes for each architecture.
  __device__ __noinline__ void write_dq(int head, int query, const Strided& dq) const {
    // Such a row is not finite whatever the mask hides.
    if (!isfinite(rows_of(head, query).delta[query % kQueries]) || isnan(number(p.lse, q_state(head, query), 0)))
      return;
    bool finite = true;
    for (int c = lane; c < a.dim; c += 32) finite &= static_cast<bool>(isfinite(number(dq, q_state(head, query), c)));
    if (__all_sync(~0u, finite)) return;
    const Interval keys = a.mask.keys_of(query, q.tokens, k.tokens);
    float sum[kChannels]{};
#pragma unroll 1
    for (int first = keys.first; first < keys.last && !lost(sum, p.q); first += 32) {
      const float ds = pair(head, query, min(first + lane, keys.last - 1)).ds;
#pragma unroll 1
      for (int i = 0; i < min(32, keys.last - first); ++i) add(sum, __shfl_sync(~0u, ds, i), p.k, k_state(first + i));
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      Index4 at = q_state(head, query);
      at.channel = lane + 32 * i;
      if (at.channel < a.dim)
        with_type(dq.element, [&](auto* type) {
          using T = std::remove_pointer_t<decltype(type)>;
          static_cast<T*>(dq.data)[at.offset(dq)] = T(a.scale * sum[i]);
        });
    }
  }

  __device__ int64_t row_of(const Output& t, int key) const {
    return batch * t.stride[0] + kv_head * t.stride[1] + (int64_t{k.first} + key) * t.stride[2];
  }
  __device__ bool is_finite(const Output& t, int key, int columns) const {
    bool finite = true;
    for (int c = lane; c < columns; c += 32) finite &= static_cast<bool>(isfinite(number_at(t, row_of(t, key) + c)));
    return __all_sync(~0u, finite);
  }
  __device__ void write(const Output& t, int key, const float (&sum)[kChannels], float scale, int columns) const {
#pragma unroll
    for (int i = 0; i < kChannels; ++i)
      if (lane + 32 * i < columns) set_number(t, row_of(t, key) + lane + 32 * i, scale * sum[i]);
  }

  __device__ __noinline__ void write_dk_dv(int key) const {
    const bool dk_stays = is_finite(a.dk, key, a.dim), dv_stays = is_finite(a.dv, key, a.dim_v);
    if (dk_stays && dv_stays) return;
    const Interval seeing = a.mask.queries_of(key, q.tokens, k.tokens);
    const int start = max(seeing.first, 0), end = min(seeing.last, q.tokens), group = a.heads / a.kv_heads;
    float dk[kChannels]{}, dv[kChannels]{};
#pragma unroll 1
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
#pragma unroll 1
      for (int first = start; first < end && !((dk_stays || lost(dk, p.k)) && (dv_stays || lost(dv, p.v)));
           first += 32) {
        const Pair of_lane = pair(head, min(first + lane, end - 1), key);
#pragma unroll 1
        for (int i = 0; i < min(32, end - first); ++i) {
          add(dk, __shfl_sync(~0u, of_lane.ds, i), p.q, q_state(head, first + i));
          add(dv, __shfl_sync(~0u, of_lane.p, i), p.do_, q_state(head, first + i));
        }
      }
    if (!dk_stays) write(a.dk, key, dk, a.scale, a.dim);
    if (!dv_stays) write(a.dv, key, dv, 1.f, a.dim_v);
  }

  // Recomputes the rows of one tile of queries and of its masked keys, by `warps` warps. Tiles of several heads may
  // write the same keys, with the same numbers.
  __device__ void write_tile(int head, int first, const Strided& dq, int warp, int warps) const {
    const int last = min(first + kQueries, q.tokens);
    for (int query = first + warp; query < last; query += warps) write_dq(head, query, dq);
    if (Logits::kHides) {
      for (int key = warp; key < k.tokens; key += warps) write_dk_dv(key);
      return;
    }
    const auto [any, all] = a.mask.keys_of_all(first, last, q.tokens, k.tokens);
    if (any.first >= any.last) return;
    const auto [start, end] = any.tiles(kKeys);
    for (int key = start * kKeys + warp; key < min(end * kKeys, k.tokens); key += warps)
      if (key < all.first || key >= all.last) write_dk_dv(key);
  }
};

constexpr int kRecomputeThreads = 256;

// Recomputes the tiles whose dq postprocess_dq has found not to be finite. There are none unless an input has inf or
// NaN.
template <int Dim, class Logits>
__global__ void __launch_bounds__(kRecomputeThreads, Logits::kHides ? 1 : 0)
    recompute_masked_kernel(const __grid_constant__ PreprocessParams p, const __grid_constant__ BackwardParams a,
                            const __grid_constant__ Strided dq, const __grid_constant__ Logits logits) {
  constexpr int kQueries = BackwardTile<Dim>::kQueries;
  ptx::griddepcontrol_wait();
  const int64_t tiles = int64_t{a.batch} * a.heads * a.q_blocks.count;
  const auto* const rows = reinterpret_cast<const QueryRows<kQueries>*>(a.rows);
  for (int64_t first = 0; first < tiles; first += int64_t{kRecomputeThreads} * gridDim.x) {
    const int64_t of_thread = first + threadIdx.x * gridDim.x + blockIdx.x;
    if (!__syncthreads_or(of_thread < tiles && rows[of_thread].nonfinite)) continue;
    for (int64_t tile = first + blockIdx.x; tile < min(first + int64_t{kRecomputeThreads} * gridDim.x, tiles);
         tile += gridDim.x) {
      if (!rows[tile].nonfinite) continue;
      const int head_index = static_cast<int>(tile / a.q_blocks.count), block = tile % a.q_blocks.count;
      const int batch = head_index / a.heads, head = head_index % a.heads;
      const Blocks::Sequence q = a.q_blocks.sequence_of(block);
      const Blocks::Sequence k = a.k_blocks.cu_seqlens ? a.k_blocks.sequence(q.index) : a.k_blocks.sequence_of(0);
      const UnmaskedGradients<kQueries, Dim, Logits> gradients{p, a, logits, batch, head / (a.heads / a.kv_heads),
                                                               q, k};
      gradients.write_tile(head, (block - q.first_block) * kQueries, dq, threadIdx.x / 32, kRecomputeThreads / 32);
    }
  }
}

template <class Logits>
void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const Logits& logits, const Strided& dq,
                      cudaStream_t stream) {
  const auto kernel = with_wide_tile_dim(p.tile_dim, [](auto dim) { return recompute_masked_kernel<dim, Logits>; });
  const int64_t most_blocks = current_card().multiprocessors;
  const int64_t tiles = int64_t{a.batch} * a.heads * a.q_blocks.count;
  launch_general_pdl(kernel, static_cast<unsigned>(std::min(tiles, most_blocks)), kRecomputeThreads, 0, stream, p, a,
                     dq, logits);
}

}  // namespace octet::cuda
