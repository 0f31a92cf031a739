// The forward pass on the host: kernel choice, operands, scheduler, launch.
#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/fragment/precision.h"
#include "cuda/host/status.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/seen.h"
#include "cuda/scheduler/few_queries.h"
#include "cuda/scheduler/key_splits.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/sm80/fwd/combine.h"
#include "cuda/sm80/fwd/kernels.h"
#include "cuda/sm80/fwd/params.h"
#include "cuda/sm80/mask_tile.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

bool general(const Problem& p) { return !p.plain_logits() || shifts_maximum(p); }

template <class Precision, bool Few>
ForwardKernel kernel_of(const Problem& p) {
  const int64_t most = std::max(p.dim, p.dim_v);
  return general(p) ? forward_kernel_of<Precision, true, Few>(most) : forward_kernel_of<Precision, false, Few>(most);
}
template <bool Few>
ForwardKernel kernel_of(const Problem& p) {
  if (p.precision == OCTET_PRECISION_F32) return kernel_of<PrecisionF32, Few>(p);
  return p.precision == OCTET_PRECISION_BF16 ? kernel_of<PrecisionBf16, Few>(p) : kernel_of<PrecisionF16, Few>(p);
}

// The kernel for a mask tensor as the only term beside scale q.k, with the bytes of its tile.
ForwardKernel masked_kernel_of(const Problem& p, const LogitTerms& terms) {
  const int64_t most = std::max(p.dim, p.dim_v);
  ForwardKernel kernel = f16_p_and_v(p)                        ? masked_forward_kernel_of<PrecisionBf16F16Compute>(most)
                         : p.precision == OCTET_PRECISION_BF16 ? masked_forward_kernel_of<PrecisionBf16>(most)
                                                               : masked_forward_kernel_of<PrecisionF16>(most);
  kernel.shared_bytes += kernel.rows * mask_row_bytes(kernel.keys, terms.mask.bytes);
  return kernel;
}

ForwardKernel kernel_of_many(const Problem& p) {
  WorkspaceAllocator none(nullptr);
  const LogitTerms terms = logit_terms(p, none);
  if (p.precision != OCTET_PRECISION_F32 && terms.mask.chunks && !p.softcap && !terms.slopes && !shifts_maximum(p)) {
    const ForwardKernel masked = masked_kernel_of(p, terms);
    if (masked.shared_bytes <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, p.device_index)) return masked;
  }
  return f16_p_and_v(p) ? kernel_of<PrecisionBf16F16Compute, false>(p) : kernel_of<false>(p);
}

// The kernel of a problem, and how its tiles are laid out.
struct Schedule {
  ForwardKernel kernel;
  bool few = false;  // the kernel is one for few queries
  int tile_heads = 1, tile_queries = 0, splits = 1;
  int64_t tiles = 0;  // for packed sequences, whose lengths lie on the device, at least as many as there are
};

Schedule schedule_of(const Problem& p) {
  const ForwardKernel kernel = kernel_of_many(p);
  const Schedule of_many{.kernel = kernel, .tile_queries = kernel.rows, .tiles = query_tiles(p, kernel.rows)};
  const ForwardKernel of_few = kernel_of<true>(p);
  const PackedTiles tiles = packed_tiles(p, of_few.rows);
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, p.device_index);
  if (!has_few_queries(p, tiles, of_many.tiles, multiprocessors)) return of_many;

  Schedule s{
      .kernel = of_few, .few = true, .tile_heads = tiles.heads, .tile_queries = tiles.queries, .tiles = tiles.count};
  // A thread block can have all of a multiprocessor's shared memory but what is reserved for each thread block.
  constexpr int kReservedBytes = 1024;
  const int blocks = (device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, p.device_index) + kReservedBytes) /
                     (s.kernel.shared_bytes + kReservedBytes);
  s.splits = key_splits(s.tiles, (most_keys(p) + s.kernel.keys - 1) / s.kernel.keys,
                        int64_t{multiprocessors} * std::clamp(blocks, 1, s.kernel.blocks));
  return s;
}

// Returns groups of heads whose k and v take two thirds of L2. Only masks make blocks of different lengths.
HeadGroups groups_of(const Problem& p, const Schedule& s) {
  const int64_t all = p.batch * p.heads / s.tile_heads;
  if (s.few || !p.windowed) return one_by_one(all);
  const int64_t head_bytes = std::max<int64_t>(sizeof(F16) * p.tokens_k * (p.dim + p.dim_v), 1);
  const int64_t in_l2 =
      device_attribute(cudaDevAttrL2CacheSize, p.device_index) * int64_t{2} / 3 / head_bytes * p.group();
  return head_groups_of(all, query_blocks(p, s.tile_queries), in_l2,
                        2 * device_attribute(cudaDevAttrMultiProcessorCount, p.device_index));
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

std::string forward_name(const Problem& p) {
  const Schedule s = schedule_of(p);
  return text("forward ", name(p.precision), f16_p_and_v(p) ? " with P in f16" : "",
              p.precision == OCTET_PRECISION_F32 ? " in two f16 parts" : "", shifts_maximum(p) ? " with beta" : "",
              ", mma.sync, ", s.kernel.rows, " x ", s.kernel.keys, " tiles",
              s.few ? text(", ", s.tile_heads, " heads in a tile, keys in ", s.splits, " parts") : "");
}

std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream) {
  const octet_dtype type = p.precision == OCTET_PRECISION_BF16 ? OCTET_BF16 : OCTET_F16;
  const Schedule schedule = schedule_of(p);
  const ForwardKernel& kernel = schedule.kernel;
  const bool scaled = f16_p_and_v(p), splits = schedule.splits > 1;
  WorkspaceAllocator allocator(workspace);
  allocator.take(1);  // the workspace of a run is not null
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const bool parts = p.precision == OCTET_PRECISION_F32;
  const SeenValues seen_v(p, allocator);
  const View none;
  const Input q(parts ? none : p.q, type, allocator), k(parts ? none : p.k, type, allocator),
      v(parts || scaled ? none : seen_v.view(), type, allocator);
  const ScaledInput v_scaled(scaled ? seen_v.view() : none, type, scaled ? kernel.dim_v : 0, allocator);
  const F16PartsInput q_parts(parts ? p.q : none, kernel.dim, NonFinite::kept, allocator),
      k_parts(parts ? p.k : none, kernel.dim, NonFinite::kept, allocator);
  std::vector<F16PartsInput> v_parts;
  for (int64_t first = 0; parts && first < p.dim_v; first += kernel.dim_v)
    v_parts.emplace_back(columns_of(seen_v.view(), first, kernel.dim_v), kernel.dim_v, NonFinite::kept, allocator);
  const Result o(p.o, allocator), o_residual(p.o_residual, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  const MaskClasses classes =
      kernel.masked ? mask_classes(p, terms, kernel.rows_of_warp, kernel.keys, allocator) : MaskClasses{};
  const int64_t part_rows = splits ? p.batch * schedule.splits * p.heads * p.tokens_q : 0;
  auto* const part_o = allocator.take<float>(part_rows * std::min<int64_t>(p.dim_v, kernel.dim_v));
  auto* const statistics = allocator.take<RowStatistics>(part_rows);
  if (!workspace || !p.o.elements()) return allocator.used();

  const DeviceScope device(p.device_index);
  ForwardParams a{};
  a.scheduler =
      tile_scheduler(p, schedule.tile_queries, groups_of(p, schedule), blocks_before, stream, schedule.tile_heads);
  seen_v.preprocess(stream);
  compute_gauges(p, terms, stream);
  if (kernel.masked) classify(p, terms, classes, stream);
  if (parts) {
    q_parts.preprocess(stream), k_parts.preprocess(stream);
    for (const F16PartsInput& input : v_parts) input.preprocess(stream);
    a.q = q_parts.view().parts, a.q_factors = q_parts.view().factors;
    a.k = k_parts.view().parts, a.k_factors = k_parts.view().factors;
  } else {
    q.preprocess(stream), k.preprocess(stream);
    scaled ? v_scaled.preprocess(seen_keys(p), stream) : v.preprocess(stream);
    a.q = output(q.view()), a.k = output(k.view()), a.v = output(scaled ? v_scaled.view() : v.view());
  }
  a.mask = mask_of(p);
  a.tile_heads = schedule.tile_heads;
  a.group = static_cast<int>(p.group() / schedule.tile_heads);
  a.dim = static_cast<int>(parts ? kernel.dim : p.dim);
  a.whole_columns = parts || (p.dim == kernel.dim && p.dim_v == kernel.dim_v);
  a.terms = terms;
  a.mask_classes = classes;
  constexpr double kLog2e = 1.4426950408889634;
  a.scale_log2e = static_cast<float>(general(p) ? kLog2e : p.scale * kLog2e);
  const Recipe recipe = recipe_of(p);
  a.beta = static_cast<float>(recipe.beta), a.beta_reach = static_cast<float>(recipe.beta_reach);
  a.v_scale = scaled ? v_scaled.scale() : nullptr, a.v_mean = v_scaled.v_mean();
  CombineParams c{.parts = part_o,
                  .statistics = statistics,
                  .splits = schedule.splits,
                  .batch = p.batch,
                  .heads = p.heads,
                  .tokens = p.tokens_q,
                  .lse = output(p.lse),
                  .sinks = sinks(p.sinks)};
  if (splits)
    a.statistics = {statistics, {p.heads * p.tokens_q, p.tokens_q, 1}, Element::f32};
  else
    a.lse = c.lse, a.sinks = c.sinks;

  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
        "cudaFuncSetAttribute");
  for (int64_t first = 0; first < p.dim_v; first += kernel.dim_v) {
    a.dim_v = static_cast<int>(std::min<int64_t>(p.dim_v - first, kernel.dim_v));
    if (parts) {
      const F16PartsView v_view = v_parts[first / kernel.dim_v].view();
      a.v = v_view.parts, a.v_factors = v_view.factors;
    }
    c.dim_v = a.dim_v;
    c.o = columns_of(o.output(), first), c.o_residual = columns_of(o_residual.output(), first);
    if (splits)
      a.o = {part_o, {p.heads * p.tokens_q * a.dim_v, p.tokens_q * a.dim_v, a.dim_v}, Element::f32};
    else
      a.o = c.o, a.o_residual = c.o_residual;
    void* arguments[] = {&a};
    const dim3 grid(static_cast<unsigned>(schedule.tiles), static_cast<unsigned>(schedule.splits));
    check(cudaLaunchKernel(kernel.function, grid, dim3(kernel.threads), arguments, kernel.shared_bytes, stream),
          "cudaLaunchKernel");
    if (splits) combine(c, stream);
  }
  o.deliver(stream);
  if (p.o_residual.present()) o_residual.deliver(stream);
  return allocator.used();
}

}  // namespace octet::cuda::sm80
