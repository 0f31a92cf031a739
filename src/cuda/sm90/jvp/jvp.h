// The jvp pass: o, lse and their derivatives along tangents tq, tk, tv, for tiles of queries.
//
//   for each tile of keys, from the last to the first that the tile of queries sees:
//     [t s] = q [tk; k]^T;  t = t + tq k^T
//     p = exp(scale s - m) with the stale maximum m;  h = p (scale t - c)
//     where such a p would be too large: repeat t and s; m, p, h by online softmax; [u o] rescaled
//     [u o] = [u o] + p [tv v];  u = u + h v;  l, r: the sums of the rounded p and h
//   o = o / l;  to = (u - r o) / l;  lse = m + ln l;  tlse = c + r / l
//
// Two products of the same left factor are one: tk and k lie below each other in shared memory, tv and v side by side.
// Where v does not fill its panels, p v and p tv are two.
// A number c added to a row of t cancels between u and r o. So c, the mean of scale t weighted by p in the first tile
// that the row sees, only keeps h small, and with it the error of rounding h.
//
// One producer thread loads the tiles by TMA. Each consumer warpgroup computes 64 queries. p and h go to shared memory,
// as registers have no room for them beside s, t, o and u. The warpgroups issue their products in turn (ping-pong): q
// k^T of a tile and p v of the one before, which runs beside the exponentials of the tile and of the other warpgroups.
#pragma once
#include "cuda/fragment/mask.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/rows.h"
#include "cuda/fragment/unmasked_jvp_row.h"
#include "cuda/sm90/jvp/config.h"
#include "cuda/sm90/jvp/params.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/pipeline.h"
#include "cuda/sm90/seen_tiles.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {

// The halves of an accumulator's columns.
template <int Columns>
__device__ Accumulator<Columns / 2>& first_half(Accumulator<Columns>& x) {
  return reinterpret_cast<Accumulator<Columns / 2>&>(x.x[0]);
}
template <int Columns>
__device__ Accumulator<Columns / 2>& second_half(Accumulator<Columns>& x) {
  return reinterpret_cast<Accumulator<Columns / 2>&>(x.x[Columns / 4]);
}
template <int Columns>
__device__ const Accumulator<Columns / 2>& second_half(const Accumulator<Columns>& x) {
  return reinterpret_cast<const Accumulator<Columns / 2>&>(x.x[Columns / 4]);
}

template <class T, class Dims>
struct Jvp {
  using Tile = JvpTile<Dims>;
  static constexpr int kRows = Tile::kWarpgroups * kWarpgroupRows, kKeys = Tile::kKeys;
  static constexpr int kThreads = (Tile::kWarpgroups + 1) * kWarpgroup;
  static constexpr int kConsumerThreads = Tile::kWarpgroups * kWarpgroup;

  // P and H over a stale maximum are kept while their sums in a thread are at most these: sums over keys must not
  // overflow, and an H beyond its format is inf.
  static constexpr float kMaxP = 0x1p7f, kMaxH = 0x1p100f;

  // True: a warpgroup skips the tiles along the diagonal that none of its queries sees.
  static constexpr bool kSkips = kRows - kWarpgroupRows >= kKeys;

  using TileQ = SharedTile<T, kRows, Dims::kDim>;
  using TilesK = SharedTile<T, 2 * kKeys, Dims::kDim>;  // the rows of tk, then those of k
  using TileV = SharedTile<T, kKeys, Dims::kDimV>;
  using TilesV = SharedTile<T, kKeys, 2 * TileV::kPanels * kPanelColumns>;  // the panels of tv, then those of v
  static_assert(TilesV::kBytes == 2 * TileV::kBytes);
  // True: panels have no columns beyond those of v, so that tv and v are one operand.
  static constexpr bool kWholePanels = TilesV::kColumns == 2 * Dims::kDimV;
  using TileP = SharedTile<T, kWarpgroupRows, kKeys>;

  // The producer's message to the consumers about a tile of queries.
  struct Block {
    TileInfo q_tile;
    SeenTiles tiles, warpgroup_tiles[Tile::kWarpgroups];
  };
  struct alignas(kSwizzleBytes) Shared {
    unsigned char q[TileQ::kBytes], tq[TileQ::kBytes];
    unsigned char k[Tile::kStages][TilesK::kBytes];
    unsigned char v[Tile::kStages][TilesV::kBytes];
    unsigned char p[Tile::kWarpgroups][TileP::kBytes], h[Tile::kWarpgroups][TileP::kBytes];
    Pipeline<1> q_pipe;
    Pipeline<Tile::kStages> k_pipe, v_pipe;
    // Two, as warpgroups read that of the tile which they write while the next one is loaded.
    Block block[2];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;  // dynamic shared memory starts at any 16 bytes
  static_assert(kSharedBytes <= kMostSharedBytes);

  // Named barriers; each is the first of one per consumer warpgroup.
  enum NamedBarrier : int {
    kPingPongBarrier = 1,
    kVoteBarrier = kPingPongBarrier + Tile::kWarpgroups,
    kClearedBarrier = kVoteBarrier + Tile::kWarpgroups  // one of all
  };

  const JvpParams& a;
  Shared& shared;

  __device__ TileQ q() const { return {shared.q}; }
  __device__ TileQ tq() const { return {shared.tq}; }
  __device__ TilesK tk_k(int stage) const { return {shared.k[stage]}; }
  __device__ TilesK tk(int stage) const { return tk_k(stage); }  // its first kKeys rows, as are those of k
  __device__ TilesK k(int stage) const { return {shared.k[stage] + kKeys * kPanelRowBytes}; }
  __device__ TilesV tv_v(int stage) const { return {shared.v[stage]}; }
  __device__ TileV tv(int stage) const { return {shared.v[stage]}; }
  __device__ TileV v(int stage) const { return {shared.v[stage] + TileV::kBytes}; }

  __device__ TileP tile_p(int warpgroup) const { return {shared.p[warpgroup]}; }
  __device__ TileP tile_h(int warpgroup) const { return {shared.h[warpgroup]}; }

  __device__ void produce();
  __device__ void consume(int warpgroup);

 private:
  using TS = Accumulator<2 * kKeys>;        // the tangent of s, and s
  using UO = Accumulator<2 * Dims::kDimV>;  // the tangent of o, and o

  using P = Operand<T, kKeys>;

  // The sums of p and h over this thread's columns of its two rows.
  struct Sums {
    RowValues l{0.f, 0.f}, r{0.f, 0.f};
    __device__ void add(const Sums& x) {
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) l[row] += x.l[row], r[row] += x.r[row];
    }
  };
  // The state of the two rows.
  struct Rows : Sums {
    RowValues m{-INFINITY, -INFINITY}, centre{0.f, 0.f};
  };
  // The position of a consumer warpgroup in the pipelines of k and v, of which it takes one stage each for a tile.
  using Position = PipelineState<Tile::kStages>;

  __device__ void wait_turn(int warpgroup) const { ptx::barrier_sync(kPingPongBarrier + warpgroup, 2 * kWarpgroup); }
  __device__ void end_turn(int warpgroup) const {
    ptx::barrier_arrive(kPingPongBarrier + (warpgroup + 1) % Tile::kWarpgroups, 2 * kWarpgroup);
  }
  __device__ void wait_k(const Position& at) const { shared.k_pipe.full[at.stage].wait(at.phase); }
  __device__ void wait_v(const Position& at) const { shared.v_pipe.full[at.stage].wait(at.phase); }

  // Returns what is subtracted from logits in base 2. A row that has seen no key yet has a maximum of -inf.
  __device__ float origin_of(float m) const { return m == -INFINITY ? 0.f : m * a.scale_log2e; }

  // The verbs of the mainloop. Products are issued without waiting for them. `stage`: of k and tk.
  __device__ void multiply_qk(int warpgroup, int stage, TS& ts) const;
  __device__ void multiply_pv(int warpgroup, int stage, UO& uo) const;
  __device__ void clear_v(const Block& block, int tile, const Position& at) const;
  __device__ void skip(int warpgroup, const Block& block, int from, int to, Position& at) const;
  __device__ Sums exponentials(const TS& ts, const Rows& rows, P& p, P& h) const;
  __device__ void write_p_and_h(int warpgroup, const P& p, const P& h) const;
  __device__ void raise_max(const TS& ts, Rows& rows, UO& uo) const;
  __device__ void mask(int warpgroup, const Block& block, int tile, TS& ts) const;
  __device__ void exp_raised_max(int warpgroup, const Block& block, int tile, TS& ts, Rows& rows, UO& uo) const;
  __device__ void exp_stale_max(int warpgroup, const Block& block, int tile, const Position& at, const Position& at_v,
                                TS& ts, Rows& rows, UO& uo) const;

  __device__ FinishedRow finish(const TileInfo& q_tile, float origin, float centre, float l, float r) const {
    return {{centre, l, r}, RowSum<>::of(origin, l, 0.f), a.sinks, a.tsinks, q_tile.batch, q_tile.head, 1.f};
  }
  __device__ void write(int warpgroup, const Block& block, const Rows& rows, UO& uo) const;
  __device__ void store(const TileInfo& q_tile, int query, const Output& to, const Accumulator<Dims::kDimV>& x) const;
  __device__ void recompute_rows(const TileInfo& q_tile, int warpgroup) const;
};

}  // namespace octet::cuda::sm90
