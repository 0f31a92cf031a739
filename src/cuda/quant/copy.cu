#include <algorithm>
#include <type_traits>

#include "cuda/attn/mask.h"
#include "cuda/host/launch.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/warpgroup.h"
#include "cuda/quant/copy.h"
#include "cuda/quant/elements.h"
#include "cuda/quant/limits.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
// Calls f(line) for this thread's lines of head blockIdx.x, the tokens shared among blockIdx.y.
template <class F>
__device__ void for_each_line(const Strided& t, const F& f) {
  const int lines = static_cast<int>(t.shape[3]) / kVector, rows = kThreads / lines;
  const int row = threadIdx.x / lines;
  if (row >= rows) return;
  Line line{blockIdx.x / t.shape[1], blockIdx.x % t.shape[1], 0, threadIdx.x % lines * kVector};
#pragma unroll 4
  for (int64_t token = static_cast<int64_t>(blockIdx.y) * rows + row; token < t.shape[2]; token += gridDim.y * rows) {
    line.token = token;
    f(line);
  }
}

// A round through a type of less precision. What comes out is hidden from the compiler, which else makes code of its
// own for each pair of that type and the type written, in half a minute.
__device__ void round_through(Element through, Vector& x) {
  visit(through, [&](auto* type) {
    for (float& element : x) element = float(static_cast<std::remove_pointer_t<decltype(type)>>(element));
  });
  for (float& element : x) element = ptx::hidden(element);
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const Strided from, const Strided to, Element through) {
  for_each_line(from, [&](const Line& line) {
    Vector x;
    read(from, line, x);
    round_through(through, x);
    write(to, line, x);
  });
}

// Eight channels as they lie in memory. `In`: the type of all, whose rows are whole 16-byte words, or void for any type
// and strides.
template <class In>
struct Loaded {
  union {
    uint4 word;
    In elements[kVector];
  };
  __device__ void load(const Strided& t, const Line& line) {
    word = *reinterpret_cast<const uint4*>(static_cast<const In*>(t.data) + line.offset(t));
  }
  __device__ void get(Vector& x) const {
    for (int i = 0; i < kVector; ++i) x[i] = float(elements[i]);
  }
};
template <>
struct Loaded<void> {
  Vector x;
  __device__ void load(const Strided& t, const Line& line) { read(t, line, x); }
  __device__ void get(Vector& to) const {
    for (int i = 0; i < kVector; ++i) to[i] = x[i];
  }
};

// The limit of head blockIdx.x (limits.h) and, where it is wanted, its center, from an even sample of the tokens that
// are seen. Sets `largest` to 0.
template <class In>
__global__ void __launch_bounds__(kThreads) center_kernel(const Strided from, Element through, const Center center,
                                                          const SeenKeys seen, unsigned* largest, float* limits) {
  constexpr int kRows = 8, kOfRow = 8, kSampled = kRows * kOfRow, kMostLines = kThreads / kRows;
  constexpr float kTooLarge = 0x1p100f;  // for sums and differences
  constexpr int kAtOnceSummed = 16;      // keys, by a tensor core: sums of so few gain nothing, and v would lose digits
  __shared__ float sums[kRows][kMostLines * kVector], tops[kRows][kMostLines * kVector];
  __shared__ float of_token[kSampled], limit_shared;
  const int dim = static_cast<int>(from.shape[3]), lines = dim / kVector, tokens = seen.last - seen.first;
  const int row = threadIdx.x / lines, channel = threadIdx.x % lines * kVector, sampled = min(tokens, kSampled);
  const int64_t batch = blockIdx.x / from.shape[1], head = blockIdx.x % from.shape[1];
  const auto line_of = [&](int i) {
    return Line{batch, head, seen.first + (row * kOfRow + i) * (tokens / sampled), channel};
  };
  SeenTokens sees(seen);
  ptx::next_grid_may_start();
  if (threadIdx.x == 0) largest[blockIdx.x] = 0;
  if (threadIdx.x < kSampled) of_token[threadIdx.x] = 0.f;
  __syncthreads();
  const int count = row < kRows ? min(sampled - row * kOfRow, kOfRow) : 0;  // of this row of threads
  Loaded<In> loaded[kOfRow]{};
#pragma unroll
  for (int i = 0; i < kOfRow; ++i)
    if (i < count && sees(static_cast<int>(line_of(i).token))) loaded[i].load(from, line_of(i));
  const auto number = [&](int i, Vector& x) { loaded[i].get(x), round_through(through, x); };
#pragma unroll
  for (int i = 0; i < kOfRow; ++i) {
    if (i >= count) break;
    Vector x;
    number(i, x);
    // Magnitudes order as their bits do.
    atomicMax(reinterpret_cast<int*>(&of_token[row * kOfRow + i]), __float_as_int(largest_finite(x)));
  }
  const float limit = mean_limit(of_token, limit_shared);
  if (threadIdx.x == 0) limits[blockIdx.x] = limit;
  if (!center.data) return;
  if (row < kRows) {
    Vector sum{}, top{};
#pragma unroll
    for (int i = 0; i < kOfRow; ++i) {
      if (i >= count) break;
      Vector x;
      number(i, x);
      for (int c = 0; c < kVector; ++c)
        if (fabsf(x[c]) < limit) sum[c] += x[c], top[c] = fmaxf(top[c], fabsf(x[c]));
    }
    for (int c = 0; c < kVector; ++c) sums[row][channel + c] = sum[c], tops[row][channel + c] = top[c];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < center.columns; c += kThreads) {
    float sum = 0.f, top = 0.f;
    if (c < dim)
      for (int r = 0; r < kRows; ++r) sum += sums[r][c], top = fmaxf(top, tops[r][c]);
    const float mean = sum / static_cast<float>(max(sampled, 1));
    center.data[static_cast<int64_t>(blockIdx.x) * center.columns + c] =
        top < kTooLarge && tokens > kAtOnceSummed && 4.f * fabsf(mean) >= top ? float(Bf16(mean)) : 0.f;
  }
}

// Eight channels of a head's center.
__device__ void read_center(const Center& center, int channel, Vector& x) {
  float4 words[2]{};
  if (center.data) {
    const auto* from = reinterpret_cast<const float4*>(center.data + int64_t{blockIdx.x} * center.columns + channel);
    words[0] = from[0], words[1] = from[1];
  }
  for (int c = 0; c < kVector; ++c) x[c] = (&words[c / 4].x)[c % 4];
}

// to = from less its center, and the largest magnitude of each (batch, head), as bits, which order as magnitudes do.
// All loads of a few lines come before their stores, as the compiler cannot know that the two do not alias; the first
// ones come before the center, too.
template <class In>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const Strided from, const Strided to, Element through, const Center center, const SeenKeys seen,
                   unsigned* largest) {
  constexpr int kAtOnce = 4;
  ptx::next_grid_may_start();
  const int lines = static_cast<int>(from.shape[3]) / kVector, rows = kThreads / lines, row = threadIdx.x / lines;
  const int64_t batch = blockIdx.x / from.shape[1], head = blockIdx.x % from.shape[1];
  const int channel = threadIdx.x % lines * kVector;
  Vector less;
  SeenTokens sees(seen);
  bool waited = false;
  unsigned most = 0;
  if (row < rows)
    for (int64_t token = static_cast<int64_t>(blockIdx.y) * kAtOnce * rows + row; token < from.shape[2];
         token += static_cast<int64_t>(gridDim.y) * kAtOnce * rows) {
      Loaded<In> loaded[kAtOnce]{};
      const auto line_of = [&](int i) { return Line{batch, head, token + i * rows, channel}; };
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (line_of(i).token < from.shape[2] && sees(static_cast<int>(line_of(i).token)))
          loaded[i].load(from, line_of(i));
      if (!waited) ptx::wait_for_previous_grid(), read_center(center, channel, less), waited = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (line_of(i).token >= from.shape[2]) break;
        Vector x;
        loaded[i].get(x);
        round_through(through, x);
        for (int c = 0; c < kVector; ++c) x[c] -= less[c];
        for (const float element : x)
          if (isfinite(element)) most = max(most, __float_as_uint(fabsf(element)));
        write(to, line_of(i), x);
      }
    }
  if (!waited) ptx::wait_for_previous_grid();
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) atomicMax(&largest[blockIdx.x], most);
}

// Does over, times a power of two, the heads that `to` does not hold well: scale[batch, head] is what it was divided
// by.
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(const Strided from, const Strided to, Element through, const Center center, const SeenKeys seen,
                   const unsigned* largest, const float* limits, float* scale) {
  // Typical numbers, a sixteenth of the limit, shall not lie below 2^-11, as those of f16 lose bits from 2^-14 on.
  constexpr float kLeast = 0x1p-7f;
  constexpr int kLeastExponent = -7;
  ptx::next_grid_may_start();
  ptx::wait_for_previous_grid();
  const float most = __uint_as_float(largest[blockIdx.x]), limit = limits[blockIdx.x];
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
  for_each_line(from, [&](const Line& line) {
    Vector x{};
    if (sees(static_cast<int>(line.token))) read(from, line, x);
    round_through(through, x);
    Vector less;
    read_center(center, static_cast<int>(line.channel), less);
    for (int c = 0; c < kVector; ++c) x[c] = (x[c] - less[c]) * by;
    write(to, line, x);
  });
}

// A row of blocks for each (batch, head).
dim3 grid_of(const Strided& x) {
  constexpr int64_t kMost = 1024, kTokensPerBlock = 64;
  return dim3(static_cast<unsigned>(x.shape[0] * x.shape[1]),
              static_cast<unsigned>(std::clamp<int64_t>(x.shape[2] / kTokensPerBlock, 1, kMost)));
}

// Some blocks for each (batch, head), as many as the GPU works on at a time.
dim3 few_of(const Strided& x) {
  constexpr int64_t kBlocks = 640;
  const dim3 grid = grid_of(x);
  return dim3(grid.x, std::min(grid.y, static_cast<unsigned>(kBlocks / grid.x + 1)));
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

void convert_to_f16(const Strided& from, const Strided& to, Element through, const Center& center, const SeenKeys& seen,
                    unsigned* largest, float* scale, cudaStream_t stream) {
  const int64_t heads = from.shape[0] * from.shape[1];
  if (!heads || !from.shape[2]) return;
  const bool words = from.element == Element::bf16 && in_words(from);
  auto* const limits = reinterpret_cast<float*>(largest + heads);
  const auto find = words ? center_kernel<Bf16> : center_kernel<void>;
  find<<<static_cast<unsigned>(heads), kThreads, 0, stream>>>(from, through, center, seen, largest, limits);
  check(cudaGetLastError(), "center_kernel");
  const auto convert = words ? convert_kernel<Bf16> : convert_kernel<void>;
  launch_after(convert, grid_of(from), kThreads, 0, stream, from, to, through, center, seen, largest);
  const unsigned* found = largest;
  const float* of_heads = limits;
  launch_after(rescale_kernel, few_of(from), kThreads, 0, stream, from, to, through, center, seen, found, of_heads,
               scale);
}

}  // namespace octet::cuda
