// The forward pass on the host: kernel choice, operands, scheduler, launch.
#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/fragment/precision.h"
#include "cuda/host/status.h"
#include "cuda/preprocess/masks.h"
#include "cuda/preprocess/operands.h"
#include "cuda/scheduler/count_blocks.h"
#include "cuda/sm80/fwd/kernels.h"
#include "cuda/sm80/fwd/params.h"
#include "cuda/sm80/fwd/parts.h"
#include "cuda/sm80/passes.h"
#include "cuda/sm80/seen_values.h"

namespace octet::cuda::sm80 {
namespace {

// True where P and V are f16 although the operands are bf16, as bias correction f16 does where the unrounded o is kept.
bool f16_compute(const Problem& p) {
  return p.precision == OCTET_PRECISION_BF16 && p.bias_correction == OCTET_BIAS_CORRECTION_F16 && keeps_exact_o(p);
}

bool shifts_maximum(const Problem& p) { return p.bias_correction == OCTET_BIAS_CORRECTION_BETA; }

bool general(const Problem& p) { return !p.plain_logits() || shifts_maximum(p); }

template <class Precision>
ForwardKernel kernel_of(const Problem& p) {
  const int64_t most = std::max(p.dim, p.dim_v);
  return general(p) ? forward_kernel_of<Precision, true>(most) : forward_kernel_of<Precision, false>(most);
}

ForwardKernel kernel_of(const Problem& p) {
  if (p.precision == OCTET_PRECISION_F32) return kernel_of<PrecisionF32>(p);
  if (f16_compute(p)) return kernel_of<PrecisionBf16F16Compute>(p);
  return p.precision == OCTET_PRECISION_BF16 ? kernel_of<PrecisionBf16>(p) : kernel_of<PrecisionF16>(p);
}

int attribute(cudaDeviceAttr which, const Problem& p) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, p.device_index), "cudaDeviceGetAttribute");
  return value;
}

// Returns groups of heads whose k and v take two thirds of L2. Only masks make blocks of different lengths.
HeadGroups groups_of(const Problem& p, int64_t blocks) {
  const int64_t all = p.batch * p.heads;
  if (!p.windowed) return one_by_one(all);
  const int64_t head_bytes = std::max<int64_t>(sizeof(F16) * p.tokens_k * (p.dim + p.dim_v), 1);
  const int64_t in_l2 = attribute(cudaDevAttrL2CacheSize, p) * int64_t{2} / 3 / head_bytes * p.group();
  return head_groups_of(all, blocks, in_l2, 2 * attribute(cudaDevAttrMultiProcessorCount, p));
}

TileScheduler scheduler_of(const Problem& p, int rows, int* blocks_before, cudaStream_t stream) {
  const int64_t blocks = (p.tokens_q + rows - 1) / rows;
  const TileScheduler scheduler{.batch = static_cast<int>(p.batch),
                                .heads = static_cast<int>(p.heads),
                                .q_tokens = static_cast<int>(p.tokens_q),
                                .k_tokens = static_cast<int>(p.tokens_k),
                                .rows = rows,
                                .full_blocks = static_cast<int>(blocks),
                                .head_groups = groups_of(p, blocks),
                                .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data),
                                .cu_seqlens_k = static_cast<const int*>(p.cu_seqlens_k.data),
                                .blocks_before = blocks_before,
                                .sequences = sequences_of(p)};
  if (p.packed()) count_blocks(scheduler.cu_seqlens_q, scheduler.sequences, rows, blocks_before, stream);
  return scheduler;
}

// Returns the tiles of queries; for packed sequences, whose lengths lie on the device, at least as many.
int64_t tiles_of(const Problem& p, int rows) {
  const int64_t blocks = (p.tokens_q + rows - 1) / rows;
  return (p.packed() ? blocks + sequences_of(p) : blocks * p.batch) * p.heads;
}

// Returns up to `count` channels of a tensor, from channel `first` on.
View columns_of(View t, int64_t first, int64_t count) {
  if (t.data) t.data = static_cast<unsigned char*>(t.data) + first * t.stride[3] * (t.dtype == OCTET_F32 ? 4 : 2);
  t.shape[3] = std::min(t.shape[3] - first, count);
  return t;
}
Output columns_of(Output t, int64_t first) {
  if (t.data) t.data = static_cast<unsigned char*>(t.data) + first * (t.element == Element::f32 ? 4 : 2);
  return t;
}

}  // namespace

std::optional<std::string> forward_unsupported_reason(const Problem&) { return {}; }

std::string forward_name(const Problem& p) {
  const ForwardKernel kernel = kernel_of(p);
  return text("forward ", name(p.precision), f16_compute(p) ? " with P in f16" : "",
              p.precision == OCTET_PRECISION_F32 ? " in three bf16 parts" : "", shifts_maximum(p) ? " with beta" : "",
              ", mma.sync, ", kernel.rows, " x ", kernel.keys, " tiles");
}

std::size_t forward(const Problem& p, void* workspace, cudaStream_t stream) {
  const octet_dtype type = p.precision == OCTET_PRECISION_BF16 ? OCTET_BF16 : OCTET_F16;
  const ForwardKernel kernel = kernel_of(p);
  const bool scaled = f16_compute(p);
  WorkspaceAllocator allocator(workspace);
  allocator.take(1);  // the workspace of a run is not null
  int* const blocks_before = p.packed() ? allocator.take<int>(sequences_of(p) + 1) : nullptr;
  const bool parts = p.precision == OCTET_PRECISION_F32;
  const SeenValues seen_v(p, allocator);
  const View none;
  const Input q(parts ? none : p.q, type, allocator), k(parts ? none : p.k, type, allocator),
      v(parts || scaled ? none : seen_v.view(), type, allocator);
  const ScaledInput v_scaled(scaled ? seen_v.view() : none, type, scaled ? kernel.dim_v : 0, allocator);
  const PartsInput q_parts(parts ? p.q : none, kernel.dim, allocator),
      k_parts(parts ? p.k : none, kernel.dim, allocator);
  std::vector<PartsInput> v_parts;
  for (int64_t first = 0; parts && first < p.dim_v; first += kernel.dim_v)
    v_parts.emplace_back(columns_of(seen_v.view(), first, kernel.dim_v), kernel.dim_v, allocator);
  const Result o(p.o, allocator), o_residual(p.o_residual, allocator);
  const LogitTerms terms = logit_terms(p, allocator);
  if (!workspace || !p.o.elements()) return allocator.used();

  const DeviceScope device(p.device_index);
  ForwardParams a{};
  a.scheduler = scheduler_of(p, kernel.rows, blocks_before, stream);
  seen_v.preprocess(terms, stream);
  compute_gauges(p, terms, stream);
  if (parts) {
    q_parts.preprocess(stream), k_parts.preprocess(stream);
    for (const PartsInput& input : v_parts) input.preprocess(stream);
    a.q = q_parts.view(), a.k = k_parts.view();
  } else {
    q.preprocess(stream), k.preprocess(stream);
    scaled ? v_scaled.preprocess(seen_keys(p), stream) : v.preprocess(stream);
    a.q = output(q.view()), a.k = output(k.view()), a.v = output(scaled ? v_scaled.view() : v.view());
  }
  a.mask = mask_of(p);
  a.group = static_cast<int>(p.group());
  a.dim = static_cast<int>(parts ? kernel.dim : p.dim);
  a.whole_columns = parts || (p.dim == kernel.dim && p.dim_v == kernel.dim_v);
  a.terms = terms;
  constexpr double kLog2e = 1.4426950408889634;
  a.scale_log2e = static_cast<float>(general(p) ? kLog2e : p.scale * kLog2e);
  // f16 has a smaller range of exponents for the other keys than bf16.
  a.beta = shifts_maximum(p) ? p.beta : 0.f, a.beta_reach = p.precision == OCTET_PRECISION_F16 ? 4.f : 20.f;
  a.v_scale = scaled ? v_scaled.scale() : nullptr, a.v_mean = v_scaled.v_mean();
  a.lse = output(p.lse);
  a.sinks = sinks(p.sinks);

  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes),
        "cudaFuncSetAttribute");
  for (int64_t first = 0; first < p.dim_v; first += kernel.dim_v) {
    a.dim_v = static_cast<int>(std::min<int64_t>(p.dim_v - first, kernel.dim_v));
    if (parts) a.v = v_parts[first / kernel.dim_v].view();
    a.o = columns_of(o.output(), first), a.o_residual = columns_of(o_residual.output(), first);
    void* arguments[] = {&a};
    check(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(tiles_of(p, kernel.rows))), dim3(kernel.threads),
                           arguments, kernel.shared_bytes, stream),
          "cudaLaunchKernel");
  }
  o.deliver(stream);
  if (p.o_residual.present()) o_residual.deliver(stream);
  return allocator.used();
}

}  // namespace octet::cuda::sm80
