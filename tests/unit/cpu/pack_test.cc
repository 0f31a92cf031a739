// Packing there and back: what lies in the words of the operands are the numbers of the caller's tensors, rounded as
// the recipe says, for all tails of tokens and dims and for any strides.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/quant/hadamard.h"
#include "primitives.h"

namespace octet::cpu::test {
namespace {

constexpr int64_t kMaxDim = kMostHeadDim;
constexpr int64_t kTokens[] = {1, 2, 63, 64, 65, 130};
constexpr int64_t kDims[] = {8, 24, 64, 72, 128, 136, 512};

// A tensor of one batch element, either dense or with tokens before heads and gaps between elements.
struct Tensor {
  std::vector<float> data;
  View view;

  Tensor(int64_t heads, int64_t tokens, int64_t dim, bool dense, unsigned seed, bool of_bf16) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    view.dtype = OCTET_F32;
    const int64_t shape[4] = {1, heads, tokens, dim}, step = dense ? 1 : 3;
    std::copy(shape, shape + 4, view.shape);
    view.stride[3] = step;
    view.stride[2] = step * dim * (dense ? 1 : heads);
    view.stride[1] = step * dim * (dense ? tokens : 1);
    view.stride[0] = step * dim * heads * tokens;
    data.resize(view.stride[0]);
    for (float& x : data) {
      x = normal(random);
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      if (of_bf16) bits &= 0xffff0000u;
      std::memcpy(&x, &bits, sizeof bits);
    }
    view.data = data.data();
  }
  double at(int64_t h, int64_t t, int64_t c) const { return *view.at<float>(0, h, t, c); }
};

struct Case {
  octet_precision precision;
  const char* name;
  octet_bias_correction correction;
  bool of_bf16;                   // inputs are bf16 numbers, which the operands hold exactly
  double k_scales, v_scales;      // error, in scales
  double k_relative, v_relative;  // and relative to the number
};
constexpr Case kCases[] = {
    {OCTET_PRECISION_F32, "f32", OCTET_BIAS_CORRECTION_F16, false, 0, 0, 0, 0},
    {OCTET_PRECISION_BF16, "bf16", OCTET_BIAS_CORRECTION_NONE, true, 0, 0, 0, 0},
    {OCTET_PRECISION_F16, "f16", OCTET_BIAS_CORRECTION_NONE, false, 0, 0, 0x1p-11, 0x1p-11},
    {OCTET_PRECISION_INT8, "int8", OCTET_BIAS_CORRECTION_F16, false, 0.5, 0.5, 0, 0},
    {OCTET_PRECISION_INT8_F16, "int8_f16", OCTET_BIAS_CORRECTION_F16, false, 0.5, 0, 0, 0x1p-11},
    {OCTET_PRECISION_FP8, "fp8", OCTET_BIAS_CORRECTION_F16, false, 0x1p-10, 0x1p-10, 0x1p-4, 0x1p-4},
};

Problem problem_of(const Case& of, const Tensor& q, const Tensor& k, const Tensor& v, bool hadamard) {
  Problem p{};
  p.pass = OCTET_FORWARD, p.precision = of.precision, p.bias_correction = of.correction, p.scale = 1.f;
  p.hadamard = hadamard, p.device = OCTET_CPU;
  p.batch = 1, p.heads = q.view.shape[1], p.kv_heads = k.view.shape[1];
  p.tokens_q = q.view.shape[2], p.tokens_k = k.view.shape[2], p.dim = q.view.shape[3], p.dim_v = v.view.shape[3];
  p.q = q.view, p.k = k.view, p.v = v.view, p.o = q.view;
  return p;
}

// x rotated as the library rotates it, in float64.
std::vector<double> rotated(std::vector<double> x, bool rotate) {
  if (!rotate) return x;
  const auto dim = static_cast<int64_t>(x.size()), block = hadamard_block(dim);
  for (int64_t c = 0; c < dim; ++c) x[c] *= hadamard_sign(kHadamardSeed, c) / std::sqrt(static_cast<double>(block));
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t c = 0; c < dim; ++c)
      if (!(c % (2 * half) / half)) {
        const double a = x[c], b = x[c + half];
        x[c] = a + b, x[c + half] = a - b;
      }
  return x;
}

double largest(const std::vector<double>& x) {
  double top = 0;
  for (const double one : x) top = std::max(top, std::fabs(one));
  return top;
}

// Memory aligned as a workspace is.
struct Workspace {
  std::vector<unsigned char> bytes;
  void* at;
  explicit Workspace(std::size_t size) : bytes(size + 64), at(bytes.data()) {
    std::size_t space = bytes.size();
    at = std::align(64, size, at, space);
  }
};

// Expects numbers that went through an operand: `row` is what they were.
void expect_row(const double* got, const std::vector<double>& row, double scale, double scales, double relative) {
  const double of_float = 1e-5 * largest(row);  // the rotation and the subtraction of means are in float32
  for (std::size_t c = 0; c < row.size(); ++c)
    ASSERT_LE(std::fabs(got[c] - row[c]),
              scales * scale * 1.0001 + relative * std::fabs(row[c]) + (scales || relative ? of_float : 0))
        << "channel " << c << ": " << got[c] << ", not " << row[c] << ", scale " << scale;
}

void expect_keys(const Case& of, int64_t tokens, int64_t dim, int64_t dim_v, bool dense, bool hadamard) {
  constexpr int64_t kHeads = 2;
  const Tensor q(kHeads, 5, dim, dense, 1, of.of_bf16), k(kHeads, tokens, dim, dense, 2, of.of_bf16),
      v(kHeads, tokens, dim_v, dense, 3, of.of_bf16);
  const Problem p = problem_of(of, q, k, v, hadamard);
  const ForwardNumerics numerics = forward_numerics(p);
  SCOPED_TRACE(std::string(of.name) + ", " + std::to_string(tokens) + " tokens, dims " + std::to_string(dim) + ", " +
               std::to_string(dim_v) + (dense ? "" : ", strided") + (numerics.hadamard ? ", rotated" : ""));
  std::vector<double> k_out(kHeads * tokens * dim), v_out(kHeads * tokens * dim_v);
  std::vector<float> k_scale(kHeads * tokens), v_scale(kHeads * tokens), k_mean(kHeads * kMaxDim),
      v_mean(kHeads * kMaxDim);
  Workspace workspace(primitives().pack_bytes(p));
  primitives().pack_keys(p, workspace.at,
                         {k_out.data(), v_out.data(), k_scale.data(), v_scale.data(), k_mean.data(), v_mean.data()});
  for (int64_t g = 0; g < kHeads; ++g)
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<double> k_row, v_row;
      for (int64_t c = 0; c < dim; ++c) k_row.push_back(k.at(g, t, c) - k_mean[g * kMaxDim + c]);
      for (int64_t c = 0; c < dim_v; ++c) v_row.push_back(v.at(g, t, c) - v_mean[g * kMaxDim + c]);
      k_row = rotated(k_row, numerics.hadamard);
      const int64_t at = g * tokens + t;
      SCOPED_TRACE("token " + std::to_string(t) + " of head " + std::to_string(g));
      expect_row(&k_out[at * dim], k_row, k_scale[at], of.k_scales, of.k_relative);
      expect_row(&v_out[at * dim_v], v_row, v_scale[at], of.v_scales, of.v_relative);
      if (numerics.k_group == 1 && numerics.qk == OCTET_I8) {
        ASSERT_NEAR(k_scale[at] * 127, largest(k_row), 1e-4 * largest(k_row));
      }
      if (testing::Test::HasFailure()) return;
    }
}

TEST(Pack, keys_and_values_come_back_from_their_words) {
  for (const Case& of : kCases)
    for (const int64_t tokens : kTokens)
      for (const int64_t dim : kDims)
        for (const bool dense : {true, false})
          for (const bool hadamard : {false, true}) {
            // dim_v differs from dim, so that neither is taken for the other.
            expect_keys(of, tokens, dim, kDims[(dim + tokens) % 7], dense, hadamard);
            if (testing::Test::HasFailure()) return;
          }
}

TEST(Pack, queries_come_back_from_their_words) {
  for (const Case& of : kCases)
    for (const int64_t dim : kDims)
      for (const bool dense : {true, false})
        for (const bool hadamard : {false, true}) {
          const Tensor q(1, 70, dim, dense, 4, of.of_bf16), k(1, 3, dim, dense, 5, of.of_bf16);
          const Problem p = problem_of(of, q, k, k, hadamard);
          const ForwardNumerics numerics = forward_numerics(p);
          for (const auto& [token, rows] : {std::pair{0, 1}, {0, 64}, {64, 6}, {69, 1}, {3, 13}}) {
            SCOPED_TRACE(std::string(of.name) + ", dim " + std::to_string(dim) + ", " + std::to_string(rows) +
                         " rows from " + std::to_string(token));
            std::vector<double> out(rows * dim);
            std::vector<float> scale(rows);
            Workspace workspace(1 << 20);
            primitives().pack_queries(p, token, rows, workspace.at, out.data(), scale.data());
            for (int64_t i = 0; i < rows; ++i) {
              std::vector<double> row;
              for (int64_t c = 0; c < dim; ++c) row.push_back(q.at(0, token + i, c));
              expect_row(&out[i * dim], rotated(row, numerics.hadamard), scale[i], of.k_scales, of.k_relative);
            }
            if (testing::Test::HasFailure()) return;
          }
        }
}

TEST(Pack, a_key_that_is_no_number_has_no_scale_and_spoils_no_other) {
  for (const Case& of : kCases) {
    if (!of.k_scales) continue;
    SCOPED_TRACE(of.name);
    Tensor q(1, 5, 64, true, 6, false), k(1, 70, 64, true, 7, false), v(1, 70, 64, true, 8, false);
    k.data[66 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
    const Problem p = problem_of(of, q, k, v, false);
    std::vector<double> k_out(70 * 64), v_out(70 * 64);
    std::vector<float> k_scale(70), v_scale(70), k_mean(kMaxDim), v_mean(kMaxDim);
    Workspace workspace(primitives().pack_bytes(p));
    primitives().pack_keys(p, workspace.at,
                           {k_out.data(), v_out.data(), k_scale.data(), v_scale.data(), k_mean.data(), v_mean.data()});
    for (int64_t t = 0; t < 70; ++t) {
      EXPECT_EQ(std::isnan(k_scale[t]), t == 66) << t;
      for (int64_t c = 0; c < 64 && t != 66; ++c) ASSERT_TRUE(std::isfinite(k_out[t * 64 + c])) << t << ", " << c;
    }
  }
}

TEST(Pack, keys_that_no_query_sees_become_zeros) {
  for (const Case& of : kCases) {
    if (!of.k_scales) continue;
    SCOPED_TRACE(of.name);
    const Tensor q(1, 5, 64, true, 6, false), k(1, 70, 64, true, 7, false), v(1, 70, 64, true, 8, false);
    Problem p = problem_of(of, q, k, v, false);
    p.windowed = true, p.left = Problem::kUnbounded, p.right = 0;  // query i sees keys 0 to i
    std::vector<double> k_out(70 * 64), v_out(70 * 64);
    std::vector<float> k_scale(70), v_scale(70), k_mean(kMaxDim), v_mean(kMaxDim);
    Workspace workspace(primitives().pack_bytes(p));
    primitives().pack_keys(p, workspace.at,
                           {k_out.data(), v_out.data(), k_scale.data(), v_scale.data(), k_mean.data(), v_mean.data()});
    for (int64_t t = 0; t < 70; ++t) {
      EXPECT_EQ(largest({k_out.begin() + t * 64, k_out.begin() + (t + 1) * 64}) == 0, t >= 5) << t;
      for (int64_t c = 0; c < 64 && t >= 5; ++c) ASSERT_EQ(v_out[t * 64 + c], 0) << t << ", " << c;
    }
  }
}

}  // namespace
}  // namespace octet::cpu::test
