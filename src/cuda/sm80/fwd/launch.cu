// The forward pass on the host: operands, scheduler, launch.
#include <algorithm>

#include "core/error.h"
#include "core/names.h"
#include "cuda/host/backend.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/cache.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/sm80/fwd/choose.h"
#include "cuda/sm80/fwd/combine.h"
#include "cuda/sm80/fwd/inputs.h"
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

int bytes_of(Element x) { return x == Element::f32 ? 4 : x == Element::f16 || x == Element::bf16 ? 2 : 1; }

PageChunks page_chunks(const Output& t) {
  const int bytes = bytes_of(t.element);
  return {static_cast<unsigned>(t.stride[0] * bytes / 16), static_cast<unsigned>(t.stride[2] * bytes / 16)};
}

// Returns the channels of an output from channel `first` on.
Output columns_of(Output t, int64_t first) {
  if (t.data) t.data = static_cast<unsigned char*>(t.data) + first * bytes_of(t.element);
  return t;
}

}  // namespace

Plan forward(const Problem& p, const ForwardNumerics& numerics, void* workspace) {
  const ForwardChoice choice = choose_forward(p, numerics);
  const ForwardKernel& kernel = choice.kernel;
  const bool splits = choice.splits > 1;
  WorkspaceAllocator allocator(workspace);
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const ForwardInputs inputs(p, choice, allocator);
  // No kernel writes e4m3, for which GPUs before 8.9 have no instruction: it is cast from f32.
  const bool casts_o = p.o.dtype == OCTET_E4M3;
  const Result o(p.o, casts_o ? OCTET_F32 : p.o.dtype, allocator),
      o_residual(casts_o ? View{} : p.o_residual, allocator);
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
        choice.f32 ? " in two f16 halves" : "", of.beta ? " with beta" : "",
        choice.f16_sums ? ", P v summed in f16" : "", choice.e4m3_products ? ", products of e4m3" : "", ", mma.sync, ",
        choice.kernel.rows, " x ", choice.kernel.keys, " tiles",
        choice.few ? text(", ", choice.tile_heads, " heads in a tile, keys in ", choice.splits, " splits") : "");
  };
  auto run = [=, &p](cudaStream_t stream) {
    if (!p.o.elements()) return;
    const ForwardKernel& kernel = choice.kernel;
    ForwardParams a{};
    a.scheduler =
        tile_scheduler(p, choice.tile_queries, groups_of(p, choice), blocks_before, stream, choice.tile_heads);
    compute_row_biases(p, terms, stream);
    if (kernel.masked) classify(p, terms, classes, stream);
    inputs.preprocess(p, stream);
    inputs.set(p, a);
    a.mask = mask_of(p);
    a.tile_heads = choice.tile_heads;
    a.group = static_cast<int>(p.group() / choice.tile_heads);
    a.terms = terms;
    a.mask_classes = classes;
    a.dropout = dropout_of(p);
    if (p.k.pages.size) a.pages = page_table(p), a.k_chunks = page_chunks(a.k), a.v_chunks = page_chunks(a.v);
    constexpr double kLog2e = 1.4426950408889634;
    a.scale_log2e = static_cast<float>(choice.general ? kLog2e : p.scale * kLog2e);
    a.largest_p = LargestCode::of(choice.numerics.formats.p == OCTET_I8 ? kLargestS8 : kLargestU8);
    a.beta = choice.numerics.beta, a.beta_limit = choice.numerics.beta_limit;
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
      inputs.set_v(first, a);
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
    if (!p.o_residual.present()) return;
    if (casts_o)
      residual_of_cast(strided(o.view()), strided(p.o), strided(p.o_residual), stream);
    else
      o_residual.deliver(stream);
  };
  return plan_of(p, allocator, kName, name, std::move(run), [&p, numerics] { return forward_tiles(p, numerics); });
}

}  // namespace octet::cuda::sm80
