// The 16-bit forward pass on the host: kernel choice, operands, tensor maps, scheduler, launch.
#include <algorithm>
#include <optional>

#include "core/names.h"
#include "core/recipe.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/scheduler/few_queries.h"
#include "cuda/sm90/fwd/launch.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/passes.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {
namespace {

bool quantized(const Problem& p) { return p.precision == OCTET_PRECISION_INT8_F16; }

// True where v becomes f16, divided by a power of two per head. An f16 v stays as it is, and f16 represents all values
// of e4m3.
bool scales_v(const Problem& p) {
  return f16_p_and_v(p) || (quantized(p) && (p.v.dtype == OCTET_BF16 || p.v.dtype == OCTET_F32));
}

Kernel kernel_of(const Problem& p) {
  if (quantized(p)) return forward_kernel<PrecisionInt8F16>(p.dim, p.dim_v);
  if (f16_p_and_v(p)) return forward_kernel<PrecisionBf16F16Compute>(p.dim, p.dim_v);
  if (p.bias_correction == OCTET_BIAS_CORRECTION_BETA)
    return p.precision == OCTET_PRECISION_BF16 ? forward_kernel<WithBeta<PrecisionBf16>>(p.dim, p.dim_v)
                                               : forward_kernel<WithBeta<PrecisionF16>>(p.dim, p.dim_v);
  if (p.precision == OCTET_PRECISION_BF16) return forward_kernel<PrecisionBf16>(p.dim, p.dim_v);
  return forward_kernel<PrecisionF16>(p.dim, p.dim_v);
}

}  // namespace

PrecisionSet forward_precisions() { return {OCTET_PRECISION_F16, OCTET_PRECISION_BF16, OCTET_PRECISION_INT8_F16}; }

std::string forward_name(const Problem& p) {
  const Kernel kernel = kernel_of(p);
  return text("forward ", name(p.precision), f16_p_and_v(p) ? " with P in f16" : "",
              p.bias_correction == OCTET_BIAS_CORRECTION_BETA ? " with beta" : "", ", wgmma, ", kernel.rows, " x ",
              kernel.keys, " tiles");
}

std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream) {
  const octet_dtype type = p.precision == OCTET_PRECISION_BF16 ? OCTET_BF16 : OCTET_F16;
  WorkspaceAllocator allocator(workspace);
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const Kernel kernel = kernel_of(p);
  const Input q(quantized(p) ? View{} : p.q, type, allocator), k(quantized(p) ? View{} : p.k, type, allocator);
  std::optional<Int8Logits> qk;
  if (quantized(p)) qk.emplace(p, kernel.dim, kernel.keys, allocator);
  unsigned* const counter = qk ? qk->counter() : allocator.take<unsigned>(1);
  const bool scaled = scales_v(p);
  const Input v(scaled ? View{} : p.v, type, allocator);
  const ScaledInput v_scaled(scaled ? p.v : View{}, f16_p_and_v(p) ? type : p.v.dtype,
                             f16_p_and_v(p) ? kernel.dim_v : 0, allocator);
  const Result o(p.o, allocator), o_residual(p.o_residual, allocator);
  if (!workspace || !p.o.elements()) return allocator.used();

  const DeviceScope device(p.device_index);
  ForwardParams a{};
  const SeenKeys seen = seen_keys(p);
  // The kernel converts v itself, unless it has few queries to do so beside.
  const bool in_slices = f16_p_and_v(p) && v_scaled.in_slices(seen) && p.heads * p.tokens_q >= p.kv_heads * p.tokens_k;
  if (!qk && !in_slices) clear(counter, stream);
  a.scheduler = scheduler_of(p, kernel, sizeof(F16), counter, blocks_before, stream);
  q.preprocess(stream), k.preprocess(stream);
  if (in_slices)
    a.v_slices = v_scaled.find_v_stats(seen, counter, stream);
  else
    scaled ? v_scaled.preprocess(seen, stream) : v.preprocess(stream);
  // This is the last launch before the kernel, which starts while it drains (PDL).
  if (qk) qk->quantize(stream);
  const View& values = scaled ? v_scaled.view() : v.view();
  const View queries = qk ? qk->q() : q.view(), keys = qk ? qk->k() : k.view();
  const int panel = qk ? panel_bytes(queries.shape[3]) : kPanelColumns;
  a.q = tensor_map(queries, kernel.rows, panel);
  if (p.tokens_k) a.k = tensor_map(keys, kernel.keys, panel), a.v = tensor_map(values, kernel.keys);
  set_broadcast(queries, a.q_broadcast), set_broadcast(keys, a.k_broadcast), set_broadcast(values, a.v_broadcast);
  if (qk) {
    a.keys = qk->keys();
    a.q_scale = qk->q_scale(), a.k_scale = qk->k_scale(), a.mean_logit = qk->mean_logit();
  }
  a.mask = mask_of(p);
  a.clears = !seen.all;
  a.group = static_cast<int>(p.group());
  a.dim_v = static_cast<int>(p.dim_v);
  a.scale = p.scale;
  a.scale_log2e = static_cast<float>(p.scale * 1.4426950408889634);
  const Recipe recipe = recipe_of(p);
  a.beta = static_cast<float>(recipe.beta), a.beta_reach = static_cast<float>(recipe.beta_reach / p.scale);
  a.v_scale = scaled ? v_scaled.scale() : nullptr;
  a.v_mean = v_scaled.v_mean();
  a.o = o.output(), a.o_residual = o_residual.output(), a.lse = output(p.lse);
  a.sinks = sinks(p.sinks);
  a.q_rows = output(queries), a.k_rows = output(keys), a.v_rows = output(values);
  a.dim = static_cast<int>(queries.shape[3]);

  launch(p, kernel, a.scheduler, &a, quantized(p) || f16_p_and_v(p), stream);
  o.deliver(stream);
  if (p.o_residual.present()) o_residual.deliver(stream);
  return allocator.used();
}

}  // namespace octet::cuda::sm90
