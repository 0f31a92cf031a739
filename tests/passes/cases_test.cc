// The file of cases says what it rejects; a case cannot be lost through a typing error.
#include <gmock/gmock.h>

#include "support/case_list.h"

namespace octet::test {
namespace {

std::string rejection_of(const std::string& text) {
  std::deque<std::string> names;
  try {
    read_cases(text, names);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(CaseList, keeps_the_order_of_the_file) {
  std::deque<std::string> names;
  const auto list =
      read_cases(R"({"Z": [{"name": "b", "window": [-1, 2], "note": "why"}], "A": [{"name": "a"}]})", names);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_STREQ(list[0].name, "b");
  EXPECT_EQ((*list[0].window)[1], 2);
  EXPECT_STREQ(list[1].name, "a");
  EXPECT_EQ(list[1].tokens_q, 64);
}

TEST(CaseList, names_what_it_found_and_what_is_allowed) {
  using testing::HasSubstr;
  const auto of = [](const std::string& fields) { return rejection_of(R"({"G": [{"name": "x", )" + fields + "}]}"); };
  EXPECT_THAT(of(R"("tokens": 3)"), HasSubstr("x: found field tokens, allowed: name, note, batch, heads, kv_heads"));
  EXPECT_THAT(of(R"("dtype": "f8")"), HasSubstr(R"(x: dtype: found "f8", allowed: f32, f16, bf16, e4m3)"));
  EXPECT_THAT(of(R"("layout": "broadcast")"), HasSubstr("allowed: bhtd, bthd, transposed, padded"));
  EXPECT_THAT(of(R"("heads": -1)"), HasSubstr("x: heads: found -1, allowed: an integer from 0 to"));
  EXPECT_THAT(of(R"("heads": 2.5)"), HasSubstr("x: heads: found 2.5, allowed: an integer from 0 to"));
  EXPECT_THAT(of(R"("causal": 1)"), HasSubstr("x: causal: found 1, allowed: true or false"));
  EXPECT_THAT(of(R"("softcap": "2")"), HasSubstr(R"(x: softcap: found "2", allowed: a number)"));
  EXPECT_THAT(of(R"("window": [1])"), HasSubstr("x: window: found 1 integers, allowed: left and right"));
  EXPECT_THAT(rejection_of(R"({"G": [{"heads": 2}]})"), HasSubstr("G: a case without a name"));
  EXPECT_THAT(rejection_of(R"({"G": [{"name": "x"}], "H": [{"name": "x"}]})"),
              HasSubstr("x: two cases have this name"));
}

}  // namespace
}  // namespace octet::test
