// The quantizers of octet.h on a GPU (core/quantization.h): which problems they take, and their kernels.
#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/rope.h"
#include "cuda/host/backend.h"
#include "cuda/quantizers/launch.h"

namespace octet::cuda {
namespace {

using namespace quantizers;

bool fits(int device) { return compute_capability(device) >= 80; }

}  // namespace

namespace quantizers {

void expect_supported(const View& x, const Rope& rope, int device) {
  if (const auto reason = no_gpu_reason(fits, "8.0 or later")) unsupported("quantizers of cuda tensors: ", *reason);
  if (!fits(device)) unsupported("quantizers: cuda:", device, " is no GPU of compute capability 8.0 or later");
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  if (const int64_t rows = x.shape[0] * x.shape[1] * x.shape[2], heads = x.shape[0] * x.shape[1];
      rows > kMaxRows || heads > kMaxRows || x.shape[2] > kMaxRows - kChunkTokens)
    unsupported("x: shape of ", rows, " rows on cuda:", device, ", allowed there: up to ", kMaxRows);
  if (x.shape[3] > kMaxDim)
    unsupported("x: head dim ", x.shape[3], " on cuda:", device, ", allowed there: up to ", kMaxDim);
  if (rope.dim > 2 * kMaxPairs)
    unsupported("rope dim: found ", rope.dim, " on cuda:", device, ", allowed there: up to ", 2 * kMaxPairs);
}

RopeParams rope_params(const Rope& rope, bool inverse) {
  RopeParams params{};
  params.style = rope.style, params.pairs = static_cast<int>(rope.dim / 2), params.offset = rope.offset;
  if (rope.style != OCTET_ROPE_NONE) std::ranges::copy(rope_turns(rope, inverse), params.turns);
  return params;
}

NormParams norm_params(const Rope& rope) { return {rope.norm != OCTET_NORM_NONE, rope.norm_eps, rope.norm_weight}; }

}  // namespace quantizers

void quantize(const View& x, const Rope& rope, const View& codes, const Quantization& quantization,
              const View& statistics, const Place& place) {
  expect_supported(x, rope, place.device);
  const int64_t dim = x.shape[3];
  const Quantization how = quantization.in_32_bits(x.shape[2]);
  const QuantizeParams p{.rows = {.x = x,
                                  .rms = norm_params(rope),
                                  .rope = rope_params(rope, false),
                                  .mean = how.mean,
                                  .seed = how.hadamard_seed,
                                  .block = static_cast<int>(hadamard_block(dim)),
                                  .norm = hadamard_norm(dim)},
                         .codes = codes,
                         .statistics = statistics,
                         .how = how,
                         .range = range_of(codes.dtype)};
  const DeviceScope device(place.device);
  const auto stream = static_cast<cudaStream_t>(place.stream);
  find_means(p, stream);
  if (!quantize_tokens(p, stream)) quantize_groups(p, stream);
  find_step(p, stream);
}

void dequantize(const View& codes, const Quantization& how, const View& x, const Place& place) {
  expect_supported(x, {}, place.device);
  const DeviceScope device(place.device);
  quantizers::dequantize(codes, how.in_32_bits(x.shape[2]), x, static_cast<cudaStream_t>(place.stream));
}

void apply_rope(const Rope& rope, bool inverse, const View& x, const View& y, const Place& place) {
  expect_supported(x, rope, place.device);
  const DeviceScope device(place.device);
  if (!x.elements()) return;
  const TurnParams p{x, y, norm_params(rope), rope_params(rope, inverse)};
  const auto stream = static_cast<cudaStream_t>(place.stream);
  if (!turn_tokens(p, stream)) turn_rows(p, stream);
}

}  // namespace octet::cuda
