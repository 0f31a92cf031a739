#include <algorithm>

#include "cuda/host/status.h"
#include "cuda/preprocess/operands.h"
#include "cuda/preprocess/vec8.h"
#include "cuda/sm80/fwd/parts.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kPartCount = 3;

__global__ void __launch_bounds__(kThreads) parts_kernel(const Strided from, int dim, Bf16* parts) {
  const int vecs = dim / kVec8;
  const int64_t count = from.shape[0] * from.shape[1] * from.shape[2] * vecs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / vecs, head = row / from.shape[2];
    const Index4 index{head / from.shape[1], head % from.shape[1], row % from.shape[2], i % vecs * kVec8};
    Vec8 x{};
    if (index.channel < from.shape[3]) read(from, index, x);
    for (int part = 0; part < kPartCount; ++part) {
      alignas(16) Bf16 rounded[kVec8];
      for (int c = 0; c < kVec8; ++c) {
        rounded[c] = Bf16(x[c]);
        // The parts of what is not finite are itself and zeros.
        x[c] = isfinite(x[c]) ? x[c] - float(rounded[c]) : 0.f;
      }
      *reinterpret_cast<uint4*>(parts + (row * kPartCount + part) * dim + index.channel) =
          *reinterpret_cast<const uint4*>(rounded);
    }
  }
}

}  // namespace

PartsInput::PartsInput(const View& from, int dim, WorkspaceAllocator& workspace)
    : from_(from),
      dim_(dim),
      parts_(workspace.take<Bf16>(
          static_cast<std::size_t>(from.shape[0] * from.shape[1] * from.shape[2] * kPartCount * dim))) {}

void PartsInput::preprocess(cudaStream_t stream) const {
  if (!from_.elements()) return;
  constexpr int64_t kMostBlocks = 1 << 14;
  const int64_t vecs = from_.shape[0] * from_.shape[1] * from_.shape[2] * (dim_ / kVec8);
  const auto blocks = static_cast<unsigned>(std::min((vecs + kThreads - 1) / kThreads, kMostBlocks));
  parts_kernel<<<blocks, kThreads, 0, stream>>>(strided(from_), dim_, static_cast<Bf16*>(parts_));
  check(cudaGetLastError(), "parts_kernel");
}

Output PartsInput::view() const {
  const int64_t row = int64_t{kPartCount} * dim_, head = row * from_.shape[2];
  return {parts_, {head * from_.shape[1], head, row}, Element::bf16};
}

}  // namespace octet::cuda::sm80
