#include "support/instruction_sets.h"

#include <cstdlib>
#include <octet/octet.hpp>

namespace octet::test {
namespace {

std::string named() {
  const char* name = std::getenv("OCTET_CPU");
  return name ? name : "";
}

// Returns whether a call with the kernels of the instruction set that OCTET_CPU names is accepted.
bool runs() {
  float one[8] = {1.f}, o[8];
  const Shape shape{1, 1, 1, 8};
  try {
    run({.precision = Precision::f32, .backend = "cpu"},
        Forward{.q = {one, shape}, .k = {one, shape}, .v = {one, shape}, .o = {o, shape}});
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

const std::vector<std::string>& instruction_sets() {
  static const std::vector<std::string> list = [] {
    if (const std::string only = named(); !only.empty()) return std::vector{only};
    std::vector<std::string> found;
    for (const char* name : {"portable", "avx2", "avx512", "avx512_bf16", "amx"}) {
      const OnInstructionSet on(name);
      if (runs()) found.emplace_back(name);
    }
    return found;
  }();
  return list;
}

OnInstructionSet::OnInstructionSet(const std::string& name) : before_(named()) { setenv("OCTET_CPU", name.c_str(), 1); }

OnInstructionSet::~OnInstructionSet() { setenv("OCTET_CPU", before_.c_str(), 1); }

}  // namespace octet::test
