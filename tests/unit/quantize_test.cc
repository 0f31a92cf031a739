// The row arithmetic under the quantizers: bit conversions against octet/formats.hpp, NaN, rotations, groups.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <octet/formats.hpp>
#include <random>
#include <set>
#include <vector>

#include "core/quant/hadamard.h"
#include "core/quant/scale.h"
#include "core/quantization.h"
#include "cpu/quantize/elements.h"
#include "cpu/quantize/rope.h"

namespace octet {
namespace {

// Floats of every magnitude, every tie and its neighbours among the 16-bit formats, and the special ones.
std::vector<float> interesting_floats() {
  std::vector<float> out;
  for (uint32_t top = 0; top < 0x10000; ++top)
    for (const uint32_t low :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xf000u, 0xffffu})
      out.push_back(std::bit_cast<float>(top << 16 | low));
  return out;
}

TEST(Elements, EveryF16AndBf16DecodesAsTheFormatSays) {
  std::vector<uint16_t> bits(0x10000);
  for (uint32_t i = 0; i < 0x10000; ++i) {
    bits[i] = static_cast<uint16_t>(i);
    for (const auto& [dtype, got] : {std::pair{OCTET_F16, f16_value(bits[i])}, {OCTET_BF16, bf16_value(bits[i])}}) {
      const double want = load(dtype, bits.data(), i);
      ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : want == got && std::signbit(want) == std::signbit(got))
          << dtype << ' ' << i << ' ' << got;
    }
  }
}

TEST(Elements, FloatsEncodeAsTheFormatsSay) {
  for (const float x : interesting_floats()) {
    uint16_t f16 = 0, bf16 = 0;
    store(OCTET_F16, &f16, 0, x), store(OCTET_BF16, &bf16, 0, x);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(f16_value(f16_bits(x))) && std::isnan(bf16_value(bf16_bits(x))));
      continue;
    }
    ASSERT_EQ(f16_bits(x), f16) << x;
    ASSERT_EQ(bf16_bits(x), bf16) << x;
  }
}

TEST(Elements, Fp8AndIntegerCodesRoundAsTheFormatsSay) {
  for (const float x : interesting_floats()) {
    uint8_t e4m3, e5m2, i8, u8, got[4];
    const float value = std::isnan(x) ? 0.f : x;
    store(OCTET_E4M3, &e4m3, 0, value), store(OCTET_E5M2, &e5m2, 0, value), store(OCTET_I8, &i8, 0, value),
        store(OCTET_U8, &u8, 0, value);
    encode_e4m3(&x, 1, &got[0]), encode_e5m2(&x, 1, &got[1]);
    encode_integers(&x, 1, -127.f, 127.f, &got[2]), encode_integers(&x, 1, 0.f, 255.f, &got[3]);
    ASSERT_EQ(got[0], e4m3) << x;
    ASSERT_EQ(got[1], e5m2) << x;
    ASSERT_EQ(got[2], i8) << x;
    ASSERT_EQ(got[3], u8) << x;
  }
}

TEST(Rows, AmaxKeepsNaNAndInfinity) {
  std::vector<float> x(67, 1.f);
  x[50] = -3.f;
  EXPECT_EQ(amax(x.data(), 67), 3.f);
  x[20] = -INFINITY;
  EXPECT_EQ(amax(x.data(), 67), INFINITY);
  x[3] = -NAN;
  EXPECT_TRUE(std::isnan(amax(x.data(), 67)));
  EXPECT_EQ(amax(x.data(), 0), 0.f);
}

TEST(Rows, StepsOfEveryAmax) {
  EXPECT_EQ(scale_of(0.f, 127.f).scale, 0.f);
  EXPECT_EQ(scale_of(0.f, 127.f).inverse, 0.f);
  EXPECT_EQ(scale_of(3.f, 127.f).scale, 3.f / 127.f);
  EXPECT_EQ(scale_of(3.f, 127.f).inverse, 127.f / 3.f);
  for (const float bad : {NAN, INFINITY}) {
    EXPECT_TRUE(std::isnan(scale_of(bad, 127.f).scale));
    EXPECT_EQ(scale_of(bad, 127.f).inverse, 0.f);
  }
  for (const float top : {7.f, 127.f, 255.f, 448.f, 57344.f})
    for (const float amax : {0x1p-149f, 0x1p-126f, 0x1p-110f, 1.f, 0x1.fffffep127f}) {
      const Scale s = scale_of(amax, top);
      EXPECT_TRUE(std::isnormal(s.scale) && std::isnormal(s.inverse)) << amax << ' ' << top;
      EXPECT_LE(amax * s.inverse, top * (1 + 0x1p-23f));
    }
}

TEST(Rows, HadamardIsOrthogonalAndItsInverseUndoesIt) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (const int64_t dim : {1, 2, 4, 6, 8, 24, 40, 64, 96, 128, 192, 256}) {
    std::vector<float> x(dim), y(dim), signs(dim);
    for (int64_t c = 0; c < dim; ++c)
      x[c] = normal(generator), y[c] = normal(generator), signs[c] = hadamard_sign(7, c);
    const auto dot = [&](const std::vector<float>& a, const std::vector<float>& b) {
      double sum = 0;
      for (int64_t c = 0; c < dim; ++c) sum += static_cast<double>(a[c]) * b[c];
      return sum;
    };
    const double before = dot(x, y), size = std::sqrt(dot(x, x) * dot(y, y));
    std::vector<float> hx = x, hy = y;
    hadamard(hx.data(), signs.data(), dim), hadamard(hy.data(), signs.data(), dim);
    const double rounding = 20 * 0x1p-24;  // of up to 8 stages and a norm on either side
    EXPECT_NEAR(dot(hx, hy), before, rounding * size) << dim;
    hadamard_inverse(hx.data(), signs.data(), dim);
    for (int64_t c = 0; c < dim; ++c) EXPECT_NEAR(hx[c], x[c], rounding * std::sqrt(dot(x, x))) << dim;
  }
}

TEST(Rope, SplitPositionsGiveTheSinesOfTheirSum) {
  const Rope rope{OCTET_ROPE_INTERLEAVED, 16, 1000003, 10000.0};
  const cpu::RopeTable table(rope, false);
  cpu::RopeRow<double> turn(table);
  for (const int64_t token : {0, 1, 60, 61, 5, 1000, -1000100}) {
    std::vector<double> x(16, 0.0);
    for (int64_t c = 0; c < 8; ++c) x[2 * c] = 1;
    turn(x.data(), token);
    for (int64_t c = 0; c < 8; ++c) {
      const double angle =
          static_cast<double>(token + rope.offset) * std::pow(10000.0, -2.0 * static_cast<double>(c) / 16);
      // The angles of a multiple of 64, of the rest and of their sum are each rounded by 2^-53 of their size.
      EXPECT_NEAR(x[2 * c], std::cos(angle), 1e-15 + std::fabs(angle) * 0x1p-51);
      EXPECT_NEAR(x[2 * c + 1], std::sin(angle), 1e-15 + std::fabs(angle) * 0x1p-51);
    }
  }
}

TEST(Groups, CoverAllTokensAndEveryRowOfScales) {
  for (const octet_operand operand : {OCTET_OPERAND_Q, OCTET_OPERAND_K})
    for (const auto& [granularity, block] :
         {std::pair{OCTET_PER_TENSOR, 0}, {OCTET_PER_TOKEN, 0}, {OCTET_PER_BLOCK, 5}, {OCTET_PER_THREAD, 0}})
      for (const int64_t tokens : {1, 31, 32, 33, 64, 65, 200, 256}) {
        Quantization how{};
        how.operand = operand, how.granularity = granularity, how.block = block;
        const int64_t groups = scale_groups(operand, granularity, block, tokens);
        std::set<int64_t> seen;
        for (int64_t t = 0; t < tokens; ++t) {
          ASSERT_TRUE(how.group_of(t) >= 0 && how.group_of(t) < groups);
          seen.insert(how.group_of(t));
        }
        EXPECT_TRUE(static_cast<int64_t>(seen.size()) == groups || (granularity == OCTET_PER_THREAD && tokens % 64))
            << seen.size();
      }
}

}  // namespace
}  // namespace octet
