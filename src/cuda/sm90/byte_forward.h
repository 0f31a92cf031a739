// o = softmax(scale q k^T) v and lse with operands of 8 bits, for blocks of queries:
//
//   for each tile of keys, from the last to the first that the block sees:
//     s = q k^T in int32 or float32
//     e4m3:  p over the scale that its row has;  o = o + p v
//            where a p would be too large: s again;  p over a new scale;  o = o shrink + p v
//     uint8: p on the scale of its largest in the tile;  r = p v;  o = o + r times the step of p
//   o = o / l;  lse
//
// One warp loads tiles through TMA. The warpgroups that compute hold 64 queries each. Within one, the product s of a
// tile runs together with the product p v of the tile before.
//
// Tensor cores add e4m3 products in 13 bits, so every kTilesPerSum tiles o is put aside, to shared memory, and starts
// anew. The sum l of rounded weights is column dim_v of o, where it loses what o loses: below the channels of v lies a
// row of ones. lse takes it from seven more, each of a part of the keys.
#pragma once
#include <type_traits>

#include "cuda/attn/byte_softmax.h"
#include "cuda/attn/mask.h"
#include "cuda/attn/output.h"
#include "cuda/attn/precision.h"
#include "cuda/attn/seen_row.h"
#include "cuda/attn/sinks.h"
#include "cuda/ptx/grid.h"
#include "cuda/quant/codes.h"
#include "cuda/sm90/arguments.h"
#include "cuda/sm90/config.h"
#include "cuda/tile/fragment.h"
#include "cuda/tile/ring.h"
#include "cuda/tile/shared.h"

namespace octet::cuda::sm90 {

template <class Precision, class Dims>
struct ByteForward {
  using Tile = ByteForwardTile<Precision, Dims>;
  static constexpr int kRows = Tile::kWarpgroups * kWarpgroupRows, kKeys = Tile::kKeys;
  static constexpr int kThreads = (Tile::kWarpgroups + 1) * kWarpgroup;
  static constexpr int kReaders = Tile::kWarpgroups * kWarpgroup;
  static constexpr int kWarps = kWarpgroup / 32;
  static constexpr int kVoteBarrier = 1;  // the first of one for each warpgroup
  static_assert(Tile::kWarpgroups * Tile::kRegisters + Tile::kLoaderRegisters <=
                65536 / kThreads / 8 * 8 * (Tile::kWarpgroups + 1));

  static constexpr int kSumRows = Precision::kSumRounded ? 8 : 0;
  static constexpr int kColumns = Dims::kDimV + kSumRows;
  static constexpr int kWords = kColumns / 8;  // float4 of o in a thread
  static constexpr int kTilesPerSum = 8;
  static constexpr bool kScaled = Precision::kScaled;  // whether codes of p have steps of their own
  static constexpr KeySteps kKeySteps = Precision::kKeySteps;
  using Softmax = std::conditional_t<kScaled, ScaledSoftmax, ByteSoftmax<Precision>>;
  using Sums = Accumulator<kKeys, typename Precision::Sum>;
  using TileQ = ByteTile<typename Precision::Code, kRows, Dims::kDim>;
  using TileK = ByteTile<typename Precision::Code, kKeys, Dims::kDim>;
  using TileV = ByteTile<typename Precision::Value, kColumns, kKeys, Dims::kDimV>;

  struct alignas(kSwizzleBytes) Shared {
    alignas(kSwizzleBytes) unsigned char q[Tile::kQStages][TileQ::kBytes];
    alignas(kSwizzleBytes) unsigned char k[kByteStages][TileK::kBytes];
    alignas(kSwizzleBytes) unsigned char v[kByteStages][TileV::kBytes];
    alignas(16) float k_step[kByteStages][kKeySteps == KeySteps::groups ? kGroupSteps<kKeys> : kKeys];
    alignas(16) float v_step[kByteStages][2][kScaled ? kKeys : 4];  // logarithm, inverse
    Ring<Tile::kQStages> q_ring;
    Ring<kByteStages> kv_ring;  // a tile of k, and of v the one before
    float4 aside[kScaled ? 1 : Tile::kWarpgroups][kScaled ? 1 : kWords][kScaled ? 1 : kWarpgroup];  // of o
    Barrier turns[Tile::kWarpgroups][kWarps];
    Work work[Tile::kQStages + 1];  // in turns: one is read until o is written
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;  // dynamic shared memory starts at any 16 bytes
  static_assert(TileK::kBytes % TileK::kSwizzlePeriod == 0 && TileV::kBytes % TileV::kSwizzlePeriod == 0);

  const ByteForwardArguments& a;
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
  __device__ KeyRange keys_of(const Work& work, int query) const {
    return a.mask.keys_of(query, work.q_tokens, work.k_tokens);
  }
  __device__ Keys keys_of(const Work& work, int query, int rows) const {
    const int end = min(query + rows, end_of(work)) - 1;
    const KeyRange top = keys_of(work, query), bottom = keys_of(work, end);
    if (end < query || bottom.last <= top.first) return {};
    return {top.first / kKeys, (bottom.last + kKeys - 1) / kKeys, (bottom.first + kKeys - 1) / kKeys, top.last / kKeys};
  }
  // The first query after a block.
  __device__ static int end_of(const Work& work) { return min(work.block + work.rows, work.q_tokens); }

  // The rows below v, which TMA leaves alone: ones in the first, and in each of the others at some of 16 keys, so that
  // these have a one for every key between them. Chunks of 16 keys are alike, so the swizzle does not matter.
  __device__ void write_ones() const {
    if constexpr (Precision::kSumRounded) {
      constexpr int kRowWords = TileV::kPanelWidth / 4, kRowsWords = kSumRows * kRowWords;
      for (int i = threadIdx.x; i < kByteStages * TileV::kPanels * kRowsWords; i += kThreads) {
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

  // Of a sequence, among codes in whole tiles.
  __device__ int first_key_of(const Work& work) const {
    constexpr int kUnit = kLaidOutKeys<Precision, Dims>;
    return a.schedule.cu_seqlens_k ? (work.k_first / kUnit + work.sequence) * kUnit : 0;
  }

  // The loader: one thread.
  __device__ void load_all() {
    namespace ptx = ::cuda::ptx;
    RingPosition<Tile::kQStages> q_at;
    RingPosition<Tile::kQStages + 1> work_at;
    RingPosition<kByteStages> kv_at;
    unsigned number = blockIdx.x;
    while (true) {
      const Work work = a.schedule.at(number);
      shared.q_ring.empty[q_at.stage].wait(q_at.parity ^ 1);
      shared.work[work_at.stage] = work;
      work_at.advance();
      Barrier& q_full = shared.q_ring.full[q_at.stage];
      if (work.block < 0) {
        q_full.arrive();
        return;
      }
      const Keys keys = keys_of(work, work.block, kRows);
      const int kv_head = work.head / a.group;
      const int first_key = first_key_of(work);
      const int64_t steps =
          (static_cast<int64_t>(work.batch) * (a.schedule.heads / a.group) + kv_head) * a.keys + first_key;
      q_full.arrive_expecting(TileQ::kLoadedBytes);
      load(q(q_at.stage), a.q, 0, work.q_first + work.block, work.head * a.q_broadcast[0],
           work.batch * a.q_broadcast[1], &q_full.word);
      q_at.advance();
      const auto fetch = [&](bool with_k, bool with_v, int tile) {
        const int stage = kv_at.stage;
        shared.kv_ring.empty[stage].wait(kv_at.parity ^ 1);
        Barrier& full = shared.kv_ring.full[stage];
        constexpr int kSteps =
            (kKeySteps == KeySteps::none ? 0 : sizeof shared.k_step[0]) + (kScaled ? sizeof shared.v_step[0] : 0);
        full.arrive_expecting((with_k ? TileK::kLoadedBytes + kSteps : 0) + (with_v ? TileV::kLoadedBytes : 0));
        if (with_k) {
          load(k(stage), a.k, 0, (a.k_in_tiles ? first_key : work.k_first) + tile * kKeys, kv_head * a.k_broadcast[0],
               work.batch * a.k_broadcast[1], &full.word);
          const auto fetch_steps = [&](auto& to, const float* from) {
            ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, &to, from, sizeof to, &full.word);
          };
          const int64_t at = steps + tile * kKeys;
          if constexpr (kKeySteps == KeySteps::tokens) fetch_steps(shared.k_step[stage], a.k_step + at);
          if constexpr (kKeySteps == KeySteps::groups)
            fetch_steps(shared.k_step[stage], a.k_step + at / kGroupBlock * kStepGroups);
          if constexpr (kScaled) fetch_steps(shared.v_step[stage], a.v_step + 2 * at);
        }
        if (with_v) load(v(stage), a.v, first_key + (tile + 1) * kKeys, 0, kv_head, work.batch, &full.word);
        kv_at.advance();
      };
      // Products with k of a tile and with v of the one before are issued together, so they share a stage.
      if (keys.any())
        for (int tile = keys.last - 1; tile >= keys.first - 1; --tile)
          fetch(tile >= keys.first, tile < keys.last - 1, tile);
      number = gridDim.x + atomicAdd(a.schedule.counter, 1u);
    }
  }

  // o += r times the step of p.
  static __device__ void add(Accumulator<kColumns>& o, const Accumulator<kColumns, int>& r, const RowValues& step) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o.x[i] = fmaf(static_cast<float>(r.x[i]), step[i / 2 % 2], o.x[i]);
  }

  // What this thread has put aside of o, and its sums with o.
  __device__ float4& aside(int warpgroup, int word) const {
    return shared.aside[warpgroup][word][threadIdx.x % kWarpgroup];
  }
  __device__ float4 with_aside(int warpgroup, int word, const Accumulator<kColumns>& o, const RowValues& by) const {
    const float4 x = aside(warpgroup, word);
    const float* y = &o.x[4 * word];
    return {fmaf(x.x, by[0], y[0]), fmaf(x.y, by[0], y[1]), fmaf(x.z, by[1], y[2]), fmaf(x.w, by[1], y[3])};
  }
  __device__ void bring_back(int warpgroup, Accumulator<kColumns>& o, const RowValues& by) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float4 x = with_aside(warpgroup, i, o, by);
      o.x[4 * i] = x.x, o.x[4 * i + 1] = x.y, o.x[4 * i + 2] = x.z, o.x[4 * i + 3] = x.w;
    }
  }
  __device__ void put_aside(int warpgroup, const Accumulator<kColumns>& o, const RowValues& by, bool first) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      aside(warpgroup, i) =
          first ? float4{o.x[4 * i], o.x[4 * i + 1], o.x[4 * i + 2], o.x[4 * i + 3]} : with_aside(warpgroup, i, o, by);
  }

  // Where logits go: float sums stay where they are.
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys>& s, Accumulator<kKeys>&) { return s; }
  static __device__ Accumulator<kKeys>& in_place(Accumulator<kKeys, int>&, Accumulator<kKeys>& converted) {
    return converted;
  }

  // Until all but the latest `Pending` products have come; `d` is among those.
  template <int Pending, class D>
  static __device__ void await_products(D& d) {
    ptx::wgmma_wait<Pending>();
    ptx::fence_operand(d.x);
  }

  // Where a warpgroup that computes stands.
  struct Positions {
    RingPosition<kByteStages> kv;
    int q;          // stage of the queries
    uint32_t turn;  // parity; the first group does not wait for the first
  };

  // Warpgroup `warpgroup` of those that compute.
  __device__ void compute_all(int warpgroup) {
    Positions at;
    at.turn = warpgroup == 0;
    for (unsigned block = 0;; ++block) {
      at.q = block % Tile::kQStages;
      shared.q_ring.full[at.q].wait(block / Tile::kQStages % 2);
      const Work& work = shared.work[block % (Tile::kQStages + 1)];
      if (work.block < 0) return;
      const Keys keys = keys_of(work, work.block, kRows);
      const Keys mine = Tile::kSkips ? keys_of(work, work.block + warpgroup * kWarpgroupRows, kWarpgroupRows) : keys;
      Softmax softmax{units(work, query_of(work, warpgroup))};
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
      shared.q_ring.empty[at.q].arrive();
      if constexpr (Tile::kSkips)
        for (int i = mine.any() ? mine.first - keys.first : 0; i > 0; --i) skip(at);
      if (work.block + warpgroup * kWarpgroupRows < end_of(work)) write(work, query_of(work, warpgroup), softmax, o);
    }
  }

  // Turns at the exponentials, from each warp to the one of the next group that has the same scheduler.
  __device__ void pass_turn(int warpgroup) const {
    if constexpr (Tile::kTurns) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.turns[(warpgroup + 1) % Tile::kWarpgroups][threadIdx.x / 32 % kWarps].arrive();
    }
  }
  // Returns a 0 that what is to wait is computed from.
  __device__ float my_turn(int warpgroup, Positions& at) const {
    if constexpr (Tile::kTurns) {
      at.turn ^= 1;
      return shared.turns[warpgroup][threadIdx.x / 32 % kWarps].wait_for_zero(at.turn ^ 1);
    }
    return 0.f;
  }
  __device__ void await_kv(const Positions& at) const { shared.kv_ring.full[at.kv.stage].wait(at.kv.parity); }
  __device__ void finish_kv(Positions& at) const { shared.kv_ring.empty[at.kv.stage].arrive(), at.kv.advance(); }

  // A stage of which this warpgroup needs nothing.
  __device__ void skip(Positions& at) const { await_kv(at), finish_kv(at); }

  // s = q k^T; issued, not awaited.
  __device__ void multiply_k(int warpgroup, const Positions& at, int stage, Sums& s) const {
    ptx::wgmma_fence();
    mm_bytes(s, q(at.q), warpgroup * kWarpgroupRows, k(stage));
    ptx::wgmma_commit();
  }
  // d (+)= p v; likewise.
  template <class D, class P>
  __device__ void multiply_v(const Positions& at, const P& p, D& d, bool accumulate) const {
    ptx::wgmma_fence();
    mm_bytes(d, p, v(at.kv.stage), accumulate);
    ptx::wgmma_commit();
  }

  // The steps that groups of this thread's keys in a tile have; else 1.
  __device__ auto group_steps(const Positions& at, int tile) const {
    if constexpr (kKeySteps == KeySteps::groups)
      return steps_of_groups<kKeys>(shared.k_step[at.kv.stage], tile);
    else
      return no_steps();
  }

  // x from the product s of a tile.
  __device__ void take_logits(const Positions& at, const Softmax& softmax, const Sums& s, Accumulator<kKeys>& x) const {
    to_floats(s, x);
    if constexpr (kKeySteps == KeySteps::tokens) scale_columns(x, shared.k_step[at.kv.stage]);
    if constexpr (kScaled) softmax.weigh(x, shared.v_step[at.kv.stage][0]);
  }
  // Of keys that a query does not see, logits become -inf; weights 0 where keys have steps, as the step of a group that
  // it sees in part may be NaN.
  static constexpr bool kHidesWeights = kKeySteps != KeySteps::none;
  __device__ void hide(int warpgroup, const Work& work, const Keys& keys, int tile, Accumulator<kKeys>& x,
                       float hidden = -INFINITY) const {
    if (sees_in_part(keys, tile)) {
      const int query = query_of(work, warpgroup);
      const KeyRange ranges[] = {keys_of(work, query), keys_of(work, query + 8)};
      mask_rows(x, tile * kKeys, ranges, hidden);
    }
  }
  __device__ static bool sees_in_part(const Keys& keys, int tile) {
    return tile < keys.whole_first || tile >= keys.whole_last;
  }
  // The first of this thread's two queries.
  __device__ static int query_of(const Work& work, int warpgroup) {
    return work.block + warpgroup * kWarpgroupRows + fragment_row();
  }

  // Weights on one scale. The product s of a tile runs together with the product p v of the tile before, as in
  // forward.h.
  __device__ void attend(int warpgroup, const Work& work, const Keys& keys, Positions& at, Softmax& softmax,
                         Accumulator<kColumns>& o) const {
    Sums s;
    Accumulator<kKeys> converted;
    Accumulator<kKeys>& x = in_place(s, converted);
    Operand<typename Precision::Weight, kKeys> p;
    RowValues sum;
    RowValues shrunk{1.f, 1.f};  // by which what was put aside must be multiplied
    // Products with v that came before that of tile `tile`.
    const auto products_before = [&](int tile) { return keys.last - 1 - tile; };
    const auto starts_anew = [&](int tile) { return products_before(tile) % kTilesPerSum == 0; };

    const auto hide = [&](int tile, float hidden) { this->hide(warpgroup, work, keys, tile, x, hidden); };
    // Weights over a new scale from the product s of a tile; returns by what sums must be multiplied.
    const auto rise = [&](int tile, RowValues& sum) {
      take_logits(at, softmax, s, x);
      hide(tile, -INFINITY);
      const RowValues shrink = softmax.rise(x, group_steps(at, tile), sum);
      if constexpr (kHidesWeights) hide(tile, 0.f);
      return shrink;
    };

    await_kv(at);
    multiply_k(warpgroup, at, at.kv.stage, s);
    await_products<0>(s);
    rise(keys.last - 1, softmax.l);
    convert_bytes(x, p);
    finish_kv(at);
    if (keys.last - 2 >= keys.first) await_kv(at);
    for (int tile = keys.last - 2; tile >= keys.first; --tile) {
      multiply_k(warpgroup, at, at.kv.stage, s);
      multiply_v(at, p, o, !starts_anew(tile + 1));
      await_products<1>(s);
      take_logits(at, softmax, s, x);
      // What does not fit is done over from its product, and so are tiles with a mask, which are few.
      const bool fits = softmax.weigh(x, group_steps(at, tile), sum) && !sees_in_part(keys, tile);
      ptx::fence_operand(x.x);
      // This branch keeps ptxas from waiting for the product with v before the exponentials.
      if (ptx::all_of_warpgroup(fits, kVoteBarrier + warpgroup)) {
        await_products<0>(o);
      } else {
        // opaque() stops hoisting: the addresses of both products would be computed ahead of the first.
        multiply_k(ptx::opaque(warpgroup), at, ptx::opaque(at.kv.stage), s);
        await_products<0>(o);
        ptx::fence_operand(s.x);
        const RowValues shrink = rise(tile, sum);
        scale_rows(o, shrink);
        shrunk[0] *= shrink[0], shrunk[1] *= shrink[1];
      }
      softmax.l[0] += sum[0], softmax.l[1] += sum[1];
      finish_kv(at);
      convert_bytes(x, p);
      if (starts_anew(tile)) {
        put_aside(warpgroup, o, shrunk, products_before(tile) == kTilesPerSum);
        shrunk = {1.f, 1.f};
      }
      if (tile > keys.first) await_kv(at);
    }
    await_kv(at);
    multiply_v(at, p, o, !starts_anew(keys.first));
    await_products<0>(o);
    finish_kv(at);
    if (products_before(keys.first) >= kTilesPerSum) bring_back(warpgroup, o, shrunk);
  }

  // Weights whose scale changes from tile to tile: their product goes to an accumulator of its own and from there to o.
  __device__ void attend_scaled(int warpgroup, const Work& work, const Keys& keys, Positions& at, Softmax& softmax,
                                Accumulator<kColumns>& o) const {
    Sums s;
    Accumulator<kKeys> x;
    Accumulator<kColumns, int> r;
    Operand<typename Precision::Weight, kKeys> p;
    await_kv(at);
    multiply_k(warpgroup, at, at.kv.stage, s);
    await_products<0>(s);
    take_logits(at, softmax, s, x);
    hide(warpgroup, work, keys, keys.last - 1, x);
    for (int tile = keys.last - 1; tile >= keys.first; --tile) {
      const RowValues most = softmax.largest(x, o);
      const RowValues step = softmax.step(x, most, shared.v_step[at.kv.stage][1], my_turn(warpgroup, at), p);
      pass_turn(warpgroup);
      finish_kv(at);
      await_kv(at);
      multiply_v(at, p, r, false);
      if (tile == keys.first) {
        await_products<0>(r);
        finish_kv(at);
        add(o, r, step);
        break;
      }
      multiply_k(warpgroup, at, at.kv.stage, s);
      await_products<1>(r);
      add(o, r, step);
      await_products<0>(s);
      take_logits(at, softmax, s, x);
      hide(warpgroup, work, keys, tile - 1, x);
    }
  }

  // exp(logit) = 2^(unit x) for the two queries of this thread; a query of zeros counts as one with step 1.
  __device__ RowValues units(const Work& work, int query) const {
    RowValues unit;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int i = min(query + 8 * row, work.q_tokens - 1);
      const float step = a.q_step ? a.q_step[row_of(work) + i] : 1.f;
      unit[row] = a.scale_log2e * (step == 0.f ? 1.f : step);
      if (unit[row] == 0.f) unit[row] = kLeastUnit;
    }
    return unit;
  }
  // The first query of a sequence in arrays [batch, head, token].
  __device__ int64_t row_of(const Work& work) const {
    return (static_cast<int64_t>(work.batch) * a.schedule.heads + work.head) * a.schedule.q_tokens + work.q_first;
  }

  __device__ void write(const Work& work, int query, const Softmax& softmax, const Accumulator<kColumns>& sums) const {
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
      if (seen.first == seen.last) l = 0.f;  // whatever its step is
      constexpr float kLn2 = 0.693147180559945f;
      float of_mean = a.mean_logit && i < work.q_tokens ? a.scale * a.mean_logit[row_of(work) + i] : 0.f;
      constexpr float kUnit = kScaled ? kInverseUnit : 1.f, kUnitLog2 = kScaled ? kInverseUnitLog2 : 0.f;  // of l
      inverse[row] = l == 0.f ? 0.f : l < INFINITY ? kUnit / l : NAN;
      float total = l == 0.f ? -INFINITY : softmax.exponent(row) + log2f(parts) - kUnitLog2;
      if (l == 0.f) of_mean = 0.f;
      if (a.sinks.data) {
        const RowWithSink all = with_sink(total, (sink - of_mean) * 1.44269504f);
        total = all.total, share[row] = all.share;
      }
      lse[row] = total * kLn2 + of_mean;
    }
    const int64_t side = static_cast<int64_t>(work.sequence) * (a.schedule.heads / a.group) + work.head / a.group;
    Accumulator<Dims::kDimV> o;
#pragma unroll
    for (int i = 0; i < Dims::kDimV / 8; ++i) {
      const int64_t channel = side * Dims::kDimV + 8 * i + fragment_column();
      float2 step{1.f, 1.f}, mean{0.f, 0.f};
      if (a.v_channel) step = *reinterpret_cast<const float2*>(a.v_channel + channel);
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
    // Values of e4m3 that are not finite are NaN; at int8 they have steps that are, and weights that are hidden do not
    // meet these.
    if constexpr (!kScaled)
      if (a.mask.windowed && __any_sync(~0u, has_infinite<Dims::kDimV>(sums))) attend_again(work, ptx::opaque(query));
  }

  __device__ void write(const Work& work, int query, const RowValues& lse, Accumulator<Dims::kDimV>& o) const {
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
  __device__ void write_as(const Work& work, int query, const RowValues& lse, Accumulator<Dims::kDimV>& o) const {
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
  __device__ void attend_again(const Work& work, int query) const {
    using Code = typename Precision::Code;
    const int kv_heads = a.schedule.heads / a.group, kv_head = work.head / a.group;
    const int code_first = first_key_of(work), k_first = a.k_in_tiles ? code_first : work.k_first;
    const int64_t kv = static_cast<int64_t>(work.batch) * kv_heads + kv_head;
    const int64_t channels = (static_cast<int64_t>(work.sequence) * kv_heads + kv_head) * Dims::kDimV;
    const auto step_of = [&](int64_t code) {
      if constexpr (kKeySteps == KeySteps::none)
        return 1.f;
      else if constexpr (kKeySteps == KeySteps::tokens)
        return a.k_step[code];
      else
        return a.k_step[code / kGroupBlock * kStepGroups + code % 8 / 2];
    };
    const auto value = [&](int key, int channel) {
      const int at = code_first + key, place = at % 8 / 2 * 4 + at / 8 % 2 * 2 + at % 2;  // see byte_order
      const auto* const codes = reinterpret_cast<const E4m3*>(a.v_codes) + (kv * Dims::kDimV + channel) * a.keys;
      return float(codes[at / 16 * 16 + place]);
    };
    const int first = query - static_cast<int>(threadIdx.x % 32 / 4);
    const Keys tiles = keys_of(work, work.block, kRows);
    const KeyRange keys{tiles.first * kKeys, min(tiles.last * kKeys, work.k_tokens)};
    const KeyRange of_all{keys_of(work, min(first + kWarpRows, work.q_tokens) - 1).first, keys_of(work, first).last};
    if (!hides_infinite(keys, of_all, a.dim_v, value)) return;
    const auto row_of = [&](int query) {
      const auto* const q = a.q_rows.row<Code>(work.batch, work.head, int64_t{work.q_first} + query);
      const float unit = units(work, query)[0];
      const auto logit = [&](int key) {
        return unit * step_of(kv * a.keys + code_first + key) *
               dot(q, a.k_rows.row<Code>(work.batch, kv_head, int64_t{k_first} + key), a.dim);
      };
      SeenRow<Dims::kDimV> row = attend_row<Dims::kDimV>(keys_of(work, query), a.dim_v, logit, value);
      const float of_mean = a.mean_logit ? a.scale * a.mean_logit[this->row_of(work) + query] : 0.f;
      const float share = with_sink(row.total, (a.sinks.at(work.batch, work.head) - of_mean) * 1.44269504f).share;
#pragma unroll
      for (int i = 0; i < Dims::kDimV / 32; ++i) {
        const int64_t channel = channels + cold_lane() + 32 * i;
        row.o[i] *= (a.v_channel ? a.v_channel[channel] : 1.f) * share;
      }
      return row;
    };
    write_again<Dims::kDimV>(a.o, a.o_residual, work.batch, work.head, work.q_first, first, work.q_tokens, a.dim_v,
                             row_of);
  }
};

template <class Precision, class Dims>
__global__ void __launch_bounds__(ByteForward<Precision, Dims>::kThreads, 1)
    byte_forward(const __grid_constant__ ByteForwardArguments arguments) {
  using Kernel = ByteForward<Precision, Dims>;
  extern __shared__ unsigned char memory[];
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory + (-base & (kSwizzleBytes - 1)));
  Kernel kernel{arguments, shared};
  if (threadIdx.x == 0) {
    shared.q_ring.init(Kernel::kReaders);
    shared.kv_ring.init(Kernel::kReaders);
    for (auto& group : shared.turns)
      for (Barrier& turn : group) turn.init(1);
    publish_barriers();
  }
  kernel.write_ones();
  ptx::griddepcontrol_wait();
  __syncthreads();
  // The compiler knows that a whole warpgroup takes one side.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::reg_dealloc<Kernel::Tile::kLoaderRegisters>();
    if (threadIdx.x == 0) kernel.load_all();
  } else {
    ptx::reg_alloc<Kernel::Tile::kRegisters>();
    kernel.compute_all(warpgroup - 1);
  }
}

}  // namespace octet::cuda::sm90
