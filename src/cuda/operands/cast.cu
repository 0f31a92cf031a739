#include <algorithm>
#include <climits>
#include <type_traits>

#include "cuda/fragment/mask.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/cast.h"
#include "cuda/operands/mean_limit.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/warpgroup.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
// Calls f(index) for this thread's vectors of head blockIdx.x, whose tokens are shared among blockIdx.y.
template <class F>
__device__ void for_each_vec8(const Strided& t, const F& f) {
  const int vecs = static_cast<int>(t.shape[3]) / kVec8, rows = kThreads / vecs;
  const int row = threadIdx.x / vecs;
  if (row >= rows) return;
  Index4 index{blockIdx.x / t.shape[1], blockIdx.x % t.shape[1], 0, threadIdx.x % vecs * kVec8};
#pragma unroll 4
  for (int64_t token = static_cast<int64_t>(blockIdx.y) * rows + row; token < t.shape[2]; token += gridDim.y * rows) {
    index.token = token;
    f(index);
  }
}

// Rounds to a type of less precision. opaque() hides the result from the compiler, which else generates code for each
// pair of that type and the type written, which takes it half a minute.
__device__ void round_through(Element through, Vec8& x) {
  with_type(through, [&](auto* type) {
    for (float& element : x) element = float(static_cast<std::remove_pointer_t<decltype(type)>>(element));
  });
  for (float& element : x) element = ptx::opaque(element);
}

__global__ void __launch_bounds__(kThreads) cast_kernel(const Strided from, const Strided to, Element through) {
  for_each_vec8(from, [&](const Index4& index) {
    Vec8 x;
    read(from, index, x);
    if (to.element == Element::i8) return write_as(static_cast<int8_t*>(to.data) + index.offset(to), to.stride[3], x);
    round_through(through, x);
    write(to, index, x);
  });
}

__global__ void __launch_bounds__(kThreads)
    residual_kernel(const Strided from, const Strided to, const Strided residual) {
  for_each_vec8(from, [&](const Index4& index) {
    Vec8 x, y;
    read(from, index, x), read(to, index, y);
    const bool bytes = residual.element == Element::i8;
    for (int c = 0; c < kVec8; ++c)
      x[c] = bytes ? static_cast<float>(min(residual_of(x[c], y[c], residual_shift(to.element)), 127)) : x[c] - y[c];
    if (bytes)
      write_as(static_cast<int8_t*>(residual.data) + index.offset(residual), residual.stride[3], x);
    else
      write(residual, index, x);
  });
}

// Converts eight channels, rounded to `through` first; words are rounded to no other type.
template <class In>
__device__ void take(const RawVec8<In>& raw, Element through, Vec8& x) {
  raw.convert(x);
  if constexpr (std::is_void_v<In>) round_through(through, x);
}

// The coordinates of a thread: it has one vector of eight channels, and the threads of a row have all vectors of one
// token.
struct Coords {
  int batch, head, vecs, rows, row, channel;
  __device__ explicit Coords(const Strided& from)
      : batch(static_cast<int>(blockIdx.x / static_cast<unsigned>(from.shape[1]))),
        head(static_cast<int>(blockIdx.x % static_cast<unsigned>(from.shape[1]))),
        vecs(static_cast<int>(from.shape[3]) / kVec8),
        rows(kThreads / vecs),
        row(static_cast<int>(threadIdx.x) / vecs),
        channel(static_cast<int>(threadIdx.x) % vecs * kVec8) {}
};

constexpr int kMostChannels = 256, kSampled = 64;

// Statistics of a sample of a head: the largest magnitude of each of its tokens, the limit of its numbers
// (mean_limit.h) and its v_mean.
struct HeadStats {
  float of_token[kSampled], limit, v_mean[kMostChannels];
  float sums[kThreads * kVec8], tops[kThreads * kVec8];  // [row of threads, channel]
};

// Tells whether a key of a head is seen.
struct SeenKeysOfHead {
  SeenTokens by_place;
  const unsigned char* flags;  // null: by their place alone
  __device__ SeenKeysOfHead(const SeenKeys& seen, const TokenFlags& of_mask, const Coords& coords)
      : by_place(seen), flags(of_mask.data ? of_mask.of(coords.batch, coords.head) : nullptr) {}
  __device__ bool operator()(int token) { return by_place(token) && (!flags || flags[token]); }
};

// Finds the limit of head blockIdx.x and, where it is wanted, its v_mean, from an even sample of the tokens that are
// seen. The sample is read twice, because keeping it takes many registers.
template <class In>
__device__ void find_mean(const Strided& from, Element through, const VMean& v_mean, const SeenKeys& seen,
                          const TokenFlags& flags, HeadStats& head_stats) {
  constexpr float kTooLarge = 0x1p100f;  // for sums and differences
  constexpr int kAtOnceSummed =
      16;  // keys that a tensor core sums at once: a mean gains nothing there, and costs v digits
  float(&of_token)[kSampled] = head_stats.of_token;
  float(&sums)[kThreads * kVec8] = head_stats.sums, (&tops)[kThreads * kVec8] = head_stats.tops;
  const Coords coords(from);
  const int tokens = seen.last - seen.first, sampled = min(tokens, kSampled), dim = static_cast<int>(from.shape[3]);
  SeenKeysOfHead sees(seen, flags, coords);
  // Calls f(i, numbers) for this thread's vectors of the sample.
  const auto for_samples = [&](const auto& f) {
    if (coords.row >= coords.rows) return;
#pragma unroll 2
    for (int i = coords.row; i < sampled; i += coords.rows) {
      const int token = seen.first + i * (tokens / sampled);
      RawVec8<In> raw;
      if (sees(token)) raw.load(from, Index4{coords.batch, coords.head, token, coords.channel});
      Vec8 x;
      take(raw, through, x);
      f(i, x);
    }
  };
  if (threadIdx.x < kSampled) of_token[threadIdx.x] = 0.f;
  __syncthreads();
  for_samples([&](int i, const Vec8& x) {
    // Magnitudes order as their bits do.
    atomicMax(reinterpret_cast<int*>(&of_token[i]), __float_as_int(largest_finite(x)));
  });
  const float limit = mean_limit(of_token, head_stats.limit);
  if (!v_mean.data) return;
  Vec8 sum{}, top{};
  for_samples([&](int, const Vec8& x) {
    for (int c = 0; c < kVec8; ++c)
      if (fabsf(x[c]) < limit) sum[c] += x[c], top[c] = fmaxf(top[c], fabsf(x[c]));
  });
  const int rows = min(coords.rows, sampled);
  if (coords.row < rows)
    for (int c = 0; c < kVec8; ++c) {
      const int at = coords.row * dim + coords.channel + c;
      sums[at] = sum[c], tops[at] = top[c];
    }
  __syncthreads();
  for (int c = threadIdx.x; c < v_mean.columns; c += kThreads) {
    float all = 0.f, most = 0.f;
    if (c < dim)
      for (int row = 0; row < rows; ++row) all += sums[row * dim + c], most = fmaxf(most, tops[row * dim + c]);
    const float mean = all / static_cast<float>(max(sampled, 1));
    const bool subtracted = most < kTooLarge && tokens > kAtOnceSummed && 4.f * fabsf(mean) >= most;
    head_stats.v_mean[c] = subtracted ? float(Bf16(mean)) : 0.f;
  }
  __syncthreads();
}

// Vectors that a thread of convert_kernel loads before it stores.
constexpr int kVecsAtOnce = 4;

// Sets to = from - v_mean, in rows of whole 16-byte words, and largest[batch, head][block] to the largest magnitude of
// what each block has of its head. The loads of several vectors come before their stores, as the compiler cannot know
// that the two do not alias; the first loads come before the v_mean, which each block finds itself.
template <class In>
__global__ void __launch_bounds__(kThreads, std::is_void_v<In> ? 2 : 3)
    convert_kernel(const Strided from, const Strided to, Element through, const VMean v_mean, const SeenKeys seen,
                   const TokenFlags flags, float* largest, float* limits) {
  __shared__ HeadStats head_stats;
  __shared__ unsigned most_of_block;
  ptx::griddepcontrol_launch_dependents();
  const Coords coords(from);
  const int tokens = static_cast<int>(from.shape[2]), tokens_per_pass = kVecsAtOnce * coords.rows;
  int token = static_cast<int>(blockIdx.y) * tokens_per_pass + coords.row;
  if (coords.row >= coords.rows) token = tokens;
  SeenKeysOfHead sees(seen, flags, coords);
  RawVec8<In> raw[kVecsAtOnce];
  const auto index_of = [&](int i) {
    return Index4{coords.batch, coords.head, token + i * coords.rows, coords.channel};
  };
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kVecsAtOnce; ++i) {
      raw[i] = RawVec8<In>{};
      if (index_of(i).token < tokens && sees(static_cast<int>(index_of(i).token))) raw[i].load(from, index_of(i));
    }
  };
  load();
  if (threadIdx.x == 0) most_of_block = 0;
  find_mean<In>(from, through, v_mean, seen, flags, head_stats);
  if (blockIdx.y == 0) {
    if (threadIdx.x == 0) limits[blockIdx.x] = head_stats.limit;
    if (v_mean.data)
      for (int c = threadIdx.x; c < v_mean.columns; c += kThreads)
        v_mean.data[static_cast<int64_t>(blockIdx.x) * v_mean.columns + c] = head_stats.v_mean[c];
  }
  Vec8 mean{};
  if (v_mean.data)
    for (int c = 0; c < kVec8; ++c) mean[c] = head_stats.v_mean[coords.channel + c];
  float most = 0.f;
  for (; token < tokens; token += static_cast<int>(gridDim.y) * tokens_per_pass, load()) {
#pragma unroll
    for (int i = 0; i < kVecsAtOnce; ++i) {
      if (index_of(i).token >= tokens) break;
      Vec8 x;
      take(raw[i], through, x);
      for (int c = 0; c < kVec8; ++c) x[c] -= mean[c];
      most = fmaxf(most, largest_finite(x));
      uint4 word;
      for (int c = 0; c < kVec8; c += 2) (&word.x)[c / 2] = ptx::pack<F16>(x[c], x[c + 1]);
      *reinterpret_cast<uint4*>(static_cast<F16*>(to.data) + index_of(i).offset(to)) = word;
    }
  }
  // Magnitudes order as their bits do.
  const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(most));
  if (threadIdx.x % 32 == 0) atomicMax(&most_of_block, bits);
  __syncthreads();
  if (threadIdx.x == 0) largest[blockIdx.x * gridDim.y + blockIdx.y] = __uint_as_float(most_of_block);
}

// Reads eight channels of a head's v_mean.
__device__ void read_mean(const VMean& v_mean, int channel, Vec8& x) {
  float4 words[2]{};
  if (v_mean.data) {
    const auto* from = reinterpret_cast<const float4*>(v_mean.data + int64_t{blockIdx.x} * v_mean.columns + channel);
    words[0] = from[0], words[1] = from[1];
  }
  for (int c = 0; c < kVec8; ++c) x[c] = (&words[c / 4].x)[c % 4];
}

// Repeats the conversion, with a power of two as factor, for heads that f16 does not hold well, and sets scale[batch,
// head] to the inverse of that factor.
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(const Strided from, const Strided to, Element through, const VMean v_mean, const SeenKeys seen,
                   const TokenFlags flags, const VRange range, const float* largest, int blocks, const float* limits,
                   float* scale) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  float most = 0.f;
  for (int i = threadIdx.x % 32; i < blocks; i += 32) most = fmaxf(most, largest[blockIdx.x * blocks + i]);
  most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
  const int exponent = v_exponent(most, limits[blockIdx.x], range);
  if (blockIdx.y == 0 && threadIdx.x == 0) scale[blockIdx.x] = ldexpf(1.f, -exponent);
  if (exponent == 0) return;
  const float by = ldexpf(1.f, exponent), limit = ldexpf(1.f, range.limit);
  SeenKeysOfHead sees(seen, flags, Coords(from));
  for_each_vec8(from, [&](const Index4& index) {
    Vec8 x{};
    if (sees(static_cast<int>(index.token))) read(from, index, x);
    round_through(through, x);
    Vec8 mean;
    read_mean(v_mean, static_cast<int>(index.channel), mean);
    for (int c = 0; c < kVec8; ++c) {
      x[c] = (x[c] - mean[c]) * by;
      if (fabsf(x[c]) >= limit) x[c] = copysignf(INFINITY, x[c]);
    }
    write(to, index, x);
  });
}

// Finds the mean, the limit and the factor of head blockIdx.x of v from a sample, and clears the counters of the kernel
// that converts it.
__global__ void __launch_bounds__(kThreads) v_stats_kernel(const Strided from, const SeenKeys seen, const VSlices v,
                                                           float* limits, float* by, unsigned* counter) {
  __shared__ HeadStats head_stats;
  ptx::griddepcontrol_launch_dependents();
  find_mean<Bf16>(from, Element::bf16, v.v_mean, seen, v.seen, head_stats);
  for (unsigned c = threadIdx.x; c < static_cast<unsigned>(v.v_mean.columns); c += kThreads)
    v.v_mean.data[static_cast<int64_t>(blockIdx.x) * v.v_mean.columns + c] = head_stats.v_mean[c];
  if (threadIdx.x >= 32) return;
  float most = 0.f;
  for (int i = threadIdx.x; i < kSampled; i += 32) most = fmaxf(most, head_stats.of_token[i]);
  most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
  if (threadIdx.x > 0) return;
  // If the sample needs a factor, that factor leaves room for tokens this many times as large as those of the sample.
  constexpr float kRoom = 0x1p6f;
  const float limit = head_stats.limit;
  const int exponent = v_exponent(most, limit) == 0 ? 0 : v_exponent(kRoom * most, limit);
  limits[blockIdx.x] = limit;
  by[blockIdx.x] = ldexpf(1.f, exponent), v.scale[blockIdx.x] = ldexpf(1.f, -exponent);
  v.done[blockIdx.x] = most > 0.f ? 0 : VSlices::kRepeat;  // a sample of zeros tells nothing of the others
  if (blockIdx.x == 0) *v.claimed = 0, *counter = 0;
}

// Returns the number of thread blocks that share the tokens of a (batch, head).
unsigned blocks_of(int64_t tokens, int64_t tokens_per_block) {
  constexpr int64_t kMost = 1024;
  return static_cast<unsigned>(std::clamp<int64_t>((tokens + tokens_per_block - 1) / tokens_per_block, 1, kMost));
}

// Returns a grid with a row of blocks for each (batch, head).
dim3 grid_of(const Strided& x) {
  constexpr int64_t kTokensPerBlock = 64;
  return dim3(static_cast<unsigned>(x.shape[0] * x.shape[1]), blocks_of(x.shape[2], kTokensPerBlock));
}

// Returns the blocks for each (batch, head), so that all heads together have about `all`.
constexpr unsigned kMostOfHead = 64;
unsigned few_of(int64_t heads, int64_t tokens, int64_t tokens_per_block, int64_t all) {
  const auto most = static_cast<unsigned>(std::clamp<int64_t>(all / heads, 1, kMostOfHead));
  return std::min(blocks_of(tokens, tokens_per_block), most);
}

// Returns true if the rows are whole 16-byte words.
bool in_words(const Strided& x) {
  constexpr int64_t kElements = 8;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[3] == 1 && x.stride[0] % kElements == 0 &&
         x.stride[1] % kElements == 0 && x.stride[2] % kElements == 0;
}

}  // namespace

void cast(const Strided& from, const Strided& to, Element through, cudaStream_t stream) {
  if (!from.shape[0] || !from.shape[1] || !from.shape[2]) return;
  cast_kernel<<<grid_of(from), kThreads, 0, stream>>>(from, to, through);
  check(cudaGetLastError(), "cast");
}

void residual_of_cast(const Strided& from, const Strided& to, const Strided& residual, cudaStream_t stream) {
  if (!from.shape[0] || !from.shape[1] || !from.shape[2]) return;
  residual_kernel<<<grid_of(from), kThreads, 0, stream>>>(from, to, residual);
  check(cudaGetLastError(), "residual_of_cast");
}

std::size_t convert_scratch(const Strided& from) {
  return static_cast<std::size_t>(from.shape[0] * from.shape[1] * (1 + kMostOfHead));
}

void convert_to_f16(const Strided& from, const Strided& to, Element through, const VMean& v_mean, const SeenKeys& seen,
                    const TokenFlags& flags, const VRange& range, float* scratch, float* scale, cudaStream_t stream) {
  const int64_t heads = from.shape[0] * from.shape[1];
  if (!heads || !from.shape[2]) return;
  const bool words = from.element == Element::bf16 && through == Element::bf16 && in_words(from);
  const int64_t tokens_per_block = kVecsAtOnce * (kThreads / (from.shape[3] / kVec8));
  // The blocks that all multiprocessors hold at a time.
  const int64_t in_flight = int64_t{3} * current_card().multiprocessors, rescaling_in_flight = in_flight * 5 / 3;
  const unsigned blocks = few_of(heads, from.shape[2], tokens_per_block, in_flight);
  float *const limits = scratch, *const largest = scratch + heads;
  const auto convert = words ? convert_kernel<Bf16> : convert_kernel<void>;
  convert<<<dim3(static_cast<unsigned>(heads), blocks), kThreads, 0, stream>>>(from, to, through, v_mean, seen, flags,
                                                                               largest, limits);
  check(cudaGetLastError(), "convert_kernel");
  const float *largest_found = largest, *limits_found = limits;
  const dim3 rescaling(static_cast<unsigned>(heads),
                       few_of(heads, from.shape[2], tokens_per_block, rescaling_in_flight));
  launch_general_pdl(rescale_kernel, rescaling, kThreads, 0, stream, from, to, through, v_mean, seen, flags, range,
                     largest_found, static_cast<int>(blocks), limits_found, scale);
}

bool converts_in_slices(const Strided& from, Element through, const SeenKeys& seen) {
  return from.element == Element::bf16 && through == Element::bf16 && in_words(from) && seen.all &&
         from.stride[2] <= INT_MAX && from.shape[0] * from.shape[1] > 0 && from.shape[2] > 0;
}

VSlices find_v_stats(const Strided& from, const Strided& to, const VMean& v_mean, const SeenKeys& seen,
                     const TokenFlags& flags, float* scratch, float* scale, unsigned* counter, cudaStream_t stream) {
  constexpr unsigned kWordsOfThread = 16;  // in a slice
  const auto heads = static_cast<unsigned>(from.shape[0] * from.shape[1]);
  float *const limits = scratch, *const by = scratch + heads;
  VSlices v{.heads = heads,
            .from = static_cast<const Bf16*>(from.data),
            .batch_stride = from.stride[0],
            .head_stride = from.stride[1],
            .token_stride = static_cast<unsigned>(from.stride[2]),
            .kv_heads = static_cast<unsigned>(from.shape[1]),
            .tokens = static_cast<unsigned>(from.shape[2]),
            .dim = static_cast<unsigned>(from.shape[3]),
            .to = static_cast<F16*>(to.data),
            .seen = flags,
            .v_mean = v_mean,
            .limits = limits,
            .by = by,
            .scale = scale,
            .done = reinterpret_cast<unsigned*>(scratch + 2 * heads),
            .claimed = reinterpret_cast<unsigned*>(scratch + 3 * heads)};
  v.slice_tokens = kWordsOfThread * (32 / (v.dim / kVec8));
  v.of_head = (v.tokens + v.slice_tokens - 1) / v.slice_tokens;
  v_stats_kernel<<<heads, kThreads, 0, stream>>>(from, seen, v, limits, by, counter);
  check(cudaGetLastError(), "v_stats_kernel");
  return v;
}

}  // namespace octet::cuda
