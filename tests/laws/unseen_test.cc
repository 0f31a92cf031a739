// Keys and values that no query sees, and queries that see no key, may hold anything. Whatever it is, it changes no bit
// of any result; not by means or scales that tokens share, and not as 0 inf.
#include <cmath>
#include <limits>

#include "laws/laws.h"
#include "support/seen.h"

namespace octet::test {
namespace {

class Unseen : public EveryRecipe {};

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();

struct Content {
  const char* name;
  double (*number)(uint64_t draw);
};

const Content kContents[] = {
    {"numbers of 1e4 with both signs", [](uint64_t i) { return i % 3 ? 1e4 : -1e4; }},
    {"1e30", [](uint64_t) { return 1e30; }},
    {"numbers of every size, -inf and NaN",
     [](uint64_t i) {
       const double x = i % 11 == 7   ? kNaN
                        : i % 11 == 3 ? -kInfinity
                                      : std::ldexp(1.5, static_cast<int>(i * 37 % 250) - 125);
       return i % 2 ? x : -x;
     }},
};

TEST_P(Unseen, tokens_may_hold_anything) {
  constexpr uint64_t kSeed = 1;
  for (const Case& c : partly_seen_cases()) {
    const PartlySeen x = partly_seen(c, kSeed);
    for (const char* backend : {"cpu", "reference"}) {
      const Outputs want = compute(x.c, x.in, GetParam(), 0, backend);
      for (const Content& content : kContents) {
        if (*backend == 'r' && &content != std::end(kContents) - 1) continue;  // it is slow
        expect_same_bits(compute(x.c, with_unseen(x, content.number), GetParam(), 0, backend), want, GetParam().pass,
                         std::string(x.c.name) + " on " + backend + ", unseen: " + content.name + ", seed 1");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Unseen, testing::ValuesIn(every_recipe()), label);

}  // namespace
}  // namespace octet::test
