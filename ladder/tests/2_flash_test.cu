// The pieces of rung 2: the online softmax, the rotation and the tiles that are rotated while they are loaded.
#include <gtest/gtest.h>

#include "../2_flash.cu"
#include "../harness/harness.h"
#include "device_array.h"

namespace ladder {
namespace {

// One thread takes count scores in tiles of the given size: result is the largest, the sum, and the sum of all scores'
// P times their index, scaled down as the rung scales its output.
__global__ void run_online(const float* scores, int count, int tile, float* result) {
  Row row;
  float output = 0;
  for (int first = 0; first < count; first += tile) {
    const int end = min(count, first + tile);
    float largest = -INFINITY;
    for (int j = first; j < end; ++j) largest = fmaxf(largest, scores[j]);
    output *= row.raise(largest);
    for (int j = first; j < end; ++j) output += row.add(scores[j]) * j;
  }
  result[0] = row.largest, result[1] = row.sum, result[2] = output;
}

TEST(Flash, OnlineSoftmaxIsTheSoftmaxForTilesOfAnySize) {
  std::vector<float> scores = numbers(300, 6);
  for (size_t j = 0; j < scores.size(); ++j) scores[j] = 40 * scores[j] + 0.1f * j;
  for (size_t j = 64; j < 128; ++j) scores[j] = -INFINITY;  // a tile that is masked as a whole
  double largest = -INFINITY, sum = 0, output = 0;
  for (float s : scores) largest = std::max<double>(largest, s);
  for (size_t j = 0; j < scores.size(); ++j) {
    sum += std::exp(scores[j] - largest);
    output += std::exp(scores[j] - largest) * j;
  }
  for (int tile : {1, 7, 64, 300}) {
    const DeviceArray<float> device(scores), result(3);
    run_online<<<1, 1>>>(device.get(), static_cast<int>(scores.size()), tile, result.get());
    const std::vector<float> found = result.values();
    EXPECT_EQ(found[0], static_cast<float>(largest)) << tile;
    // Each of 300 terms is an exp, scaled down and added with a rounding each.
    EXPECT_NEAR(found[1], sum, 3 * 300 * 0x1p-24 * sum) << tile;
    EXPECT_NEAR(found[2], output, 3 * 300 * 0x1p-24 * output) << tile;
  }
}

template <int kDim>
__global__ void run_load(const float* x, int first, int seq, const Rotation* rotations, bool halves, float* result) {
  extern __shared__ float4 memory[];
  auto* tile = reinterpret_cast<float(*)[kDim + kPad]>(memory);
  load_tile<kDim>(tile, x, first, seq, rotations, halves);
  __syncthreads();
  for (int n = threadIdx.x; n < kTile * kDim; n += kThreads) result[n] = tile[n / kDim][n % kDim];
}

TEST(Flash, TilesAreRotatedAsInFloat64WithZerosPastTheEnd) {
  constexpr int kSeq = 4000, kDim = 128, kFirst = 3968;  // 32 rows of the sequence, then 32 past its end
  const std::vector<float> x = numbers(kSeq * kDim, 7);
  for (Pairing pairing : {Pairing::none, Pairing::halves, Pairing::interleaved}) {
    std::vector<double> expected(x.begin(), x.end());
    reference_rope(expected, 1, kSeq, kDim, pairing);
    const DeviceArray<float> device_x(x), result(kTile * kDim);
    const DeviceArray<Rotation> rotations(make_rotations(kSeq, kDim));
    launch("run_load", run_load<kDim>, 1, kThreads, kTile * (kDim + kPad) * sizeof(float), nullptr, device_x.get(),
           kFirst, kSeq, pairing == Pairing::none ? nullptr : rotations.get(), pairing == Pairing::halves,
           result.get());
    const std::vector<float> found = result.values();
    for (int n = 0; n < kTile * kDim; ++n) {
      const int position = kFirst + n / kDim;
      const double value = position < kSeq ? expected[position * kDim + n % kDim] : 0;
      ASSERT_NEAR(found[n], value, 4 * 0x1p-24) << name_of(pairing) << " " << n;  // two products and a sum
    }
  }
}

}  // namespace
}  // namespace ladder
