#include <cfloat>

#include "cuda/bwd/tile_writer.h"
#include "cuda/sm90/bwd/query_rows.h"

namespace octet::cuda::sm90 {
namespace {

constexpr int kThreads = kPreprocessThreads;

// Each thread block has one tile of queries, whose rows are divided among groups of kVecs threads. Tiles are taken from
// the last one down, so that what is written for the first heads, with which the mainloop begins, is still in L2. For
// sums in integers, tiles of keys are numbered after those of queries, and the sizes are raised from which the units of
// dq follow.
template <int Dim, Sums sums>
__global__ void __launch_bounds__(kThreads, 2) query_rows_kernel(const __grid_constant__ PreprocessParams p) {
  constexpr int kQueries = BackwardTile<Dim>::kQueries, kVecs = Dim / kVec8;
  constexpr int kRowsAtOnce = kThreads / kVecs, kRows = kQueries / kRowsAtOnce;
  constexpr int kLoaded = kRows < 4 ? kRows : 4;  // rows of a thread that its registers hold
  __shared__ float deltas[kQueries], norms[kQueries];
  ptx::griddepcontrol_launch_dependents();
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x), heads = static_cast<int>(p.q.shape[1]);
  if constexpr (sums == Sums::integers) {
    const int key_tile = tile - static_cast<int>(p.q.shape[0]) * heads * p.q_blocks.count;
    if (key_tile >= 0) {
      const TileWriter<Bf16, Bf16, Dim> reader{p, key_tile / p.k_blocks.count};
      return reader.keys(key_tile % p.k_blocks.count, true, [](int) { return Exponents{}; });
    }
  }
  const int head_index = tile / p.q_blocks.count, batch = head_index / heads, head = head_index % heads;
  const int first_query = tile % p.q_blocks.count * kQueries, kv = head_index / p.group;
  const auto of_query = [&](const Strided& x, int query) {
    return static_cast<const float*>(x.data)[Index4{batch, head, query, 0}.offset(x)];
  };

  const int vec = threadIdx.x % kVecs, first_row = threadIdx.x / kVecs, queries = p.q_blocks.tokens - first_query;
  const Index4 first{batch, head, first_query + first_row, vec * kVec8};
  Column<Bf16> do_(p.do_, first), o(p.o, first);
  Column<S8> residual(p.o_residual, first);
  struct {
    RawVec8<Bf16> do_, o;
    RawVec8<S8> residual;
  } raw[kLoaded];
  const auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) {
      const bool present = from + i * kRowsAtOnce < queries;
      raw[i] = {do_.read(present), o.read(present), residual.read(present)};
      do_.advance(kRowsAtOnce), o.advance(kRowsAtOnce), residual.advance(kRowsAtOnce);
    }
  };
  load(first_row);
  const int row = threadIdx.x;  // the row that this thread will write
  const float lse = row < min(queries, kQueries) ? of_query(p.lse, first_query + row) : -INFINITY;
  const float dlse = p.dlse.data && lse != -INFINITY ? of_query(p.dlse, first_query + row) : 0.f;

  if (kv < p.zeroed_heads) {
    auto* const dq = static_cast<uint4*>(p.dq) + static_cast<int64_t>(tile) * (kQueries * Dim / 4);
    for (int i = threadIdx.x; i < kQueries * Dim / 4; i += kThreads) dq[i] = {};
  }
  if (first_query == 0 && head_index % p.group == 0 && threadIdx.x == 0) {
    if (sums == Sums::floats) p.exponents[kv] = {.dq_sums_scale = 1.f, .largest_v = FLT_MAX, .bins = 1};
    p.zeroed[kv] = 0;
    if (kv == 0) p.counters[0] = p.counters[1] = 0;
  }

#pragma unroll 1
  for (int part = 0; part < kRows / kLoaded; ++part) {
    const int from = first_row + part * kLoaded * kRowsAtOnce;
    if (part > 0) load(from);
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) {
      Vec8 x, whole_o;
      raw[i].do_.convert(x), raw[i].o.convert(whole_o), add_residual<Bf16>(p, raw[i].residual, whole_o);
      float delta = 0.f;
      for (int c = 0; c < kVec8; ++c) delta += x[c] * whole_o[c];
      for (int step = kVecs / 2; step; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
      if (vec == 0) deltas[from + i * kRowsAtOnce] = delta;
      if constexpr (sums == Sums::integers) {
        Size size(x);
        size.reduce(kVecs);
        if (vec == 0) norms[from + i * kRowsAtOnce] = size.norm();
      }
    }
  }
  __syncthreads();
  auto& rows = reinterpret_cast<QueryRows<kQueries>*>(p.rows)[tile];
  if (row < kQueries) {
    const bool sees = lse != -INFINITY;
    rows.lse[row] = sees ? lse * 1.44269504f : INFINITY;
    rows.delta[row] = sees ? deltas[row] - dlse : 0.f;
  }
  if (sums == Sums::integers && row < kQueries) {  // whole warps
    rows.dq_row_scale[row] = dq_row_scale(norms[row], 0);
    const float delta_ratio = warp_max(delta_ratio_of(deltas[row], norms[row]));
    if (row % 32 == 0) raise(p.sizes[kv].delta_ratio, delta_ratio);
  }
  if (row == 0) rows.first = first_query, rows.tile = tile, rows.nonfinite = rows.padding = 0;
}

template <Sums sums>
auto query_rows_kernel_of(int dim) {
  return with_tile_dim(dim, [](auto tile_dim) { return query_rows_kernel<tile_dim, sums>; });
}

}  // namespace

void preprocess_rows(PreprocessParams p, Sums sums, cudaStream_t stream) {
  const bool integers = sums == Sums::integers;
  if (integers) {
    p.sampled = p.sizes;  // of all numbers, so that no sample is taken
    check(cudaMemsetAsync(p.sizes, 0, p.k.shape[0] * p.k.shape[1] * sizeof(Sizes), stream), "cudaMemsetAsync");
  }
  const auto kernel =
      integers ? query_rows_kernel_of<Sums::integers>(p.tile_dim) : query_rows_kernel_of<Sums::floats>(p.tile_dim);
  kernel<<<preprocess_tiles(p), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "query_rows_kernel");
  if (integers) launch_rescale<Bf16, Bf16>(p, stream);
}

}  // namespace octet::cuda::sm90
