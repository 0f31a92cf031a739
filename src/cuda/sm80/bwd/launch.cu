// The backward pass on the host: the launches of preprocessing, kernel and postprocessing.
#include <optional>

#include "core/error.h"
#include "cuda/bwd/operands.h"
#include "cuda/host/backend.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/seen.h"
#include "cuda/sm80/bwd/block_tiles.h"
#include "cuda/sm80/bwd/choose.h"
#include "cuda/sm80/bwd/f32.h"
#include "cuda/sm80/bwd/lse.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {

namespace {

TrainingOperands::From training_from(const SeenOperands& seen) {
  return {.q = seen.q, .k = seen.k, .v = seen.v, .do_ = seen.do_, .seen = seen.seen()};
}

// Sets what preprocessing and the kernel know of operands in int8.
void set_int8(const Problem& p, const TrainingOperands& operands, PreprocessParams& params, Int8Operands::Terms& terms,
              WorkspaceAllocator& allocator) {
  Int8Inputs& inputs = params.int8;
  inputs.do_ = operands.do_().data, inputs.dim = operands.dim(), inputs.keys = operands.keys();
  inputs.q_scale = operands.q().scale, inputs.do_scale = operands.do_().scale, inputs.k_scale = operands.k().scale;
  inputs.v_mean = operands.v_mean();
  const auto pairs = static_cast<std::size_t>(p.batch * p.kv_heads * operands.keys() / 2);
  terms = {.q = operands.q().data,
           .k = operands.k().data,
           .v = operands.v().data,
           .do_ = operands.do_().data,
           .k_factors = allocator.take<KeyPairFactors>(pairs),
           .v_factors = allocator.take<KeyPairFactors>(pairs),
           .scales = inputs.scales,
           .means = operands.block_means(),
           .keys = operands.keys()};
}

void quantize(const Problem& p, const TrainingOperands& operands, const Int8Operands::Terms& terms,
              cudaStream_t stream) {
  operands.quantize(stream);
  const int64_t keys = p.batch * p.kv_heads * operands.keys();
  const auto compute = [&](const Int8Rows& rows, const KeyPairFactors* to) {
    compute_key_factors({rows.scale, NonFiniteKeys::zero}, keys, const_cast<KeyPairFactors*>(to), stream);
  };
  compute(operands.k(), terms.k_factors), compute(operands.v(), terms.v_factors);
}

// dq gets the mean of k that those operands lack.
void set_mean(KernelParams& arguments, int dim, bool packed) {
  BackwardParams& a = arguments.a;
  a.k_mean = arguments.blocks.k_mean, a.mean_dim = dim, a.sequence_means = packed;
}

// Sums dmask by its own kernel.
void sum_dmask(const Problem& p, const DmaskKernel& kernel, const DmaskParams& dmask, const KernelParams& arguments,
               cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(dmask.tiles() * dmask.splits);
  launch_general_pdl(kernel.function, blocks, kernel.threads, kernel.bytes_with(dmask.mask), stream, arguments, dmask);
  sum_splits(dmask, stream);
}

}  // namespace

Plan backward(const Problem& p, void* workspace) {
  const BackwardKernels choice = choose_kernels(p);
  if (choice.f32) return backward_f32(p, workspace);
  const BackwardKernel& kernel = choice.kernel;
  WorkspaceAllocator allocator(workspace);
  PreprocessParams params = preprocess_params(p, choice, true, true, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  const MaskClasses classes =
      choice.has_classes ? mask_classes(p, terms, kernel.queries, kernel.keys, allocator) : MaskClasses{};
  const SeenOperands seen(p, allocator);
  params.q = seen.q, params.k = seen.k, params.v = seen.v, params.do_ = seen.do_;
  const Strided saved_lse = params.lse;
  LseParams rows{.q = params.q, .k = params.k, .lse = params.lse};
  if (has_row_bias(p)) {
    rows.round = params.round_q, rows.sinks = params.sinks, rows.mask = params.mask, rows.group = params.group;
    rows.q_blocks = params.q_blocks, rows.k_blocks = params.k_blocks;
    rows.to = allocator.take<float>(static_cast<std::size_t>(p.batch * p.heads * p.tokens_q));
    params.lse = {rows.to, {p.batch, p.heads, p.tokens_q, 1}, {p.heads * p.tokens_q, p.tokens_q, 1, 1}, Element::f32};
  }
  std::optional<TrainingOperands> int8;
  Int8Operands::Terms int8_terms{};
  if (choice.int8)
    int8.emplace(p, training_from(seen), choice.dim, allocator), set_int8(p, *int8, params, int8_terms, allocator);
  std::optional<BlockInputs> block_inputs;
  if (choice.blocks) block_inputs.emplace(p, choice, params, allocator);
  const DmaskParams dmask =
      p.dmask.present() ? dmask_params(p, choice.dmask.queries, choice.dmask.keys, allocator) : DmaskParams{};
  const Result dk(p.dk, allocator), dv(p.dv, allocator);
  const auto name = [choice, dmask] {
    return text("backward ",
                choice.int8     ? "with s and dp in int8"
                : choice.blocks ? "with all but dp in int8"
                : choice.f16    ? "in f16"
                                : "in bf16",
                ", mma.sync, ", choice.kernel.queries, " x ", choice.kernel.keys, " tiles",
                choice.sums == Sums::integers ? ", dq in integers" : "", description(dmask));
  };
  auto run = [=, &p](cudaStream_t stream) mutable {
    const BackwardKernel& kernel = choice.kernel;
    if (!dmask.any_pair()) clear_dmask(dmask, stream);
    if (!(p.dq.elements() || p.dk.elements())) {
      params.q_blocks.count = 0;
      params.lse = saved_lse;
      if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
      return;
    }
    count_blocks(params.q_blocks, params.k_blocks, stream);
    const int processors = card(p.device_index).multiprocessors;
    KernelParams arguments{
        backward_params(p, params, processors, dk.output(), dv.output()), p.deterministic, terms, classes, int8_terms,
        block_inputs ? block_inputs->terms() : BlockOperands::Terms{},    dropout_of(p)};
    arguments.terms.mask_chunks &= choice.stages_mask;
    if (block_inputs) set_mean(arguments, choice.dim, p.packed());
    const int64_t blocks = p.batch * p.kv_heads * params.k_blocks.count * kernel.tiles_of_key_block;
    seen.preprocess(stream);
    compute_row_biases(p, terms, stream);
    if (choice.has_classes) classify(p, terms, classes, stream);
    if (rows.to) subtract_row_biases(rows, terms, stream);
    if (int8) quantize(p, *int8, int8_terms, stream);
    if (block_inputs) block_inputs->quantize(stream);
    preprocess(params, stream);
    if (block_inputs) block_inputs->write_tiles(params, saved_lse, stream);
    if (blocks)
      launch_general_pdl(kernel.function, static_cast<unsigned>(blocks), kernel.threads, kernel.shared_bytes, stream,
                         arguments);
    if (p.dq.elements()) postprocess_dq(arguments.a, params.tile_dim, choice.sums, strided(p.dq), stream);
    if (p.dq.elements() && blocks && !int8 && !block_inputs && (p.windowed || p.mask.present() || p.dropout)) {
      if (logits_of(p) == Logits::plain)
        cuda::recompute_masked(params, arguments.a, strided(p.dq), stream);
      else
        recompute_masked(params, arguments.a, terms, dropout_of(p), strided(p.dq), stream);
    }
    if (dmask.any_pair()) {
      arguments.terms = terms;
      sum_dmask(p, choice.dmask, dmask, arguments, stream);
    }
    params.lse = saved_lse;
    if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
    dk.deliver(stream), dv.deliver(stream);
  };
  return plan_of(p, allocator, kName, name, std::move(run), [&p] { return backward_tiles(p); });
}

}  // namespace octet::cuda::sm80
