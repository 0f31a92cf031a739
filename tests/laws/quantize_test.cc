// Laws of quantized logits: exact integer corrections of zero points, invariance under rotation and smoothing, RoPE as
// a rotation, and the predicted logit error against the measured one.
#include <cmath>
#include <complex>

#include "support/quantizing.h"

namespace octet::quantizing {
namespace {

// sum_c (q - z_q)(k - z_k) = sum_c q k - z_k R_q - z_q R_k + d z_q z_k with row sums R, all of it in int32: bit exact.
TEST(Bars, zero_point_integer_identity) {
  for (const DType q_codes : {DType::i8, DType::u8})
    for (const DType k_codes : {DType::i8, DType::u8})
      for (const double bias : {0.0, 2.0, 50.0}) {
        const int64_t dim = 256, tokens = 40;
        const Array x = Array(DType::f32, {1, 1, tokens, dim}).random(1, 1, bias),
                    y = Array(DType::f32, {1, 1, tokens, dim}).random(2, 1, -bias);
        const auto q =
            quantized(x, {.codes = q_codes, .operand = OCTET_OPERAND_Q, .zero_point = OCTET_ZERO_POINT_INTEGER});
        const auto k = quantized(y, {.codes = k_codes, .zero_point = OCTET_ZERO_POINT_INTEGER});
        for (int64_t i = 0; i < tokens; ++i)
          for (int64_t j = 0; j < tokens; ++j) {
            const auto zq = static_cast<int32_t>(q->zero(0, 0, i, 0)), zk = static_cast<int32_t>(k->zero(0, 0, j, 0));
            int32_t product = 0, rq = 0, rk = 0;
            int64_t exact = 0;
            for (int64_t c = 0; c < dim; ++c) {
              const auto a = static_cast<int32_t>(q->codes.get(0, 0, i, c)),
                         b = static_cast<int32_t>(k->codes.get(0, 0, j, c));
              product += a * b, rq += a, rk += b;
              exact += (static_cast<int64_t>(a) - zq) * (static_cast<int64_t>(b) - zk);
            }
            ASSERT_EQ(static_cast<int64_t>(product - zk * rq - zq * rk + static_cast<int32_t>(dim) * zq * zk), exact)
                << i << ' ' << j;
          }
      }
}

// (s_q q + z_q).(s_k k + z_k) = s_q s_k q.k + s_q z_k R_q + s_k z_q R_k + d z_q z_k.
TEST(ZeroPoints, FloatCorrectionsGiveTheDequantizedLogits) {
  const int64_t dim = 64, tokens = 30;
  const Array x = Array(DType::f32, {1, 1, tokens, dim}).random(3, 1, 2),
              y = Array(DType::f32, {1, 1, tokens, dim}).random(4, 1, 2);
  const auto q = quantized(x, {.operand = OCTET_OPERAND_Q, .zero_point = OCTET_ZERO_POINT_FLOAT});
  const auto k = quantized(y, {.codes = DType::u8, .zero_point = OCTET_ZERO_POINT_FLOAT});
  for (int64_t i = 0; i < tokens; ++i)
    for (int64_t j = 0; j < tokens; ++j) {
      int32_t product = 0, rq = 0, rk = 0;
      double want = 0, size = 0;
      for (int64_t c = 0; c < dim; ++c) {
        const auto a = static_cast<int32_t>(q->codes.get(0, 0, i, c)),
                   b = static_cast<int32_t>(k->codes.get(0, 0, j, c));
        product += a * b, rq += a, rk += b;
        want += q->value(0, 0, i, c) * k->value(0, 0, j, c);
        size += std::fabs(q->value(0, 0, i, c) * k->value(0, 0, j, c));
      }
      const double sq = q->step(0, 0, i, 0), sk = k->step(0, 0, j, 0), zq = q->zero(0, 0, i, 0),
                   zk = k->zero(0, 0, j, 0);
      const double got = sq * sk * product + sq * zk * rq + sk * zq * rk + dim * zq * zk;
      ASSERT_NEAR(got, want,
                  64 * 0x1p-52 * (size + std::fabs(sq * zk * rq) + std::fabs(sk * zq * rk) + std::fabs(dim * zq * zk)));
    }
}

// sum_j p_j (v_j - z) = sum_j p_j v_j - z sum_j p_j, per channel of v, with u8 codes of p.
TEST(ZeroPoints, CorrectionsOfVAreExact) {
  const int64_t dim = 32, tokens = 500;
  const Array x = Array(DType::f32, {1, 1, tokens, dim}).random(5, 1, 3);
  const auto v = quantized(
      x, {.operand = OCTET_OPERAND_V, .granularity = OCTET_PER_CHANNEL, .zero_point = OCTET_ZERO_POINT_INTEGER});
  for (int64_t c = 0; c < dim; ++c) {
    int32_t product = 0, l = 0;
    int64_t exact = 0;
    const auto z = static_cast<int32_t>(v->zero(0, 0, 0, c));
    for (int64_t j = 0; j < tokens; ++j) {
      const auto p = static_cast<int32_t>(j * 37 % 256), code = static_cast<int32_t>(v->codes.get(0, 0, j, c));
      product += p * code, l += p;
      exact += static_cast<int64_t>(p) * (code - z);
    }
    ASSERT_EQ(static_cast<int64_t>(product - z * l), exact);
  }
}

// With symmetric q, and k of one scale and zero point, the correction is one number per query: softmax cancels it.
TEST(ZeroPoints, AsymmetricKIsFreeWithSymmetricQ) {
  const int64_t dim = 64, tokens = 30;
  const Array x = Array(DType::f32, {1, 1, tokens, dim}).random(6),
              y = Array(DType::f32, {1, 1, tokens, dim}).random(7, 1, 2);
  const auto q = quantized(x, {.operand = OCTET_OPERAND_Q});
  const auto k =
      quantized(y, {.codes = DType::u8, .granularity = OCTET_PER_TENSOR, .zero_point = OCTET_ZERO_POINT_INTEGER});
  for (int64_t i = 0; i < tokens; ++i) {
    int64_t correction = 0;
    for (int64_t j = 0; j < tokens; ++j) {
      int64_t with = 0, without = 0;
      for (int64_t c = 0; c < dim; ++c) {
        const auto a = static_cast<int64_t>(q->codes.get(0, 0, i, c)),
                   b = static_cast<int64_t>(k->codes.get(0, 0, j, c));
        with += a * (b - static_cast<int64_t>(k->zero(0, 0, j, 0))), without += a * b;
      }
      if (!j) correction = with - without;
      ASSERT_EQ(with - without, correction);
    }
  }
}

double dot(const Quantized& q, int64_t h, int64_t i, const Quantized& k, int64_t g, int64_t j, int64_t dim) {
  double sum = 0;
  for (int64_t c = 0; c < dim; ++c) sum += q.value(0, h, i, c) * k.value(0, g, j, c);
  return sum;
}

// Returns {predicted, measured} errors of the second head's logits, predicted from the statistics of q (two heads) and
// k (one).
std::pair<double, double> logit_errors(const Array& x, const Array& y, Recipe q_recipe, const Recipe& k_recipe) {
  q_recipe.operand = OCTET_OPERAND_Q;
  const int64_t tokens = x.shape()[2], dim = x.shape()[3];
  const float scale = 1.f / std::sqrt(static_cast<float>(dim));
  const auto q = quantized(x, q_recipe), k = quantized(y, k_recipe);
  Array error(DType::f32, {1, 2, 1, 1});
  const Tensor qs = q->statistics.tensor(), ks = k->statistics.tensor();
  Tensor e = error.tensor();
  check(octet_logit_error(&qs, &ks, scale, &e, nullptr));
  std::vector<double> exact_q, exact_k, got_q, got_k;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < dim; ++c) {
      exact_q.push_back(x.get(0, 1, t, c)), got_q.push_back(q->value(0, 1, t, c));
      exact_k.push_back(y.get(0, 0, t, c) - (k_recipe.smooth ? k->mean.get(0, 0, 0, c) : 0)),
          got_k.push_back(k->value(0, 0, t, c));
    }
  double squares = 0;
  for (int64_t i = 0; i < tokens; ++i)
    for (int64_t j = 0; j < tokens; ++j) {
      double d = 0;
      for (int64_t c = 0; c < dim; ++c)
        d += got_q[i * dim + c] * got_k[j * dim + c] - exact_q[i * dim + c] * exact_k[j * dim + c];
      squares += scale * d * scale * d;
    }
  return {error.get(0, 1, 0, 0), std::sqrt(squares / static_cast<double>(tokens * tokens))};
}

TEST(LogitError, IsPredictedWithinTenPercent) {
  const int64_t tokens = 384, dim = 64;
  for (const double bias : {0.0, 3.0})
    for (const double sigma : {1.0, 4.0}) {
      Array x = Array(DType::f32, {1, 2, tokens, dim}).random(8, sigma),
            y = Array(DType::f32, {1, 1, tokens, dim}).random(9, 1, bias);
      for (int64_t t = 0; t < tokens; ++t) y.set(0, 0, t, 5, 10 * y.get(0, 0, t, 5));  // an outlier channel
      const auto expect = [&](const char* what, const Recipe& q, const Recipe& k) {
        const auto [predicted, measured] = logit_errors(x, y, q, k);
        EXPECT_NEAR(predicted / measured, 1, 0.1) << what << ", bias " << bias << ", sigma " << sigma << ": predicted "
                                                  << predicted << ", measured " << measured;
      };
      expect("int8 token", {}, {});
      expect("int8 token smoothed", {}, {.smooth = true});
      expect("int8 token rotated", {.seed = 1}, {.smooth = true, .seed = 1});
      expect("int8 block", {.granularity = OCTET_PER_BLOCK, .block = 128},
             {.granularity = OCTET_PER_BLOCK, .block = 64, .smooth = true});
      expect("int8 thread", {.granularity = OCTET_PER_THREAD}, {.granularity = OCTET_PER_THREAD, .smooth = true});
      expect("int4 thread", {.codes = DType::i4, .granularity = OCTET_PER_THREAD, .seed = 1},
             {.codes = DType::i4, .granularity = OCTET_PER_THREAD, .smooth = true, .seed = 1});
      expect("uint8 k", {}, {.codes = DType::u8, .zero_point = OCTET_ZERO_POINT_INTEGER});
      expect("e4m3 token", {.codes = DType::e4m3}, {.codes = DType::e4m3, .smooth = true});
    }
}

TEST(Hadamard, LeavesLogitsAndMovesOutliers) {
  const int64_t dim = 96, tokens = 60;
  Array x = Array(DType::f32, {1, 1, tokens, dim}).random(10), y = Array(DType::f32, {1, 1, tokens, dim}).random(11);
  for (int64_t t = 0; t < tokens; ++t)
    x.set(0, 0, t, 7, 30 * x.get(0, 0, t, 7)), y.set(0, 0, t, 9, 30 * y.get(0, 0, t, 9));
  const auto error = [&](uint64_t seed) {
    const auto q = quantized(x, {.operand = OCTET_OPERAND_Q, .seed = seed}), k = quantized(y, {.seed = seed});
    double squares = 0;
    for (int64_t i = 0; i < tokens; ++i)
      for (int64_t j = 0; j < tokens; ++j) {
        double exact = 0;
        for (int64_t c = 0; c < dim; ++c) exact += x.get(0, 0, i, c) * y.get(0, 0, j, c);
        const double d = dot(*q, 0, i, *k, 0, j, dim) - exact;
        squares += d * d;
      }
    return std::sqrt(squares) / static_cast<double>(tokens);
  };
  const auto q = quantized(x, {}), k = quantized(y, {});
  EXPECT_GT(q->statistic(0, 0, OCTET_STATISTIC_OUTLIER), 4);
  EXPECT_LT(error(12), 0.7 * error(0));  // both errors are of rounding alone; of different logits they would be huge
}

TEST(Statistics, AreWhatTheyAreCalled) {
  const int64_t tokens = 257, dim = 24;
  const Array x = Array(DType::f32, {2, 2, tokens, dim}).random(12, 2, 3);
  for (const bool smooth : {false, true}) {
    const auto q =
        quantized(x, {.granularity = OCTET_PER_BLOCK, .block = 32, .smooth = smooth, .seed = smooth ? 3u : 0u});
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t h = 0; h < 2; ++h) {
        double step = 0, norm = 0, mean_norm = 0, spread = 0;
        std::vector<double> top(dim);
        for (int64_t c = 0; c < dim; ++c) {
          double mean = 0;
          for (int64_t t = 0; t < tokens; ++t) mean += x.get(b, h, t, c) / tokens;
          mean_norm += mean * mean;
          for (int64_t t = 0; t < tokens; ++t) {
            const double away = x.get(b, h, t, c) - mean, kept = smooth ? away : x.get(b, h, t, c);
            spread += away * away / (tokens * dim), norm += kept * kept / tokens;
            top[c] = std::fmax(top[c], std::fabs(kept));
          }
        }
        for (int64_t t = 0; t < tokens; ++t) step += q->step(b, h, t, 0) * q->step(b, h, t, 0) / 12 / tokens;
        std::sort(top.begin(), top.end());
        EXPECT_NEAR(q->statistic(b, h, OCTET_STATISTIC_STEP) / std::sqrt(step), 1, 1e-6);
        EXPECT_NEAR(q->statistic(b, h, OCTET_STATISTIC_NORM) / std::sqrt(norm), 1, 1e-6);
        EXPECT_NEAR(q->statistic(b, h, OCTET_STATISTIC_BIAS) / std::sqrt(mean_norm / spread), 1, 1e-6);
        EXPECT_NEAR(
            q->statistic(b, h, OCTET_STATISTIC_OUTLIER) / (top[dim - 1] / ((top[dim / 2 - 1] + top[dim / 2]) / 2)), 1,
            1e-5);
      }
  }
}

Array turned(const Array& x, const octet_rope& rope, bool inverse, DType out) {
  Array y(out, x.shape(), Layout::padded);
  const Tensor in = x.tensor();
  Tensor to = y.tensor();
  check(octet_apply_rope(&rope, &in, inverse, &to, nullptr));
  EXPECT_TRUE(y.intact());
  return y;
}

TEST(Rope, TurnsPairsAsComplexNumbers) {
  for (const octet_rope_style style : {OCTET_ROPE_HALF, OCTET_ROPE_INTERLEAVED})
    for (const int64_t rotated : {0, 2, 16, 40})
      for (const int64_t offset : {int64_t{0}, int64_t{77}, int64_t{-5}, int64_t{1} << 20})
        for (const double base : {0.0, 500000.0})
          for (const DType dtype : {DType::f64, DType::f32}) {
            octet_rope rope = OCTET_ROPE_INIT;
            rope.style = style, rope.dim = rotated, rope.offset = offset, rope.base = base;
            const Array x = Array(dtype, {1, 2, 150, 40}, Layout::token_major).random(13);
            const Array y = turned(x, rope, false, dtype);
            const int64_t dim = rotated ? rotated : 40;
            // In units of half an ulp: 4 for a sine from the addition theorem, twice in a turn of 3 roundings, and the
            // 4 of the product below. Angles are rounded at a multiple of 64 within 64 positions of the token.
            const double ulp = dtype == DType::f64 ? 0x1p-49 : 0x1p-22;
            for (int64_t h = 0; h < 2; ++h)
              for (int64_t t = 0; t < 150; ++t) {
                for (int64_t pair = 0; pair < dim / 2; ++pair) {
                  const int64_t a = style == OCTET_ROPE_HALF ? pair : 2 * pair,
                                b = style == OCTET_ROPE_HALF ? pair + dim / 2 : 2 * pair + 1;
                  const double theta =
                      std::pow(base == 0 ? 10000.0 : base, -2.0 * static_cast<double>(pair) / static_cast<double>(dim));
                  const double angle = static_cast<double>(t + offset) * theta;
                  const std::complex<double> z{x.get(0, h, t, a), x.get(0, h, t, b)}, w = z * std::polar(1.0, angle);
                  const double rounding = (ulp + (std::fabs(angle) + 64 * theta) * 0x1p-52) * std::abs(z);
                  ASSERT_NEAR(y.get(0, h, t, a), w.real(), rounding);
                  ASSERT_NEAR(y.get(0, h, t, b), w.imag(), rounding);
                }
                for (int64_t c = dim; c < 40; ++c) ASSERT_EQ(y.get(0, h, t, c), x.get(0, h, t, c));
              }
          }
}

// Half ulps of a norm: of the sum of squares 1 for each square, 3 of a block of four and 1 for each halving of the
// blocks; 3 of the mean and eps; half of these, 1 and 1 after a root and a quotient; 2 of the products.
TEST(Rope, NormalisesRowsBeforeItTurnsThem) {
  for (const DType dtype : {DType::f64, DType::f32})
    for (const int64_t dim : {1, 2, 24, 64, 100, 128, 256, 1000})
      for (const int64_t heads_of_weight : {0, 1, 3})
        for (const float eps : {0.f, 1e-6f, 0.5f}) {
          const Array x = Array(dtype, {2, 3, 20, dim}, Layout::token_major).random(13, 1e-2, 1);
          const Array weight = Array(DType::f32, {1, std::max<int64_t>(heads_of_weight, 1), 1, dim}).random(17, 1, 1);
          const Tensor weights = weight.tensor();
          octet_rope rope = OCTET_ROPE_INIT;
          rope.norm = OCTET_NORM_RMS, rope.norm_eps = eps;
          if (heads_of_weight) rope.norm_weight = &weights;
          const Array y = turned(x, rope, false, dtype);
          const double ulps = (4 + std::ceil(std::log2((static_cast<double>(dim) + 3) / 4)) + 3) / 2 + 4;
          const double relative = 1.001 * ulps * (dtype == DType::f64 ? 0x1p-53 : 0x1p-24);
          x.each([&](auto b, auto h, auto t, auto c) {
            double squares = 0;
            for (int64_t j = 0; j < dim; ++j) squares += x.get(b, h, t, j) * x.get(b, h, t, j);
            const double w = heads_of_weight ? weight.get(0, heads_of_weight == 1 ? 0 : h, 0, c) : 1;
            const double want = x.get(b, h, t, c) / std::sqrt(squares / static_cast<double>(dim) + eps) * w;
            ASSERT_NEAR(y.get(b, h, t, c), want, relative * std::fabs(want) * (dtype == DType::f64 ? 2 : 1))
                << "dim " << dim << " at " << t << ' ' << c;
          });
          if (dim % 2) continue;
          octet_rope alone = rope;
          rope.style = OCTET_ROPE_HALF, rope.offset = 5, alone = OCTET_ROPE_INIT;
          alone.style = OCTET_ROPE_HALF, alone.offset = 5;
          EXPECT_EQ(turned(x, rope, false, dtype).bytes(), turned(y, alone, false, dtype).bytes());
        }
}

TEST(Rope, InverseUndoesItAndInPlaceIsTheSame) {
  for (const octet_rope_style style : {OCTET_ROPE_HALF, OCTET_ROPE_INTERLEAVED}) {
    octet_rope rope = OCTET_ROPE_INIT;
    rope.style = style, rope.offset = 12345;
    const Array x = Array(DType::f64, {2, 2, 100, 32}, Layout::padded).random(14);
    const Array there = turned(x, rope, false, DType::f64), back = turned(there, rope, true, DType::f64);
    x.each([&](auto b, auto h, auto t, auto c) { ASSERT_NEAR(back.get(b, h, t, c), x.get(b, h, t, c), 1e-14); });
    const Array y = x;
    const Tensor in = y.tensor();
    Tensor out = y.tensor();
    check(octet_apply_rope(&rope, &in, 0, &out, nullptr));
    y.each([&](auto b, auto h, auto t, auto c) { ASSERT_EQ(y.get(b, h, t, c), there.get(b, h, t, c)); });
  }
}

// RoPE inside the quantizer costs at most 1.05 times what it costs before it: logits of fused and of separately turned
// q and k, which are stored in bf16 between the two as models do, against float64.
TEST(Bars, rope_fused) {
  const int64_t tokens = 100, dim = 64;
  const Array x = Array(DType::bf16, {1, 1, tokens, dim}).random(16, 1, 1),
              y = Array(DType::bf16, {1, 1, tokens, dim}).random(17, 1, 3);
  for (const octet_rope_style style : {OCTET_ROPE_HALF, OCTET_ROPE_INTERLEAVED})
    for (const DType codes : {DType::i8, DType::e4m3}) {
      octet_rope rope = OCTET_ROPE_INIT;
      rope.style = style, rope.offset = 500;
      const Array exact_q = turned(x, rope, false, DType::f64), exact_k = turned(y, rope, false, DType::f64);
      const auto error = [&](const Quantized& q, const Quantized& k) {
        double squares = 0;
        for (int64_t i = 0; i < tokens; ++i)
          for (int64_t j = 0; j < tokens; ++j) {
            double exact = 0;
            for (int64_t c = 0; c < dim; ++c) exact += exact_q.get(0, 0, i, c) * exact_k.get(0, 0, j, c);
            const double d = dot(q, 0, i, k, 0, j, dim) - exact;
            squares += d * d;
          }
        return std::sqrt(squares);
      };
      const double fused = error(*quantized(x, {.codes = codes, .operand = OCTET_OPERAND_Q, .rope = rope}),
                                 *quantized(y, {.codes = codes, .rope = rope}));
      const double apart =
          error(*quantized(turned(x, rope, false, DType::bf16), {.codes = codes, .operand = OCTET_OPERAND_Q}),
                *quantized(turned(y, rope, false, DType::bf16), {.codes = codes}));
      EXPECT_LE(fused, 1.05 * apart) << "style " << style << ", codes " << static_cast<int>(codes);
    }
}

// q and k turned by the same offset: logits depend on the distance of tokens alone.
TEST(Rope, LogitsDependOnDistanceAlone) {
  const Array x = Array(DType::f64, {1, 1, 50, 32}).random(15);
  octet_rope rope = OCTET_ROPE_INIT;
  rope.style = OCTET_ROPE_HALF;
  const Array near = turned(x, rope, false, DType::f64);
  rope.offset = 4096;
  const Array far = turned(x, rope, false, DType::f64);
  for (int64_t i = 0; i < 50; ++i)
    for (int64_t j = 0; j < 50; ++j) {
      double a = 0, b = 0;
      for (int64_t c = 0; c < 32; ++c)
        a += near.get(0, 0, i, c) * near.get(0, 0, j, c), b += far.get(0, 0, i, c) * far.get(0, 0, j, c);
      ASSERT_NEAR(a, b, 1e-9);
    }
}

}  // namespace
}  // namespace octet::quantizing
