// The inner loop of every pass against float64: all engines, all tails of rows, columns and depth, and nothing written
// beside the result.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "primitives.h"

namespace octet::cpu::test {
namespace {

constexpr Engine kEngines[] = {Engine::f32, Engine::bf16, Engine::int8, Engine::uint8, Engine::split};
constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 31, 32, 33, 48, 64};
constexpr int64_t kDepths[] = {1, 2, 3, 4, 5, 8, 31, 32, 33, 64, 65, 130, 256};

bool integers(Engine engine) { return engine == Engine::int8 || engine == Engine::uint8; }

class Numbers {
 public:
  // A number that the engine has as an element of A or B.
  float operator()(Engine engine, bool of_a) {
    if (integers(engine))
      return static_cast<float>(engine == Engine::uint8 && of_a ? integer(0, 255) : integer(-127, 127));
    float x = normal_(random_);
    if (engine == Engine::bf16) {
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      bits &= 0xffff0000u;
      std::memcpy(&x, &bits, sizeof bits);
    }
    return x;
  }

 private:
  int integer(int low, int high) { return low + static_cast<int>(random_() % static_cast<unsigned>(high - low + 1)); }

  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
};

// Returns by how much float32 sums of this many terms may err, relative to the sum of magnitudes: each addition rounds,
// and each product. Splitting leaves out three of nine products of parts, which are below 2^-25 each, and adds six for
// one.
double error_bound(Engine engine, int64_t depth) {
  if (integers(engine)) return 0;
  return static_cast<double>(engine == Engine::split ? 6 * depth + 8 : depth + 2) * 0x1p-24;
}

struct Matrices {
  std::vector<float> a, b;
  std::vector<double> c;
};

Matrices random_matrices(Numbers& numbers, const Product& x) {
  Matrices m;
  for (int64_t i = 0; i < x.rows * x.depth; ++i) m.a.push_back(numbers(x.engine, true));
  for (int64_t i = 0; i < x.depth * x.columns; ++i) m.b.push_back(numbers(x.engine, false));
  for (int64_t i = 0; i < x.rows * x.columns; ++i) m.c.push_back(numbers(x.engine, false));
  return m;
}

// Runs a product and compares it with float64, in which zeros of A skip what is not finite if x.skip_zeros.
void expect_product(Product x, const Matrices& m) {
  std::vector<double> c = m.c;
  std::vector<unsigned char> memory(1 << 21);
  x.a = m.a.data(), x.b = m.b.data(), x.c = c.data();
  void* at = memory.data();
  std::size_t space = memory.size();
  x.memory = std::align(64, space - 64, at, space);
  primitives().product(x);
  SCOPED_TRACE(testing::Message() << "engine " << static_cast<int>(x.engine) << ", " << x.rows << " x " << x.columns
                                  << " x " << x.depth << (x.accumulate ? ", accumulated" : "")
                                  << (x.transposed_a ? ", transposed" : ""));
  EXPECT_FALSE(x.outside) << "something beside the result was written";
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.columns; ++j) {
      double want = x.accumulate ? m.c[i * x.columns + j] : 0, magnitude = std::fabs(want);
      for (int64_t e = 0; e < x.depth; ++e) {
        const double a = m.a[i * x.depth + e], b = m.b[e * x.columns + j];
        if (x.skip_zeros && a == 0) continue;
        want += a * b, magnitude += std::fabs(a * b);
      }
      const double got = c[i * x.columns + j];
      if (std::isnan(want) || std::isinf(want))
        ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : got == want)
            << i << ", " << j << ": " << got << ", not " << want;
      else
        ASSERT_LE(std::fabs(got - want), error_bound(x.engine, x.depth) * magnitude)
            << i << ", " << j << ": " << got << ", not " << want;
    }
}

TEST(Gemm, products_of_every_shape_are_those_of_float64) {
  const Primitives& cpu = primitives();
  Numbers numbers;
  for (const Engine engine : kEngines) {
    if (engine == Engine::split && !cpu.has_split) continue;
    for (const int64_t rows : kRows)
      for (int64_t columns = cpu.column_step; columns <= 2 * cpu.panel_columns + cpu.column_step;
           columns += cpu.column_step)
        for (const int64_t depth : kDepths) {
          // Every depth with the shapes of one panel, and every shape with a few depths.
          if (rows > 13 && columns > cpu.panel_columns && depth % 32 == 0) continue;
          Product x{.engine = engine, .rows = rows, .columns = columns, .depth = depth};
          x.accumulate = (rows + columns + depth) % 2;
          x.transposed_a = engine == Engine::f32 && depth % 3 == 0;
          expect_product(x, random_matrices(numbers, x));
          if (testing::Test::HasFailure()) return;
        }
  }
}

TEST(Gemm, large_integers_are_exact) {
  for (const Engine engine : {Engine::int8, Engine::uint8})
    for (const int64_t depth : {1, 63, 64, 256}) {
      Product x{.engine = engine, .rows = 7, .columns = primitives().panel_columns, .depth = depth};
      Matrices m;
      m.a.assign(x.rows * depth, engine == Engine::uint8 ? 255.f : -127.f);
      m.b.assign(depth * x.columns, -127.f);
      m.c.assign(x.rows * x.columns, 0.0);
      expect_product(x, m);
    }
}

TEST(Gemm, zeros_of_a_skip_what_is_not_finite) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
  Numbers numbers;
  for (const Engine engine : {Engine::f32, Engine::bf16})
    for (const int64_t rows : {1, 6, 13, 33})
      for (const int64_t depth : {2, 33, 64}) {
        Product x{.engine = engine, .rows = rows, .columns = 5 * primitives().column_step, .depth = depth};
        x.accumulate = x.skip_zeros = true;
        Matrices m = random_matrices(numbers, x);
        for (int64_t j = 0; j < x.columns; j += 3) m.b[depth / 2 * x.columns + j] = j % 2 ? kInf : kNaN;
        for (int64_t i = 0; i < rows; i += 2) m.a[i * depth + depth / 2] = 0.f;
        expect_product(x, m);
      }
}

}  // namespace
}  // namespace octet::cpu::test
