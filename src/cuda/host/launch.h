// Kernel launches: dynamic shared memory and programmatic dependent launch.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "cuda/host/status.h"

namespace octet::cuda {

// Returns true if the code of the general kernels that the current device runs was compiled for compute capability 9.0
// or later: older code cannot wait for the kernel before it.
bool general_kernels_wait();

// Sets the counter of a kernel to 0, where no kernel before it does.
inline void clear(unsigned* counter, cudaStream_t stream) {
  check(cudaMemsetAsync(counter, 0, sizeof *counter, stream), "cudaMemsetAsync");
}

// Returns the thread blocks of a kernel that loops over `count` items, `of_block` at a time.
inline unsigned blocks_for(int64_t count, int64_t of_block) {
  constexpr int64_t kMostBlocks = 1 << 16;
  return static_cast<unsigned>(std::clamp<int64_t>((count + of_block - 1) / of_block, 1, kMostBlocks));
}

// Allows the thread blocks of a kernel that many bytes of dynamic shared memory: without it they have 48 KB at most.
template <class Kernel>
void allow_shared_bytes(Kernel* kernel, std::size_t bytes) {
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
}

// Launches a kernel whose thread blocks may start before the previous kernel in the stream has ended (programmatic
// dependent launch). The kernel must call ptx::griddepcontrol_wait before it reads what that one writes, and before it
// writes anything itself. Without `early` it starts when that kernel has ended, as any other does.
inline void launch_pdl(const void* kernel, dim3 grid, unsigned threads, std::size_t shared_bytes, cudaStream_t stream,
                       void** arguments, bool early = true) {
  if (shared_bytes) allow_shared_bytes(kernel, shared_bytes);
  cudaLaunchAttribute attribute{.id = cudaLaunchAttributeProgrammaticStreamSerialization};
  attribute.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{.gridDim = grid,
                                  .blockDim = dim3(threads),
                                  .dynamicSmemBytes = shared_bytes,
                                  .stream = stream,
                                  .attrs = &attribute,
                                  .numAttrs = early ? 1u : 0u};
  check(cudaLaunchKernelExC(&config, kernel, arguments), "cudaLaunchKernelEx");
}

// The same for a kernel that is compiled for GPUs before compute capability 9.0, too.
template <class... Parameters>
void launch_general_pdl(void (*kernel)(Parameters...), dim3 grid, unsigned threads, std::size_t shared_bytes,
                        cudaStream_t stream, Parameters... parameters) {
  void* arguments[] = {&parameters...};
  launch_pdl(reinterpret_cast<const void*>(kernel), grid, threads, shared_bytes, stream, arguments,
             general_kernels_wait());
}

}  // namespace octet::cuda
