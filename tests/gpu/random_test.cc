// Random problems on a GPU, in parts that run beside each other where a test runner shards them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "gpu/place.h"
#include "support/random_problems.h"

namespace octet::test {
namespace {

// What docs/kernels say of the backend.
bool solves(const RandomProblem& x) {
  const Case& c = x.c;
  const Precision precision = x.attention.precision;
  const DType mask = x.in.mask.present() ? x.in.mask_dtype : DType::none;
  const bool backward = x.pass == Pass::backward;
  const bool gproj = backward && x.attention.bias_correction == BiasCorrection::gproj;
  const bool trains_int8 = precision == Precision::int8 && c.trains_int8 && c.has_residual();
  const bool smooth_q = x.attention.smooth_q == Switch::on;
  if (backward && precision == Precision::int8 && !trains_int8) return false;
  if (trains_int8 && (!tests_sm80() || smooth_q || std::max(c.dim, c.dim_v) > 128)) return false;
  return gpu_computes(x.pass, precision) && gpu_takes_logits(c, x.pass, x.attention, mask, x.in.mask.shape) && !gproj &&
         (!smooth_q || tests_sm80()) && std::max(c.dim, c.dim_v) <= gpu_most_dim(precision, x.pass) &&
         gpu_takes_extras(c, x.pass, x.attention) &&
         (c.dtype != DType::e4m3 || in_8_bits(precision) || gpu_takes_e4m3_as_numbers());
}

// ds of 16 bits has one power of two for many rows (docs/kernels/backward.md, Limits), and deterministic sums of dq
// have a unit, of which the bars know nothing: that small rows lose. Such problems are solved and not compared; those
// of gpu_test and the tests of Python hold this pass to its bars. In 8 bits rows with a large bias take the lse of q
// and k before they are rounded, which is not that of P.
bool has_bars(const RandomProblem& x) {
  if (x.pass != Pass::backward || x.attention.precision == Precision::f32) return true;
  const bool biased = x.c.alibi != Alibi::none || (x.in.mask.present() && x.in.mask_dtype != DType::boolean);
  return in_8_bits(x.attention.precision) && !biased;
}

// Key masks.
bool may_move_keys(const RandomProblem& x) {
  const Shape& mask = x.in.mask.shape;
  return x.in.mask_dtype == DType::boolean && mask[1] == 1 && mask[2] == 1 && !x.c.causal && !x.c.window;
}

class GpuRandomProblems : public testing::TestWithParam<uint64_t> {
 public:
  static constexpr uint64_t kParts = 16;
  static void TearDownTestSuite() {
    std::printf("random problems on %s: %llu solved, %llu rejected\n", gpu_backend(),
                static_cast<unsigned long long>(solved_), static_cast<unsigned long long>(rejected_));
  }

 protected:
  static void expect_all_right(RandomProblem (*problem)(uint64_t seed)) {
    const auto [first, count] = draws(10000);
    const Solver gpu{gpu_backend(), [] { return std::make_unique<GpuPlace>(); }, solves, has_bars, may_move_keys};
    for (uint64_t i = GetParam(); i < count; i += kParts)
      ++(expect_right(problem(first + i), gpu) == Outcome::solved ? solved_ : rejected_);
  }

 private:
  static inline uint64_t solved_ = 0, rejected_ = 0;
};

TEST_P(GpuRandomProblems, are_right_in_every_row) { expect_all_right(random_problem); }
TEST_P(GpuRandomProblems, are_right_in_every_row_in_8_bits) { expect_all_right(random_problem_in_8_bits); }

// A place for tensors that nobody reads.
class Nowhere : public Place {
 public:
  Tensor tensor(const Buffer& buffer) override {
    Tensor t = buffer.view();
    t.device = OCTET_CUDA;
    return t;
  }
  void* workspace(size_t) override { return nullptr; }
  void* stream() override { return nullptr; }
  bool finish() override { return false; }
};

// The general backend solves whatever the CPU solves in f32, f16, bf16, int8 and sagebwd, and forward in the other
// precisions of 8 bits, but for the backward passes of gproj, of int8 and sagebwd beyond head dim 128 and of int8
// without o_residual, in 8 bits dropout but at int8_f16 and gradients of masks, and above head dim 256 but forward and
// backward in f16 and bf16, without gradients of masks.
TEST(GpuRejections, are_none_of_what_the_cpu_solves) {
  if (!tests_sm80()) GTEST_SKIP() << "this backend leaves problems to sm80";
  uint64_t solved = 0, rejected = 0;
  const auto ask = [&](const Case& c, const Inputs& in, Attention attention, Pass pass, const std::string& what) {
    attention.backend = "cpu";
    if (!why_rejected(c, in, attention, pass).empty()) return;
    if (pass == Pass::backward && attention.bias_correction == BiasCorrection::gproj) return;
    attention.backend = "sm80";
    Nowhere nowhere;
    const std::string reason = why_rejected(c, in, attention, pass, &nowhere);
    ++(reason.empty() ? solved : rejected);
    EXPECT_EQ(reason, "") << what;
  };
  using enum BiasCorrection;
  for (const Case& c : cases()) {
    const Inputs in = draw(c, 1);
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::jvp})
      for (const Precision precision :
           {Precision::f32, Precision::f16, Precision::bf16, Precision::int8, Precision::int8_f16, Precision::int8_fp8,
            Precision::fp8, Precision::fp8_raw, Precision::sagebwd})
        for (const BiasCorrection bias_correction : {f16, none, beta, exact_delta}) {
          if (!gpu_computes(pass, precision) || (c.dropout_p != 0 && !gpu_has_dropout(precision))) continue;
          // int8's backward pass needs o_residual, and both have head dims up to 128.
          const bool int8 = precision == Precision::int8, sagebwd = precision == Precision::sagebwd;
          if (pass == Pass::backward && int8 && !c.has_residual()) continue;
          if (pass == Pass::backward && (int8 || sagebwd) && (c.dmask || std::max(c.dim, c.dim_v) > 128)) continue;
          if (std::max(c.dim, c.dim_v) > gpu_most_dim(precision, pass)) continue;
          const bool corrects = precision == Precision::f16 || precision == Precision::bf16;
          Attention attention = attention_of(c, precision, nullptr);
          if ((!corrects || pass == Pass::jvp) && bias_correction != f16) continue;
          attention.bias_correction = bias_correction;
          ask(c, in, attention, pass, std::string(c.name) + ' ' + name(pass) + ' ' + name(precision));
        }
  }
  const auto [first, count] = draws(1000);
  for (uint64_t i = 0; i < count; ++i) {
    const RandomProblem x = random_problem(first + i);
    ask(x.c, x.in, x.attention, x.pass, text(x));
  }
  std::printf(
      "of what the CPU solves in f32, f16, bf16, int8 and sagebwd, and forward in other precisions of 8 bits, sm80 "
      "solves %llu problems and rejects %llu\n",
      static_cast<unsigned long long>(solved), static_cast<unsigned long long>(rejected));
  EXPECT_GT(solved, 0u);
  EXPECT_EQ(rejected, 0u);
}

INSTANTIATE_TEST_SUITE_P(Parts, GpuRandomProblems, testing::Range<uint64_t>(0, GpuRandomProblems::kParts));

}  // namespace
}  // namespace octet::test
