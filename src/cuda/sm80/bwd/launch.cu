// The backward pass on the host: kernel choice and the launches of preprocessing, kernel and
// postprocessing.
#include "core/error.h"
#include "cuda/bwd/operands.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/seen.h"
#include "cuda/sm80/bwd/f32.h"
#include "cuda/sm80/bwd/kernels.h"
#include "cuda/sm80/bwd/lse.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

template <BackwardKind kind>
BackwardKernel kernel_of(const Problem& p) {
  const int dim = backward_dim(p);
  return f16_compute(p) ? backward_kernel<F16, kind>(dim) : backward_kernel<Bf16, kind>(dim);
}
bool projects(const Problem& p) { return p.bias_correction == OCTET_BIAS_CORRECTION_GPROJ; }

BackwardKernel kernel_of(const Problem& p, const LogitTerms& terms) {
  if (projects(p)) return kernel_of<BackwardKind::projected>(p);
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, p.device_index);
  if (!p.plain_logits()) {
    const BackwardKernel masked = kernel_of<BackwardKind::masked>(p);
    const bool fits = terms.mask.chunks && !p.softcap && !terms.slopes && backward_dim(p) <= 128 &&
                      masked.bytes_with_mask(terms) <= bytes;
    return fits ? masked : kernel_of<BackwardKind::general>(p);
  }
  if (backward_dim(p) == 128)
    for (const BackwardKernel& kernel : {kernel_of<BackwardKind::large>(p), kernel_of<BackwardKind::masked>(p)})
      if (kernel.shared_bytes <= bytes) return kernel;
  return kernel_of<BackwardKind::small>(p);
}

}  // namespace

std::string backward_name(const Problem& p) {
  if (p.precision == OCTET_PRECISION_F32) return "backward f32 in two f16 parts, mma.sync";
  WorkspaceAllocator none(nullptr);
  const BackwardKernel kernel = kernel_of(p, logit_terms(p, none));
  return text("backward ", f16_compute(p) ? "in f16" : "in bf16", ", mma.sync, ", kernel.queries, " x ", kernel.keys,
              " tiles", projects(p) ? ", after a sweep that sums rows" : "", p.deterministic ? ", dq in integers" : "");
}

std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream) {
  if (p.precision == OCTET_PRECISION_F32) return backward_f32(p, workspace, stream);
  WorkspaceAllocator allocator(workspace);
  PreprocessParams params = preprocess_params(p, true, true, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  const BackwardKernel kernel = kernel_of(p, terms);
  const bool has_classes = kernel.has_classes && terms.mask.data;
  const MaskClasses classes =
      has_classes ? mask_classes(p, terms, kernel.queries, kernel.keys, allocator) : MaskClasses{};
  const SeenOperands seen(p, allocator);
  params.q = seen.q, params.k = seen.k, params.v = seen.v, params.do_ = seen.do_;
  const Strided saved_lse = params.lse;
  LseParams rows{.terms = terms, .q = params.q, .k = params.k, .lse = params.lse};
  if (has_gauge(p)) {
    rows.round = params.round_q, rows.sinks = params.sinks, rows.mask = params.mask, rows.group = params.group;
    rows.q_blocks = params.q_blocks, rows.k_blocks = params.k_blocks;
    rows.to = allocator.take<float>(static_cast<std::size_t>(p.batch * p.heads * p.tokens_q));
    params.lse = {rows.to, {p.batch, p.heads, p.tokens_q, 1}, {p.heads * p.tokens_q, p.tokens_q, 1, 1}, Element::f32};
  }
  Projection projection{};
  if (projects(p)) {
    const int64_t rows_of_tiles = p.batch * p.heads * params.q_blocks.count * params.q_blocks.rows;
    projection = {allocator.take<float>(static_cast<std::size_t>(rows_of_tiles)), params.sinks, saved_lse, params.dlse};
  }
  const Result dk(p.dk, allocator), dv(p.dv, allocator);
  if (!workspace) return allocator.used();

  const DeviceScope device(p.device_index);
  if (!(p.dq.elements() || p.dk.elements())) {
    params.q_blocks.count = 0;
    params.lse = saved_lse;
    if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
    return allocator.used();
  }
  count_blocks(params.q_blocks, params.k_blocks, stream);
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount, p.device_index);
  const KernelParams arguments{backward_params(p, params, processors, dk.output(), dv.output()), p.deterministic, terms,
                               projection, classes};
  const int64_t blocks = p.batch * p.kv_heads * params.k_blocks.count * kernel.key_parts,
                sweep_blocks = p.batch * p.kv_heads * params.q_blocks.count * kernel.query_parts;
  const bool sweeps = projects(p) && blocks && sweep_blocks;
  seen.preprocess(stream);
  compute_gauges(p, terms, stream);
  if (has_classes) classify(p, terms, classes, stream);
  if (rows.to) remove_gauges(rows, stream);
  preprocess(params, stream);
  if (sweeps)
    launch_general_pdl(kernel.sweep, static_cast<unsigned>(sweep_blocks), kernel.threads, kernel.bytes_with_mask(terms),
                       stream, arguments);
  if (blocks)
    launch_general_pdl(kernel.function, static_cast<unsigned>(blocks), kernel.threads, kernel.bytes_with_mask(terms),
                       stream, arguments);
  if (sweeps) add_lambda_to_delta(arguments.a, projection.lambda, stream);
  if (p.dq.elements()) postprocess_dq(arguments.a, params.tile_dim, sums_of(p), strided(p.dq), stream);
  if (p.dq.elements() && blocks && (p.windowed || p.mask.present())) {
    if (p.plain_logits())
      cuda::recompute_masked(params, arguments.a, strided(p.dq), stream);
    else
      recompute_masked(params, arguments.a, terms, strided(p.dq), stream);
  }
  params.lse = saved_lse;
  if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
  dk.deliver(stream), dv.deliver(stream);
  return allocator.used();
}

}  // namespace octet::cuda::sm80
