// The backward pass on the host: the launches of preprocessing, kernel and postprocessing.
#include <algorithm>

#include "cuda/bwd/alibi.h"
#include "cuda/bwd/masked.h"
#include "cuda/bwd/operands.h"
#include "cuda/host/backend.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/mask_rows.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/seen.h"
#include "cuda/operands/slopes.h"
#include "cuda/sm90/bwd/choose.h"
#include "cuda/sm90/bwd/config.h"
#include "cuda/sm90/bwd/query_rows.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

// True where TMA can write dk and dv of whole warpgroups: both are numbers of one 16-bit type that fragments become.
bool sends_keys(bool f16, const View& dk, const View& dv) {
  return dk.dtype == dv.dtype && (dk.dtype == OCTET_BF16 || (dk.dtype == OCTET_F16 && f16)) && reads_by_index(dk) &&
         reads_by_index(dv);
}

void launch(const Kernel& kernel, unsigned grid, BackwardRowsParams& a, cudaStream_t stream) {
  void* arguments[] = {&a};
  launch_pdl(kernel.function, grid, kernel.threads, kernel.shared_bytes, stream, arguments);
}

}  // namespace

Plan backward(const Problem& p, void* workspace) {
  const BackwardKernels choice = choose_kernels(p);
  WorkspaceAllocator allocator(workspace);
  PreprocessParams params = preprocess_params(p, choice, choice.query_tiles, choice.key_tiles, allocator);
  params.block_channels = choice.kernel.dim / 2, params.block_channels_v = choice.kernel.dim_v / 2;
  const Strided saved_lse = params.lse;
  const AlibiSlopes slopes = alibi_slopes(p);
  LseParams rows{.q = params.q, .k = params.k, .lse = params.lse, .round = params.round_q};
  const MaskSummary mask(p, MaskSummary::Seen::keys_and_queries, allocator);
  const MaskTiles mask_tiles(p, p.mask.dtype == OCTET_F16 ? OCTET_F16 : OCTET_BF16, kMaskQueries, allocator);
  params.seen_keys = mask.seen_keys(), params.seen_queries = mask.seen_queries(), params.mask_rows = mask.rows();
  if (has_row_bias(p)) {
    rows.sinks = params.sinks, rows.mask = params.mask, rows.group = params.group;
    rows.q_blocks = params.q_blocks, rows.k_blocks = params.k_blocks;
    rows.to = allocator.take<float>(static_cast<std::size_t>(p.batch * p.heads * p.tokens_q));
    params.lse = {rows.to, {p.batch, p.heads, p.tokens_q, 1}, {p.heads * p.tokens_q, p.tokens_q, 1, 1}, Element::f32};
  }
  const Result dk(p.dk, allocator), dv(p.dv, allocator);
  const auto name = [choice, slopes, drops = p.dropout != 0, masked = p.mask.present()] {
    return text("backward ", choice.f16 ? "in f16" : "in bf16",
                slopes.data ? " with ALiBi"
                : drops     ? " with dropout"
                : masked    ? " with a mask tensor"
                            : "",
                ", wgmma, ", choice.kernel.rows, " x ", choice.kernel.keys, " tiles",
                choice.sums == Sums::integers ? ", dq in integers" : "");
  };
  auto run = [=, &p](cudaStream_t stream) mutable {
    const Kernel& kernel = choice.kernel;
    if (!(p.dq.elements() || p.dk.elements())) {
      params.q_blocks.count = 0, params.lse = saved_lse;
      if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
      return;
    }
    count_blocks(params.q_blocks, params.k_blocks, stream);
    const int processors = card(p.device_index).multiprocessors;
    const int64_t k_blocks = p.tokens_k ? params.k_blocks.count : 0, all = p.batch * p.kv_heads;
    const int in_flight = static_cast<int>(std::min<int64_t>(all * k_blocks, processors / kernel.cluster));
    BackwardRowsParams a{backward_params(p, params, in_flight, dk.output(), dv.output())};
    // Idle warps of the kernel clear the sums of a head while an earlier head is computed. The distance between the two
    // is such that all blocks of the earlier head are taken before the first of the later one, and have mostly cleared
    // their shares by then. Blocks of packed sequences may not exist, and the warps end at once where k comes as tiles.
    const bool idle_warps = kernel.cluster > 1 || !params.k_tiles;
    if (idle_warps && !p.packed() && all && k_blocks) {
      const int64_t widest = std::max<int64_t>(a.head_groups.heads, all - a.head_groups.count * a.head_groups.heads);
      params.zeroed_heads = static_cast<int>(std::min(all, widest + (in_flight + k_blocks - 1) / k_blocks));
      a.zeroed_heads = params.zeroed_heads;
    }
    a.slopes = slopes, a.dropout = dropout_of(p);
    if (slopes.data) subtract_row_biases(rows, slopes, p.scale, stream);
    if (p.mask.present()) {
      mask.preprocess(stream), mask_tiles.preprocess(stream);
      if (has_row_bias(p)) subtract_row_biases(rows, mask.rows(), p.scale, stream);
      if (mask.rows().mask.bytes) a.mask_tiles = tensor_map(mask_tiles.view(), kMaskQueries);
      mask_tiles.set_broadcast(a.mask_broadcast);
      a.seen_keys = mask.seen_keys();
    }
    choice.query_tiles ? preprocess(params, stream) : preprocess_rows(params, choice.sums, stream);
    if (all && k_blocks) {
      if (!a.q) a.q_rows = tensor_map(p.q, kernel.rows), a.do_rows = tensor_map(p.do_, kernel.rows);
      const int keys = kernel.keys / kernel.cluster;
      if (!a.k) a.k_rows = tensor_map(p.k, keys), a.v_rows = tensor_map(p.v, keys);
      a.sends_keys = kernel.cluster == 1 && sends_keys(choice.f16, dk.view(), dv.view());
      if (a.sends_keys) a.dk_rows = tensor_map(dk.view(), kSentRows), a.dv_rows = tensor_map(dv.view(), kSentRows);
      const auto grid = static_cast<unsigned>(in_flight * kernel.cluster);
      launch(kernel, grid, a, stream);
      if (params.scaled) {
        BackwardRowsParams further = a;
        further.zeroed_heads = static_cast<int>(all), further.head_groups = one_by_one(all);
        further.counter = params.counters + 1;
        launch(choice.further, grid, further, stream);
      }
    }
    if (p.dq.elements()) postprocess_dq(a, params.tile_dim, choice.sums, strided(p.dq), stream);
    if (p.dq.elements() && all && k_blocks && (p.windowed || p.dropout || p.mask.present())) {
      if (p.dropout)
        recompute_masked(params, a, a.dropout, strided(p.dq), stream);
      else if (p.mask.present())
        recompute_masked(params, a, mask.rows(), strided(p.dq), stream);
      else
        slopes.data ? recompute_masked(params, a, slopes, strided(p.dq), stream)
                    : recompute_masked(params, a, strided(p.dq), stream);
    }
    PreprocessParams of_sinks = params;
    of_sinks.lse = saved_lse;
    if (p.dsinks.elements()) sum_dsinks(of_sinks, strided(p.dsinks), stream);
    dk.deliver(stream), dv.deliver(stream);
  };
  return plan_of(p, allocator, kName, name, std::move(run),
                 [choice] { return one_tile(choice.kernel.rows, choice.kernel.keys); });
}

}  // namespace octet::cuda::sm90
