// The pieces of rung 4: tiles as cp.async lays them down, and products of fragments that ldmatrix reads from them.
#include <gtest/gtest.h>

#include "../4_tensor_cores.cu"
#include "device_array.h"

namespace ladder {
namespace {

__device__ uint32_t tile_address(void* memory) { return static_cast<uint32_t>(__cvta_generic_to_shared(memory)); }
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

// The tile, row by row, of a matrix of 64 rows of which those from `seq` on do not exist.
template <int Dim>
__global__ void run_load(const half* x, int seq, half* result) {
  __shared__ __align__(1024) unsigned char memory[kKeys * Dim * 2];
  load<Dim, kKeys>(tile_address(memory), x, 0, seq);
  wait_for_copies();
  for (int i = threadIdx.x; i < kKeys * Dim; i += kThreads) {
    const int row = i / Dim, column = i % Dim;
    result[i] = *reinterpret_cast<const half*>(memory + offset<Dim>(row, column / 8) + column % 8 * 2);
  }
}

// s [16, 16] of the first 16 rows of q and k; o [16, Dim] of the first 16 columns of q, as P, and 16 rows of v.
template <int Dim>
__global__ void run_products(const half* q, const half* k, float* s, float* o) {
  __shared__ __align__(1024) unsigned char q_memory[kKeys * Dim * 2], k_memory[kKeys * Dim * 2];
  const uint32_t q_tile = tile_address(q_memory), k_tile = tile_address(k_memory);
  load<Dim, kKeys>(q_tile, q, 0, kKeys);
  load<Dim, kKeys>(k_tile, k, 0, kKeys);
  wait_for_copies();
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;
  const uint32_t q_row = q_tile + offset<Dim>(lane % 16, lane / 16);
  const uint32_t k_row = k_tile + offset<Dim>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const uint32_t v_row = k_tile + offset<Dim>(lane % 16, lane / 16);
  float d[2][4] = {};
  uint32_t a[4], b[4];
  for (int c = 0; c < Dim / 16; ++c) {
    ldmatrix(a, q_row ^ 32 * c);
    ldmatrix(b, k_row ^ 32 * c);
    mma(d[0], a, b[0], b[1]);
    mma(d[1], a, b[2], b[3]);
  }
  for (int i = 0; i < 8; ++i) s[(row + i % 4 / 2 * 8) * 16 + i / 4 * 8 + column + i % 2] = d[i / 4][i % 4];
  ldmatrix(a, q_row);
  for (int n = 0; n < Dim / 16; ++n) {
    float e[2][4] = {};
    ldmatrix_transposed(b, v_row ^ 32 * n);
    mma(e[0], a, b[0], b[1]);
    mma(e[1], a, b[2], b[3]);
    for (int i = 0; i < 8; ++i) {
      o[(row + i % 4 / 2 * 8) * Dim + 16 * n + i / 4 * 8 + column + i % 2] = e[i / 4][i % 4];
    }
  }
}

// Whole numbers from -8 to 8: their products, and sums of them, are exact.
std::vector<half> whole(size_t count, unsigned seed) {
  std::vector<half> x;
  for (float value : numbers(count, seed)) x.push_back(__float2half(std::nearbyint(8 * value)));
  return x;
}
int of(half x) { return static_cast<int>(__half2float(x)); }

template <int Dim>
void test_tiles() {
  const std::vector<half> x = whole(kKeys * Dim, 11);
  const DeviceArray<half> device_x(x), result(x.size());
  for (int seq : {1, 37, 64}) {
    run_load<Dim><<<1, kThreads>>>(device_x.get(), seq, result.get());
    const std::vector<half> found = result.values();
    for (int i = 0; i < kKeys * Dim; ++i) ASSERT_EQ(of(found[i]), i / Dim < seq ? of(x[i]) : 0) << seq << " " << i;
  }
}

template <int Dim>
void test_products() {
  const std::vector<half> q = whole(kKeys * Dim, 12), k = whole(kKeys * Dim, 13);
  const DeviceArray<half> device_q(q), device_k(k);
  const DeviceArray<float> device_s(16 * 16), device_o(16 * Dim);
  run_products<Dim><<<1, kThreads>>>(device_q.get(), device_k.get(), device_s.get(), device_o.get());
  const std::vector<float> s = device_s.values(), o = device_o.values();
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      int sum = 0;
      for (int c = 0; c < Dim; ++c) sum += of(q[i * Dim + c]) * of(k[j * Dim + c]);
      ASSERT_EQ(s[i * 16 + j], sum) << i << " " << j;
    }
    for (int c = 0; c < Dim; ++c) {
      int sum = 0;
      for (int j = 0; j < 16; ++j) sum += of(q[i * Dim + j]) * of(k[j * Dim + c]);
      ASSERT_EQ(o[i * Dim + c], sum) << i << " " << c;
    }
  }
}

TEST(TensorCores, TilesHoldTheMatrixAndZerosPastItsEnd) {
  test_tiles<64>();
  test_tiles<128>();
}
TEST(TensorCores, FragmentProductsOfHeadDim64) { test_products<64>(); }
TEST(TensorCores, FragmentProductsOfHeadDim128) { test_products<128>(); }

}  // namespace
}  // namespace ladder
