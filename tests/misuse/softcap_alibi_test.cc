// Softcap and the slopes of ALiBi: their values, shapes, types and memory.
#include <limits>
#include <memory>

#include "misuse/calls.h"

namespace octet::test {
namespace {

constexpr octet_pass kPasses[] = {OCTET_FORWARD, OCTET_BACKWARD, OCTET_JVP};

std::unique_ptr<Call> complete(octet_pass pass, octet_precision precision = OCTET_PRECISION_F32) {
  auto call = std::make_unique<Call>(pass, precision);
  call->attention.softcap = 30.f;
  call->arguments.alibi_slopes = &call->alibi_slopes;
  return call;
}

TEST(SoftcapAlibi, are_taken_by_every_pass) {
  for (const octet_pass pass : kPasses)
    for (const octet_precision precision : {OCTET_PRECISION_F64, OCTET_PRECISION_F32}) {
      auto call = complete(pass, precision), shared = complete(pass, precision), broadcast = complete(pass, precision);
      expect_accepted(*call);
      shared->alibi_slopes.shape[0] = 1;
      expect_accepted(*shared);
      broadcast->alibi_slopes.stride[0] = broadcast->alibi_slopes.stride[1] = 0;
      expect_accepted(*broadcast);
    }
}

TEST(SoftcapAlibi, a_softcap_is_positive_and_finite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::pair<float, const char*> wrongs[] = {{std::numeric_limits<float>::quiet_NaN(), "nan"},
                                                  {kInfinity, "inf"},
                                                  {-kInfinity, "-inf"},
                                                  {-30.f, "-30"},
                                                  {0x1p-127f, "5.87747e-39"}};
  for (const octet_pass pass : kPasses)
    for (const auto& [softcap, text] : wrongs) {
      auto call = complete(pass);
      call->attention.softcap = softcap;
      expect_invalid(*call, std::string("softcap: found ") + text +
                                ", allowed: positive and finite, 1.17549e-38 to 3.40282e+38, or 0 for none");
    }
  for (const float softcap : {0x1p-126f, std::numeric_limits<float>::max()}) {
    auto call = complete(OCTET_FORWARD);
    call->attention.softcap = softcap;
    expect_accepted(*call);
  }
}

TEST(SoftcapAlibi, slopes_have_one_shape) {
  const std::pair<int, int64_t> wrongs[] = {{0, 3}, {0, 0}, {1, 2}, {2, 5}, {3, 8}};
  for (const auto& [dimension, size] : wrongs) {
    auto call = complete(OCTET_BACKWARD);
    call->alibi_slopes.shape[dimension] = size;
    expect_invalid(*call, "alibi_slopes: shape [", {"expected [2, 4, 1, 1] (1 or the batch of q, heads of q, 1, 1)"});
  }
}

TEST(SoftcapAlibi, packed_sequences_may_have_slopes_of_their_own) {
  const auto packed = [](int64_t slopes) {
    auto call = complete(OCTET_FORWARD);
    call->pack({0, 2, 3, 5}, {0, 2, 5, 7});
    call->alibi_slopes.shape[0] = slopes;
    return call;
  };
  expect_accepted(*packed(1));
  expect_accepted(*packed(3));
  expect_invalid(*packed(2), "alibi_slopes: shape [2, 4, 1, 1], expected [3, 4, 1, 1]",
                 {"(1 or the packed sequences, heads of q, 1, 1)"});
}

TEST(SoftcapAlibi, slopes_are_f32) {
  for (const auto& [dtype, name] : {std::pair{OCTET_F64, "f64"}, {OCTET_BF16, "bf16"}, {OCTET_I8, "i8"}}) {
    auto call = complete(OCTET_FORWARD), oracle = complete(OCTET_FORWARD, OCTET_PRECISION_F64);
    call->alibi_slopes.dtype = oracle->alibi_slopes.dtype = dtype;
    expect_invalid(*call, std::string("alibi_slopes: dtype ") + name + ", allowed: f32");
    if (dtype == OCTET_F64)
      expect_accepted(*oracle);
    else
      expect_invalid(*oracle, std::string("alibi_slopes: dtype ") + name + ", allowed: f32, f64");
  }
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  auto coded = complete(OCTET_FORWARD);
  coded->alibi_slopes.quantization = &how;
  expect_invalid(*coded, "alibi_slopes: has a quantization, which only q, k and v may have; leave it NULL");
}

TEST(SoftcapAlibi, outputs_do_not_lie_in_the_slopes) {
  auto call = complete(OCTET_BACKWARD);
  call->alibi_slopes.data = call->dq.data;
  expect_invalid(*call, "dq: its memory overlaps that of alibi_slopes");
}

// A program compiled before alibi_slopes came passes a struct that ends with tlse.
TEST(SoftcapAlibi, smaller_structs_have_no_slopes) {
  auto call = complete(OCTET_FORWARD);
  call->arguments.size = offsetof(octet_arguments, alibi_slopes);
  call->alibi_slopes.shape[1] = 99;  // would be rejected
  expect_accepted(*call);
}

}  // namespace
}  // namespace octet::test
