// The jvp pass: o, lse and their derivatives along tangents tq, tk, tv, in one loop over tiles of keys (forward-mode
// differentiation of online softmax). For each tile:
//
//   s = q k^T    t = tq k^T + q tk^T                each k and q in shared memory serves two products
//   m' = max(m, rowmax(s))    p = exp(scale (s - m'))    h = p (scale t - c)
//   o = o exp(m - m') + p v    u = u exp(m - m') + p tv + h v    l, r: the sums of p and h, rescaled likewise
//
// and at the end o / l, to = (u - r o / l) / l, lse = m + log l, tlse = c + r / l.
//
// A number added to a row of t cancels between u and r o. So c, the mean of scale t weighted by p in the first tile
// that the row sees, only keeps h small, and with it the error of rounding h. l and r sum the rounded p and h, so that
// their roundings cancel against those in o and u.
//
// k and tk of the next tile are loaded while p meets v, v and tv while q meets k.
#pragma once
#include "cuda/fragment/finish_jvp.h"
#include "cuda/fragment/rows.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/sm80/jvp/operands.h"
#include "cuda/sm80/jvp/params.h"
#include "cuda/sm80/mask_tile.h"

namespace octet::cuda::sm80 {

// A mask tensor alone is a general logit here.
template <class T, int Dim, Logits logits, Tangents tangents>
struct Jvp {
  using Operands = JvpOperands<T>;
  using Element = typename Operands::Element;
  using Tile = typename Operands::template Tile<Dim, tangents>;
  static constexpr bool kGeneral = logits == Logits::general, kStagesMask = kGeneral && Operands::kStagesMasks;
  static constexpr int kDim = Dim, kDimV = Tile::kDimV, kKeys = Tile::kKeys;
  static constexpr int kThreads = 32 * Tile::kWarps, kRows = 16 * Tile::kWarps;
  using TileQ = SharedTile<Element, kRows, Dim>;
  using TileK = SharedTile<Element, kKeys, Dim>;
  using TileV = SharedTile<Element, kKeys, kDimV>;
  using S = Accumulator<kKeys>;
  using P = typename Operands::template P<kKeys>;
  using O = Accumulator<kDimV>;
  static constexpr int kBytesQ = Operands::kTiles * TileQ::kBytes, kBytesK = Operands::kTiles * TileK::kBytes;
  static constexpr int kBytesV = Operands::kTiles * TileV::kBytes;

  struct Shared {
    unsigned char q[kBytesQ], tq[kBytesQ], k[kBytesK], tk[kBytesK];
    unsigned char v[Tile::kLateV ? 1 : kBytesV], tv[Tile::kLateV ? 1 : kBytesV];
    TileInfo q_tile;
    Interval keys;  // those that any query of the tile sees
    Interval seen;  // those that any query of the sequence sees
    const Element *k_start, *tk_start, *v_start, *tv_start;
    [[no_unique_address]] typename Operands::template Factors<kRows, kKeys> factors;
    // The row biases of the rows and a tile of the mask tensor, where it is loaded as tiles.
    float row_bias[kStagesMask ? kRows : 1];
    alignas(16) unsigned char mask[kStagesMask ? kRows * mask_row_bytes(kKeys, sizeof(float)) : 1];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= kMostSharedBytes);

  // The maximum of a row that has seen no key yet. Logits below -2^127, as of the smallest number of a mask tensor's
  // type, have a p of 0 beside any other key.
  static constexpr float kNone = kGeneral ? -0x1p127f : -INFINITY;
  // The state of the two rows of a thread.
  struct Rows {
    RowValues m{kNone, kNone}, centre{0.f, 0.f};
    RowValues l{0.f, 0.f}, r{0.f, 0.f};  // sums over this thread's columns
  };

  const JvpParams& a;
  Shared& shared;

  // Computes a tile of queries.
  __device__ void run(unsigned tile);

 private:
  friend Operands;

  // These are not kept in registers, which are few.
  static __device__ int warp() { return ptx::opaque(static_cast<int>(threadIdx.x)) / 32; }
  static __device__ int first_column() { return static_cast<int>(blockIdx.y) * kDimV; }
  __device__ int thread_query() const {
    return shared.q_tile.q_start + 16 * warp() + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ Interval range_of(int query) const {
    return a.mask.keys_of(min(query, shared.q_tile.q_tokens - 1), shared.q_tile.q_tokens, shared.q_tile.k_tokens);
  }
  // Returns false for a tangent that is absent, as 0 is.
  __device__ bool has(const Output& tangent) const { return tangents == Tangents::all || tangent.data; }
  __device__ unsigned char* v_tiles() const { return Tile::kLateV ? shared.k : shared.v; }
  __device__ unsigned char* tv_tiles() const { return Tile::kLateV ? shared.tk : shared.tv; }
  __device__ const Element* query_row(const Output& t, int64_t token) const {
    return t.row<Element>(shared.q_tile.batch, shared.q_tile.head, token);
  }
  __device__ void find_tile(unsigned tile);
  __device__ void load_queries() const;
  __device__ void load_k(int key) const;
  __device__ void load_v(int key) const;
  template <class SharedTile>
  __device__ void load(unsigned char* to, const Element* from, int64_t stride, const Interval& rows, int columns) const;
  __device__ bool stages_mask() const { return kStagesMask && a.terms.mask && a.terms.mask_chunks; }
  __device__ void load_mask(int key) const;
  __device__ RowTerms terms_of(int query) const;
  __device__ void take_logits(S& s, S& t, int key) const;
  __device__ RowValues take_exp(S& s, S& t, Rows& rows, P& p, P& h) const;
  __device__ void drop_p_and_h(P& p, P& h, int key) const;
  __device__ void write(const Rows& rows, O& o, O& u) const;
  __device__ FinishedRow finish(int query, float m, float centre, float l, float r) const;
  __device__ void store(const Output& to, int query, const O& x) const;
  __device__ void recompute_rows() const;
};

}  // namespace octet::cuda::sm80
