// o = softmax(scale q k^T) v and lse with operands of 8 bits, for blocks of queries:
//
//   for each tile of keys, from the last to the first that the block sees:
//     s = q k^T in int32 or float32;  m, p, l by online softmax;  p to codes
//     r = p v in an accumulator of its own;  o = o shrink + r (times the step of p)
//   o = o / l;  lse = scale m + ln l
//
// One warp loads tiles through TMA. The warpgroups that compute hold 64 queries each and take turns: while one issues
// its products p v and the next q k^T, another computes exponentials. Products with v have their own accumulator, for
// the tensor cores keep fewer bits of a float32 sum of e4m3 products than float32 has, and codes of p change their
// step; adding it to o takes the place of scaling o by shrink.
//
// The sum l of rounded weights is column dim_v of o: below the channels of v lies a row of ones.
#pragma once
#include <type_traits>

#include "cuda/attn/byte_softmax.h"
#include "cuda/attn/mask.h"
#include "cuda/attn/output.h"
#include "cuda/attn/precision.h"
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
  static_assert(Tile::kWarpgroups * Tile::kRegisters + Tile::kLoaderRegisters <=
                65536 / kThreads / 8 * 8 * (Tile::kWarpgroups + 1));

  static constexpr int kSumRows = Precision::kSumRounded ? 8 : 0;
  static constexpr int kColumns = Dims::kDimV + kSumRows;
  static constexpr bool kScaled = Precision::kPart != 0;  // whether codes of p have steps of their own
  static constexpr int kPart = kScaled ? Precision::kPart : kKeys, kParts = kKeys / kPart;
  using Softmax = std::conditional_t<kScaled, ScaledSoftmax, ByteSoftmax<Precision>>;
  using Product = std::conditional_t<kScaled, int, float>;
  using TileQ = ByteTile<typename Precision::Code, kRows, Dims::kDim>;
  using TileK = ByteTile<typename Precision::Code, kKeys, Dims::kDim>;
  using TileV = ByteTile<typename Precision::Value, kColumns, kKeys, Dims::kDimV>;

  struct alignas(kSwizzleBytes) Shared {
    alignas(kSwizzleBytes) unsigned char q[TileQ::kBytes];
    alignas(kSwizzleBytes) unsigned char k[kByteStages][TileK::kBytes];
    alignas(kSwizzleBytes) unsigned char v[kByteStages][TileV::kBytes];
    alignas(16) float k_step[kByteStages][kKeys], v_step[kByteStages][2][kKeys];  // of v: logarithm, inverse
    Ring<1> q_ring;
    Ring<kByteStages> k_ring, v_ring;
    Work work[2];  // in turns
  };
  static constexpr int kSharedBytes = sizeof(Shared) + kSwizzleBytes;  // dynamic shared memory starts at any 16 bytes
  static_assert(TileK::kBytes % TileK::kSwizzlePeriod == 0 && TileV::kBytes % TileV::kSwizzlePeriod == 0);

  const ByteForwardArguments& a;
  Shared& shared;

  __device__ TileQ q() const { return {shared.q}; }
  __device__ TileK k(int stage) const { return {shared.k[stage]}; }
  __device__ TileV v(int stage) const { return {shared.v[stage]}; }

  // Tiles [first, last) of keys that any query of the block sees, and the keys that all of them see.
  struct Keys {
    int first, last;
    KeyRange all;
  };
  __device__ KeyRange keys_of(const Work& work, int query) const {
    return a.mask.keys_of(query, work.q_tokens, work.k_tokens);
  }
  __device__ Keys keys_of(const Work& work) const {
    const KeyRange top = keys_of(work, work.block);
    const KeyRange bottom = keys_of(work, min(work.block + kRows, work.q_tokens) - 1);
    if (bottom.last <= top.first) return {0, 0, {0, 0}};
    return {top.first / kKeys, (bottom.last + kKeys - 1) / kKeys, {bottom.first, top.last}};
  }

  // The row of ones, which TMA leaves alone.
  __device__ void write_ones() const {
    if constexpr (Precision::kSumRounded) {
      constexpr int kWords = kSumRows * TileV::kPanelWidth / 4, kPanels = kByteStages * TileV::kPanels;
      const uint32_t ones = ptx::pack<typename Precision::Value>(1.f, 1.f, 1.f, 1.f);
      for (int i = threadIdx.x; i < kPanels * kWords; i += kThreads) {
        auto* panel = reinterpret_cast<uint32_t*>(shared.v[0] + i / kWords * TileV::kPanelBytes +
                                                  Dims::kDimV * TileV::kPanelWidth);
        panel[i % kWords] = i % kWords < TileV::kPanelWidth / 4 ? ones : 0;
      }
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    }
  }

  // The loader: one thread.
  __device__ void load_all() {
    namespace ptx = ::cuda::ptx;
    RingPosition<1> q_at;
    RingPosition<kByteStages> k_at, v_at;
    unsigned number = blockIdx.x;
    while (true) {
      const Work work = a.schedule.at(number);
      shared.q_ring.empty[0].wait(q_at.parity ^ 1);
      shared.work[q_at.parity] = work;
      if (work.block < 0) {
        shared.q_ring.full[0].arrive();
        return;
      }
      const Keys keys = keys_of(work);
      const int kv_head = work.head / a.group;
      const int first_key = a.schedule.cu_seqlens_k ? (work.k_first / kKeys + work.sequence) * kKeys : 0;
      const int64_t steps =
          (static_cast<int64_t>(work.batch) * (a.schedule.heads / a.group) + kv_head) * a.keys + first_key;
      Barrier& q_full = shared.q_ring.full[0];
      q_full.arrive_expecting(TileQ::kLoadedBytes);
      load(q(), a.q, 0, work.q_first + work.block, work.head * a.q_broadcast[0], work.batch * a.q_broadcast[1],
           &q_full.word);
      q_at.advance();
      const auto fetch_k = [&](int tile) {
        shared.k_ring.empty[k_at.stage].wait(k_at.parity ^ 1);
        Barrier& full = shared.k_ring.full[k_at.stage];
        constexpr int kArrays = Precision::kKeySteps + 2 * kScaled;
        full.arrive_expecting(TileK::kLoadedBytes + kArrays * sizeof shared.k_step[0]);
        load(k(k_at.stage), a.k, 0, (a.k_in_tiles ? first_key : work.k_first) + tile * kKeys,
             kv_head * a.k_broadcast[0], work.batch * a.k_broadcast[1], &full.word);
        const auto fetch_steps = [&](auto& to, const float* from) {
          ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, &to, from, sizeof to, &full.word);
        };
        const int64_t at = steps + tile * kKeys;
        if constexpr (Precision::kKeySteps) fetch_steps(shared.k_step[k_at.stage], a.k_step + at);
        if constexpr (kScaled) fetch_steps(shared.v_step[k_at.stage], a.v_step + 2 * at);
        k_at.advance();
      };
      const auto fetch_v = [&](int tile) {
        shared.v_ring.empty[v_at.stage].wait(v_at.parity ^ 1);
        Barrier& full = shared.v_ring.full[v_at.stage];
        full.arrive_expecting(TileV::kLoadedBytes);
        load(v(v_at.stage), a.v, first_key + tile * kKeys, 0, kv_head, work.batch, &full.word);
        v_at.advance();
      };
      // In the order in which they are used: k of a tile comes before v of the one before.
      if (keys.first < keys.last) fetch_k(keys.last - 1);
      for (int tile = keys.last - 2; tile >= keys.first; --tile) fetch_k(tile), fetch_v(tile + 1);
      if (keys.first < keys.last) fetch_v(keys.first);
      number = gridDim.x + atomicAdd(a.schedule.counter, 1u);
    }
  }

  // o = o shrink + r.
  static __device__ void add(Accumulator<kColumns>& o, const Accumulator<kColumns>& r, const RowValues& shrink) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o.x[i] = fmaf(o.x[i], shrink[i / 2 % 2], r.x[i]);
  }
  // o += r times the step of p.
  static __device__ void add(Accumulator<kColumns>& o, const Accumulator<kColumns, int>& r, const RowValues& step) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o.x[i] = fmaf(static_cast<float>(r.x[i]), step[i / 2 % 2], o.x[i]);
  }

  // Warpgroup `warpgroup` of those that compute.
  __device__ void compute_all(int warpgroup) {
    RingPosition<1> q_at;
    RingPosition<kByteStages> k_at, v_at;
    const auto my_turn = [&] { ptx::barrier_sync(1 + warpgroup, 2 * kWarpgroup); };
    const auto pass_turn = [&] { ptx::barrier_arrive(1 + (warpgroup + 1) % Tile::kWarpgroups, 2 * kWarpgroup); };
    if (warpgroup == Tile::kWarpgroups - 1) pass_turn();
    for (;; q_at.advance()) {
      shared.q_ring.full[0].wait(q_at.parity);
      const Work& work = shared.work[q_at.parity];
      if (work.block < 0) return;
      const Keys keys = keys_of(work);
      const int query = work.block + warpgroup * kWarpgroupRows + fragment_row();
      Softmax softmax{units(work, query)};
      Accumulator<kKeys, typename Precision::Sum> s;
      Accumulator<kColumns> o;
      Operand<typename Precision::Weight, kKeys> p;
      o.zero();

      const auto multiply_k = [&] {  // issued, not awaited
        shared.k_ring.full[k_at.stage].wait(k_at.parity);
        ptx::wgmma_fence();
        mm_bytes(s, q(), warpgroup * kWarpgroupRows, k(k_at.stage));
        ptx::wgmma_commit();
      };
      const auto await_products = [&](auto& d) {
        ptx::wgmma_wait<0>();
        ptx::pin(d.x);
      };
      const auto finish_v = [&] {
        pass_turn();
        shared.v_ring.empty[v_at.stage].arrive(), v_at.advance();
      };
      if (keys.first < keys.last) {
        multiply_k();
        await_products(s);
      }
      for (int tile = keys.last - 1; tile >= keys.first; --tile) {
        Accumulator<kKeys> x;
        dequantise(s, Precision::kKeySteps ? shared.k_step[k_at.stage] : nullptr, x);
        if constexpr (kScaled) softmax.weigh(x, shared.v_step[k_at.stage][0]);
        const int key = tile * kKeys;
        if (key < keys.all.first || key + kKeys > keys.all.last) {
          const KeyRange ranges[] = {keys_of(work, query), keys_of(work, query + 8)};
          mask_rows(x, key, ranges);
        }
        RowValues steps[kParts];  // by which products with v enter o; one part: by which o is multiplied before
        if constexpr (kScaled) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const int first = part * kPart, last = first + kPart;
            const RowValues most = softmax.largest(x, first, last);
            if (__any_sync(~0u, softmax.must_rise(most))) scale_rows(o, softmax.raise(most));
            steps[part] = softmax.step(x, first, last, most, shared.v_step[k_at.stage][1]);
          }
        } else {
          steps[0] = softmax.step(x);
        }
        convert_bytes(x, 0, kKeys, p);
        shared.k_ring.empty[k_at.stage].arrive(), k_at.advance();

        my_turn();
        shared.v_ring.full[v_at.stage].wait(v_at.parity);
        Accumulator<kColumns, Product> r;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (part) add(o, r, steps[part - 1]);
          ptx::wgmma_fence();
          mm_bytes(r, p, part * kPart, (part + 1) * kPart, v(v_at.stage));
          ptx::wgmma_commit();
          await_products(r);
        }
        if (tile == keys.first) {
          finish_v();
          add(o, r, steps[kParts - 1]);
          break;
        }
        multiply_k();
        finish_v();
        add(o, r, steps[kParts - 1]);
        await_products(s);
      }
      shared.q_ring.empty[0].arrive();
      write(work, query, softmax, o);
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
    }
    return unit;
  }
  // The first query of a sequence in arrays [batch, head, token].
  __device__ int64_t row_of(const Work& work) const {
    return (static_cast<int64_t>(work.batch) * a.schedule.heads + work.head) * a.schedule.q_tokens + work.q_first;
  }

  __device__ void write(const Work& work, int query, const Softmax& softmax, const Accumulator<kColumns>& sums) const {
    RowValues inverse, lse;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      float l;
      if constexpr (Precision::kSumRounded)
        l = __shfl_sync(~0u, sums.x[2 * Dims::kDimV / 4 + 2 * row], threadIdx.x % 32 / 4 * 4);
      else
        l = quad_sum(softmax.l[row]);
      const int i = query + 8 * row;
      const KeyRange seen = keys_of(work, i);
      if (seen.first == seen.last) l = 0.f;  // whatever its step is
      constexpr float kLn2 = 0.693147180559945f;
      const float of_mean = a.mean_logit && i < work.q_tokens ? a.scale * a.mean_logit[row_of(work) + i] : 0.f;
      inverse[row] = l == 0.f ? 0.f : 1.f / l;
      lse[row] = l == 0.f ? -INFINITY : (softmax.top(row) + log2f(l) - log2f(Precision::kTop)) * kLn2 + of_mean;
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
    shared.k_ring.init(Kernel::kReaders);
    shared.v_ring.init(Kernel::kReaders);
    ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
  }
  kernel.write_ones();
  __syncthreads();
  // The compiler knows that a whole warpgroup takes one side.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::give_registers<Kernel::Tile::kLoaderRegisters>();
    if (threadIdx.x == 0) kernel.load_all();
  } else {
    ptx::take_registers<Kernel::Tile::kRegisters>();
    kernel.compute_all(warpgroup - 1);
  }
}

}  // namespace octet::cuda::sm90
