// The 8-bit forward pass on the host: quantization, tensor maps, scheduler, launch.
#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/names.h"
#include "cuda/fragment/precision.h"
#include "cuda/host/backend.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/sm90/fwd/launch.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {

Plan forward_8bit(const Problem& p, const ForwardChoice& choice, void* workspace) {
  const Kernel& kernel = choice.kernel;
  const int64_t dim = kernel.dim;
  const bool q_came = choice.q == QuantizedFormat::none, k_came = choice.k == QuantizedFormat::none;
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
  c.q_type = choice.q, c.k_type = choice.k, c.v_type = choice.v;
  c.k_groups = choice.k_groups;

  WorkspaceAllocator allocator(workspace);
  const int64_t keys = static_cast<int64_t>(c.keys.count()) * kernel.laid_out_keys, batch_heads = p.batch * p.kv_heads;
  const int64_t sequence_heads = (p.packed() ? sequences_of(p) : p.batch) * p.kv_heads;
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const auto channels = [&](bool wanted) { return wanted ? allocator.take<float>(sequence_heads * dim) : nullptr; };
  c.channels = {channels(!k_came), channels(choice.v_by_tokens), channels(choice.v_by_channel),
                channels(choice.v_by_channel)};
  void* const scratch = allocator.take(quantize_scratch_bytes(c));
  auto* const counter = static_cast<unsigned*>(scratch);
  const Input q_cast(q_came ? p.q : View{}, OCTET_E4M3, allocator);
  const Input k_cast(k_came ? p.k : View{}, OCTET_E4M3, allocator);
  const int64_t queries = p.batch * p.heads * p.tokens_q;
  const bool has_input_scales = q_came && (p.q.quantization || p.k.quantization);
  c.q_scale = !q_came || has_input_scales ? allocator.take<float>(queries) : nullptr;
  c.mean_logit = !k_came && wants_mean_logit(p) ? allocator.take<float>(queries) : nullptr;
  if (!q_came) c.q_quantized = allocator.take(queries * dim);
  if (!k_came)
    c.k_quantized = allocator.take(batch_heads * keys * dim),
    c.k_scale = allocator.take<float>(batch_heads * keys / (c.k_groups ? kGroupTokens : 1));
  c.v_quantized = allocator.take(batch_heads * keys * dim);
  c.v_scale = choice.v_by_tokens ? allocator.take<float>(2 * batch_heads * keys) : nullptr;
  const Result o(p.o, allocator), o_residual(p.o_residual, allocator);
  const auto name = [&p, choice] {
    return text("forward ", octet::name(p.precision), ", wgmma, ", choice.kernel.rows, " x ", choice.kernel.keys,
                " tiles");
  };
  auto run = [=, &p](cudaStream_t stream) {
    if (!p.o.elements()) return;
    const Kernel& kernel = choice.kernel;
    Forward8BitParams a{};
    a.scheduler = scheduler_of(p, kernel, 1, counter, blocks_before, stream);
    if (kernel.skips) shorten_tail(p, a.scheduler);
    q_cast.preprocess(stream), k_cast.preprocess(stream);
    if (has_input_scales)
      fill_scales(head_scale(p.q), head_scale(p.k), static_cast<int>(p.batch), c.heads, c.kv_heads,
                  static_cast<int>(p.tokens_q), c.q_scale, stream);
    // This is the last launch before the kernel, which starts while it drains (PDL).
    keys ? quantize(c, scratch, stream) : clear(counter, stream);

    const View q = q_came ? q_cast.view() : view_8bit(c.q_quantized, p.batch, p.heads, p.tokens_q, dim);
    const View k = k_came ? k_cast.view() : view_8bit(c.k_quantized, p.batch, p.kv_heads, keys, dim);
    a.q = tensor_map(q, kernel.rows, panel_bytes(dim));
    if (k.elements()) a.k = tensor_map(k, kernel.keys, panel_bytes(dim));
    if (keys) {
      a.v = tensor_map(view_8bit(c.v_quantized, p.batch, p.kv_heads, dim, keys), static_cast<int>(dim),
                       panel_bytes(kernel.keys));
    }
    set_broadcast(q, a.q_broadcast), set_broadcast(k, a.k_broadcast);
    a.k_in_tiles = !k_came;
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
  };
  return plan_of(p, allocator, kName, name, std::move(run),
                 [choice] { return one_tile(choice.kernel.rows, choice.kernel.keys); });
}

}  // namespace octet::cuda::sm90
