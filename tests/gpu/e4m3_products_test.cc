// Which GPUs multiply e4m3 in the general backend, at fp8, fp8_raw and int8_fp8 (docs/kernels/general_8bit.md). The
// other tests of these precisions check the results; they run with these products if OCTET_E4M3_PRODUCTS is 1.
#include <gtest/gtest.h>

#include <string>

#include "gpu/explained.h"
#include "gpu/place.h"

namespace octet::test {
namespace {

constexpr const char *kVariable = "OCTET_E4M3_PRODUCTS", *kBackend = "sm80", *kSays = "products of e4m3";
constexpr Precision kPrecisions[] = {Precision::int8_fp8, Precision::fp8, Precision::fp8_raw};

int capability() {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  return 10 * major + minor;
}

Case of_dim(int64_t dim) {
  return {.name = "e4m3_products", .heads = 2, .tokens_q = 130, .tokens_k = 300, .dim = dim, .dim_v = dim};
}

bool says(const Case& c, Precision precision) {
  return explained(c, attention_of(c, precision, kBackend)).find(kSays) != std::string::npos;
}

TEST(GpuE4m3Products, are_chosen_where_tensor_cores_have_them) {
  const Variable nothing(kVariable, nullptr);
  const bool has = capability() == 89 || capability() / 10 == 12;
  for (const Precision precision : kPrecisions) EXPECT_EQ(says(of_dim(64), precision), has) << name(precision);
  EXPECT_FALSE(says(of_dim(64), Precision::int8_f16));
}

TEST(GpuE4m3Products, are_chosen_by_the_variable) {
  for (const Precision precision : kPrecisions)
    for (const int64_t dim : {64, 72, 128, 256}) {
      const Variable zero(kVariable, "0");
      EXPECT_FALSE(says(of_dim(dim), precision)) << name(precision) << ", " << dim;
      if (capability() < 89) continue;
      const Variable one(kVariable, "1");
      EXPECT_TRUE(says(of_dim(dim), precision)) << name(precision) << ", " << dim;
    }
}

TEST(GpuE4m3Products, are_rejected_where_there_is_no_instruction_for_them) {
  if (capability() >= 89) GTEST_SKIP() << "this GPU has instructions for e4m3";
  const Variable one(kVariable, "1");
  try {
    says(of_dim(64), Precision::fp8);
    FAIL() << "took it";
  } catch (const std::exception& e) {
    EXPECT_NE(std::string(e.what()).find("OCTET_E4M3_PRODUCTS: found '1', allowed: 0 before compute capability 8.9"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace octet::test
