// Writes q, do, k and v of one (batch, kv head) as tiles, with lse and delta of the rows of queries.
#pragma once
#include <type_traits>

#include "cuda/bwd/columns.h"
#include "cuda/bwd/exponents.h"
#include "cuda/bwd/kernels.h"
#include "cuda/fragment/accumulator.h"
#include "cuda/operands/mean_limit.h"
#include "cuda/operands/panel.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {

// Writes tiles of one (batch, kv head). A group of kVecs threads has a row, and reads all it needs before it writes.
// Rows of queries are loaded ahead while others are written, rows of keys two at a time. The first loads are issued
// before the wait for the exponents (`exponents_of`), which takes as long as these loads.
template <class T, class In, int Dim>
struct TileWriter {
  static constexpr int kQueries = BackwardTile<Dim>::kQueries, kKeys = BackwardTile<Dim>::kKeys;
  static constexpr int kVecs = Dim / kVec8, kThreads = kTileThreads<Dim>, kRowsAtOnce = kThreads / kVecs;
  static constexpr int kKeyBatch = std::is_void_v<In> ? 1 : 2;  // rows that are read before one is written
  static constexpr bool kMayBeInt8 = Dim < 256 && std::is_same_v<T, F16>;
  static_assert(kRowsAtOnce % kSwizzleRows == 0 && kQueries <= kThreads);
  // The rows of queries that are loaded ahead, in dynamic shared memory; none for tensors with any strides.
  static constexpr int kAhead = std::is_void_v<In> ? 0 : 4 * kPreprocessThreads / kThreads;
  struct Ahead {
    // Each thread has its own element.
    uint4 q[kThreads], do_[kThreads], o[kThreads];
    uint2 residual[kThreads];
  };
  static constexpr int kSharedBytes = kAhead * sizeof(Ahead);
  // The sums over the threads of each row.
  struct RowSums {
    float delta[kQueries], norm[kQueries];
    // The product of the row and the mean of k, before scaling; at int8 that of do and the mean of v, which is part of
    // delta.
    float mean[kQueries];
  };

  const PreprocessParams& p;
  int kv;
  int vec = threadIdx.x % kVecs, channel = channel_of<Dim>(vec * kVec8, p.block_channels),
      channel_v = channel_of<Dim>(vec * kVec8, p.block_channels_v);  // of v, do and o

  // Returns the offset of eight columns of this thread's first row in a tile of `rows` rows. Its later rows follow at a
  // distance that is a multiple of kSwizzleRows, so that each row adds kPanelRowBytes.
  __device__ int place(int rows, int of_vec) const {
    const int row = threadIdx.x / kVecs;
    return of_vec / kSwizzleRows * rows * kPanelRowBytes + row * kPanelRowBytes +
           (of_vec % kSwizzleRows ^ row % kSwizzleRows) * 16;
  }
  __device__ int place(int rows) const { return place(rows, vec); }
  // Returns the distance from this thread's columns to those that repeat its channels, or 0.
  __device__ int repeats(int rows, int block_channels) const {
    const int repeated = Dim == 256 ? repeated_column(vec * kVec8, block_channels) : -1;
    return repeated < 0 ? 0 : place(rows, repeated / kVec8) - place(rows);
  }
  // Writes eight channels of a row, times `scale`, to their columns and to those that repeat them. Columns of 256 that
  // are no channel's own may repeat one, or are not read.
  __device__ void put(unsigned char* to, int channel, const Vec8& x, float scale, int distance) const {
    if (Dim == 256 && channel >= Dim) return;
    uint4 word;
    uint32_t* const pairs = &word.x;
    for (int i = 0; i < kVec8 / 2; ++i) pairs[i] = ptx::pack<T>(x[2 * i] * scale, x[2 * i + 1] * scale);
    *reinterpret_cast<uint4*>(to) = word;
    if (Dim == 256 && distance) *reinterpret_cast<uint4*>(to + distance) = word;
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

  // A tile of queries of one head.
  struct QueryTile {
    const PreprocessParams& p;
    int heads, batch, head;
    Blocks::Sequence sequence;
    int64_t tile;         // among those of all heads
    int first_query;      // within the sequence
    Interval range;       // the queries of the sequence that count
    int64_t first_token;  // of the tensor

    __device__ QueryTile(const PreprocessParams& p, int head_index, int block)
        : p(p),
          heads(static_cast<int>(p.q.shape[1])),
          batch(head_index / heads),
          head(head_index % heads),
          sequence(p.q_blocks.sequence_of(block)),
          tile(static_cast<int64_t>(head_index) * p.q_blocks.count + block),
          first_query((block - sequence.first_block) * kQueries),
          range(sequence.index < 0 ? Interval{0, 0} : counted(p, true, sequence.index)),
          first_token(static_cast<int64_t>(sequence.first) + first_query) {}
    __device__ bool is_present(int row) const {
      return row < kQueries && range.first <= first_query + row && first_query + row < range.last;
    }
    // Tells whether rows of q and do are read. Where they are not, lse still is: a row that sees no key has that of its
    // sink.
    __device__ bool has_numbers(int i) const {
      return is_present(i) && sees(p.seen_queries, batch, head, first_token + i);
    }
    __device__ float row_bias(int i) const {
      return is_present(i) ? p.mask_rows.bias(batch, head, first_token + i) : 0.f;
    }
    __device__ float number(const Strided& x, int row) const {
      return static_cast<const float*>(x.data)[Index4{batch, head, first_token + row, 0}.offset(x)];
    }
    // An lse of -inf gives p = 0, to rows that see no key and to those beyond the sequence.
    __device__ float lse(int row) const { return is_present(row) ? number(p.lse, row) : -INFINITY; }
    __device__ float dlse(int row, float lse) const {
      return p.dlse.data && lse != -INFINITY ? number(p.dlse, row) : 0.f;
    }
    // The index of a row among all queries, and its scales of q and do, at int8.
    __device__ int64_t token(int row) const {
      return (int64_t{batch} * heads + head) * p.q.shape[2] + first_token + row;
    }
    __device__ bool is_finite(int row) const {
      return !kMayBeInt8 || !p.int8.do_ || !is_present(row) ||
             !isnan(p.int8.q_scale[token(row)] + p.int8.do_scale[token(row)]);
    }
    __device__ QueryRows<kQueries>& rows(int bin) const {
      return rows_at<kQueries>(p.rows, bin, p.q.shape[0] * heads * p.q_blocks.count, tile);
    }
  };

  // Loads this thread's rows of q, do, o and its residual, kAhead of them before they are read.
  struct QueryLoader {
    struct Row {
      RawVec8<In> q, do_, o;
      RawVec8<Residual<In>> residual;
    };
    const QueryTile& tile;
    Ahead* ahead;
    Column<In> q, do_, o;
    Column<Residual<In>> residual;
    int asked, slot = 0;  // the next row to load, and its slot

    __device__ QueryLoader(const PreprocessParams& p, const QueryTile& tile, Index4 first, int of_v, int row, Ahead* to)
        : tile(tile),
          ahead(to),
          q(p.q, first),
          do_(p.do_, {first.batch, first.head, first.token, of_v}),
          o(p.o, {first.batch, first.head, first.token, of_v}),
          residual(p.o_residual, {first.batch, first.head, first.token, of_v}),
          asked(row) {}
    __device__ void advance() {
      q.advance(kRowsAtOnce), do_.advance(kRowsAtOnce), o.advance(kRowsAtOnce), residual.advance(kRowsAtOnce);
    }
    __device__ void ask() {
      if constexpr (kAhead > 0) {
        if (asked < kQueries) {
          const bool present = tile.has_numbers(asked);
          Ahead& to = ahead[slot];
          q.copy(to.q[threadIdx.x], present), do_.copy(to.do_[threadIdx.x], present);
          o.copy(to.o[threadIdx.x], present), residual.copy(to.residual[threadIdx.x], present);
          advance();
        }
        ptx::cp_async_commit();
        asked += kRowsAtOnce, slot = (slot + 1) % kAhead;
      }
    }
    __device__ Row read(int row) {
      Row read;
      if constexpr (kAhead > 0) {
        ptx::cp_async_wait<kAhead - 1>();
        const Ahead& from = ahead[slot];
        read.q.word = from.q[threadIdx.x], read.do_.word = from.do_[threadIdx.x];
        read.o.word = from.o[threadIdx.x], read.residual.word = from.residual[threadIdx.x];
      } else {
        const bool present = tile.has_numbers(row);
        read = {q.read(present), do_.read(present), o.read(present), residual.read(present)};
        advance();
      }
      return read;
    }
  };

  // Writes q, do, delta and lse of a tile of queries. `exponents_of` returns the exponents of a bin. kFirstTime: all
  // queries belong to the first bin; dq is set to 0 and the sizes are raised.
  template <bool kFirstTime, class ExponentsOf>
  __device__ void queries(int head_index, int block, const ExponentsOf& exponents_of) const {
    const QueryTile at(p, head_index, block);
    const int64_t start = at.tile * kQueries * Dim * static_cast<int64_t>(sizeof(T));
    int row = threadIdx.x / kVecs;
    extern __shared__ uint4 shared[];
    QueryLoader loader(p, at, {at.batch, at.head, at.first_token + row, channel}, channel_v, row,
                       reinterpret_cast<Ahead*>(shared));
    for (int i = 0; i < kAhead; ++i) loader.ask();
    if (kFirstTime && kv < p.zeroed_heads) {
      auto* const dq = static_cast<uint4*>(p.dq) + at.tile * (kQueries * Dim / 4) + threadIdx.x;
      for (int i = 0; i < kQueries * Dim / 4; i += kThreads) dq[i] = {};
    }
    const float lse = at.lse(threadIdx.x);  // of the row whose sums this thread will write

    const Exponents& exponents = exponents_of(0);
    const int bins = kFirstTime ? 1 : exponents.bins;
    const auto of_bin = [&](int i) -> const Exponents& {
      if constexpr (kFirstTime)
        return exponents;
      else
        return exponents_of(i);
    };
    const float q_scale = power_of_two(exponents.q), do_scale = power_of_two(exponents.do_);
    __shared__ RowSums sums;
    Vec8 mean;
    read_mean(mean);
    float most_q = 0.f, most_do = 0.f;
    unsigned char *to_q = p.q_tiles + start + place(kQueries), *to_do = p.do_tiles + start + place(kQueries);
    const int distance = repeats(kQueries, p.block_channels), distance_v = repeats(kQueries, p.block_channels_v);
    for (; row < kQueries; row += kRowsAtOnce) {
      const typename QueryLoader::Row raw = loader.read(row);
      loader.ask();
      Vec8 x, sum;
      const bool finite = at.is_finite(row);
      take(raw.q, p.round_q, x);
      if (!finite) clear(x);
      put(to_q, channel, x, q_scale, distance);
      most_q = fmaxf(most_q, largest_finite(x));
      float of_mean = 0.f;  // q k^T - q (k - mean)^T
      for (int c = 0; c < kVec8; ++c) of_mean += x[c] * mean[c];
      take(raw.o, OCTET_F32, sum), add_residual<In>(p, raw.residual, sum);
      take(raw.do_, p.round_do, x);
      if (!finite) clear(x);
      if (kFirstTime) put(to_do, channel_v, x, do_scale, distance_v);
      Size size(x);
      float delta = 0.f;
      if (kMayBeInt8 && p.int8.do_)
        delta = int8_delta(at, row, sum, of_mean);
      else
        for (int c = 0; c < kVec8; ++c) delta += x[c] * sum[c];
      size.reduce(kLanesOfRow<kVecs>);
      for (int step = kLanesOfRow<kVecs> / 2; step; step /= 2)
        delta += __shfl_xor_sync(~0u, delta, step), of_mean += __shfl_xor_sync(~0u, of_mean, step);
      if constexpr (kVecs > 32) join_warps<kThreads, TileWriter>(size, delta, of_mean);
      most_do = fmaxf(most_do, size.most);
      const float norm = size.norm();
      if (!kFirstTime) {
        const int bin = bin_of(bound_of(norm, at.dlse(row, at.lse(row))), bins);
        put(to_do, channel_v, x, power_of_two(of_bin(bin).do_), distance_v);
      }
      if (vec == 0) sums.delta[row] = delta, sums.norm[row] = norm, sums.mean[row] = of_mean;
      to_q += kRowsAtOnce * kPanelRowBytes, to_do += kRowsAtOnce * kPanelRowBytes;
    }
    __syncthreads();
    const RowSizes sizes = write_rows<kFirstTime>(at, sums, lse, exponents, bins, of_bin);
    if (!kFirstTime) return __syncthreads();  // the next tile overwrites the sums
    keep(p.sizes[kv].q, most_q, most_do, sizes.norm, sizes.delta_ratio);
    if (!p.dlse.data) return;
    const float most_dlse = warp_max(sizes.dlse);
    if (threadIdx.x % 32 == 0) raise(p.sizes[kv].dlse, most_dlse);
  }

  // Returns this thread's part of the delta of int8: of do as it is in int8, and of o minus the mean of v. Sets
  // `of_mean` to what that mean adds.
  __device__ float int8_delta(const QueryTile& at, int row, const Vec8& o, float& of_mean) const {
    of_mean = 0.f;
    if (!at.is_present(row) || channel >= p.int8.dim) return 0.f;
    const int64_t token = at.token(row);
    const uint2 word = *reinterpret_cast<const uint2*>(p.int8.do_ + token * p.int8.dim + channel);
    const auto* const values = reinterpret_cast<const S8*>(&word);
    const int kv_heads = static_cast<int>(p.k.shape[1]),
              sequence = p.q_blocks.cu_seqlens ? at.sequence.index : at.batch;
    const float* const mean = p.int8.v_mean + (int64_t{sequence} * kv_heads + kv % kv_heads) * p.int8.dim + channel;
    float sum = 0.f;
    for (int c = 0; c < kVec8; ++c)
      sum = fmaf(values[c], o[c] - mean[c], sum), of_mean = fmaf(values[c], mean[c], of_mean);
    const float scale = p.int8.do_scale[token];
    of_mean *= scale;
    return sum * scale;
  }

  // Returns |do| + |dlse| / per_dlse of a row, or a bound of it.
  __device__ float bound_of(float norm, float dlse) const {
    const float most = isfinite(dlse) ? fabsf(dlse) : 0.f;
    return p.dlse.data ? norm + most / per_dlse(p.sampled[kv]) : norm;
  }
  __device__ int bin_of(float bound, int bins) const {
    int bin = 0;
    while (bin < bins - 1 && bound > largest_row(p, p.sampled[kv], bin)) ++bin;
    return bin;
  }

  struct RowSizes {
    float norm = 0.f, delta_ratio = 0.f, dlse = 0.f;
  };
  // Writes the QueryRows of a tile of queries, a thread for each row, from the sums over its channels.
  template <bool kFirstTime, class OfBin>
  __device__ RowSizes write_rows(const QueryTile& at, const RowSums& sums, float lse, const Exponents& exponents,
                                 int bins, const OfBin& of_bin) const {
    RowSizes sizes;
    const int row = threadIdx.x;
    if (row < kQueries) {
      const bool int8 = kMayBeInt8 && p.int8.do_, finite = !int8 || (at.is_finite(row) && isfinite(sums.delta[row]));
      const float delta = finite ? sums.delta[row] : 0.f, norm = sums.norm[row];
      const float mean_logit = int8 ? 0.f : sums.mean[row], mean_delta = int8 ? sums.mean[row] : 0.f;
      sizes.norm = norm;
      sizes.delta_ratio = delta_ratio_of(delta, norm);
      const bool sees = lse != -INFINITY;
      if (sees && !finite) lse = NAN;
      if (int8 && kFirstTime) {
        float* const scales = p.int8.scales + 2 * at.tile * kQueries + row;
        const bool present = at.is_present(row) && finite;
        scales[0] = present ? p.int8.q_scale[at.token(row)] : 0.f;
        scales[kQueries] = present ? p.int8.do_scale[at.token(row)] : 0.f;
        if (p.int8.mean_delta) p.int8.mean_delta[at.tile * kQueries + row] = finite ? mean_delta : NAN;
      }
      const float dlse = at.dlse(row, lse), bound = bound_of(norm, dlse);
      if (isfinite(dlse)) sizes.dlse = fabsf(dlse);
      // sum_j p_ij is 1 - exp(sink - lse), and sum_j p_ij dp_ij is delta.
      if (p.row_sums && kFirstTime)
        p.row_sums[at.tile * kQueries + row] =
            sees ? fmaf(expf(p.sinks.at(at.batch, at.head) - lse), delta + mean_delta - dlse, dlse) : 0.f;
      const float left_out = fmaf(p.scale * 1.44269504f, mean_logit, static_cast<float>(exponents.p));
      const int bin = bin_of(bound, bins);
      for (int i = 0; i < bins; ++i) {
        const Exponents& e = of_bin(i);
        auto& rows = at.rows(i);
        rows.lse[row] = sees && i == bin ? fmaf(lse, 1.44269504f, -left_out) : INFINITY;
        rows.delta[row] = sees ? (delta - dlse) * power_of_two(e.do_ + e.v + e.product) : 0.f;
        rows.dq_row_scale[row] = p.mask_rows.mask.data ? at.row_bias(row) : dq_row_scale(bound, e.do_);
      }
    }
    if (threadIdx.x < bins) {
      auto& rows = at.rows(threadIdx.x);
      rows.first = at.first_query, rows.tile = static_cast<int>(at.tile), rows.nonfinite = rows.padding = 0;
    }
    return sizes;
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
    Column<In> k(p.k, first), v(p.v, {first.batch, first.head, first.token, channel_v});
    RawVec8<In> raw_k[kKeyBatch], raw_v[kKeyBatch];
    bool present[kKeyBatch];
    const auto read_rows = [&] {
#pragma unroll
      for (int j = 0; j < kKeyBatch; ++j) {
        const int i = row + j * kRowsAtOnce;
        present[j] = i < kKeys && range.first <= first_key + i && first_key + i < range.last &&
                     sees(p.seen_keys, batch, head, sequence.first + first_key + i);
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
    const int distance = repeats(kKeys, p.block_channels), distance_v = repeats(kKeys, p.block_channels_v);
    const int64_t int8_key = int64_t{kv} * p.int8.keys +
                             (p.k_blocks.cu_seqlens ? (sequence.first / 64 + sequence.index) * 64 : 0) + first_key;
    float most_k = 0.f, most_smooth = 0.f, most_v = 0.f, most_row = 0.f;
    for (; row < kKeys; row += kKeyBatch * kRowsAtOnce, read_rows()) {
#pragma unroll
      for (int j = 0; j < kKeyBatch; ++j) {
        Vec8 x;
        take(raw_k[j], p.round_k, x);
        // At int8 a key that is not finite becomes zeros.
        if (kMayBeInt8 && p.int8.do_ && present[j] && isnan(p.int8.k_scale[int8_key + row + j * kRowsAtOnce]))
          clear(x), present[j] = false;
        most_k = fmaxf(most_k, largest_finite(x));
        if (present[j])
          for (int c = 0; c < kVec8; ++c) x[c] -= mean[c];
        if (p.k_tiles) put(to_k, channel, x, k_scale, distance);
        most_smooth = fmaxf(most_smooth, largest_finite(x));
        take(raw_v[j], p.round_v, x);
        if (p.v_tiles) put(to_v, channel_v, x, v_scale, distance_v);
        Size size(x);
        size.reduce(kLanesOfRow<kVecs>);
        if constexpr (kVecs > 32) join_warps<kThreads, TileWriter>(size);
        most_v = fmaxf(most_v, size.most), most_row = fmaxf(most_row, size.norm());
        to_k += kRowsAtOnce * kPanelRowBytes, to_v += kRowsAtOnce * kPanelRowBytes;
      }
    }
    if (first_time) keep(p.sizes[kv].k, most_k, most_smooth, most_v, most_row);
  }
};

}  // namespace octet::cuda
