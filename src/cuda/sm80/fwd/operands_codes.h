// The operands of few queries over a KV cache in 8 bits. operands.h has the list of their verbs.
#pragma once
#include "cuda/fragment/codes.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/sm80/fwd/operands.h"
#include "cuda/sm80/transposed_bytes.h"

namespace octet::cuda::sm80 {

// k and v come as codes of int8 or e4m3, with a scale for each token. They are copied to shared memory as they are, and
// become f16, which has all of them, on their way to the products. The scale of a key multiplies its column of logits,
// and that of v the column of P. q of bf16 or f16 becomes f16 times a power of two of its row, which loses what is
// smaller than 2^-39 of its largest number.
struct PrecisionCodes : PrecisionF16 {};

// o is kept in a unit: a power of two that is larger than the scale of any v so far, so that P times these scales fits
// f16. What P loses of its 11 bits where it is multiplied by a scale that is much smaller is less than 2^-32 of a unit.
template <class Base>
struct SoftmaxInUnits : Base {
  float unit = 0x1p-126f;
};

// Returns 1 / power of a power of two from 2^-126 to 2^126.
__device__ inline float inverse_of_power(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }

template <>
struct ForwardOperands<PrecisionCodes> : ForwardOperands<PrecisionF16> {
  template <class Dims, Logits, TileRows>
  using Tile = CodesTile<Dims>;
  using WidestDims = Dims256;
  template <class>
  using KType = S8;  // or the bytes of e4m3
  template <int Keys, int DimV>
  using TileV = SharedTile<S8, Keys, DimV>;
  template <Logits logits>
  using Softmax = SoftmaxInUnits<ForwardOperands<PrecisionF16>::Softmax<logits>>;
  static constexpr bool kHasFactors = true, kStagesMasks = false, kHasPairs = false, kHasDropout = false;
  static constexpr bool kConvertsQ = true;
  template <int Rows, int Keys, int Stages>
  struct Factors {
    float q[Rows], q_log2[Rows];  // the power of two of a row, and scale_log2 of its products
    float k[Stages][Keys], v[Stages][Keys];
    const float *of_k, *of_v;  // those of the first token of the first page
  };
  template <int M, int Columns>
  struct P {
    Operand<F16, Columns> x[M];
    float by[Columns / 4];  // the scales of v of this thread's columns, in units of o
  };

  // A step of the products of q and k has the channels of a block of 16 in the order in which a thread has them in a
  // word of codes: 4 j and the next as its numbers 2 j, 4 j + 2 and the next as 2 j + 8.
  template <class Kernel>
  static __device__ void load_q_factors(const Kernel& f) {
    constexpr int kOfLane = 4, kAtOnce = 32 * kOfLane, kDim = Kernel::Dims::kDim,
                  kPasses = (kDim + kAtOnce - 1) / kAtOnce;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int i = warp; i < Kernel::kRows; i += Kernel::kThreads / 32) {
      const int row = f.shared.q_tile.q_start + i;
      float x[kPasses][kOfLane], most = 0.f;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
        for (int c = 0; c < kOfLane; ++c) {
          const int channel = pass * kAtOnce + lane * kOfLane + c;
          x[pass][c] = row < f.rows_end() && channel < f.a.dim ? number_at(f.a.q, offset_of_q(f, row) + channel) : 0.f;
          most = fmaxf(most, fabsf(x[pass][c]));
        }
      for (int lanes = 16; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
      // The largest number lies in [2^14, 2^15).
      const float power =
          __uint_as_float(__float_as_uint(fminf(fmaxf(most, 0x1p-100f), 0x1p126f)) & 0x7f800000u) * 0x1p-14f;
      const float by = inverse_of_power(power);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int channel = pass * kAtOnce + lane * kOfLane;
        if (channel >= kDim) continue;
        const int chunk = channel / 16 * 2, word = channel % 16 / kOfLane;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          reinterpret_cast<uint32_t*>(f.q().at(i, chunk + half))[word] =
              ptx::pack<F16>(x[pass][2 * half] * by, x[pass][2 * half + 1] * by);
      }
      if (lane > 0) continue;
      const float log2 = f.a.scale_log2e * power;
      f.shared.factors.q[i] = power, f.shared.factors.q_log2[i] = log2 == 0.f ? kMinScaleLog2 : log2;
    }
  }
  template <class Kernel>
  static __device__ int64_t offset_of_q(const Kernel& f, int row) {
    return f.a.q.offset(f.shared.q_tile.batch, f.head_of(row), int64_t{f.shared.q_tile.q_first} + f.query_of(row));
  }
  template <class Kernel>
  static __device__ void start_factors(const Kernel& f, int kv_head) {
    f.shared.factors.of_k = f.a.k_scales.template row<float>(0, kv_head, 0);
    f.shared.factors.of_v = f.a.v_scales.template row<float>(0, kv_head, 0);
  }
  template <class Kernel>
  static __device__ const S8* start_v(const Kernel& f, int kv_head) {
    return f.a.v.template row<S8>(f.first_page(), kv_head, 0);
  }
  // Returns how far the scale of a token lies from that of the first one.
  template <class Kernel>
  static __device__ int64_t factor_offset(const Kernel& f, const Output& scales, int64_t page, int key) {
    return page * scales.stride[0] + f.a.pages.token_in_page(key) * scales.stride[2];
  }
  // A lane loads the factors of the key whose page it has looked up: where lanes are twice as many as keys, of k or of
  // v.
  template <class Kernel>
  static __device__ void load_paged_factors(const Kernel& f, int tile, const Interval& rows, int page) {
    constexpr int kAtOnce = 32 / Kernel::kPagedRows;  // tensors
    static_assert(kAtOnce == 1 || kAtOnce == 2);
    const int row = Kernel::paged_row(), key = tile * Kernel::kKeys + row, stage = Kernel::stage_of(tile);
    const bool present = row >= rows.first && row < rows.last;
#pragma unroll
    for (int first = 0; first < 2; first += kAtOnce) {
      const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
      const bool of_v = kAtOnce == 1 ? first : lane >= Kernel::kPagedRows;
      const float* const from = of_v ? f.shared.factors.of_v : f.shared.factors.of_k;
      float* const to = of_v ? f.shared.factors.v[stage] : f.shared.factors.k[stage];
      const int64_t offset = present ? factor_offset(f, of_v ? f.a.v_scales : f.a.k_scales, page, key) : 0;
      ptx::cp_async_word(ptx::shared_address(to + row), from + offset, !present);
    }
  }

  template <class Kernel>
  static __device__ auto start_softmax(const Kernel& f, int block) {
    typename Kernel::Softmax softmax;
    const float* const of_rows = f.shared.factors.q_log2 + row_of_tile(f, block);
    softmax.scale_log2 = {f.a.scale_log2e, f.a.scale_log2e};
    if constexpr (Kernel::kPlain) softmax.scale_log2 = {of_rows[0], of_rows[8]};
    set_softmax(f, softmax);
    return softmax;
  }
  template <class Kernel>
  static __device__ int row_of_tile(const Kernel& f, int block) {
    return f.thread_row(block) - f.shared.q_tile.q_start;
  }
  // Returns this thread's pairs of factors in a tile, every fourth from the first on.
  template <class Kernel>
  static __device__ const float2* factors_of(const float (&tile)[Kernel::kKeys]) {
    return reinterpret_cast<const float2*>(tile + Kernel::key_part() * Kernel::kWarpKeys) +
           ptx::opaque(static_cast<int>(threadIdx.x)) % 4;
  }

  template <class Kernel>
  static __device__ void multiply_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s,
                                     int tile) {
    s[0].zero();
    if (f.a.k.element == Element::i8)
      add_qk<S8>(f, q, s, tile);
    else
      add_qk<E4m3>(f, q, s, tile);
    const float2* const of_keys = factors_of<Kernel>(f.shared.factors.k[Kernel::stage_of(tile)]);
    RowValues of_rows{1.f, 1.f};
    if constexpr (!Kernel::kPlain) {
      const float* const powers = f.shared.factors.q + row_of_tile(f, 0);
      of_rows = {powers[0], powers[8]};
    }
#pragma unroll
    for (int i = 0; i < Kernel::kWarpKeys / 8; ++i) {
      const float2 x = of_keys[4 * i];
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row) {
        float* const products = &s[0].x[4 * i + 2 * row];
        products[0] *= x.x, products[1] *= x.y;
        if constexpr (!Kernel::kPlain) products[0] *= of_rows[row], products[1] *= of_rows[row];
      }
    }
  }
  template <class Code, class Kernel>
  static __device__ void add_qk(const Kernel& f, const typename Kernel::QRows& q, typename Kernel::S& s, int tile) {
    static_assert(Kernel::kRowBlocks == 1);
    using TileK = typename Kernel::TileK;
    using TileQ = typename Kernel::TileQ;
    const uint32_t lane = TileK::move(f.k(tile).lane_right(), Kernel::key_part() * (Kernel::kWarpKeys / 16), 0);
    const uint32_t lane_q = f.q().lane_down();
#pragma unroll
    for (int k_step = 0; k_step < Kernel::Dims::kDim / kStepColumns<S8>; ++k_step) {
      uint32_t left[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part)
        if constexpr (!Kernel::Tile::kQRegisters) ptx::ldmatrix(left[part], TileQ::step(lane_q, 0, 2 * k_step + part));
#pragma unroll
      for (int n = 0; n < Kernel::kWarpKeys / 16; ++n) {
        uint32_t codes[4];
        ptx::ldmatrix(codes, TileK::step(lane, n, k_step));
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            uint32_t right[2];
            codes_to_f16<Code, Pairs::neighbours>(codes[2 * half + part], right);
            const uint32_t* const rows = Kernel::Tile::kQRegisters ? &q[0].x[4 * (2 * k_step + part)] : left[part];
            ptx::mma_m16n8k16<F16>(&s[0].x[8 * n + 4 * half], rows, right);
          }
      }
    }
  }

  template <class Kernel>
  static __device__ void take_exp(const Kernel& f, typename Kernel::S& s, int tile, const bool& zeros,
                                  typename Kernel::Softmax (&softmax)[Kernel::kRowBlocks], typename Kernel::O& o,
                                  typename Kernel::P& p) {
    const float2* const of_keys = factors_of<Kernel>(f.shared.factors.v[Kernel::stage_of(tile)]);
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < Kernel::kWarpKeys / 8; ++i) {
      const float2 x = of_keys[4 * i];
      p.by[2 * i] = x.x, p.by[2 * i + 1] = x.y;
      most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
    most = quad_max(most);
    float& unit = softmax[0].unit;
    if (most >= unit) {  // of all threads of the warp, which have the same keys
      const float larger = fminf(__uint_as_float((__float_as_uint(most) & 0x7f800000u)), 0x1p125f) * 2.f;
      o[0].scale(unit * inverse_of_power(larger)), unit = larger;
    }
    const float inverse = inverse_of_power(unit);
#pragma unroll
    for (float& x : p.by) x *= inverse;
    f.take_exp(s, tile, zeros, softmax, o, p);
  }
  template <class Kernel>
  static __device__ void convert(const Kernel&, const typename Kernel::SBlock& p, int block, int,
                                 typename Kernel::P& operand) {
    typename Kernel::SBlock scaled;
#pragma unroll
    for (int i = 0; i < Kernel::kWarpKeys / 2; ++i) scaled.x[i] = p.x[i] * operand.by[i / 4 * 2 + i % 2];
    cuda::convert(scaled, operand.x[block]);
  }

  template <class Kernel>
  static __device__ void multiply_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
    if (f.a.v.element == Element::i8)
      add_pv<S8>(f, p, tile, o);
    else
      add_pv<E4m3>(f, p, tile, o);
  }
  template <class Code, class Kernel>
  static __device__ void add_pv(const Kernel& f, const typename Kernel::P& p, int tile, typename Kernel::O& o) {
    using TileV = typename Kernel::TileV;
    const uint32_t lane = TileV::move(f.v(tile).lane_down(), Kernel::key_part() * (Kernel::kWarpKeys / 16), 0);
#pragma unroll
    for (int k_step = 0; k_step < Kernel::kWarpKeys / 16; ++k_step)
#pragma unroll
      for (int n = 0; n < Kernel::Dims::kDimV / kStepColumns<S8>; ++n) {
        uint32_t codes[4];
        ptx::ldmatrix_trans(codes, TileV::step(lane, k_step, n));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t upper[2], lower[2];
          codes_to_f16<Code, Pairs::alternate>(codes[2 * half], upper);
          codes_to_f16<Code, Pairs::alternate>(codes[2 * half + 1], lower);
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const uint32_t right[2] = {upper[odd], lower[odd]};
            ptx::mma_m16n8k16<F16>(&o[0].x[8 * (2 * n + half) + 4 * odd], &p.x[0].x[4 * k_step], right);
          }
        }
      }
  }

  template <class Softmax>
  static __device__ float unit_of(const Softmax& softmax) {
    return softmax.unit;
  }
  template <class Softmax>
  static __device__ void join_units(Softmax& softmax, float other_unit, RowValues& own, RowValues& other) {
    const float larger = fmaxf(softmax.unit, other_unit), inverse = inverse_of_power(larger);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row)
      own[row] *= softmax.unit * inverse, other[row] *= other_unit * inverse;
    softmax.unit = larger;
  }
  template <class O>
  static __device__ void order_channels(O& o) {
    order_channels_of_bytes(o);
  }

  static __device__ float number_of(const Output& t, const S8* code) {
    return t.element == Element::i8 ? float(*code) : float(*reinterpret_cast<const E4m3*>(code));
  }
  template <class Kernel>
  static __device__ float scale_of(const Kernel& f, const float* first, const Output& scales, int key) {
    return first[factor_offset(f, scales, f.a.pages.page(f.shared.q_tile.sequence, key), key)];
  }
  template <class Kernel>
  static __device__ float product(const Kernel& f, const F16*, const S8* k, int row, int key) {
    float sum = 0.f;
#pragma unroll 1
    for (int c = 0; c < f.a.dim; ++c)
      sum = fmaf(number_at(f.a.q, offset_of_q(f, row) + c), number_of(f.a.k, k + c), sum);
    return sum * scale_of(f, f.shared.factors.of_k, f.a.k_scales, key);
  }
  template <class Kernel>
  static __device__ float value(const Kernel& f, const S8* v, int key, int channel) {
    return number_of(f.a.v, v + channel) * scale_of(f, f.shared.factors.of_v, f.a.v_scales, key);
  }
};

}  // namespace octet::cuda::sm80
