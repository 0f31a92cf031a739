// octet_append on a GPU gives the bits of the CPU.
#include <gtest/gtest.h>

#include "gpu/place.h"
#include "support/appending.h"

namespace octet::test {
namespace {

class GpuAppends : public testing::TestWithParam<Appending> {};

TEST_P(GpuAppends, what_the_cpu_appends) {
  GpuPlace place;
  const Appended got(GetParam(), &place), want(GetParam());
  for (const auto& buffer :
       {&Appended::k_cache, &Appended::v_cache, &Appended::k_scale, &Appended::v_scale, &Appended::q_turned}) {
    if (!(want.*buffer).present()) continue;
    EXPECT_TRUE((got.*buffer).bytes() == (want.*buffer).bytes());
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuAppends, testing::ValuesIn(appendings()),
                         [](const testing::TestParamInfo<Appending>& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace octet::test
