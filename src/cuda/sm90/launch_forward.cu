// The forward pass on the host: operands, tensor maps, schedule, launch.
#include <algorithm>

#include "cuda/host/operands.h"
#include "cuda/host/status.h"
#include "cuda/host/tensor_map.h"
#include "cuda/sm90/arguments.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

// Weights and values in f16 although the operands are bf16: asked for by keeping the un-rounded o.
bool inside(const Problem& p) {
  const bool keeps = p.o_residual.present() || p.o.dtype == OCTET_F32;
  return p.precision == OCTET_PRECISION_BF16 && p.remedy == OCTET_REMEDY_F16_INSIDE && keeps;
}

DimsIndex dims_of(const Problem& p) {
  const int64_t most = std::max(p.dim, p.dim_v);
  if (most <= 64) return DimsIndex::d64;
  if (most <= 128) return DimsIndex::d128;
  return p.dim <= 192 && p.dim_v <= 128 ? DimsIndex::d192x128 : DimsIndex::d256;
}

Kernel kernel_of(const Problem& p) {
  const DimsIndex dims = dims_of(p);
  if (inside(p)) return forward_kernel<PrecisionBf16Inside>(dims);
  if (p.remedy == OCTET_REMEDY_BETA)
    return p.precision == OCTET_PRECISION_BF16 ? forward_kernel<WithBeta<PrecisionBf16>>(dims)
                                               : forward_kernel<WithBeta<PrecisionF16>>(dims);
  if (p.precision == OCTET_PRECISION_BF16) return forward_kernel<PrecisionBf16>(dims);
  return forward_kernel<PrecisionF16>(dims);
}

}  // namespace

std::string forward_name(const Problem& p) {
  const Kernel kernel = kernel_of(p);
  return text("forward ",
              inside(p)                             ? "bf16 with f16 weights"
              : p.precision == OCTET_PRECISION_BF16 ? "bf16"
                                                    : "f16",
              p.remedy == OCTET_REMEDY_BETA ? " with beta" : "", ", wgmma, ", kernel.rows, " x ", kernel.keys,
              " tiles");
}

std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream) {
  const octet_dtype type = p.precision == OCTET_PRECISION_BF16 ? OCTET_BF16 : OCTET_F16;
  Carver carver(workspace);
  auto* const counter = carver.take<unsigned>(1);
  int* const blocks_before = p.packed() ? carver.take<int>(sequences_of(p) + 1) : nullptr;
  const Input q(p.q, type, carver), k(p.k, type, carver);
  const bool scaled = inside(p);
  const Input v(scaled ? View{} : p.v, type, carver);
  const ScaledInput v_scaled(scaled ? p.v : View{}, type, carver);
  const Result o(p.o, carver), o_residual(p.o_residual, carver);
  if (!workspace || !p.o.elements()) return carver.used();

  const DeviceScope device(p.device_index);
  const Kernel kernel = kernel_of(p);
  ForwardArguments a{};
  q.prepare(stream), k.prepare(stream);
  scaled ? v_scaled.prepare(stream) : v.prepare(stream);
  const View& values = scaled ? v_scaled.view() : v.view();
  a.q = tensor_map(q.view(), kernel.rows);
  if (p.tokens_k) a.k = tensor_map(k.view(), kernel.keys), a.v = tensor_map(values, kernel.keys);
  set_broadcast(q.view(), a.q_broadcast), set_broadcast(k.view(), a.k_broadcast), set_broadcast(values, a.v_broadcast);
  a.schedule = schedule_of(p, kernel, sizeof(F16), counter, blocks_before, stream);
  a.mask = mask_of(p);
  a.group = static_cast<int>(p.group());
  a.dim_v = static_cast<int>(p.dim_v);
  a.scale_log2e = static_cast<float>(p.scale * 1.4426950408889634);
  // f16 has fewer exponents for the other keys; reach is in logits before scaling.
  a.beta = p.beta, a.beta_reach = (p.precision == OCTET_PRECISION_F16 ? 4.f : 20.f) / p.scale;
  a.v_scale = scaled ? v_scaled.scale() : nullptr;
  a.o = o.output(), a.o_residual = o_residual.output(), a.lse = output(p.lse);

  launch(p, kernel, &a, stream);
  o.deliver(stream);
  if (p.o_residual.present()) o_residual.deliver(stream);
  return carver.used();
}

}  // namespace octet::cuda::sm90
