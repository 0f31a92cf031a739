// Rows of q and k, and of v where its codes have a step per token: smoothed, rotated, scaled, rounded, in the CPU's
// order of operations (cpu/rows.h). A warp takes a strip of 16 rows; two lanes share a row, of each 32 channels one has
// the first 16 and the other the rest. So the butterflies exchange between lanes once, and codes are written in 16-byte
// words.
#pragma once
#include <type_traits>

#include "cuda/ptx/types.h"
#include "cuda/quant/elements.h"
#include "cuda/quant/preparation.h"

namespace octet::cuda {

constexpr int kStrip = 16;      // rows
constexpr int kGroupTile = 64;  // keys among which thread groups are formed
constexpr int kGroups = kGroupTile / kStrip;

// Row j of a strip of keys, within its tile.
__device__ inline int key_of(bool groups, int strip, int j) {
  if (!groups) return strip * kStrip + j;
  return strip / kGroups * kGroupTile + j / 2 * 8 + strip % kGroups * 2 + j % 2;
}

template <int Dim>
struct RowsShared {
  static constexpr int kStages = 2, kWords = Dim / kVector;  // 16-byte words of a row
  uint4 staged[kPrepareWarps][kStages][kStrip * kWords];
  alignas(16) float offset[Dim];
};

template <class Vectors, int Dim>
struct RowReader {
  static constexpr int kHalf = Dim / 2;  // channels of a lane
  static constexpr int kWords = Dim / kVector;
  static constexpr bool kStaged = Vectors::kWhole && sizeof(typename Vectors::Raw) == 16;
  using Shared = RowsShared<Dim>;

  Shared& shared;
  const float* signs;  // [Dim], in shared memory

  static __device__ int warp() { return threadIdx.x / 32; }
  static __device__ int row() { return threadIdx.x % 32 / 2; }
  static __device__ int half() { return threadIdx.x % 2; }
  // The first channel of vector v of this lane.
  static __device__ int channel(int v) { return v / 2 * 32 + half() * 16 + v % 2 * kVector; }

  // Where word w of a row lies among its words: such that lanes read from different banks.
  static __device__ int swizzled(int row, int w) { return row * kWords + (w ^ ((row & 1) | (row & 2) << 1)); }

  // Starts to read a strip into a stage. token_of: of a row, negative where there is none.
  template <class F>
  __device__ void fetch(const Head& rows, int stage, const F& token_of) const {
    if constexpr (kStaged) {
#pragma unroll
      for (int i = 0; i < kStrip * kWords / 32; ++i) {
        const int word = i * 32 + threadIdx.x % 32, r = word / kWords, w = word % kWords;
        const int token = token_of(r), channel = w * kVector;
        const bool present = token >= 0 && channel < rows.dim;
        const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(&shared.staged[warp()][stage][swizzled(r, w)]));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                     "l"(present ? Vectors::at(rows, token, channel) : rows.data), "r"(present ? 16 : 0)
                     : "memory");
      }
    }
    fetch_nothing();
  }
  static __device__ void fetch_nothing() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  // Until all but the last strip has arrived.
  static __device__ void await() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
  }

  // This lane's channels of its row; 0 where there is none.
  __device__ void read(const Head& rows, int stage, int token, float (&x)[kHalf]) const {
#pragma unroll
    for (int v = 0; v < kHalf / kVector; ++v) {
      typename Vectors::Raw raw{};
      if constexpr (kStaged)
        raw = shared.staged[warp()][stage][swizzled(row(), channel(v) / kVector)];
      else if (token >= 0 && channel(v) < rows.dim)
        raw = Vectors::load(rows, token, channel(v));
      Vector eight;
      Vectors::convert(raw, eight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[v * kVector + i] = eight[i];
    }
  }

  // Calls f(channel of x[i], i) for each four of this lane's channels.
  template <class F>
  static __device__ void for_fours(const F& f) {
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) f(i / 16 * 32 + half() * 16 + i % 16, i);
  }

  // x becomes sign x + offset, of which those not wanted count as 1 and 0. The product is exact.
  template <bool Sign, bool Offset>
  __device__ void smooth(float (&x)[kHalf]) const {
    for_fours([&](int c, int i) {
      float4 s{1.f, 1.f, 1.f, 1.f}, o{};
      if constexpr (Sign) s = *reinterpret_cast<const float4*>(signs + c);
      if constexpr (Offset) o = *reinterpret_cast<const float4*>(&shared.offset[c]);
      const auto apply = [](float y, float sign, float offset) { return Offset ? fmaf(y, sign, offset) : y * sign; };
      x[i] = apply(x[i], s.x, o.x), x[i + 1] = apply(x[i + 1], s.y, o.y);
      x[i + 2] = apply(x[i + 2], s.z, o.z), x[i + 3] = apply(x[i + 3], s.w, o.w);
    });
  }

  // Rows that are not there, which have lost a mean all the same. In most strips there is none.
  static __device__ void clear_absent(int token, float (&x)[kHalf]) {
    if (__all_sync(~0u, token >= 0)) return;
    for (float& y : x) y = token < 0 ? 0.f : y;
  }

  template <int Distance>
  static __device__ void butterflies(float (&x)[kHalf]) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if (i & Distance) continue;
      const float a = x[i], b = x[i + Distance];
      x[i] = a + b, x[i + Distance] = a - b;
    }
  }

  // octet::hadamard without its signs and norm: stages at distance 1, 2, 4, ... Distance 16 is the other lane.
  static __device__ void rotate(int block, float (&x)[kHalf]) {
    butterflies<1>(x), butterflies<2>(x), butterflies<4>(x);
    if (block > 8) butterflies<8>(x);
    if (block > 16) {
      const float sign = half() ? -1.f : 1.f;
#pragma unroll
      for (float& y : x) y = fmaf(y, sign, __shfl_xor_sync(~0u, y, 1));
    }
    if (block > 32) butterflies<16>(x);
    if constexpr (kHalf > 32)
      if (block > 64) butterflies<32>(x);
    if constexpr (kHalf > 64)
      if (block > 128) butterflies<64>(x);
  }

  // octet::amax of a row times norm.
  static __device__ float amax(const float (&x)[kHalf], float norm) {
    float most[4] = {};
#pragma unroll
    for (int i = 0; i < kHalf; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most[i % 4]) : "f"(fabsf(x[i])));
    int bits = 0;  // NaN lies above infinity
    for (const float m : most) bits = max(bits, __float_as_int(m) & 0x7fffffff);
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    return __int_as_float(bits) * norm;
  }

  // Codes of norm x, times `inverse`, of 16 channels from x[first] on.
  template <class Code>
  static __device__ uint4 encode(const float (&x)[kHalf], int first, float norm, float inverse) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = __fmul_rn(__fmul_rn(x[first + 4 * w + i], norm), inverse);
      if constexpr (std::is_same_v<Code, S8>) {
        // |y| <= 127: the magic number's lowest byte is the nearest integer, ties to even.
        uint32_t b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = __float_as_uint(__fadd_rn(y[i], 0x1.8p23f));
        words[w] = __byte_perm(__byte_perm(b[0], b[1], 0x0040), __byte_perm(b[2], b[3], 0x0040), 0x5410);
      } else {
        words[w] = ptx::pack<Code>(y[0], y[1], y[2], y[3]);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // The step of a row, or with `group` of the strip, in all of its lanes. A row that is not finite has step NaN and
  // codes 0. In a group it does not count, and its codes are NaN; integers have no such code, so there the step becomes
  // NaN.
  template <class Code>
  static __device__ Step step(bool group, float norm, float (&x)[kHalf]) {
    const float most = amax(x, norm);
    const bool finite = most <= FLT_MAX;
    const bool all_finite = __all_sync(~0u, finite);
    int counts = finite ? __float_as_int(most) : 0;
    if (group) counts = __reduce_max_sync(~0u, counts);
    Step step = step_of(__int_as_float(counts), std::is_same_v<Code, S8> ? 127.f : 448.f);
    if (all_finite) return step;
    constexpr bool kHasNan = !std::is_same_v<Code, S8>;
    if (!finite)
      for (float& y : x) y = group && kHasNan ? NAN : 0.f;
    if (group ? !kHasNan : !finite) step.step = NAN;
    return step;
  }
};

template <class Code, class Vectors, int Dim>
struct Rows : RowReader<Vectors, Dim> {
  using Base = RowReader<Vectors, Dim>;
  using Base::half, Base::row, Base::shared, Base::warp, Base::kHalf;

  const Preparation& p;

  __device__ Rows(const Preparation& p, RowsShared<Dim>& shared, const float* signs) : Base{shared, signs}, p(p) {}

  // Calls f(strip, its stage) for the warp's strips among `strips`, while the next one is being read. fetch(strip,
  // stage) starts that; all threads call begin() when the first is on its way.
  template <class Fetch, class Begin, class F>
  __device__ void for_strips(int strips, const Fetch& fetch, const Begin& begin, const F& f) const {
    int stage = 0;
    if (warp() < strips) fetch(warp(), stage);
    begin();
    for (int strip = warp(); strip < strips; strip += kPrepareWarps) {
      __syncwarp();
      if (strip + kPrepareWarps < strips)
        fetch(strip + kPrepareWarps, stage ^ 1);
      else
        Base::fetch_nothing();
      Base::await();
      f(strip, stage);
      stage ^= 1;
    }
  }

  __device__ void set_offsets(const float* mean, bool signed_) const {
    for (int c = threadIdx.x; c < Dim; c += kPrepareThreads)
      shared.offset[c] = (mean ? -__ldcg(mean + c) : 0.f) * (signed_ ? this->signs[c] : 1.f);
    __syncthreads();
  }

  __device__ void queries(int head_index, int first, int count) const {
    const CodesArguments& a = p.codes;
    const int tokens = static_cast<int>(a.q.shape[2]), batch = head_index / a.heads, head = head_index % a.heads;
    const Head rows = head_of(a.q, batch, head);
    const auto token_of = [&](int strip, int r) {
      const int token = first + strip * kStrip + r;
      return token < tokens ? token : -1;
    };
    const float norm = a.rotation.block ? a.rotation.norm : 1.f;
    for_strips(
        count / kStrip,
        [&](int strip, int stage) { Base::fetch(rows, stage, [&](int r) { return token_of(strip, r); }); }, [] {},
        [&](int strip, int stage) {
          const int token = token_of(strip, row());
          float x[kHalf];
          Base::read(rows, stage, token, x);
          const int64_t at = static_cast<int64_t>(head_index) * tokens + token;
          if (a.mean_logit) {
            const float product = times_mean(batch, head, max(token, 0), x);
            if (token >= 0 && half() == 0) a.mean_logit[at] = product;
          }
          if (a.rotation.block) {
            Base::template smooth<true, false>(x);
            Base::rotate(a.rotation.block, x);
          }
          const Step step = Base::template step<Code>(false, norm, x);
          if (token < 0) return;
          if (half() == 0) a.q_step[at] = step.step;
          write(static_cast<unsigned char*>(a.q_codes) + at * Dim, x, norm, step.inverse);
        });
  }

  // A row of q times the mean of its keys.
  __device__ float times_mean(int batch, int head, int token, const float (&x)[kHalf]) const {
    const CodesArguments& a = p.codes;
    const int sequence =
        a.cu_seqlens_q ? last_at_most(token, a.keys.sequences, [&](int s) { return a.cu_seqlens_q[s]; }) : batch;
    const int side = sequence * a.kv_heads + head / (a.heads / a.kv_heads);
    p.wait(Survey::k, side);
    const float* mean = a.channels.k_mean + static_cast<int64_t>(side) * Dim;
    float product = 0.f;
    Base::for_fours([&](int c, int i) {
      const float4 m = fetch_channels(mean + c);
      product = fmaf(x[i], m.x, fmaf(x[i + 1], m.y, fmaf(x[i + 2], m.z, fmaf(x[i + 3], m.w, product))));
    });
    __syncwarp();
    return product + __shfl_xor_sync(~0u, product, 1);
  }

  __device__ void write(unsigned char* to, const float (&x)[kHalf], float norm, float inverse) const {
#pragma unroll
    for (int w = 0; w < kHalf / 16; ++w)
      *reinterpret_cast<uint4*>(to + 32 * w + 16 * half()) = Base::template encode<Code>(x, 16 * w, norm, inverse);
  }

  // `tiles` tiles of k of a (batch, kv head).
  __device__ void keys(int side, int first_tile, int tiles) const {
    const CodesArguments& a = p.codes;
    const int strips = a.keys.tile / kStrip;
    const Head rows = head_of(a.k, side / a.kv_heads, side % a.kv_heads);
    const auto tile_of = [&](int strip) { return tile_of_keys(a.keys, first_tile + strip / strips); };
    const auto token_of = [&](const TileOfKeys& tile, int strip, int r) {
      const int key = key_of(a.k_groups, strip % strips, r);
      return key < tile.tokens ? tile.first + key : -1;
    };
    const int sequence_side = p.sequence_side(side, tile_of(0).sequence);
    const float norm = a.rotation.block ? a.rotation.norm : 1.f;
    const float* mean = a.channels.k_mean ? a.channels.k_mean + static_cast<int64_t>(sequence_side) * Dim : nullptr;
    for_strips(
        strips * tiles,
        [&](int strip, int stage) {
          const TileOfKeys tile = tile_of(strip);
          Base::fetch(rows, stage, [&](int r) { return token_of(tile, strip, r); });
        },
        [&] {
          if (mean) p.wait(Survey::k, sequence_side);
          set_offsets(mean, true);
        },
        [&](int strip, int stage) {
          const TileOfKeys tile = tile_of(strip);
          const int token = token_of(tile, strip, row());
          float x[kHalf];
          Base::read(rows, stage, token, x);
          Base::template smooth<true, true>(x);
          Base::clear_absent(token, x);
          if (a.rotation.block) Base::rotate(a.rotation.block, x);
          const Step step = Base::template step<Code>(a.k_groups, norm, x);
          const int64_t tile_at =
              (static_cast<int64_t>(side) * a.keys.count() + first_tile + strip / strips) * a.keys.tile;
          const int64_t at = tile_at + key_of(a.k_groups, strip % strips, row());
          if (a.k_groups) {
            if (threadIdx.x % 32 == 0) a.k_step[tile_at / kStrip + strip % strips] = step.step;
          } else if (half() == 0) {
            a.k_step[at] = step.step;
          }
          write(static_cast<unsigned char*>(a.k_codes) + at * Dim, x, norm, step.inverse);
        });
  }
};

}  // namespace octet::cuda
