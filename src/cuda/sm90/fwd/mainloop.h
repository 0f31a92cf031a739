// o = softmax(scale q k^T) v and lse, for blocks of queries:
//
//   for each tile of keys, from the last to the first that the block sees:
//     s = q k^T;  p, l over the maximum m so far;  o = o + p v
//     where such a p would be too large: s again;  m, p, l by online softmax;  o = o rescale + p v
//   o = o / l;  lse = scale m + ln l
//
// One warp loads tiles through TMA. The warpgroups that compute hold 64 queries each and may take ping_pong: while one
// issues its products, another computes exponentials. Within a warpgroup, the product s of a tile runs together with
// the product p v of the tile before (FlashAttention-3, arXiv 2407.08608, algorithm 2).
//
// q and k are numbers of 16 bits, or quantized values of 8 with a scale for each query and each key: then s is a product of
// integers, logits are s times the scale of the key, and the scale of the query is part of the softmax's scale_log2.
//
// Where o is compensated (fragment/precision.h), v comes less a vector, which o gets back. With each 16 keys tensor cores
// truncate o towards 0; so half way through the tiles of a block o is sign-flipped: it becomes o - 2 a, a near o, and 2 a
// come back in the end. What is truncated in the second half has the other sign.
#pragma once
#include <type_traits>

#include "cuda/fragment/sign_flip.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/softmax.h"
#include "cuda/ptx/grid.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/fwd/config.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/pipeline.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
struct Forward {
  using Tile = ForwardTile<Precision, Dims>;
  static constexpr int kRows = Tile::kWarpgroups * kWarpgroupRows, kKeys = Tile::kKeys;
  static constexpr int kThreads = (Tile::kWarpgroups + 1) * kWarpgroup;
  static constexpr int kConsumerThreads = Tile::kWarpgroups * kWarpgroup;
  static constexpr int kWarps = kWarpgroup / 32;
  static_assert(Tile::kWarpgroups * Tile::kRegisters + Tile::kProducerRegisters <=
                65536 / kThreads / 8 * 8 * (Tile::kWarpgroups + 1));

  static constexpr bool kQuantizedQk = kIntegerLogits<Precision>;
  template <int Rows>
  using OperandTile = std::conditional_t<kQuantizedQk, SharedTile8Bit<typename Precision::Operand, Rows, Dims::kDim>,
                                         SharedTile<typename Precision::Operand, Rows, Dims::kDim>>;

  // Some tiles along the diagonal are seen by none of a warpgroup's queries: it passes them over.
  static constexpr bool kSkips = kRows - kWarpgroupRows >= kKeys;

  // Of others it sees only the first half: then that is all that it computes. Where both kinds of tiles come in every
  // block, as at d = 128, twice the instructions cost what this gains.
  static constexpr bool kHalves = kSkips && !kQuantizedQk;

  // o of 16 bits leaves through the place that q had, where the next block's q has another.
  static constexpr bool kThroughQ = !kQuantizedQk && Tile::kQStages > 1;

  using TileQ = OperandTile<kRows>;
  using TileK = OperandTile<kKeys>;
  using TileV = SharedTile<typename Precision::Weight, kKeys, Dims::kDimV>;

  // A compensated o is sign-flipped where shared memory has room for what is put aside, 16 bits of each number.
  static constexpr int kSavedOWords = kSavedWords<Dims::kDimV>, kSavedBytes = kConsumerThreads * kSavedOWords * sizeof(uint4);
  static constexpr int kTileBytes = Tile::kQStages * TileQ::kBytes + Tile::kStages * (TileK::kBytes + TileV::kBytes);
  static constexpr bool kFlipsSigns =
      kCompensated<Precision> && kTileBytes + kSavedBytes + 2 * kSwizzleBytes <= kMostSharedBytes;

  // Tiles [first, last) of keys that any of some queries sees, the end of these keys, and those that all of them see.
  struct Keys {
    int first, last, end;
    KeyRange all;

    __device__ bool any() const { return first < last; }
  };

  // What the producer says about a block of queries.
  struct Block {
    TileInfo work;
    Keys keys, of_warpgroup[Tile::kWarpgroups];
  };

  struct alignas(kSwizzleBytes) Shared {
    unsigned char q[Tile::kQStages][TileQ::kBytes];
    unsigned char k[Tile::kStages][TileK::kBytes];
    unsigned char v[Tile::kStages][TileV::kBytes];
    alignas(16) float k_scale[Tile::kStages][kQuantizedQk ? kKeys : 1];
    Pipeline<Tile::kQStages> q_pipe;
    Pipeline<Tile::kStages> k_pipe, v_pipe;
    Barrier cleared;
    Block block[Tile::kQStages];
    TileInfo saved_tile[Tile::kWarpgroups][kWarps];
    uint4 partial[kFlipsSigns ? kSavedBytes / sizeof(uint4) : 1];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;  // dynamic shared memory starts at any 16 bytes

  // Named barriers, the first of one for each warpgroup that computes.
  static constexpr int kPingPongBarrier = 1, kVoteBarrier = kPingPongBarrier + Tile::kWarpgroups;

  const ForwardParams& a;
  Shared& shared;

  __device__ TileQ q(int stage) const { return {shared.q[stage]}; }
  __device__ TileK k(int stage) const { return {shared.k[stage]}; }
  __device__ TileV v(int stage) const { return {shared.v[stage]}; }

  // Of a sequence, among those of k: quantized values lie in whole tiles.
  __device__ int first_key_of(const TileInfo& work) const {
    return kQuantizedQk && a.schedule.cu_seqlens_k ? (work.k_first / kKeys + work.sequence) * kKeys : work.k_first;
  }

  // Of `rows` queries from `query` on.
  __device__ Keys keys_of(const TileInfo& work, int query, int rows) const {
    const int end = min(query + rows, work.q_tokens) - 1;
    const KeyRange top = a.mask.keys_of(query, work.q_tokens, work.k_tokens);
    const KeyRange bottom = a.mask.keys_of(end, work.q_tokens, work.k_tokens);
    if (end < query || bottom.last <= top.first) return {0, 0, 0, {0, 0}};
    return {top.first / kKeys, (bottom.last + kKeys - 1) / kKeys, bottom.last, {bottom.first, top.last}};
  }

  // The producer: one thread.
  __device__ void produce() {
    PipelineState<Tile::kQStages> q_state;
    PipelineState<Tile::kStages> k_state, v_state;
    TileInfo next = a.schedule.at(blockIdx.x);
    while (true) {
      shared.q_pipe.empty[q_state.stage].wait(q_state.phase ^ 1);
      Block& block = shared.block[q_state.stage];
      Barrier& ready = shared.q_pipe.full[q_state.stage];
      block.work = next;
      if (!next.valid()) {
        ready.arrive();
        return;
      }
      const TileInfo& work = block.work;
      const int kv_head = work.head / a.group;
      const int k_first = first_key_of(work);
      const int k_row = work.batch * (a.schedule.heads / a.group) + kv_head;
      const auto fetch = [&](auto tile, const CUtensorMap& map, const int(&broadcast)[2], int row, int head,
                             Barrier& full) {
        load(tile, map, row, head * broadcast[0], work.batch * broadcast[1], &full.word);
      };
      // q is on its way while the producer works out the keys; then it arrives itself.
      ready.expect(TileQ::kBytes);
      fetch(q(q_state.stage), a.q, a.q_broadcast, work.q_first + work.q_start, work.head, ready);
      q_state.advance();
      const auto fetch_k = [&](int tile) {
        shared.k_pipe.empty[k_state.stage].wait(k_state.phase ^ 1);
        Barrier& full = shared.k_pipe.full[k_state.stage];
        auto& steps = shared.k_scale[k_state.stage];
        full.arrive_expecting(TileK::kBytes + (kQuantizedQk ? sizeof steps : 0));
        fetch(k(k_state.stage), a.k, a.k_broadcast, k_first + tile * kKeys, kv_head, full);
        if constexpr (kQuantizedQk)
          ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, &steps,
                                     a.k_scale + static_cast<int64_t>(k_row) * a.keys + k_first + tile * kKeys,
                                     sizeof steps, &full.word);
        k_state.advance();
      };
      const auto fetch_v = [&](int tile) {
        shared.v_pipe.empty[v_state.stage].wait(v_state.phase ^ 1);
        Barrier& full = shared.v_pipe.full[v_state.stage];
        full.arrive_expecting(TileV::kBytes);
        fetch(v(v_state.stage), a.v, a.v_broadcast, work.k_first + tile * kKeys, kv_head, full);
        v_state.advance();
      };
      // In the order in which they are used: k of a tile comes before v of the one before.
      const Keys keys = block.keys = keys_of(work, work.q_start, kRows);
      if (keys.any()) fetch_k(keys.last - 1);
      for (int i = 0; kSkips && i < Tile::kWarpgroups; ++i)
        block.of_warpgroup[i] = keys_of(work, work.q_start + i * kWarpgroupRows, kWarpgroupRows);
      ready.arrive();
      for (int tile = keys.last - 2; tile >= keys.first; --tile) fetch_k(tile), fetch_v(tile + 1);
      // Drawn before there is a place for the last v.
      next = a.schedule.at(gridDim.x + atomicAdd(a.schedule.counter, 1u));
      if (keys.any()) fetch_v(keys.first);
    }
  }

  // Rows of v that no query sees, or that belong to the next packed sequence, may hold inf or NaN: they become zeros.
  __device__ void clear_rows(unsigned char* tile, int from, int to) const {
    constexpr int kWords = kPanelRowBytes / 16;
    for (int i = from * kWords + threadIdx.x % kWarpgroup; i < to * kWords; i += kWarpgroup)
      for (int panel = 0; panel < TileV::kPanels; ++panel)
        reinterpret_cast<uint4*>(tile + panel * TileV::kPanelBytes)[i] = {0, 0, 0, 0};
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  }

  // The first query of a sequence in arrays [batch, head, token].
  __device__ int64_t row_of(const TileInfo& work) const {
    return (static_cast<int64_t>(work.batch) * a.schedule.heads + work.head) * a.schedule.q_tokens + work.q_first;
  }

  // exp(logit) = 2^(scale_log2 x) for the two queries of this thread; one of zeros, or that sees no key, counts as one with
  // step 1.
  __device__ RowValues softmax_scale_log2(const TileInfo& work, int query) const {
    RowValues scale_log2{a.scale_log2e, a.scale_log2e};
    if constexpr (kQuantizedQk)
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        const float step = a.q_scale[row_of(work) + min(query + 8 * row, work.q_tokens - 1)];
        const KeyRange seen = a.mask.keys_of(query + 8 * row, work.q_tokens, work.k_tokens);
        if (step != 0.f && seen.first < seen.last) scale_log2[row] *= step;
        if (scale_log2[row] == 0.f) scale_log2[row] = kMinScaleLog2;
      }
    return scale_log2;
  }

  __device__ auto start_softmax(const TileInfo& work, int query) const {
    if constexpr (kHasBeta<Precision>)
      return ShiftedSoftmax{{softmax_scale_log2(work, query)}, a.beta, a.beta_reach};
    else
      return OnlineSoftmax{softmax_scale_log2(work, query)};
  }

  // What the producer says about this block, kept by each warp for the time when its place may be another's.
  __device__ TileInfo& saved_tile(int warpgroup) const { return shared.saved_tile[warpgroup][threadIdx.x / 32 % kWarps]; }
  __device__ void save_tile(const Block& block, int warpgroup) const {
    const int word = min(threadIdx.x % 32, static_cast<unsigned>(sizeof(TileInfo) / sizeof(int)) - 1);
    reinterpret_cast<int*>(&saved_tile(warpgroup))[word] = reinterpret_cast<const int*>(&block.work)[word];
  }

  // Where a thread puts words of o partial, kWarpgroup from one to the next.
  __device__ uint4* partial(int warpgroup) const {
    return shared.partial + warpgroup * kSavedOWords * kWarpgroup + threadIdx.x % kWarpgroup;
  }

  // What v was reduced by, in the columns of this thread.
  struct SomeVMean {
    float2 x[Dims::kDimV / 8];
  };
  struct NoVMean {};
  using VMean = std::conditional_t<kCompensated<Precision>, SomeVMean, NoVMean>;
  static constexpr bool kVMeanEarly = Dims::kDimV <= 128;  // or no registers are left for it
  __device__ VMean v_mean_of(const TileInfo& work) const {
    VMean v_mean;
    if constexpr (kCompensated<Precision>) {
      const int64_t kv = work.batch * (a.schedule.heads / a.group) + work.head / a.group;
#pragma unroll
      for (int i = 0; i < Dims::kDimV / 8; ++i)
        v_mean.x[i] = *reinterpret_cast<const float2*>(a.v_mean + kv * Dims::kDimV + 8 * i + fragment_column());
    }
    return v_mean;
  }

  // Where logits go: float sums stay where they are.
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys>& s, Accumulator<kKeys>&) { return s; }
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys, int>&, Accumulator<kKeys>& converted) {
    return converted;
  }

  // Warpgroup `warpgroup` of those that compute.
  __device__ void consume(int warpgroup) {
    PipelineState<Tile::kQStages> q_state;
    PipelineState<Tile::kStages> k_state, v_state;
    uint32_t cleared_phase = 0;
    const auto ping_pong_wait = [&] {
      if (Tile::kPingPong) ptx::barrier_sync(kPingPongBarrier + warpgroup, 2 * kWarpgroup);
    };
    const auto ping_pong_arrive = [&] {
      if (Tile::kPingPong) ptx::barrier_arrive(kPingPongBarrier + (warpgroup + 1) % Tile::kWarpgroups, 2 * kWarpgroup);
    };
    if (warpgroup == Tile::kWarpgroups - 1) ping_pong_arrive();
    for (;; q_state.advance()) {
      shared.q_pipe.full[q_state.stage].wait(q_state.phase);
      const Block& block = shared.block[q_state.stage];
      const TileInfo work = block.work;
      if (!work.valid()) return;
      const Keys keys = block.keys, mine = kSkips ? block.of_warpgroup[warpgroup] : keys;
      // opaque() stops hoisting across blocks: S8 operands leave no register for it at d = 256.
      const int query = work.q_start + ptx::opaque(warpgroup) * kWarpgroupRows + fragment_row();
      KeyRange ranges[kRowsPerThread];
      auto softmax = start_softmax(work, query);
      // Down to tile `halfway`, then o is sign-flipped. `twice`: 2, as sums are scaled.
      const bool flips = kFlipsSigns && mine.last - mine.first > 1;
      const int halfway = mine.last - 1 - (mine.last - mine.first) / 2;
      RowValues twice{2.f, 2.f};
      Accumulator<kKeys, typename Precision::Sum> s;
      Accumulator<kKeys> converted;
      Accumulator<kKeys>& x = in_place(s, converted);
      Accumulator<Dims::kDimV> o;
      Operand<typename Precision::Weight, kKeys> p;

      // Issued, not awaited.
      const auto multiply_qk = [&](auto& s, int rows, int stage) {
        ptx::wgmma_fence();
        if constexpr (kQuantizedQk)
          mma_ABt_8bit(s, q(q_state.stage), rows * kWarpgroupRows, k(stage));
        else
          mma_ABt(s, q(q_state.stage), rows * kWarpgroupRows, k(stage), false);
        ptx::wgmma_commit();
      };
      const auto multiply_pv = [&] {
        ptx::wgmma_fence();
        mma_AB(o, p, v(v_state.stage));
        ptx::wgmma_commit();
      };
      const auto needs_mask = [&](int tile) {
        return tile * kKeys < mine.all.first || (tile + 1) * kKeys > mine.all.last;
      };
      // Logits x from the product s of a tile.
      const auto take_logits = [&](auto& s, auto& x) {
        ptx::fence_operand(s.x);
        if constexpr (kQuantizedQk) to_floats(s, x), scale_columns(x, shared.k_scale[k_state.stage]);
      };
      const auto mask = [&](auto& x, int tile) {
        if (needs_mask(tile)) mask_rows(x, tile * kKeys, ranges);
      };
      const auto wait_k = [&] { shared.k_pipe.full[k_state.stage].wait(k_state.phase); };
      const auto wait_v = [&] { shared.v_pipe.full[v_state.stage].wait(v_state.phase); };
      const auto release_k = [&] { shared.k_pipe.empty[k_state.stage].arrive(), k_state.advance(); };
      const auto release_v = [&] { shared.v_pipe.empty[v_state.stage].arrive(), v_state.advance(); };
      // What lies before the first and after the last key that is seen, in their tiles of v; where v is a copy, it has
      // zeros there, but for the next packed sequence. Every warpgroup comes here once with each of the two.
      const auto clear_v = [&](int tile) {
        if constexpr (kCompensated<Precision>) {
          if (!a.schedule.cu_seqlens_q || (tile + 1) * kKeys <= work.k_tokens) return;
          wait_v();
          clear_rows(shared.v[v_state.stage], work.k_tokens - tile * kKeys, kKeys);
        } else {
          if (!a.clears) return;
          const KeyRange seen = a.mask.seen(work.q_tokens, work.k_tokens);
          const int before = seen.first - tile * kKeys, end = seen.last - tile * kKeys;
          if (before <= 0 && end >= kKeys) return;
          wait_v();
          clear_rows(shared.v[v_state.stage], 0, before);
          clear_rows(shared.v[v_state.stage], end, kKeys);
        }
        shared.cleared.arrive(), shared.cleared.wait(cleared_phase);
        cleared_phase ^= 1;
      };
      // A tile of which this warpgroup sees nothing.
      const auto skip = [&](int tile) { wait_k(), release_k(), clear_v(tile), wait_v(), release_v(); };

      if constexpr (kSkips)
        for (int tile = keys.last - 1; tile >= max(mine.last, keys.first); --tile) {
          skip(tile);
          if (tile > keys.first) ping_pong_wait(), ping_pong_arrive();
        }
      // The first tile, or half of it.
      const auto begin = [&](auto& s, auto& x) {
        multiply_qk(s, warpgroup, k_state.stage);
        // While the product is under way.
        o.zero();
        ptx::fence_operand(o.x);
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row)
          ranges[row] = a.mask.keys_of(query + 8 * row, work.q_tokens, work.k_tokens);
        ptx::wgmma_wait<0>();
        take_logits(s, x);
        release_k();
        mask(x, mine.last - 1);
        softmax.template exp_update_max<Precision::kWeightExponent>(x);
        convert(x, p);
      };
      if (mine.any()) {
        wait_k();
        if constexpr (kHalves) {
          Accumulator<kKeys / 2> half;
          mine.end <= (mine.last - 1) * kKeys + kKeys / 2 ? begin(half, half) : begin(s, x);
        } else {
          begin(s, x);
        }
        clear_v(mine.last - 1);
        if (mine.last - 1 > mine.first) wait_k();
      }
      int tile = mine.last - 2;
      // Two loops where o is sign-flipped between: a branch within the loop over tiles would cost 2 %.
#pragma unroll 1
      for (int half = kFlipsSigns ? 0 : 1; half < 2; ++half) {
        for (const int first = half ? mine.first : halfway; tile >= first; --tile) {
          ping_pong_wait();
          multiply_qk(s, warpgroup, k_state.stage);
          wait_v();
          multiply_pv();
          ping_pong_arrive();
          ptx::wgmma_wait<1>();
          take_logits(s, x);
          if constexpr (!kQuantizedQk) mask(x, tile);
          if constexpr (kHasBeta<Precision>) {
            // Ties are counted in every tile.
            const RowValues rescale = softmax.template exp_update_max<Precision::kWeightExponent>(x);
            ptx::fence_operand(x.x);
            release_k();
            // Waiting here splits the block of instructions, as the vote below does.
            if (tile > mine.first) wait_k();
            ptx::wgmma_wait<0>();
            ptx::fence_operand(o.x);
            scale_rows(o, rescale);
          } else {
            // Over the maximum of former tiles; in the rare case that it is too small, the tile is done over. So are
            // tiles of quantized values with a mask, whose branch would keep scales from being multiplied between exponentials.
            const RowValues sum = softmax.template exp_stale_max<Precision::kWeightExponent>(x);
            const bool fits = sum[0] <= Precision::kLargestWeight && sum[1] <= Precision::kLargestWeight &&
                              !(kQuantizedQk && needs_mask(tile));
            ptx::fence_operand(x.x);
            // This split of the block of instructions keeps ptxas from waiting for the product with v before the
            // exponentials, which would then run after it instead of beside it.
            if (ptx::all_of_warpgroup(fits, kVoteBarrier + warpgroup)) {
              softmax.l[0] += sum[0], softmax.l[1] += sum[1];
              ptx::wgmma_wait<0>();
              ptx::fence_operand(o.x);
            } else {
              // opaque() stops hoisting: the addresses of both products would be computed ahead of the first.
              multiply_qk(s, ptx::opaque(warpgroup), ptx::opaque(k_state.stage));
              ptx::wgmma_wait<0>();
              ptx::fence_operand(o.x);
              take_logits(s, x);
              mask(x, tile);
              const RowValues rescale = softmax.template exp_update_max<Precision::kWeightExponent>(x);
              scale_rows(o, rescale);
              twice[0] *= rescale[0], twice[1] *= rescale[1];
            }
            release_k();
            if (tile > mine.first) wait_k();
          }
          release_v();
          convert(x, p);
        }
        if (kFlipsSigns && !half && flips) flip_signs(o, partial(warpgroup)), twice = {2.f, 2.f};
      }
      if constexpr (!kThroughQ) save_tile(block, warpgroup), shared.q_pipe.empty[q_state.stage].arrive();
      VMean v_mean;
      if constexpr (kVMeanEarly) v_mean = v_mean_of(work);  // on its way during the last product
      if (mine.any()) {
        if (!kCompensated<Precision> && mine.first < mine.last - 1) clear_v(mine.first);
        wait_v();
        multiply_pv();
        ptx::wgmma_wait<0>();
        ptx::fence_operand(o.x);
        release_v();
        if constexpr (kSkips)
          for (int left = mine.first - 1; left >= keys.first; --left) ping_pong_wait(), ping_pong_arrive(), skip(left);
      } else {
        o.zero();
        ptx::fence_operand(o.x);  // or, at d = 256, zeros would pass through local memory
      }
      if constexpr (kFlipsSigns)
        if (flips) unflip_signs(o, partial(warpgroup), twice);
      bool spoiled = write(work, query, softmax, v_mean, o, shared.q[q_state.stage], warpgroup);
      if constexpr (kCompensated<Precision>) {  // rows without keys are set to 0, and tell nothing
        const KeyRange seen = a.mask.keys_of(query, work.q_tokens, work.k_tokens);
        spoiled |= seen.first == seen.last;
      }
      if (a.mask.windowed && __any_sync(~0u, spoiled))
        recompute_rows(kThroughQ ? shared.block[ptx::opaque(q_state.stage)].work : saved_tile(ptx::opaque(warpgroup)),
                     ptx::opaque(warpgroup));
      if constexpr (kThroughQ) {
        ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
        shared.q_pipe.empty[q_state.stage].arrive();
      }
    }
  }

  // Returns whether a number of v that is not finite has met this thread's rows; any row of a warp tells.
  __device__ bool write(const TileInfo& work, int query, const OnlineSoftmax& softmax, VMean& v_mean,
                        Accumulator<Dims::kDimV>& o, unsigned char* q, int warpgroup) const {
    const float v_scale = a.v_scale ? a.v_scale[work.batch * (a.schedule.heads / a.group) + work.head / a.group] : 1.f;
    RowValues l, inverse, share{1.f, 1.f};
    RowValues from;               // sum of exp(logit) = 2^from l, but for what k's mean adds,
    RowValues of_mean{0.f, 0.f};  // to the logit
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      l[row] = quad_sum(softmax.l[row]);
      from[row] = softmax.template origin<Precision::kWeightExponent>(row, softmax.m[row]);
      if constexpr (kQuantizedQk) {
        const KeyRange seen = a.mask.keys_of(query + 8 * row, work.q_tokens, work.k_tokens);
        if (seen.first == seen.last) l[row] = 0.f;  // whatever its scale is
      }
      inverse[row] = l[row] == 0.f ? 0.f : v_scale / l[row];
    }
    if constexpr (kQuantizedQk)
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row)
        if (a.mean_logit && l[row] != 0.f && query + 8 * row < work.q_tokens)
          of_mean[row] = a.scale * a.mean_logit[row_of(work) + query + 8 * row];
    if (a.sinks.data) {
      const float sink = a.sinks.at(work.batch, work.head);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        const RowWithSink all =
            with_sink(l[row] == 0.f ? -INFINITY : from[row] + log2f(l[row]), (sink - of_mean[row]) * 1.44269504f);
        share[row] = all.share, from[row] = all.total, l[row] = 1.f;
      }
    }
    write_lse(work, query, from, l, of_mean);
    if constexpr (!kVMeanEarly) v_mean = v_mean_of(work);
#pragma unroll
    for (int i = 0; i < Dims::kDimV / 2; ++i) {
      if constexpr (kCompensated<Precision>)
        o.x[i] = __fmaf_rn(o.x[i], inverse[i / 2 % 2], i % 2 ? v_mean.x[i / 4].y : v_mean.x[i / 4].x);
      else
        o.x[i] *= inverse[i / 2 % 2];
    }
    if constexpr (kCompensated<Precision>)
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row)
        if (inverse[row] == 0.f)
#pragma unroll
          for (int i = 0; i < Dims::kDimV / 8; ++i) o.x[4 * i + 2 * row] = o.x[4 * i + 2 * row + 1] = 0.f;
    if (a.sinks.data) scale_rows(o, share);
    switch (a.o.element) {
      case Element::f32:
        return write_as<float>(work, query, o, q, warpgroup);
      case Element::f16:
        return write_as<F16>(work, query, o, q, warpgroup);
      case Element::e4m3:
        if constexpr (kQuantizedQk) return write_as<E4m3>(work, query, o, q, warpgroup);
        break;
      default:
        return write_as<Bf16>(work, query, o, q, warpgroup);
    }
    return false;
  }

  // Of the four threads that share two rows, two write one each, as a logarithm is 25 instructions.
  __device__ void write_lse(const TileInfo& work, int query, const RowValues& from, const RowValues& l,
                            const RowValues& of_mean) const {
    const int row = threadIdx.x % 2, i = query + 8 * row;
    if (!a.lse.data || i >= work.q_tokens || threadIdx.x % 4 >= kRowsPerThread) return;
    const auto mine = [&](const RowValues& x) { return row ? x[1] : x[0]; };
    constexpr float kLn2 = 0.693147180559945f;
    float lse = mine(l) == 0.f ? -INFINITY : (mine(from) + log2f(mine(l))) * kLn2;
    if constexpr (kQuantizedQk) lse += mine(of_mean);
    *a.lse.row<float>(work.batch, work.head, static_cast<int64_t>(work.q_first) + i) = lse;
  }

  template <class T>
  __device__ bool write_as(const TileInfo& work, int query, Accumulator<Dims::kDimV>& o, unsigned char* q,
                           int warpgroup) const {
    const bool spoiled = write_to<T>(a.o, work, query, o, q, warpgroup);
    if (!a.o_residual.data) return spoiled;
#pragma unroll
    for (int i = 0; i < Dims::kDimV / 2; ++i) o.x[i] -= float(T(o.x[i]));
    write_to<T>(a.o_residual, work, query, o, q, warpgroup);
    return spoiled;
  }

  template <class T>
  __device__ bool write_to(const Output& to, const TileInfo& work, int query, const Accumulator<Dims::kDimV>& o,
                           unsigned char* q, int warpgroup) const {
    if constexpr (kThroughQ && sizeof(T) == 2) {
      ptx::barrier_sync(kVoteBarrier + warpgroup, kWarpgroup);  // all of q and of what was here before has been read
      const SharedTile<T, kRows, Dims::kDimV> tile{q + warpgroup * kWarpgroupRows * kPanelRowBytes};
      const int first = query - fragment_row();
      const uint4 word = store_rows(to.row<T>(work.batch, work.head, static_cast<int64_t>(work.q_first) + first),
                                    to.stride[2], work.q_tokens - first, o, tile, a.dim_v);
      return has_infinite<T>(word);
    } else {
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        const int i = query + 8 * row;
        store_row(to.row<T>(work.batch, work.head, static_cast<int64_t>(work.q_first) + i), i < work.q_tokens, o, row,
                  a.dim_v);
      }
      return has_infinite<Dims::kDimV>(o);
    }
  }

  // The rows of this warp that are not finite, from what they see.
  __device__ void recompute_rows(const TileInfo& work, int warpgroup) const {
    using Operand = typename Precision::Operand;
    const int kv_head = work.head / a.group, kv = work.batch * (a.schedule.heads / a.group) + kv_head;
    const int k_first = first_key_of(work), warp = static_cast<int>(threadIdx.x % kWarpgroup / 32);
    const int first = work.q_start + warpgroup * kWarpgroupRows + warp * kWarpRows;
    const auto keys_of = [&](int query) { return a.mask.keys_of(query, work.q_tokens, work.k_tokens); };
    const auto value = [&](int key, int channel) {
      return float(a.v_rows.row<typename Precision::Weight>(work.batch, kv_head, int64_t{work.k_first} + key)[channel]);
    };
    const Keys tiles = this->keys_of(work, work.q_start, kRows);
    const KeyRange keys{tiles.first * kKeys, min(tiles.last * kKeys, work.k_tokens)};
    const KeyRange of_all{keys_of(min(first + kWarpRows, work.q_tokens) - 1).first, keys_of(first).last};
    if (!masks_infinite(keys, of_all, a.dim_v, value)) return;
    const auto row_of = [&](int query) {
      const auto* const q = a.q_rows.row<Operand>(work.batch, work.head, int64_t{work.q_first} + query);
      const float scale_log2 = softmax_scale_log2(work, query)[0];
      const auto logit = [&](int key) {
        const float step = kQuantizedQk ? a.k_scale[static_cast<int64_t>(kv) * a.keys + k_first + key] : 1.f;
        return scale_log2 * step * dot(q, a.k_rows.row<Operand>(work.batch, kv_head, int64_t{k_first} + key), a.dim);
      };
      UnmaskedRow<Dims::kDimV> row = attend_row<Dims::kDimV>(keys_of(query), a.dim_v, logit, value);
      const float of_mean = kQuantizedQk && a.mean_logit ? a.scale * a.mean_logit[this->row_of(work) + query] : 0.f;
      const float share = with_sink(row.total, (a.sinks.at(work.batch, work.head) - of_mean) * 1.44269504f).share;
      const float scale = a.v_scale ? a.v_scale[kv] : 1.f;
#pragma unroll
      for (int i = 0; i < Dims::kDimV / 32; ++i) {
        float v_mean = 0.f;
        if (kCompensated<Precision> && row.total != -INFINITY)
          v_mean = a.v_mean[kv * Dims::kDimV + cold_lane() + 32 * i];
        row.o[i] = fmaf(row.o[i], scale, v_mean) * share;
      }
      return row;
    };
    rewrite_rows<Dims::kDimV>(a.o, a.o_residual, work.batch, work.head, work.q_first, first, work.q_tokens, a.dim_v,
                             row_of);
  }
};

template <class Precision, class Dims>
__global__ void __launch_bounds__(Forward<Precision, Dims>::kThreads, 1)
    forward(const __grid_constant__ ForwardParams arguments) {
  using Kernel = Forward<Precision, Dims>;
  extern __shared__ unsigned char memory[];
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory + (-base & (kSwizzleBytes - 1)));
  Kernel kernel{arguments, shared};
  if (threadIdx.x == 0) {
    shared.q_pipe.init(Kernel::kConsumerThreads);
    shared.k_pipe.init(Kernel::kConsumerThreads);
    shared.v_pipe.init(Kernel::kConsumerThreads);
    shared.cleared.init(Kernel::kConsumerThreads);
    publish_barriers();
  }
  if constexpr (Kernel::kQuantizedQk || kCompensated<Precision>) ptx::griddepcontrol_wait();
  __syncthreads();
  // The compiler knows that a whole warpgroup takes one side.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::reg_dealloc<Kernel::Tile::kProducerRegisters>();
    if (threadIdx.x == 0) kernel.produce();
  } else {
    ptx::reg_alloc<Kernel::Tile::kRegisters>();
    kernel.consume(warpgroup - 1);
  }
}

}  // namespace octet::cuda::sm90
