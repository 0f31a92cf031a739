// int8_f16 in the general backend with P v of a tile of keys summed in f16 (docs/kernels/general_8bit.md): who asks for
// it, and that neither the largest nor the smallest numbers are lost to the range of f16.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <octet/formats.hpp>
#include <optional>
#include <string>
#include <utility>

#include "gpu/explained.h"
#include "gpu/place.h"
#include "passes/real.h"
#include "support/random_problems.h"

namespace octet::test {
namespace {

constexpr const char *kVariable = "OCTET_F16_SUMS", *kBackend = "sm80", *kSays = "P v summed in f16";
const Tested kSm80{kBackend, [] { return std::make_unique<GpuPlace>(); }};

// Sets the variable for the time of its life.
struct Wanted : Variable {
  explicit Wanted(const char* value) : Variable(kVariable, value) {}
};

Case of_dim(int64_t dim) {
  return {.name = "f16_sums", .heads = 2, .tokens_q = 130, .tokens_k = 300, .dim = dim, .dim_v = dim};
}

Attention int8_f16(const Case& c) { return attention_of(c, Precision::int8_f16, kBackend); }

std::string explained(const Case& c) { return explained(c, int8_f16(c)); }

Outputs run_on_gpu(const Case& c, const Inputs& in, const Attention& attention) {
  GpuPlace place;
  return run(c, in, attention, Pass::forward, nullptr, &place);
}
Outputs run_on_gpu(const Case& c, const Inputs& in) { return run_on_gpu(c, in, int8_f16(c)); }

TEST(GpuF16Sums, are_chosen_by_the_name_of_the_card) {
  const Wanted nothing(nullptr);
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, 0));
  const bool wants = std::string(properties.name).find("GeForce") != std::string::npos;
  EXPECT_EQ(explained(of_dim(64)).find(kSays) != std::string::npos, wants)
      << properties.name << ": " << explained(of_dim(64));
}

TEST(GpuF16Sums, are_chosen_by_the_variable) {
  for (const char* value : {"0", "1"}) {
    const Wanted wanted(value);
    for (const int64_t dim : {64, 72, 128, 256})
      EXPECT_EQ(explained(of_dim(dim)).find(kSays) != std::string::npos, *value == '1') << explained(of_dim(dim));
  }
}

TEST(GpuF16Sums, are_no_value_but_0_and_1) {
  for (const char* value : {"yes", "2", "01"}) {
    const Wanted wanted(value);
    try {
      explained(of_dim(64));
      FAIL() << "took " << value;
    } catch (const std::exception& e) {
      EXPECT_NE(std::string(e.what()).find(std::string("OCTET_F16_SUMS: found \"") + value +
                                           "\", allowed: 0 (sums of P v in float32), 1 (in f16)"),
                std::string::npos)
          << e.what();
    }
  }
}

// A mask tensor, dropout, a softcap and few queries keep their kernels, and so do other precisions.
TEST(GpuF16Sums, are_those_of_plain_logits_alone) {
  const Wanted wanted("1");
  Case few = of_dim(64), plain = of_dim(64);
  few.tokens_q = 1, few.tokens_k = 4096;
  EXPECT_EQ(explained(few).find(kSays), std::string::npos) << explained(few);
  Attention attention = int8_f16(plain);
  attention.softcap = 30.f;
  EXPECT_EQ(explained(plain, attention).find(kSays), std::string::npos);
  for (const Precision other : {Precision::f16, Precision::int8, Precision::int8_fp8})
    EXPECT_EQ(explained(plain, attention_of(plain, other, kBackend)).find(kSays), std::string::npos) << name(other);
}

TEST(GpuF16Sums, meet_the_bars) {
  const Wanted wanted("1");
  expect_forward_bar(kSm80, int8_f16_forward_bar());
  RealBar real = kRealInt8F16;
  real.o = .0065;
  expect_real_bar(kSm80, real);
}

// The largest finite |v| that a query of a head may see.
double largest_v(const Case& c, const Inputs& in, int64_t b, int64_t h) {
  double most = 0.0;
  for (int64_t t = 0; t < c.tokens_k; ++t)
    for (int64_t channel = 0; channel < c.dim_v; ++channel) {
      const double x = std::fabs(in.v.at(b, h / (c.heads / c.kv_heads), t, channel));
      if (std::isfinite(x)) most = std::max(most, x);
    }
  return most;
}

// Random problems of every mask, option, layout and head dim: o differs from that of float32 sums by no more than four
// roundings of sums and those of P, each of half a unit, and lse by float32 alone.
TEST(GpuF16Sums, differ_from_float32_sums_by_their_roundings) {
  const auto [first, count] = draws(60);
  int compared = 0;
  for (uint64_t i = 0; i < count; ++i) {
    RandomProblem x = random_problem(first + i);
    if (x.pass != Pass::forward || std::max(x.c.dim, x.c.dim_v) > 256) continue;
    SCOPED_TRACE(text(x));
    x.c.out_dtype = DType::f32;
    x.attention.precision = Precision::int8_f16, x.attention.backend = kBackend;
    x.attention.bias_correction = BiasCorrection::f16, x.attention.beta = 0.f;
    const auto solve = [&](const char* sums) {
      const Wanted wanted(sums);
      return run_on_gpu(x.c, x.in, x.attention);
    };
    const Outputs want = solve("0"), got = solve("1");
    ++compared;
    for (int64_t b = 0; b < x.c.batch; ++b)
      for (int64_t h = 0; h < x.c.heads; ++h) {
        const double most = largest_v(x.c, x.in, b, h);
        for (int64_t t = 0; t < x.c.tokens_q; ++t) {
          const double lse = want.lse.at(b, h, t, 0);
          if (std::isfinite(lse)) {
            ASSERT_NEAR(got.lse.at(b, h, t, 0), lse, 1e-5 * (1.0 + std::fabs(lse)));
          }
          for (int64_t channel = 0; channel < x.c.dim_v; ++channel) {
            const double y = want.o.at(b, h, t, channel);
            ASSERT_EQ(std::isfinite(got.o.at(b, h, t, channel)), std::isfinite(y));
            if (std::isfinite(y)) {
              ASSERT_NEAR(got.o.at(b, h, t, channel), y, 6 * 0x1p-11 * most);
            }
          }
        }
      }
  }
  EXPECT_GT(compared, 0);
}

// If all keys have the same v, o is that v to within the roundings of four sums, whatever P are.
void expect_constant(const Case& c, const Inputs& in, double v, const std::string& what) {
  const Outputs got = run_on_gpu(c, in);
  for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
    const double x = got.o.at(b, h, t, channel), want = channel % 2 ? -v : v;
    ASSERT_LE(std::fabs(x - want), 0x1p-9 * std::fabs(v)) << what << ", " << h << ' ' << t << ' ' << channel;
  });
}

// P of 1 for all keys, and P that rise from tile to tile, last keys first, by nearly as much as a stale maximum lets
// them: the largest sums that there are.
TEST(GpuF16Sums, hold_the_largest_numbers) {
  const Wanted wanted("1");
  for (const int64_t dim : {64, 96, 128, 256})
    for (const double rise : {0.0, 1.9, 2.05, 30.0}) {  // of the logits, in each 32 keys
      Case c = of_dim(dim);
      c.heads = 1, c.tokens_q = 70, c.scale = .0625f;
      for (const auto& [type, largest] :
           {std::pair{DType::f16, 65504.0}, {DType::bf16, 0x1.fep126}, {DType::f32, 1e-30}}) {
        c.dtype = type;
        Inputs in = draw(c, 3);
        for (double& x : in.q.data) x = 0.0;
        for (double& x : in.k.data) x = 0.0;
        for_each(c.q_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t) { in.q.at(b, h, t, 0) = 16.0; });
        for_each(c.k_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t) {
          in.k.at(b, h, t, 0) = round_to(kBf16, rise * static_cast<double>((c.tokens_k - 1 - t) / 32));
        });
        for_each(c.v_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
          in.v.at(b, h, t, channel) = channel % 2 ? -largest : largest;
        });
        expect_constant(
            c, in, in.v.at(0, 0, 0, 0),
            "dim " + std::to_string(dim) + ", rise " + std::to_string(rise) + ", v " + std::to_string(largest));
      }
    }
}

// One channel, or one token that most rows do not see, that is far larger than the others costs them nothing.
TEST(GpuF16Sums, keep_what_stands_beside_outliers) {
  for (const int64_t dim : {64, 128, 256})
    for (const bool channel : {true, false})
      for (const double factor : {1000.0, 0x1p17}) {
        Case c = of_dim(dim);
        c.tokens_q = c.tokens_k = 300, c.causal = true, c.dtype = DType::bf16;
        Inputs in = draw(c, 4);
        for_each(c.v_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) {
          if (channel ? i == 5 : t == c.tokens_k - 1) in.v.at(b, h, t, i) *= factor;
        });
        const Outputs want = exact(c, in, Pass::forward);
        const auto error = [&](const char* sums) {
          const Wanted wanted(sums);
          const Outputs got = run_on_gpu(c, in);
          double squares = 0.0, norm = 0.0;
          for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t i) {
            if (channel ? i == 5 : t == c.tokens_k - 1) return;
            const double x = want.o.at(b, h, t, i);
            squares += std::pow(got.o.at(b, h, t, i) - x, 2), norm += x * x;
          });
          return std::sqrt(squares / norm);
        };
        // Sums in f16 add a rounding, which is independent of the others.
        EXPECT_LE(error("1"), std::hypot(error("0"), 0x1p-10))
            << "dim " << dim << (channel ? ", a channel" : ", a token") << " times " << factor;
      }
}

// Numbers of v that are beyond all others by more than f16 sums can hold are infinite, and are seen as such.
TEST(GpuF16Sums, show_what_they_cannot_hold) {
  const Wanted wanted("1");
  Case c = of_dim(64);
  c.tokens_q = c.tokens_k = 300, c.causal = true, c.dtype = DType::bf16;
  Inputs in = draw(c, 5);
  constexpr int64_t kBad = 200;
  for (const double bad : {0x1p40, -0x1p100, double(INFINITY), std::numeric_limits<double>::quiet_NaN()}) {
    const Outputs clean = run_on_gpu(c, in);
    Inputs other = in;
    other.v.at(0, 0, kBad, 7) = bad;
    const Outputs got = run_on_gpu(c, other);
    for_each(c.o_shape(), [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
      const bool sees = channel == 7 && t >= kBad;
      const double x = got.o.at(b, h, t, channel);
      if (sees) {
        EXPECT_FALSE(std::isfinite(x)) << bad << ", row " << t << ": " << x;
      } else {
        EXPECT_NEAR(x, clean.o.at(b, h, t, channel), .02) << bad << ", row " << t << ", channel " << channel;
      }
    });
  }
}

}  // namespace
}  // namespace octet::test
