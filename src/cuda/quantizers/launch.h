// The kernels of the quantizers.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/host/launch.h"
#include "cuda/quantizers/params.h"

namespace octet::cuda::quantizers {

// Rejects what the kernels cannot do with rows of x, before they write anything.
void expect_supported(const View& x, const Rope& rope, int device);

RopeParams rope_params(const Rope& rope, bool inverse);
NormParams norm_params(const Rope& rope);

// Those of octet_quantize, in the order in which they run.
//
// Channel means, and the statistics but the rounding error. Sums of chunks of tokens lie in the memory of the codes
// until the codes are written.
void find_means(const QuantizeParams& p, cudaStream_t stream);
// Scales and codes: those of tokens in registers, and any. The first returns false, and has done nothing, where rows
// are no whole words or have no scales of their own.
bool quantize_tokens(const QuantizeParams& p, cudaStream_t stream);
void quantize_groups(const QuantizeParams& p, cudaStream_t stream);
// Parts of quantize_groups in registers, which return false, and have done nothing, for other rows and other groups:
// small groups in one pass, and the passes over the others between those that clear their extremes and turn them into
// scales.
bool quantize_lane_groups(const QuantizeParams& p, const Groups& groups, cudaStream_t stream);
bool pass_lanes(const QuantizeParams& p, cudaStream_t stream);
// The rounding error of a quantized value, from codes and scales.
void find_step(const QuantizeParams& p, cudaStream_t stream);

void dequantize(const View& codes, const Quantization& how, const View& x, cudaStream_t stream);
// Norm and RoPE alone, in registers as above, and of any rows.
bool turn_tokens(const TurnParams& p, cudaStream_t stream);
void turn_rows(const TurnParams& p, cudaStream_t stream);

// Returns whether rows of x are neither normalised nor turned.
inline bool plain_rows(const RowParams& p) { return !p.rms.present && p.rope.style == OCTET_ROPE_NONE; }
inline int64_t batch_heads(const View& t) { return t.shape[0] * t.shape[1]; }
// Bytes of the turns of a warp.
inline std::size_t turn_bytes(const RowParams& p) { return p.turn_stride() * sizeof(float2); }
inline std::size_t row_bytes(int64_t dim) { return static_cast<std::size_t>((dim + 3) / 4 * 4) * sizeof(float); }

constexpr std::size_t kReserve = 1024;  // of shared memory, for the variables of a kernel and for CUDA

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int warps, std::size_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  if (shared_bytes + kReserve > 48 * 1024) allow_shared_bytes(kernel, shared_bytes);
  kernel<<<static_cast<unsigned>(blocks), 32 * warps, shared_bytes, stream>>>(arguments...);
  check(cudaGetLastError(), "a kernel of the quantizers");
}

}  // namespace octet::cuda::quantizers
