// The pieces of rung 5: the rounding kernels against the same arithmetic on the CPU, bit by bit, and int8 products with
// zero points against int64.
#include <gtest/gtest.h>

#include "../5_int8.cu"
#include "device_array.h"

namespace ladder {
namespace {

// The int32 sums of 16 queries and 16 keys of the first tile of a head.
template <int Dim>
__global__ void run_scores(const int8_t* q, const int8_t* k, const int* start, int seq, int* s) {
  __shared__ __align__(1024) unsigned char q_memory[kKeys * Dim], k_memory[kKeys * Dim];
  const uint32_t q_tile = static_cast<uint32_t>(__cvta_generic_to_shared(q_memory));
  const uint32_t k_tile = static_cast<uint32_t>(__cvta_generic_to_shared(k_memory));
  load<Dim, kKeys>(q_tile, q, 0, seq);
  load<Dim, kKeys>(k_tile, k, 0, seq);
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;
  const uint32_t q_row = q_tile + offset<Dim>(lane % 16, lane / 16);
  const uint32_t k_row = k_tile + offset<Dim>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  int d[2][4];
  for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = start[i / 4 * 8 + column + i % 2];
  for (int c = 0; c < Dim / 32; ++c) {
    uint32_t a[4], b[4];
    ldmatrix(a, q_row ^ 32 * c);
    ldmatrix(b, k_row ^ 32 * c);
    mma(d[0], a, b[0], b[1]);
    mma(d[1], a, b[2], b[3]);
  }
  for (int i = 0; i < 8; ++i) s[(row + i % 4 / 2 * 8) * 16 + i / 4 * 8 + column + i % 2] = d[i / 4][i % 4];
}

std::vector<half> halves_of(const std::vector<float>& x, float factor, float shift) {
  std::vector<half> result;
  for (float value : x) result.push_back(__float2half(factor * value + shift));
  return result;
}

template <typename T>
std::vector<T> download(const T* from, size_t count) {
  std::vector<T> result(count);
  check(cudaMemcpy(result.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return result;
}

// Of one head, whose length is no multiple of a tile.
template <int Dim, bool PerBlock>
void test_rounding() {
  const Problem p{.heads = 1, .seq = 100, .dim = Dim};
  const std::vector<half> q = halves_of(numbers(p.elements(), 21), 3, 1),
                          k = halves_of(numbers(p.elements(), 22), 2, -1),
                          v = halves_of(numbers(p.elements(), 23), 1, 0.5f);
  const DeviceArray<half> device_q(q), device_k(k), device_v(v);
  const DeviceArray<char> memory(workspace_bytes(p));
  const Arguments arguments{device_q.get(), device_k.get(), device_v.get(), nullptr,
                            memory.get(),   nullptr,        Pairing::none};
  launch_rounding<PerBlock>(p, arguments, nullptr);
  const Workspace w = workspace_of(p, memory.get());
  const int blocks = 2;
  const std::vector<float> scales = download(w.scales, 3 * blocks);
  const std::vector<int8_t> codes[] = {download(w.q, p.elements()), download(w.k, p.elements())};
  const std::vector<half> values = download(w.v, p.elements());
  const std::vector<int> start = download(w.start, blocks * kKeys);

  Levels levels[3][blocks];
  const std::vector<half>* inputs[] = {&q, &k, &v};
  for (int tensor = 0; tensor < 3; ++tensor) {
    for (int block = 0; block < blocks; ++block) {
      float low = 0, high = 0;
      for (int i = 0; i < p.elements(); ++i) {
        if (PerBlock && i / (kKeys * Dim) != block) continue;
        low = std::min(low, __half2float((*inputs[tensor])[i])),
        high = std::max(high, __half2float((*inputs[tensor])[i]));
      }
      levels[tensor][block] = PerBlock ? symmetric(std::max(-low, high)) : levels_of(low, high);
      ASSERT_EQ(scales[tensor * blocks + block], levels[tensor][block].scale) << tensor << " " << block;
    }
    for (int i = 0; i < p.elements(); ++i) {
      const Levels& of_block = levels[tensor][i / (kKeys * Dim)];
      const float code = of_block.code(__half2float((*inputs[tensor])[i]));
      if (tensor < 2) ASSERT_EQ(codes[tensor][i], static_cast<int>(code)) << tensor << " " << i;
      if (tensor == 2) ASSERT_EQ(__half2float(values[i]), code - of_block.zero) << i;
    }
  }
  const int q_zero = static_cast<int>(levels[0][0].zero), k_zero = static_cast<int>(levels[1][0].zero);
  for (int key = 0; key < p.seq; ++key) {
    int sum = 0;
    for (int c = 0; c < Dim; ++c) sum += codes[1][key * Dim + c];
    ASSERT_EQ(start[key], start_of(q_zero, sum)) << key;
  }

  const DeviceArray<int> device_s(16 * 16);
  run_scores<Dim><<<1, kThreads>>>(w.q, w.k, w.start, p.seq, device_s.get());
  const std::vector<int> s = device_s.values();
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      int64_t expected = 0, of_row = 0;
      for (int c = 0; c < Dim; ++c) {
        const int64_t a = codes[0][i * Dim + c], b = codes[1][j * Dim + c];
        expected += (a - q_zero) * (b - k_zero);
        of_row += int64_t{k_zero} * q_zero - k_zero * a;  // the same for all keys: softmax does not see it
      }
      ASSERT_EQ(int64_t{s[i * 16 + j]} - kBias + of_row, expected) << i << " " << j;
    }
  }
}

TEST(Int8, RoundingWithZeroPoints) {
  test_rounding<64, false>();
  test_rounding<128, false>();
}
TEST(Int8, RoundingByBlocks) {
  test_rounding<64, true>();
  test_rounding<128, true>();
}

}  // namespace
}  // namespace ladder
