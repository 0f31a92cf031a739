// The pieces of rung 3: reductions among the lanes of a row, and the two products of a warp's tile.
#include <gtest/gtest.h>

#include "../3_warps.cu"
#include "device_array.h"

namespace ladder {
namespace {

__global__ void run_reduce(const float* x, float* largest, float* sum) {
  largest[threadIdx.x] = row_max(x[threadIdx.x]);
  sum[threadIdx.x] = row_sum(x[threadIdx.x]);
}

TEST(Warps, EveryLaneGetsTheResultOfItsRow) {
  std::vector<float> x(32);
  for (int lane = 0; lane < 32; ++lane) x[lane] = static_cast<float>((lane * 37 + 11) % 64 - 32);  // sums are exact
  const DeviceArray<float> device_x(x), largest(32), sum(32);
  run_reduce<<<1, 32>>>(device_x.get(), largest.get(), sum.get());
  const std::vector<float> found_largest = largest.values(), found_sum = sum.values();
  for (int lane = 0; lane < 32; ++lane) {
    float expected_largest = -INFINITY, expected_sum = 0;
    for (int other = lane / 8 * 8; other < lane / 8 * 8 + 8; ++other) {
      expected_largest = std::max(expected_largest, x[other]);
      expected_sum += x[other];
    }
    EXPECT_EQ(found_largest[lane], expected_largest) << lane;
    EXPECT_EQ(found_sum[lane], expected_sum) << lane;
  }
}

// q and k are filled from global memory; the scores of a warp come back as [kRows, kKeys].
template <int kDim>
__global__ void run_scores(const float* q, const float* k, float* result) {
  __shared__ float4 memory[(kRows + kKeys) * (kDim + kPad) / 4];
  auto* tile_q = reinterpret_cast<float(*)[kDim + kPad]>(memory);
  auto* tile_k = tile_q + kRows;
  for (int n = threadIdx.x; n < kRows * kDim; n += 32) tile_q[n / kDim][n % kDim] = q[n];
  for (int n = threadIdx.x; n < kKeys * kDim; n += 32) tile_k[n / kDim][n % kDim] = k[n];
  __syncwarp();
  const int y = threadIdx.x / 8, x = threadIdx.x % 8;
  float s[4][4] = {};
  scores<kDim>(tile_q, tile_k, y, x, s);
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) result[(y + 4 * a) * kKeys + x + 8 * b] = s[a][b];
  }
}

template <int kDim>
__global__ void run_values(const float* p, const float* v, float* result) {
  __shared__ float4 memory[(kRows * (kKeys + kPad) + kKeys * (kDim + kPad)) / 4];
  auto* tile_p = reinterpret_cast<float(*)[kKeys + kPad]>(memory);
  auto* tile_v = reinterpret_cast<float(*)[kDim + kPad]>(tile_p + kRows);
  for (int n = threadIdx.x; n < kRows * kKeys; n += 32) tile_p[n / kKeys][n % kKeys] = p[n];
  for (int n = threadIdx.x; n < kKeys * kDim; n += 32) tile_v[n / kDim][n % kDim] = v[n];
  __syncwarp();
  const int y = threadIdx.x / 8, x = threadIdx.x % 8;
  float4 out[4][kDim / 32] = {};
  add_values<kDim>(tile_p, tile_v, y, x, out);
  for (int a = 0; a < 4; ++a) {
    for (int n = 0; n < kDim / 32; ++n) {
      float* to = &result[(y + 4 * a) * kDim + 4 * x + 32 * n];
      to[0] = out[a][n].x, to[1] = out[a][n].y, to[2] = out[a][n].z, to[3] = out[a][n].w;
    }
  }
}

// a [m, k] times b, which is [n, k] (transposed) or [k, n], in float64.
void expect_product(const std::vector<float>& found, const std::vector<float>& a, const std::vector<float>& b, int m,
                    int n, int k, bool transposed) {
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int c = 0; c < k; ++c) sum += static_cast<double>(a[i * k + c]) * (transposed ? b[j * k + c] : b[c * n + j]);
      ASSERT_NEAR(found[i * n + j], sum, k * k * 0x1p-24) << i << " " << j;
    }
  }
}

template <int kDim>
void test_products() {
  const std::vector<float> q = numbers(kRows * kDim, 8), k = numbers(kKeys * kDim, 9), p = numbers(kRows * kKeys, 10);
  const DeviceArray<float> device_q(q), device_k(k), device_p(p), s(kRows * kKeys), o(kRows * kDim);
  run_scores<kDim><<<1, 32>>>(device_q.get(), device_k.get(), s.get());
  expect_product(s.values(), q, k, kRows, kKeys, kDim, true);
  run_values<kDim><<<1, 32>>>(device_p.get(), device_k.get(), o.get());
  expect_product(o.values(), p, k, kRows, kDim, kKeys, false);
}

TEST(Warps, TileProductsOfHeadDim64) { test_products<64>(); }
TEST(Warps, TileProductsOfHeadDim128) { test_products<128>(); }

}  // namespace
}  // namespace ladder
