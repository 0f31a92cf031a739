// The probability of dropout and its seed: values, shapes, types and memory.
#include <limits>
#include <memory>

#include "misuse/calls.h"

namespace octet::test {
namespace {

constexpr octet_pass kPasses[] = {OCTET_FORWARD, OCTET_BACKWARD, OCTET_JVP};

std::unique_ptr<Call> complete(octet_pass pass, octet_precision precision = OCTET_PRECISION_F32) {
  auto call = std::make_unique<Call>(pass, precision);
  call->attention.dropout_p = .25;
  call->arguments.dropout_seed = &call->dropout_seed;
  return call;
}

TEST(Dropout, is_taken_by_every_pass) {
  for (const octet_pass pass : kPasses)
    for (const octet_precision precision : {OCTET_PRECISION_F64, OCTET_PRECISION_F32}) {
      auto call = complete(pass, precision), shared = complete(pass, precision), broadcast = complete(pass, precision);
      expect_accepted(*call);
      shared->dropout_seed.shape[0] = 1;
      expect_accepted(*shared);
      broadcast->dropout_seed.stride[0] = 0;
      expect_accepted(*broadcast);
    }
}

TEST(Dropout, a_probability_is_a_multiple_of_its_smallest_below_one) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::pair<double, const char*> wrongs[] = {{std::numeric_limits<double>::quiet_NaN(), "nan"},
                                                   {kInfinity, "inf"},
                                                   {-.1, "-0.1"},
                                                   {1.0, "1"},
                                                   {1.5, "1.5"},
                                                   {0x1p-24, "5.96046e-08"}};
  for (const octet_pass pass : kPasses)
    for (const auto& [p, text] : wrongs) {
      auto call = complete(pass);
      call->attention.dropout_p = p;
      expect_invalid(*call, std::string("dropout_p: found ") + text +
                                ", allowed: 0 for none, or 2^-23 to 1 - 2^-23 (1.19209e-07 to 0.99999988)");
    }
  for (const double p : {0x1p-23, 1 - 0x1p-23}) {
    auto call = complete(OCTET_FORWARD);
    call->attention.dropout_p = p;
    expect_accepted(*call);
  }
}

TEST(Dropout, probability_and_seed_belong_together) {
  auto without_seed = complete(OCTET_BACKWARD), without_p = complete(OCTET_BACKWARD);
  without_seed->arguments.dropout_seed = nullptr;
  expect_invalid(*without_seed, "dropout_seed: NULL, but dropout_p is 0.25; pass the seed and the offset");
  without_p->attention.dropout_p = 0;
  expect_invalid(*without_p, "dropout_seed: given without dropout_p, to which it belongs; pass NULL");
}

TEST(Dropout, a_seed_has_one_shape) {
  const std::pair<int, int64_t> wrongs[] = {{0, 3}, {0, 0}, {1, 2}, {2, 5}, {3, 2}, {3, 8}};
  for (const auto& [dimension, size] : wrongs) {
    auto call = complete(OCTET_FORWARD);
    call->dropout_seed.shape[dimension] = size;
    expect_invalid(*call, "dropout_seed: shape [", {"expected [2, 1, 1, 4] (1 or the batch of q, 1, 1, 4)"});
  }
  auto apart = complete(OCTET_FORWARD);
  apart->dropout_seed.stride[3] = 2;
  expect_invalid(*apart, "dropout_seed: last stride 2, allowed: 1");
}

TEST(Dropout, packed_sequences_may_have_seeds_of_their_own) {
  const auto packed = [](int64_t seeds) {
    auto call = complete(OCTET_FORWARD);
    call->pack({0, 2, 3, 5}, {0, 2, 5, 7});
    call->dropout_seed.shape[0] = seeds;
    return call;
  };
  expect_accepted(*packed(1));
  expect_accepted(*packed(3));
  expect_invalid(*packed(2), "dropout_seed: shape [2, 1, 1, 4], expected [3, 1, 1, 4]",
                 {"(1 or the packed sequences, 1, 1, 4)"});
}

TEST(Dropout, a_seed_is_i32) {
  for (const auto& [dtype, name] : {std::pair{OCTET_F32, "f32"}, {OCTET_F64, "f64"}, {OCTET_I8, "i8"}}) {
    auto call = complete(OCTET_FORWARD);
    call->dropout_seed.dtype = dtype;
    expect_invalid(*call, std::string("dropout_seed: dtype ") + name + ", allowed: i32");
  }
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  auto coded = complete(OCTET_FORWARD);
  coded->dropout_seed.quantization = &how;
  expect_invalid(*coded, "dropout_seed: has a quantization, which only q, k and v may have; leave it NULL");
}

TEST(Dropout, outputs_do_not_lie_in_the_seed) {
  auto call = complete(OCTET_BACKWARD);
  call->dropout_seed.data = call->dq.data;
  expect_invalid(*call, "dq: its memory overlaps that of dropout_seed");
}

// A program compiled before dropout came passes structs that end with rounding and alibi_slopes.
TEST(Dropout, smaller_structs_have_none) {
  auto call = complete(OCTET_FORWARD);
  call->arguments.size = offsetof(octet_arguments, dropout_seed);
  call->attention.size = offsetof(octet_attention, dropout_p);
  call->attention.dropout_p = 99;  // would be rejected
  expect_accepted(*call);
}

// P without some of its elements does not sum to 1, so that o would not get the mean of v back.
TEST(Dropout, values_quantized_with_a_mean_are_left_to_the_reference) {
  auto call = complete(OCTET_FORWARD, OCTET_PRECISION_INT8);
  octet_tensor scale = call->lse, mean = call->lse;  // memory of the right size
  scale.shape[1] = mean.shape[1] = kKvHeads, scale.shape[2] = kTokensK, mean.shape[2] = 1, mean.shape[3] = kDimV;
  scale.data = mean.data = call->inputs.data();
  for (octet_tensor* t : {&scale, &mean})
    for (int i = 2, stride = 1; i >= 0; --i) stride *= static_cast<int>(t->shape[i + 1]), t->stride[i] = stride;
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  how.operand = OCTET_OPERAND_V, how.granularity = OCTET_PER_TOKEN, how.scale = &scale, how.mean = &mean;
  call->v.dtype = OCTET_I8, call->v.quantization = &how;
  expect_unsupported(
      *call, "no backend can solve this problem:",
      {"cpu: v came quantized with a mean, which it takes without dropout; the reference backend has it"});
  call->attention.backend = "reference";
  expect_accepted(*call);
}

}  // namespace
}  // namespace octet::test
