#include "cuda/host/card.h"

#include <map>
#include <mutex>
#include <string>

#include "cuda/host/status.h"

namespace octet::cuda {
namespace {

std::string name_of(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return properties.name;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

const Card& card(int device) {
  static std::mutex mutex;
  static std::map<int, Card> cards;
  const std::lock_guard lock(mutex);
  const auto found = cards.find(device);
  if (found != cards.end()) return found->second;
  const int capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  return cards[device] = {attribute(cudaDevAttrMultiProcessorCount, device),
                          attribute(cudaDevAttrL2CacheSize, device),
                          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                          name_of(device).find("GeForce") != std::string::npos,
                          capability == 89 || capability / 10 == 12,
                          capability >= 89};
}

const Card& current_card() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return card(device);
}

}  // namespace octet::cuda
