// The first pass over k and v: means and largest magnitudes of channels over the tokens of a sequence that are seen.
// Numbers that are not finite count as 0, and in means so do those far beyond typical ones (mean_limit.h).
#pragma once
#include "cuda/operands/quantize/params.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {

template <int Dim>
struct StatsShared {
  double found[kQuantizeThreads * kVec8];
  bool last;
};

template <class VecLoader, int Dim>
struct StatsOfChannels {
  static constexpr int kLanes = Dim / kVec8, kRows = kQuantizeThreads / kLanes;
  static constexpr int kBatch = VecLoader::kWhole ? 8 : 1;  // loads in flight

  const QuantizeKernelParams& p;
  StatsShared<Dim>& shared;

  static __device__ int lane() { return threadIdx.x % kLanes; }

  // Calls f with this thread's raw vectors of a chunk, while the next ones are in flight.
  template <class F>
  __device__ void for_each_raw(const Strided& t, int batch_head, const TileOfKeys& chunk, const F& f) const {
    const Head rows = head_of(t, batch_head / p.args.kv_heads, batch_head % p.args.kv_heads);
    const int channel = lane() * kVec8;
    if (channel >= rows.dim) return;
    constexpr int kStep = kBatch * kRows;
    int i = threadIdx.x / kLanes;
    if (chunk.tokens() >= kStep) {
      typename VecLoader::Raw raw[kBatch];
      const typename VecLoader::Column first(rows, chunk.first + i, channel, kRows);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) raw[j] = first[j];
#pragma unroll 1
      for (i += kStep; i - threadIdx.x / kLanes + kStep <= chunk.tokens(); i += kStep) {
        const typename VecLoader::Column next(rows, chunk.first + i, channel, kRows);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const typename VecLoader::Raw now = raw[j];
          raw[j] = next[j];
          f(now);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) f(raw[j]);
    }
#pragma unroll 1
    for (; i < chunk.tokens(); i += kRows) f(VecLoader::load(rows, chunk.first + i, channel));
  }
  // Calls f with the numbers of one vector after the other.
  template <class F>
  __device__ void for_each_once(const Strided& t, int batch_head, const TileOfKeys& chunk, const F& f) const {
    const Head rows = head_of(t, batch_head / p.args.kv_heads, batch_head % p.args.kv_heads);
    const int channel = lane() * kVec8;
    if (channel >= rows.dim) return;
#pragma unroll 1
    for (int i = threadIdx.x / kLanes; i < chunk.tokens(); i += kRows) {
      Vec8 x;
      VecLoader::convert(VecLoader::load(rows, chunk.first + i, channel), x);
      f(x);
    }
  }
  // Calls f with the numbers of this thread's vectors.
  template <class F>
  __device__ void for_each(const Strided& t, int batch_head, const TileOfKeys& chunk, const F& f) const {
    for_each_raw(t, batch_head, chunk, [&](const typename VecLoader::Raw& raw) {
      Vec8 x;
      VecLoader::convert(raw, x);
      f(x);
    });
  }

  // Combines all threads' numbers of each channel by f and writes the results.
  template <class T, class F>
  __device__ void combine(const T (&found)[kVec8], const F& f, T* to) const {
    auto* const rows = reinterpret_cast<T*>(shared.found);
    for (int i = 0; i < kVec8; ++i) rows[threadIdx.x / kLanes * Dim + lane() * kVec8 + i] = found[i];
    __syncthreads();
    for (int c = threadIdx.x; c < Dim; c += kQuantizeThreads) {
      T all = rows[c];
      for (int r = 1; r < kRows; ++r) all = f(all, rows[r * Dim + c]);
      to[c] = all;
    }
  }

  // Writes the sums of channels. Numbers from `limit` on count as 0, and so do NaNs.
  __device__ void sum(const Strided& t, float limit, int batch_head, const TileOfKeys& chunk, double* to) const {
    double sums[kVec8] = {};
    for_each_raw(t, batch_head, chunk, [&](typename VecLoader::Raw raw) {
      if constexpr (VecLoader::kPairs) VecLoader::cut(raw, limit);
      Vec8 x;
      VecLoader::convert(raw, x);
      for (int i = 0; i < kVec8; ++i) sums[i] += VecLoader::kPairs || fabsf(x[i]) < limit ? x[i] : 0.f;
    });
    combine(
        sums, [](double x, double y) { return x + y; }, to);
  }

  __device__ void largest(const Strided& t, float scale, int batch_head, const TileOfKeys& chunk, float* to) const {
    float most[kVec8] = {};
    if constexpr (VecLoader::kPairs) {
      typename VecLoader::Raw largest{};
      for_each_raw(t, batch_head, chunk, [&](const typename VecLoader::Raw& raw) { VecLoader::raise(largest, raw); });
      VecLoader::convert(largest, most);
    } else {
      for_each(t, batch_head, chunk, [&](const Vec8& x) {
        for (int i = 0; i < kVec8; ++i) most[i] = fmaxf(most[i], fabsf(x[i]));
      });
    }
    bool finite = true;
    for (float& m : most) m = fabsf(m * scale), finite &= isfinite(m);
    if (!finite) {
      *p.scratch.infinite = 1;
      for (float& m : most) m = 0.f;
      for_each_once(t, batch_head, chunk, [&](const Vec8& x) {
        for (int i = 0; i < kVec8; ++i) {
          const float m = fabsf(x[i] * scale);
          most[i] = fmaxf(most[i], isfinite(m) ? m : 0.f);
        }
      });
    }
    combine(
        most, [](float x, float y) { return fmaxf(x, y); }, to);
  }

  // Combines each channel over all chunks by f; then calls write(channel, result).
  template <class T, class F, class Write>
  __device__ void over_chunks(const T* x, int chunks, const F& f, const Write& write) const {
    auto* const found = reinterpret_cast<T*>(shared.found);
    constexpr int kChannels = Dim < kQuantizeThreads ? Dim : kQuantizeThreads, kSlices = kQuantizeThreads / kChannels;
    for (int first = 0; first < Dim; first += kChannels) {
      const int channel = first + threadIdx.x % kChannels;
      T all{};
#pragma unroll 16
      for (int i = threadIdx.x / kChannels; i < chunks; i += kSlices)
        all = f(all, __ldcg(x + static_cast<int64_t>(i) * Dim + channel));
      if constexpr (kSlices > 1) {
        found[threadIdx.x] = all;
        __syncthreads();
        if (threadIdx.x < kChannels)
          for (int slice = 1; slice < kSlices; ++slice) all = f(all, found[slice * kChannels + threadIdx.x]);
      }
      if (threadIdx.x < kChannels) write(channel, all);
    }
  }

  // Computes the statistics of one chunk of k or v of a (batch, head). The last thread block to arrive at a sequence
  // combines its chunks.
  __device__ void compute(StatsOf stats, int batch_head, int number) const {
    const QuantizeParams& a = p.args;
    TileOfKeys chunk = tile_of_keys(p.chunks, number);
    chunk.first += chunk.first_seen(), chunk.range = chunk.tokens() - chunk.first_seen();
    const int64_t at = (static_cast<int64_t>(batch_head) * p.chunks.count() + number) * Dim;
    const Strided& t = stats == StatsOf::k ? a.k : a.v;
    const int which = static_cast<int>(stats), sequence_head = p.sequence_head(batch_head, chunk.sequence);
    const bool of_sums = stats == StatsOf::k || a.channels.v_mean;
    of_sums ? sum(t, __ldcg(p.scratch.limit[which] + sequence_head), batch_head, chunk, p.scratch.sum[which] + at)
            : largest(t, a.v_input_scale.at(batch_head / a.kv_heads, batch_head % a.kv_heads), batch_head, chunk,
                      p.scratch.most + at);

    const int first = p.chunks.cu_seqlens ? first_tile(p.chunks, chunk.sequence) : 0;
    const int tokens = tokens_of(p.chunks, chunk.sequence),
              chunks = max((tokens + p.chunks.tile - 1) / p.chunks.tile, 1);
    if (number - first >= chunks) return;  // the chunk lies between two sequences
    __syncthreads();
    if (threadIdx.x == 0)
      shared.last = ptx::count(p.scratch.arrived[which * p.sequence_heads + sequence_head]) + 1 == chunks;
    __syncthreads();
    if (!shared.last) return;
    const int64_t from = at - static_cast<int64_t>(number - first) * Dim;
    const int64_t to = static_cast<int64_t>(sequence_head) * Dim;
    if (of_sums) {
      const Interval range = seen_of(p.chunks, chunk.sequence);
      const int seen =
          a.seen.counts ? a.seen.count_of(batch_head / a.kv_heads, batch_head % a.kv_heads) : range.last - range.first;
      float* const mean = stats == StatsOf::k ? a.channels.k_mean : a.channels.v_mean;
      over_chunks(
          p.scratch.sum[which] + from, chunks, [](double x, double y) { return x + y; },
          [&](int channel, double all) { mean[to + channel] = seen ? static_cast<float>(all / seen) : 0.f; });
    } else {
      over_chunks(
          p.scratch.most + from, chunks, [](float x, float y) { return fmaxf(x, y); },
          [&](int channel, float all) {
            const Scale scale = scale_of(all, 448.f);
            a.channels.v_scale[to + channel] = scale.scale, a.channels.v_inverse[to + channel] = scale.inverse;
          });
    }
    __syncthreads();
    if (threadIdx.x == 0) ptx::set(p.scratch.ready[which * p.sequence_heads + sequence_head]);
  }
};

}  // namespace octet::cuda
