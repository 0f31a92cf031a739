// Functions that both CUDA backends use: they find the GPUs, reject problems and plan a pass.
#pragma once
#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "core/backend.h"

namespace octet::cuda {

// Returns 10 times the major number of a device's compute capability plus the minor one, or 0 where there is no such
// device.
int compute_capability(int device);

// Returns the reason why no device satisfies `fits`, or nothing if one does. `wanted`: the compute capability that the
// reason names.
std::optional<std::string> no_gpu_reason(bool (*fits)(int device), const char* wanted);

// Returns the reason why a problem is too large for blocks of 64 queries that 32 bits count, or nothing if it is not.
std::optional<std::string> size_unsupported_reason(const Problem& p);

// Returns the plan of a pass. With a null workspace, `pass` only returns the bytes that it needs.
template <auto pass, auto name_of>
Plan plan_of(const Problem& p) {
  const auto run = [](const Problem& problem, Bytes workspace, void* stream) {
    pass(problem, workspace.data, static_cast<cudaStream_t>(stream));
  };
  return {pass(p, nullptr, nullptr), name_of, run};
}

}  // namespace octet::cuda
