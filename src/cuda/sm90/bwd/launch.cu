// The backward pass on the host: kernel choice and the launches of preprocessing, kernel and postprocessing.
#include <algorithm>

#include "cuda/bwd/operands.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/vec8.h"
#include "cuda/sm90/bwd/query_rows.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

Kernel kernel_of(const Problem& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  const auto kernel = f16_compute(p) ? backward_kernel<F16, Parts::first> : backward_kernel<Bf16, Parts::first>;
  return kernel(dim, sums_of(p));
}

// True where TMA can read a tensor by the indices of its heads and batch elements.
bool reads_by_index(const View& x) {
  return reads_directly(x) && (x.shape[0] <= 1 || x.stride[0]) && (x.shape[1] <= 1 || x.stride[1]);
}

// True where the kernel can convert the caller's k and v: they have one 16-bit type and need no rounding to another.
bool converts_keys(const Problem& p) {
  const octet_dtype type = p.k.dtype;
  return p.v.dtype == type && (type == OCTET_BF16 || (type == OCTET_F16 && p.precision == OCTET_PRECISION_F16)) &&
         p.k.elements() && p.v.elements() && reads_by_index(p.k) && reads_by_index(p.v);
}

// True where the kernel can take the caller's q and do as its operands: bf16 without a scale. What rows hold that are
// no queries, or that see no key, must not matter: TMA fills those beyond a tensor with zeros, but reads those beyond a
// packed sequence.
bool reads_queries(const Problem& p) {
  const int64_t n = p.tokens_q, m = p.tokens_k;
  if (f16_compute(p) || p.packed() || !p.q.elements() || !p.do_.elements()) return false;
  // The units of sums in integers weigh a gradient of lse by a sample of v, which is not taken here.
  if (p.deterministic && p.dlse.present()) return false;
  // Both ends of the range of keys grow with the query.
  for (const int64_t query : {int64_t{0}, n - 1})
    if (const auto keys = p.keys_of(query, n, m); keys.first == keys.last) return false;
  for (const View* x : {&p.q, &p.do_, &p.o})
    if (x->dtype != OCTET_BF16 || !reads_by_index(*x)) return false;
  return !p.o_residual.present() || (p.o_residual.dtype == OCTET_I8 && in_words(strided(p.o_residual), 1));
}

// True where TMA can write dk and dv of whole warpgroups: both are numbers of one 16-bit type that fragments become.
bool sends_keys(const Problem& p, const View& dk, const View& dv) {
  return dk.dtype == dv.dtype && (dk.dtype == OCTET_BF16 || (dk.dtype == OCTET_F16 && f16_compute(p))) &&
         reads_by_index(dk) && reads_by_index(dv);
}

void launch(const Kernel& kernel, unsigned grid, BackwardRowsParams& a, cudaStream_t stream) {
  void* arguments[] = {&a};
  launch_pdl(kernel.function, grid, kernel.threads, kernel.shared_bytes, stream, arguments);
}

}  // namespace

std::string backward_name(const Problem& p) {
  const Kernel kernel = kernel_of(p);
  return text("backward ", f16_compute(p) ? "in f16" : "in bf16", ", wgmma, ", kernel.rows, " x ", kernel.keys,
              " tiles", p.deterministic ? ", dq in integers" : "");
}

std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream) {
  const Kernel kernel = kernel_of(p);
  WorkspaceAllocator allocator(workspace);
  // The 2-CTA kernel has no shared memory for a second stage of k and v, in which they could be converted.
  const bool key_tiles = kernel.cluster > 1 || !converts_keys(p);
  const bool query_tiles = key_tiles || !may_read_rows(kernel.dim) || !reads_queries(p);
  PreprocessParams params = preprocess_params(p, query_tiles, key_tiles, allocator);
  params.block_channels = kernel.dim / 2;
  const Result dk(p.dk, allocator), dv(p.dv, allocator);
  if (!workspace) return allocator.used();

  const DeviceScope device(p.device_index);
  if (!(p.dq.elements() || p.dk.elements())) {
    params.q_blocks.count = 0;
    if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
    return allocator.used();
  }
  count_blocks(params.q_blocks, params.k_blocks, stream);
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount, p.device_index);
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
  query_tiles ? preprocess(params, stream) : preprocess_rows(params, stream);
  if (all && k_blocks) {
    if (!a.q) a.q_rows = tensor_map(p.q, kernel.rows), a.do_rows = tensor_map(p.do_, kernel.rows);
    if (!a.k) a.k_rows = tensor_map(p.k, kernel.keys), a.v_rows = tensor_map(p.v, kernel.keys);
    a.sends_keys = kernel.cluster == 1 && sends_keys(p, dk.view(), dv.view());
    if (a.sends_keys) a.dk_rows = tensor_map(dk.view(), kSentRows), a.dv_rows = tensor_map(dv.view(), kSentRows);
    const auto grid = static_cast<unsigned>(in_flight * kernel.cluster);
    launch(kernel, grid, a, stream);
    if (params.scaled) {
      BackwardRowsParams further = a;
      further.zeroed_heads = static_cast<int>(all), further.head_groups = one_by_one(all);
      further.counter = params.counters + 1;
      launch(backward_kernel<F16, Parts::further>(kernel.dim, sums_of(p)), grid, further, stream);
    }
  }
  if (p.dq.elements()) postprocess_dq(a, params.tile_dim, sums_of(p), strided(p.dq), stream);
  if (p.dq.elements() && all && k_blocks && p.windowed) recompute_masked(params, a, strided(p.dq), stream);
  if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
  dk.deliver(stream), dv.deliver(stream);
  return allocator.used();
}

}  // namespace octet::cuda::sm90
