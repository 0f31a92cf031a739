// The 16-bit forward pass on the host: operands, tensor maps, scheduler, launch.
#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/names.h"
#include "cuda/host/backend.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/mask_rows.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/operands/seen.h"
#include "cuda/operands/slopes.h"
#include "cuda/sm90/fwd/launch.h"
#include "cuda/sm90/fwd/params.h"
#include "cuda/sm90/passes.h"
#include "cuda/sm90/smem.h"

namespace octet::cuda::sm90 {
Plan forward_16bit(const Problem& p, const ForwardChoice& choice, void* workspace) {
  const Kernel& kernel = choice.kernel;
  const octet_dtype type = choice.numerics.type();
  const bool quantizes = choice.quantizes_qk, scales_v = choice.scales_v, f16_v = choice.numerics.f16_p_and_v();
  WorkspaceAllocator allocator(workspace);
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const Input q(quantizes ? View{} : p.q, type, allocator), k(quantizes ? View{} : p.k, type, allocator);
  std::optional<Int8Logits> qk;
  if (quantizes) qk.emplace(p, KeySide{p.k, p.v}, kernel.dim, kernel.keys, allocator);
  unsigned* const counter = qk ? qk->counter() : allocator.take<unsigned>(1);
  // Keys that a mask tensor hides from all queries may hold anything: they are zeros in a v that is converted anyway,
  // or else in a copy.
  std::optional<SeenKeySide> seen_v;
  if (p.mask.present() && !scales_v) seen_v.emplace(p, ReadsK::as_it_is, allocator);
  const Input v(scales_v ? View{} : seen_v ? seen_v->v() : p.v, type, allocator);
  const ScaledInput v_scaled(scales_v ? p.v : View{}, f16_v ? type : p.v.dtype, f16_v && !p.dropout ? kernel.dim_v : 0,
                             allocator);
  const MaskSummary mask(p, scales_v ? MaskSummary::Seen::keys : MaskSummary::Seen::none, allocator);
  const MaskTiles mask_tiles(p, type, kWarpgroupRows, allocator);
  const Result o(p.o, allocator), o_residual(p.o_residual, allocator);
  const auto name = [&p, choice] {
    return text("forward ", octet::name(p.precision), choice.numerics.f16_p_and_v() ? " with P in f16" : "",
                choice.numerics.beta ? " with beta" : "",
                p.alibi_slopes.present() ? " with ALiBi"
                : p.dropout              ? " with dropout"
                : p.mask.present()       ? " with a mask tensor"
                                         : "",
                ", wgmma, ", choice.kernel.rows, " x ", choice.kernel.keys, " tiles");
  };
  auto run = [=, &p](cudaStream_t stream) {
    if (!p.o.elements()) return;
    const Kernel& kernel = choice.kernel;
    ForwardParams a{};
    const SeenKeys seen = seen_keys(p);
    if (p.mask.present()) mask.preprocess(stream), mask_tiles.preprocess(stream);
    if (seen_v) seen_v->preprocess(stream);
    // The kernel converts v itself, unless it has few queries to do so beside.
    const bool in_slices = f16_v && v_scaled.in_slices(seen) && p.heads * p.tokens_q >= p.kv_heads * p.tokens_k;
    a.scheduler = scheduler_of(p, kernel, sizeof(F16), counter, blocks_before, stream);
    if (!qk && !in_slices) clear_counter(p, kernel, a.scheduler, stream);
    q.preprocess(stream), k.preprocess(stream);
    if (in_slices)
      a.v_slices = v_scaled.find_v_stats(seen, mask.seen_keys(), counter, stream);
    else
      scales_v ? v_scaled.preprocess(seen, stream, mask.seen_keys()) : v.preprocess(stream);
    // This is the last launch before the kernel, which starts while it drains (PDL).
    if (qk) qk->quantize(stream);
    const View& values = scales_v ? v_scaled.view() : v.view();
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
    a.beta = choice.numerics.beta, a.beta_limit = choice.numerics.beta_limit / p.scale;  // in logits before scaling
    a.v_scale = scales_v ? v_scaled.scale() : nullptr;
    a.v_mean = v_scaled.v_mean();
    a.o = o.output(), a.o_residual = o_residual.output(), a.lse = output(p.lse);
    a.sinks = sinks(p.sinks), a.slopes = alibi_slopes(p), a.dropout = dropout_of(p);
    if (mask.rows().mask.bytes) {
      a.mask_rows = mask.rows(), a.mask_tiles = tensor_map(mask_tiles.view(), kWarpgroupRows);
      mask_tiles.set_broadcast(a.mask_broadcast);
    }
    a.q_rows = output(queries), a.k_rows = output(keys), a.v_rows = output(values);
    a.dim = static_cast<int>(queries.shape[3]);

    launch(p, kernel, a.scheduler, &a, quantizes || f16_v, stream);
    o.deliver(stream);
    if (p.o_residual.present()) o_residual.deliver(stream);
  };
  return plan_of(p, allocator, kName, name, std::move(run),
                 [choice] { return one_tile(choice.kernel.rows, choice.kernel.keys); });
}

}  // namespace octet::cuda::sm90
