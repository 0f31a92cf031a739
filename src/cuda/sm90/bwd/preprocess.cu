// Operands into tiles, with delta and zeros for dq, and the exponents of two that they are multiplied by.
#include <algorithm>
#include <type_traits>

#include "cuda/host/launch.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/grid.h"
#include "cuda/preprocess/vec8.h"
#include "cuda/preprocess/mean_limit.h"
#include "cuda/sm90/bwd/exponents.h"
#include "cuda/sm90/bwd/preprocess.h"
#include "cuda/sm90/mma.h"

namespace octet::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kSampled = 128;  // tokens of a (batch, kv head)
enum class Tensor { q, k, v, do_, count };

// Eight channels of a token as they lie in memory. `In`: the type of all inputs, whose rows are whole 16-byte words, or
// void for any type and strides.
template <class In>
struct Raw {
  union {
    uint4 word;
    In elements[kVec8];
  };
  __device__ Raw() : word{} {}
  __device__ void read(const Strided& x, const Index4& at) {
    word = *reinterpret_cast<const uint4*>(static_cast<const In*>(x.data) + at.offset(x));
  }
  __device__ void get(Vec8& v, octet_dtype) const {
    for (int i = 0; i < kVec8; ++i) v[i] = float(elements[i]);
  }
};
template <>
struct Raw<void> {
  Vec8 numbers{};
  __device__ void read(const Strided& x, const Index4& at) { octet::cuda::read(x, at, numbers); }
  // Rounded to `type` first.
  __device__ void get(Vec8& v, octet_dtype type) const {
    for (int i = 0; i < kVec8; ++i)
      v[i] = type == OCTET_BF16 ? float(Bf16(numbers[i])) : type == OCTET_F16 ? float(F16(numbers[i])) : numbers[i];
  }
};

// Eight channels of one token, then of later ones. Those that the tensor does not have are zeros.
template <class In>
struct Column {
  const In* at;
  int64_t step;
  bool there;
  __device__ Column(const Strided& x, const Index4& first)
      : at(static_cast<const In*>(x.data) + first.offset(x)),
        step(x.stride[2]),
        there(x.data && first.channel < x.shape[3]) {}
  __device__ Raw<In> read(bool present) const {
    Raw<In> raw;
    if (present && there) raw.word = *reinterpret_cast<const uint4*>(at);
    return raw;
  }
  // Into shared memory, sooner or later; zeros where there is nothing.
  __device__ void copy(uint4& to, bool present) const {
    ptx::cp_async(ptx::shared_address(&to), at, present && there ? 16 : 0);
  }
  __device__ void advance(int tokens) { at += tokens * step; }
};
template <>
struct Column<void> {
  const Strided& x;
  Index4 line;
  __device__ Column(const Strided& x, const Index4& first) : x(x), line(first) {}
  __device__ Raw<void> read(bool present) const {
    Raw<void> raw;
    if (present && x.data && line.channel < x.shape[3]) raw.read(x, line);
    return raw;
  }
  __device__ void advance(int tokens) { line.token += tokens; }
};

// A mean of numbers of at most `largest` that can be subtracted from all of them in f16: rounded so that both, and so
// the difference, are multiples of 2^-10 times the power of two above twice `largest`. Only numbers of bf16 with less
// than a sixteenth of the mean have digits below, and are then rounded as any are. Numbers of f16 have three bits more:
// unless all lie near their mean, within a factor of two, the difference would lose some, and logits with it; then the
// mean counts as 0.
__device__ inline float on_grid_of(float largest, float mean, bool of_f16) {
  if (!(largest > 0.f) || (of_f16 && 4.f * fabsf(mean) < 3.f * largest)) return 0.f;
  const int exponent = exponent_above(largest) - 9;
  return ldexpf(rintf(ldexpf(mean, -exponent)), exponent);
}

// The tokens of a sequence that count: keys that some query sees, queries that see some key. Others may hold anything.
__device__ inline KeyRange counted(const PreprocessParams& p, bool queries, int sequence) {
  const int n = p.q_blocks.tokens_of(sequence), m = p.k_blocks.tokens_of(sequence);
  return queries ? p.mask.seeing(n, m) : p.mask.seen(n, m);
}
// Whether a token of packed sequences counts.
__device__ inline bool counts(const PreprocessParams& p, bool queries, int token) {
  const Blocks& blocks = queries ? p.q_blocks : p.k_blocks;
  const int sequence = blocks.sequence_at(token), i = token - blocks.cu_seqlens[sequence];
  const KeyRange range = counted(p, queries, sequence);
  return range.first <= i && i < range.last;
}

// One block for each (batch, kv head) and tensor: samples tokens evenly. A sample is read again where it is needed
// twice, so that registers are left for blocks beside each other.
template <class In>
__global__ void __launch_bounds__(kThreads, 4) stats_kernel(const __grid_constant__ PreprocessParams p) {
  constexpr int kAtOnce = std::is_void_v<In> ? 1 : 4;  // samples that a thread reads before it looks at them
  constexpr int kWarps = kThreads / 32;
  const int kv = blockIdx.x, kv_heads = static_cast<int>(p.k.shape[1]), batch = kv / kv_heads, kv_head = kv % kv_heads;
  const int lines = p.tile_dim / kVec8, line = threadIdx.x % lines, rows = kThreads / lines;
  const Tensor which = static_cast<Tensor>(blockIdx.y);
  const Strided& x = which == Tensor::q ? p.q : which == Tensor::k ? p.k : which == Tensor::v ? p.v : p.do_;
  const int group = which == Tensor::q || which == Tensor::do_ ? p.group : 1;
  const bool of_queries = which == Tensor::q || which == Tensor::do_, packed = p.k_blocks.cu_seqlens;
  const KeyRange range = packed ? KeyRange{0, static_cast<int>(x.shape[2])} : counted(p, of_queries, 0);
  const int tokens = range.last - range.first;
  const bool whole = static_cast<int64_t>(group) * tokens <= kSampled;
  const int sampled = whole ? group * tokens : kSampled;
  __shared__ float sums[kWarps][256], largest[kWarps][256];
  __shared__ float most_shared, row_shared, of_sample[kSampled], norms[kSampled], limit_shared;
  __shared__ int counted_shared;  // samples
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) most_shared = row_shared = 0.f, counted_shared = 0;
  if (threadIdx.x == 0 && which == Tensor::q) p.sizes[kv] = {}, p.zeroed[kv] = 0;
  if (threadIdx.x == 0 && which == Tensor::q && kv == 0) *p.counter = 0;
  // Sample i: every token there is, or as many of each head of the group as there are samples for.
  const auto line_of = [&](int i) -> Index4 {
    if (whole) return Index4{batch, kv_head * group + i / tokens, range.first + i % tokens, line * kVec8};
    const int of_group = i * group;
    const int token = static_cast<int>(static_cast<int64_t>(of_group % kSampled) * tokens / kSampled);
    return Index4{batch, kv_head * group + of_group / kSampled, range.first + token, line * kVec8};
  };
  // Those of packed sequences that do not count are left out.
  const auto is_sampled = [&](int i) {
    return i < sampled && (!packed || counts(p, of_queries, static_cast<int>(line_of(i).token)));
  };
  // Calls f(i, numbers) for each sample; of those that do not count numbers are 0.
  const auto for_samples = [&](const auto& f) {
#pragma unroll 1
    for (int first = 0; first < sampled; first += kAtOnce * rows) {
      const auto sample = [&](int j) { return first + j * rows + static_cast<int>(threadIdx.x) / lines; };
      Raw<In> raw[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (line * kVec8 < x.shape[3] && is_sampled(sample(j))) raw[j].read(x, line_of(sample(j)));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * rows >= sampled) break;
        Vec8 v;
        raw[j].get(v, OCTET_F32);
        f(sample(j), v);
      }
    }
  };
  if (threadIdx.x < kSampled) of_sample[threadIdx.x] = norms[threadIdx.x] = 0.f;
  __syncthreads();
  for_samples([&](int i, const Vec8& v) {
    Size size(v);
    size.reduce(lines);
    if (line == 0 && i < sampled) of_sample[i] = size.most, norms[i] = size.norm();
  });
  __syncthreads();
  // Keys far beyond typical ones are left to their blocks, so that they do not take the bits of all others.
  constexpr float kFar = 64.f;
  const float limit = of_queries ? INFINITY : mean_limit(of_sample, limit_shared);
  if (threadIdx.x < kSampled) {
    const bool near = of_sample[threadIdx.x] < kFar * limit;
    const float most = warp_max(near ? of_sample[threadIdx.x] : 0.f),
                row_most = warp_max(near ? norms[threadIdx.x] : 0.f);
    if (threadIdx.x % 32 == 0) raise(most_shared, most), raise(row_shared, row_most);
  }
  __syncthreads();
  Sizes& found = p.sampled[kv];
  if (which == Tensor::do_) {
    __shared__ float dlse_shared, of_dlse[kSampled];
    if (threadIdx.x == 0) dlse_shared = 0.f;
    if (threadIdx.x < kSampled) of_dlse[threadIdx.x] = 0.f;
    __syncthreads();
    for (int i = threadIdx.x; p.dlse.data && i < sampled; i += kThreads) {
      if (!is_sampled(i)) continue;
      Index4 at = line_of(i);
      at.channel = 0;
      const float dlse = fabsf(static_cast<const float*>(p.dlse.data)[at.offset(p.dlse)]);
      if (isfinite(dlse)) of_dlse[i] = dlse, raise(dlse_shared, dlse);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const float typical_row = power_above_one_in<2>(norms, 0), typical_dlse = power_above_one_in<2>(of_dlse, 0);
      if (threadIdx.x == 0)
        found.dlse = dlse_shared, found.typical_do_row = typical_row, found.typical_dlse = typical_dlse;
    }
  }
  if (threadIdx.x == 0) {
    if (which == Tensor::q) found.q = most_shared;
    if (which == Tensor::k) found.k = most_shared, found.k_smooth = 0.f;
    if (which == Tensor::v) {
      found.v = most_shared, found.reach = row_shared;
      found.v_row = p.k_tiles ? row_shared : most_shared * sqrtf(static_cast<float>(p.v.shape[3]));
    }
    if (which == Tensor::do_) found.do_ = most_shared, found.do_row = row_shared;
  }
  if (which != Tensor::k) return;
  Vec8 sum{}, column_most{};
  for_samples([&](int, const Vec8& v) {
    for (int c = 0; c < kVec8; ++c)
      if (fabsf(v[c]) < limit) sum[c] += v[c], column_most[c] = fmaxf(column_most[c], fabsf(v[c]));
  });
  for (int c = 0; c < kVec8; ++c) {
    for (int step = lines; step < 32; step *= 2) {
      sum[c] += __shfl_xor_sync(~0u, sum[c], step);
      column_most[c] = fmaxf(column_most[c], __shfl_xor_sync(~0u, column_most[c], step));
    }
    if (threadIdx.x % 32 >= lines) continue;
    sums[threadIdx.x / 32][line * kVec8 + c] = sum[c];
    largest[threadIdx.x / 32][line * kVec8 + c] = column_most[c];
  }
  for (int i = threadIdx.x; i < sampled; i += kThreads)
    if (is_sampled(i)) atomicAdd(&counted_shared, 1);
  __syncthreads();
  const int dim = static_cast<int>(x.shape[3]);
  const bool of_f16 = x.element == Element::f16 || p.round_k == OCTET_F16;
  for (int c = threadIdx.x; c < dim; c += kThreads) {
    float total = 0.f, column_largest = 0.f;
    for (int warp = 0; warp < kWarps; ++warp)
      total += sums[warp][c], column_largest = fmaxf(column_largest, largest[warp][c]);
    p.mean[kv * dim + c] =
        p.smooth ? on_grid_of(column_largest, total / static_cast<float>(counted_shared), of_f16) : 0.f;
  }
}

// Eight channels of a row as those of a tile lie (sm90/smem.h), times `scale`.
template <class T>
__device__ void put(unsigned char* to, const Vec8& x, float scale) {
  uint4 word;
  uint32_t* const pairs = &word.x;
  for (int i = 0; i < kVec8 / 2; ++i) pairs[i] = ptx::pack<T>(x[2 * i] * scale, x[2 * i + 1] * scale);
  *reinterpret_cast<uint4*>(to) = word;
}

// Writes tiles of one (batch, kv head). A group of kLines threads takes a row, and reads all it needs before it writes.
// Rows of queries are on their way while others are written, those of keys two at a time; the first ones before the
// exponents (`exponents_of`), which take as long to come.
template <class T, class In, int Dim>
struct TileWriter {
  static constexpr int kQueries = BackwardTile<Dim>::kQueries, kKeys = BackwardTile<Dim>::kKeys;
  static constexpr int kLines = Dim / kVec8, kRowsAtOnce = kThreads / kLines;
  static constexpr int kKeyBatch = std::is_void_v<In> ? 1 : 2;  // that are read before one is written
  static_assert(kRowsAtOnce % kSwizzleRows == 0 && kQueries <= kThreads);
  // Rows of queries on their way, in dynamic shared memory; none where vectors may lie anyhow.
  static constexpr int kAhead = std::is_void_v<In> ? 0 : 4;
  struct Ahead {
    uint4 q[kThreads], do_[kThreads], o[kThreads], residual[kThreads];  // each thread's own
  };
  static constexpr int kSharedBytes = kAhead * sizeof(Ahead);
  // What the threads of each row have summed.
  struct RowSums {
    float delta[kQueries], norm[kQueries];
    float of_mean[kQueries];  // of what k's mean adds to the row's logits
  };

  const PreprocessParams& p;
  int kv;
  int line = threadIdx.x % kLines;

  // Where this thread's line of its first row lies in a tile of `rows` rows; later rows, a multiple of kSwizzleRows
  // further, lie kPanelRowBytes each behind it.
  __device__ int place(int rows) const {
    const int row = threadIdx.x / kLines;
    return line / kSwizzleRows * rows * kPanelRowBytes + row * kPanelRowBytes +
           (line % kSwizzleRows ^ row % kSwizzleRows) * 16;
  }

  // Keeps the largest of four numbers over a warp, `first` and those that follow it in Sizes.
  __device__ void keep(float& first, float a, float b, float c, float d) const {
    a = warp_max(a), b = warp_max(b), c = warp_max(c), d = warp_max(d);
    const int lane = threadIdx.x % 32;
    if (lane < 4) raise((&first)[lane], lane == 0 ? a : lane == 1 ? b : lane == 2 ? c : d);
  }

  // Eight channels of the mean of k.
  __device__ void read_mean(Vec8& mean) const {
    float4 words[2]{};
    if (p.smooth && line * kVec8 < p.k.shape[3]) {
      const auto* from = reinterpret_cast<const float4*>(p.mean + kv * p.k.shape[3] + line * kVec8);
      words[0] = from[0], words[1] = from[1];
    }
    for (int c = 0; c < kVec8; ++c) mean[c] = (&words[c / 4].x)[c % 4];
  }

  // q, do, delta and lse of a tile of queries. kFirstTime: also zeros for dq, and sizes, and all queries as of the
  // first part. `exponents_of`: of a part.
  template <bool kFirstTime, class ExponentsOf>
  __device__ void queries(int head_index, int block, const ExponentsOf& exponents_of) const {
    const int heads = static_cast<int>(p.q.shape[1]), batch = head_index / heads, head = head_index % heads;
    const Blocks::Sequence sequence = p.q_blocks.sequence_of(block);
    const int64_t tile = static_cast<int64_t>(head_index) * p.q_blocks.count + block;
    const int64_t start = tile * kQueries * Dim * static_cast<int64_t>(sizeof(T));
    const auto rows_of = [&](int part) -> QueryRows<kQueries>& {
      return rows_at<kQueries>(p.rows, part, p.q.shape[0] * heads * p.q_blocks.count, tile);
    };
    const int first_query = (block - sequence.first_block) * kQueries;
    const KeyRange range = sequence.index < 0 ? KeyRange{0, 0} : counted(p, true, sequence.index);
    const auto is_present = [&](int row) {
      return row < kQueries && range.first <= first_query + row && first_query + row < range.last;
    };
    const int64_t first_token = static_cast<int64_t>(sequence.first) + first_query;
    const auto of_token = [&](const Strided& x, int row) {
      return static_cast<const float*>(x.data)[Index4{batch, head, first_token + row, 0}.offset(x)];
    };
    // Rows that see no key, and those beyond the sequence, get p = 0.
    const auto read_lse = [&](int row) { return is_present(row) ? of_token(p.lse, row) : -INFINITY; };
    const auto read_dlse = [&](int row, float lse) {
      return p.dlse.data && lse != -INFINITY ? of_token(p.dlse, row) : 0.f;
    };

    int row = threadIdx.x / kLines;
    const Index4 first{batch, head, first_token + row, line * kVec8};
    Column<In> q(p.q, first), do_(p.do_, first), o(p.o, first), residual(p.o_residual, first);
    const auto advance = [&] {
      q.advance(kRowsAtOnce), do_.advance(kRowsAtOnce), o.advance(kRowsAtOnce), residual.advance(kRowsAtOnce);
    };
    extern __shared__ uint4 shared[];
    Ahead* const ahead = reinterpret_cast<Ahead*>(shared);
    int asked = row, slot = 0;  // the row asked for next, and where it goes to
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
      Raw<In> q, do_, o, residual;
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
      for (int i = 0; i < kQueries * Dim / 4; i += kThreads) dq[i] = {};
    }
    const float my_lse = read_lse(threadIdx.x);  // of the row that this thread will write sums of

    const Exponents& exponents = exponents_of(0);
    const int parts = kFirstTime ? 1 : exponents.parts;
    const auto of_part = [&](int i) -> const Exponents& {
      if constexpr (kFirstTime)
        return exponents;
      else
        return exponents_of(i);
    };
    const auto bound_of = [&](float norm, float dlse) {
      const float most = isfinite(dlse) ? fabsf(dlse) : 0.f;
      return p.dlse.data ? norm + most / per_dlse(p.sampled[kv]) : norm;
    };
    const auto part_of = [&](float bound) {
      int part = 0;
      while (part < parts - 1 && bound > of_part(part).largest_row) ++part;
      return part;
    };
    const float q_scale = power_of_two(exponents.q), do_scale = power_of_two(exponents.do_);
    __shared__ RowSums sums;
    Vec8 mean;
    read_mean(mean);
    float most_q = 0.f, most_do = 0.f;
    unsigned char *to_q = p.q_tiles + start + place(kQueries), *to_do = p.do_tiles + start + place(kQueries);
    for (; row < kQueries; row += kRowsAtOnce) {
      const Row raw = read_row();
      ask();
      Vec8 x, sum;
      raw.q.get(x, p.round_q);
      put<T>(to_q, x, q_scale);
      most_q = fmaxf(most_q, largest_finite(x));
      float of_mean = 0.f;  // q k^T less q (k - mean)^T
      for (int c = 0; c < kVec8; ++c) of_mean += x[c] * mean[c];
      raw.o.get(sum, OCTET_F32), raw.residual.get(x, OCTET_F32);
      for (int c = 0; c < kVec8; ++c) sum[c] += x[c];
      raw.do_.get(x, p.round_do);
      if (kFirstTime) put<T>(to_do, x, do_scale);
      Size size(x);
      float delta = 0.f;
      for (int c = 0; c < kVec8; ++c) delta += x[c] * sum[c];
      size.reduce(kLines);
      for (int step = kLines / 2; step; step /= 2) {
        delta += __shfl_xor_sync(~0u, delta, step);
        of_mean += __shfl_xor_sync(~0u, of_mean, step);
      }
      most_do = fmaxf(most_do, size.most);
      const float norm = size.norm();
      if (!kFirstTime) {
        const int part = part_of(bound_of(norm, read_dlse(row, read_lse(row))));
        put<T>(to_do, x, power_of_two(of_part(part).do_));
      }
      if (line == 0) sums.delta[row] = delta, sums.norm[row] = norm, sums.of_mean[row] = of_mean;
      to_q += kRowsAtOnce * kPanelRowBytes, to_do += kRowsAtOnce * kPanelRowBytes;
    }
    __syncthreads();

    float most_row = 0.f, reach = 0.f, most_dlse = 0.f;
    row = threadIdx.x;
    if (row < kQueries) {
      const float delta = sums.delta[row], norm = sums.norm[row];
      most_row = norm;
      if (norm > 0.f && isfinite(delta)) reach = __fdividef(fabsf(delta), norm);
      const bool sees = my_lse != -INFINITY;
      const float dlse = read_dlse(row, my_lse), bound = bound_of(norm, dlse);
      if (isfinite(dlse)) most_dlse = fabsf(dlse);
      // sum_j p_ij is 1 - exp(sink - lse), and sum_j p_ij dp_ij is delta.
      if (p.row_sums && kFirstTime)
        p.row_sums[tile * kQueries + row] =
            sees ? fmaf(expf(p.sinks.at(batch, head) - my_lse), delta - dlse, dlse) : 0.f;
      const float less = fmaf(p.scale * 1.44269504f, sums.of_mean[row], static_cast<float>(p.weight_exponent));
      const int part = part_of(bound);
      for (int i = 0; i < parts; ++i) {
        const Exponents& e = of_part(i);
        auto& rows = rows_of(i);
        rows.lse[row] = sees && i == part ? fmaf(my_lse, 1.44269504f, -less) : INFINITY;
        rows.delta[row] = sees ? (delta - dlse) * power_of_two(e.do_ + e.v + e.product) : 0.f;
        rows.dq_unit[row] = bound > 0.f ? power_of_two(-exponent_above(bound) - e.do_) : 1.f;
      }
    }
    if (threadIdx.x < parts) {
      auto& rows = rows_of(threadIdx.x);
      rows.first = first_query, rows.tile = static_cast<int>(tile), rows.spoiled = rows.padding = 0;
    }
    if (!kFirstTime) return __syncthreads();  // the next tile's sums take the place of these
    keep(p.sizes[kv].q, most_q, most_do, most_row, reach);
    if (!p.dlse.data) return;
    most_dlse = warp_max(most_dlse);
    if (threadIdx.x % 32 == 0) raise(p.sizes[kv].dlse, most_dlse);
  }

  // k less its mean, and v of a tile of keys.
  template <class ExponentsOf>
  __device__ void keys(int block, bool first_time, const ExponentsOf& exponents_of) const {
    const int kv_heads = static_cast<int>(p.k.shape[1]), batch = kv / kv_heads, head = kv % kv_heads;
    const Blocks::Sequence sequence = p.k_blocks.sequence_of(block);
    const int64_t tile = static_cast<int64_t>(kv) * p.k_blocks.count + block;
    const int64_t start = tile * kKeys * Dim * static_cast<int64_t>(sizeof(T));
    const int first_key = (block - sequence.first_block) * kKeys;
    const KeyRange range = sequence.index < 0 ? KeyRange{0, 0} : counted(p, false, sequence.index);
    int row = threadIdx.x / kLines;
    const Index4 first{batch, head, static_cast<int64_t>(sequence.first) + first_key + row, line * kVec8};
    Column<In> k(p.k, first), v(p.v, first);
    Raw<In> raw_k[kKeyBatch], raw_v[kKeyBatch];
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
    float most_k = 0.f, most_smooth = 0.f, most_v = 0.f, most_row = 0.f;
    for (; row < kKeys; row += kKeyBatch * kRowsAtOnce, read_rows()) {
#pragma unroll
      for (int j = 0; j < kKeyBatch; ++j) {
        Vec8 x;
        raw_k[j].get(x, p.round_k);
        most_k = fmaxf(most_k, largest_finite(x));
        if (present[j])
          for (int c = 0; c < kVec8; ++c) x[c] -= mean[c];
        put<T>(to_k, x, k_scale);
        most_smooth = fmaxf(most_smooth, largest_finite(x));
        raw_v[j].get(x, p.round_v);
        put<T>(to_v, x, v_scale);
        Size size(x);
        size.reduce(kLines);
        most_v = fmaxf(most_v, size.most), most_row = fmaxf(most_row, size.norm());
        to_k += kRowsAtOnce * kPanelRowBytes, to_v += kRowsAtOnce * kPanelRowBytes;
      }
    }
    if (first_time) keep(p.sizes[kv].k, most_k, most_smooth, most_v, most_row);
  }
};

// One tile for each block: those of keys after those of queries, from the last on, so that the first heads, with which
// the mainloop begins, were written last.
template <class T, class In, int Dim>
__global__ void __launch_bounds__(kThreads, std::is_void_v<In> ? 2 : 3)
    tile_kernel(const __grid_constant__ PreprocessParams p) {
  ptx::griddepcontrol_launch_dependents();
  const int heads = static_cast<int>(p.q.shape[0] * p.q.shape[1]), of_queries = heads * p.q_blocks.count;
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int kv = tile < of_queries ? tile / p.q_blocks.count / p.group : (tile - of_queries) / p.k_blocks.count;
  const TileWriter<T, In, Dim> writer{p, kv};
  // What has been asked for or set to 0 by then the kernel before neither writes nor reads.
  __shared__ Exponents of_sample;
  const auto exponents_of = [&](int) -> const Exponents& {
    ptx::griddepcontrol_wait();
    if (threadIdx.x < 32) {
      const Exponents found = exponents_for(p, p.sampled[kv], kRoomOfSample);
      if (threadIdx.x == 0) of_sample = found;
    }
    __syncthreads();
    return of_sample;
  };
  if (tile < of_queries)
    writer.template queries<true>(tile / p.q_blocks.count, tile % p.q_blocks.count, exponents_of);
  else
    writer.keys((tile - of_queries) % p.k_blocks.count, true, exponents_of);
}

// Settles the exponents of all heads and their parts, and writes those again whose numbers the sample's exponents do not fit.
template <class T, class In, int Dim>
__global__ void __launch_bounds__(kThreads, 2) rescale_kernel(const __grid_constant__ PreprocessParams p) {
  __shared__ bool again[kThreads];
  __shared__ Exponents of_head[kParts];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int all = static_cast<int>(p.k.shape[0] * p.k.shape[1]);
  const auto settled = [&](int kv, int part, bool& unfit) {
    const Sizes sampled = p.sampled[kv];
    Sizes sizes = p.sizes[kv];
    if (!p.k_tiles) sizes.k = sampled.k, sizes.v = sampled.v, sizes.v_row = sampled.v_row;  // as far as they are known
    const int parts = parts_of(p, sampled, sizes);
    const Sizes all = sizes;
    if (parts > 1) sizes = sizes_of_part(p, sampled, all, part, parts);
    const Exponents sample = exponents_for(p, sampled, kRoomOfSample), exact = exponents_for(p, sizes, kRoom);
    unfit = parts > 1 || !fits(sample, exact);
    Exponents exponents = unfit ? exact : sample;
    exponents.parts = parts;
    if (parts > 1) exponents.largest_row = largest_row(p, sampled, part);
    if (part > 0) {
      const Exponents e = exponents_for(p, sizes_of_part(p, sampled, all, 0, parts), kRoom);
      exponents.dq = e.product + e.do_ - exponents.product - exponents.do_;
    }
    exponents.dq_sums_unit = dq_sums_unit(p, sampled, sizes, exponents);
    exponents.largest_v = largest_v(p, sizes, exponents);
    return exponents;
  };
  for (int first = 0; first < all; first += kThreads) {
    const int kv = first + static_cast<int>(threadIdx.x);
    bool unfit = false;
    if (kv < all) {
      int part = 0, parts = 1;
      for (; part < parts; ++part) {
        const Exponents exponents = settled(kv, part, unfit);
        parts = exponents.parts;
        if (blockIdx.x == 0) p.exponents[kv * kParts + part] = exponents;
      }
    }
    again[threadIdx.x] = unfit;
    if (!__syncthreads_or(unfit)) continue;
    for (int i = 0; i < kThreads; ++i) {
      if (!again[i]) continue;
      const TileWriter<T, In, Dim> writer{p, first + i};
      __syncthreads();  // the head before is written
      if (threadIdx.x < kParts) of_head[threadIdx.x] = settled(first + i, threadIdx.x, unfit);
      __syncthreads();
      const auto exponents_of = [&](int part) -> const Exponents& { return of_head[part]; };
      for (int tile = blockIdx.x; tile < p.group * p.q_blocks.count; tile += gridDim.x)
        writer.template queries<false>((first + i) * p.group + tile / p.q_blocks.count, tile % p.q_blocks.count,
                                       exponents_of);
      for (int block = blockIdx.x; p.k_tiles && block < p.k_blocks.count; block += gridDim.x)
        writer.keys(block, false, exponents_of);
    }
    __syncthreads();
  }
}

// Whether all inputs are of one 16-bit type, in rows of whole 16-byte words, and rounded to no other.
bool direct(const PreprocessParams& p, Element element, octet_dtype type) {
  for (const Strided* x : {&p.q, &p.k, &p.v, &p.do_, &p.o, &p.o_residual}) {
    if (!x->data) continue;
    if (x->element != element || x->stride[3] != 1 || reinterpret_cast<uintptr_t>(x->data) % 16) return false;
    for (int i = 0; i < 3; ++i)
      if (x->shape[i] > 1 && x->stride[i] % kVec8) return false;
  }
  for (const octet_dtype round : {p.round_q, p.round_k, p.round_v, p.round_do})
    if (round != type && round != OCTET_F32) return false;
  return true;
}

template <class T, class In, int Dim>
void preprocess_as(const PreprocessParams& p, cudaStream_t stream) {
  const auto kv_heads = static_cast<unsigned>(p.k.shape[0] * p.k.shape[1]);
  const auto tiles = kv_heads * static_cast<unsigned>(p.group * p.q_blocks.count + (p.k_tiles ? p.k_blocks.count : 0));
  constexpr unsigned kRescaleBlocks = 264;
  stats_kernel<In><<<dim3(kv_heads, static_cast<unsigned>(Tensor::count)), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "stats_kernel");
  constexpr int kSharedBytes = TileWriter<T, In, Dim>::kSharedBytes;
  const auto launch = [&](void (*kernel)(PreprocessParams), unsigned blocks) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
          "cudaFuncSetAttribute");
    launch_pdl(kernel, blocks, kThreads, kSharedBytes, stream, p);
  };
  if (tiles) launch(tile_kernel<T, In, Dim>, tiles);
  launch(rescale_kernel<T, In, Dim>, std::clamp(tiles, 1u, kRescaleBlocks));
}

template <class T, class In>
void preprocess_as(const PreprocessParams& p, cudaStream_t stream) {
  const auto preprocess = p.tile_dim == 64    ? preprocess_as<T, In, 64>
                       : p.tile_dim == 128 ? preprocess_as<T, In, 128>
                                           : preprocess_as<T, In, 256>;
  preprocess(p, stream);
}

}  // namespace

void preprocess(const PreprocessParams& p, cudaStream_t stream) {
  if (p.type == OCTET_BF16)
    return (direct(p, Element::bf16, OCTET_BF16) ? preprocess_as<Bf16, Bf16> : preprocess_as<Bf16, void>)(p, stream);
  if (direct(p, Element::bf16, OCTET_BF16)) return preprocess_as<F16, Bf16>(p, stream);
  if (direct(p, Element::f16, OCTET_F16)) return preprocess_as<F16, F16>(p, stream);
  preprocess_as<F16, void>(p, stream);
}

}  // namespace octet::cuda::sm90
