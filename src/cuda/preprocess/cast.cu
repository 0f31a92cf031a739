#include <algorithm>
#include <type_traits>

#include "cuda/fragment/mask.h"
#include "cuda/host/launch.h"
#include "cuda/preprocess/cast.h"
#include "cuda/preprocess/mean_limit.h"
#include "cuda/preprocess/vec8.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/warpgroup.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
// Calls f(line) for this thread's lines of head blockIdx.x, the tokens shared among blockIdx.y.
template <class F>
__device__ void for_each_line(const Strided& t, const F& f) {
  const int lines = static_cast<int>(t.shape[3]) / kVec8, rows = kThreads / lines;
  const int row = threadIdx.x / lines;
  if (row >= rows) return;
  Index4 line{blockIdx.x / t.shape[1], blockIdx.x % t.shape[1], 0, threadIdx.x % lines * kVec8};
#pragma unroll 4
  for (int64_t token = static_cast<int64_t>(blockIdx.y) * rows + row; token < t.shape[2]; token += gridDim.y * rows) {
    line.token = token;
    f(line);
  }
}

// A round through a type of less precision. What comes out is hidden from the compiler, which else makes code of its
// own for each pair of that type and the type written, in half a minute.
__device__ void round_through(Element through, Vec8& x) {
  m_block(through, [&](auto* type) {
    for (float& element : x) element = float(static_cast<std::remove_pointer_t<decltype(type)>>(element));
  });
  for (float& element : x) element = ptx::opaque(element);
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const Strided from, const Strided to, Element through) {
  for_each_line(from, [&](const Index4& line) {
    Vec8 x;
    read(from, line, x);
    round_through(through, x);
    write(to, line, x);
  });
}

// Eight channels, rounded to `through` first; words are rounded to no other type.
template <class In>
__device__ void take(const RawVec8<In>& raw, Element through, Vec8& x) {
  raw.convert(x);
  if constexpr (std::is_void_v<In>) round_through(through, x);
}

// Each thread has one line of eight channels; the threads of a row have all lines of one token.
struct Place {
  int batch, head, lines, rows, row, channel;
  __device__ explicit Place(const Strided& from)
      : batch(static_cast<int>(blockIdx.x / static_cast<unsigned>(from.shape[1]))),
        head(static_cast<int>(blockIdx.x % static_cast<unsigned>(from.shape[1]))),
        lines(static_cast<int>(from.shape[3]) / kVec8),
        rows(kThreads / lines),
        row(static_cast<int>(threadIdx.x) / lines),
        channel(static_cast<int>(threadIdx.x) % lines * kVec8) {}
};

constexpr int kMostChannels = 256;

// A sample of a head gives the limit of its numbers (mean_limit.h) and its v_mean.
struct Found {
  float limit, v_mean[kMostChannels];
};

// The limit of head blockIdx.x and, where it is wanted, its v_mean, from an even sample of the tokens that are seen. It
// is read twice, as it takes many registers.
template <class In>
__device__ void find_mean(const Strided& from, Element through, const VMean& v_mean, const SeenKeys& seen,
                          Found& found) {
  constexpr int kSampled = 64;
  constexpr float kTooLarge = 0x1p100f;  // for sums and differences
  constexpr int kAtOnceSummed = 16;      // keys, by a tensor core: sums of so few gain nothing, and v would lose digits
  __shared__ float sums[kThreads * kVec8], tops[kThreads * kVec8];  // [row of threads, channel]
  __shared__ float of_token[kSampled];
  const Place place(from);
  const int tokens = seen.last - seen.first, sampled = min(tokens, kSampled), dim = static_cast<int>(from.shape[3]);
  SeenTokens sees(seen);
  // Calls f(i, numbers) for this thread's lines of the sample.
  const auto for_samples = [&](const auto& f) {
    if (place.row >= place.rows) return;
#pragma unroll 2
    for (int i = place.row; i < sampled; i += place.rows) {
      const int token = seen.first + i * (tokens / sampled);
      RawVec8<In> loaded;
      if (sees(token)) loaded.load(from, Index4{place.batch, place.head, token, place.channel});
      Vec8 x;
      take(loaded, through, x);
      f(i, x);
    }
  };
  if (threadIdx.x < kSampled) of_token[threadIdx.x] = 0.f;
  __syncthreads();
  for_samples([&](int i, const Vec8& x) {
    // Magnitudes order as their bits do.
    atomicMax(reinterpret_cast<int*>(&of_token[i]), __float_as_int(largest_finite(x)));
  });
  const float limit = mean_limit(of_token, found.limit);
  if (!v_mean.data) return;
  Vec8 sum{}, top{};
  for_samples([&](int, const Vec8& x) {
    for (int c = 0; c < kVec8; ++c)
      if (fabsf(x[c]) < limit) sum[c] += x[c], top[c] = fmaxf(top[c], fabsf(x[c]));
  });
  const int rows = min(place.rows, sampled);
  if (place.row < rows)
    for (int c = 0; c < kVec8; ++c) {
      const int at = place.row * dim + place.channel + c;
      sums[at] = sum[c], tops[at] = top[c];
    }
  __syncthreads();
  for (int c = threadIdx.x; c < v_mean.columns; c += kThreads) {
    float all = 0.f, most = 0.f;
    if (c < dim)
      for (int row = 0; row < rows; ++row) all += sums[row * dim + c], most = fmaxf(most, tops[row * dim + c]);
    const float mean = all / static_cast<float>(max(sampled, 1));
    const bool subtracted = most < kTooLarge && tokens > kAtOnceSummed && 4.f * fabsf(mean) >= most;
    found.v_mean[c] = subtracted ? float(Bf16(mean)) : 0.f;
  }
  __syncthreads();
}

// Lines that a thread of convert_kernel reads before it writes.
constexpr int kLinesAtOnce = 4;

// to = from - v_mean, in rows of whole 16-byte words, and the largest magnitude of what each block has of its head,
// [batch, head][block]. All loads of a few lines come before their stores, as the compiler cannot know that the two do
// not alias; the first ones come before the v_mean, which each block finds itself.
template <class In>
__global__ void __launch_bounds__(kThreads, std::is_void_v<In> ? 2 : 3)
    convert_kernel(const Strided from, const Strided to, Element through, const VMean v_mean, const SeenKeys seen,
                   float* largest, float* limits) {
  __shared__ Found found;
  __shared__ unsigned most_of_block;
  ptx::griddepcontrol_launch_dependents();
  const Place place(from);
  const int tokens = static_cast<int>(from.shape[2]), step = kLinesAtOnce * place.rows;
  int token = static_cast<int>(blockIdx.y) * step + place.row;
  if (place.row >= place.rows) token = tokens;
  SeenTokens sees(seen);
  RawVec8<In> loaded[kLinesAtOnce];
  const auto line_of = [&](int i) { return Index4{place.batch, place.head, token + i * place.rows, place.channel}; };
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kLinesAtOnce; ++i) {
      loaded[i] = RawVec8<In>{};
      if (line_of(i).token < tokens && sees(static_cast<int>(line_of(i).token))) loaded[i].load(from, line_of(i));
    }
  };
  load();
  if (threadIdx.x == 0) most_of_block = 0;
  find_mean<In>(from, through, v_mean, seen, found);
  if (blockIdx.y == 0) {
    if (threadIdx.x == 0) limits[blockIdx.x] = found.limit;
    if (v_mean.data)
      for (int c = threadIdx.x; c < v_mean.columns; c += kThreads)
        v_mean.data[static_cast<int64_t>(blockIdx.x) * v_mean.columns + c] = found.v_mean[c];
  }
  Vec8 less{};
  if (v_mean.data)
    for (int c = 0; c < kVec8; ++c) less[c] = found.v_mean[place.channel + c];
  float most = 0.f;
  for (; token < tokens; token += static_cast<int>(gridDim.y) * step, load()) {
#pragma unroll
    for (int i = 0; i < kLinesAtOnce; ++i) {
      if (line_of(i).token >= tokens) break;
      Vec8 x;
      take(loaded[i], through, x);
      for (int c = 0; c < kVec8; ++c) x[c] -= less[c];
      most = fmaxf(most, largest_finite(x));
      uint4 word;
      for (int c = 0; c < kVec8; c += 2) (&word.x)[c / 2] = ptx::pack<F16>(x[c], x[c + 1]);
      *reinterpret_cast<uint4*>(static_cast<F16*>(to.data) + line_of(i).offset(to)) = word;
    }
  }
  // Magnitudes order as their bits do.
  const unsigned bits = __reduce_max_sync(~0u, __float_as_uint(most));
  if (threadIdx.x % 32 == 0) atomicMax(&most_of_block, bits);
  __syncthreads();
  if (threadIdx.x == 0) largest[blockIdx.x * gridDim.y + blockIdx.y] = __uint_as_float(most_of_block);
}

// Eight channels of a head's v_mean.
__device__ void read_mean(const VMean& v_mean, int channel, Vec8& x) {
  float4 words[2]{};
  if (v_mean.data) {
    const auto* from = reinterpret_cast<const float4*>(v_mean.data + int64_t{blockIdx.x} * v_mean.columns + channel);
    words[0] = from[0], words[1] = from[1];
  }
  for (int c = 0; c < kVec8; ++c) x[c] = (&words[c / 4].x)[c % 4];
}

// Does over, times a power of two, the heads that `to` does not hold well: scale[batch, head] is what it was divided
// by.
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(const Strided from, const Strided to, Element through, const VMean v_mean, const SeenKeys seen,
                   const float* largest, int blocks, const float* limits, float* scale) {
  // Typical numbers, a sixteenth of the limit, shall not lie below 2^-11, as those of f16 lose bits from 2^-14 on.
  constexpr float kLeast = 0x1p-7f;
  constexpr int kLeastExponent = -7;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  float most = 0.f;
  for (int i = threadIdx.x % 32; i < blocks; i += 32) most = fmaxf(most, largest[blockIdx.x * blocks + i]);
  most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
  const float limit = limits[blockIdx.x];
  const bool typical = limit > 0.f && limit < INFINITY;
  const bool fits = most == 0.f || (most >= 0x1p-2f && most < 0x1p15f && !(typical && limit < kLeast));
  int exponent = 0;
  if (!fits) {
    exponent = 13 - ilogbf(most);
    if (typical) exponent = max(exponent, kLeastExponent - ilogbf(limit));
    exponent = min(max(exponent, -114), 112);  // all of float32's normal numbers become f16's, and o gets floats back
  }
  if (blockIdx.y == 0 && threadIdx.x == 0) scale[blockIdx.x] = ldexpf(1.f, -exponent);
  if (fits) return;
  const float by = ldexpf(1.f, exponent);
  SeenTokens sees(seen);
  for_each_line(from, [&](const Index4& line) {
    Vec8 x{};
    if (sees(static_cast<int>(line.token))) read(from, line, x);
    round_through(through, x);
    Vec8 less;
    read_mean(v_mean, static_cast<int>(line.channel), less);
    for (int c = 0; c < kVec8; ++c) x[c] = (x[c] - less[c]) * by;
    write(to, line, x);
  });
}

// The number of thread blocks that share the tokens of a (batch, head).
unsigned blocks_of(int64_t tokens, int64_t tokens_per_block) {
  constexpr int64_t kMost = 1024;
  return static_cast<unsigned>(std::clamp<int64_t>((tokens + tokens_per_block - 1) / tokens_per_block, 1, kMost));
}

// A row of blocks for each (batch, head).
dim3 grid_of(const Strided& x) {
  constexpr int64_t kTokensPerBlock = 64;
  return dim3(static_cast<unsigned>(x.shape[0] * x.shape[1]), blocks_of(x.shape[2], kTokensPerBlock));
}

// Blocks for each (batch, head), about `all` together.
constexpr unsigned kMostOfHead = 64;
unsigned few_of(int64_t heads, int64_t tokens, int64_t tokens_per_block, int64_t all) {
  const auto most = static_cast<unsigned>(std::clamp<int64_t>(all / heads, 1, kMostOfHead));
  return std::min(blocks_of(tokens, tokens_per_block), most);
}

// Rows of whole 16-byte words.
bool in_words(const Strided& x) {
  constexpr int64_t kElements = 8;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[3] == 1 && x.stride[0] % kElements == 0 &&
         x.stride[1] % kElements == 0 && x.stride[2] % kElements == 0;
}

}  // namespace

void copy(const Strided& from, const Strided& to, Element through, cudaStream_t stream) {
  if (!from.shape[0] || !from.shape[1] || !from.shape[2]) return;
  copy_kernel<<<grid_of(from), kThreads, 0, stream>>>(from, to, through);
  check(cudaGetLastError(), "copy");
}

std::size_t convert_scratch(const Strided& from) {
  return static_cast<std::size_t>(from.shape[0] * from.shape[1] * (1 + kMostOfHead));
}

void convert_to_f16(const Strided& from, const Strided& to, Element through, const VMean& v_mean, const SeenKeys& seen,
                    float* scratch, float* scale, cudaStream_t stream) {
  const int64_t heads = from.shape[0] * from.shape[1];
  if (!heads || !from.shape[2]) return;
  const bool words = from.element == Element::bf16 && through == Element::bf16 && in_words(from);
  const int64_t tokens_per_block = kLinesAtOnce * (kThreads / (from.shape[3] / kVec8));
  constexpr int64_t kInFlight = 396, kRescaling = 640;  // blocks: what a GPU of 132 multiprocessors works on at a time
  const unsigned blocks = few_of(heads, from.shape[2], tokens_per_block, kInFlight);
  float *const limits = scratch, *const largest = scratch + heads;
  const auto convert = words ? convert_kernel<Bf16> : convert_kernel<void>;
  convert<<<dim3(static_cast<unsigned>(heads), blocks), kThreads, 0, stream>>>(from, to, through, v_mean, seen, largest,
                                                                               limits);
  check(cudaGetLastError(), "convert_kernel");
  const float *found = largest, *of_heads = limits;
  const dim3 rescaling(static_cast<unsigned>(heads), few_of(heads, from.shape[2], tokens_per_block, kRescaling));
  launch_pdl(rescale_kernel, rescaling, kThreads, 0, stream, from, to, through, v_mean, seen, found,
             static_cast<int>(blocks), of_heads, scale);
}

}  // namespace octet::cuda
