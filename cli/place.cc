#include "place.h"

#include <algorithm>
#include <chrono>
#include <optional>

namespace octet::cli {
namespace {

class HostPlace : public Place {
 public:
  Tensor input(const Tensor& host) override { return host; }
  Tensor output(const Tensor& host) override { return host; }
  void* workspace(std::size_t bytes) override { return workspace_.emplace(bytes).data; }
  void finish() override {}
  std::vector<double> seconds(const std::function<void()>& call, int warmup, int runs) override {
    std::vector<double> out;
    for (int i = -warmup; i < runs; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      call();
      if (i >= 0) out.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return out;
  }

 private:
  std::optional<octet::detail::Workspace> workspace_;
};

}  // namespace

std::unique_ptr<Place> make_place(const DeviceName& device) {
  expect_usable(device);
#ifdef OCTET_CLI_CUDA
  if (device.kind == Device::cuda) return make_gpu_place(device.index);
#endif
  return std::make_unique<HostPlace>();
}

Timing timing_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  const std::size_t n = seconds.size();
  return {(seconds[(n - 1) / 2] + seconds[n / 2]) / 2, seconds[0]};
}

}  // namespace octet::cli
