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
#include "cuda/sm80/jvp/config.h"
#include "cuda/sm80/jvp/params.h"
#include "cuda/sm80/mask_tile.h"
#include "cuda/sm80/mma.h"

namespace octet::cuda::sm80 {

// A mask tensor alone is a general logit here.
template <class T, int Dim, Logits logits>
struct Jvp {
  static constexpr bool kGeneral = logits == Logits::general;
  static constexpr int kDimV = JvpTile<Dim>::kDimV, kKeys = JvpTile<Dim>::kKeys, kThreads = kJvpThreads;
  using TileQ = SharedTile<T, kJvpRows, Dim>;
  using TileK = SharedTile<T, kKeys, Dim>;
  using TileV = SharedTile<T, kKeys, kDimV>;
  using S = Accumulator<kKeys>;
  using O = Accumulator<kDimV>;

  struct Shared {
    unsigned char q[TileQ::kBytes], tq[TileQ::kBytes], k[TileK::kBytes], tk[TileK::kBytes];
    unsigned char v[TileV::kBytes], tv[TileV::kBytes];
    TileInfo q_tile;
    Interval keys;  // those that any query of the tile sees
    Interval seen;  // those that any query of the sequence sees
    const T *k_start, *tk_start, *v_start, *tv_start;
    // The row biases of the rows and a tile of the mask tensor, where it is loaded as tiles.
    float row_bias[kGeneral ? kJvpRows : 1];
    alignas(16) unsigned char mask[kGeneral ? kJvpRows * mask_row_bytes(kKeys, sizeof(float)) : 1];
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
  // These are not kept in registers, which are few.
  static __device__ int warp() { return ptx::opaque(static_cast<int>(threadIdx.x)) / 32; }
  static __device__ int first_column() { return static_cast<int>(blockIdx.y) * kDimV; }
  __device__ int thread_query() const {
    return shared.q_tile.q_start + 16 * warp() + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ Interval range_of(int query) const {
    return a.mask.keys_of(min(query, shared.q_tile.q_tokens - 1), shared.q_tile.q_tokens, shared.q_tile.k_tokens);
  }
  __device__ void find_tile(unsigned tile);
  __device__ void load_queries() const;
  __device__ void load_k(int key) const;
  __device__ void load_v(int key) const;
  __device__ bool stages_mask() const { return kGeneral && a.terms.mask && a.terms.mask_chunks; }
  __device__ void load_mask(int key) const;
  __device__ void multiply_qk(S& s, S& t) const;
  __device__ RowTerms terms_of(int query) const;
  __device__ void take_logits(S& s, S& t, int key) const;
  __device__ RowValues take_exp(S& s, S& t, Rows& rows, Operand<T, kKeys>& p, Operand<T, kKeys>& h) const;
  __device__ void drop_p_and_h(Operand<T, kKeys>& p, Operand<T, kKeys>& h, int key) const;
  __device__ void multiply_pv(O& o, O& u, const Operand<T, kKeys>& p, const Operand<T, kKeys>& h) const;
  __device__ void write(const Rows& rows, O& o, O& u) const;
  __device__ FinishedRow finish(int query, float m, float centre, float l, float r) const;
  __device__ void store(const Output& to, int query, const O& x) const;
  __device__ void recompute_rows() const;
};

}  // namespace octet::cuda::sm80
