// First kernel of the preprocessing: statistics of a sample of each head, which are the largest numbers, the mean of k,
// and typical rows of do.
#include "cuda/bwd/exponents.h"
#include "cuda/bwd/kernels.h"
#include "cuda/operands/mean_limit.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {
namespace {

constexpr int kSamples = 128;  // tokens of each (batch, kv head)
enum class Tensor { q, k, v, do_, count };

// Returns whether numbers of at most `largest` are within a factor of two of their mean, as far as the two tell: their
// difference is exact.
__device__ inline bool is_close(float mean, float largest) { return 4.f * fabsf(mean) >= 3.f * largest; }

// Rounds the mean of numbers of at most `largest` so that it can be subtracted from all of them in f16: the numbers,
// the mean and so the difference are multiples of 2^-10 times the power of two above twice `largest`. Only bf16 numbers
// of less than a sixteenth of the mean have lower digits, and these are rounded. f16 numbers have three more bits.
// Unless all of them are within a factor of two of their mean, the difference would lose bits, and the logits with it;
// then this returns 0.
__device__ inline float on_grid_of(float largest, float mean, bool of_f16) {
  if (!(largest > 0.f) || (of_f16 && !is_close(mean, largest))) return 0.f;
  const int exponent = exponent_above(largest) - 9;
  return ldexpf(rintf(ldexpf(mean, -exponent)), exponent);
}

// Numbers of k that are small beside the mean of their channel lose digits when it is subtracted, up to 2^-11 of the
// mean, and logits lose them times q. Returns that loss of the logits at most, in base 2, if `means` is the sum of the
// means of all such channels and `q` the largest number of the queries.
__device__ inline float logit_loss(const PreprocessParams& p, float q, float means) {
  return fabsf(p.scale) * 1.44269504f * q * means * 0x1p-11f;
}
// Above this loss k keeps its digits instead of its mean: below, P errs by less than bf16 rounds, as few numbers are
// that small and their errors cancel.
constexpr float kMostLogitLoss = 1.f;

// An even sample of the tokens of a tensor that belong to one (batch, kv head): all tokens if they are few, else the
// samples are shared among the heads of the group.
struct Sample {
  const PreprocessParams& p;
  const Strided& x;
  bool of_queries, packed;
  int batch, first_head, group, first, tokens;
  bool whole;
  int count;

  __device__ Sample(const PreprocessParams& p, const Strided& x, bool of_queries, int kv)
      : p(p), x(x), of_queries(of_queries), packed(p.k_blocks.cu_seqlens), group(of_queries ? p.group : 1) {
    const int kv_heads = static_cast<int>(p.k.shape[1]);
    batch = kv / kv_heads, first_head = kv % kv_heads * group;
    const Interval range = packed ? Interval{0, static_cast<int>(x.shape[2])} : counted(p, of_queries, 0);
    first = range.first, tokens = range.last - range.first;
    whole = static_cast<int64_t>(group) * tokens <= kSamples;
    count = whole ? group * tokens : kSamples;
  }
  __device__ Index4 index_of(int i, int channel) const {
    if (whole) return Index4{batch, first_head + i / tokens, first + i % tokens, channel};
    const int of_group = i * group;
    const int token = static_cast<int>(static_cast<int64_t>(of_group % kSamples) * tokens / kSamples);
    return Index4{batch, first_head + of_group / kSamples, first + token, channel};
  }
  // Tokens of packed sequences that no other token sees are left out.
  __device__ bool has(int i) const {
    const TokenFlags& flags = of_queries ? p.seen_queries : p.seen_keys;
    if (i >= count) return false;
    if (!packed && !flags.data) return true;
    const Index4 index = index_of(i, 0);
    return (!packed || counts(p, of_queries, static_cast<int>(index.token))) &&
           sees(flags, static_cast<int>(index.batch), static_cast<int>(index.head), index.token);
  }
  // Calls f(i, numbers) for each sample; the numbers of samples that are left out are 0.
  template <class In, int kThreads, class F>
  __device__ void for_each(const F& f) const {
    constexpr int kAtOnce = std::is_void_v<In> ? 1 : 4;  // samples that a thread loads before it uses them
    const int vecs = p.tile_dim / kVec8, channel = static_cast<int>(threadIdx.x) % vecs * kVec8, rows = kThreads / vecs;
#pragma unroll 1
    for (int start = 0; start < count; start += kAtOnce * rows) {
      const auto sample = [&](int j) { return start + j * rows + static_cast<int>(threadIdx.x) / vecs; };
      RawVec8<In> raw[kAtOnce];
      // One sample after the other, as the addresses of their flags take registers. Each has a bit.
      unsigned kept = 0;
#pragma unroll 1
      for (int j = 0; j < kAtOnce; ++j) kept |= static_cast<unsigned>(has(sample(j))) << j;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (channel < x.shape[3] && kept >> j & 1) raw[j].load(x, index_of(sample(j), channel));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (start + j * rows >= count) break;
        Vec8 v;
        take(raw[j], OCTET_F32, v);
        f(sample(j), v);
      }
    }
  }
};

// One thread block per (batch, kv head) and tensor. A sample that is needed twice is loaded twice, which leaves
// registers for more thread blocks per multiprocessor.
template <class In, int kThreads>
__global__ void __launch_bounds__(kThreads, 4 * kPreprocessThreads / kThreads)
    stats_kernel(const __grid_constant__ PreprocessParams p) {
  constexpr int kWarps = kThreads / 32, kRowWarps = kThreads / kPreprocessThreads, kWarpColumns = 32 * kVec8;
  const int kv = blockIdx.x;
  const int vecs = p.tile_dim / kVec8, vec = threadIdx.x % vecs;
  const Tensor which = static_cast<Tensor>(blockIdx.y);
  const Strided& x = which == Tensor::q ? p.q : which == Tensor::k ? p.k : which == Tensor::v ? p.v : p.do_;
  const bool of_queries = which == Tensor::q || which == Tensor::do_;
  const Sample sample(p, x, of_queries, kv);
  __shared__ float sums[kWarps][kWarpColumns], largest[kWarps][kWarpColumns];
  __shared__ float most_shared, row_shared, sample_max[kSamples], norms[kSamples], limit_shared;
  __shared__ int counted_shared;  // samples
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) most_shared = row_shared = 0.f, counted_shared = 0;
  if (threadIdx.x == 0 && which == Tensor::q) p.sizes[kv] = {}, p.zeroed[kv] = 0;
  if (threadIdx.x == 0 && which == Tensor::q && kv == 0) p.counters[0] = p.counters[1] = *p.divided = 0;
  if (threadIdx.x < kSamples) sample_max[threadIdx.x] = norms[threadIdx.x] = 0.f;
  __syncthreads();
  sample.for_each<In, kThreads>([&](int i, const Vec8& v) {
    Size size(v);
    size.reduce(kRowWarps > 1 ? 32 : vecs);
    if constexpr (kRowWarps > 1) join_warps<kThreads, In>(size);
    if (vec == 0 && i < sample.count) sample_max[i] = size.most, norms[i] = size.norm();
  });
  __syncthreads();
  // Outliers among keys are ignored here, as they would take bits from all other keys. Their blocks find their own
  // exponents.
  constexpr float kFar = 64.f;
  const float limit = of_queries ? INFINITY : mean_limit(sample_max, limit_shared);
  if (threadIdx.x < kSamples) {
    const bool near = sample_max[threadIdx.x] < kFar * limit;
    const float most = warp_max(near ? sample_max[threadIdx.x] : 0.f),
                row_most = warp_max(near || which == Tensor::k ? norms[threadIdx.x] : 0.f);
    if (threadIdx.x % 32 == 0) raise(most_shared, most), raise(row_shared, row_most);
  }
  __syncthreads();
  Sizes& found = p.sampled[kv];
  if (which == Tensor::do_) {
    __shared__ float dlse_shared, sample_dlse[kSamples];
    if (threadIdx.x == 0) dlse_shared = 0.f;
    if (threadIdx.x < kSamples) sample_dlse[threadIdx.x] = 0.f;
    __syncthreads();
    for (int i = threadIdx.x; p.dlse.data && i < sample.count; i += kThreads) {
      if (!sample.has(i)) continue;
      const float dlse = fabsf(static_cast<const float*>(p.dlse.data)[sample.index_of(i, 0).offset(p.dlse)]);
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
    if (which == Tensor::q) found.q = most_shared, found.q_row = row_shared;
    if (which == Tensor::k) found.k = most_shared, found.k_smooth = 0.f, found.k_row = row_shared;
    if (which == Tensor::v) {
      found.v = most_shared, found.delta_ratio = p.dropout_scale * row_shared;
      found.v_row = p.measures_all_keys ? row_shared : most_shared * sqrtf(static_cast<float>(p.v.shape[3]));
    }
    if (which == Tensor::do_) found.do_ = most_shared, found.do_row = row_shared;
  }
  if (which != Tensor::k) return;
  __shared__ float most_q_shared, inexact_means[kWarps];
  if (threadIdx.x == 0) most_q_shared = 0.f;
  Vec8 sum{}, column_most{};
  sample.for_each<In, kThreads>([&](int, const Vec8& v) {
    for (int c = 0; c < kVec8; ++c)
      if (fabsf(v[c]) < limit) sum[c] += v[c], column_most[c] = fmaxf(column_most[c], fabsf(v[c]));
  });
  for (int c = 0; c < kVec8; ++c) {
    for (int step = vecs; step < 32; step *= 2) {
      sum[c] += __shfl_xor_sync(~0u, sum[c], step);
      column_most[c] = fmaxf(column_most[c], __shfl_xor_sync(~0u, column_most[c], step));
    }
    if (threadIdx.x % 32 >= vecs) continue;
    sums[threadIdx.x / 32][vec % 32 * kVec8 + c] = sum[c];
    largest[threadIdx.x / 32][vec % 32 * kVec8 + c] = column_most[c];
  }
  for (int i = threadIdx.x; i < sample.count; i += kThreads)
    if (sample.has(i)) atomicAdd(&counted_shared, 1);
  float most_q = 0.f;
  if (p.smooth)
    Sample(p, p.q, true, kv).for_each<In, kThreads>([&](int, const Vec8& v) {
      most_q = fmaxf(most_q, largest_finite(v));
    });
  most_q = warp_max(most_q);
  if (threadIdx.x % 32 == 0) raise(most_q_shared, most_q);
  __syncthreads();
  const bool of_f16 = x.element == Element::f16 || p.round_k == OCTET_F16;
  const int c = threadIdx.x, dim = static_cast<int>(x.shape[3]);
  float mean = 0.f;
  bool exact = true;
  if (c < dim && p.smooth) {
    float total = 0.f, column_largest = 0.f;
    for (int warp = kRowWarps > 1 ? c / kWarpColumns : 0; warp < kWarps; warp += kRowWarps)
      total += sums[warp][c % kWarpColumns], column_largest = fmaxf(column_largest, largest[warp][c % kWarpColumns]);
    mean = on_grid_of(column_largest, total / static_cast<float>(counted_shared), of_f16);
    exact = is_close(mean, column_largest);
  }
  // The sum is taken in one order, as bits must not change from run to run.
  float inexact = exact ? 0.f : fabsf(mean);
  for (int step = 16; step; step /= 2) inexact += __shfl_xor_sync(~0u, inexact, step);
  if (threadIdx.x % 32 == 0) inexact_means[threadIdx.x / 32] = inexact;
  __syncthreads();
  float means = 0.f;
  for (const float of_warp : inexact_means) means += of_warp;
  if (c < dim) p.mean[kv * dim + c] = exact || logit_loss(p, most_q_shared, means) <= kMostLogitLoss ? mean : 0.f;
}

}  // namespace

template <class In>
void launch_stats(const PreprocessParams& p, cudaStream_t stream) {
  const auto kv_heads = static_cast<unsigned>(p.k.shape[0] * p.k.shape[1]);
  with_wide_tile_dim(p.tile_dim, [&](auto dim) {
    constexpr int kThreads = kTileThreads<dim>;
    stats_kernel<In, kThreads><<<dim3(kv_heads, static_cast<unsigned>(Tensor::count)), kThreads, 0, stream>>>(p);
  });
  check(cudaGetLastError(), "stats_kernel");
}

template void launch_stats<Bf16>(const PreprocessParams&, cudaStream_t);
template void launch_stats<F16>(const PreprocessParams&, cudaStream_t);
template void launch_stats<void>(const PreprocessParams&, cudaStream_t);

}  // namespace octet::cuda
