// Writes q, do, k and v of one (batch, kv head) as tiles, with lse and delta of the rows of queries.
#pragma once
#include <type_traits>

#include "cuda/bwd/exponents.h"
#include "cuda/bwd/kernels.h"
#include "cuda/fragment/accumulator.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/operands/mean_limit.h"
#include "cuda/operands/panel.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {

// Reads eight channels of one token, then of later ones. Channels and tokens beyond the tensor are zeros.
template <class In>
struct Column {
  using Word = typename Words<In>::Word;
  const In* at;
  int64_t step;
  bool there;
  __device__ Column(const Strided& x, const Index4& first)
      : at(static_cast<const In*>(x.data) + first.offset(x)),
        step(x.stride[2]),
        there(x.data && first.channel < x.shape[3]) {}
  __device__ RawVec8<In> read(bool present) const {
    RawVec8<In> raw;
    if (present && there) raw.word = *reinterpret_cast<const Word*>(at);
    return raw;
  }
  // Starts a copy to shared memory; zeros where the token or the channels do not exist.
  __device__ void copy(Word& to, bool present) const {
    const int bytes = present && there ? sizeof(Word) : 0;
    if constexpr (sizeof(Word) == 16)
      ptx::cp_async(ptx::shared_address(&to), at, bytes);
    else
      ptx::cp_async_8(ptx::shared_address(&to), at, bytes);
  }
  __device__ void advance(int tokens) { at += tokens * step; }
};
template <>
struct Column<void> {
  const Strided& x;
  Index4 index;
  __device__ Column(const Strided& x, const Index4& first) : x(x), index(first) {}
  __device__ RawVec8<void> read(bool present) const {
    RawVec8<void> raw;
    if (present && x.data && index.channel < x.shape[3]) raw.load(x, index);
    return raw;
  }
  __device__ void advance(int tokens) { index.token += tokens; }
};

// The type by which the residual of o is read, where o is read as In.
template <class In>
using Residual = std::conditional_t<std::is_void_v<In>, void, S8>;

// Adds its residual to o.
template <class In>
__device__ void add_residual(const PreprocessParams& p, const RawVec8<Residual<In>>& residual, Vec8& o) {
  if constexpr (std::is_void_v<In>) {
    const bool bytes = p.o_residual.element == Element::i8;
    const int shift = residual_shift(p.o.element);
    for (int c = 0; c < kVec8; ++c) {
      const float x = residual.numbers[c];
      o[c] = bytes ? with_residual(o[c], static_cast<int>(x), shift) : o[c] + x;
    }
  } else {
    for (int c = 0; c < kVec8; ++c) o[c] = with_residual(o[c], residual.elements[c], kResidualShift<In>);
  }
}

// Writes tiles of one (batch, kv head). A group of kVecs threads has a row, and reads all it needs before it writes.
// Rows of queries are loaded ahead while others are written, rows of keys two at a time. The first loads are issued
// before the wait for the exponents (`exponents_of`), which takes as long as these loads.
template <class T, class In, int Dim>
struct TileWriter {
  static constexpr int kQueries = BackwardTile<Dim>::kQueries, kKeys = BackwardTile<Dim>::kKeys;
  static constexpr int kVecs = Dim / kVec8, kRowsAtOnce = kPreprocessThreads / kVecs;
  static constexpr int kKeyBatch = std::is_void_v<In> ? 1 : 2;  // rows that are read before one is written
  static_assert(kRowsAtOnce % kSwizzleRows == 0 && kQueries <= kPreprocessThreads);
  // The rows of queries that are loaded ahead, in dynamic shared memory; none for tensors with any strides.
  static constexpr int kAhead = std::is_void_v<In> ? 0 : 4;
  struct Ahead {
    // Each thread has its own element.
    uint4 q[kPreprocessThreads], do_[kPreprocessThreads], o[kPreprocessThreads];
    uint2 residual[kPreprocessThreads];
  };
  static constexpr int kSharedBytes = kAhead * sizeof(Ahead);
  // The sums over the threads of each row.
  struct RowSums {
    float delta[kQueries], norm[kQueries];
    float mean_logit[kQueries];  // what the mean of k adds to the row's logits, before scaling
  };

  const PreprocessParams& p;
  int kv;
  int vec = threadIdx.x % kVecs, channel = channel_of<Dim>(vec * kVec8, p.block_channels);

  // Returns the offset of eight columns of this thread's first row in a tile of `rows` rows. Its later rows follow at a
  // distance that is a multiple of kSwizzleRows, so that each row adds kPanelRowBytes.
  __device__ int place(int rows, int of_vec) const {
    const int row = threadIdx.x / kVecs;
    return of_vec / kSwizzleRows * rows * kPanelRowBytes + row * kPanelRowBytes +
           (of_vec % kSwizzleRows ^ row % kSwizzleRows) * 16;
  }
  __device__ int place(int rows) const { return place(rows, vec); }
  // Returns the distance from this thread's columns to those that repeat its channels, or 0.
  __device__ int distance_to_repeated(int rows) const {
    const int repeated = Dim == 256 ? repeated_column(vec * kVec8, p.block_channels) : -1;
    return repeated < 0 ? 0 : place(rows, repeated / kVec8) - place(rows);
  }
  // Writes eight channels of a row, times `scale`, to their columns and to those that repeat them. Columns of 256 that
  // are no channel's own may repeat one, or are not read.
  __device__ void put(unsigned char* to, const Vec8& x, float scale, int distance) const {
    if (Dim == 256 && channel >= Dim) return;
    uint4 word;
    uint32_t* const pairs = &word.x;
    for (int i = 0; i < kVec8 / 2; ++i) pairs[i] = ptx::pack<T>(x[2 * i] * scale, x[2 * i + 1] * scale);
    *reinterpret_cast<uint4*>(to) = word;
    if (Dim == 256 && distance) *reinterpret_cast<uint4*>(to + distance) = word;
  }

  // Raises four successive numbers of Sizes, from `first` on, to the maxima of a warp.
  __device__ void keep(float& first, float a, float b, float c, float d) const {
    a = warp_max(a), b = warp_max(b), c = warp_max(c), d = warp_max(d);
    const int lane = threadIdx.x % 32;
    if (lane < 4) raise((&first)[lane], lane == 0 ? a : lane == 1 ? b : lane == 2 ? c : d);
  }

  // Reads this thread's eight channels of the mean of k.
  __device__ void read_mean(Vec8& mean) const {
    float4 words[2]{};
    if (p.smooth && channel < p.k.shape[3]) {
      const auto* from = reinterpret_cast<const float4*>(p.mean + kv * p.k.shape[3] + channel);
      words[0] = from[0], words[1] = from[1];
    }
    for (int c = 0; c < kVec8; ++c) mean[c] = (&words[c / 4].x)[c % 4];
  }

  // Writes q, do, delta and lse of a tile of queries. `exponents_of` returns the exponents of a bin. kFirstTime: all
  // queries belong to the first bin; dq is set to 0 and the sizes are raised.
  template <bool kFirstTime, class ExponentsOf>
  __device__ void queries(int head_index, int block, const ExponentsOf& exponents_of) const {
    const int heads = static_cast<int>(p.q.shape[1]), batch = head_index / heads, head = head_index % heads;
    const Blocks::Sequence sequence = p.q_blocks.sequence_of(block);
    const int64_t tile = static_cast<int64_t>(head_index) * p.q_blocks.count + block;
    const int64_t start = tile * kQueries * Dim * static_cast<int64_t>(sizeof(T));
    const auto rows_of = [&](int bin) -> QueryRows<kQueries>& {
      return rows_at<kQueries>(p.rows, bin, p.q.shape[0] * heads * p.q_blocks.count, tile);
    };
    const int first_query = (block - sequence.first_block) * kQueries;
    const Interval range = sequence.index < 0 ? Interval{0, 0} : counted(p, true, sequence.index);
    const auto is_present = [&](int row) {
      return row < kQueries && range.first <= first_query + row && first_query + row < range.last;
    };
    const int64_t first_token = static_cast<int64_t>(sequence.first) + first_query;
    const auto of_token = [&](const Strided& x, int row) {
      return static_cast<const float*>(x.data)[Index4{batch, head, first_token + row, 0}.offset(x)];
    };
    // An lse of -inf gives p = 0, to rows that see no key and to those beyond the sequence.
    const auto read_lse = [&](int row) { return is_present(row) ? of_token(p.lse, row) : -INFINITY; };
    const auto read_dlse = [&](int row, float lse) {
      return p.dlse.data && lse != -INFINITY ? of_token(p.dlse, row) : 0.f;
    };

    int row = threadIdx.x / kVecs;
    const Index4 first{batch, head, first_token + row, channel};
    Column<In> q(p.q, first), do_(p.do_, first), o(p.o, first);
    Column<Residual<In>> residual(p.o_residual, first);
    const auto advance = [&] {
      q.advance(kRowsAtOnce), do_.advance(kRowsAtOnce), o.advance(kRowsAtOnce), residual.advance(kRowsAtOnce);
    };
    extern __shared__ uint4 shared[];
    Ahead* const ahead = reinterpret_cast<Ahead*>(shared);
    int asked = row, slot = 0;  // the next row to load, and its slot
    const auto ask = [&] {
      if constexpr (kAhead > 0) {
        if (asked < kQueries) {
          const bool present = is_present(asked);
          Ahead& to = ahead[slot];
          q.copy(to.q[threadIdx.x], present), do_.copy(to.do_[threadIdx.x], present);
          o.copy(to.o[threadIdx.x], present), residual.copy(to.residual[threadIdx.x], present);
          advance();
        }
        ptx::cp_async_commit();
        asked += kRowsAtOnce, slot = (slot + 1) % kAhead;
      }
    };
    struct Row {
      RawVec8<In> q, do_, o;
      RawVec8<Residual<In>> residual;
    };
    const auto read_row = [&] {
      Row read;
      if constexpr (kAhead > 0) {
        ptx::cp_async_wait<kAhead - 1>();
        const Ahead& from = ahead[slot];
        read.q.word = from.q[threadIdx.x], read.do_.word = from.do_[threadIdx.x];
        read.o.word = from.o[threadIdx.x], read.residual.word = from.residual[threadIdx.x];
      } else {
        const bool present = is_present(row);
        read = {q.read(present), do_.read(present), o.read(present), residual.read(present)};
        advance();
      }
      return read;
    };
    for (int i = 0; i < kAhead; ++i) ask();
    if (kFirstTime && kv < p.zeroed_heads) {
      auto* const dq = static_cast<uint4*>(p.dq) + tile * (kQueries * Dim / 4) + threadIdx.x;
      for (int i = 0; i < kQueries * Dim / 4; i += kPreprocessThreads) dq[i] = {};
    }
    const float my_lse = read_lse(threadIdx.x);  // of the row whose sums this thread will write

    const Exponents& exponents = exponents_of(0);
    const int bins = kFirstTime ? 1 : exponents.bins;
    const auto of_bin = [&](int i) -> const Exponents& {
      if constexpr (kFirstTime)
        return exponents;
      else
        return exponents_of(i);
    };
    const auto bound_of = [&](float norm, float dlse) {
      const float most = isfinite(dlse) ? fabsf(dlse) : 0.f;
      return p.dlse.data ? norm + most / per_dlse(p.sampled[kv]) : norm;
    };
    const auto bin_of = [&](float bound) {
      int bin = 0;
      while (bin < bins - 1 && bound > largest_row(p, p.sampled[kv], bin)) ++bin;
      return bin;
    };
    const float q_scale = power_of_two(exponents.q), do_scale = power_of_two(exponents.do_);
    __shared__ RowSums sums;
    Vec8 mean;
    read_mean(mean);
    float most_q = 0.f, most_do = 0.f;
    unsigned char *to_q = p.q_tiles + start + place(kQueries), *to_do = p.do_tiles + start + place(kQueries);
    const int distance = distance_to_repeated(kQueries);
    for (; row < kQueries; row += kRowsAtOnce) {
      const Row raw = read_row();
      ask();
      Vec8 x, sum;
      take(raw.q, p.round_q, x);
      put(to_q, x, q_scale, distance);
      most_q = fmaxf(most_q, largest_finite(x));
      float mean_logit = 0.f;  // q k^T - q (k - mean)^T
      for (int c = 0; c < kVec8; ++c) mean_logit += x[c] * mean[c];
      take(raw.o, OCTET_F32, sum), add_residual<In>(p, raw.residual, sum);
      take(raw.do_, p.round_do, x);
      if (kFirstTime) put(to_do, x, do_scale, distance);
      Size size(x);
      float delta = 0.f;
      for (int c = 0; c < kVec8; ++c) delta += x[c] * sum[c];
      size.reduce(kVecs);
      for (int step = kVecs / 2; step; step /= 2) {
        delta += __shfl_xor_sync(~0u, delta, step);
        mean_logit += __shfl_xor_sync(~0u, mean_logit, step);
      }
      most_do = fmaxf(most_do, size.most);
      const float norm = size.norm();
      if (!kFirstTime) {
        const int bin = bin_of(bound_of(norm, read_dlse(row, read_lse(row))));
        put(to_do, x, power_of_two(of_bin(bin).do_), distance);
      }
      if (vec == 0) sums.delta[row] = delta, sums.norm[row] = norm, sums.mean_logit[row] = mean_logit;
      to_q += kRowsAtOnce * kPanelRowBytes, to_do += kRowsAtOnce * kPanelRowBytes;
    }
    __syncthreads();

    float most_row = 0.f, delta_ratio = 0.f, most_dlse = 0.f;
    row = threadIdx.x;
    if (row < kQueries) {
      const float delta = sums.delta[row], norm = sums.norm[row];
      most_row = norm;
      delta_ratio = delta_ratio_of(delta, norm);
      const bool sees = my_lse != -INFINITY;
      const float dlse = read_dlse(row, my_lse), bound = bound_of(norm, dlse);
      if (isfinite(dlse)) most_dlse = fabsf(dlse);
      // sum_j p_ij is 1 - exp(sink - lse), and sum_j p_ij dp_ij is delta.
      if (p.row_sums && kFirstTime)
        p.row_sums[tile * kQueries + row] =
            sees ? fmaf(expf(p.sinks.at(batch, head) - my_lse), delta - dlse, dlse) : 0.f;
      const float less = fmaf(p.scale * 1.44269504f, sums.mean_logit[row], static_cast<float>(exponents.p));
      const int bin = bin_of(bound);
      for (int i = 0; i < bins; ++i) {
        const Exponents& e = of_bin(i);
        auto& rows = rows_of(i);
        rows.lse[row] = sees && i == bin ? fmaf(my_lse, 1.44269504f, -less) : INFINITY;
        rows.delta[row] = sees ? (delta - dlse) * power_of_two(e.do_ + e.v + e.product) : 0.f;
        rows.dq_row_scale[row] = dq_row_scale(bound, e.do_);
      }
    }
    if (threadIdx.x < bins) {
      auto& rows = rows_of(threadIdx.x);
      rows.first = first_query, rows.tile = static_cast<int>(tile), rows.nonfinite = rows.padding = 0;
    }
    if (!kFirstTime) return __syncthreads();  // the next tile overwrites the sums
    keep(p.sizes[kv].q, most_q, most_do, most_row, delta_ratio);
    if (!p.dlse.data) return;
    most_dlse = warp_max(most_dlse);
    if (threadIdx.x % 32 == 0) raise(p.sizes[kv].dlse, most_dlse);
  }

  // Writes k, centred by its mean, and v of a tile of keys; where the backward kernel converts these itself, only reads
  // them to raise the sizes.
  template <class ExponentsOf>
  __device__ void keys(int block, bool first_time, const ExponentsOf& exponents_of) const {
    const int kv_heads = static_cast<int>(p.k.shape[1]), batch = kv / kv_heads, head = kv % kv_heads;
    const Blocks::Sequence sequence = p.k_blocks.sequence_of(block);
    const int64_t tile = static_cast<int64_t>(kv) * p.k_blocks.count + block;
    const int64_t start = tile * kKeys * Dim * static_cast<int64_t>(sizeof(T));
    const int first_key = (block - sequence.first_block) * kKeys;
    const Interval range = sequence.index < 0 ? Interval{0, 0} : counted(p, false, sequence.index);
    int row = threadIdx.x / kVecs;
    const Index4 first{batch, head, static_cast<int64_t>(sequence.first) + first_key + row, channel};
    Column<In> k(p.k, first), v(p.v, first);
    RawVec8<In> raw_k[kKeyBatch], raw_v[kKeyBatch];
    bool present[kKeyBatch];
    const auto read_rows = [&] {
#pragma unroll
      for (int j = 0; j < kKeyBatch; ++j) {
        const int i = row + j * kRowsAtOnce;
        present[j] = i < kKeys && range.first <= first_key + i && first_key + i < range.last;
        raw_k[j] = k.read(present[j]), raw_v[j] = v.read(present[j]);
        k.advance(kRowsAtOnce), v.advance(kRowsAtOnce);
      }
    };
    read_rows();
    const Exponents& exponents = exponents_of(0);
    const float k_scale = power_of_two(exponents.k), v_scale = power_of_two(exponents.v);
    Vec8 mean;
    read_mean(mean);
    unsigned char *to_k = p.k_tiles + start + place(kKeys), *to_v = p.v_tiles + start + place(kKeys);
    const int distance = distance_to_repeated(kKeys);
    float most_k = 0.f, most_smooth = 0.f, most_v = 0.f, most_row = 0.f;
    for (; row < kKeys; row += kKeyBatch * kRowsAtOnce, read_rows()) {
#pragma unroll
      for (int j = 0; j < kKeyBatch; ++j) {
        Vec8 x;
        take(raw_k[j], p.round_k, x);
        most_k = fmaxf(most_k, largest_finite(x));
        if (present[j])
          for (int c = 0; c < kVec8; ++c) x[c] -= mean[c];
        if (p.k_tiles) put(to_k, x, k_scale, distance);
        most_smooth = fmaxf(most_smooth, largest_finite(x));
        take(raw_v[j], p.round_v, x);
        if (p.k_tiles) put(to_v, x, v_scale, distance);
        Size size(x);
        size.reduce(kVecs);
        most_v = fmaxf(most_v, size.most), most_row = fmaxf(most_row, size.norm());
        to_k += kRowsAtOnce * kPanelRowBytes, to_v += kRowsAtOnce * kPanelRowBytes;
      }
    }
    if (first_time) keep(p.sizes[kv].k, most_k, most_smooth, most_v, most_row);
  }
};

}  // namespace octet::cuda
