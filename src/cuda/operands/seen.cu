#include <algorithm>

#include "cuda/fragment/mask.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/seen.h"
#include "cuda/operands/seen_keys.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kListThreads)
    list_keys_kernel(const __grid_constant__ MaskTensor t, const Mask mask, int n, int m, const SeeingRows rows,
                     const TokenFlags seen, int* counts) {
  with_mask_type(t.element, [&](auto* type) {
    list_keys_of_block<std::remove_pointer_t<decltype(type)>>(blockIdx.x, t, mask, n, m, rows, seen, counts);
  });
}

// Lists the queries that see a key; one warp has a row of the mask tensor.
__global__ void __launch_bounds__(kThreads)
    list_queries_kernel(const __grid_constant__ MaskTensor t, const Mask mask, int n, int m, const TokenFlags seen) {
  const int64_t rows = int64_t{seen.batches} * seen.heads * n;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const int i = static_cast<int>(row % n), head = static_cast<int>(row / n % seen.heads);
    const int batch = static_cast<int>(row / n / seen.heads);
    const Interval keys = mask.keys_of(i, n, m);
    bool found = false;
    for (int first = keys.first; first < keys.last && !found; first += 32) {
      const int key = first + static_cast<int>(threadIdx.x) % 32;
      found = __any_sync(~0u, key < keys.last && mask_number(t.element, t.data,
                                                             t.row(batch, head, i) + key * t.stride[3]) != -INFINITY);
    }
    if (threadIdx.x % 32 == 0) seen.of(batch, head)[i] = found;
  }
}

// Sets to = from, and 0 where a token is not seen.
__global__ void __launch_bounds__(kThreads)
    copy_seen_kernel(const Strided from, const Strided to, const TokenFlags flags) {
  const int64_t vecs = from.shape[3] / kVec8, all = from.shape[0] * from.shape[1] * from.shape[2] * vecs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const Index4 at{i / vecs / from.shape[2] / from.shape[1], i / vecs / from.shape[2] % from.shape[1],
                    i / vecs % from.shape[2], i % vecs * kVec8};
    Vec8 x{};
    if (flags.of(static_cast<int>(at.batch), static_cast<int>(at.head))[at.token]) read(from, at, x);
    write(to, at, x);
  }
}

// The tokens that a mask tells apart.
std::size_t count_of(const TokenFlags& x, int64_t tokens) {
  return static_cast<std::size_t>(x.batches) * x.heads * tokens;
}

// Lists which keys some query sees, and counts them where `counts` is not null.
void list_keys(const Problem& p, const TokenFlags& seen, int* counts, cudaStream_t stream) {
  if (counts) check(cudaMemsetAsync(counts, 0, count_of(seen, 1) * sizeof *counts, stream), "cudaMemsetAsync");
  // The heads of the mask that share a head of the list.
  const int group = p.mask.stride[1] ? static_cast<int>(p.group()) : 1;
  const auto queries = static_cast<int>(p.tokens_q), keys = static_cast<int>(p.tokens_k);
  // Queries that the mask does not tell apart count once.
  const SeeingRows rows{p.mask.stride[2] || p.windowed ? queries : std::min(queries, 1), group};
  list_keys_kernel<<<key_list_blocks(seen, keys), kListThreads, 0, stream>>>(mask_tensor(p), mask_of(p), queries, keys,
                                                                             rows, seen, counts);
  check(cudaGetLastError(), "list_keys_kernel");
}

void list_queries(const Problem& p, const TokenFlags& seen, cudaStream_t stream) {
  const int64_t rows = int64_t{seen.batches} * seen.heads * p.tokens_q;
  list_queries_kernel<<<blocks_for(rows, kWarps), kThreads, 0, stream>>>(
      mask_tensor(p), mask_of(p), static_cast<int>(p.tokens_q), static_cast<int>(p.tokens_k), seen);
  check(cudaGetLastError(), "list_queries_kernel");
}

void copy_seen(const View& from, const Strided& to, const TokenFlags& seen, cudaStream_t stream) {
  copy_seen_kernel<<<blocks_for(from.elements() / kVec8, kThreads), kThreads, 0, stream>>>(strided(from), to, seen);
  check(cudaGetLastError(), "copy_seen_kernel");
}

}  // namespace

SeenKeySide::SeenKeySide(const Problem& p, ReadsK reads_k, WorkspaceAllocator& workspace)
    : p_(p),
      k_(p.k),
      v_(p.v),
      tv_(p.tv),
      batches_(p.mask.present() && p.mask.stride[0] ? static_cast<int>(p.batch) : 1),
      heads_(p.mask.present() && p.mask.stride[1] ? static_cast<int>(p.kv_heads) : 1) {
  if (!p.mask.present() || !p.v.elements()) return;
  seen_ = workspace.take<unsigned char>(static_cast<std::size_t>(batches_ * heads_ * p.tokens_k));
  const bool codes = p.v.dtype == OCTET_I8 || p.v.dtype == OCTET_U8;
  if (!codes) v_ = contiguous(p.v, p.v.dtype, workspace);
  if (p.tv.present()) tv_ = contiguous(p.tv, p.tv.dtype, workspace);
  if (reads_k == ReadsK::as_it_is) return;
  k_ = contiguous(p.k, p.k.dtype, workspace);
  counts_ = workspace.take<int>(static_cast<std::size_t>(batches_) * heads_);
}

void SeenKeySide::preprocess(cudaStream_t stream) const {
  if (!seen_) return;
  const TokenFlags seen = flags();
  list_keys(p_, seen, counts_, stream);
  if (v_.data != p_.v.data) copy_seen(p_.v, strided(v_), seen, stream);
  if (p_.tv.present()) copy_seen(p_.tv, strided(tv_), seen, stream);
  if (counts_) copy_seen(p_.k, strided(k_), seen, stream);
}

SeenQueries::SeenQueries(const Problem& p, WorkspaceAllocator& workspace) : p_(p) {
  if (!p.mask.present() || !p.tokens_q) return;
  flags_ = {nullptr, p.mask.stride[0] ? static_cast<int>(p.batch) : 1, p.mask.stride[1] ? static_cast<int>(p.heads) : 1,
            p.tokens_q};
  flags_.data = workspace.take<unsigned char>(static_cast<std::size_t>(flags_.batches * flags_.heads * p.tokens_q));
}

void SeenQueries::preprocess(cudaStream_t stream) const {
  if (flags_.data) list_queries(p_, flags_, stream);
}

SeenOperands::SeenOperands(const Problem& p, WorkspaceAllocator& workspace)
    : q(strided(p.q)), k(strided(p.k)), v(strided(p.v)), do_(strided(p.do_)), p_(p) {
  if (!p.mask.present() || !p.tokens_q || !p.tokens_k) return;
  const auto copy = [&](const View& t) { return strided(contiguous(t, t.dtype, workspace)); };
  q = copy(p.q), k = copy(p.k), v = copy(p.v), do_ = copy(p.do_);
  const auto flags = [&](int64_t heads, int64_t tokens) {
    TokenFlags x{nullptr, p.mask.stride[0] ? static_cast<int>(p.batch) : 1,
                 p.mask.stride[1] ? static_cast<int>(heads) : 1, tokens};
    x.data = workspace.take<unsigned char>(count_of(x, tokens));
    return x;
  };
  queries_ = flags(p.heads, p.tokens_q), keys_ = flags(p.kv_heads, p.tokens_k);
  counts_ = workspace.take<int>(count_of(keys_, 1));
}

void SeenOperands::preprocess(cudaStream_t stream) const {
  if (!queries_.data) return;
  list_queries(p_, queries_, stream), list_keys(p_, keys_, counts_, stream);
  copy_seen(p_.q, q, queries_, stream), copy_seen(p_.do_, do_, queries_, stream);
  copy_seen(p_.k, k, keys_, stream), copy_seen(p_.v, v, keys_, stream);
}

}  // namespace octet::cuda
