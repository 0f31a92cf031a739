// GoogleTest's main for tests that run once per instruction set: OCTET_CPU names it. Where the machine lacks it, says
// so and exits with 77, which CTest counts as skipped.
#include <gtest/gtest.h>

#include <cstdio>
#include <octet/octet.hpp>
#include <string_view>

namespace {

// Empty, or the library's message that this machine cannot run the instruction set asked for.
std::string missing_instruction_set() {
  float one[8] = {1.f}, o[8];
  const octet::Shape shape{1, 1, 1, 8};
  const octet::Forward call{.q = {one, shape}, .k = {one, shape}, .v = {one, shape}, .o = {o, shape}};
  try {
    octet::run({.precision = octet::Precision::f32, .backend = "cpu"}, call);
  } catch (const octet::Error& error) {
    const std::string_view message = error.what();
    if (message.find("OCTET_CPU") != message.npos && message.find("this machine and build run") != message.npos)
      return error.what();
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string missing = missing_instruction_set();
  if (!missing.empty()) {
    std::printf("skipped: %s\n", missing.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
