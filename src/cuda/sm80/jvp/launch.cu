// The jvp pass on the host: operands, scheduler, launch.
#include <algorithm>

#include "core/error.h"
#include "core/names.h"
#include "cuda/host/backend.h"
#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/sm80/jvp/choose.h"
#include "cuda/sm80/jvp/config.h"
#include "cuda/sm80/jvp/f32.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

// Returns groups of heads whose k, v and tangents take two thirds of L2. Only masks make blocks of different lengths.
HeadGroups head_groups(const Problem& p) {
  const int64_t all = p.batch * p.heads;
  if (!p.windowed) return one_by_one(all);
  const int64_t head_bytes = std::max<int64_t>(2 * sizeof(F16) * p.tokens_k * (p.dim + p.dim_v), 1);
  const Card& gpu = card(p.device_index);
  return head_groups_of(all, query_blocks(p, kJvpRows), gpu.l2_bytes * 2 / 3 / head_bytes * p.group(),
                        2 * gpu.multiprocessors);
}

}  // namespace

Plan jvp(const Problem& p, void* workspace) {
  const JvpChoice choice = choose_jvp(p);
  if (choice.f32) return jvp_f32(p, workspace);
  const octet_dtype type = choice.type;
  WorkspaceAllocator allocator(workspace);
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const Input q(p.q, type, allocator), k(p.k, type, allocator), v(p.v, type, allocator);
  const Input tq(p.tq, type, allocator), tk(p.tk, type, allocator), tv(p.tv, type, allocator);
  const Result o(p.o, allocator), to(p.to, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  const auto name = [&p, choice] {
    return text("jvp ", octet::name(p.precision), ", mma.sync, ", kJvpRows, " x ", choice.kernel.keys, " tiles");
  };
  auto run = [=, &p](cudaStream_t stream) {
    if (!p.o.elements()) return;
    for (const Input* x : {&q, &k, &v, &tq, &tk, &tv}) x->preprocess(stream);
    compute_row_biases(p, terms, stream);
    const JvpKernel& kernel = choice.kernel;
    JvpParams a{.q = output(q.view()),
                .k = output(k.view()),
                .v = output(v.view()),
                .tq = output(tq.view()),
                .tk = output(tk.view()),
                .tv = output(tv.view()),
                .scheduler = tile_scheduler(p, kJvpRows, head_groups(p), blocks_before, stream),
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
                .dropout = dropout_of(p)};
    const int64_t columns = (p.dim_v + kernel.dim_v - 1) / kernel.dim_v;
    allow_shared_bytes(kernel.function, kernel.shared_bytes);
    const dim3 grid(static_cast<unsigned>(query_tiles(p, kJvpRows)), static_cast<unsigned>(columns));
    void* arguments[] = {&a};
    check(cudaLaunchKernel(kernel.function, grid, dim3(kJvpThreads), arguments, kernel.shared_bytes, stream),
          "cudaLaunchKernel");
    o.deliver(stream), to.deliver(stream);
  };
  return plan_of(p, allocator, name, std::move(run));
}

}  // namespace octet::cuda::sm80
