// Programs that were compiled with octet.h 0.1.0 get the same bits from this library as those compiled with today's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

std::vector<unsigned char> client_0_1(), client_today();

namespace {

TEST(Clients, structs_of_0_1_give_the_bits_of_todays) {
  const std::vector<unsigned char> today = client_today();
  EXPECT_EQ(client_0_1(), today);
  // The first o, of precision f64, is attention: of values in [-1, 1], not all zero.
  float o[64], largest = 0;
  std::memcpy(o, today.data(), sizeof o);
  for (const float x : o) largest = std::max(largest, std::fabs(x));
  EXPECT_GT(largest, 0.f);
  EXPECT_LE(largest, 1.f);
}

}  // namespace
