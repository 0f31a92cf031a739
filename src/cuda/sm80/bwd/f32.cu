// Two kernels: one has a block of keys and sums dk and dv over the queries that see it, the other has a block of
// queries and sums dq over its keys. Both compute s and dp of a tile, so that seven products take the place of five,
// and no sum depends on an order: the results are the same in every run. Tensor cores multiply tf32 parts of the
// numbers (sm80/tf32.h). Tokens with numbers that have no parts, such as inf and NaN, are zeros to them and added in
// float32, so that what a mask hides changes no bit of the rest.
#include "cuda/backward/operands.h"
#include "cuda/host/launch.h"
#include "cuda/preprocess/masks.h"
#include "cuda/preprocess/operands.h"
#include "cuda/preprocess/vec8.h"
#include "cuda/sm80/bwd/f32.h"
#include "cuda/sm80/bwd/lse.h"
#include "cuda/sm80/bwd/seen.h"
#include "cuda/sm80/tf32.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;  // of the small kernels
constexpr int kWarps = kThreads / 32;

struct F32Params {
  Output q, k, v, do_;       // f32, rows of whole 16-byte words
  const float *lse, *delta;  // [batch, head, token]: lse without the gauge; do.o - dlse
  Strided dq, dk, dv;
  LogitTerms terms;
  Blocks q_blocks, k_blocks;
  Mask mask;
  int heads, kv_heads, tokens_q, dim, dim_v;
  float scale;
};

// Tokens of a thread block and of a tile.
constexpr int f32_rows(int dim) { return dim == 256 ? 16 : 32; }

template <int Dim, bool OfKeys>
struct F32Kernel {
  static constexpr int kRows = f32_rows(Dim);  // of the block, and of a tile that it meets
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kHalf = kWarps / 2;
  static constexpr int kPitch = Dim + 8, kPairPitch = kRows + 8;  // floats; what a warp reads is in different banks
  using Tile = float[kRows][kPitch];
  using Pairs = float[kRows][kPairPitch];  // [token of a tile][token of the block]

  // One half of the warps computes s, the other dp. A warp has 16 tokens of the block and `kPairColumns` blocks of 8
  // tokens of a tile.
  static constexpr int kPairColumns = kRows == 32 ? 2 : 1, kPairWarps = kRows / 16 * (kRows / 8 / kPairColumns);
  static_assert(kPairWarps <= kHalf);
  // The first half of the warps sums dv and the second half dk. All warps sum dq. Each warp sums all tokens of the
  // block, for its share of the channels.
  static constexpr int kSumWarps = OfKeys ? kHalf : kWarps, kChannels = Dim / kSumWarps;
  static constexpr int kSumRows = kRows / 16, kSumColumns = kChannels / 8;
  using Sums = Tf32Sums<kSumRows, kSumColumns>;

  // 1 for each token that has a number which tf32 parts cannot represent (sm80/tf32.h), else 0.
  struct Odd {
    int x[kRows], y[kRows], u[kRows], w[kRows];
  };

  // A block of keys keeps k and v in x and y, and reads q and do through u and w. A block of queries keeps q and do,
  // and reads k and v.
  struct Shared {
    Tile x, y, u, w;
    Pairs p, ds;
    float lse[kRows], delta[kRows];
    Odd odd;
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  const F32Params& a;
  Shared& shared;
  int batch, kv_head;
  Blocks::Sequence q, k;

  // Read anew where it is used: the compiler would keep all that it works out from threadIdx in registers across the
  // loop over tiles, for which there is no room.
  static __device__ int thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  static __device__ int warp() { return thread() / 32; }
  static __device__ int lane() { return thread() % 32; }
  static __device__ float2 two(const float* x) { return *reinterpret_cast<const float2*>(x); }
  static __device__ bool is_odd(float x) { return !(fabsf(x) <= kMostInTf32); }

  // Loads the tokens from `first` on, a warp at a time. Those beyond the sequence and further channels become zeros.
  __device__ void load(Tile& to, int (&odd)[kRows], const Output& from, int head, const Blocks::Sequence& s, int first,
                       int channels) const {
#pragma unroll 2
    for (int row = warp(); row < kRows; row += kWarps) {
      bool found = false;
#pragma unroll
      for (int c = lane() * 4; c < Dim; c += 128) {
        float4 x{};
        if (first + row < s.tokens && c < channels)
          x = *reinterpret_cast<const float4*>(from.row<float>(batch, head, int64_t{s.first} + first + row) + c);
        found |= is_odd(x.x) || is_odd(x.y) || is_odd(x.z) || is_odd(x.w);
        *reinterpret_cast<float4*>(&to[row][c]) = x;
      }
      odd[row] = __any_sync(~0u, found);
    }
  }
  __device__ void load_queries(Tile& q_to, Tile& do_to, int (&q_odd)[kRows], int (&do_odd)[kRows], int head,
                               int first) const {
    load(q_to, q_odd, a.q, head, q, first, a.dim), load(do_to, do_odd, a.do_, head, q, first, a.dim_v);
    for (int row = thread(); row < kRows; row += kThreads) {
      const bool there = first + row < q.tokens;
      const int64_t at = (int64_t{batch} * a.heads + head) * a.tokens_q + q.first + first + row;
      const float lse = there ? a.lse[at] : -INFINITY;
      shared.lse[row] = lse == -INFINITY ? INFINITY : lse, shared.delta[row] = there ? a.delta[at] : 0.f;
    }
  }
  __device__ void load_keys(Tile& k_to, Tile& v_to, int (&k_odd)[kRows], int (&v_odd)[kRows], int first) const {
    load(k_to, k_odd, a.k, kv_head, k, first, a.dim), load(v_to, v_odd, a.v, kv_head, k, first, a.dim_v);
  }

  static __device__ float dot(const float* x, const float* y) {
    float sum = 0.f;
#pragma unroll 1
    for (int c = 0; c < Dim; ++c) sum = fmaf(x[c], y[c], sum);
    return sum;
  }

  // Computes q.k and do.v of all pairs of the block and a tile.
  __device__ void products() const {
    const int w = warp() % kHalf;
    if (w >= kPairWarps) return;
    const bool second = warp() >= kHalf;
    const Tile &own = second ? shared.y : shared.x, &other = second ? shared.w : shared.u;
    Pairs& to = second ? shared.ds : shared.p;
    const int r0 = w % (kRows / 16) * 16, m0 = w / (kRows / 16) * 8 * kPairColumns;
    Tf32Sums<1, kPairColumns> sum;
    sum.template add<Dim, 1>(
        lane(), [&](int, int r, int c) { return two(&own[r0 + r][c]); },
        [&](int n, int m, int c) { return two(&other[m0 + 8 * n + m][c]); });
#pragma unroll
    for (int n = 0; n < kPairColumns; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) to[m0 + 8 * n + lane() % 4 * 2 + j % 2][r0 + lane() / 4 + j / 2 * 8] = sum.x[0][n][j];
  }

  // Turns them into p and ds: rows from `row` on meet those from `moving` on.
  __device__ void pairs(int head, int row, int moving) const {
#pragma unroll 1
    for (int i = thread(); i < kRows * kRows; i += kThreads) {
      const int r = i % kRows, m = i / kRows;
      const int query = OfKeys ? moving + m : row + r, key = OfKeys ? row + r : moving + m, at = OfKeys ? m : r;
      float p = 0.f, ds = 0.f;
      const KeyRange seen = a.mask.keys_of(min(query, q.tokens - 1), q.tokens, k.tokens);
      if (query < q.tokens && key >= seen.first && key < seen.last) {
        const bool odd_product = shared.odd.x[r] || shared.odd.u[m], odd_dp = shared.odd.y[r] || shared.odd.w[m];
        const float product = odd_product ? dot(shared.x[r], shared.u[m]) : shared.p[m][r];
        const RowTerms terms =
            row_terms(a.terms, batch, a.k_blocks.cu_seqlens ? k.index : batch, head, query, q.tokens, k.tokens, seen);
        p = expf(logit_of(a.terms, terms, key, product) - shared.lse[at]);
        if (p != 0.f) {
          ds = p * ((odd_dp ? dot(shared.y[r], shared.w[m]) : shared.ds[m][r]) - shared.delta[at]);
          if (a.terms.softcap != 0.f) ds *= softcap(a.terms, product * a.terms.scale).derivative;
        }
      }
      shared.p[m][r] = p, shared.ds[m][r] = ds;
    }
  }

  // Computes p and ds of a tile that has been loaded. All threads call it, and see the results.
  __device__ void compute(int head, int row, int moving) const {
    __syncthreads();
    products();
    __syncthreads();
    pairs(head, row, moving);
    __syncthreads();
  }

  // Adds f^T x for the numbers of x that have no parts, unless f is 0. It is rare, so it takes one sum after the other.
  __device__ void add_odd(Sums& sum, const Pairs& f, const Tile& x, const int (&odd)[kRows]) const {
    constexpr int kSums = kSumRows * kSumColumns * 4;
#pragma unroll 1
    for (int at = 0; at < kSums; ++at) {
      const int row = row_of(at / 4 / kSumColumns, at % 4), channel = channel_of(at / 4 % kSumColumns, at % 4);
      bool found = false;
      float more = 0.f;
#pragma unroll 1
      for (int m = 0; m < kRows; ++m)
        if (odd[m] && f[m][row] != 0.f && is_odd(x[m][channel]))
          found = true, more = fmaf(f[m][row], x[m][channel], more);
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float& number = sum.x[i / 4 / kSumColumns][i / 4 % kSumColumns][i % 4];
        if (found && i == at) number += more;
      }
    }
  }
  // Sets them to 0.
  __device__ void clear_odd(Tile& x) const {
#pragma unroll 1
    for (int i = thread(); i < kRows * Dim; i += kThreads)
      if (is_odd(x[i / Dim][i % Dim])) x[i / Dim][i % Dim] = 0.f;
  }

  // Adds the products of a tile: p and do to dv, ds and q to dk, or ds and k to dq. All threads call it.
  __device__ void accumulate(Sums& sum) const {
    const bool of_dv = OfKeys && warp() < kHalf;
    const Pairs& f = of_dv ? shared.p : shared.ds;
    const Tile& x = of_dv ? shared.w : shared.u;
    const bool odd = lane() < kRows && (shared.odd.u[lane() % kRows] || shared.odd.w[lane() % kRows]);
    if (__any_sync(~0u, odd)) {
      add_odd(sum, f, x, of_dv ? shared.odd.w : shared.odd.u);
      __syncthreads();
      clear_odd(shared.u), clear_odd(shared.w);
      __syncthreads();
    }
    const int first = first_channel();
    sum.template add<kRows, 4>(
        lane(),
        [&](int i, int r, int m) {
          return float2{f[m][16 * i + r], f[m + 4][16 * i + r]};
        },
        [&](int n, int c, int m) {
          const int channel = first + 8 * n + c;
          return float2{x[m][channel], x[m + 4][channel]};
        });
  }

  // The row and the channel of the tile to which sum.x[i][n][j] of this thread belongs.
  static __device__ int row_of(int i, int j) { return 16 * i + lane() / 4 + j / 2 * 8; }
  static __device__ int first_channel() { return warp() % kSumWarps * kChannels; }
  static __device__ int channel_of(int n, int j) { return first_channel() + 8 * n + lane() % 4 * 2 + j % 2; }

  // Writes the sums to x or y, which nobody reads any more. All threads call it, and see the results.
  __device__ void write(const Sums& sum, Tile& through) const {
    __syncthreads();  // x and y may still be loading, where there was no tile
#pragma unroll
    for (int i = 0; i < kSumRows; ++i)
#pragma unroll
      for (int n = 0; n < kSumColumns; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) through[row_of(i, j)][channel_of(n, j)] = sum.x[i][n][j];
    __syncthreads();
  }
  __device__ void store(const Tile& sums, const Strided& to, int head, const Blocks::Sequence& s, int first,
                        float scale) const {
    const int rows = min(kRows, s.tokens - first), channels = static_cast<int>(to.shape[3]);
    with_type(to.element, [&](auto* type) {
      using Type = std::remove_pointer_t<decltype(type)>;
#pragma unroll 1
      for (int i = thread(); i < rows * Dim; i += kThreads) {
        const int row = i / Dim, c = i % Dim;
        if (c >= channels) continue;
        const Index4 at{batch, head, int64_t{s.first} + first + row, c};
        static_cast<Type*>(to.data)[at.offset(to)] = Type(scale * sums[row][c]);
      }
    });
  }

  __device__ void keys(int block) {
    const int first = (block - k.first_block) * kRows, group = a.heads / a.kv_heads;
    load_keys(shared.x, shared.y, shared.odd.x, shared.odd.y, first);
    int start = 0, end = q.tokens;
    if (a.mask.windowed) {
      const int shift = a.mask.bottom_right ? k.tokens - q.tokens : 0;
      start = max(first - shift - a.mask.right, 0) / kRows * kRows;
      end = min(min(first + kRows, k.tokens) - shift + a.mask.left, q.tokens);
    }
    Sums sum{};  // dv in one half of the warps, dk in the other
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int query = start; query < end; query += kRows) {
        __syncthreads();
        load_queries(shared.u, shared.w, shared.odd.u, shared.odd.w, head, query);
        compute(head, first, query);
        accumulate(sum);
      }
    write(sum, warp() < kHalf ? shared.y : shared.x);
    store(shared.x, a.dk, kv_head, k, first, a.scale), store(shared.y, a.dv, kv_head, k, first, 1.f);
  }

  __device__ void queries(int head, int block) {
    const int first = (block - q.first_block) * kRows, last = min(first + kRows, q.tokens) - 1;
    load_queries(shared.x, shared.y, shared.odd.x, shared.odd.y, head, first);
    const int start = a.mask.keys_of(first, q.tokens, k.tokens).first / kRows * kRows,
              end = a.mask.keys_of(last, q.tokens, k.tokens).last;
    Sums dq{};
    for (int key = start; key < end; key += kRows) {
      __syncthreads();
      load_keys(shared.u, shared.w, shared.odd.u, shared.odd.w, key);
      compute(head, first, key);
      accumulate(dq);
    }
    write(dq, shared.x);
    store(shared.x, a.dq, head, q, first, a.scale);
  }
};

template <int Dim, bool OfKeys>
__global__ void __launch_bounds__(F32Kernel<Dim, OfKeys>::kThreads, 2) f32_kernel(const __grid_constant__ F32Params a) {
  extern __shared__ __align__(16) unsigned char memory[];
  using Kernel = F32Kernel<Dim, OfKeys>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  const Blocks& blocks = OfKeys ? a.k_blocks : a.q_blocks;
  const int heads = OfKeys ? a.kv_heads : a.heads, block = static_cast<int>(blockIdx.x) % blocks.count;
  const int head = static_cast<int>(blockIdx.x) / blocks.count % heads;
  const int batch = static_cast<int>(blockIdx.x) / blocks.count / heads;
  const Blocks::Sequence own = blocks.sequence_of(block);
  if (own.index < 0) return;
  const Blocks& others = OfKeys ? a.q_blocks : a.k_blocks;
  const Blocks::Sequence other = others.cu_seqlens ? others.sequence(own.index) : others.sequence_of(0);
  Kernel kernel{
      a, shared, batch, OfKeys ? head : head / (a.heads / a.kv_heads), OfKeys ? other : own, OfKeys ? own : other};
  if constexpr (OfKeys)
    kernel.keys(block);
  else
    kernel.queries(head, block);
}

struct RowParams {
  Strided do_, o, residual, dlse;  // residual, dlse: may be absent
  float* delta;
};

// delta = do.o - dlse, summed in double: the sum is small where its terms are not. One warp has a row.
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ RowParams p) {
  const int64_t heads = p.do_.shape[1], tokens = p.do_.shape[2], rows = p.do_.shape[0] * heads * tokens;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    Index4 at{row / tokens / heads, row / tokens % heads, row % tokens, lane * kVec8};
    double sum = 0.0;
    for (; at.channel < p.do_.shape[3]; at.channel += 32 * kVec8) {
      Vec8 x, o, residual{};
      read(p.do_, at, x), read(p.o, at, o);
      if (p.residual.data) read(p.residual, at, residual);
      for (int c = 0; c < kVec8; ++c) sum += double{x[c]} * (double{o[c]} + double{residual[c]});
    }
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    at.channel = 0;
    if (lane == 0)
      p.delta[row] =
          static_cast<float>(sum) - (p.dlse.data ? static_cast<const float*>(p.dlse.data)[at.offset(p.dlse)] : 0.f);
  }
}

// Copies lse to [batch, head, token].
__global__ void __launch_bounds__(kThreads) copy_lse_kernel(const Strided from, float* to) {
  const int64_t tokens = from.shape[2], rows = from.shape[0] * from.shape[1] * tokens;
  for (int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows; row += int64_t{gridDim.x} * kThreads)
    to[row] = static_cast<const float*>(
        from.data)[Index4{row / tokens / from.shape[1], row / tokens % from.shape[1], row % tokens, 0}.offset(from)];
}

// Sums -exp(sink - lse) delta over the queries, and over the batch where it shares its sinks, always in the same order.
// Each thread block has a head.
__global__ void __launch_bounds__(kThreads, 2)
    dsinks_kernel(const Strided lse, const float* delta, const Sinks sinks, const Strided dsinks) {
  __shared__ double sums[kThreads];
  const int heads = static_cast<int>(dsinks.shape[1]), head = static_cast<int>(blockIdx.x) % heads;
  const int of_batch = static_cast<int>(blockIdx.x) / heads, batches = static_cast<int>(lse.shape[0]);
  const int end = dsinks.shape[0] == batches ? of_batch + 1 : batches;
  double sum = 0.0;
  for (int batch = of_batch; batch < end; ++batch)
    for (int64_t token = threadIdx.x; token < lse.shape[2]; token += kThreads) {
      const float sink = sinks.at(batch, head);
      const float saved = static_cast<const float*>(lse.data)[Index4{batch, head, token, 0}.offset(lse)];
      if (sink == -INFINITY || saved == -INFINITY) continue;
      sum -= double{expf(sink - saved)} * double{delta[(int64_t{batch} * heads + head) * lse.shape[2] + token]};
    }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kThreads; ++i) sum += sums[i];
  static_cast<float*>(dsinks.data)[Index4{of_batch, head, 0, 0}.offset(dsinks)] = static_cast<float>(sum);
}

template <int Dim, bool OfKeys>
void launch(const F32Params& a, int64_t blocks, cudaStream_t stream) {
  if (!blocks) return;
  using Kernel = F32Kernel<Dim, OfKeys>;
  const auto kernel = f32_kernel<Dim, OfKeys>;
  allow_shared_bytes(kernel, Kernel::kSharedBytes);
  kernel<<<static_cast<unsigned>(blocks), Kernel::kThreads, Kernel::kSharedBytes, stream>>>(a);
  check(cudaGetLastError(), "f32_kernel");
}

template <int Dim>
void launch(const F32Params& a, const Problem& p, cudaStream_t stream) {
  launch<Dim, true>(a, p.dk.elements() || p.dv.elements() ? p.batch * p.kv_heads * a.k_blocks.count : 0, stream);
  launch<Dim, false>(a, p.dq.elements() ? p.batch * p.heads * a.q_blocks.count : 0, stream);
}

}  // namespace

std::size_t backward_f32(const Problem& p, void* workspace, cudaStream_t stream) {
  WorkspaceAllocator allocator(workspace);
  const int dim = backward_dim(p), rows = f32_rows(dim);
  const auto queries = static_cast<std::size_t>(p.batch * p.heads * p.tokens_q);
  const Input q(p.q, OCTET_F32, allocator), k(p.k, OCTET_F32, allocator), v(p.v, OCTET_F32, allocator),
      do_(p.do_, OCTET_F32, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  float *const lse = allocator.take<float>(queries), *const delta = allocator.take<float>(queries);
  F32Params a{.lse = lse,
              .delta = delta,
              .dq = strided(p.dq),
              .dk = strided(p.dk),
              .dv = strided(p.dv),
              .terms = terms,
              .q_blocks = blocks_of(rows, p.tokens_q, p.cu_seqlens_q, allocator),
              .k_blocks = blocks_of(rows, p.tokens_k, p.cu_seqlens_k, allocator),
              .mask = mask_of(p),
              .heads = static_cast<int>(p.heads),
              .kv_heads = static_cast<int>(p.kv_heads),
              .tokens_q = static_cast<int>(p.tokens_q),
              .dim = static_cast<int>(p.dim),
              .dim_v = static_cast<int>(p.dim_v),
              .scale = p.scale};
  if (!workspace) return allocator.used();

  const DeviceScope device(p.device_index);
  for (const Input* x : {&q, &k, &v, &do_}) x->preprocess(stream);
  a.q = output(q.view()), a.k = output(k.view()), a.v = output(v.view()), a.do_ = output(do_.view());
  count_blocks(a.q_blocks, a.k_blocks, stream);
  if (queries) {
    const RowParams of_rows{strided(p.do_), strided(p.o), strided(p.o_residual), strided(p.dlse), delta};
    delta_kernel<<<blocks_for(static_cast<int64_t>(queries), kWarps), kThreads, 0, stream>>>(of_rows);
    check(cudaGetLastError(), "delta_kernel");
    compute_gauges(p, terms, stream);
    if (has_gauge(p)) {
      remove_gauges({.terms = terms,
                     .q = strided(p.q),
                     .k = strided(p.k),
                     .lse = strided(p.lse),
                     .round = OCTET_F32,
                     .sinks = sinks(p.sinks),
                     .q_blocks = a.q_blocks,
                     .k_blocks = a.k_blocks,
                     .mask = a.mask,
                     .group = static_cast<int>(p.group()),
                     .to = lse},
                    stream);
    } else {
      copy_lse_kernel<<<blocks_for(static_cast<int64_t>(queries), kThreads), kThreads, 0, stream>>>(strided(p.lse),
                                                                                                    lse);
      check(cudaGetLastError(), "copy_lse_kernel");
    }
  }
  (dim == 64 ? launch<64> : dim == 128 ? launch<128> : launch<256>)(a, p, stream);
  if (p.dsinks.elements()) {
    dsinks_kernel<<<static_cast<unsigned>(p.dsinks.shape[0] * p.dsinks.shape[1]), kThreads, 0, stream>>>(
        strided(p.lse), delta, sinks(p.sinks), strided(p.dsinks));
    check(cudaGetLastError(), "dsinks_kernel");
  }
  return allocator.used();
}

}  // namespace octet::cuda::sm80
