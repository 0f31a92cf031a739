// What the Hopper kernels stand on, each alone: swizzled tiles, products by wgmma, fragments and pipelines. Numbers are
// small integers, so every sum is exact and results are compared bit by bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/fragment/output.h"
#include "cuda/fragment/rows.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/pipeline.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = kWarpgroup;

// A matrix of small integers in row-major order.
struct Matrix {
  int rows, columns;
  std::vector<float> x;

  Matrix(int rows, int columns, unsigned seed, int least = -7, int most = 7) : rows(rows), columns(columns) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<int> number(least, most);
    x.resize(static_cast<std::size_t>(rows) * columns);
    for (float& element : x) element = static_cast<float>(number(random));
  }
  float at(int row, int column) const { return x[static_cast<std::size_t>(row) * columns + column]; }
};

// A copy in GPU memory that any kernel reads and writes.
class OnGpu {
 public:
  explicit OnGpu(const std::vector<float>& x) : count_(x.size()) {
    EXPECT_EQ(cudaMallocManaged(&data_, count_ * sizeof(float)), cudaSuccess);
    for (std::size_t i = 0; i < count_; ++i) data_[i] = x[i];
  }
  explicit OnGpu(std::size_t count) : OnGpu(std::vector<float>(count, NAN)) {}
  ~OnGpu() { cudaFree(data_); }
  OnGpu(const OnGpu&) = delete;
  float* data() const { return data_; }
  float operator[](std::size_t i) const { return data_[i]; }

 private:
  std::size_t count_;
  float* data_ = nullptr;
};

template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), int threads, int shared_bytes, Arguments... arguments) {
  ASSERT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), cudaSuccess);
  kernel<<<1, threads, shared_bytes>>>(arguments...);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// `bytes` of shared memory from the next multiple of the swizzle's period on.
__device__ unsigned char* take(unsigned char*& memory, int bytes) {
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  unsigned char* const at = memory + (-base & (kSwizzleBytes - 1));
  memory = at + bytes;
  return at;
}

// Where byte `byte` of a row lies in a tile: the definition of the swizzle (PTX ISA, 5.5.7), written anew.
template <class Tile>
__device__ int place(int row, int byte) {
  constexpr int kWidth = Tile::kPanelWidth * static_cast<int>(sizeof(typename Tile::Element));
  const int panel = byte / kWidth, within = row * kWidth + byte % kWidth;
  const int swizzled = within ^ ((within >> 7) & (kWidth / 16 - 1)) << 4;
  return panel * Tile::kPanelBytes + swizzled;
}
template <class Tile>
__device__ void fill(const Tile& tile, const float* from) {
  using T = typename Tile::Element;
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kColumns; i += blockDim.x) {
    const int row = i / Tile::kColumns, column = i % Tile::kColumns;
    *reinterpret_cast<T*>(tile.data + place<Tile>(row, column * sizeof(T))) = T(from[i]);
  }
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
  __syncthreads();
}

template <int Columns, class T>
__device__ void write(const Accumulator<Columns, T>& x, float* to) {
  for (int i = 0; i < Columns / 2; ++i)
    to[(fragment_row() + i / 2 % 2 * 8) * Columns + i / 4 * 8 + fragment_column() + i % 2] = static_cast<float>(x.x[i]);
}
template <int Columns>
__device__ void read(const float* from, Accumulator<Columns>& x) {
  for (int i = 0; i < Columns / 2; ++i)
    x.x[i] = from[(fragment_row() + i / 2 % 2 * 8) * Columns + i / 4 * 8 + fragment_column() + i % 2];
}
template <class D>
__device__ void await(D& d) {
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::fence_operand(d.x);
}

template <class T, int Rows, int Columns, int Depth>
__global__ void mma_ABt_kernel(const float* a, const float* b, float* d, int row) {
  extern __shared__ unsigned char memory[];
  unsigned char* at = memory;
  const SharedTile<T, Rows, Depth> tile_a{take(at, SharedTile<T, Rows, Depth>::kBytes)};
  const SharedTile<T, Columns, Depth> tile_b{take(at, SharedTile<T, Columns, Depth>::kBytes)};
  fill(tile_a, a), fill(tile_b, b);
  Accumulator<Columns> sums;
  ptx::wgmma_fence();
  mma_ABt(sums, tile_a, row, tile_b, false);
  await(sums);
  ptx::wgmma_fence();
  mma_ABt(sums, tile_a, row, tile_b, true);  // twice the product
  await(sums);
  write(sums, d);
}

template <class T, int Rows, int Columns, int Depth>
void check_ABt(int row) {
  const Matrix a(Rows, Depth, 1), b(Columns, Depth, 2);
  const OnGpu on_a(a.x), on_b(b.x), d(std::size_t{64} * Columns);
  run(mma_ABt_kernel<T, Rows, Columns, Depth>, kThreads, 128 << 10, on_a.data(), on_b.data(), d.data(), row);
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < Columns; ++j) {
      float sum = 0.f;
      for (int c = 0; c < Depth; ++c) sum += a.at(row + i, c) * b.at(j, c);
      ASSERT_EQ(d[i * Columns + j], 2 * sum) << "row " << i << ", column " << j;
    }
}
TEST(GpuMma, ABt_of_tiles) {
  check_ABt<F16, 64, 64, 64>(0);
  check_ABt<F16, 128, 128, 128>(64);
  check_ABt<Bf16, 192, 112, 64>(128);
  check_ABt<Bf16, 128, 80, 256>(64);
}

template <class T, int Depth, int Columns, bool InRegisters>
__global__ void mma_AB_kernel(const float* a, const float* b, float* d) {
  extern __shared__ unsigned char memory[];
  unsigned char* at = memory;
  const SharedTile<T, Depth, Columns> tile_b{take(at, SharedTile<T, Depth, Columns>::kBytes)};
  fill(tile_b, b);
  Accumulator<Columns> sums;
  sums.zero();
  if constexpr (InRegisters) {
    Accumulator<Depth> numbers;
    read(a, numbers);
    Operand<T, Depth> left;
    convert(numbers, left);
    ptx::wgmma_fence();
    mma_AB(sums, left, tile_b);
    await(sums);
  } else {
    const SharedTile<T, 64, Depth> tile_a{take(at, SharedTile<T, 64, Depth>::kBytes)};
    fill(tile_a, a);
    ptx::wgmma_fence();
    mma_AB(sums, tile_a, tile_b);
    await(sums);
  }
  write(sums, d);
}

template <class T, int Depth, int Columns, bool InRegisters>
void check_AB() {
  const Matrix a(64, Depth, 3), b(Depth, Columns, 4);
  const OnGpu on_a(a.x), on_b(b.x), d(std::size_t{64} * Columns);
  run(mma_AB_kernel<T, Depth, Columns, InRegisters>, kThreads, 160 << 10, on_a.data(), on_b.data(), d.data());
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < Columns; ++j) {
      float sum = 0.f;
      for (int c = 0; c < Depth; ++c) sum += a.at(i, c) * b.at(c, j);
      ASSERT_EQ(d[i * Columns + j], sum) << "row " << i << ", column " << j;
    }
}
TEST(GpuMma, AB_of_a_fragment_and_a_tile) {
  check_AB<F16, 128, 64, true>();
  check_AB<Bf16, 80, 256, true>();
  check_AB<F16, 112, 128, true>();
}
TEST(GpuMma, AB_of_tiles) {
  check_AB<F16, 64, 128, false>();
  check_AB<Bf16, 128, 64, false>();
}

// A product whose right operand is half of a panel, from its first or from its middle column on.
template <class T, int Depth>
__global__ void mma_AB_of_half_kernel(const float* a, const float* b, float* d, int column) {
  extern __shared__ unsigned char memory[];
  unsigned char* at = memory;
  const SharedTile<T, Depth, 64> tile_b{take(at, SharedTile<T, Depth, 64>::kBytes)};
  const SharedTile<T, 64, Depth> tile_a{take(at, SharedTile<T, 64, Depth>::kBytes)};
  fill(tile_b, b), fill(tile_a, a);
  Accumulator<32> sums;
  sums.zero();
  ptx::wgmma_fence();
  mma_AB(sums, tile_a, SharedTile<T, Depth, 32>{tile_b.data + column * sizeof(T)});
  await(sums);
  write(sums, d);
}
TEST(GpuMma, AB_of_half_a_panel) {
  constexpr int kDepth = 64;
  const Matrix a(64, kDepth, 3), b(kDepth, 64, 4);
  const OnGpu on_a(a.x), on_b(b.x);
  for (const int column : {0, 32}) {
    const OnGpu d(std::size_t{64} * 32);
    run(mma_AB_of_half_kernel<Bf16, kDepth>, kThreads, 64 << 10, on_a.data(), on_b.data(), d.data(), column);
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < 32; ++j) {
        float sum = 0.f;
        for (int c = 0; c < kDepth; ++c) sum += a.at(i, c) * b.at(c, column + j);
        ASSERT_EQ(d[i * 32 + j], sum) << "row " << i << ", column " << j << " from " << column;
      }
  }
}

template <class T, int Depth, int ColumnsA, int Columns>
__global__ void mma_AtB_kernel(const float* a, const float* b, float* d, int a_panel, int panel) {
  extern __shared__ unsigned char memory[];
  unsigned char* at = memory;
  const SharedTile<T, Depth, ColumnsA> tile_a{take(at, SharedTile<T, Depth, ColumnsA>::kBytes)};
  const SharedTile<T, Depth, 128> tile_b{take(at, SharedTile<T, Depth, 128>::kBytes)};
  fill(tile_a, a), fill(tile_b, b);
  Accumulator<Columns> sums;
  ptx::wgmma_fence();
  mma_AtB(sums, tile_a, a_panel, tile_b, panel);
  await(sums);
  write(sums, d);
}
template <class T, int Depth, int ColumnsA, int Columns>
void check_AtB(int a_panel, int panel) {
  const Matrix a(Depth, ColumnsA, 5), b(Depth, 128, 6);
  const OnGpu on_a(a.x), on_b(b.x), d(std::size_t{64} * Columns);
  run(mma_AtB_kernel<T, Depth, ColumnsA, Columns>, kThreads, 128 << 10, on_a.data(), on_b.data(), d.data(), a_panel,
      panel);
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < Columns; ++j) {
      float sum = 0.f;
      for (int c = 0; c < Depth; ++c) sum += a.at(c, 64 * a_panel + i) * b.at(c, 64 * panel + j);
      ASSERT_EQ(d[i * Columns + j], sum) << "row " << i << ", column " << j;
    }
}
TEST(GpuMma, AtB_of_tiles) {
  check_AtB<F16, 128, 128, 128>(1, 0);
  check_AtB<Bf16, 64, 64, 64>(0, 1);
}

// 8-bit operands, a in shared memory or in registers. `Sum`: of the products.
template <class A, class B, class Sum, int Depth, int Columns, bool InRegisters>
__global__ void mma_8bit_kernel(const float* a, const float* b, float* d) {
  extern __shared__ unsigned char memory[];
  unsigned char* at = memory;
  const SharedTile8Bit<B, Columns, Depth> tile_b{take(at, SharedTile8Bit<B, Columns, Depth>::kBytes)};
  fill(tile_b, b);
  Accumulator<Columns, Sum> sums;
  if constexpr (InRegisters) {
    Accumulator<Depth> numbers;
    read(a, numbers);
    Operand<A, Depth> left;
    pack_P(numbers, left);
    ptx::wgmma_fence();
    mma_ABt_8bit(sums, left, tile_b, false);
    await(sums);
  } else {
    const SharedTile8Bit<A, 64, Depth> tile_a{take(at, SharedTile8Bit<A, 64, Depth>::kBytes)};
    fill(tile_a, a);
    ptx::wgmma_fence();
    mma_ABt_8bit(sums, tile_a, 0, tile_b);
    await(sums);
  }
  write(sums, d);
}

template <class A, class B, class Sum, int Depth, int Columns, bool InRegisters>
void check_8bit(int least) {
  const int most = std::is_same_v<B, E4m3> ? 3 : 7;  // tensor cores add e4m3 products in 13 bits
  const Matrix a(64, Depth, 7, least, most), b(Columns, Depth, 8, -most, most);
  // pack_P leaves columns in the order of key_permutation; b has its columns in that order.
  Matrix permuted = b;
  for (int j = 0; j < Columns && InRegisters; ++j)
    for (int c = 0; c < Depth; ++c) permuted.x[j * Depth + c] = b.at(j, c / 16 * 16 + key_permutation(c % 16));
  const OnGpu on_a(a.x), on_b(permuted.x), d(std::size_t{64} * Columns);
  run(mma_8bit_kernel<A, B, Sum, Depth, Columns, InRegisters>, kThreads, 96 << 10, on_a.data(), on_b.data(), d.data());
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < Columns; ++j) {
      float sum = 0.f;
      for (int c = 0; c < Depth; ++c) sum += a.at(i, c) * b.at(j, c);
      ASSERT_EQ(d[i * Columns + j], sum) << "row " << i << ", column " << j;
    }
}
TEST(GpuMma, ABt_of_8_bit_tiles) {
  check_8bit<S8, S8, int, 128, 128, false>(-7);
  check_8bit<S8, S8, int, 64, 96, false>(-7);
  check_8bit<E4m3, E4m3, float, 64, 128, false>(-3);
  check_8bit<E4m3, E4m3, float, 128, 96, false>(-3);
}
TEST(GpuMma, ABt_of_an_8_bit_fragment_and_a_tile) {
  check_8bit<U8, S8, int, 128, 128, true>(0);
  check_8bit<U8, S8, int, 96, 64, true>(0);
  check_8bit<E4m3, E4m3, float, 96, 136, true>(-3);
}

// Each element of a tile has the place that TMA and wgmma give it, and stmatrix writes it there.
template <class T, int Rows, int Columns>
__global__ void swizzle_kernel(const float* x, float* wrong) {
  using Tile = SharedTile<T, Rows, Columns>;
  extern __shared__ unsigned char memory[];
  unsigned char* at = memory;
  const Tile tile{take(at, Tile::kBytes)};
  Accumulator<Columns> numbers;
  read(x, numbers);
  Operand<T, Columns> words;
  convert(numbers, words);
  for (int i = threadIdx.x; i < Tile::kBytes; i += kThreads) tile.data[i] = 0xff;
  __syncthreads();
  store(words, tile, Rows - kWarpgroupRows);
  __syncthreads();
  float count = 0.f;
  for (int i = threadIdx.x; i < kWarpgroupRows * Columns; i += kThreads) {
    const int row = Rows - kWarpgroupRows + i / Columns, column = i % Columns;
    const auto* const by_place = reinterpret_cast<const T*>(tile.data + place<Tile>(row, column * sizeof(T)));
    const auto* const by_tile = reinterpret_cast<const T*>(tile.at(row, column / 8)) + column % 8;
    count += by_place != by_tile || float(*by_tile) != x[i];
  }
  atomicAdd(wrong, count);
}
TEST(GpuSharedTile, fragments_are_stored_where_the_swizzle_has_them) {
  const auto check = [](auto kernel, int columns) {
    const Matrix x(64, columns, 9);
    const OnGpu on_x(x.x), wrong(std::vector<float>{0.f});
    run(kernel, kThreads, 64 << 10, on_x.data(), wrong.data());
    EXPECT_EQ(wrong[0], 0.f);
  };
  check(swizzle_kernel<F16, 128, 64>, 64);
  check(swizzle_kernel<Bf16, 64, 128>, 128);
  check(swizzle_kernel<F16, 192, 128>, 128);
}

// Rows leave a fragment through a transpose among four threads.
template <class T, int Columns>
__global__ void store_row_kernel(const float* x, T* to, int columns) {
  Accumulator<Columns> numbers;
  read(x, numbers);
  for (int row = 0; row < kRowsPerThread; ++row)
    store_row(to + (fragment_row() + 8 * row) * Columns, fragment_row() != 5, numbers, row, columns);
}
template <class T, int Columns>
void check_store_row(int columns) {
  const Matrix x(64, Columns, 10);
  const OnGpu on_x(x.x);
  T* to = nullptr;
  ASSERT_EQ(cudaMallocManaged(&to, 64 * Columns * sizeof(T)), cudaSuccess);
  for (int i = 0; i < 64 * Columns; ++i) to[i] = T(99.f);
  run(store_row_kernel<T, Columns>, kThreads, 0, on_x.data(), to, columns);
  for (int row = 0; row < 64; ++row)
    for (int c = 0; c < Columns; ++c) {
      const bool absent = row == 5 || row == 13;  // both rows of these threads
      ASSERT_EQ(float(to[row * Columns + c]), c < columns && !absent ? x.at(row, c) : float(T(99.f)))
          << "row " << row << ", column " << c;
    }
  cudaFree(to);
}
TEST(GpuFragment, rows_are_stored_and_no_others) {
  check_store_row<float, 64>(64);
  check_store_row<F16, 128>(96);
  check_store_row<Bf16, 64>(40);
  check_store_row<E4m3, 128>(104);
}

__global__ void rows_kernel(const float* x, float* most, float* sums) {
  Accumulator<128> numbers;
  read(x, numbers);
  for (int row = 0; row < kRowsPerThread; ++row) {
    most[fragment_row() + 8 * row] = quad_max(row_max(numbers, row, -100.f));
    float sum = 0.f;
    for (int i = 0; i < 64; ++i)
      if (i / 2 % 2 == row) sum += numbers.x[i];
    sums[fragment_row() + 8 * row] = quad_sum(sum);
  }
}
TEST(GpuFragment, maxima_and_sums_of_rows) {
  const Matrix x(64, 128, 11, -50, 50);
  const OnGpu on_x(x.x), most(64), sums(64);
  run(rows_kernel, kThreads, 0, on_x.data(), most.data(), sums.data());
  for (int row = 0; row < 64; ++row) {
    float largest = -100.f, sum = 0.f;
    for (int c = 0; c < 128; ++c) largest = std::max(largest, x.at(row, c)), sum += x.at(row, c);
    EXPECT_EQ(most[row], largest) << "row " << row;
    EXPECT_EQ(sums[row], sum) << "row " << row;
  }
}

// A producer thread hands items through a pipeline of few stages to a warpgroup; each stage is overwritten often.
template <int Stages>
__global__ void pipeline_kernel(int items, float* sums) {
  __shared__ Pipeline<Stages> pipeline;
  __shared__ float stages[Stages][kWarpgroup];
  if (threadIdx.x == 0) pipeline.init(kWarpgroup), publish_barriers();
  __syncthreads();
  PipelineState<Stages> state;
  if (threadIdx.x >= kWarpgroup) {
    if (threadIdx.x > kWarpgroup) return;
    for (int item = 0; item < items; ++item, state.advance()) {
      pipeline.empty[state.stage].wait(state.phase ^ 1);
      for (int i = 0; i < kWarpgroup; ++i) stages[state.stage][i] = static_cast<float>(item * (i + 1));
      pipeline.full[state.stage].arrive();
    }
    return;
  }
  float sum = 0.f;
  for (int item = 0; item < items; ++item, state.advance()) {
    pipeline.full[state.stage].wait(state.phase);
    sum = sum * 3.f + stages[state.stage][threadIdx.x];  // depends on the order of items
    sum = fmodf(sum, 8191.f);
    pipeline.empty[state.stage].arrive();
  }
  sums[threadIdx.x] = sum;
}
TEST(GpuPipeline, items_arrive_once_and_in_order) {
  const auto check = [](auto kernel, int items) {
    const OnGpu sums(kWarpgroup);
    run(kernel, 2 * kWarpgroup, 0, items, sums.data());
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      float sum = 0.f;
      for (int item = 0; item < items; ++item)
        sum = std::fmod(sum * 3.f + static_cast<float>(item * (thread + 1)), 8191.f);
      ASSERT_EQ(sums[thread], sum) << "thread " << thread << ", " << items << " items";
    }
  };
  for (const int items : {0, 1, 2, 3, 7, 100}) check(pipeline_kernel<1>, items), check(pipeline_kernel<2>, items);
  check(pipeline_kernel<3>, 1000);
}

}  // namespace
}  // namespace octet::cuda
