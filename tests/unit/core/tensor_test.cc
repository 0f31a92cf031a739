// Shared memory is found as counting addresses would find it.
#include "core/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "core/error.h"

namespace octet {
namespace {

using Random = std::mt19937;

int64_t between(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Strides that nest, in a random order of dimensions and of random sign, with room for gaps.
View nested_view(Random& random, float* middle) {
  View t;
  t.dtype = OCTET_F32;
  t.data = middle + between(random, -12, 12);
  int order[4] = {0, 1, 2, 3};
  std::shuffle(order, order + 4, random);
  int64_t reach = 1;
  for (const int i : order) {
    t.shape[i] = between(random, 1, 4);
    t.stride[i] = (reach + between(random, 0, reach)) * (between(random, 0, 3) ? 1 : -1);
    reach += (t.shape[i] - 1) * std::abs(t.stride[i]);
  }
  return t;
}

std::multiset<const float*> addresses(const View& t) {
  std::multiset<const float*> out;
  for (int64_t b = 0; b < t.shape[0]; ++b)
    for (int64_t h = 0; h < t.shape[1]; ++h)
      for (int64_t i = 0; i < t.shape[2]; ++i)
        for (int64_t c = 0; c < t.shape[3]; ++c) out.insert(t.at<float>(b, h, i, c));
  return out;
}

bool distinct(const std::multiset<const float*>& all) { return all.size() == std::set(all.begin(), all.end()).size(); }

bool accepted(const View& a, const View& b) {
  try {
    expect_no_overlap(a, "a", b, "b");
    return true;
  } catch (const Failure&) {
    return false;
  }
}

TEST(Tensor, views_that_step_alike_overlap_only_where_an_address_is_shared) {
  Random random(1);
  std::vector<float> memory(1 << 16);
  int interleaved = 0, shared = 0;
  for (int trial = 0; trial < 5000; ++trial) {
    const View a = nested_view(random, memory.data() + memory.size() / 2);
    View b = a;
    b.data = static_cast<float*>(a.data) + between(random, -40, 40);
    for (int64_t& n : b.shape) n = between(random, 1, n);
    const std::multiset<const float*> mine = addresses(a), its = addresses(b);
    const bool apart = std::none_of(mine.begin(), mine.end(), [&](const float* x) { return its.count(x) != 0; });
    const bool ranges_apart = *mine.rbegin() < *its.begin() || *its.rbegin() < *mine.begin();
    interleaved += apart && !ranges_apart;
    shared += !apart;
    ASSERT_EQ(accepted(a, b), apart) << "trial " << trial;
  }
  EXPECT_GT(interleaved, 500);
  EXPECT_GT(shared, 500);
}

TEST(Tensor, views_that_step_differently_never_share_an_accepted_address) {
  Random random(2);
  std::vector<float> memory(1 << 16);
  for (int trial = 0; trial < 5000; ++trial) {
    const View a = nested_view(random, memory.data() + memory.size() / 2),
               b = nested_view(random, memory.data() + memory.size() / 2 + 20);
    if (!accepted(a, b)) continue;
    const std::multiset<const float*> its = addresses(b);
    for (const float* address : addresses(a)) ASSERT_EQ(its.count(address), 0u) << "trial " << trial;
  }
}

TEST(Tensor, nesting_strides_have_distinct_elements) {
  Random random(3);
  std::vector<float> memory(1 << 16);
  int rejected = 0;
  for (int trial = 0; trial < 5000; ++trial) {
    View t = nested_view(random, memory.data() + memory.size() / 2);
    ASSERT_NO_THROW(expect_distinct_elements(t, "t"));
    t.stride[between(random, 0, 3)] = between(random, -9, 9);
    if (distinct(addresses(t))) continue;
    ++rejected;
    ASSERT_THROW(expect_distinct_elements(t, "t"), Failure) << "trial " << trial;
  }
  EXPECT_GT(rejected, 500);
}

}  // namespace
}  // namespace octet
