// The jvp pass on the host: operands, scheduler, launch.
#include <algorithm>

#include "core/error.h"
#include "core/names.h"
#include "cuda/host/backend.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/seen.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/sm80/jvp/choose.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

// Returns groups of heads whose k, v and tangents take two thirds of L2. Only masks make blocks of different lengths.
HeadGroups head_groups(const Problem& p, const JvpChoice& choice) {
  const int64_t all = p.batch * p.heads;
  if (!p.windowed) return one_by_one(all);
  const int64_t head_bytes =
      std::max<int64_t>(2 * (choice.f32 ? sizeof(float) : sizeof(F16)) * p.tokens_k * (p.dim + p.dim_v), 1);
  const Card& gpu = card(p.device_index);
  return head_groups_of(all, query_blocks(p, choice.kernel.rows), gpu.l2_bytes * 2 / 3 / head_bytes * p.group(),
                        2 * gpu.multiprocessors);
}

// An operand as the kernel reads it: of 16 bits, or in f16 halves with the factors of its tokens. A tangent that is
// absent has no data.
class JvpInput {
 public:
  JvpInput(const View& from, const JvpChoice& choice, WorkspaceAllocator& allocator)
      : f32_(choice.f32 && from.present()),
        numbers_(choice.f32 ? View{} : from, choice.type, allocator),
        halves_(choice.f32 ? from : View{}, choice.kernel.dim, NonFinite::kept, allocator) {}
  void preprocess(cudaStream_t stream) const { numbers_.preprocess(stream), halves_.preprocess(stream); }
  Output tensor() const { return f32_ ? halves_.view().tensor : output(numbers_.view()); }
  TokenFactors factors() const { return f32_ ? halves_.view().factors : TokenFactors{}; }

 private:
  bool f32_;
  Input numbers_;
  F16HalvesInput halves_;
};

}  // namespace

Plan jvp(const Problem& p, void* workspace) {
  const JvpChoice choice = choose_jvp(p);
  WorkspaceAllocator allocator(workspace);
  int* const blocks_before = allocate_blocks_before(p, allocator);
  // Hidden keys need no copies: their logits are -inf, whatever their products are, and p and h 0.
  const SeenKeySide seen(p, ReadsK::as_it_is, allocator);
  const JvpInput q(p.q, choice, allocator), k(p.k, choice, allocator), v(seen.v(), choice, allocator);
  const JvpInput tq(p.tq, choice, allocator), tk(p.tk, choice, allocator), tv(seen.tv(), choice, allocator);
  const Result o(p.o, allocator), to(p.to, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  const auto name = [&p, choice] {
    return text("jvp ", octet::name(p.precision), ", mma.sync, ", choice.kernel.rows, " x ", choice.kernel.keys,
                " tiles");
  };
  auto run = [=, &p](cudaStream_t stream) {
    if (!p.o.elements()) return;
    seen.preprocess(stream);
    for (const JvpInput* x : {&q, &k, &v, &tq, &tk, &tv}) x->preprocess(stream);
    compute_row_biases(p, terms, stream);
    const JvpKernel& kernel = choice.kernel;
    JvpParams a{.q = q.tensor(),
                .k = k.tensor(),
                .v = v.tensor(),
                .tq = tq.tensor(),
                .tk = tk.tensor(),
                .tv = tv.tensor(),
                .scheduler = tile_scheduler(p, kernel.rows, head_groups(p, choice), blocks_before, stream),
                .mask = mask_of(p),
                .group = static_cast<int>(p.group()),
                .dim = static_cast<int>(p.dim),
                .dim_v = static_cast<int>(p.dim_v),
                .scale = p.scale,
                .terms = terms,
                .o = o.output(),
                .to = to.output(),
                .lse = output(p.lse),
                .tlse = output(p.tlse),
                .sinks = sinks(p.sinks),
                .tsinks = sinks(p.tsinks),
                .dropout = dropout_of(p),
                .q_factors = q.factors(),
                .k_factors = k.factors(),
                .v_factors = v.factors(),
                .tq_factors = tq.factors(),
                .tk_factors = tk.factors(),
                .tv_factors = tv.factors()};
    const int64_t columns = (p.dim_v + kernel.dim_v - 1) / kernel.dim_v;
    allow_shared_bytes(kernel.function, kernel.shared_bytes);
    const dim3 grid(static_cast<unsigned>(query_tiles(p, kernel.rows)), static_cast<unsigned>(columns));
    void* arguments[] = {&a};
    check(cudaLaunchKernel(kernel.function, grid, dim3(kernel.threads), arguments, kernel.shared_bytes, stream),
          "cudaLaunchKernel");
    o.deliver(stream), to.deliver(stream);
  };
  return plan_of(p, allocator, kName, name, std::move(run),
                 [choice] { return one_tile(choice.kernel.rows, choice.kernel.keys); });
}

}  // namespace octet::cuda::sm80
