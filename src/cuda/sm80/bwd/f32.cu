// Two kernels: one has a block of keys and sums dk and dv over the queries that see it, the other has a block of
// queries and sums dq over its keys. Both compute s and dp of a tile, so that seven products take the place of five,
// and no sum depends on an order: the results are the same in every run.
#include "cuda/backward/operands.h"
#include "cuda/host/launch.h"
#include "cuda/preprocess/masks.h"
#include "cuda/preprocess/operands.h"
#include "cuda/preprocess/vec8.h"
#include "cuda/sm80/bwd/f32.h"
#include "cuda/sm80/bwd/lse.h"
#include "cuda/sm80/bwd/seen.h"
#include "cuda/sm80/f32_tiles.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = kF32Threads, kWarps = kThreads / 32;

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

template <int Dim, bool OfKeys>
struct F32Kernel {
  using Tiles = F32Tiles<Dim>;
  static constexpr int kRows = Tiles::kRows;  // of the block, and of a tile that it meets
  using Tile = typename Tiles::template Tile<kRows>;
  using Pairs = typename Tiles::template Pairs<kRows>;
  using Sums = typename Tiles::Sums;

  // A block of keys keeps k and v in x and y, and reads q and do through u and w. A block of queries keeps q and do,
  // and reads k and v.
  struct Shared {
    Tile x, y, u, w;
    Pairs p, ds;
    float lse[kRows], delta[kRows];
    int nonfinite;  // 1: a number of x, y, u or w is not finite
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  const F32Params& a;
  Shared& shared;
  int batch, kv_head;
  Blocks::Sequence q, k;

  __device__ void load(Tile& to, const Output& from, int head, const Blocks::Sequence& s, int first,
                       int channels) const {
    Tiles::load(to, shared.nonfinite, from, batch, head, s.first, first, s.tokens, channels);
  }
  __device__ void load_queries(Tile& q_to, Tile& do_to, int head, int first) const {
    load(q_to, a.q, head, q, first, a.dim), load(do_to, a.do_, head, q, first, a.dim_v);
    for (int row = threadIdx.x; row < kRows; row += kThreads) {
      const bool there = first + row < q.tokens;
      const int64_t at = (int64_t{batch} * a.heads + head) * a.tokens_q + q.first + first + row;
      const float lse = there ? a.lse[at] : -INFINITY;
      shared.lse[row] = lse == -INFINITY ? INFINITY : lse, shared.delta[row] = there ? a.delta[at] : 0.f;
    }
  }
  __device__ void load_keys(Tile& k_to, Tile& v_to, int first) const {
    load(k_to, a.k, kv_head, k, first, a.dim), load(v_to, a.v, kv_head, k, first, a.dim_v);
  }

  // Computes p and ds of all pairs of the block and a tile: rows from `row` on meet those from `moving` on.
  __device__ void pairs(int head, int row, int moving) const {
    for (int i = threadIdx.x; i < kRows * kRows; i += kThreads) {
      const int r = i % kRows, m = i / kRows;
      const int query = OfKeys ? moving + m : row + r, key = OfKeys ? row + r : moving + m, at = OfKeys ? m : r;
      float p = 0.f, ds = 0.f;
      const KeyRange seen = a.mask.keys_of(min(query, q.tokens - 1), q.tokens, k.tokens);
      if (query < q.tokens && key >= seen.first && key < seen.last) {
        const float product = Tiles::dot(shared.x[r], shared.u[m]);
        const RowTerms terms =
            row_terms(a.terms, batch, a.k_blocks.cu_seqlens ? k.index : batch, head, query, q.tokens, k.tokens, seen);
        p = expf(logit_of(a.terms, terms, key, product) - shared.lse[at]);
        if (p != 0.f) {
          ds = p * (Tiles::dot(shared.y[r], shared.w[m]) - shared.delta[at]);
          if (a.terms.softcap != 0.f) ds *= softcap(a.terms, product * a.terms.scale).derivative;
        }
      }
      shared.p[m][r] = p, shared.ds[m][r] = ds;
    }
  }

  __device__ void accumulate(Sums& sum, const Pairs& f, const Tile& x) const {
    Tiles::accumulate(sum, f, x, shared.nonfinite);
  }

  __device__ void write(const Strided& to, int head, const Blocks::Sequence& s, int first, const Sums& sum,
                        float scale) const {
    const int row = Tiles::first_row(), c = Tiles::first_channel();
    if (c >= to.shape[3]) return;
    for (int r = 0; r < Tiles::kRowsOfThread; ++r) {
      if (first + row + r >= s.tokens) continue;
      const float numbers[4] = {scale * sum[r].x, scale * sum[r].y, scale * sum[r].z, scale * sum[r].w};
      with_type(to.element, [&](auto* type) {
        using Type = std::remove_pointer_t<decltype(type)>;
        auto* const at =
            static_cast<Type*>(to.data) + Index4{batch, head, int64_t{s.first} + first + row + r, c}.offset(to);
        for (int i = 0; i < 4; ++i) at[i * to.stride[3]] = Type(numbers[i]);
      });
    }
  }

  __device__ void keys(int block) {
    const int first = (block - k.first_block) * kRows, group = a.heads / a.kv_heads;
    load_keys(shared.x, shared.y, first);
    int start = 0, end = q.tokens;
    if (a.mask.windowed) {
      const int shift = a.mask.bottom_right ? k.tokens - q.tokens : 0;
      start = max(first - shift - a.mask.right, 0) / kRows * kRows;
      end = min(min(first + kRows, k.tokens) - shift + a.mask.left, q.tokens);
    }
    Sums dk{}, dv{};
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
      for (int query = start; query < end; query += kRows) {
        __syncthreads();
        load_queries(shared.u, shared.w, head, query);
        __syncthreads();
        pairs(head, first, query);
        __syncthreads();
        accumulate(dv, shared.p, shared.w), accumulate(dk, shared.ds, shared.u);
      }
    write(a.dk, kv_head, k, first, dk, a.scale);
    write(a.dv, kv_head, k, first, dv, 1.f);
  }

  __device__ void queries(int head, int block) {
    const int first = (block - q.first_block) * kRows, last = min(first + kRows, q.tokens) - 1;
    load_queries(shared.x, shared.y, head, first);
    const int start = a.mask.keys_of(first, q.tokens, k.tokens).first / kRows * kRows,
              end = a.mask.keys_of(last, q.tokens, k.tokens).last;
    Sums dq{};
    for (int key = start; key < end; key += kRows) {
      __syncthreads();
      load_keys(shared.u, shared.w, key);
      __syncthreads();
      pairs(head, first, key);
      __syncthreads();
      accumulate(dq, shared.ds, shared.u);
    }
    write(a.dq, head, q, first, dq, a.scale);
  }
};

template <int Dim, bool OfKeys>
__global__ void __launch_bounds__(kThreads, 2) f32_kernel(const __grid_constant__ F32Params a) {
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
  if (threadIdx.x == 0) shared.nonfinite = 0;
  __syncthreads();
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
  constexpr int kSharedBytes = F32Kernel<Dim, OfKeys>::kSharedBytes;
  const auto kernel = f32_kernel<Dim, OfKeys>;
  allow_shared_bytes(kernel, kSharedBytes);
  kernel<<<static_cast<unsigned>(blocks), kThreads, kSharedBytes, stream>>>(a);
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
  const int dim = backward_dim(p), rows = dim == 256 ? F32Tiles<256>::kRows : F32Tiles<64>::kRows;
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
