// First kernel of the preprocessing: statistics of a sample of each head, which are the largest numbers, the mean of k,
// and typical rows of do.
#include "cuda/backward/exponents.h"
#include "cuda/backward/kernels.h"
#include "cuda/preprocess/mean_limit.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = kPreprocessThreads;
constexpr int kSamples = 128;  // tokens of each (batch, kv head)
enum class Tensor { q, k, v, do_, count };

// Rounds the mean of numbers of at most `largest` so that it can be subtracted from all of them in f16: the numbers,
// the mean and so the difference are multiples of 2^-10 times the power of two above twice `largest`. Only bf16 numbers
// of less than a sixteenth of the mean have lower digits, and these are rounded. f16 numbers have three more bits.
// Unless all of them are within a factor of two of their mean, the difference would lose bits, and the logits with it;
// then this returns 0.
__device__ inline float on_grid_of(float largest, float mean, bool of_f16) {
  if (!(largest > 0.f) || (of_f16 && 4.f * fabsf(mean) < 3.f * largest)) return 0.f;
  const int exponent = exponent_above(largest) - 9;
  return ldexpf(rintf(ldexpf(mean, -exponent)), exponent);
}

// One thread block per (batch, kv head) and tensor samples the tokens evenly. A sample that is needed twice is loaded
// twice, which leaves registers for more thread blocks per multiprocessor.
template <class In>
__global__ void __launch_bounds__(kThreads, 4) stats_kernel(const __grid_constant__ PreprocessParams p) {
  constexpr int kAtOnce = std::is_void_v<In> ? 1 : 4;  // samples that a thread loads before it uses them
  constexpr int kWarps = kThreads / 32;
  const int kv = blockIdx.x, kv_heads = static_cast<int>(p.k.shape[1]), batch = kv / kv_heads, kv_head = kv % kv_heads;
  const int vecs = p.tile_dim / kVec8, vec = threadIdx.x % vecs, rows = kThreads / vecs;
  const Tensor which = static_cast<Tensor>(blockIdx.y);
  const Strided& x = which == Tensor::q ? p.q : which == Tensor::k ? p.k : which == Tensor::v ? p.v : p.do_;
  const int group = which == Tensor::q || which == Tensor::do_ ? p.group : 1;
  const bool of_queries = which == Tensor::q || which == Tensor::do_, packed = p.k_blocks.cu_seqlens;
  const KeyRange range = packed ? KeyRange{0, static_cast<int>(x.shape[2])} : counted(p, of_queries, 0);
  const int tokens = range.last - range.first;
  const bool whole = static_cast<int64_t>(group) * tokens <= kSamples;
  const int sampled = whole ? group * tokens : kSamples;
  __shared__ float sums[kWarps][256], largest[kWarps][256];
  __shared__ float most_shared, row_shared, sample_max[kSamples], norms[kSamples], limit_shared;
  __shared__ int counted_shared;  // samples
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) most_shared = row_shared = 0.f, counted_shared = 0;
  if (threadIdx.x == 0 && which == Tensor::q) p.sizes[kv] = {}, p.zeroed[kv] = 0;
  if (threadIdx.x == 0 && which == Tensor::q && kv == 0) p.counters[0] = p.counters[1] = *p.divided = 0;
  // Returns sample i: all tokens are samples if they are few, else the samples are shared among the heads of the group.
  const auto index_of = [&](int i) -> Index4 {
    if (whole) return Index4{batch, kv_head * group + i / tokens, range.first + i % tokens, vec * kVec8};
    const int of_group = i * group;
    const int token = static_cast<int>(static_cast<int64_t>(of_group % kSamples) * tokens / kSamples);
    return Index4{batch, kv_head * group + of_group / kSamples, range.first + token, vec * kVec8};
  };
  // Tokens of packed sequences that no other token sees are left out.
  const auto is_sampled = [&](int i) {
    return i < sampled && (!packed || counts(p, of_queries, static_cast<int>(index_of(i).token)));
  };
  // Calls f(i, numbers) for each sample; the numbers of samples that are left out are 0.
  const auto for_samples = [&](const auto& f) {
#pragma unroll 1
    for (int first = 0; first < sampled; first += kAtOnce * rows) {
      const auto sample = [&](int j) { return first + j * rows + static_cast<int>(threadIdx.x) / vecs; };
      RawVec8<In> raw[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (vec * kVec8 < x.shape[3] && is_sampled(sample(j))) raw[j].load(x, index_of(sample(j)));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * rows >= sampled) break;
        Vec8 v;
        take(raw[j], OCTET_F32, v);
        f(sample(j), v);
      }
    }
  };
  if (threadIdx.x < kSamples) sample_max[threadIdx.x] = norms[threadIdx.x] = 0.f;
  __syncthreads();
  for_samples([&](int i, const Vec8& v) {
    Size size(v);
    size.reduce(vecs);
    if (vec == 0 && i < sampled) sample_max[i] = size.most, norms[i] = size.norm();
  });
  __syncthreads();
  // Outliers among keys are ignored here, as they would take bits from all other keys. Their blocks find their own
  // exponents.
  constexpr float kFar = 64.f;
  const float limit = of_queries ? INFINITY : mean_limit(sample_max, limit_shared);
  if (threadIdx.x < kSamples) {
    const bool near = sample_max[threadIdx.x] < kFar * limit;
    const float most = warp_max(near ? sample_max[threadIdx.x] : 0.f),
                row_most = warp_max(near ? norms[threadIdx.x] : 0.f);
    if (threadIdx.x % 32 == 0) raise(most_shared, most), raise(row_shared, row_most);
  }
  __syncthreads();
  Sizes& found = p.sampled[kv];
  if (which == Tensor::do_) {
    __shared__ float dlse_shared, sample_dlse[kSamples];
    if (threadIdx.x == 0) dlse_shared = 0.f;
    if (threadIdx.x < kSamples) sample_dlse[threadIdx.x] = 0.f;
    __syncthreads();
    for (int i = threadIdx.x; p.dlse.data && i < sampled; i += kThreads) {
      if (!is_sampled(i)) continue;
      Index4 at = index_of(i);
      at.channel = 0;
      const float dlse = fabsf(static_cast<const float*>(p.dlse.data)[at.offset(p.dlse)]);
      if (isfinite(dlse)) sample_dlse[i] = dlse, raise(dlse_shared, dlse);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const float typical_row = power_above_one_in<2>(norms, 0), typical_dlse = power_above_one_in<2>(sample_dlse, 0);
      if (threadIdx.x == 0)
        found.dlse = dlse_shared, found.typical_do_row = typical_row, found.typical_dlse = typical_dlse;
    }
  }
  if (threadIdx.x == 0) {
    if (which == Tensor::q) found.q = most_shared;
    if (which == Tensor::k) found.k = most_shared, found.k_smooth = 0.f;
    if (which == Tensor::v) {
      found.v = most_shared, found.reach = row_shared;
      found.v_row = p.reads_keys ? row_shared : most_shared * sqrtf(static_cast<float>(p.v.shape[3]));
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
    for (int step = vecs; step < 32; step *= 2) {
      sum[c] += __shfl_xor_sync(~0u, sum[c], step);
      column_most[c] = fmaxf(column_most[c], __shfl_xor_sync(~0u, column_most[c], step));
    }
    if (threadIdx.x % 32 >= vecs) continue;
    sums[threadIdx.x / 32][vec * kVec8 + c] = sum[c];
    largest[threadIdx.x / 32][vec * kVec8 + c] = column_most[c];
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

}  // namespace

template <class In>
void launch_stats(const PreprocessParams& p, cudaStream_t stream) {
  const auto kv_heads = static_cast<unsigned>(p.k.shape[0] * p.k.shape[1]);
  stats_kernel<In><<<dim3(kv_heads, static_cast<unsigned>(Tensor::count)), kThreads, 0, stream>>>(p);
  check(cudaGetLastError(), "stats_kernel");
}

template void launch_stats<Bf16>(const PreprocessParams&, cudaStream_t);
template void launch_stats<F16>(const PreprocessParams&, cudaStream_t);
template void launch_stats<void>(const PreprocessParams&, cudaStream_t);

}  // namespace octet::cuda
