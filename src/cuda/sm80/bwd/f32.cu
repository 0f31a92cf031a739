// The f32 backward pass on the host.
#include "cuda/bwd/operands.h"
#include "cuda/host/backend.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/sm80/bwd/f32.h"
#include "cuda/sm80/bwd/f32_dmask.h"
#include "cuda/sm80/bwd/f32_kernel.h"
#include "cuda/sm80/bwd/f32_rows.h"
#include "cuda/sm80/bwd/lse.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

// An operand of the kernels, in halves and as float32.
class F32Input {
 public:
  F32Input(const View& x, int dim, WorkspaceAllocator& workspace)
      : numbers_(x, OCTET_F32, workspace),
        halves_(x, dim, NonFinite::zero, workspace),
        channels_(static_cast<int>(x.shape[3])) {}
  void preprocess(cudaStream_t stream) const { numbers_.preprocess(stream), halves_.preprocess(stream); }
  F32Operand operand() const { return {halves_.view(), output(numbers_.view()), channels_}; }

 private:
  Input numbers_;
  F16HalvesInput halves_;
  int channels_;
};

}  // namespace

Plan backward_f32(const Problem& p, void* workspace) {
  WorkspaceAllocator allocator(workspace);
  const int dim = backward_dim(p), rows = dim == 256 ? kF32Rows<256> : dim == 128 ? kF32Rows<128> : kF32Rows<64>;
  const auto queries = static_cast<std::size_t>(p.batch * p.heads * p.tokens_q);
  const F32Input q(p.q, dim, allocator), k(p.k, dim, allocator), v(p.v, dim, allocator), do_(p.do_, dim, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  float *const lse = allocator.take<float>(queries), *const delta = allocator.take<float>(queries);
  const F32Params a{.q = q.operand(),
                    .k = k.operand(),
                    .v = v.operand(),
                    .do_ = do_.operand(),
                    .lse = lse,
                    .delta = delta,
                    .dq = strided(p.dq),
                    .dk = strided(p.dk),
                    .dv = strided(p.dv),
                    .terms = terms,
                    .q_blocks = blocks_of(rows, p.tokens_q, p.cu_seqlens_q, allocator),
                    .k_blocks = blocks_of(rows, p.tokens_k, p.cu_seqlens_k, allocator),
                    .mask = mask_of(p),
                    .heads = static_cast<int>(p.heads),
                    .kv_heads = static_cast<int>(p.kv_heads),
                    .tokens_q = static_cast<int>(p.tokens_q),
                    .scale = p.scale,
                    .dropout = dropout_of(p)};
  const DmaskParams dmask = p.dmask.present() ? f32_dmask_params(p, dim, allocator) : DmaskParams{};
  const auto name = [dmask] { return "backward f32 in two f16 halves, mma.sync" + description(dmask); };
  auto run = [=, &p](cudaStream_t stream) {
    for (const F32Input* x : {&q, &k, &v, &do_}) x->preprocess(stream);
    count_blocks(a.q_blocks, a.k_blocks, stream);
    if (queries) {
      compute_delta({strided(p.do_), strided(p.o), strided(p.o_residual), strided(p.dlse), delta}, stream);
      compute_row_biases(p, terms, stream);
      if (has_row_bias(p))
        subtract_row_biases({.q = strided(p.q),
                             .k = strided(p.k),
                             .lse = strided(p.lse),
                             .round = OCTET_F32,
                             .sinks = sinks(p.sinks),
                             .q_blocks = a.q_blocks,
                             .k_blocks = a.k_blocks,
                             .mask = a.mask,
                             .group = static_cast<int>(p.group()),
                             .to = lse},
                            terms, stream);
      else
        copy_lse(strided(p.lse), lse, stream);
    }
    const int64_t key_blocks = p.dk.elements() || p.dv.elements() ? p.batch * p.kv_heads * a.k_blocks.count : 0;
    const int64_t query_blocks = p.dq.elements() ? p.batch * p.heads * a.q_blocks.count : 0;
    const auto launch = logits_of(p) == Logits::plain ? launch_f32<Logits::plain> : launch_f32<Logits::general>;
    launch(dim, a, key_blocks, query_blocks, stream);
    if (dmask.any_pair())
      sum_f32_dmask(dim, a, dmask, stream);
    else
      clear_dmask(dmask, stream);
    if (p.dsinks.elements()) sum_f32_dsinks(strided(p.lse), delta, sinks(p.sinks), strided(p.dsinks), stream);
  };
  return plan_of(p, allocator, kName, name, std::move(run), [] { return std::vector<std::string>{"f32"}; });
}

}  // namespace octet::cuda::sm80
