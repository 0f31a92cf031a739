// The JSON of octet_info.
#include "core/info.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/backend.h"
#include "core/error.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace octet {
namespace {

TEST(Info, StringsAreEscaped) {
  const std::string hostile =
      std::string("quote \" backslash \\ newline \n tab \t bell \a zero ") + '\0' + " \x1f unicode \u00e9";
  EXPECT_EQ(nlohmann::json::parse(json_string(hostile)).get<std::string>(), hostile);
  EXPECT_EQ(json_string("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
}

TEST(Info, DescribesTheMachineAndTheBuild) {
  const auto info = nlohmann::json::parse(info_json());
  EXPECT_EQ(info["version"], octet_version());
  EXPECT_FALSE(info["compiler"].get<std::string>().empty());
  EXPECT_FALSE(info["cuda"].get<std::string>().empty());
  ASSERT_TRUE(info["gpus"].is_array());
  EXPECT_TRUE(info["gpus"].empty() || info["driver"].is_string());
  EXPECT_EQ(info["cpu"]["cores"], cpu::thread_count(0, 1 << 20));
  EXPECT_EQ(info["cpu"]["instruction_set"], cpu::name(cpu::chosen()));
  const auto sets = info["cpu"]["instruction_sets"].get<std::vector<std::string>>();
  EXPECT_EQ(sets.front(), "portable");
  ASSERT_EQ(info["backends"].size(), backends().count);
  std::size_t i = 0;
  for (const Backend* backend : backends()) {
    const auto& entry = info["backends"][i++];
    EXPECT_EQ(entry["name"], backend->name);
    EXPECT_EQ(entry["description"], backend->description);
    EXPECT_EQ(entry["available"], entry["reason"].is_null());
  }
}

TEST(Info, TellsAForcedInstructionSet) {
  const char* forced = std::getenv("OCTET_CPU");
  const std::string before = forced ? forced : "";
  EXPECT_EQ(nlohmann::json::parse(cpu_json())["forced"], before.empty() ? nlohmann::json() : nlohmann::json(before));
  ::setenv("OCTET_CPU", "portable", 1);
  EXPECT_EQ(nlohmann::json::parse(cpu_json())["forced"], "portable");
  before.empty() ? ::unsetenv("OCTET_CPU") : ::setenv("OCTET_CPU", before.c_str(), 1);
}

}  // namespace
}  // namespace octet
