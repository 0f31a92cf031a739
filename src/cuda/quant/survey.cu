// The first look at k and v: means and largest numbers of channels over the tokens of a sequence. Numbers that are not
// finite count as 0.
#include "cuda/host/status.h"
#include "cuda/quant/codes.h"
#include "cuda/quant/elements.h"
#include "cuda/quant/key_tiles.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256, kFinishThreads = 1024;

// Sums of k and of v, largest numbers of v: of the channels of each tile, [batch, head, tile, dim].
struct Partial {
  double *k_sum, *v_sum;
  float* v_most;
};

Partial carve(const CodesArguments& a, void* scratch) {
  const int64_t count = a.v.shape[0] * a.kv_heads * a.keys.count() * a.dim;
  auto* const k_sum = static_cast<double*>(scratch);
  return {k_sum, k_sum + count, reinterpret_cast<float*>(k_sum + 2 * count)};
}

// One thread block per tile: combines what the threads of a channel have found, by rows.
template <class T, class F>
__device__ void combine(T (&mine)[kVector], T* rows, int dim, const F& f, T* out) {
  const int lanes = dim / kVector, row = threadIdx.x / lanes, first = threadIdx.x % lanes * kVector;
  for (int i = 0; i < kVector; ++i) rows[row * dim + first + i] = mine[i];
  __syncthreads();
  if (threadIdx.x < dim) {
    T all = rows[threadIdx.x];
    for (int r = 1; r < kThreads / lanes; ++r) all = f(all, rows[r * dim + threadIdx.x]);
    out[threadIdx.x] = all;
  }
  __syncthreads();
}

template <class Vectors>
__global__ void __launch_bounds__(kThreads) survey_kernel(const CodesArguments a, const Partial partial) {
  __shared__ double rows[kThreads * kVector];
  const int lanes = a.dim / kVector, step = kThreads / lanes;
  const TileOfKeys tile = tile_of_keys(a.keys, blockIdx.x);
  const int64_t out =
      ((static_cast<int64_t>(blockIdx.z) * a.kv_heads + blockIdx.y) * a.keys.count() + blockIdx.x) * a.dim;
  const float v_scale = a.v_scale.at(blockIdx.z, blockIdx.y);
  const auto for_each = [&](const Strided& t, float scale, const auto& f) {
    const int channel = threadIdx.x % lanes * kVector;
    if (channel >= t.shape[3]) return;
#pragma unroll 4
    for (int i = threadIdx.x / lanes; i < tile.tokens; i += step) {
      Vector x;
      Vectors::convert(Vectors::load(t, {blockIdx.z, blockIdx.y, tile.first + i, channel}), x);
      for (float& element : x) element *= scale;
      f(x);
    }
  };
  const auto sum = [&](const Strided& t, float scale, double* to) {
    double sums[kVector] = {};
    for_each(t, scale, [&](const Vector& x) {
      for (int i = 0; i < kVector; ++i) sums[i] += isfinite(x[i]) ? x[i] : 0.f;
    });
    combine(
        sums, rows, a.dim, [](double x, double y) { return x + y; }, to + out);
  };
  if (a.channels.k_mean) sum(a.k, 1.f, partial.k_sum);
  if (a.channels.v_mean) sum(a.v, v_scale, partial.v_sum);
  if (a.channels.v_step) {
    float most[kVector] = {};
    for_each(a.v, v_scale, [&](const Vector& x) {
      for (int i = 0; i < kVector; ++i) most[i] = fmaxf(most[i], isfinite(x[i]) ? fabsf(x[i]) : 0.f);
    });
    combine(
        most, reinterpret_cast<float*>(rows), a.dim, [](float x, float y) { return fmaxf(x, y); },
        partial.v_most + out);
  }
}

// One thread block per sequence and head.
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const CodesArguments a, const Partial partial) {
  __shared__ double found[kFinishThreads];
  const int side = blockIdx.x, sequence = side / a.kv_heads, head = side % a.kv_heads;
  const int batch = a.keys.cu_seqlens ? 0 : sequence;
  const int first = a.keys.cu_seqlens ? first_tile(a.keys, sequence) : 0;
  const int tokens = tokens_of(a.keys, sequence), tiles = (tokens + a.keys.tile - 1) / a.keys.tile;
  const int64_t from = ((static_cast<int64_t>(batch) * a.kv_heads + head) * a.keys.count() + first) * a.dim;
  const int channel = threadIdx.x % a.dim, slices = kFinishThreads / a.dim;
  const auto combine_tiles = [&](const auto* x, const auto& f) {
    double all = 0.0;
#pragma unroll 4
    for (int tile = threadIdx.x / a.dim; tile < tiles; tile += slices)
      all = f(all, static_cast<double>(x[from + static_cast<int64_t>(tile) * a.dim + channel]));
    found[threadIdx.x] = all;
    __syncthreads();
    if (threadIdx.x < a.dim)
      for (int slice = 1; slice < slices; ++slice) all = f(all, found[slice * a.dim + channel]);
    __syncthreads();
    return all;
  };
  const auto add = [](double x, double y) { return x + y; };
  const int64_t to = static_cast<int64_t>(side) * a.dim + channel;
  const auto mean = [&](const double* sums, float* means) {
    const double sum = combine_tiles(sums, add);
    if (threadIdx.x < a.dim) means[to] = tokens ? static_cast<float>(sum / tokens) : 0.f;
  };
  if (a.channels.k_mean) mean(partial.k_sum, a.channels.k_mean);
  if (a.channels.v_mean) mean(partial.v_sum, a.channels.v_mean);
  if (a.channels.v_step) {
    const double most = combine_tiles(partial.v_most, [](double x, double y) { return fmax(x, y); });
    const Step step = step_of(static_cast<float>(most), 448.f);
    if (threadIdx.x < a.dim) a.channels.v_step[to] = step.step, a.channels.v_inverse[to] = step.inverse;
  }
}

}  // namespace

std::size_t survey_bytes(const CodesArguments& a) {
  return static_cast<std::size_t>(a.v.shape[0] * a.kv_heads * a.keys.count() * a.dim) *
         (2 * sizeof(double) + sizeof(float));
}

void survey(const CodesArguments& a, void* scratch, cudaStream_t stream) {
  const auto batch = static_cast<unsigned>(a.v.shape[0]), heads = static_cast<unsigned>(a.kv_heads);
  const Partial partial = carve(a, scratch);
  with_vectors({&a.k, &a.v}, [&](auto vectors) {
    survey_kernel<decltype(vectors)><<<dim3(a.keys.count(), heads, batch), kThreads, 0, stream>>>(a, partial);
  });
  check(cudaGetLastError(), "survey");
  const unsigned sequences = a.keys.cu_seqlens ? a.keys.sequences : batch;
  finish_kernel<<<sequences * heads, kFinishThreads, 0, stream>>>(a, partial);
  check(cudaGetLastError(), "survey");
}

}  // namespace octet::cuda
