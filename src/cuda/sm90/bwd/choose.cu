#include <algorithm>

#include "core/error.h"
#include "core/recipe.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/vec8.h"
#include "cuda/sm90/bwd/choose.h"
#include "cuda/sm90/bwd/query_rows.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

constexpr int64_t kMaxTokens = 1 << 21;  // a grid has fewer than 2^16 rows, of 64 tokens each

struct Row {
  Kernel (*kernel)(int64_t dim, int64_t dim_v, Sums sums);
  Kernel (*further)(int64_t dim, int64_t dim_v, Sums sums);  // null: all queries are the first bin
};
constexpr Row kBf16Row = {backward_kernel<Bf16, Bins::first>, nullptr},
              kF16Row = {backward_kernel<F16, Bins::first>, backward_kernel<F16, Bins::further>};

// The same of kernels with something extra, whose sums of dq are floats.
template <class T, Bins bins, Extra extra>
Kernel kernel_with(int64_t dim, int64_t dim_v, Sums) {
  return backward_kernel_with<T, bins, extra>(dim, dim_v);
}
template <Extra extra>
constexpr Row kBf16RowWith = {kernel_with<Bf16, Bins::first, extra>, nullptr};
template <Extra extra>
constexpr Row kF16RowWith = {kernel_with<F16, Bins::first, extra>, kernel_with<F16, Bins::further, extra>};

const Row& row_of(const Problem& p, bool f16) {
  switch (extra_of(p)) {
    case Extra::none:
      return f16 ? kF16Row : kBf16Row;
    case Extra::alibi:
      return f16 ? kF16RowWith<Extra::alibi> : kBf16RowWith<Extra::alibi>;
    case Extra::dropout:
      return f16 ? kF16RowWith<Extra::dropout> : kBf16RowWith<Extra::dropout>;
    case Extra::mask:
      if (p.mask.dtype == OCTET_F16) return f16 ? kF16RowWith<Extra::f16_mask> : kBf16RowWith<Extra::f16_mask>;
      return f16 ? kF16RowWith<Extra::mask> : kBf16RowWith<Extra::mask>;
    case Extra::f16_mask:
      break;
  }
  return kBf16Row;
}

// True where the kernel can convert the caller's k and v: they have one 16-bit type and need no rounding to another.
bool converts_keys(const Problem& p, octet_dtype cast) {
  const octet_dtype type = p.k.dtype;
  return p.v.dtype == type && (type == OCTET_BF16 || (type == OCTET_F16 && cast == OCTET_F16)) && p.k.elements() &&
         p.v.elements() && reads_by_index(p.k) && reads_by_index(p.v);
}

// True where the kernel can take the caller's q and do as its operands: bf16 without a scale. What rows hold that are
// no queries, or that see no key, must not matter: TMA fills those beyond a tensor with zeros, but reads those beyond a
// packed sequence.
bool reads_queries(const Problem& p, bool f16) {
  const int64_t n = p.tokens_q, m = p.tokens_k;
  if (f16 || p.packed() || !p.q.elements() || !p.do_.elements()) return false;
  // The units of sums in integers weigh a gradient of lse by a sample of v, which is not taken here.
  if (p.deterministic && p.dlse.present()) return false;
  // Both ends of the range of keys grow with the query.
  for (const int64_t query : {int64_t{0}, n - 1})
    if (const auto keys = p.keys_of(query, n, m); keys.first == keys.last) return false;
  for (const View* x : {&p.q, &p.do_, &p.o})
    if (x->dtype != OCTET_BF16 || !reads_by_index(*x)) return false;
  return !p.o_residual.present() || (p.o_residual.dtype == OCTET_I8 && in_words(strided(p.o_residual), 1));
}

// True where the 2-CTA kernel, which cannot convert them, can take the caller's k and v as they are beside such q and
// do. What keys hold that no query sees must not matter.
bool reads_keys(const Problem& p) {
  const int64_t n = p.tokens_q, m = p.tokens_k;
  return p.k.dtype == OCTET_BF16 && m && p.keys_of(0, n, m).first == 0 && p.keys_of(n - 1, n, m).last == m;
}

}  // namespace

bool reads_by_index(const View& x) {
  return reads_directly(x) && (x.shape[0] <= 1 || x.stride[0]) && (x.shape[1] <= 1 || x.stride[1]);
}

BackwardKernels choose_kernels(const Problem& p) {
  const BackwardChoice choice = choose_backward(p);
  const Row& row = row_of(p, choice.f16);
  BackwardKernels kernels{choice, row.kernel(p.dim, p.dim_v, choice.sums)};
  const Kernel& kernel = kernels.kernel;
  if (row.further) kernels.further = row.further(kernel.dim, kernel.dim_v, choice.sums);
  kernels.key_tiles = !converts_keys(p, choice.cast);
  // Queries that see no key of a mask tensor may hold anything.
  kernels.query_tiles =
      kernels.key_tiles || p.mask.present() || !may_read_rows(kernel.dim) || !reads_queries(p, choice.f16);
  // The 2-CTA kernel has no shared memory for a second stage of k and v, in which they could be converted.
  if (kernel.cluster > 1) kernels.query_tiles = kernels.key_tiles = kernels.query_tiles || !reads_keys(p);
  return kernels;
}

std::optional<std::string> backward_unsupported_reason(const Problem& p) {
  if (const int64_t tokens = std::max(p.tokens_q, p.tokens_k); tokens > kMaxTokens)
    return text("its backward pass takes up to ", kMaxTokens, " tokens, found ", tokens);
  if (auto reason = bias_correction_unsupported_reason(p)) return reason;
  return missing_exact_output(p);
}

}  // namespace octet::cuda::sm90
