// Each precision loads, multiplies and rounds the operands of the jvp pass in its own way. The kernel (jvp.h) calls
// these verbs of its precision, and is otherwise the same for all:
//
//   Element, Tile      the elements of tiles in shared memory, and the tiles of a head dim (config.h)
//   kTiles             tiles in shared memory that hold one tile of a tensor
//   kStagesMasks       tiles of a mask tensor pass through shared memory
//   Factors            the factors of tokens in shared memory
//   P                  p or h as a left operand; put() sets two elements, and returns what l and r take of them
//   start_factors, load_query_factors, load_key_factors, load_value_factors
//   multiply_qk        s = q k^T, t = tq k^T + q tk^T
//   multiply_pv        o += p v, u += p tv + h v
//   products, values   s and t of a query and a key, a number of v with that of tv, for rows that are computed again
#pragma once
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/unmasked_row.h"
#include "cuda/scheduler/tile_scheduler.h"
#include "cuda/sm80/f16_halves.h"
#include "cuda/sm80/jvp/config.h"
#include "cuda/sm80/mma.h"

namespace octet::cuda::sm80 {

// 16 bits: numbers as they are.
template <class T>
struct JvpOperands {
  using Element = T;
  template <int Dim, Tangents tangents>
  using Tile = JvpTile<Dim, tangents>;
  static constexpr int kTiles = 1;
  static constexpr bool kStagesMasks = true;
  template <int Rows, int Keys>
  struct Factors {};
  template <int Keys>
  struct P {
    Operand<T, Keys> x;
    __device__ float2 put(int word, float first, float second) {
      x.x[word] = ptx::pack<T>(first, second);
      return ptx::unpack<T>(x.x[word]);
    }
  };

  template <class Kernel>
  static __device__ void start_factors(const Kernel&, int) {}
  template <class Kernel>
  static __device__ void load_query_factors(const Kernel&, const Interval&) {}
  template <class Kernel>
  static __device__ void load_key_factors(const Kernel&, int, const Interval&) {}
  template <class Kernel>
  static __device__ void load_value_factors(const Kernel&, int, const Interval&) {}

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, typename Kernel::S& s, typename Kernel::S& t) {
    using TileQ = typename Kernel::TileQ;
    using TileK = typename Kernel::TileK;
    s.zero(), t.zero();
    const TileQ q{f.shared.q}, tq{f.shared.tq};
    const TileK k{f.shared.k}, tk{f.shared.tk};
    const uint32_t lane_q = TileQ::step(q.lane_down(), f.warp(), 0), lane_tq = TileQ::step(tq.lane_down(), f.warp(), 0);
    const uint32_t lane_k = k.lane_right(), lane_tk = tk.lane_right();
    const bool of_tq = f.has(f.a.tq), of_tk = f.has(f.a.tk);
#pragma unroll
    for (int k_step = 0; k_step < Kernel::kDim / 16; ++k_step) {
      uint32_t rows[4], tangents[4];
      ptx::ldmatrix(rows, TileQ::step(lane_q, 0, k_step));
      if (of_tq) ptx::ldmatrix(tangents, TileQ::step(lane_tq, 0, k_step));
#pragma unroll
      for (int n = 0; n < Kernel::kKeys / 16; ++n) {
        uint32_t x[4], y[4];
        ptx::ldmatrix(x, TileK::step(lane_k, n, k_step));
        if (of_tk) ptx::ldmatrix(y, TileK::step(lane_tk, n, k_step));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_m16n8k16<T>(&s.x[8 * n + 4 * half], rows, &x[2 * half]);
          if (of_tq) ptx::mma_m16n8k16<T>(&t.x[8 * n + 4 * half], tangents, &x[2 * half]);
        }
        if (!of_tk) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) ptx::mma_m16n8k16<T>(&t.x[8 * n + 4 * half], rows, &y[2 * half]);
      }
    }
  }

  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, typename Kernel::O& o, typename Kernel::O& u,
                                     const typename Kernel::P& p, const typename Kernel::P& h) {
    using TileV = typename Kernel::TileV;
    const TileV v{f.shared.v}, tv{f.shared.tv};
    const uint32_t lane_v = v.lane_down(), lane_tv = tv.lane_down();
    const bool of_logits = f.has(f.a.tq) || f.has(f.a.tk), of_tv = f.has(f.a.tv);
#pragma unroll
    for (int k_step = 0; k_step < Kernel::kKeys / 16; ++k_step)
#pragma unroll
      for (int n = 0; n < Kernel::kDimV / 16; ++n) {
        uint32_t x[4], y[4];
        ptx::ldmatrix_trans(x, TileV::step(lane_v, k_step, n));
        if (of_tv) ptx::ldmatrix_trans(y, TileV::step(lane_tv, k_step, n));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_m16n8k16<T>(&o.x[8 * n + 4 * half], &p.x.x[4 * k_step], &x[2 * half]);
          if (of_logits) ptx::mma_m16n8k16<T>(&u.x[8 * n + 4 * half], &h.x.x[4 * k_step], &x[2 * half]);
        }
        if (!of_tv) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::mma_m16n8k16<T>(&u.x[8 * n + 4 * half], &p.x.x[4 * k_step], &y[2 * half]);
      }
  }

  template <class Kernel>
  static __device__ float2 products(const Kernel& f, int query, int key) {
    const int64_t token = int64_t{f.shared.q_tile.q_first} + query;
    const T *const q = f.query_row(f.a.q, token), *const tq = f.query_row(f.a.tq, token);
    const T *const k = f.shared.k_start + key * f.a.k.stride[2], *const tk = f.shared.tk_start + key * f.a.tk.stride[2];
    return {dot(q, k, f.a.dim),
            (f.has(f.a.tq) ? dot(tq, k, f.a.dim) : 0.f) + (f.has(f.a.tk) ? dot(q, tk, f.a.dim) : 0.f)};
  }
  template <class Kernel>
  static __device__ float2 values(const Kernel& f, int key, int column) {
    return {float(f.shared.v_start[int64_t{key} * f.a.v.stride[2] + column]),
            f.has(f.a.tv) ? float(f.shared.tv_start[int64_t{key} * f.a.tv.stride[2] + column]) : 0.f};
  }
};

// f32: two f16 halves of each number, and a factor of each token (sm80/f16_halves.h). p and h stay in float32 until
// they are divided into halves, each for the tensor whose factors they take.
template <>
struct JvpOperands<float> {
  using Element = F16;
  template <int Dim, Tangents>
  using Tile = F16HalvesJvpTile<Dim>;
  static constexpr int kTiles = 2;
  static constexpr bool kStagesMasks = false;
  template <int Rows, int Keys>
  struct Factors {
    float q[Rows], tq[Rows], k[Keys], tk[Keys], v[Keys], tv[Keys];
    const float *of_k, *of_tk, *of_v, *of_tv;  // those of the sequence
  };
  template <int Keys>
  struct P {
    Accumulator<Keys> x;
    __device__ float2 put(int word, float first, float second) {
      x.x[2 * word] = first, x.x[2 * word + 1] = second;
      return {first, second};
    }
  };

  // Finds the factors of a sequence.
  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    const TileInfo& tile = f.shared.q_tile;
    auto& factors = f.shared.factors;
    factors.of_k = f.a.k_factors.at(tile.batch, kv_head, tile.k_first);
    factors.of_tk = f.a.tk_factors.at(tile.batch, kv_head, tile.k_first);
    factors.of_v = f.a.v_factors.at(tile.batch, kv_head, tile.k_first);
    factors.of_tv = f.a.tv_factors.at(tile.batch, kv_head, tile.k_first);
  }
  template <class Kernel>
  static __device__ void load_query_factors(const Kernel& f, const Interval& rows) {
    const TileInfo& w = f.shared.q_tile;
    const int64_t token = int64_t{w.q_first} + w.q_start;
    load_words_async<Kernel::kThreads, Kernel::kRows>(f.shared.factors.q, f.a.q_factors.at(w.batch, w.head, token),
                                                      rows);
    if (f.has(f.a.tq))
      load_words_async<Kernel::kThreads, Kernel::kRows>(f.shared.factors.tq, f.a.tq_factors.at(w.batch, w.head, token),
                                                        rows);
  }
  template <class Kernel>
  static __device__ void load_key_factors(const Kernel& f, int key, const Interval& rows) {
    load_words_async<Kernel::kThreads, Kernel::kKeys>(f.shared.factors.k, f.shared.factors.of_k + key, rows);
    if (f.has(f.a.tk))
      load_words_async<Kernel::kThreads, Kernel::kKeys>(f.shared.factors.tk, f.shared.factors.of_tk + key, rows);
  }
  template <class Kernel>
  static __device__ void load_value_factors(const Kernel& f, int key, const Interval& rows) {
    load_words_async<Kernel::kThreads, Kernel::kKeys>(f.shared.factors.v, f.shared.factors.of_v + key, rows);
    if (f.has(f.a.tv))
      load_words_async<Kernel::kThreads, Kernel::kKeys>(f.shared.factors.tv, f.shared.factors.of_tv + key, rows);
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, typename Kernel::S& s, typename Kernel::S& t) {
    using S = typename Kernel::S;
    const auto product = [&](unsigned char* queries, const float* of_queries, unsigned char* keys,
                             const float* of_keys) {
      S d[1];
      multiply_ABt(d, HalfTiles<typename Kernel::TileQ>{queries}, f.warp(), HalfTiles<typename Kernel::TileK>{keys});
      const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
      times_factors(d[0], of_queries + 16 * f.warp() + lane / 4, of_keys + lane % 4 * 2);
      return d[0];
    };
    auto& shared = f.shared;
    const auto& factors = shared.factors;
    t.zero();
    // One after the other by the same instructions: else ptxas takes more registers than there are.
#pragma unroll 1
    for (int which = 0; which < 3; ++which) {  // tq k^T, q tk^T, q k^T
      if (which < 2 && !f.has(which ? f.a.tk : f.a.tq)) continue;
      s = product(which ? shared.q : shared.tq, which ? factors.q : factors.tq, which == 1 ? shared.tk : shared.k,
                  which == 1 ? factors.tk : factors.k);
      if (which == 2) break;
#pragma unroll
      for (int i = 0; i < S::kColumns / 2; ++i) t.x[i] += s.x[i];
    }
  }

  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, typename Kernel::O& o, typename Kernel::O& u,
                                     const typename Kernel::P& p, const typename Kernel::P& h) {
    constexpr int kColumns = 32;
    const int columns = f.a.dim_v - f.first_column();  // also keeps ptxas from more products at a time than registers
    const auto add = [&](typename Kernel::O& sum, const typename Kernel::P& left, unsigned char* right,
                         const float* of_keys) {
      HalfOperand<1, Kernel::kKeys> halves;
      const int column = ptx::opaque(static_cast<int>(threadIdx.x)) % 4 * 2;
      const RowValues inverse[] = {to_halves(left.x, of_keys + column, halves.large[0], halves.small[0])};
      typename Kernel::O sums[] = {sum};
#pragma unroll
      for (int first = 0; first < Kernel::kDimV; first += kColumns)
        if (first < columns)
          add_columns<kColumns>(sums, halves, inverse, HalfTiles<typename Kernel::TileV>{right}, first);
      sum = sums[0];
    };
    add(o, p, f.v_tiles(), f.shared.factors.v);
    if (f.has(f.a.tq) || f.has(f.a.tk)) add(u, h, f.v_tiles(), f.shared.factors.v);
    if (f.has(f.a.tv)) add(u, p, f.tv_tiles(), f.shared.factors.tv);
  }

  template <class Kernel>
  static __device__ float2 products(const Kernel& f, int query, int key) {
    const int64_t token = int64_t{f.shared.q_tile.q_first} + query;
    const int row = query - f.shared.q_tile.q_start;
    const auto product = [&](const Output& queries, float of_query, const F16* keys, const Output& of, float of_key) {
      const F16 *const x = f.query_row(queries, token), *const y = keys + key * of.stride[2];
      float sum = 0.f;
#pragma unroll 1
      for (int c = 0; c < f.a.dim; ++c)
        sum = fmaf(from_halves(x, Kernel::kDim, c), from_halves(y, Kernel::kDim, c), sum);
      times_factors(sum, of_query, of_key);
      return sum;
    };
    const auto& factors = f.shared.factors;
    return {product(f.a.q, factors.q[row], f.shared.k_start, f.a.k, factors.of_k[key]),
            (f.has(f.a.tq) ? product(f.a.tq, factors.tq[row], f.shared.k_start, f.a.k, factors.of_k[key]) : 0.f) +
                (f.has(f.a.tk) ? product(f.a.q, factors.q[row], f.shared.tk_start, f.a.tk, factors.of_tk[key]) : 0.f)};
  }
  template <class Kernel>
  static __device__ float2 values(const Kernel& f, int key, int column) {
    const auto value = [&](const F16* start, const Output& t, float factor) {
      return from_halves(start + key * t.stride[2], Kernel::kDim, column) * (1.f / (1 << kHalvesExponent)) * factor *
             factor;
    };
    return {value(f.shared.v_start, f.a.v, f.shared.factors.of_v[key]),
            f.has(f.a.tv) ? value(f.shared.tv_start, f.a.tv, f.shared.factors.of_tv[key]) : 0.f};
  }
};

}  // namespace octet::cuda::sm80
