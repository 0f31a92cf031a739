// Tests that numbers of e4m3 that a GPU holds in f16, and their scales, are those that the CPU rounds to (core/quant).
#include "cuda/operands/quantize/e4m3.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/quant/elements.h"
#include "core/quant/scale.h"

namespace octet::cuda {
namespace {

void must(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

template <class T>
struct Array {
  T* data = nullptr;
  std::vector<T> host;
  explicit Array(const std::vector<T>& x) : host(x) {
    must(cudaMalloc(reinterpret_cast<void**>(&data), bytes()));
    must(cudaMemcpy(data, x.data(), bytes(), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  std::size_t bytes() const { return host.size() * sizeof(T); }
  const std::vector<T>& read() {
    must(cudaMemcpy(host.data(), data, bytes(), cudaMemcpyDeviceToHost));
    return host;
  }
};

// Rounds as the CPU does; NaN stays NaN.
float nearest(float x) { return std::isnan(x) ? x : e4m3_value(e4m3_bits(x)); }
bool same(float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); }

enum class Scales { none, rows, channels };

class GpuE4m3Rows : public testing::TestWithParam<std::tuple<int, Scales>> {};

TEST_P(GpuE4m3Rows, are_those_of_the_cpu) {
  const auto [dim, scales] = GetParam();
  constexpr int kRows = 77, kHeads = 2;
  const int padded = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
  std::mt19937 random(static_cast<unsigned>(dim));
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(kHeads * kRows * dim)),
      means(static_cast<std::size_t>(kHeads * padded)), inverses(means.size());
  for (float& y : x) y = normal(random) * std::exp2(8 * normal(random));
  for (float& y : means) y = normal(random);
  for (float& y : inverses) y = std::exp2(4 * normal(random));
  for (int c = 0; c < dim; ++c) x[c] = 0.f;
  x[dim + 3] = INFINITY, x[2 * dim + 5] = NAN, x[3 * dim] = 0x1p-140f, x[4 * dim] = -464.f;
  Array from(x), mean(means), inverse(inverses), scale(std::vector<float>(kHeads * kRows, -1.f));
  Array to(std::vector<__half>(static_cast<std::size_t>(kHeads * kRows * padded)));
  E4m3Rows rows{};
  rows.from = {from.data, {1, kHeads, kRows, dim}, {kHeads * kRows * dim, kRows * dim, dim, 1}, Element::f32};
  rows.to = to.data, rows.rows = kRows, rows.dim = padded, rows.kv_heads = kHeads;
  if (scales == Scales::rows) rows.mean = mean.data, rows.scale = scale.data;
  if (scales == Scales::channels) rows.inverse = inverse.data;
  quantize_to_e4m3(rows, nullptr);
  must(cudaDeviceSynchronize());
  const auto& got = to.read();
  const auto& got_scale = scale.read();
  int64_t wrong = 0, wrong_scales = 0;
  for (int row = 0; row < kHeads * kRows; ++row) {
    std::vector<float> y(padded);
    for (int c = 0; c < dim; ++c) {
      y[c] = x[row * dim + c];
      if (scales == Scales::rows) y[c] -= means[row / kRows * padded + c];
    }
    const Scale of_row = scale_of(amax(y.data(), padded), 448.f);
    for (int c = 0; c < padded; ++c) {
      float want = nearest(y[c]);
      if (scales == Scales::rows) want = std::isnan(of_row.scale) ? 0.f : nearest(y[c] * of_row.inverse);
      if (scales == Scales::channels)
        want = std::isinf(y[c]) ? NAN : nearest(c < dim ? y[c] * inverses[row / kRows * padded + c] : 0.f);
      wrong += !same(want, __half2float(got[row * padded + c]));
    }
    wrong_scales += scales == Scales::rows && !same(of_row.scale, got_scale[row]);
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(wrong_scales, 0);
}

INSTANTIATE_TEST_SUITE_P(Dims, GpuE4m3Rows,
                         testing::Combine(testing::Values(8, 40, 64, 128, 192, 256),
                                          testing::Values(Scales::none, Scales::rows, Scales::channels)));

}  // namespace
}  // namespace octet::cuda
