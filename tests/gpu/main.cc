// GoogleTest's main for tests that need a GPU: where there is none, says why and exits with 77, which CTest counts as
// skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || !count) {
    std::printf("skipped: no GPU (%s)\n", cudaGetErrorString(status));
    return 77;
  }
  // Bars depend on what multiplies e4m3 in sm80 (support/row_bars.cc): the variable says it, also where it is the
  // default.
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  if ((major == 8 && minor == 9) || major == 12) setenv("OCTET_E4M3_PRODUCTS", "1", 0);
  return RUN_ALL_TESTS();
}
