// The backward pass on the host: kernel choice, workspace, and the launches of preprocessing, kernel and
// postprocessing.
#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/preprocess/operands.h"
#include "cuda/scheduler/count_blocks.h"
#include "cuda/sm90/bwd/params.h"
#include "cuda/sm90/bwd/preprocess.h"
#include "cuda/sm90/kernels.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

int dim_of(const Problem& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

// True where the operands are f16: at precision f16, and at bf16 with bias correction f16.
bool f16_compute(const Problem& p) {
  return p.precision == OCTET_PRECISION_F16 || p.bias_correction == OCTET_BIAS_CORRECTION_F16;
}

// True where delta is computed from the unrounded o.
bool needs_exact_o(const Problem& p) {
  return p.bias_correction == OCTET_BIAS_CORRECTION_F16 || p.bias_correction == OCTET_BIAS_CORRECTION_EXACT_DELTA;
}

// True where k is centred by its mean.
bool smooths(const Problem& p) { return p.bias_correction == OCTET_BIAS_CORRECTION_F16; }

// True where the rows of ds have sums other than 0, which dq needs together with the mean of k.
bool sums_rows(const Problem& p) { return smooths(p) && (p.sinks.present() || p.dlse.present()); }

Sums sums_of(const Problem& p) { return p.deterministic ? Sums::integers : Sums::floats; }

Kernel kernel_of(const Problem& p) {
  return f16_compute(p) ? backward_kernel<F16>(dim_of(p), sums_of(p)) : backward_kernel<Bf16>(dim_of(p), sums_of(p));
}

// True where the kernel can convert the caller's k and v: they have one 16-bit type and need no rounding to another.
bool converts_keys(const Problem& p) {
  const octet_dtype type = p.k.dtype;
  if (p.v.dtype != type || (type != OCTET_BF16 && (type != OCTET_F16 || p.precision != OCTET_PRECISION_F16)))
    return false;
  for (const View* x : {&p.k, &p.v})
    if (!reads_directly(*x) || (x->shape[0] > 1 && !x->stride[0]) || (x->shape[1] > 1 && !x->stride[1])) return false;
  return true;
}

// Returns the size of QueryRows for tiles of `queries` queries.
std::size_t row_bytes(int queries) { return queries == 64 ? sizeof(QueryRows<64>) : sizeof(QueryRows<128>); }

int clamp_side(int64_t keys) { return static_cast<int>(std::min<int64_t>(keys, Mask::kUnbounded)); }

Blocks blocks_of(int rows, int64_t tokens, const View& cu_seqlens, WorkspaceAllocator& allocator) {
  Blocks b{.rows = rows, .tokens = static_cast<int>(tokens), .count = static_cast<int>((tokens + rows - 1) / rows)};
  if (!cu_seqlens.present()) return b;
  b.sequences = static_cast<int>(cu_seqlens.shape[3] - 1);
  b.count += b.sequences;
  b.cu_seqlens = static_cast<const int*>(cu_seqlens.data);
  b.blocks_before = allocator.take<int>(b.sequences + 1);
  return b;
}

}  // namespace

std::string backward_name(const Problem& p) {
  const Kernel kernel = kernel_of(p);
  return text("backward ", f16_compute(p) ? "in f16" : "in bf16", ", wgmma, ", kernel.rows, " x ", kernel.keys,
              " tiles", p.deterministic ? ", dq in integers" : "");
}

std::size_t backward(const Problem& p, void* workspace, cudaStream_t stream) {
  const Kernel kernel = kernel_of(p);
  const int dim = dim_of(p);
  WorkspaceAllocator allocator(workspace);
  Blocks q_blocks = blocks_of(kernel.rows, p.tokens_q, p.cu_seqlens_q, allocator);
  Blocks k_blocks = blocks_of(kernel.keys, p.tokens_k, p.cu_seqlens_k, allocator);
  const auto q_tiles = static_cast<std::size_t>(p.batch * p.heads * q_blocks.count);
  const auto k_tiles = static_cast<std::size_t>(p.batch * p.kv_heads * k_blocks.count);
  const auto kv_heads = static_cast<std::size_t>(p.batch * p.kv_heads);
  const std::size_t q_bytes = q_tiles * kernel.rows * dim * 2, k_bytes = k_tiles * kernel.keys * dim * 2;

  const bool scaled = f16_compute(p), f16 = p.precision == OCTET_PRECISION_F16;
  const octet_dtype cast = f16 ? OCTET_F16 : OCTET_BF16;
  const int p_exponent = scaled ? 15 : 0;  // p is at most 1, so 2^15 p is a number of f16
  PreprocessParams params{
      .q = strided(p.q),
      .k = strided(p.k),
      .v = strided(p.v),
      .do_ = strided(p.do_),
      .o = strided(p.o),
      .o_residual = needs_exact_o(p) ? strided(p.o_residual) : strided(View{}),
      .lse = strided(p.lse),
      .dlse = strided(p.dlse),
      .sinks = sinks(p.sinks),
      .tile_dim = dim,
      .type = scaled ? OCTET_F16 : OCTET_BF16,
      .round_do = f16 ? OCTET_F32 : OCTET_BF16,
      .round_q = cast,
      .round_k = cast,
      .round_v = cast,
      .scaled = scaled,
      .smooth = smooths(p),
      .q_blocks = q_blocks,
      .k_blocks = k_blocks,
      .mask = {p.windowed, p.bottom_right, clamp_side(p.left), clamp_side(p.right)},
      .group = static_cast<int>(p.group()),
      .p_exponent = p_exponent,
      .scale = p.scale,
      .sampled = allocator.take<Sizes>(kv_heads),
      .sizes = allocator.take<Sizes>(kv_heads),
      .exponents = allocator.take<Exponents>(kv_heads * kParts),
      .mean = allocator.take<float>(kv_heads * p.dim),
      .q_tiles = allocator.take<unsigned char>(q_bytes),
      .do_tiles = allocator.take<unsigned char>(q_bytes),
      .rows = allocator.take<unsigned char>(q_tiles * row_bytes(kernel.rows) * (scaled ? kParts : 1)),
      .row_sums = sums_rows(p) ? allocator.take<float>(q_tiles * kernel.rows) : nullptr,
      .dq = allocator.take<float>(q_tiles * kernel.rows * dim),
      .zeroed_heads = static_cast<int>(kv_heads),
      .zeroed = allocator.take<unsigned>(kv_heads),
      .counter = allocator.take<unsigned>(1)};
  // Sums in integers need the largest k and v of a head. The 2-CTA kernel has no shared memory for a second stage of k
  // and v, in which they could be converted.
  if (p.deterministic || kernel.cluster > 1 || !converts_keys(p)) {
    params.k_tiles = allocator.take<unsigned char>(k_bytes);
    params.v_tiles = allocator.take<unsigned char>(k_bytes);
  }
  const Result dk(p.dk, allocator), dv(p.dv, allocator);
  if (!workspace) return allocator.used();

  const DeviceScope device(p.device_index);
  if (!(p.dq.elements() || p.dk.elements())) {
    params.q_blocks.count = 0;
    if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
    return allocator.used();
  }
  if (p.packed()) {
    count_blocks(q_blocks.cu_seqlens, q_blocks.sequences, q_blocks.rows, const_cast<int*>(q_blocks.blocks_before),
                 stream);
    count_blocks(k_blocks.cu_seqlens, k_blocks.sequences, k_blocks.rows, const_cast<int*>(k_blocks.blocks_before),
                 stream);
  }
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, p.device_index), "cudaDeviceGetAttribute");
  const int in_flight = static_cast<int>(std::min<std::size_t>(k_tiles, processors / kernel.cluster));
  const auto grid = static_cast<unsigned>(in_flight * kernel.cluster);
  constexpr int64_t kShareOfL2 = 16 << 20;  // bytes
  const int64_t head_bytes = std::max<int64_t>(p.group() * p.tokens_q * dim * (2 + 2 + 4), 1);
  const auto all = static_cast<int>(kv_heads);
  const HeadGroups head_groups =
      p.windowed ? head_groups_of(all, k_blocks.count, kShareOfL2 / head_bytes, in_flight) : one_by_one(all);
  // Idle warps of the kernel clear the sums of a head while an earlier head is computed. The distance between the two
  // is such that all blocks of the earlier head are taken before the first of the later one, and have mostly cleared
  // their shares by then. At d = 64 this costs more than it saves, and blocks of packed sequences may not exist.
  const bool idle_warps = kernel.cluster > 1 || (!params.k_tiles && dim == 128);
  if (idle_warps && !p.packed() && k_tiles) {
    const int widest = std::max(head_groups.heads, all - head_groups.count * head_groups.heads);
    params.zeroed_heads = std::min(all, widest + (in_flight + k_blocks.count - 1) / k_blocks.count);
  }
  preprocess(params, stream);
  BackwardParams a{.q = params.q_tiles,
                   .k = params.k_tiles,
                   .v = params.v_tiles,
                   .do_ = params.do_tiles,
                   .k_rows = {},
                   .v_rows = {},
                   .rows_are_bf16 = p.k.dtype == OCTET_BF16,
                   .k_mean = params.mean,
                   .rows = params.rows,
                   .dq = params.dq,
                   .zeroed_heads = params.zeroed_heads,
                   .zeroed = params.zeroed,
                   .exponents = params.exponents,
                   .q_blocks = q_blocks,
                   .k_blocks = k_blocks,
                   .mask = params.mask,
                   .batch = static_cast<int>(p.batch),
                   .heads = static_cast<int>(p.heads),
                   .kv_heads = static_cast<int>(p.kv_heads),
                   .dim = static_cast<int>(p.dim),
                   .dim_v = static_cast<int>(p.dim_v),
                   .counter = params.counter,
                   .head_groups = head_groups,
                   .scale = p.scale,
                   .p_exponent = p_exponent,
                   .dk = dk.output(),
                   .dv = dv.output(),
                   .row_sums = params.row_sums};
  if (k_tiles) {
    if (!a.k) a.k_rows = tensor_map(p.k, kernel.keys), a.v_rows = tensor_map(p.v, kernel.keys);
    check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
          "cudaFuncSetAttribute");
    void* arguments[] = {&a};
    launch_pdl(kernel.function, grid, kernel.threads, kernel.shared_bytes, stream, arguments);
  }
  if (p.dq.elements()) postprocess_dq(a, dim, sums_of(p), strided(p.dq), stream);
  if (p.dq.elements() && k_tiles && p.windowed) recompute_masked(params, a, strided(p.dq), stream);
  if (p.dsinks.elements()) sum_dsinks(params, strided(p.dsinks), stream);
  dk.deliver(stream), dv.deliver(stream);
  return allocator.used();
}

}  // namespace octet::cuda::sm90
