#include <algorithm>

#include "cuda/host/status.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/vec8.h"
#include "cuda/sm80/f16_halves.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

// dim / 8 neighbouring threads have a token.
__global__ void __launch_bounds__(kThreads)
    f16_halves_kernel(const Strided from, int dim, NonFinite nonfinite, F16* halves, float* factors) {
  const int vecs = dim / kVec8;
  const int64_t rows = from.shape[0] * from.shape[1] * from.shape[2];
  const int vec = static_cast<int>(threadIdx.x) % vecs;
  for (int64_t first = int64_t{blockIdx.x} * (kThreads / vecs); first < rows;
       first += int64_t{gridDim.x} * (kThreads / vecs)) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / vecs, head = row / from.shape[2];
    const Index4 index{head / from.shape[1], head % from.shape[1], row % from.shape[2], int64_t{vec} * kVec8};
    Vec8 x{};
    if (row < rows && index.channel < from.shape[3]) read(from, index, x);
    float most = 0.f, odd = 0.f;
    for (float& number : x) {
      if (isfinite(number)) {
        most = fmaxf(most, fabsf(number));
      } else {
        odd = 1.f;
        if (nonfinite == NonFinite::zero) number = 0.f;
      }
    }
    for (int step = vecs / 2; step; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      odd = fmaxf(odd, __shfl_xor_sync(~0u, odd, step));
    }
    if (row >= rows) continue;
    // h^2 is at most 2^126, so that its product with numbers of the size of 1 is finite.
    const int half = min((ilogbf(fmaxf(most, 0x1p-126f)) + 1) >> 1, 63);
    const float inverse = __int_as_float((127 - half) << 23);
    if (vec == 0) factors[row] = copysignf(__int_as_float((127 + half) << 23), odd > 0.f ? -1.f : 1.f);
    alignas(16) F16 large[kVec8], small[kVec8];
    for (int c = 0; c < kVec8; ++c) {
      const float scaled = x[c] * inverse * inverse * (1 << kHalvesExponent);
      large[c] = F16(scaled), small[c] = F16(isfinite(scaled) ? (scaled - float(large[c])) * kHalfRatio : 0.f);
    }
    F16* const to = halves + row * 2 * dim + index.channel;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(large);
    *reinterpret_cast<uint4*>(to + dim) = *reinterpret_cast<const uint4*>(small);
  }
}

std::size_t rows_of(const View& x) { return static_cast<std::size_t>(x.shape[0] * x.shape[1] * x.shape[2]); }

}  // namespace

F16HalvesInput::F16HalvesInput(const View& from, int dim, NonFinite nonfinite, WorkspaceAllocator& workspace)
    : from_(from),
      dim_(dim),
      nonfinite_(nonfinite),
      halves_(workspace.take<F16>(rows_of(from) * 2 * static_cast<std::size_t>(dim))),
      factors_(workspace.take<float>(rows_of(from))) {}

void F16HalvesInput::preprocess(cudaStream_t stream) const {
  if (!from_.elements()) return;
  constexpr std::size_t kMostBlocks = 1 << 14;
  const std::size_t rows_at_once = kThreads / (dim_ / kVec8);
  const auto blocks = static_cast<unsigned>(std::min((rows_of(from_) + rows_at_once - 1) / rows_at_once, kMostBlocks));
  f16_halves_kernel<<<blocks, kThreads, 0, stream>>>(strided(from_), dim_, nonfinite_, halves_, factors_);
  check(cudaGetLastError(), "f16_halves_kernel");
}

F16HalvesView F16HalvesInput::view() const {
  const int64_t row = int64_t{2} * dim_, head = row * from_.shape[2];
  return {{halves_, {head * from_.shape[1], head, row}, Element::f16},
          {factors_, static_cast<int>(from_.shape[1]), static_cast<int>(from_.shape[2])}};
}

}  // namespace octet::cuda::sm80
