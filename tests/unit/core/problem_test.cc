// Problem::keys_of against the definition of the masks, key by key.
#include "core/problem.h"

#include <gtest/gtest.h>

namespace octet {
namespace {

bool sees(const Problem& p, int64_t query, int64_t key, int64_t queries, int64_t keys) {
  if (!p.windowed) return true;
  const int64_t diagonal = p.bottom_right ? query + keys - queries : query;
  return key >= diagonal - p.left && key <= diagonal + p.right;
}

TEST(Problem, keys_of_is_the_interval_of_the_keys_seen) {
  constexpr int64_t all = Problem::kUnbounded;
  Problem p{};
  for (const bool windowed : {false, true})
    for (const bool bottom_right : {false, true})
      for (const int64_t left : {int64_t{0}, int64_t{2}, all})
        for (const int64_t right : {int64_t{0}, int64_t{1}, all})
          for (const int64_t queries : {1, 4, 9})
            for (const int64_t keys : {0, 1, 6, 9})
              for (int64_t i = 0; i < queries; ++i) {
                p.windowed = windowed, p.bottom_right = bottom_right, p.left = left, p.right = right;
                const KeyRange range = p.keys_of(i, queries, keys);
                ASSERT_LE(0, range.first);
                ASSERT_LE(range.first, range.last);
                ASSERT_LE(range.last, keys);
                for (int64_t j = 0; j < keys; ++j)
                  ASSERT_EQ(sees(p, i, j, queries, keys), j >= range.first && j < range.last)
                      << "query " << i << " of " << queries << ", key " << j << " of " << keys << ", left " << left
                      << ", right " << right << (bottom_right ? ", bottom-right" : ", top-left");
              }
}

}  // namespace
}  // namespace octet
