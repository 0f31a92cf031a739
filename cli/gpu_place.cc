// The memory of a GPU and its clock. Everything runs on the default stream.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "array.h"
#include "error.h"
#include "place.h"

namespace octet::cli {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) reject("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  void record() { check(cudaEventRecord(event_), "cudaEventRecord"); }
  double seconds_since(const Event& begin) const {
    float milliseconds = 0;
    check(cudaEventSynchronize(event_), "cudaEventSynchronize");
    check(cudaEventElapsedTime(&milliseconds, begin.event_, event_), "cudaEventElapsedTime");
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class GpuPlace : public Place {
 public:
  explicit GpuPlace(int device) : device_(device) {
    check(cudaSetDevice(device), fmt::format("cuda:{}", device).c_str());
  }
  ~GpuPlace() override {
    for (void* memory : memory_) cudaFree(memory);
  }

  Tensor input(const Tensor& host) override {
    const Tensor t = placed(host);
    if (t.data) check(cudaMemcpy(t.data, host.data, size_of(host), cudaMemcpyHostToDevice), "copying to the GPU");
    return t;
  }
  Tensor output(const Tensor& host) override {
    const Tensor t = placed(host);
    if (t.data) outputs_.push_back({host.data, t.data, size_of(host)});
    return t;
  }
  void* workspace(std::size_t bytes) override { return allocate(bytes); }

  void finish() override {
    check(cudaDeviceSynchronize(), "the GPU");
    for (const Output& o : outputs_)
      check(cudaMemcpy(o.host, o.copy, o.bytes, cudaMemcpyDeviceToHost), "copying from the GPU");
  }

  std::vector<double> seconds(const std::function<void()>& call, int warmup, int runs) override {
    constexpr double kRun = 5e-3;
    constexpr int kMostCalls = 100;
    Event begin, end;
    const auto of_calls = [&](int calls) {
      begin.record();
      for (int i = 0; i < calls; ++i) call();
      end.record();
      return end.seconds_since(begin) / calls;
    };
    of_calls(1);  // loads the kernels
    const int calls = static_cast<int>(std::clamp(kRun / of_calls(1), 1.0, double{kMostCalls}));
    std::vector<double> out;
    for (int i = -warmup; i < runs; ++i) {
      const double seconds = of_calls(calls);
      if (i >= 0) out.push_back(seconds);
    }
    return out;
  }

 private:
  struct Output {
    void *host, *copy;
    std::size_t bytes;
  };

  static std::size_t size_of(const Tensor& t) {
    return static_cast<std::size_t>(t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3]) *
           bytes_of(static_cast<DType>(t.dtype));
  }

  void* allocate(std::size_t bytes) {
    if (!bytes) return nullptr;
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), fmt::format("{} bytes on cuda:{}", bytes, device_).c_str());
    return memory_.emplace_back(memory);
  }

  Tensor placed(const Tensor& host) {
    Tensor t = host;
    t.data = allocate(size_of(host));
    t.device = OCTET_CUDA;
    t.device_index = device_;
    return t;
  }

  int device_;
  std::vector<void*> memory_;
  std::vector<Output> outputs_;
};

}  // namespace

std::unique_ptr<Place> make_gpu_place(int device) { return std::make_unique<GpuPlace>(device); }

}  // namespace octet::cli
