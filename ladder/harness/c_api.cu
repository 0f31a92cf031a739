// A rung as a shared library, which octet.ladder loads: C functions, which throw nothing. ladder/build --library.
#include <cstdio>
#include <cstring>

#include "../ladder.h"

namespace {

using ladder::rung;

// The kernel of that name; an empty name is the first. Null if there is none.
const ladder::Kernel* kernel_of(const char* name) {
  if (!*name) return &rung.kernels.front();
  for (const ladder::Kernel& kernel : rung.kernels) {
    if (!std::strcmp(kernel.name, name)) return &kernel;
  }
  return nullptr;
}

}  // namespace

extern "C" {

struct LadderCall {
  int batch, heads, seq, dim, causal;
  const void *q, *k, *v;  // device pointers, [batch, heads, seq, dim], contiguous, of the rung's element type
  void *o, *workspace;    // of ladder_workspace bytes, aligned to 256
  void* stream;
};

// "name|element|dims|kernels", lists separated by commas, without the kernels that are steps of the first.
const char* ladder_describe() {
  static const std::string text = [] {
    const char* elements[] = {"f32", "f16", "bf16"};
    std::string dims, kernels;
    for (int dim : rung.dims) dims += (dims.empty() ? "" : ",") + std::to_string(dim);
    for (const ladder::Kernel& kernel : rung.kernels) {
      if (!kernel.part) kernels += (kernels.empty() ? "" : ",") + std::string(kernel.name);
    }
    return std::string(rung.name) + "|" + elements[static_cast<int>(rung.element)] + "|" + dims + "|" + kernels;
  }();
  return text.c_str();
}

// Bytes of workspace of a kernel that ladder_describe lists, -1 for another name.
int64_t ladder_workspace(const char* name, const LadderCall* call) {
  const ladder::Kernel* kernel = kernel_of(name);
  if (!kernel) return -1;
  const ladder::Problem problem{call->batch, call->heads, call->seq, call->dim, call->causal != 0};
  return kernel->workspace_bytes ? static_cast<int64_t>(kernel->workspace_bytes(problem)) : 0;
}

// Puts the kernel on the stream. 0, or 1 with the reason in message.
int ladder_run(const char* name, const LadderCall* call, char* message, int size) {
  try {
    const ladder::Kernel* kernel = kernel_of(name);
    if (!kernel) throw std::runtime_error("no kernel " + std::string(name));
    const ladder::Problem problem{call->batch, call->heads, call->seq, call->dim, call->causal != 0};
    int device = 0, available = 0;
    ladder::check(cudaGetDevice(&device), "cudaGetDevice");
    ladder::check(cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), rung.name);
    const size_t shared = kernel->shared_bytes ? kernel->shared_bytes(problem) : 0;
    if (shared > static_cast<size_t>(available)) {
      throw std::runtime_error("a block needs " + std::to_string(shared) +
                               " bytes of shared memory, available: " + std::to_string(available));
    }
    const ladder::Arguments arguments{
        call->q, call->k, call->v, call->o, call->workspace, nullptr, ladder::Pairing::none};
    kernel->launch(problem, arguments, static_cast<cudaStream_t>(call->stream));
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, size, "%s: %s", rung.name, error.what());
    return 1;
  }
}

// Waits for all work on the GPU. 0, or a status of CUDA.
int ladder_synchronize() { return static_cast<int>(cudaDeviceSynchronize()); }
}
