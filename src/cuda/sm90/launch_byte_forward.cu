// The forward pass with operands of 8 bits on the host: codes and steps, tensor maps, schedule, launch.
#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/names.h"
#include "cuda/attn/precision.h"
#include "cuda/host/operands.h"
#include "cuda/host/status.h"
#include "cuda/host/tensor_map.h"
#include "cuda/sm90/arguments.h"
#include "cuda/sm90/codes.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

bool raw(const Problem& p) { return p.precision == OCTET_PRECISION_FP8_RAW; }
bool integers(const Problem& p) {
  return p.precision == OCTET_PRECISION_INT8 || p.precision == OCTET_PRECISION_INT8_FP8;
}

// e4m3 is not coded again where q and k become e4m3; raw casts are no codes either.
bool q_given(const Problem& p) { return raw(p) || (!integers(p) && p.q.dtype == OCTET_E4M3); }
bool k_given(const Problem& p) { return raw(p) || (!integers(p) && p.k.dtype == OCTET_E4M3); }
bool smooths_k(const Problem& p) { return !k_given(p); }
bool v_by_channel(const Problem& p) { return !raw(p) && p.precision != OCTET_PRECISION_INT8; }

Kernel kernel_of(const Problem& p) {
  const DimsIndex dims = std::max(p.dim, p.dim_v) <= 64 ? DimsIndex::d64 : DimsIndex::d128;
  switch (p.precision) {
    case OCTET_PRECISION_INT8:
      return byte_forward_kernel<PrecisionInt8>(dims);
    case OCTET_PRECISION_INT8_FP8:
      return byte_forward_kernel<PrecisionInt8Fp8>(dims);
    case OCTET_PRECISION_FP8:
      return k_given(p) ? byte_forward_kernel<PrecisionFp8Given>(dims) : byte_forward_kernel<PrecisionFp8>(dims);
    default:
      return byte_forward_kernel<PrecisionFp8Raw>(dims);
  }
}

HeadScale head_scale(const View& t) {
  if (!t.quantization) return {};
  const octet_tensor& scale = *t.quantization->scale;
  return {static_cast<const float*>(scale.data), scale.stride[0], scale.stride[1]};
}

}  // namespace

PrecisionSet byte_forward_precisions() {
  return {OCTET_PRECISION_INT8, OCTET_PRECISION_INT8_FP8, OCTET_PRECISION_FP8, OCTET_PRECISION_FP8_RAW};
}

std::string byte_forward_name(const Problem& p) {
  const Kernel kernel = kernel_of(p);
  return text("forward ", name(p.precision), ", wgmma, ", kernel.rows, " x ", kernel.keys, " tiles");
}

std::size_t byte_forward(const Problem& p, void* workspace, cudaStream_t stream) {
  const Kernel kernel = kernel_of(p);
  const int64_t dim = std::max(p.dim, p.dim_v) <= 64 ? 64 : 128;
  const bool dynamic = p.precision == OCTET_PRECISION_INT8;
  CodesArguments c{.q = strided(p.q),
                   .k = strided(p.k),
                   .v = strided(p.v),
                   .v_scale = head_scale(p.v),
                   .dim = static_cast<int>(dim),
                   .heads = static_cast<int>(p.heads),
                   .kv_heads = static_cast<int>(p.kv_heads),
                   .keys = {static_cast<const int*>(p.cu_seqlens_k.data), sequences_of(p), static_cast<int>(p.tokens_k),
                            kernel.laid_out_keys, mask_of(p), static_cast<int>(p.tokens_q),
                            static_cast<const int*>(p.cu_seqlens_q.data)},
                   .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data)};
  if (p.hadamard) c.rotation = rotation_of(p.dim);
  const Code code = integers(p) ? Code::s8 : Code::e4m3;
  c.q_code = q_given(p) ? Code::none : code;
  c.k_code = k_given(p) ? Code::none : code;
  c.v_code = dynamic ? Code::s8 : Code::e4m3;
  c.k_groups = p.precision == OCTET_PRECISION_INT8_FP8;

  WorkspaceAllocator allocator(workspace);
  const int64_t keys = static_cast<int64_t>(c.keys.count()) * kernel.laid_out_keys, sides = p.batch * p.kv_heads;
  const int64_t sequence_sides = (p.packed() ? sequences_of(p) : p.batch) * p.kv_heads;
  int* const blocks_before = p.packed() ? allocator.take<int>(sequences_of(p) + 1) : nullptr;
  const auto channels = [&](bool wanted) { return wanted ? allocator.take<float>(sequence_sides * dim) : nullptr; };
  c.channels = {channels(smooths_k(p)), channels(dynamic), channels(v_by_channel(p)), channels(v_by_channel(p))};
  void* const scratch = allocator.take(preparation_bytes(c));
  auto* const counter = static_cast<unsigned*>(scratch);
  const Input q_given_view(q_given(p) ? p.q : View{}, OCTET_E4M3, allocator);
  const Input k_given_view(k_given(p) ? p.k : View{}, OCTET_E4M3, allocator);
  const int64_t queries = p.batch * p.heads * p.tokens_q;
  const bool given_steps = q_given(p) && (p.q.quantization || p.k.quantization);
  c.q_step = !q_given(p) || given_steps ? allocator.take<float>(queries) : nullptr;
  c.mean_logit = smooths_k(p) && wants_mean_logit(p) ? allocator.take<float>(queries) : nullptr;
  if (!q_given(p)) c.q_codes = allocator.take(queries * dim);
  if (!k_given(p))
    c.k_codes = allocator.take(sides * keys * dim),
    c.k_step = allocator.take<float>(sides * keys / (c.k_groups ? kGroupTokens : 1));
  c.v_codes = allocator.take(sides * keys * dim);
  c.v_step = dynamic ? allocator.take<float>(2 * sides * keys) : nullptr;
  const Result o(p.o, allocator), o_residual(p.o_residual, allocator);
  if (!workspace || !p.o.elements()) return allocator.used();

  const DeviceScope device(p.device_index);
  ByteForwardArguments a{};
  a.schedule = schedule_of(p, kernel, 1, counter, blocks_before, stream);
  if (kernel.skips) shorten_tail(p, a.schedule);
  q_given_view.prepare(stream), k_given_view.prepare(stream);
  if (given_steps)
    fill_steps(head_scale(p.q), head_scale(p.k), static_cast<int>(p.batch), c.heads, c.kv_heads,
               static_cast<int>(p.tokens_q), c.q_step, stream);
  // Right before the kernel, which takes its place while this one drains.
  keys ? prepare(c, scratch, stream) : clear(counter, stream);

  const View q = q_given(p) ? q_given_view.view() : bytes_view(c.q_codes, p.batch, p.heads, p.tokens_q, dim);
  const View k = k_given(p) ? k_given_view.view() : bytes_view(c.k_codes, p.batch, p.kv_heads, keys, dim);
  a.q = tensor_map(q, kernel.rows, panel_of_bytes(dim));
  if (keys) {
    a.k = tensor_map(k, kernel.keys, panel_of_bytes(dim));
    a.v = tensor_map(bytes_view(c.v_codes, p.batch, p.kv_heads, dim, keys), static_cast<int>(dim),
                     panel_of_bytes(kernel.keys));
  }
  set_broadcast(q, a.q_broadcast), set_broadcast(k, a.k_broadcast);
  a.k_in_tiles = !k_given(p);
  a.keys = static_cast<int>(keys);
  a.mask = mask_of(p);
  a.group = static_cast<int>(p.group());
  a.dim_v = static_cast<int>(p.dim_v);
  a.scale = p.scale;
  a.scale_log2e = static_cast<float>(p.scale * 1.4426950408889634);
  a.q_step = c.q_step, a.k_step = c.k_step, a.v_step = c.v_step;
  a.v_channel = c.channels.v_step, a.v_mean = c.channels.v_mean;
  a.mean_logit = c.mean_logit;
  a.o = o.output(), a.o_residual = o_residual.output(), a.lse = output(p.lse);
  a.sinks = sinks(p.sinks);
  a.q_rows = output(q), a.k_rows = output(k), a.v_codes = static_cast<const unsigned char*>(c.v_codes);
  a.dim = static_cast<int>(q.shape[3]);
  launch(p, kernel, a.schedule, &a, true, stream);
  o.deliver(stream);
  if (p.o_residual.present()) o_residual.deliver(stream);
  return allocator.used();
}

std::optional<std::string> coded_forward_unsupported_reason(const Problem& p) {
  if (byte_forward_precisions().has(p.precision) && std::max(p.dim, p.dim_v) > kMaxByteDim)
    return text("it has no ", name(p.precision), " for head dim ", std::max(p.dim, p.dim_v), "; it has: up to ",
                kMaxByteDim);
  if (p.smooth_q) return "smooth_q is not in its kernels";
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}}) {
    const octet_quantization* how = t->quantization;
    if (!how) continue;
    if (p.precision != OCTET_PRECISION_FP8 || t->dtype != OCTET_E4M3)
      return text(label, " is quantised ", name(t->dtype), "; its ", name(p.precision),
                  " takes f32, f16, bf16 and e4m3 as they are, its fp8 also e4m3 with a scale per tensor");
    if (how->granularity != OCTET_PER_TENSOR || how->mean || how->hadamard_seed)
      return text(label, " is quantised e4m3 ", how->granularity != OCTET_PER_TENSOR ? "not per tensor" : "",
                  how->mean ? " with a mean" : "", how->hadamard_seed ? " with a rotation" : "",
                  "; it takes e4m3 with a scale per tensor and nothing else");
  }
  const bool one_quantised = p.q.quantization || p.k.quantization;
  if (one_quantised && !(q_given(p) && k_given(p)))
    return "only one of q and k is e4m3, and quantised; it takes both so, or none quantised";
  return {};
}

}  // namespace octet::cuda::sm90
