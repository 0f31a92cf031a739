// octet_quantize and its inverse against their definition in float64, over every format, granularity, zero point, input
// type and layout.
#include <cmath>
#include <complex>

#include "support/quantizing.h"

namespace octet::quantizing {
namespace {

constexpr double kFloatUlp = 0x1p-23;

// Codes in full: smallest, largest.
std::pair<double, double> limits(DType codes) {
  switch (codes) {
    case DType::i8:
      return {-127, 127};
    case DType::u8:
      return {0, 255};
    case DType::i4:
      return {-7, 7};
    case DType::e4m3:
      return {-448, 448};
    default:
      return {-57344, 57344};
  }
}

// Returns what a recipe without rotation quantizes: x minus the returned mean, in float.
Array smoothed(const Array& x, const Quantized& q) {
  Array out(DType::f32, x.shape());
  x.each([&](int64_t b, int64_t h, int64_t t, int64_t c) {
    const auto value = static_cast<float>(x.get(b, h, t, c));
    out.set(b, h, t, c, q.recipe.smooth ? value - static_cast<float>(q.mean.get(b, h, 0, c)) : value);
  });
  return out;
}

// Symmetric codes and scales, bit for bit as defined: step = amax / top, code = nearest even of x * (top / amax).
void expect_defined(const Array& x, const Quantized& q) {
  const Array y = smoothed(x, q);
  const auto top = static_cast<float>(limits(q.recipe.codes).second);
  const bool channel = q.recipe.granularity == OCTET_PER_CHANNEL;
  std::vector<float> amax(q.scale.shape()[0] * q.scale.shape()[1] * q.scale.shape()[2] * q.scale.shape()[3]);
  const auto slot = [&](int64_t b, int64_t h, int64_t t, int64_t c) -> float& {
    return amax[((b * x.shape()[1] + h) * q.scale.shape()[2] + q.group(t)) * q.scale.shape()[3] + (channel ? c : 0)];
  };
  y.each([&](auto b, auto h, auto t, auto c) {
    slot(b, h, t, c) = std::fmax(slot(b, h, t, c), std::fabs(static_cast<float>(y.get(b, h, t, c))));
  });
  y.each([&](auto b, auto h, auto t, auto c) {
    const float a = slot(b, h, t, c);
    ASSERT_EQ(q.step(b, h, t, c), a / top) << "scale at " << b << ' ' << h << ' ' << t << ' ' << c;
    const float scaled = static_cast<float>(y.get(b, h, t, c)) * (a > 0 ? top / a : 0.f);
    const double want = round_to(static_cast<octet_dtype>(q.recipe.codes), scaled);
    ASSERT_EQ(q.codes.get(b, h, t, c), want) << "code of " << scaled << " at " << b << ' ' << h << ' ' << t << ' ' << c;
  });
  EXPECT_TRUE(q.codes.intact() && q.scale.intact() && q.zero_point.intact() && q.mean.intact() &&
              q.statistics.intact());
}

TEST(Quantize, SymmetricCodesAndScalesAreBitForBitAsDefined) {
  for (const DType codes : {DType::i8, DType::i4, DType::e4m3, DType::e5m2})
    for (const octet_operand operand : {OCTET_OPERAND_Q, OCTET_OPERAND_K, OCTET_OPERAND_V})
      for (const auto& [granularity, block] : {std::pair{OCTET_PER_TENSOR, 0},
                                               {OCTET_PER_TOKEN, 0},
                                               {OCTET_PER_CHANNEL, 0},
                                               {OCTET_PER_BLOCK, 1},
                                               {OCTET_PER_BLOCK, 7},
                                               {OCTET_PER_BLOCK, 64},
                                               {OCTET_PER_BLOCK, 100000},
                                               {OCTET_PER_THREAD, 0}}) {
        if (granularity == (operand == OCTET_OPERAND_V ? OCTET_PER_THREAD : OCTET_PER_CHANNEL)) continue;
        for (const bool smooth : {false, true}) {
          SCOPED_TRACE(::testing::Message() << "codes " << int(codes) << " operand " << operand << " granularity "
                                            << granularity << " block " << block << " smooth " << smooth);
          const Array x = Array(DType::bf16, {2, 3, 301, 24}).random(1, 1, 3);
          Recipe recipe{
              .codes = codes, .operand = operand, .granularity = granularity, .block = block, .smooth = smooth};
          expect_defined(x, *quantized(x, recipe));
          if (HasFatalFailure()) return;
        }
      }
}

TEST(Quantize, EveryInputTypeAndLayoutAndDim) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::e4m3})
    for (const Layout in : {Layout::dense, Layout::token_major, Layout::transposed, Layout::padded})
      for (const Layout out : {Layout::dense, Layout::token_major, Layout::transposed, Layout::padded})
        for (const int64_t dim : {1, 2, 17, 64, 96, 256}) {
          const Array x = Array(dtype, {2, 2, 33, dim}, in).random(2, 3);
          expect_defined(x, *quantized(x, {.smooth = true, .layout = out}));
          if (HasFatalFailure()) return;
        }
}

TEST(Quantize, TheMeanIsSummedInOrderOverTheTrueTokensAndRoundedOnce) {
  const Array x = Array(DType::f32, {2, 3, 1001, 16}, Layout::padded).random(3, 1, 10);
  const auto q = quantized(x, {.granularity = OCTET_PER_BLOCK, .block = 64, .smooth = true});
  q->mean.each([&](auto b, auto h, auto, auto c) {
    double sum = 0;
    for (int64_t t = 0; t < 1001; ++t) sum += x.get(b, h, t, c);
    ASSERT_EQ(q->mean.get(b, h, 0, c), static_cast<float>(sum / 1001));
  });
}

// |value of the code - x| is at most half a step; scale and inverse, each rounded, move the edges of a code range of
// `span` steps by 2^-23 of it.
TEST(Quantize, ZeroPointCodesAreWithinHalfAStep) {
  for (const DType codes : {DType::i8, DType::u8})
    for (const octet_zero_point kind : {OCTET_ZERO_POINT_INTEGER, OCTET_ZERO_POINT_FLOAT})
      for (const auto& [granularity, block] :
           {std::pair{OCTET_PER_TENSOR, 0}, {OCTET_PER_TOKEN, 0}, {OCTET_PER_CHANNEL, 0}, {OCTET_PER_BLOCK, 33}})
        for (const double bias : {0.0, 5.0}) {
          SCOPED_TRACE(::testing::Message() << "codes " << int(codes) << " kind " << kind << " granularity "
                                            << granularity << " bias " << bias);
          Array x(DType::f32, {1, 2, 130, 24});
          x.random(4, 1, bias);
          const auto q = quantized(x, {.codes = codes,
                                       .operand = OCTET_OPERAND_V,
                                       .granularity = granularity,
                                       .block = block,
                                       .zero_point = kind});
          const auto [low, high] = limits(codes);
          bool lowest = false, highest = false;
          x.each([&](auto b, auto h, auto t, auto c) {
            const double code = q->codes.get(b, h, t, c), zero = q->zero(b, h, t, c), step = q->step(b, h, t, c);
            lowest |= code == low, highest |= code == high;
            ASSERT_TRUE(kind == OCTET_ZERO_POINT_FLOAT || (zero == std::nearbyint(zero) && zero >= low && zero <= high))
                << zero;
            const double rounding = 2 * kFloatUlp * ((high - low) * step + std::fabs(x.get(b, h, t, c)));
            ASSERT_LE(std::fabs(q->value(b, h, t, c) - x.get(b, h, t, c)), 0.5 * step + rounding)
                << "at " << b << ' ' << h << ' ' << t << ' ' << c;
          });
          EXPECT_TRUE(lowest && highest) << "the code range is not used in full";
        }
}

TEST(Quantize, FloatZeroPointsSpanOneSidedRanges) {
  Array x(DType::f32, {1, 1, 64, 16});
  x.each([&](auto b, auto h, auto t, auto c) { x.set(b, h, t, c, 1000 + static_cast<double>(t * 16 + c) / 1024); });
  const auto integer =
      quantized(x, {.codes = DType::u8, .granularity = OCTET_PER_TENSOR, .zero_point = OCTET_ZERO_POINT_INTEGER});
  const auto floating =
      quantized(x, {.codes = DType::u8, .granularity = OCTET_PER_TENSOR, .zero_point = OCTET_ZERO_POINT_FLOAT});
  EXPECT_NEAR(integer->step(0, 0, 0, 0), 1001.0 / 255, 0.01);
  EXPECT_NEAR(floating->step(0, 0, 0, 0), 1.0 / 255, 1e-5);
  EXPECT_EQ(floating->zero(0, 0, 0, 0), 1000.0);
}

TEST(Quantize, SymmetricUnsignedCodesHoldNonNegativeNumbers) {
  Array x(DType::f32, {1, 2, 40, 8});
  x.random(5);
  x.each([&](auto b, auto h, auto t, auto c) { x.set(b, h, t, c, std::fabs(x.get(b, h, t, c))); });
  expect_defined(x, *quantized(x, {.codes = DType::u8}));
}

// H D x / sqrt(block) by its definition: H_rc = (-1)^popcount(r & c).
TEST(Quantize, RotatedCodesAreWithinHalfAStepOfTheDefinition) {
  for (const int64_t dim : {8, 24, 64, 96, 128, 256}) {
    const int64_t block = dim & -dim;
    const Array x = Array(DType::f32, {1, 2, 40, dim}).random(6, 1, 4);
    const auto q = quantized(x, {.smooth = true, .seed = 99});
    // The signs, read off the codes of unit vectors: H's first column has no sign of its own.
    Array unit(DType::f32, {1, 1, dim, dim});
    unit.each([&](auto b, auto h, auto t, auto c) { unit.set(b, h, t, c, t == c); });
    const auto signs = quantized(unit, {.seed = 99});
    int64_t positive = 0;
    for (int64_t c = 0; c < dim; ++c) positive += signs->codes.get(0, 0, c, c / block * block) > 0;
    EXPECT_TRUE(dim < 24 || (positive > dim / 5 && positive < dim - dim / 5)) << positive << " of " << dim;
    x.each([&](auto b, auto h, auto t, auto r) {
      double want = 0, size = 0;
      for (int64_t c = r / block * block; c < r / block * block + block; ++c) {
        const double sign = signs->codes.get(0, 0, c, c / block * block) > 0 ? 1 : -1;
        const double value = x.get(b, h, t, c) - q->mean.get(b, h, 0, c);
        want += (__builtin_popcountll((r % block) & (c % block)) % 2 ? -1 : 1) * sign * value;
        size += std::fabs(value);
      }
      const double step = q->step(b, h, t, r),
                   rounding = 8 * 0x1p-24 * size / std::sqrt(block) + 127 * 2 * kFloatUlp * step;
      ASSERT_LE(std::fabs(q->value(b, h, t, r) - want / std::sqrt(block)), 0.5 * step + rounding)
          << "dim " << dim << " at " << t << ' ' << r;
    });
  }
}

// The rotation is orthogonal, so a row comes back with an error of at most half a step's norm, and smoothing is undone.
TEST(Quantize, DequantizeInverts) {
  for (const DType codes : {DType::i8, DType::u8})
    for (const octet_zero_point kind : {OCTET_SYMMETRIC, OCTET_ZERO_POINT_INTEGER, OCTET_ZERO_POINT_FLOAT})
      for (const uint64_t seed : {0, 5})
        for (const bool smooth : {false, true})
          for (const DType out : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
            if (codes == DType::u8 && kind == OCTET_SYMMETRIC) continue;
            const Array x = Array(DType::f32, {2, 2, 70, 48}, Layout::token_major).random(7, 1, 3);
            const auto q = quantized(x, {.codes = codes,
                                         .granularity = OCTET_PER_BLOCK,
                                         .block = 16,
                                         .zero_point = kind,
                                         .smooth = smooth,
                                         .seed = seed,
                                         .layout = Layout::transposed});
            const Array y = dequantized(*q, out, Layout::padded);
            EXPECT_TRUE(y.intact());
            const double storing = out == DType::bf16 ? 0x1p-8 : out == DType::f16 ? 0x1p-11 : 0x1p-24;
            for (int64_t b = 0; b < 2; ++b)
              for (int64_t h = 0; h < 2; ++h)
                for (int64_t t = 0; t < 70; ++t) {
                  double error = 0, norm = 0, largest = 0;
                  for (int64_t c = 0; c < 48; ++c) {
                    const double e = y.get(b, h, t, c) - x.get(b, h, t, c);
                    error += e * e, norm += x.get(b, h, t, c) * x.get(b, h, t, c),
                        largest = std::fmax(largest, std::fabs(e));
                  }
                  const double half = 0.5 * q->step(b, h, t, 0),
                               rounding = (storing + 16 * kFloatUlp) * std::sqrt(norm) +
                                          256 * 2 * kFloatUlp * half * std::sqrt(48.0);
                  ASSERT_LE(std::sqrt(error), half * std::sqrt(48.0) + rounding);
                  ASSERT_TRUE(seed || largest <= half + rounding) << largest << ' ' << half;
                }
          }
}

TEST(Quantize, DequantizeOfFloatFormatsErrsByTheirRelativePrecision) {
  for (const auto& [codes, relative] : {std::pair{DType::e4m3, 0x1p-4}, {DType::e5m2, 0x1p-3}}) {
    const Array x = Array(DType::bf16, {1, 2, 64, 64}).random(8);
    const auto q = quantized(x, {.codes = codes});
    const Array y = dequantized(*q);
    const double smallest = codes == DType::e4m3 ? 0x1p-9 : 0x1p-16;
    x.each([&](auto b, auto h, auto t, auto c) {
      const double bound = std::fmax(relative * std::fabs(x.get(b, h, t, c)), 0.5 * smallest * q->step(b, h, t, c));
      ASSERT_LE(std::fabs(y.get(b, h, t, c) - x.get(b, h, t, c)), bound * (1 + 8 * kFloatUlp));
    });
  }
}

TEST(Quantize, RopeFusedIsRopeThenQuantize) {
  for (const octet_rope_style style : {OCTET_ROPE_HALF, OCTET_ROPE_INTERLEAVED})
    for (const auto& [rotated, normed] : {std::pair{0, false}, {32, false}, {0, true}, {32, true}}) {
      octet_rope rope = OCTET_ROPE_INIT;
      rope.style = style, rope.dim = rotated, rope.offset = 1000;
      if (normed) rope.norm = OCTET_NORM_RMS, rope.norm_eps = 1e-6f;
      const Array x = Array(DType::bf16, {1, 3, 200, 64}, Layout::token_major).random(9, 1, 2);
      const Array weight = Array(DType::bf16, {1, 3, 1, 64}).random(4, 1, 1);
      const Recipe recipe{.smooth = true, .seed = 3, .rope = rope, .norm_weight = normed ? &weight : nullptr};
      Array turned(DType::f32, x.shape());
      const Tensor in = x.tensor(), weights = weight.tensor();
      Tensor out = turned.tensor();
      check(octet_apply_rope(rope_of(recipe, rope, weights), &in, 0, &out, nullptr));
      const auto fused = quantized(x, recipe), apart = quantized(turned, {.smooth = true, .seed = 3});
      EXPECT_EQ(fused->codes.bytes(), apart->codes.bytes());
      EXPECT_EQ(fused->scale.bytes(), apart->scale.bytes());
      EXPECT_EQ(fused->mean.bytes(), apart->mean.bytes());
    }
}

TEST(Quantize, RepeatsBitForBit) {
  const Array x = Array(DType::bf16, {2, 4, 1000, 128}).random(10, 1, 2);
  const Recipe recipe{.granularity = OCTET_PER_THREAD, .smooth = true, .seed = 1};
  const auto first = quantized(x, recipe);
  for (int i = 0; i < 5; ++i) {
    const auto again = quantized(x, recipe);
    ASSERT_EQ(first->codes.bytes(), again->codes.bytes());
    ASSERT_EQ(first->scale.bytes(), again->scale.bytes());
    ASSERT_EQ(first->mean.bytes(), again->mean.bytes());
    ASSERT_EQ(first->statistics.bytes(), again->statistics.bytes());
  }
}

TEST(Quantize, BroadcastInputs) {
  Array row(DType::f32, {1, 1, 1, 16});
  row.random(11);
  Tensor x = row.tensor();
  x.shape[1] = 2, x.shape[2] = 50, x.stride[1] = x.stride[2] = 0;
  Quantized q({.smooth = true}, {1, 2, 50, 16});
  Tensor codes = q.codes_view();
  check(octet_quantize(&x, nullptr, &codes, nullptr, nullptr));
  const Array back = dequantized(q);
  back.each([&](auto b, auto h, auto t, auto c) { ASSERT_EQ(back.get(b, h, t, c), row.get(0, 0, 0, c)); });
}

TEST(Quantize, EmptyTensorsAndOneToken) {
  for (const octet_granularity granularity : {OCTET_PER_TENSOR, OCTET_PER_TOKEN, OCTET_PER_CHANNEL, OCTET_PER_BLOCK})
    for (const Shape& shape : {Shape{1, 2, 0, 8}, Shape{0, 2, 4, 8}, Shape{1, 0, 4, 8}}) {
      const Array x(DType::f32, shape);
      const auto q = quantized(x, {.operand = OCTET_OPERAND_V,
                                   .granularity = granularity,
                                   .block = granularity == OCTET_PER_BLOCK ? 4 : 0,
                                   .smooth = true,
                                   .seed = 1});
      q->scale.each([&](auto b, auto h, auto g, auto c) { EXPECT_EQ(q->scale.get(b, h, g, c), 0.0); });
      q->mean.each([&](auto b, auto h, auto g, auto c) { EXPECT_EQ(q->mean.get(b, h, g, c), 0.0); });
      q->statistics.each([&](auto b, auto h, auto g, auto c) {
        EXPECT_EQ(q->statistics.get(b, h, g, c), c == OCTET_STATISTIC_OUTLIER ? 1.0 : 0.0);
      });
      dequantized(*q);
    }
  const Array x = Array(DType::f32, {1, 1, 1, 8}).random(12);
  expect_defined(x, *quantized(x, {}));
  const auto q = quantized(x, {.smooth = true});  // the mean is the token
  x.each([&](auto b, auto h, auto t, auto c) {
    EXPECT_EQ(q->codes.get(b, h, t, c), 0.0);
    EXPECT_EQ(dequantized(*q).get(b, h, t, c), x.get(b, h, t, c));
  });
}

TEST(Quantize, ZeroGroupsAndTheSmallestNumbers) {
  Array x(DType::f32, {1, 1, 6, 8});
  const double sizes[] = {0, 0x1p-149, 0x1p-126, 0x1p-115, 0x1p-100, 0x1.fp127};
  x.each([&](auto b, auto h, auto t, auto c) { x.set(b, h, t, c, sizes[t] * (c - 4) / 4); });
  for (const DType codes : {DType::i8, DType::i4, DType::e4m3, DType::e5m2}) {
    const auto q = quantized(x, {.codes = codes});
    x.each([&](auto b, auto h, auto t, auto c) {
      const double step = q->step(b, h, t, c), half = codes == DType::e4m3 ? 16 : codes == DType::e5m2 ? 4096 : 0.5;
      ASSERT_TRUE(std::isfinite(step) && (step > 0) == (t > 0));
      ASSERT_LE(std::fabs(q->value(b, h, t, c) - x.get(b, h, t, c)), half * step * (1 + 0x1p-13)) << t << ' ' << c;
    });
  }
}

// A group with a number that is not finite comes back as NaN; its neighbours are as without it.
TEST(Quantize, NonFiniteNumbersMakeTheirGroupNaN) {
  for (const double bad : {std::nan(""), double(INFINITY), -double(INFINITY)})
    for (const DType codes : {DType::i8, DType::u8, DType::i4, DType::e4m3, DType::e5m2})
      for (const octet_zero_point kind : {OCTET_SYMMETRIC, OCTET_ZERO_POINT_INTEGER, OCTET_ZERO_POINT_FLOAT})
        for (const uint64_t seed : {0, 5}) {
          const bool allowed = codes == DType::i8 || (codes == DType::u8) == (kind != OCTET_SYMMETRIC);
          if (!allowed) continue;
          Array x = Array(DType::f32, {1, 1, 40, 16}).random(13);
          const Recipe recipe{
              .codes = codes, .granularity = OCTET_PER_BLOCK, .block = 8, .zero_point = kind, .seed = seed};
          const auto clean = quantized(x, recipe);
          x.set(0, 0, 11, 3, bad);
          const auto q = quantized(x, recipe);
          const Array y = dequantized(*q);
          EXPECT_TRUE(std::isnan(q->step(0, 0, 8, 0)));
          EXPECT_TRUE(std::isnan(q->statistic(0, 0, OCTET_STATISTIC_STEP)) &&
                      !std::isfinite(q->statistic(0, 0, OCTET_STATISTIC_NORM)));
          y.each([&](auto b, auto h, auto t, auto c) {
            ASSERT_EQ(std::isnan(y.get(b, h, t, c)), t / 8 == 1) << t;
            ASSERT_EQ(q->codes.get(b, h, t, c), t / 8 == 1 ? 0.0 : clean->codes.get(b, h, t, c)) << t;
          });
        }
}

// The mean of smoothing does not carry it into other groups: there it counts as 0.
TEST(Quantize, NonFiniteNumbersStayInTheirGroupWhenSmoothed) {
  for (const double bad : {std::nan(""), double(INFINITY), -double(INFINITY)}) {
    Array x = Array(DType::f32, {1, 2, 40, 16}).random(13, 1, 3);
    x.set(0, 1, 11, 3, 0.0);
    const Recipe recipe{.granularity = OCTET_PER_BLOCK, .block = 8, .smooth = true};
    const auto clean = quantized(x, recipe);
    x.set(0, 1, 11, 3, bad);
    const auto q = quantized(x, recipe);
    EXPECT_EQ(q->mean.bytes(), clean->mean.bytes());
    EXPECT_TRUE(std::isnan(q->statistic(0, 1, OCTET_STATISTIC_STEP)));
    EXPECT_TRUE(std::isnan(q->statistic(0, 1, OCTET_STATISTIC_NORM)));
    x.each([&](auto b, auto h, auto t, auto c) {
      const bool spoiled = h == 1 && t / 8 == 1;
      ASSERT_EQ(std::isnan(q->step(b, h, t, c)), spoiled) << h << ' ' << t;
      ASSERT_EQ(q->codes.get(b, h, t, c), spoiled ? 0.0 : clean->codes.get(b, h, t, c)) << h << ' ' << t;
    });
  }
}

}  // namespace
}  // namespace octet::quantizing
