// o = softmax(scale q k^T) v and lse with operands of 8 bits, for blocks of queries:
//
//   for each tile of keys, from the last to the first that the block sees:
//     s = q k^T in int32 or float32
//     e4m3:  p over the scale that its row has;  o = o + p v
//            where a p would be too large: s again;  p over a new scale;  o = o rescale + p v
//     uint8: p on the scale of its largest in the tile;  r = p v;  o = o + r times the scale of p
//   o = o / l;  lse
//
// One warp loads tiles through TMA. The warpgroups that compute hold 64 queries each. Within one, the product s of a
// tile runs together with the product p v of the tile before.
//
// Tensor cores add e4m3 products in 13 bits, so every kTilesPerSum tiles o is put aside, to shared memory, and starts
// anew. The sum l of rounded P is column dim_v of o, where it loses what o loses: below the channels of v lies a
// row of ones. lse takes it from seven more, each of a part of the keys.
#pragma once
#include <type_traits>

#include "cuda/fragment/softmax_8bit.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/fragment/sinks.h"
#include "cuda/ptx/grid.h"
#include "cuda/preprocess/quantize.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/fwd/config.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/pipeline.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
struct Forward8Bit {
  using Tile = Forward8BitTile<Precision, Dims>;
  static constexpr int kRows = Tile::kWarpgroups * kWarpgroupRows, kKeys = Tile::kKeys;
  static constexpr int kThreads = (Tile::kWarpgroups + 1) * kWarpgroup;
  static constexpr int kConsumerThreads = Tile::kWarpgroups * kWarpgroup;
  static constexpr int kWarps = kWarpgroup / 32;
  static constexpr int kVoteBarrier = 1;  // the first of one for each warpgroup
  static_assert(Tile::kWarpgroups * Tile::kRegisters + Tile::kProducerRegisters <=
                65536 / kThreads / 8 * 8 * (Tile::kWarpgroups + 1));

  static constexpr int kSumRows = Precision::kSumRounded ? 8 : 0;
  static constexpr int kColumns = Dims::kDimV + kSumRows;
  static constexpr int kWords = kColumns / 8;  // float4 of o in a thread
  static constexpr int kTilesPerSum = 8;
  static constexpr bool kScaled = Precision::kScaled;  // whether quantized values of P have scales of their own
  static constexpr KeyScales kKeyScales = Precision::kKeyScales;
  using Softmax = std::conditional_t<kScaled, TileScaleSoftmax, SharedScaleSoftmax<Precision>>;
  using Sums = Accumulator<kKeys, typename Precision::Sum>;
  using TileQ = SharedTile8Bit<typename Precision::Quantized, kRows, Dims::kDim>;
  using TileK = SharedTile8Bit<typename Precision::Quantized, kKeys, Dims::kDim>;
  using TileV = SharedTile8Bit<typename Precision::Value, kColumns, kKeys, Dims::kDimV>;

  struct alignas(kSwizzleBytes) Shared {
    alignas(kSwizzleBytes) unsigned char q[Tile::kQStages][TileQ::kBytes];
    alignas(kSwizzleBytes) unsigned char k[k8BitStages][TileK::kBytes];
    alignas(kSwizzleBytes) unsigned char v[k8BitStages][TileV::kBytes];
    alignas(16) float k_scale[k8BitStages][kKeyScales == KeyScales::groups ? kGroupScales<kKeys> : kKeys];
    alignas(16) float v_scale[k8BitStages][2][kScaled ? kKeys : 4];  // logarithm, inverse
    Pipeline<Tile::kQStages> q_pipe;
    Pipeline<k8BitStages> kv_pipe;  // a tile of k, and of v the one before
    float4 partial[kScaled ? 1 : Tile::kWarpgroups][kScaled ? 1 : kWords][kScaled ? 1 : kWarpgroup];  // of o
    Barrier ping_pong[Tile::kWarpgroups][kWarps];
    TileInfo work[Tile::kQStages + 1];  // in ping_pong: one is read until o is written
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;  // dynamic shared memory starts at any 16 bytes
  static_assert(TileK::kBytes % TileK::kSwizzlePeriod == 0 && TileV::kBytes % TileV::kSwizzlePeriod == 0);

  const Forward8BitParams& a;
  Shared& shared;

  __device__ TileQ q(int stage) const { return {shared.q[stage]}; }
  __device__ TileK k(int stage) const { return {shared.k[stage]}; }
  __device__ TileV v(int stage) const { return {shared.v[stage]}; }

  // Tiles [first, last) of keys that any of `rows` queries from `query` on sees, and those that all of them see whole.
  struct Keys {
    int first, last;
    int whole_first, whole_last;

    __device__ bool any() const { return first < last; }
  };
  __device__ KeyRange keys_of(const TileInfo& work, int query) const {
    return a.mask.keys_of(query, work.q_tokens, work.k_tokens);
  }
  __device__ Keys keys_of(const TileInfo& work, int query, int rows) const {
    const int end = min(query + rows, end_of(work)) - 1;
    const KeyRange top = keys_of(work, query), bottom = keys_of(work, end);
    if (end < query || bottom.last <= top.first) return {};
    return {top.first / kKeys, (bottom.last + kKeys - 1) / kKeys, (bottom.first + kKeys - 1) / kKeys, top.last / kKeys};
  }
  // The first query after a block.
  __device__ static int end_of(const TileInfo& work) { return min(work.q_start + work.rows, work.q_tokens); }

  // The rows below v, which TMA leaves alone: ones in the first, and in each of the others at some of 16 keys, so that
  // these have a one for every key between them. Chunks of 16 keys are alike, so the swizzle does not matter.
  __device__ void write_ones() const {
    if constexpr (Precision::kSumRounded) {
      constexpr int kRowWords = TileV::kPanelWidth / 4, kRowsWords = kSumRows * kRowWords;
      for (int i = threadIdx.x; i < k8BitStages * TileV::kPanels * kRowsWords; i += kThreads) {
        auto* panel = reinterpret_cast<uint32_t*>(shared.v[0] + i / kRowsWords * TileV::kPanelBytes +
                                                  Dims::kDimV * TileV::kPanelWidth);
        const int row = i % kRowsWords / kRowWords, key = i % 4 * 4;
        float ones[4];
        for (int k = 0; k < 4; ++k) ones[k] = row == 0 || (key + k) % (kSumRows - 1) == row - 1 ? 1.f : 0.f;
        panel[i % kRowsWords] = ptx::pack<typename Precision::Value>(ones[0], ones[1], ones[2], ones[3]);
      }
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    }
  }

  // Of a sequence, among quantized values in whole tiles.
  __device__ int first_key_of(const TileInfo& work) const {
    constexpr int kScale = kLaidOutKeys<Precision, Dims>;
    return a.schedule.cu_seqlens_k ? (work.k_first / kScale + work.sequence) * kScale : 0;
  }

  // The producer: one thread.
  __device__ void produce() {
    namespace ptx = ::cuda::ptx;
    PipelineState<Tile::kQStages> q_state;
    PipelineState<Tile::kQStages + 1> tile_state;
    PipelineState<k8BitStages> kv_state;
    unsigned number = blockIdx.x;
    while (true) {
      const TileInfo work = a.schedule.at(number);
      shared.q_pipe.empty[q_state.stage].wait(q_state.phase ^ 1);
      shared.work[tile_state.stage] = work;
      tile_state.advance();
      Barrier& q_full = shared.q_pipe.full[q_state.stage];
      if (!work.valid()) {
        q_full.arrive();
        return;
      }
      const Keys keys = keys_of(work, work.q_start, kRows);
      const int kv_head = work.head / a.group;
      const int first_key = first_key_of(work);
      const int64_t steps =
          (static_cast<int64_t>(work.batch) * (a.schedule.heads / a.group) + kv_head) * a.keys + first_key;
      q_full.arrive_expecting(TileQ::kLoadedBytes);
      load(q(q_state.stage), a.q, 0, work.q_first + work.q_start, work.head * a.q_broadcast[0],
           work.batch * a.q_broadcast[1], &q_full.word);
      q_state.advance();
      const auto fetch = [&](bool with_k, bool with_v, int tile) {
        const int stage = kv_state.stage;
        shared.kv_pipe.empty[stage].wait(kv_state.phase ^ 1);
        Barrier& full = shared.kv_pipe.full[stage];
        constexpr int kSteps =
            (kKeyScales == KeyScales::none ? 0 : sizeof shared.k_scale[0]) + (kScaled ? sizeof shared.v_scale[0] : 0);
        full.arrive_expecting((with_k ? TileK::kLoadedBytes + kSteps : 0) + (with_v ? TileV::kLoadedBytes : 0));
        if (with_k) {
          load(k(stage), a.k, 0, (a.k_in_tiles ? first_key : work.k_first) + tile * kKeys, kv_head * a.k_broadcast[0],
               work.batch * a.k_broadcast[1], &full.word);
          const auto fetch_scales = [&](auto& to, const float* from) {
            ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, &to, from, sizeof to, &full.word);
          };
          const int64_t at = steps + tile * kKeys;
          if constexpr (kKeyScales == KeyScales::tokens) fetch_scales(shared.k_scale[stage], a.k_scale + at);
          if constexpr (kKeyScales == KeyScales::groups)
            fetch_scales(shared.k_scale[stage], a.k_scale + at / kGroupBlock * kScaleGroups);
          if constexpr (kScaled) fetch_scales(shared.v_scale[stage], a.v_scale + 2 * at);
        }
        if (with_v) load(v(stage), a.v, first_key + (tile + 1) * kKeys, 0, kv_head, work.batch, &full.word);
        kv_state.advance();
      };
      // Products with k of a tile and with v of the one before are issued together, so they share a stage.
      if (keys.any())
        for (int tile = keys.last - 1; tile >= keys.first - 1; --tile)
          fetch(tile >= keys.first, tile < keys.last - 1, tile);
      number = gridDim.x + atomicAdd(a.schedule.counter, 1u);
    }
  }

  // o += r times the scale of p.
  static __device__ void add(Accumulator<kColumns>& o, const Accumulator<kColumns, int>& r, const RowValues& step) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o.x[i] = fmaf(static_cast<float>(r.x[i]), step[i / 2 % 2], o.x[i]);
  }

  // What this thread has put aside of o, and its sums with o.
  __device__ float4& partial(int warpgroup, int word) const {
    return shared.partial[warpgroup][word][threadIdx.x % kWarpgroup];
  }
  __device__ float4 with_partial(int warpgroup, int word, const Accumulator<kColumns>& o, const RowValues& by) const {
    const float4 x = partial(warpgroup, word);
    const float* y = &o.x[4 * word];
    return {fmaf(x.x, by[0], y[0]), fmaf(x.y, by[0], y[1]), fmaf(x.z, by[1], y[2]), fmaf(x.w, by[1], y[3])};
  }
  __device__ void add_partial(int warpgroup, Accumulator<kColumns>& o, const RowValues& by) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float4 x = with_partial(warpgroup, i, o, by);
      o.x[4 * i] = x.x, o.x[4 * i + 1] = x.y, o.x[4 * i + 2] = x.z, o.x[4 * i + 3] = x.w;
    }
  }
  __device__ void store_partial(int warpgroup, const Accumulator<kColumns>& o, const RowValues& by, bool first) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      partial(warpgroup, i) =
          first ? float4{o.x[4 * i], o.x[4 * i + 1], o.x[4 * i + 2], o.x[4 * i + 3]} : with_partial(warpgroup, i, o, by);
  }

  // Where logits go: float sums stay where they are.
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys>& s, Accumulator<kKeys>&) { return s; }
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys, int>&, Accumulator<kKeys>& converted) {
    return converted;
  }

  // Until all but the latest `Pending` products have come; `d` is among those.
  template <int Pending, class D>
  static __device__ void wait_products(D& d) {
    ptx::wgmma_wait<Pending>();
    ptx::fence_operand(d.x);
  }

  // Where a warpgroup that computes stands.
  struct Positions {
    PipelineState<k8BitStages> kv;
    int q;          // stage of the queries
    uint32_t ping_pong;  // phase; the first group does not wait for the first
  };

  // Warpgroup `warpgroup` of those that compute.
  __device__ void consume(int warpgroup) {
    Positions at;
    at.ping_pong = warpgroup == 0;
    for (unsigned block = 0;; ++block) {
      at.q = block % Tile::kQStages;
      shared.q_pipe.full[at.q].wait(block / Tile::kQStages % 2);
      const TileInfo& work = shared.work[block % (Tile::kQStages + 1)];
      if (!work.valid()) return;
      const Keys keys = keys_of(work, work.q_start, kRows);
      const Keys mine = Tile::kSkips ? keys_of(work, work.q_start + warpgroup * kWarpgroupRows, kWarpgroupRows) : keys;
      Softmax softmax{softmax_scale_log2(work, query_of(work, warpgroup))};
      Accumulator<kColumns> o;
      o.zero();
      // A block has a stage more than tiles.
      if constexpr (Tile::kSkips)
        for (int i = mine.any() ? keys.last - mine.last : keys.any() ? keys.last - keys.first + 1 : 0; i > 0; --i)
          skip(at);
      if (mine.any()) {
        if constexpr (kScaled)
          attend_scaled(warpgroup, work, mine, at, softmax, o);
        else
          attend(warpgroup, work, mine, at, softmax, o);
      }
      shared.q_pipe.empty[at.q].arrive();
      if constexpr (Tile::kSkips)
        for (int i = mine.any() ? mine.first - keys.first : 0; i > 0; --i) skip(at);
      if (work.q_start + warpgroup * kWarpgroupRows < end_of(work)) write(work, query_of(work, warpgroup), softmax, o);
    }
  }

  // Turns at the exponentials, from each warp to the one of the next group that has the same scheduler.
  __device__ void ping_pong_arrive(int warpgroup) const {
    if constexpr (Tile::kPingPong) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.ping_pong[(warpgroup + 1) % Tile::kWarpgroups][threadIdx.x / 32 % kWarps].arrive();
    }
  }
  // Returns a 0 that what is to wait is computed from.
  __device__ float ping_pong_wait(int warpgroup, Positions& at) const {
    if constexpr (Tile::kPingPong) {
      at.ping_pong ^= 1;
      return shared.ping_pong[warpgroup][threadIdx.x / 32 % kWarps].wait_for_zero(at.ping_pong ^ 1);
    }
    return 0.f;
  }
  __device__ void wait_kv(const Positions& at) const { shared.kv_pipe.full[at.kv.stage].wait(at.kv.phase); }
  __device__ void release_kv(Positions& at) const { shared.kv_pipe.empty[at.kv.stage].arrive(), at.kv.advance(); }

  // A stage of which this warpgroup needs nothing.
  __device__ void skip(Positions& at) const { wait_kv(at), release_kv(at); }

  // s = q k^T; issued, not awaited.
  __device__ void multiply_k(int warpgroup, const Positions& at, int stage, Sums& s) const {
    ptx::wgmma_fence();
    mma_ABt_8bit(s, q(at.q), warpgroup * kWarpgroupRows, k(stage));
    ptx::wgmma_commit();
  }
  // d (+)= p v; likewise.
  template <class D, class P>
  __device__ void multiply_v(const Positions& at, const P& p, D& d, bool accumulate) const {
    ptx::wgmma_fence();
    mma_ABt_8bit(d, p, v(at.kv.stage), accumulate);
    ptx::wgmma_commit();
  }

  // The scales that groups of this thread's keys in a tile have; else 1.
  __device__ auto group_scales(const Positions& at, int tile) const {
    if constexpr (kKeyScales == KeyScales::groups)
      return scales_of_groups<kKeys>(shared.k_scale[at.kv.stage], tile);
    else
      return no_scales();
  }

  // x from the product s of a tile.
  __device__ void take_logits(const Positions& at, const Softmax& softmax, const Sums& s, Accumulator<kKeys>& x) const {
    to_floats(s, x);
    if constexpr (kKeyScales == KeyScales::tokens) scale_columns(x, shared.k_scale[at.kv.stage]);
    if constexpr (kScaled) softmax.add_log_scales(x, shared.v_scale[at.kv.stage][0]);
  }
  // Of keys that a query does not see, logits become -inf; P 0 where keys have scales, as the scale of a group that
  // it sees in part may be NaN.
  static constexpr bool kMasksP = kKeyScales != KeyScales::none;
  __device__ void mask(int warpgroup, const TileInfo& work, const Keys& keys, int tile, Accumulator<kKeys>& x,
                       float masked = -INFINITY) const {
    if (needs_mask(keys, tile)) {
      const int query = query_of(work, warpgroup);
      const KeyRange ranges[] = {keys_of(work, query), keys_of(work, query + 8)};
      mask_rows(x, tile * kKeys, ranges, masked);
    }
  }
  __device__ static bool needs_mask(const Keys& keys, int tile) {
    return tile < keys.whole_first || tile >= keys.whole_last;
  }
  // The first of this thread's two queries.
  __device__ static int query_of(const TileInfo& work, int warpgroup) {
    return work.q_start + warpgroup * kWarpgroupRows + fragment_row();
  }

  // P on one scale. The product s of a tile runs together with the product p v of the tile before, as in
  // forward.h.
  __device__ void attend(int warpgroup, const TileInfo& work, const Keys& keys, Positions& at, Softmax& softmax,
                         Accumulator<kColumns>& o) const {
    Sums s;
    Accumulator<kKeys> converted;
    Accumulator<kKeys>& x = in_place(s, converted);
    Operand<typename Precision::Weight, kKeys> p;
    RowValues sum;
    RowValues partial_rescale{1.f, 1.f};  // by which what was put aside must be multiplied
    // Products with v that came before that of tile `tile`.
    const auto products_before = [&](int tile) { return keys.last - 1 - tile; };
    const auto starts_sum = [&](int tile) { return products_before(tile) % kTilesPerSum == 0; };

    const auto mask = [&](int tile, float masked) { this->mask(warpgroup, work, keys, tile, x, masked); };
    // P over a new scale from the product s of a tile; returns by what sums must be multiplied.
    const auto recompute_p = [&](int tile, RowValues& sum) {
      take_logits(at, softmax, s, x);
      mask(tile, -INFINITY);
      const RowValues rescale = softmax.exp_update_max(x, group_scales(at, tile), sum);
      if constexpr (kMasksP) mask(tile, 0.f);
      return rescale;
    };

    wait_kv(at);
    multiply_k(warpgroup, at, at.kv.stage, s);
    wait_products<0>(s);
    recompute_p(keys.last - 1, softmax.l);
    pack_P(x, p);
    release_kv(at);
    if (keys.last - 2 >= keys.first) wait_kv(at);
    for (int tile = keys.last - 2; tile >= keys.first; --tile) {
      multiply_k(warpgroup, at, at.kv.stage, s);
      multiply_v(at, p, o, !starts_sum(tile + 1));
      wait_products<1>(s);
      take_logits(at, softmax, s, x);
      // What does not fit is done over from its product, and so are tiles with a mask, which are few.
      const bool fits = softmax.exp_stale_max(x, group_scales(at, tile), sum) && !needs_mask(keys, tile);
      ptx::fence_operand(x.x);
      // This branch keeps ptxas from waiting for the product with v before the exponentials.
      if (ptx::all_of_warpgroup(fits, kVoteBarrier + warpgroup)) {
        wait_products<0>(o);
      } else {
        // opaque() stops hoisting: the addresses of both products would be computed ahead of the first.
        multiply_k(ptx::opaque(warpgroup), at, ptx::opaque(at.kv.stage), s);
        wait_products<0>(o);
        ptx::fence_operand(s.x);
        const RowValues rescale = recompute_p(tile, sum);
        scale_rows(o, rescale);
        partial_rescale[0] *= rescale[0], partial_rescale[1] *= rescale[1];
      }
      softmax.l[0] += sum[0], softmax.l[1] += sum[1];
      release_kv(at);
      pack_P(x, p);
      if (starts_sum(tile)) {
        store_partial(warpgroup, o, partial_rescale, products_before(tile) == kTilesPerSum);
        partial_rescale = {1.f, 1.f};
      }
      if (tile > keys.first) wait_kv(at);
    }
    wait_kv(at);
    multiply_v(at, p, o, !starts_sum(keys.first));
    wait_products<0>(o);
    release_kv(at);
    if (products_before(keys.first) >= kTilesPerSum) add_partial(warpgroup, o, partial_rescale);
  }

  // P whose scale changes from tile to tile: their product goes to an accumulator of its own and from there to o.
  __device__ void attend_scaled(int warpgroup, const TileInfo& work, const Keys& keys, Positions& at, Softmax& softmax,
                                Accumulator<kColumns>& o) const {
    Sums s;
    Accumulator<kKeys> x;
    Accumulator<kColumns, int> r;
    Operand<typename Precision::Weight, kKeys> p;
    wait_kv(at);
    multiply_k(warpgroup, at, at.kv.stage, s);
    wait_products<0>(s);
    take_logits(at, softmax, s, x);
    mask(warpgroup, work, keys, keys.last - 1, x);
    for (int tile = keys.last - 1; tile >= keys.first; --tile) {
      const RowValues most = softmax.largest(x, o);
      const RowValues step = softmax.quantize_p(x, most, shared.v_scale[at.kv.stage][1], ping_pong_wait(warpgroup, at), p);
      ping_pong_arrive(warpgroup);
      release_kv(at);
      wait_kv(at);
      multiply_v(at, p, r, false);
      if (tile == keys.first) {
        wait_products<0>(r);
        release_kv(at);
        add(o, r, step);
        break;
      }
      multiply_k(warpgroup, at, at.kv.stage, s);
      wait_products<1>(r);
      add(o, r, step);
      wait_products<0>(s);
      take_logits(at, softmax, s, x);
      mask(warpgroup, work, keys, tile - 1, x);
    }
  }

  // exp(logit) = 2^(scale_log2 x) for the two queries of this thread; a query of zeros counts as one with scale 1.
  __device__ RowValues softmax_scale_log2(const TileInfo& work, int query) const {
    RowValues scale_log2;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int i = min(query + 8 * row, work.q_tokens - 1);
      const float step = a.q_scale ? a.q_scale[row_of(work) + i] : 1.f;
      scale_log2[row] = a.scale_log2e * (step == 0.f ? 1.f : step);
      if (scale_log2[row] == 0.f) scale_log2[row] = kMinScaleLog2;
    }
    return scale_log2;
  }
  // The first query of a sequence in arrays [batch, head, token].
  __device__ int64_t row_of(const TileInfo& work) const {
    return (static_cast<int64_t>(work.batch) * a.schedule.heads + work.head) * a.schedule.q_tokens + work.q_first;
  }

  __device__ void write(const TileInfo& work, int query, const Softmax& softmax, const Accumulator<kColumns>& sums) const {
    RowValues inverse, lse, share{1.f, 1.f};
    const float sink = a.sinks.at(work.batch, work.head);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      float l, parts;  // l as o lost it, and from sums that lost less
      if constexpr (Precision::kSumRounded) {
        const float* columns = &sums.x[2 * Dims::kDimV / 4 + 2 * row];
        l = __shfl_sync(~0u, columns[0], threadIdx.x % 32 / 4 * 4);
        parts = quad_sum((threadIdx.x % 4 ? columns[0] : 0.f) + columns[1]);
      } else {
        l = parts = quad_sum(softmax.l[row]);
      }
      const int i = query + 8 * row;
      const KeyRange seen = keys_of(work, i);
      if (seen.first == seen.last) l = 0.f;  // whatever its scale is
      constexpr float kLn2 = 0.693147180559945f;
      float of_mean = a.mean_logit && i < work.q_tokens ? a.scale * a.mean_logit[row_of(work) + i] : 0.f;
      constexpr float kScale = kScaled ? kInverseScale : 1.f, kScaleLog2 = kScaled ? kInverseScaleLog2 : 0.f;  // of l
      inverse[row] = l == 0.f ? 0.f : l < INFINITY ? kScale / l : NAN;
      float total = l == 0.f ? -INFINITY : softmax.exponent(row) + log2f(parts) - kScaleLog2;
      if (l == 0.f) of_mean = 0.f;
      if (a.sinks.data) {
        const RowWithSink all = with_sink(total, (sink - of_mean) * 1.44269504f);
        total = all.total, share[row] = all.share;
      }
      lse[row] = total * kLn2 + of_mean;
    }
    const int64_t batch_head = static_cast<int64_t>(work.sequence) * (a.schedule.heads / a.group) + work.head / a.group;
    Accumulator<Dims::kDimV> o;
#pragma unroll
    for (int i = 0; i < Dims::kDimV / 8; ++i) {
      const int64_t channel = batch_head * Dims::kDimV + 8 * i + fragment_column();
      float2 step{1.f, 1.f}, mean{0.f, 0.f};
      if (a.v_channel_scale) step = *reinterpret_cast<const float2*>(a.v_channel_scale + channel);
      if (a.v_mean) mean = *reinterpret_cast<const float2*>(a.v_mean + channel);
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        const int at = 4 * i + 2 * row;
        const bool seen = inverse[row] != 0.f;
        o.x[at] = seen ? sums.x[at] * inverse[row] * step.x + mean.x : 0.f;
        o.x[at + 1] = seen ? sums.x[at + 1] * inverse[row] * step.y + mean.y : 0.f;
      }
    }
    if (a.sinks.data) scale_rows(o, share);
    write(work, query, lse, o);
    // Values of e4m3 that are not finite are NaN; at int8 they have scales that are, and P that are hidden do not
    // meet these.
    if constexpr (!kScaled)
      if (a.mask.windowed && __any_sync(~0u, has_infinite<Dims::kDimV>(sums))) recompute_rows(work, ptx::opaque(query));
  }

  __device__ void write(const TileInfo& work, int query, const RowValues& lse, Accumulator<Dims::kDimV>& o) const {
    switch (a.o.element) {
      case Element::f32:
        return write_as<float>(work, query, lse, o);
      case Element::f16:
        return write_as<F16>(work, query, lse, o);
      case Element::e4m3:
        return write_as<E4m3>(work, query, lse, o);
      default:
        return write_as<Bf16>(work, query, lse, o);
    }
  }

  template <class T>
  __device__ void write_as(const TileInfo& work, int query, const RowValues& lse, Accumulator<Dims::kDimV>& o) const {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int i = query + 8 * row;
      const bool present = i < work.q_tokens;
      const int64_t token = static_cast<int64_t>(work.q_first) + i;
      store_row(a.o.row<T>(work.batch, work.head, token), present, o, row, a.dim_v);
      if (a.lse.data && present && threadIdx.x % 4 == 0) *a.lse.row<float>(work.batch, work.head, token) = lse[row];
    }
    if (!a.o_residual.data) return;
#pragma unroll
    for (int i = 0; i < Dims::kDimV / 2; ++i) o.x[i] -= float(T(o.x[i]));
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int i = query + 8 * row;
      store_row(a.o_residual.row<T>(work.batch, work.head, static_cast<int64_t>(work.q_first) + i), i < work.q_tokens,
                o, row, a.dim_v);
    }
  }

  // The rows of this warp that are not finite, from what they see. `query`: the first of this thread's two.
  __device__ void recompute_rows(const TileInfo& work, int query) const {
    using Quantized = typename Precision::Quantized;
    const int kv_heads = a.schedule.heads / a.group, kv_head = work.head / a.group;
    const int code_first = first_key_of(work), k_first = a.k_in_tiles ? code_first : work.k_first;
    const int64_t kv = static_cast<int64_t>(work.batch) * kv_heads + kv_head;
    const int64_t channels = (static_cast<int64_t>(work.sequence) * kv_heads + kv_head) * Dims::kDimV;
    const auto scale_of = [&](int64_t code) {
      if constexpr (kKeyScales == KeyScales::none)
        return 1.f;
      else if constexpr (kKeyScales == KeyScales::tokens)
        return a.k_scale[code];
      else
        return a.k_scale[code / kGroupBlock * kScaleGroups + code % 8 / 2];
    };
    const auto value = [&](int key, int channel) {
      const int at = code_first + key, place = at % 8 / 2 * 4 + at / 8 % 2 * 2 + at % 2;  // see key_permutation
      const auto* const codes = reinterpret_cast<const E4m3*>(a.v_quantized) + (kv * Dims::kDimV + channel) * a.keys;
      return float(codes[at / 16 * 16 + place]);
    };
    const int first = query - static_cast<int>(threadIdx.x % 32 / 4);
    const Keys tiles = keys_of(work, work.q_start, kRows);
    const KeyRange keys{tiles.first * kKeys, min(tiles.last * kKeys, work.k_tokens)};
    const KeyRange of_all{keys_of(work, min(first + kWarpRows, work.q_tokens) - 1).first, keys_of(work, first).last};
    if (!masks_infinite(keys, of_all, a.dim_v, value)) return;
    const auto row_of = [&](int query) {
      const auto* const q = a.q_rows.row<Quantized>(work.batch, work.head, int64_t{work.q_first} + query);
      const float scale_log2 = softmax_scale_log2(work, query)[0];
      const auto logit = [&](int key) {
        return scale_log2 * scale_of(kv * a.keys + code_first + key) *
               dot(q, a.k_rows.row<Quantized>(work.batch, kv_head, int64_t{k_first} + key), a.dim);
      };
      UnmaskedRow<Dims::kDimV> row = attend_row<Dims::kDimV>(keys_of(work, query), a.dim_v, logit, value);
      const float of_mean = a.mean_logit ? a.scale * a.mean_logit[this->row_of(work) + query] : 0.f;
      const float share = with_sink(row.total, (a.sinks.at(work.batch, work.head) - of_mean) * 1.44269504f).share;
#pragma unroll
      for (int i = 0; i < Dims::kDimV / 32; ++i) {
        const int64_t channel = channels + cold_lane() + 32 * i;
        row.o[i] *= (a.v_channel_scale ? a.v_channel_scale[channel] : 1.f) * share;
      }
      return row;
    };
    rewrite_rows<Dims::kDimV>(a.o, a.o_residual, work.batch, work.head, work.q_first, first, work.q_tokens, a.dim_v,
                             row_of);
  }
};

template <class Precision, class Dims>
__global__ void __launch_bounds__(Forward8Bit<Precision, Dims>::kThreads, 1)
    forward_8bit(const __grid_constant__ Forward8BitParams arguments) {
  using Kernel = Forward8Bit<Precision, Dims>;
  extern __shared__ unsigned char memory[];
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory + (-base & (kSwizzleBytes - 1)));
  Kernel kernel{arguments, shared};
  if (threadIdx.x == 0) {
    shared.q_pipe.init(Kernel::kConsumerThreads);
    shared.kv_pipe.init(Kernel::kConsumerThreads);
    for (auto& group : shared.ping_pong)
      for (Barrier& barrier : group) barrier.init(1);
    publish_barriers();
  }
  kernel.write_ones();
  ptx::griddepcontrol_wait();
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
