// One thread block has a block of queries and meets tiles of keys; sm80/jvp/jvp.h has the algorithm.
#include <algorithm>

#include "cuda/fragment/dropout.h"
#include "cuda/fragment/finish_jvp.h"
#include "cuda/host/backend.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/vec8.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/sm80/f32_tiles.h"
#include "cuda/sm80/jvp/f32.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = kF32Threads;

struct F32Params {
  Output q, k, v, tq, tk, tv;  // f32, rows of whole 16-byte words
  TileScheduler scheduler;
  LogitTerms terms;
  Mask mask;
  int group, dim, dim_v;
  Strided o, to;
  Output lse, tlse;
  Sinks sinks, tsinks;
  Dropout dropout;
};

template <int Dim>
struct F32Kernel {
  using Tiles = F32Tiles<Dim>;
  static constexpr int kRows = Tiles::kRows, kKeys = kRows / 2;
  using QueryTile = typename Tiles::template Tile<kRows>;
  using KeyTile = typename Tiles::template Tile<kKeys>;
  using Pairs = typename Tiles::template Pairs<kKeys>;
  using Sums = typename Tiles::Sums;

  struct Shared {
    QueryTile q, tq;
    KeyTile k, tk, v, tv;
    Pairs p, h;  // logits and their tangents, then p and h
    float m[kRows], centre[kRows], l[kRows], r[kRows], rescale[kRows];
    TileInfo tile;
    int nonfinite;  // 1: a number of k, tk, v or tv is not finite
  };

  const F32Params& a;
  Shared& shared;
  const TileInfo& w;

  __device__ void load_queries(QueryTile& to, const Output& from) const {
    Tiles::load(to, shared.nonfinite, from, w.batch, w.head, w.q_first, w.q_start, w.q_tokens, a.dim);
  }
  __device__ void load_keys(KeyTile& to, const Output& from, int kv_head, int first, int channels) const {
    Tiles::load(to, shared.nonfinite, from, w.batch, kv_head, w.k_first, first, w.k_tokens, channels);
  }

  __device__ Interval range_of(int query) const {
    return a.mask.keys_of(min(query, w.q_tokens - 1), w.q_tokens, w.k_tokens);
  }
  __device__ RowTerms terms_of(int query) const {
    return row_terms(a.terms, w.batch, w.sequence, w.head, query, w.q_tokens, w.k_tokens, range_of(query));
  }

  // Computes the logits of a tile, -inf for keys that are not seen, and their tangents.
  __device__ void logits(int first_key) const {
    for (int i = threadIdx.x; i < kRows * kKeys; i += kThreads) {
      const int r = i % kRows, j = i / kRows, query = w.q_start + r, key = first_key + j;
      const Interval seen = range_of(query);
      float x = -INFINITY, t = 0.f;
      if (query < w.q_tokens && key >= seen.first && key < seen.last) {
        const float product = Tiles::dot(shared.q[r], shared.k[j]);
        x = logit_of(a.terms, terms_of(query), key, product);
        t = a.terms.scale * (Tiles::dot(shared.tq[r], shared.k[j]) + Tiles::dot(shared.q[r], shared.tk[j]));
        if (a.terms.softcap != 0.f) t *= softcap(a.terms, product * a.terms.scale).derivative;
      }
      shared.p[j][r] = x, shared.h[j][r] = t;
    }
  }

  // Turns logits and their tangents into p and h; eight threads have a row.
  __device__ void exponentials(int first_key) const {
    constexpr int kThreadsOfRow = 8;
    const int r = threadIdx.x / kThreadsOfRow, part = threadIdx.x % kThreadsOfRow;
    const bool there = r < kRows;
    float most = there ? shared.m[r] : -INFINITY;
    for (int j = part; there && j < kKeys; j += kThreadsOfRow) most = fmaxf(most, shared.p[j][r]);
    for (int offset = kThreadsOfRow / 2; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    const float from = most == -INFINITY ? 0.f : most;  // -inf: the row has seen no key yet
    float sum = 0.f, sum_h = 0.f;
    for (int j = part; there && j < kKeys; j += kThreadsOfRow) {
      float &x = shared.p[j][r], &t = shared.h[j][r];
      x = expf(x - from), t = x == 0.f ? 0.f : x * t;
      sum += x, sum_h += t;
    }
    for (int offset = kThreadsOfRow / 2; offset; offset /= 2)
      sum += __shfl_xor_sync(~0u, sum, offset), sum_h += __shfl_xor_sync(~0u, sum_h, offset);
    if (!there) return;
    const float old = shared.m[r];
    const bool first = old == -INFINITY && most != -INFINITY;  // the first tile in which the row sees a key
    const float centre = first ? sum_h / sum : shared.centre[r];
    for (int j = part; j < kKeys; j += kThreadsOfRow) {
      float &p = shared.p[j][r], &h = shared.h[j][r];
      h -= p * centre;
      if (a.dropout.drops(w.sequence, w.head, w.q_start + r, first_key + j)) p = h = 0.f;  // l and r keep them
    }
    __syncwarp();
    if (part > 0) return;
    const float rescale = expf(old - from);
    shared.l[r] = shared.l[r] * rescale + sum;
    shared.r[r] = shared.r[r] * rescale + (sum_h - sum * centre);
    shared.m[r] = most, shared.centre[r] = centre, shared.rescale[r] = rescale;
  }

  __device__ void accumulate(Sums& sum, const Pairs& f, const KeyTile& x) const {
    Tiles::accumulate(sum, f, x, shared.nonfinite);
  }

  __device__ void store(const Strided& to, int query, int channel, const float (&x)[4]) const {
    with_type(to.element, [&](auto* type) {
      using Type = std::remove_pointer_t<decltype(type)>;
      auto* const at =
          static_cast<Type*>(to.data) + Index4{w.batch, w.head, int64_t{w.q_first} + query, channel}.offset(to);
      for (int i = 0; i < 4; ++i) at[i * to.stride[3]] = Type(x[i]);
    });
  }

  __device__ void write(const Sums& o, const Sums& u) const {
    const int row = Tiles::first_row(), c = Tiles::first_channel();
#pragma unroll
    for (int i = 0; i < Tiles::kRowsOfThread; ++i) {
      const int r = row + i, query = w.q_start + r;
      if (query >= w.q_tokens) continue;
      const float l = shared.l[r];
      const FinishedRow f({shared.centre[r], l, shared.r[r]},
                          RowSum<>::of(shared.m[r] * kLog2e, l, terms_of(query).row_bias), a.sinks, a.tsinks, w.batch,
                          w.head, a.dropout.scale);
      const int64_t token = int64_t{w.q_first} + query;
      if (c == 0 && a.lse.data) *a.lse.row<float>(w.batch, w.head, token) = f.lse;
      if (c == 0 && a.tlse.data) *a.tlse.row<float>(w.batch, w.head, token) = f.tlse;
      if (c >= a.dim_v) continue;
      float x[4] = {o[i].x, o[i].y, o[i].z, o[i].w}, y[4] = {u[i].x, u[i].y, u[i].z, u[i].w};
      for (int j = 0; j < 4; ++j) f.apply(x[j], y[j]);
      store(a.o, query, c, x), store(a.to, query, c, y);
    }
  }

  __device__ void run() const {
    const int kv_head = w.head / a.group;
    load_queries(shared.q, a.q), load_queries(shared.tq, a.tq);
    if (threadIdx.x < kRows) {
      shared.m[threadIdx.x] = -INFINITY, shared.rescale[threadIdx.x] = 1.f, shared.centre[threadIdx.x] = 0.f;
      shared.l[threadIdx.x] = shared.r[threadIdx.x] = 0.f;
    }
    Sums o{}, u{};
    const int row = Tiles::first_row();
    const Interval any = a.mask.keys_of_all(w.q_start, min(w.q_start + kRows, w.q_tokens), w.q_tokens, w.k_tokens).any;
    for (int key = any.first / kKeys * kKeys; key < any.last; key += kKeys) {
      __syncthreads();
      load_keys(shared.k, a.k, kv_head, key, a.dim), load_keys(shared.tk, a.tk, kv_head, key, a.dim);
      load_keys(shared.v, a.v, kv_head, key, a.dim_v), load_keys(shared.tv, a.tv, kv_head, key, a.dim_v);
      __syncthreads();
      logits(key);
      __syncthreads();
      exponentials(key);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < Tiles::kRowsOfThread; ++i) {
        const float by = shared.rescale[row + i];
        o[i] = {o[i].x * by, o[i].y * by, o[i].z * by, o[i].w * by};
        u[i] = {u[i].x * by, u[i].y * by, u[i].z * by, u[i].w * by};
      }
      accumulate(o, shared.p, shared.v), accumulate(u, shared.p, shared.tv), accumulate(u, shared.h, shared.v);
    }
    __syncthreads();
    write(o, u);
  }
};

template <int Dim>
__global__ void __launch_bounds__(kThreads, 2) f32_jvp_kernel(const __grid_constant__ F32Params a) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename F32Kernel<Dim>::Shared*>(memory);
  if (threadIdx.x == 0) shared.tile = a.scheduler.at(blockIdx.x), shared.nonfinite = 0;
  __syncthreads();
  if (shared.tile.valid()) F32Kernel<Dim>{a, shared, shared.tile}.run();
}

template <int Dim>
void launch(const F32Params& a, int64_t tiles, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(typename F32Kernel<Dim>::Shared);
  const auto kernel = f32_jvp_kernel<Dim>;
  allow_shared_bytes(kernel, kSharedBytes);
  kernel<<<static_cast<unsigned>(tiles), kThreads, kSharedBytes, stream>>>(a);
  check(cudaGetLastError(), "f32_jvp_kernel");
}

}  // namespace

Plan jvp_f32(const Problem& p, void* workspace) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  const int rows = dim > 128 ? F32Tiles<256>::kRows : F32Tiles<128>::kRows;
  WorkspaceAllocator allocator(workspace);
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const Input q(p.q, OCTET_F32, allocator), k(p.k, OCTET_F32, allocator), v(p.v, OCTET_F32, allocator),
      tq(p.tq, OCTET_F32, allocator), tk(p.tk, OCTET_F32, allocator), tv(p.tv, OCTET_F32, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  const auto name = [] { return std::string("jvp f32, on CUDA cores"); };
  auto run = [=, &p](cudaStream_t stream) {
    if (!p.o.elements()) return;
    for (const Input* x : {&q, &k, &v, &tq, &tk, &tv}) x->preprocess(stream);
    compute_row_biases(p, terms, stream);
    const F32Params a{.q = output(q.view()),
                      .k = output(k.view()),
                      .v = output(v.view()),
                      .tq = output(tq.view()),
                      .tk = output(tk.view()),
                      .tv = output(tv.view()),
                      .scheduler = tile_scheduler(p, rows, one_by_one(p.batch * p.heads), blocks_before, stream),
                      .terms = terms,
                      .mask = mask_of(p),
                      .group = static_cast<int>(p.group()),
                      .dim = static_cast<int>(p.dim),
                      .dim_v = static_cast<int>(p.dim_v),
                      .o = strided(p.o),
                      .to = strided(p.to),
                      .lse = output(p.lse),
                      .tlse = output(p.tlse),
                      .sinks = sinks(p.sinks),
                      .tsinks = sinks(p.tsinks),
                      .dropout = dropout_of(p)};
    (dim <= 64 ? launch<64> : dim <= 128 ? launch<128> : launch<256>)(a, query_tiles(p, rows), stream);
  };
  return plan_of(p, allocator, name, std::move(run));
}

}  // namespace octet::cuda::sm80
