// Converts v to f16 beside the mainloop. operands/v_slices.h has what is converted.
#pragma once
#include <cuda/atomic>
#include <cuda/ptx>
#include <type_traits>

#include "cuda/operands/mean_limit.h"
#include "cuda/operands/v_slices.h"
#include "cuda/ptx/flags.h"
#include "cuda/ptx/warpgroup.h"

namespace octet::cuda::sm90 {

// The conversion by one warp. `masked`: a mask tensor may hide tokens; `centred`: a mean is subtracted.
template <bool masked, bool centred>
struct VConverter {
  const VSlices& a;

  // Takes the next slice. The caller converts it, unless there is none.
  __device__ unsigned claim() const {
    unsigned slice = 0;
    if (lane() == 0) slice = atomicAdd(a.claimed, 1u);
    return __shfl_sync(~0u, slice, 0);
  }
  __device__ bool exists(unsigned slice) const { return slice < a.heads * a.of_head; }

  // Converts a slice. A thread has `channels` of a token, which are a word, and loads `at_once` words before it stores
  // the first.
  template <int channels, int at_once>
  __device__ void convert(unsigned slice) const {
    const unsigned head = slice / a.of_head;
    unsigned first = slice % a.of_head * a.slice_tokens, last = min(first + a.slice_tokens, a.tokens);
    float by = a.by[head];
    for (bool whole = false;; whole = true) {
      const bool fits = Column<channels>(a, head).template round<at_once>(first, last, by);
      ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_global);  // TMA reads what was stored
      if (whole) break;
      if (!fits) atomicOr(&a.done[head], VSlices::kRepeat);
      __syncwarp();
      unsigned before = 0;
      if (lane() == 0) before = ptx::count(a.done[head]);
      if (__shfl_sync(~0u, before, 0) + 1 != (VSlices::kRepeat | a.of_head)) return;
      // This was the last slice of a head that needs another factor.
      first = 0, last = a.tokens;
      by = ldexpf(1.f, v_exponent(Column<channels>(a, head).largest(), a.limits[head]));
    }
    __syncwarp();
    if (lane() > 0) return;
    a.scale[head] = 1.f / by;
    done(head).store(a.of_head, ::cuda::memory_order_release);
  }

  // Waits until TMA can read all tokens of a head.
  __device__ void await(unsigned head) const {
    if (!a.heads) return;
    while (done(head).load(::cuda::memory_order_acquire) != a.of_head) __nanosleep(50);
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_global);
  }

 private:
  static __device__ unsigned lane() { return threadIdx.x % 32; }
  __device__ ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> done(unsigned head) const {
    return ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device>(a.done[head]);
  }

  // The numbers of a head that a thread converts: some channels of every `rows`-th token from `row` on.
  template <int channels>
  struct Column {
    using Word = std::conditional_t<channels == 8, uint4, uint2>;
    const VSlices& a;
    unsigned row, rows;
    const Bf16* from;
    F16* to;
    const float* mean;
    const unsigned char* seen;
    __device__ Column(const VSlices& a, unsigned head) : a(a) {
      const unsigned thread = lane(), words = a.dim / channels, channel = thread % words * channels;
      row = thread / words, rows = 32 / words;
      if (row >= rows) row = a.tokens;
      from = a.from + head / a.kv_heads * a.batch_stride + head % a.kv_heads * a.head_stride + channel;
      to = a.to + static_cast<int64_t>(head) * a.tokens * a.dim + channel;
      if constexpr (centred) mean = a.v_mean.data + head * a.v_mean.columns + channel;
      if constexpr (masked) seen = a.seen.of(static_cast<int>(head / a.kv_heads), static_cast<int>(head % a.kv_heads));
    }
    __device__ Word load(const Bf16* from, unsigned token) const {
      if (masked && !seen[token]) return {};
      return *reinterpret_cast<const Word*>(from);
    }

    // Rounds `by` times tokens [first, last); returns false if a number is beyond f16.
    template <int at_once>
    __device__ bool round(unsigned first, unsigned last, float by) const {
      float offset[channels];
#pragma unroll
      for (int c = 0; c < channels; ++c) offset[c] = centred ? -by * mean[c] : 0.f;
      const Bf16* load_from = from + static_cast<int64_t>(first + row) * a.token_stride;
      F16* store_to = to + static_cast<int64_t>(first + row) * a.dim;
      const int64_t step = static_cast<int64_t>(rows) * a.token_stride;
      uint32_t most = 0;  // two magnitudes, which order as their bits do
#pragma unroll 1
      for (unsigned token = first + row; token < last; token += at_once * rows) {
        Word words[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i, load_from += step)
          if (token + i * rows < last) words[i] = load(load_from, token + i * rows);
#pragma unroll
        for (int i = 0; i < at_once; ++i, store_to += rows * a.dim) {
          if (token + i * rows >= last) break;
          uint32_t* const pairs = &words[i].x;
#pragma unroll
          for (int pair = 0; pair < channels / 2; ++pair) {
            const float2 x = ptx::unpack<Bf16>(pairs[pair]);
            pairs[pair] =
                ptx::pack<F16>(__fmaf_rn(x.x, by, offset[2 * pair]), __fmaf_rn(x.y, by, offset[2 * pair + 1]));
            most = __vmaxu2(most, pairs[pair] & 0x7fff7fffu);
          }
          *reinterpret_cast<Word*>(store_to) = words[i];
        }
      }
      constexpr uint32_t kTooLarge = 0x7800;  // 2^15; NaN is larger
      return (most & 0xffffu) < kTooLarge && most >> 16 < kTooLarge;
    }

    // Returns the largest finite magnitude of a head, its mean subtracted.
    __device__ float largest() const {
      float most = 0.f;
#pragma unroll 1
      for (unsigned token = row; token < a.tokens; token += rows) {
        const Word word = load(from + static_cast<int64_t>(token) * a.token_stride, token);
        Vec8 x{};
        for (int pair = 0; pair < channels / 2; ++pair) {
          const float2 two = ptx::unpack<Bf16>((&word.x)[pair]);
          x[2 * pair] = two.x, x[2 * pair + 1] = two.y;
          if constexpr (centred) x[2 * pair] -= mean[2 * pair], x[2 * pair + 1] -= mean[2 * pair + 1];
        }
        most = fmaxf(most, largest_finite(x));
      }
      // Magnitudes order as their bits do.
      return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
    }
  };
};

}  // namespace octet::cuda::sm90
