// Tiles of float32 in shared memory and their products without tensor cores, for jvp in f32.
#pragma once
#include "cuda/fragment/output.h"

namespace octet::cuda::sm80 {

constexpr int kF32Threads = 256;

// A thread block computes the sums of `kRows` tokens over tiles of other tokens. A row of a tile is a token. Each
// thread has four channels of `kRowsOfThread` sums.
template <int Dim>
struct F32Tiles {
  static constexpr int kRows = Dim == 256 ? 16 : 32;
  static constexpr int kPitch = Dim + 4;  // floats; rows of four floats lie in different banks
  static constexpr int kPairPitch = kRows + 4;
  static constexpr int kChannelGroups = Dim / 4, kRowGroups = kF32Threads / kChannelGroups;
  static constexpr int kRowsOfThread = kRows / kRowGroups;
  static_assert(kRowsOfThread >= 1 && kRowsOfThread * kRowGroups == kRows);

  template <int Rows>
  using Tile = float[Rows][kPitch];
  template <int Rows>
  using Pairs = float[Rows][kPairPitch];  // a number for each token of a tile and each token of the thread block
  using Sums = float4[kRowsOfThread];

  static __device__ int first_row() { return threadIdx.x / kChannelGroups * kRowsOfThread; }
  static __device__ int first_channel() { return threadIdx.x % kChannelGroups * 4; }

  // Loads the tokens from `first` on of a sequence that begins at token `start`. Those from `last` on and the channels
  // from `channels` on become zeros. Sets `nonfinite` to 1 where a number is not finite. `batch` may be in shared
  // memory.
  template <int Rows>
  static __device__ void load(Tile<Rows>& to, int& nonfinite, const Output& from, const int& batch, int head, int start,
                              int first, int last, int channels) {
    bool finite = true;
    for (int i = threadIdx.x; i < Rows * kChannelGroups; i += kF32Threads) {
      const int row = i / kChannelGroups, c = i % kChannelGroups * 4;
      float4 x{};
      if (first + row < last && c < channels)
        x = *reinterpret_cast<const float4*>(from.row<float>(batch, head, int64_t{start} + first + row) + c);
      finite &= isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
      *reinterpret_cast<float4*>(&to[row][c]) = x;
    }
    if (!finite) nonfinite = 1;
  }

  static __device__ float dot(const float* x, const float* y) {
    float sum[4] = {};
#pragma unroll 4
    for (int c = 0; c < Dim; c += 4) {
      const float4 u = *reinterpret_cast<const float4*>(x + c), v = *reinterpret_cast<const float4*>(y + c);
      sum[0] = fmaf(u.x, v.x, sum[0]), sum[1] = fmaf(u.y, v.y, sum[1]);
      sum[2] = fmaf(u.z, v.z, sum[2]), sum[3] = fmaf(u.w, v.w, sum[3]);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }

  // sum += f^T x over the rows of a tile, for this thread's rows and channels of the sum. With `nonfinite`, a factor of
  // 0 may meet inf or NaN, which some mask hides.
  template <int Rows>
  static __device__ void accumulate(Sums& sum, const Pairs<Rows>& f, const Tile<Rows>& x, bool nonfinite) {
    const int row = first_row(), c = first_channel();
#pragma unroll 4
    for (int m = 0; m < Rows; ++m) {
      const float4 y = *reinterpret_cast<const float4*>(&x[m][c]);
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r) {
        const float factor = f[m][row + r];
        if (nonfinite && factor == 0.f) continue;
        sum[r].x = fmaf(factor, y.x, sum[r].x), sum[r].y = fmaf(factor, y.y, sum[r].y);
        sum[r].z = fmaf(factor, y.z, sum[r].z), sum[r].w = fmaf(factor, y.w, sum[r].w);
      }
    }
  }
};

}  // namespace octet::cuda::sm80
