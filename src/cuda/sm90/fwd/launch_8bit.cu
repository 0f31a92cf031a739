// The 8-bit forward pass on the host: kernel choice, quantization, tensor maps, scheduler, launch.
#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/names.h"
#include "cuda/fragment/precision.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/sm90/fwd/launch.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

bool unscaled(const Problem& p) { return p.precision == OCTET_PRECISION_FP8_RAW; }
bool int8_qk(const Problem& p) {
  return p.precision == OCTET_PRECISION_INT8 || p.precision == OCTET_PRECISION_INT8_FP8;
}

// An e4m3 input is not quantized again where q and k become e4m3. Unscaled fp8 casts its inputs without quantization.
bool q_prequantized(const Problem& p) { return unscaled(p) || (!int8_qk(p) && p.q.dtype == OCTET_E4M3); }
bool k_prequantized(const Problem& p) { return unscaled(p) || (!int8_qk(p) && p.k.dtype == OCTET_E4M3); }
bool smooths_k(const Problem& p) { return !k_prequantized(p); }
bool v_by_channel(const Problem& p) { return !unscaled(p) && p.precision != OCTET_PRECISION_INT8; }

Kernel kernel_of(const Problem& p) {
  switch (p.precision) {
    case OCTET_PRECISION_INT8:
      return forward_8bit_kernel<PrecisionInt8>(p.dim, p.dim_v);
    case OCTET_PRECISION_INT8_FP8:
      return forward_8bit_kernel<PrecisionInt8Fp8>(p.dim, p.dim_v);
    case OCTET_PRECISION_FP8:
      return k_prequantized(p) ? forward_8bit_kernel<PrecisionFp8Prequantized>(p.dim, p.dim_v)
                               : forward_8bit_kernel<PrecisionFp8>(p.dim, p.dim_v);
    default:
      return forward_8bit_kernel<PrecisionFp8Unscaled>(p.dim, p.dim_v);
  }
}

HeadScale head_scale(const View& t) {
  if (!t.quantization) return {};
  const octet_tensor& scale = *t.quantization->scale;
  return {static_cast<const float*>(scale.data), scale.stride[0], scale.stride[1]};
}

}  // namespace

PrecisionSet forward_8bit_precisions() {
  return {OCTET_PRECISION_INT8, OCTET_PRECISION_INT8_FP8, OCTET_PRECISION_FP8, OCTET_PRECISION_FP8_RAW};
}

std::string forward_8bit_name(const Problem& p) {
  const Kernel kernel = kernel_of(p);
  return text("forward ", name(p.precision), ", wgmma, ", kernel.rows, " x ", kernel.keys, " tiles");
}

std::size_t forward_8bit(const Problem& p, void* workspace, cudaStream_t stream) {
  const Kernel kernel = kernel_of(p);
  const int64_t dim = kernel.dim;
  const bool dynamic = p.precision == OCTET_PRECISION_INT8;
  QuantizeParams c{.q = strided(p.q),
                   .k = strided(p.k),
                   .v = strided(p.v),
                   .v_input_scale = head_scale(p.v),
                   .dim = kernel.dim,
                   .heads = static_cast<int>(p.heads),
                   .kv_heads = static_cast<int>(p.kv_heads),
                   .keys = {static_cast<const int*>(p.cu_seqlens_k.data), sequences_of(p), static_cast<int>(p.tokens_k),
                            kernel.laid_out_keys, mask_of(p), static_cast<int>(p.tokens_q),
                            static_cast<const int*>(p.cu_seqlens_q.data)},
                   .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data)};
  if (p.hadamard) c.rotation = rotation_of(p.dim);
  const QuantizedFormat format = int8_qk(p) ? QuantizedFormat::s8 : QuantizedFormat::e4m3;
  c.q_type = q_prequantized(p) ? QuantizedFormat::none : format;
  c.k_type = k_prequantized(p) ? QuantizedFormat::none : format;
  c.v_type = dynamic ? QuantizedFormat::s8 : QuantizedFormat::e4m3;
  c.k_groups = p.precision == OCTET_PRECISION_INT8_FP8;

  WorkspaceAllocator allocator(workspace);
  const int64_t keys = static_cast<int64_t>(c.keys.count()) * kernel.laid_out_keys, batch_heads = p.batch * p.kv_heads;
  const int64_t sequence_heads = (p.packed() ? sequences_of(p) : p.batch) * p.kv_heads;
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const auto channels = [&](bool wanted) { return wanted ? allocator.take<float>(sequence_heads * dim) : nullptr; };
  c.channels = {channels(smooths_k(p)), channels(dynamic), channels(v_by_channel(p)), channels(v_by_channel(p))};
  void* const scratch = allocator.take(quantize_scratch_bytes(c));
  auto* const counter = static_cast<unsigned*>(scratch);
  const Input q_prequantized_view(q_prequantized(p) ? p.q : View{}, OCTET_E4M3, allocator);
  const Input k_prequantized_view(k_prequantized(p) ? p.k : View{}, OCTET_E4M3, allocator);
  const int64_t queries = p.batch * p.heads * p.tokens_q;
  const bool has_input_scales = q_prequantized(p) && (p.q.quantization || p.k.quantization);
  c.q_scale = !q_prequantized(p) || has_input_scales ? allocator.take<float>(queries) : nullptr;
  c.mean_logit = smooths_k(p) && wants_mean_logit(p) ? allocator.take<float>(queries) : nullptr;
  if (!q_prequantized(p)) c.q_quantized = allocator.take(queries * dim);
  if (!k_prequantized(p))
    c.k_quantized = allocator.take(batch_heads * keys * dim),
    c.k_scale = allocator.take<float>(batch_heads * keys / (c.k_groups ? kGroupTokens : 1));
  c.v_quantized = allocator.take(batch_heads * keys * dim);
  c.v_scale = dynamic ? allocator.take<float>(2 * batch_heads * keys) : nullptr;
  const Result o(p.o, allocator), o_residual(p.o_residual, allocator);
  if (!workspace || !p.o.elements()) return allocator.used();

  const DeviceScope device(p.device_index);
  Forward8BitParams a{};
  a.scheduler = scheduler_of(p, kernel, 1, counter, blocks_before, stream);
  if (kernel.skips) shorten_tail(p, a.scheduler);
  q_prequantized_view.preprocess(stream), k_prequantized_view.preprocess(stream);
  if (has_input_scales)
    fill_scales(head_scale(p.q), head_scale(p.k), static_cast<int>(p.batch), c.heads, c.kv_heads,
                static_cast<int>(p.tokens_q), c.q_scale, stream);
  // This is the last launch before the kernel, which starts while it drains (PDL).
  keys ? quantize(c, scratch, stream) : clear(counter, stream);

  const View q =
      q_prequantized(p) ? q_prequantized_view.view() : view_8bit(c.q_quantized, p.batch, p.heads, p.tokens_q, dim);
  const View k =
      k_prequantized(p) ? k_prequantized_view.view() : view_8bit(c.k_quantized, p.batch, p.kv_heads, keys, dim);
  a.q = tensor_map(q, kernel.rows, panel_bytes(dim));
  if (k.elements()) a.k = tensor_map(k, kernel.keys, panel_bytes(dim));
  if (keys) {
    a.v = tensor_map(view_8bit(c.v_quantized, p.batch, p.kv_heads, dim, keys), static_cast<int>(dim),
                     panel_bytes(kernel.keys));
  }
  set_broadcast(q, a.q_broadcast), set_broadcast(k, a.k_broadcast);
  a.k_in_tiles = !k_prequantized(p);
  a.keys = static_cast<int>(keys);
  a.mask = mask_of(p);
  a.group = static_cast<int>(p.group());
  a.dim_v = static_cast<int>(p.dim_v);
  a.scale = p.scale;
  a.scale_log2e = static_cast<float>(p.scale * 1.4426950408889634);
  a.q_scale = c.q_scale, a.k_scale = c.k_scale, a.v_scale = c.v_scale;
  a.v_channel_scale = c.channels.v_scale, a.v_mean = c.channels.v_mean;
  a.mean_logit = c.mean_logit;
  a.o = o.output(), a.o_residual = o_residual.output(), a.lse = output(p.lse);
  a.sinks = sinks(p.sinks);
  a.q_rows = output(q), a.k_rows = output(k), a.v_quantized = static_cast<const unsigned char*>(c.v_quantized);
  a.dim = static_cast<int>(q.shape[3]);
  launch(p, kernel, a.scheduler, &a, true, stream);
  o.deliver(stream);
  if (p.o_residual.present()) o_residual.deliver(stream);
  return allocator.used();
}

std::optional<std::string> quantized_unsupported_reason(const Problem& p) {
  if (forward_8bit_precisions().has(p.precision) && std::max(p.dim, p.dim_v) > kMax8BitDim)
    return text("it has no ", name(p.precision), " for head dim ", std::max(p.dim, p.dim_v), "; it has: up to ",
                kMax8BitDim);
  if (p.smooth_q) return "smooth_q is not in its kernels";
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}}) {
    const octet_quantization* how = t->quantization;
    if (!how) continue;
    if (p.precision != OCTET_PRECISION_FP8 || t->dtype != OCTET_E4M3)
      return text(label, " is quantized ", name(t->dtype), "; its ", name(p.precision),
                  " takes f32, f16, bf16 and e4m3 as they are, its fp8 also e4m3 with a scale per tensor");
    if (how->granularity != OCTET_PER_TENSOR || how->mean || how->hadamard_seed)
      return text(label, " is quantized e4m3 ", how->granularity != OCTET_PER_TENSOR ? "not per tensor" : "",
                  how->mean ? " with a mean" : "", how->hadamard_seed ? " with a rotation" : "",
                  "; it takes e4m3 with a scale per tensor and nothing else");
  }
  const bool one_quantized = p.q.quantization || p.k.quantization;
  if (one_quantized && !(q_prequantized(p) && k_prequantized(p)))
    return "only one of q and k is e4m3, and quantized; it takes both so, or none quantized";
  return {};
}

}  // namespace octet::cuda::sm90
