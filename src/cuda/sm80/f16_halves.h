// Products of float32 numbers by tensor cores. The numbers of a token are 2^13 / h^2 times themselves in two f16
// halves, x = large + small / 2^11, where h is a power of two such that the largest is near 2^13: x lacks 2^-24 of
// itself, or 2^-49 of the largest number of its token. Of the four products of halves three are taken; the last is
// below 2^-24 of the whole. Products with small halves have sums of their own.
#pragma once
#include <cuda_runtime_api.h>

#include "core/tensor.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/rows.h"
#include "cuda/host/workspace.h"
#include "cuda/sm80/mma.h"

namespace octet::cuda::sm80 {

constexpr int kHalfBits = 11;        // small halves are 2^kHalfBits times what large ones lack
constexpr int kHalvesExponent = 13;  // halves are 2^kHalvesExponent / h^2 times the number
constexpr float kHalfRatio = 1 << kHalfBits;

// [batch, head, token]: h of each token, less than 0 where it has inf or NaN.
struct TokenFactors {
  const float* data;
  int heads, tokens;
  __device__ const float* at(int batch, int head, int64_t token) const {
    return data + (int64_t{batch} * heads + head) * tokens + token;
  }
};

// A float32 tensor in halves.
struct F16HalvesView {
  Output tensor;  // [batch, head, token, half, dim] in f16
  TokenFactors factors;
};

// The large half of inf and NaN is 0, or inf and NaN are kept in it; their small half is 0.
enum class NonFinite { zero, kept };

// Computes the halves of a tensor before a kernel reads them.
class F16HalvesInput {
 public:
  // `dim`: channels of a half, 64, 128 or 256; those beyond the tensor are 0.
  F16HalvesInput(const View& from, int dim, NonFinite nonfinite, WorkspaceAllocator& workspace);
  void preprocess(cudaStream_t stream) const;
  F16HalvesView view() const;

 private:
  View from_;
  int dim_;
  NonFinite nonfinite_;
  F16* halves_;
  float* factors_;
};

// Starts the copies of numbers of `Count` tokens, from `from` on, by `Threads` threads; those outside of `there` are 0.
template <int Threads, int Count>
__device__ void load_words_async(float* to, const float* from, const Interval& there) {
  static_assert(Count <= Threads);
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));  // else the compiler keeps addresses in registers
  if (i >= Count) return;
  const bool present = i >= there.first && i < there.last;
  ptx::cp_async_word(ptx::shared_address(to + i), from + (present ? i : 0), !present);
}

// Returns 2^kHalvesExponent / h^2 times a number of a token, whose large halves are `row` and small ones follow after
// `dim`.
__device__ inline float from_halves(const F16* row, int dim, int channel) {
  return fmaf(float(row[dim + channel]), 1 / kHalfRatio, float(row[channel]));
}

// Two tiles in shared memory, one after the other.
template <class Tile_>
struct HalfTiles {
  using Tile = Tile_;
  static constexpr int kBytes = 2 * Tile::kBytes;
  unsigned char* data;
  __device__ Tile large() const { return {data}; }
  __device__ Tile small() const { return {data + Tile::kBytes}; }
};

// A left operand in registers.
template <int M, int Depth>
struct HalfOperand {
  Operand<F16, Depth> large[M], small[M];
};

template <int M, int Columns>
struct HalfSums {
  Accumulator<Columns> large[M], small[M];

  __device__ HalfSums() {
#pragma unroll
    for (int m = 0; m < M; ++m) large[m].zero(), small[m].zero();
  }
  __device__ float at(int m, int i) const { return __fmaf_rn(small[m].x[i], 1 / kHalfRatio, large[m].x[i]); }

  // Adds the products of 16 of the index of summation to 16 columns from column 16 n on.
  __device__ void add(int n, const uint32_t (&a_large)[M][4], const uint32_t (&a_small)[M][4],
                      const uint32_t (&b_large)[4], const uint32_t (&b_small)[4]) {
    const auto each = [&](Accumulator<Columns>(&d)[M], const uint32_t(&a)[M][4], const uint32_t(&b)[4]) {
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) ptx::mma_m16n8k16<F16>(&d[m].x[8 * n + 4 * half], a[m], &b[2 * half]);
    };
    each(small, a_large, b_small), each(large, a_large, b_large), each(small, a_small, b_large);
  }
  // Adds them to all columns. load(n, b_large, b_small) brings those from column 16 n on.
  template <class Load>
  __device__ void add(const uint32_t (&a_large)[M][4], const uint32_t (&a_small)[M][4], const Load& load) {
#pragma unroll
    for (int n = 0; n < Columns / 16; ++n) {
      uint32_t b_large[4], b_small[4];
      load(n, b_large, b_small);
      add(n, a_large, a_small, b_large, b_small);
    }
  }
};

// d += a b^T over columns [16 first, 16 (first + Steps)), with rows [16 row_block, 16 (row_block + M)) of the tile a.
template <int Steps, int M, int Columns, class TileA, class TileB>
__device__ void mma_ABt(HalfSums<M, Columns>& d, const HalfTiles<TileA>& a, int row_block, const HalfTiles<TileB>& b,
                        int first) {
  const uint32_t lane_a = TileA::step(a.large().lane_down(), row_block, 0), lane_b = b.large().lane_right();
#pragma unroll
  for (int step = first; step < first + Steps; ++step) {
    uint32_t a_large[M][4], a_small[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const uint32_t at = TileA::step(lane_a, m, step);
      ptx::ldmatrix(a_large[m], at), ptx::ldmatrix(a_small[m], at + TileA::kBytes);
    }
    d.add(a_large, a_small, [&](int n, uint32_t(&b_large)[4], uint32_t(&b_small)[4]) {
      const uint32_t at = TileB::step(lane_b, n, step);
      ptx::ldmatrix(b_large, at), ptx::ldmatrix(b_small, at + TileB::kBytes);
    });
  }
}

// d += a b, with a in registers; the first rows of b are the index of summation, the columns of d those of b from
// 16 block on.
template <int M, int Depth, int Columns, class TileB>
__device__ void mma_AB(HalfSums<M, Columns>& d, const HalfOperand<M, Depth>& a, const HalfTiles<TileB>& b, int block) {
  const uint32_t lane = TileB::step(b.large().lane_down(), 0, block);
#pragma unroll
  for (int step = 0; step < Depth / 16; ++step) {
    uint32_t a_large[M][4], a_small[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a_large[m][i] = a.large[m].x[4 * step + i], a_small[m][i] = a.small[m].x[4 * step + i];
    d.add(a_large, a_small, [&](int n, uint32_t(&b_large)[4], uint32_t(&b_small)[4]) {
      const uint32_t at = TileB::step(lane, step, n);
      ptx::ldmatrix_trans(b_large, at), ptx::ldmatrix_trans(b_small, at + TileB::kBytes);
    });
  }
}

// Multiplies a product of halves by the factors of its tokens.
__device__ inline void times_factors(float& product, float of_row, float of_column) {
  const float factor = of_row * (1.f / (1 << kHalvesExponent)) * of_column;
  product = product * factor * factor;
}
// The same for an accumulator: the factors of this thread's rows are of_rows[0] and [8], those of its columns
// of_columns[8 i] and the next.
template <int Columns>
__device__ void times_factors(Accumulator<Columns>& d, const float* of_rows, const float* of_columns) {
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) times_factors(d.x[i], of_rows[i / 2 % 2 * 8], of_columns[i / 4 * 8 + i % 2]);
}

// Divides each row of x, whose columns are multiplied by the squares of their tokens' factors, into halves, times a
// power of two that brings its largest number to between 2^14 and 2^15. Returns what sums of products of these halves
// and those of the tokens must be multiplied by, for the two rows of this thread.
template <int Columns>
__device__ RowValues to_halves(Accumulator<Columns> x, const float* of_columns, Operand<F16, Columns>& large,
                               Operand<F16, Columns>& small) {
  RowValues inverse;
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) {
    const float factor = of_columns[i / 4 * 8 + i % 2];
    x.x[i] = x.x[i] * factor * factor;
  }
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) most = fmaxf(most, fabsf(x.x[4 * i + 2 * row + c]));
    // Both powers are normal numbers.
    const int exponent = static_cast<int>(__float_as_uint(quad_max(most)) >> 23), scale = min(268 - exponent, 240);
    const float by = __int_as_float(scale << 23);
    inverse[row] = __int_as_float((254 - kHalvesExponent - scale) << 23);
#pragma unroll
    for (int i = 0; i < Columns / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) x.x[4 * i + 2 * row + c] *= by;
  }
#pragma unroll
  for (int i = 0; i < Columns / 4; ++i) {
    large.x[i] = ptx::pack<F16>(x.x[2 * i], x.x[2 * i + 1]);
    const float2 taken = ptx::unpack<F16>(large.x[i]);
    small.x[i] = ptx::pack<F16>((x.x[2 * i] - taken.x) * kHalfRatio, (x.x[2 * i + 1] - taken.y) * kHalfRatio);
  }
  return inverse;
}

// sum += a b over columns [first, first + Columns), with a from to_halves, which has returned `inverse`.
template <int Columns, int M, int Depth, int Dim, class TileB>
__device__ void add_columns(Accumulator<Dim> (&sum)[M], const HalfOperand<M, Depth>& a, const RowValues (&inverse)[M],
                            const HalfTiles<TileB>& b, int first) {
  HalfSums<M, Columns> products;
  mma_AB(products, a, b, first / 16);
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
      float& to = sum[m].x[first / 2 + i];
      to = __fmaf_rn(products.at(m, i), inverse[m][i / 2 % 2], to);
    }
}

// The same over all columns, `Columns` at a time.
template <int Columns, int M, int Depth, int Dim, class TileB>
__device__ void add_product(Accumulator<Dim> (&sum)[M], const HalfOperand<M, Depth>& a, const RowValues (&inverse)[M],
                            const HalfTiles<TileB>& b) {
#pragma unroll
  for (int first = 0; first < Dim; first += Columns) add_columns<Columns>(sum, a, inverse, b, first);
}

// Returns a b^T in d, but for the factors of rows and columns. Tensor cores truncate sums, so those of 64 are taken
// apart and added in float32.
template <int M, int Columns, class TileA, class TileB>
__device__ void multiply_ABt(Accumulator<Columns> (&d)[M], const HalfTiles<TileA>& a, int row_block,
                             const HalfTiles<TileB>& b) {
  constexpr int kSteps = 4;
#pragma unroll
  for (int m = 0; m < M; ++m) d[m].zero();
#pragma unroll 1
  for (int first = 0; first < TileA::kColumns / 16; first += kSteps) {
    HalfSums<M, Columns> products;
    mma_ABt<kSteps>(products, a, row_block, b, first);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < Columns / 2; ++i) d[m].x[i] += products.at(m, i);
  }
}

}  // namespace octet::cuda::sm80
