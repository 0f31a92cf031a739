// The pieces of rung 6: tiles that TMA brings, both kinds of wgmma, and the softmax of a thread's two rows.
#include <gtest/gtest.h>

#include "../6_hopper.cu"
#include "device_array.h"

namespace ladder {
namespace {

constexpr int kGroup = 64;  // rows of a warpgroup

// Where element i of a thread's sums lies.
__device__ int row_of(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// s [64, 128] of 64 rows of q and 128 rows of k; o [64, Dim] of P [64, 128] and v. One warpgroup.
template <int Dim>
__global__ void run_products(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                             const __grid_constant__ CUtensorMap v, const float* p, float* s, float* o) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t q_tile = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  constexpr int kTileBytes = Dim / kPanel * kPanelBytes;
  const uint32_t k_tile = q_tile + kTileBytes, v_tile = k_tile + kTileBytes, full = v_tile + kTileBytes;
  if (threadIdx.x == 0) {
    init(full, 3);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    load_tile(q_tile, q, Dim, 0, 0, full);
    load_tile(k_tile, k, Dim, 0, 0, full);
    load_tile(v_tile, v, Dim, 0, 0, full);
  }
  __syncthreads();
  wait(full, 0);

  float scores[kKeys / 2], sums[Dim / 2] = {};
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < Dim / 16; ++c) {
    const int offset = c / 4 * kPanelBytes + c % 4 * 32;
    wgmma(scores, matrix(q_tile + offset), matrix(k_tile + offset), c > 0);
  }
  wgmma_commit();
  wgmma_wait<0>(scores);
  for (int i = 0; i < kKeys / 2; ++i) s[row_of(i) * kKeys + column_of(i)] = scores[i];

  uint32_t fragments[kKeys / 4];
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const float* from = &p[row_of(2 * i) * kKeys + column_of(2 * i)];
    fragments[i] = pack(from[0], from[1]);
  }
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j) wgmma(sums, &fragments[4 * j], matrix(v_tile + j * 16 * 128));
  wgmma_commit();
  wgmma_wait<0>(sums);
  for (int i = 0; i < Dim / 2; ++i) o[row_of(i) * Dim + column_of(i)] = sums[i];
}

// Two tiles [2, 64, 128] of scores: P of the second, and of both tiles the largest score, the sum and the factor.
__global__ void run_softmax(const float* scores, float scale_log2, float* p, float* largest, float* sum,
                            float* shrink) {
  Rows rows;
  float s[kKeys / 2];
  for (int tile = 0; tile < 2; ++tile) {
    for (int i = 0; i < kKeys / 2; ++i) s[i] = scores[(tile * kGroup + row_of(i)) * kKeys + column_of(i)];
    softmax(s, rows, scale_log2);
  }
  for (int i = 0; i < kKeys / 2; ++i) p[row_of(i) * kKeys + column_of(i)] = s[i];
  for (int h = 0; h < 2; ++h) {
    atomicAdd(&sum[row_of(2 * h)], rows.l[h]);
    largest[row_of(2 * h)] = rows.m[h];
    shrink[row_of(2 * h)] = rows.shrink[h];
  }
}

bool is_hopper() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return properties.major == 9 && properties.minor == 0;
}

// Whole numbers from -8 to 8: their products, and sums of them, are exact.
std::vector<half> whole(size_t count, unsigned seed) {
  std::vector<half> x;
  for (float value : numbers(count, seed)) x.push_back(__float2half(std::nearbyint(8 * value)));
  return x;
}
int of(half x) { return static_cast<int>(__half2float(x)); }

// Of a matrix with `seq` rows: those beyond are zeros.
template <int Dim>
void test_products(int seq) {
  const auto row = [&](const std::vector<half>& x, int i, int c) { return i < seq ? of(x[i * Dim + c]) : 0; };
  const std::vector<half> q = whole(seq * Dim, 14), k = whole(seq * Dim, 15), v = whole(seq * Dim, 16);
  std::vector<float> p;
  for (half x : whole(kGroup * kKeys, 17)) p.push_back(__half2float(x));
  const DeviceArray<half> device_q(q), device_k(k), device_v(v);
  const DeviceArray<float> device_p(p), device_s(kGroup * kKeys), device_o(kGroup * Dim);
  const Problem problem{.heads = 1, .seq = seq, .dim = Dim};
  launch("products", run_products<Dim>, 1, 128, 3 * Dim / kPanel * kPanelBytes + 8, nullptr,
         tensor_map(problem, device_q.get()), tensor_map(problem, device_k.get()), tensor_map(problem, device_v.get()),
         device_p.get(), device_s.get(), device_o.get());
  const std::vector<float> s = device_s.values(), o = device_o.values();
  for (int i = 0; i < kGroup; ++i) {
    for (int j = 0; j < kKeys; ++j) {
      int sum = 0;
      for (int c = 0; c < Dim; ++c) sum += row(q, i, c) * row(k, j, c);
      ASSERT_EQ(s[i * kKeys + j], sum) << i << " " << j;
    }
    for (int c = 0; c < Dim; ++c) {
      int sum = 0;
      for (int j = 0; j < kKeys; ++j) sum += static_cast<int>(p[i * kKeys + j]) * row(v, j, c);
      ASSERT_EQ(o[i * Dim + c], sum) << i << " " << c;
    }
  }
}

TEST(Hopper, TileProductsOfHeadDim64) {
  if (!is_hopper()) GTEST_SKIP() << "no GPU of compute capability 9.0";
  test_products<64>(128);
  test_products<64>(50);
}
TEST(Hopper, TileProductsOfHeadDim128) {
  if (!is_hopper()) GTEST_SKIP() << "no GPU of compute capability 9.0";
  test_products<128>(128);
  test_products<128>(50);
}

TEST(Hopper, SoftmaxOverTwoTiles) {
  if (!is_hopper()) GTEST_SKIP() << "no GPU of compute capability 9.0";
  std::vector<float> scores = numbers(2 * kGroup * kKeys, 18);
  for (float& score : scores) score *= 8;
  for (int key = 100; key < kKeys; ++key) scores[5 * kKeys + key] = -INFINITY;  // masked, in a row of the first tile
  const float scale_log2 = 1.44269504f;
  const DeviceArray<float> device_scores(scores), device_p(kGroup * kKeys), largest(kGroup), sum(kGroup),
      shrink(kGroup);
  run_softmax<<<1, 128>>>(device_scores.get(), scale_log2, device_p.get(), largest.get(), sum.get(), shrink.get());
  const std::vector<float> p = device_p.values(), m = largest.values(), l = sum.values(), f = shrink.values();
  // Exponents are at most 24 and rounded twice in f32, which exp2 hands on times log(2); ex2.approx errs by 2^-22.
  const double bound = 2 * 24 * 0x1p-24 + 0x1p-22;
  for (int i = 0; i < kGroup; ++i) {
    double first = -INFINITY, both = -INFINITY, total = 0;
    for (int n = 0; n < 2 * kKeys; ++n) {
      const double score = scores[(n / kKeys * kGroup + i) * kKeys + n % kKeys];
      both = std::max(both, score);
      if (n < kKeys) first = std::max(first, score);
    }
    for (int n = 0; n < 2 * kKeys; ++n) {
      const double expected = std::exp2(scale_log2 * (scores[(n / kKeys * kGroup + i) * kKeys + n % kKeys] - both));
      total += expected;
      if (n >= kKeys) ASSERT_NEAR(p[i * kKeys + n % kKeys], expected, bound * expected) << i << " " << n;
    }
    ASSERT_NEAR(m[i], scale_log2 * both, 24 * 0x1p-24) << i;
    // The sum of 256 values in f32 adds as many roundings at most.
    ASSERT_NEAR(l[i], total, (2 * bound + 256 * 0x1p-24) * total) << i;
    ASSERT_NEAR(f[i], std::exp2(scale_log2 * (first - both)), bound) << i;
  }
}

}  // namespace
}  // namespace ladder
