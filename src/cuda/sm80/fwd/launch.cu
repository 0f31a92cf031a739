// The forward pass on the host: operands, scheduler, launch.
#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/names.h"
#include "cuda/fragment/precision.h"
#include "cuda/host/backend.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/seen.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/sm80/fwd/choose.h"
#include "cuda/sm80/fwd/combine.h"
#include "cuda/sm80/fwd/params.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

// Returns groups of heads whose k and v take two thirds of L2. Only masks make blocks of different lengths.
HeadGroups groups_of(const Problem& p, const ForwardChoice& choice) {
  const int64_t all = p.batch * p.heads / choice.tile_heads;
  if (choice.few || !p.windowed) return one_by_one(all);
  const int64_t head_bytes = std::max<int64_t>(sizeof(F16) * p.tokens_k * (p.dim + p.dim_v), 1);
  const Card& gpu = card(p.device_index);
  const int64_t in_l2 = gpu.l2_bytes * 2 / 3 / head_bytes * p.group();
  return head_groups_of(all, query_blocks(p, choice.tile_queries), in_l2, 2 * gpu.multiprocessors);
}

// Returns up to `count` channels of a tensor, from channel `first` on.
View columns_of(View t, int64_t first, int64_t count) {
  if (t.data)
    t.data = static_cast<unsigned char*>(t.data) + first * t.stride[3] * static_cast<int64_t>(bytes_of(t.dtype));
  t.shape[3] = std::min(t.shape[3] - first, count);
  return t;
}
Output columns_of(Output t, int64_t first) {
  const int bytes = t.element == Element::f32 ? 4 : t.element == Element::i8 ? 1 : 2;
  if (t.data) t.data = static_cast<unsigned char*>(t.data) + first * bytes;
  return t;
}

}  // namespace

Plan forward(const Problem& p, const ForwardNumerics& numerics, void* workspace) {
  const ForwardChoice choice = choose_forward(p, numerics);
  const ForwardKernel& kernel = choice.kernel;
  const octet_dtype type = numerics.type();
  const bool scaled = numerics.f16_p_and_v(), splits = choice.splits > 1, halves = choice.f32;
  WorkspaceAllocator allocator(workspace);
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const SeenValues seen_v(p, allocator);
  const View none;
  const Input q(halves ? none : p.q, type, allocator), k(halves ? none : p.k, type, allocator),
      v(halves || scaled ? none : seen_v.view(), type, allocator);
  const ScaledInput v_scaled(scaled ? seen_v.view() : none, type, scaled ? kernel.dim_v : 0, allocator);
  const F16HalvesInput q_halves(halves ? p.q : none, kernel.dim, NonFinite::kept, allocator),
      k_halves(halves ? p.k : none, kernel.dim, NonFinite::kept, allocator);
  std::vector<F16HalvesInput> v_halves;
  for (int64_t first = 0; halves && first < p.dim_v; first += kernel.dim_v)
    v_halves.emplace_back(columns_of(seen_v.view(), first, kernel.dim_v), kernel.dim_v, NonFinite::kept, allocator);
  const Result o(p.o, allocator), o_residual(p.o_residual, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  const MaskClasses classes =
      kernel.masked ? mask_classes(p, terms, kernel.rows_of_warp, kernel.keys, allocator) : MaskClasses{};
  const int64_t split_rows = splits ? p.batch * choice.splits * p.heads * p.tokens_q : 0;
  auto* const split_o = allocator.take<float>(split_rows * std::min<int64_t>(p.dim_v, kernel.dim_v));
  auto* const statistics = allocator.take<RowStatistics>(split_rows);
  const auto name = [&p, choice] {
    const ForwardNumerics& of = choice.numerics;
    return text(
        "forward ", octet::name(p.precision), of.f16_p_and_v() ? " with P in f16" : "",
        choice.f32 ? " in two f16 halves" : "", of.beta ? " with beta" : "", ", mma.sync, ", choice.kernel.rows, " x ",
        choice.kernel.keys, " tiles",
        choice.few ? text(", ", choice.tile_heads, " heads in a tile, keys in ", choice.splits, " splits") : "");
  };
  auto run = [=, &p, v_halves = std::move(v_halves)](cudaStream_t stream) {
    if (!p.o.elements()) return;
    const ForwardKernel& kernel = choice.kernel;
    ForwardParams a{};
    a.scheduler =
        tile_scheduler(p, choice.tile_queries, groups_of(p, choice), blocks_before, stream, choice.tile_heads);
    seen_v.preprocess(stream);
    compute_row_biases(p, terms, stream);
    if (kernel.masked) classify(p, terms, classes, stream);
    if (halves) {
      q_halves.preprocess(stream), k_halves.preprocess(stream);
      for (const F16HalvesInput& input : v_halves) input.preprocess(stream);
      a.q = q_halves.view().tensor, a.q_factors = q_halves.view().factors;
      a.k = k_halves.view().tensor, a.k_factors = k_halves.view().factors;
    } else {
      q.preprocess(stream), k.preprocess(stream);
      scaled ? v_scaled.preprocess(seen_keys(p), stream) : v.preprocess(stream);
      a.q = output(q.view()), a.k = output(k.view()), a.v = output(scaled ? v_scaled.view() : v.view());
    }
    a.mask = mask_of(p);
    a.tile_heads = choice.tile_heads;
    a.group = static_cast<int>(p.group() / choice.tile_heads);
    a.dim = static_cast<int>(halves ? kernel.dim : p.dim);
    a.whole_columns = halves || (p.dim == kernel.dim && p.dim_v == kernel.dim_v);
    a.terms = terms;
    a.mask_classes = classes;
    constexpr double kLog2e = 1.4426950408889634;
    a.scale_log2e = static_cast<float>(choice.general ? kLog2e : p.scale * kLog2e);
    a.beta = choice.numerics.beta, a.beta_limit = choice.numerics.beta_limit;
    a.v_scale = scaled ? v_scaled.scale() : nullptr, a.v_mean = v_scaled.v_mean();
    CombineParams c{.split_o = split_o,
                    .statistics = statistics,
                    .splits = choice.splits,
                    .batch = p.batch,
                    .heads = p.heads,
                    .tokens = p.tokens_q,
                    .lse = output(p.lse),
                    .sinks = sinks(p.sinks)};
    if (splits)
      a.statistics = {statistics, {p.heads * p.tokens_q, p.tokens_q, 1}, Element::f32};
    else
      a.lse = c.lse, a.sinks = c.sinks;

    allow_shared_bytes(kernel.function, kernel.shared_bytes);
    for (int64_t first = 0; first < p.dim_v; first += kernel.dim_v) {
      a.dim_v = static_cast<int>(std::min<int64_t>(p.dim_v - first, kernel.dim_v));
      if (halves) {
        const F16HalvesView v_view = v_halves[first / kernel.dim_v].view();
        a.v = v_view.tensor, a.v_factors = v_view.factors;
      }
      c.dim_v = a.dim_v;
      c.o = columns_of(o.output(), first), c.o_residual = columns_of(o_residual.output(), first);
      if (splits)
        a.o = {split_o, {p.heads * p.tokens_q * a.dim_v, p.tokens_q * a.dim_v, a.dim_v}, Element::f32};
      else
        a.o = c.o, a.o_residual = c.o_residual;
      void* arguments[] = {&a};
      const dim3 grid(static_cast<unsigned>(choice.tiles), static_cast<unsigned>(choice.splits));
      check(cudaLaunchKernel(kernel.function, grid, dim3(kernel.threads), arguments, kernel.shared_bytes, stream),
            "cudaLaunchKernel");
      if (splits) combine(c, stream);
    }
    o.deliver(stream);
    if (p.o_residual.present()) o_residual.deliver(stream);
  };
  return plan_of(p, allocator, name, std::move(run));
}

}  // namespace octet::cuda::sm80
