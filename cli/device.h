// The devices that a command's tensors can lie on while it computes.
#pragma once
#include <octet/octet.hpp>
#include <string>

namespace octet::cli {

struct DeviceName {
  Device kind = Device::cpu;
  int32_t index = 0;  // of GPUs, as CUDA counts them
};

// "cpu", "cuda" or "cuda:1".
DeviceName parse_device(const std::string& text);

// Returns the device of a backend's tensors, and the CPU for a name of no backend, which the library rejects better.
DeviceName device_of_backend(const std::string& name);

// Rejects, with the reason, a device on which no backend of this build and machine can compute.
void expect_usable(const DeviceName& device);

}  // namespace octet::cli
