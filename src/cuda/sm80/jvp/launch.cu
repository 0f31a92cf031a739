// The jvp pass on the host: kernel choice, operands, scheduler, launch.
#include <algorithm>

#include "core/error.h"
#include "core/names.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/scheduler/query_tiles.h"
#include "cuda/sm80/jvp/config.h"
#include "cuda/sm80/jvp/f32.h"
#include "cuda/sm80/jvp/params.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

template <class T>
JvpKernel kernel_of(const Problem& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  return p.plain_logits() ? jvp_kernel<T, false>(dim) : jvp_kernel<T, true>(dim);
}
JvpKernel kernel_of(const Problem& p) {
  return p.precision == OCTET_PRECISION_BF16 ? kernel_of<Bf16>(p) : kernel_of<F16>(p);
}

// Returns groups of heads whose k, v and tangents take two thirds of L2. Only masks make blocks of different lengths.
HeadGroups head_groups(const Problem& p) {
  const int64_t all = p.batch * p.heads;
  if (!p.windowed) return one_by_one(all);
  const int64_t head_bytes = std::max<int64_t>(2 * sizeof(F16) * p.tokens_k * (p.dim + p.dim_v), 1);
  const int64_t l2_bytes = device_attribute(cudaDevAttrL2CacheSize, p.device_index);
  return head_groups_of(all, query_blocks(p, kJvpRows), l2_bytes * 2 / 3 / head_bytes * p.group(),
                        2 * device_attribute(cudaDevAttrMultiProcessorCount, p.device_index));
}

}  // namespace

std::string jvp_name(const Problem& p) {
  if (p.precision == OCTET_PRECISION_F32) return "jvp f32, on CUDA cores";
  return text("jvp ", name(p.precision), ", mma.sync, ", kJvpRows, " x ", kernel_of(p).keys, " tiles");
}

std::size_t jvp(const Problem& p, void* workspace, cudaStream_t stream) {
  if (p.precision == OCTET_PRECISION_F32) return jvp_f32(p, workspace, stream);
  const octet_dtype type = p.precision == OCTET_PRECISION_BF16 ? OCTET_BF16 : OCTET_F16;
  WorkspaceAllocator allocator(workspace);
  allocator.take(1);  // the workspace of a run is not null
  int* const blocks_before = allocate_blocks_before(p, allocator);
  const Input q(p.q, type, allocator), k(p.k, type, allocator), v(p.v, type, allocator);
  const Input tq(p.tq, type, allocator), tk(p.tk, type, allocator), tv(p.tv, type, allocator);
  const Result o(p.o, allocator), to(p.to, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  if (!workspace || !p.o.elements()) return allocator.used();

  const DeviceScope device(p.device_index);
  for (const Input* x : {&q, &k, &v, &tq, &tk, &tv}) x->preprocess(stream);
  compute_gauges(p, terms, stream);
  const JvpKernel kernel = kernel_of(p);
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
              .tsinks = sinks(p.tsinks)};
  const int64_t columns = (p.dim_v + kernel.dim_v - 1) / kernel.dim_v;
  allow_shared_bytes(kernel.function, kernel.shared_bytes);
  const dim3 grid(static_cast<unsigned>(query_tiles(p, kJvpRows)), static_cast<unsigned>(columns));
  void* arguments[] = {&a};
  check(cudaLaunchKernel(kernel.function, grid, dim3(kJvpThreads), arguments, kernel.shared_bytes, stream),
        "cudaLaunchKernel");
  o.deliver(stream), to.deliver(stream);
  return allocator.used();
}

}  // namespace octet::cuda::sm80
