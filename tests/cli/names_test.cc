// The command's words for the enums of octet.h: each enumerator has one, and no other number does.
#include "names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <octet/octet_study.h>

#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <string>

namespace octet::cli {
namespace {

using Words = std::map<std::string, uint32_t>;

// The enumerators of an enum of octet.h, without their prefix, in small letters.
Words declared(const std::string& type, const std::string& prefix) {
  std::ifstream file(OCTET_H);
  const std::string header((std::istreambuf_iterator<char>(file)), {});
  std::smatch body;
  if (!std::regex_search(header, body, std::regex("enum " + type + " \\{([^}]*)\\}"))) return {};
  const std::string text = body[1];
  const std::regex enumerator(prefix + "(\\w+) = (\\d+)");
  Words out;
  for (std::sregex_iterator i(text.begin(), text.end(), enumerator), end; i != end; ++i) {
    std::string word = (*i)[1];
    for (char& c : word) c = static_cast<char>(std::tolower(c));
    out[word] = static_cast<uint32_t>(std::stoul((*i)[2]));
  }
  return out;
}

template <class Value, std::size_t N>
Words table(const Name<Value> (&names)[N]) {
  Words out;
  for (const auto& [text, value] : names) out[text] = static_cast<uint32_t>(value);
  EXPECT_EQ(out.size(), N) << "a word stands twice";
  return out;
}

// `renamed`: from a word of octet.h to the command's; an empty one: the command has none.
Words expected(Words words, const std::map<std::string, std::string>& renamed) {
  for (const auto& [from, to] : renamed) {
    EXPECT_TRUE(words.count(from)) << from;
    const uint32_t value = words[from];
    words.erase(from);
    if (!to.empty()) words[to] = value;
  }
  return words;
}

TEST(Names, are_those_of_octet_h) {
  EXPECT_EQ(table(kPrecisions), expected(declared("octet_precision", "OCTET_PRECISION_"), {{"none", ""}}));
  EXPECT_EQ(table(kBiasCorrections), declared("octet_bias_correction", "OCTET_BIAS_CORRECTION_"));
  EXPECT_EQ(table(kDTypes),
            expected(declared("octet_dtype", "OCTET_"),
                     {{"dtype_none", ""}, {"i8", "int8"}, {"u8", "uint8"}, {"i4", "int4"}, {"i32", "int32"}}));
  EXPECT_EQ(table(kPasses), expected(declared("octet_pass", "OCTET_"), {{"forward", "fwd"}, {"backward", "bwd"}}));
  EXPECT_EQ(table(kDevices), declared("octet_device", "OCTET_"));
  EXPECT_EQ(table(kAlignments), expected(declared("octet_alignment", "OCTET_ALIGNMENT_"),
                                         {{"none", ""}, {"top_left", "top-left"}, {"bottom_right", "bottom-right"}}));
  EXPECT_EQ(table(kSwitches), expected(declared("octet_switch", "OCTET_"), {{"auto", ""}}));
  EXPECT_EQ(table(kOperands), declared("octet_operand", "OCTET_OPERAND_"));
  EXPECT_EQ(table(kGranularities), declared("octet_granularity", "OCTET_PER_"));
  EXPECT_EQ(table(kZeroPoints), declared("octet_zero_point", "OCTET_ZERO_POINT_"));
  EXPECT_EQ(table(kRopeStyles), expected(declared("octet_rope_style", "OCTET_ROPE_"), {{"none", ""}}));
  EXPECT_EQ(table(kNorms), expected(declared("octet_norm", "OCTET_NORM_"), {{"none", ""}}));
}

}  // namespace
}  // namespace octet::cli
