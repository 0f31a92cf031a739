// The instruction sets that the CPU kernels are compiled for, for tests that run each of them in one process.
#pragma once
#include <string>
#include <vector>

namespace octet::test {

// Those of this build that this machine runs; the one that OCTET_CPU named at the start alone, if it named one.
const std::vector<std::string>& instruction_sets();

// While it lives, the library uses the kernels of one instruction set. Not for several threads at a time.
class OnInstructionSet {
 public:
  explicit OnInstructionSet(const std::string& name);
  ~OnInstructionSet();
  OnInstructionSet(const OnInstructionSet&) = delete;
  OnInstructionSet& operator=(const OnInstructionSet&) = delete;

 private:
  std::string before_;
};

}  // namespace octet::test
