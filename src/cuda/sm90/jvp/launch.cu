// The jvp pass on the host: operands, tensor maps, scheduler, launch.
#include "core/error.h"
#include "core/names.h"
#include "cuda/host/backend.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/sm90/jvp/choose.h"
#include "cuda/sm90/jvp/params.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

// `rows`: of a tile.
JvpInput input(const Input& x, int rows) {
  JvpInput input{.rows = output(x.view())};
  if (x.view().elements()) input.map = tensor_map(x.view(), rows);
  set_broadcast(x.view(), input.broadcast);
  return input;
}

// A tangent, which is zeros of the shape of `like` where it is absent: the kernel has all three.
struct Tangent {
  Tangent(const View& from, const View& like, octet_dtype type, WorkspaceAllocator& allocator)
      : zeros(from.present() ? View{} : contiguous(like, type, allocator)),
        input(from.present() ? from : zeros, type, allocator) {}
  void preprocess(cudaStream_t stream) const {
    const std::size_t bytes = static_cast<std::size_t>(zeros.elements()) * bytes_of(zeros.dtype);
    if (bytes) check(cudaMemsetAsync(zeros.data, 0, bytes, stream), "cudaMemsetAsync");
    input.preprocess(stream);
  }

  View zeros;
  Input input;
};

}  // namespace

Plan jvp(const Problem& p, void* workspace) {
  const JvpChoice choice = choose_jvp(p);
  WorkspaceAllocator allocator(workspace);
  int* const blocks_before = allocate_blocks_before(p, allocator);
  unsigned* const counter = allocator.take<unsigned>(1);
  const Input q(p.q, choice.type, allocator), k(p.k, choice.type, allocator), v(p.v, choice.type, allocator);
  const Tangent tq(p.tq, p.q, choice.type, allocator), tk(p.tk, p.k, choice.type, allocator),
      tv(p.tv, p.v, choice.type, allocator);
  const Result o(p.o, allocator), to(p.to, allocator);
  const auto name = [&p, choice] {
    return text("jvp ", octet::name(p.precision), ", wgmma, ", choice.kernel.rows, " x ", choice.kernel.keys, " tiles");
  };
  auto run = [=, &p](cudaStream_t stream) {
    if (!p.o.elements()) return;
    for (const Input* x : {&q, &k, &v}) x->preprocess(stream);
    for (const Tangent* x : {&tq, &tk, &tv}) x->preprocess(stream);
    const Kernel& kernel = choice.kernel;
    JvpParams a{.q = input(q, kernel.rows),
                .k = input(k, kernel.keys),
                .v = input(v, kernel.keys),
                .tq = input(tq.input, kernel.rows),
                .tk = input(tk.input, kernel.keys),
                .tv = input(tv.input, kernel.keys),
                .scheduler = scheduler_of(p, kernel, 2 * sizeof(F16), counter, blocks_before, stream),
                .mask = mask_of(p),
                .group = static_cast<int>(p.group()),
                .dim = static_cast<int>(p.dim),
                .dim_v = static_cast<int>(p.dim_v),
                .scale = p.scale,
                .scale_log2e = static_cast<float>(p.scale * 1.4426950408889634),
                .clears = !seen_keys(p).all,
                .o = o.output(),
                .to = to.output(),
                .lse = output(p.lse),
                .tlse = output(p.tlse),
                .sinks = sinks(p.sinks),
                .tsinks = sinks(p.tsinks)};
    clear_counter(p, kernel, a.scheduler, stream);
    launch(p, kernel, a.scheduler, &a, false, stream);
    o.deliver(stream), to.deliver(stream);
  };
  return plan_of(p, allocator, kName, name, std::move(run),
                 [choice] { return one_tile(choice.kernel.rows, choice.kernel.keys); });
}

}  // namespace octet::cuda::sm90
