// The CUDA runtime API as far as octet and its tests use it, for one device that is this process: its memory is the
// host's, its kernels are run from the PTX in the program, and every call returns when its work is done.
// OCTET_EMULATED_SHARED_BYTES sets the shared memory that a thread block may have (default 101376, as on compute
// capability 8.6), OCTET_EMULATED_NAME the name of the device, OCTET_EMULATED_CAPABILITY its compute capability, 80
// or 89.
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#include <zstd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>

#include "program.h"

using emulator::Error;
using emulator::Function;
using emulator::Module;

// A stream that is captured keeps its work for later.
struct CUgraph_st {
  std::vector<std::function<void()>> work;
};
struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};
struct CUstream_st {
  CUgraph_st* capture = nullptr;
};
// The host's time: that of the emulator, which says nothing about a GPU's.
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
};

namespace {

constexpr size_t kMemory = size_t{1} << 32;  // of the device; nothing else limits it

// What the compiler puts around a module's code; see the header fatbinary_section.h and the tool cuobjdump.
struct FatbinWrapper {
  int magic, version;
  const unsigned char* data;
};
struct FatbinHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct FatbinEntry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, unknown[9];
  uint64_t whole_bytes;  // where it is compressed
};
constexpr uint16_t kPtx = 1;

struct Loaded {
  const FatbinWrapper* wrapper;
  std::unique_ptr<Module> module;
};
constexpr int kGrantedSharedBytes = 48 * 1024;  // that a thread block has without asking

struct Kernel {
  Loaded* loaded;
  std::string name;
  int dynamic_shared_bytes = 0;  // that cudaFuncSetAttribute allows
};

std::mutex mutex;
std::map<const void*, Kernel>& kernels() {
  static std::map<const void*, Kernel> all;
  return all;
}

std::string ptx_of(const FatbinWrapper& wrapper) {
  const unsigned char* at = wrapper.data;
  FatbinHeader header;
  std::memcpy(&header, at, sizeof header);
  const unsigned char* const end = at + header.header_bytes + header.bytes;
  at += header.header_bytes;
  while (at < end) {
    FatbinEntry entry;
    std::memcpy(&entry, at, sizeof entry);
    const unsigned char* const code = at + entry.header_bytes;
    if (entry.kind == kPtx) {
      std::string text(entry.compressed_bytes ? entry.whole_bytes : entry.bytes, '\0');
      if (!entry.compressed_bytes) {
        std::memcpy(text.data(), code, text.size());
      } else if (const std::size_t got = ZSTD_decompress(text.data(), text.size(), code, entry.compressed_bytes);
                 ZSTD_isError(got)) {
        throw Error(std::string("PTX that is not compressed by zstd: ") + ZSTD_getErrorName(got));
      }
      return text.substr(0, text.find('\0'));
    }
    at += entry.header_bytes + entry.bytes;
  }
  throw Error("no PTX in the program");
}

thread_local cudaError_t last_error = cudaSuccess;
cudaError_t result(cudaError_t e) {
  if (e != cudaSuccess) last_error = e;
  return e;
}
std::string& message() {
  thread_local std::string text;
  return text;
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream && stream->capture)
    stream->capture->work.push_back(std::move(work));
  else
    work();
}

struct Call {
  dim3 grid, threads;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Call> calls;

int shared_bytes() {
  const char* const given = std::getenv("OCTET_EMULATED_SHARED_BYTES");
  return given ? std::atoi(given) : 101376;
}

int capability() {
  const char* const given = std::getenv("OCTET_EMULATED_CAPABILITY");
  return given ? std::atoi(given) : 80;
}

cudaError_t launch(const Kernel& kernel, dim3 grid, dim3 threads, void** arguments, size_t shared,
                   cudaStream_t stream) {
  if (!grid.x || !grid.y || !grid.z || !threads.x || threads.x * threads.y * threads.z > 1024)
    return result(cudaErrorInvalidConfiguration);
  try {
    Function* f;
    Module* module;
    {
      const std::lock_guard lock(mutex);
      if (!kernel.loaded->module) kernel.loaded->module = std::make_unique<Module>(ptx_of(*kernel.loaded->wrapper));
      module = kernel.loaded->module.get();
      f = &module->find(kernel.name);
    }
    const int dynamic = static_cast<int>(shared), all = dynamic + static_cast<int>(f->shared_bytes);
    if (all > shared_bytes() || (all > kGrantedSharedBytes && dynamic > kernel.dynamic_shared_bytes))
      return result(cudaErrorInvalidValue);
    std::vector<unsigned char> parameters(f->parameter_bytes + 16);
    for (std::size_t i = 0; i < f->parameters.size(); ++i)
      std::memcpy(parameters.data() + f->parameters[i].offset, arguments[i], f->parameters[i].bytes);
    enqueue(stream, [=] {
      emulator::run_grid(*module, *f, {grid.x, grid.y, grid.z}, {threads.x, threads.y, threads.z},
                         static_cast<uint32_t>(shared), parameters);
    });
    return cudaSuccess;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "emulator: %s\n", e.what());
    message() = e.what();
    return result(cudaErrorLaunchFailure);
  }
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new Loaded{static_cast<const FatbinWrapper*>(wrapper), nullptr});
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  const std::lock_guard lock(mutex);
  kernels()[host] = {reinterpret_cast<Loaded*>(handle), name, 0};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 threads, size_t shared, CUstream_st* stream) {
  calls.push_back({grid, threads, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* threads, size_t* shared, void* stream) {
  const Call c = calls.back();
  calls.pop_back();
  *grid = c.grid, *threads = c.threads, *shared = c.shared, *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, threads, arguments, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 threads, void** arguments, size_t shared,
                             cudaStream_t stream) {
  const auto found = kernels().find(host);
  if (found == kernels().end()) return result(cudaErrorInvalidDeviceFunction);
  return launch(found->second, grid, threads, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** arguments) {
  return cudaLaunchKernel(host, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute which, int value) {
  if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > shared_bytes()) return result(cudaErrorInvalidValue);
  const std::lock_guard lock(mutex);
  const auto found = kernels().find(host);
  if (found == kernels().end()) return result(cudaErrorInvalidDeviceFunction);
  found->second.dynamic_shared_bytes = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : result(cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  if (device) return result(cudaErrorInvalidDevice);
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability() / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = capability() % 10;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 6;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 1 << 20;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = shared_bytes();
      break;
    default:
      std::fprintf(stderr, "emulator: device attribute %d\n", static_cast<int>(which));
      return result(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device) return result(cudaErrorInvalidDevice);
  *p = {};
  const char* const name = std::getenv("OCTET_EMULATED_NAME");
  std::snprintf(p->name, sizeof p->name, "%s", name ? name : "emulator of a GPU");
  p->major = capability() / 10, p->minor = capability() % 10, p->multiProcessorCount = 6, p->totalGlobalMem = kMemory;
  p->sharedMemPerBlockOptin = shared_bytes();
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = kMemory, cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  if (found) *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = new CUevent_st, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return event->time = std::chrono::steady_clock::now(), cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count(), cudaSuccess;
}

// Each block of memory is one of the heap's, so that an address sanitizer watches its ends.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  return *memory ? cudaSuccess : result(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return std::memset(to, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  enqueue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = new CUstream_st, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return stream->capture = new CUgraph_st, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->capture, stream->capture = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  for (const auto& work : exec->work) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }

cudaError_t cudaGetLastError() {
  const cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}
const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorLaunchFailure ? "cudaErrorLaunchFailure" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaSuccess ? "no error" : e == cudaErrorLaunchFailure ? message().c_str() : "an error of the emulator";
}

}  // extern "C"
