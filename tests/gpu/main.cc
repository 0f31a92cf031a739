// GoogleTest's main for tests that need a GPU: where there is none, says why and exits with 77, which CTest counts as
// skipped.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || !count) {
    std::printf("skipped: no GPU (%s)\n", cudaGetErrorString(status));
    return 77;
  }
  return RUN_ALL_TESTS();
}
