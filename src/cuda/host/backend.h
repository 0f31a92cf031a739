// Functions that both CUDA backends use: they find the GPUs, reject problems and make plans.
#pragma once
#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <utility>

#include "core/backend.h"
#include "cuda/host/status.h"
#include "cuda/host/tiles.h"
#include "cuda/host/workspace.h"

namespace octet::cuda {

// Returns 10 times the major number of a device's compute capability plus the minor one, or 0 where there is no such
// device.
int compute_capability(int device);

// Returns the reason why no device satisfies `fits`, or nothing if one does. `wanted`: the compute capability that the
// reason names.
std::optional<std::string> no_gpu_reason(bool (*fits)(int device), const char* wanted);

// Returns the reason why a problem is too large for blocks of 64 queries that 32 bits count, or nothing if it is not.
std::optional<std::string> size_unsupported_reason(const Problem& p);

// Returns the plan of a pass whose operands `allocator` has laid out: name() names its kernel, run(stream) launches it,
// with the device of the problem as the current one, and tiles() names the tiles of the kernels that could run.
template <class Name, class Run, class Tiles>
Plan plan_of(const Problem& p, const WorkspaceAllocator& allocator, const char* backend, Name name, Run run,
             Tiles tiles) {
  auto kernel = [&p, backend, name = std::move(name), tiles] {
    return name() + why_this_tile(p.tile, backend, tiles());
  };
  return {allocator.used(), std::move(kernel),
          [&p, run = std::move(run)](void* stream) mutable {
            const DeviceScope device(p.device_index);
            run(static_cast<cudaStream_t>(stream));
          },
          std::move(tiles)};
}

}  // namespace octet::cuda
