#include <algorithm>

#include "core/names.h"
#include "cuda/host/status.h"
#include "cuda/preprocess/masks.h"
#include "cuda/preprocess/operands.h"
#include "cuda/preprocess/vec8.h"
#include "cuda/ptx/max.h"
#include "cuda/sm80/seen_values.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

// Where a mask varies: by query, and by the heads that share a head of k and v.
struct Rows {
  int queries, heads;
};

// Lists which of 32 keys of one (batch, head) some query sees: a lane has a key, a warp every kWarps-th query. Queries
// come from the last on, which under causal masks sees most; the block ends as soon as all of its keys are seen.
constexpr int kListedKeys = 32, kWarps = kThreads / 32;
__global__ void __launch_bounds__(kThreads)
    list_kernel(const __grid_constant__ LogitTerms t, const Mask mask, int n, int m, int heads, const Rows rows,
                unsigned char* seen, int64_t stride) {
  constexpr int kAtOnce = 8;  // queries of a warp
  __shared__ unsigned found;  // a bit for each key
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  const unsigned blocks = (m + kListedKeys - 1) / kListedKeys, of = blockIdx.x / blocks;
  const int key = static_cast<int>(blockIdx.x % blocks * kListedKeys + threadIdx.x % 32);
  const int batch = static_cast<int>(of) / heads, head = static_cast<int>(of) % heads;
  for (int last = rows.queries - 1; last >= 0; last -= kAtOnce * kWarps) {
    float most = key >= m ? 0.f : -INFINITY;
    with_mask_type(t.element, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = max(last - i * kWarps - static_cast<int>(threadIdx.x) / 32, 0);
        const KeyRange range = mask.keys_of(row, n, m);
        for (int h = 0; h < rows.heads; ++h) {
          const int64_t at = batch * t.mask_stride[0] + (head * rows.heads + h) * t.mask_stride[1] +
                             row * t.mask_stride[2] + min(key, m - 1) * t.mask_stride[3];
          const float number = MaskNumbers<T>::one(t.mask, at);
          most = ptx::max_or_nan(most, key >= range.first && key < range.last ? number : -INFINITY);
        }
      }
    });
    const unsigned seen_by_warp = __ballot_sync(~0u, most != -INFINITY);
    if (threadIdx.x % 32 == 0) atomicOr(&found, seen_by_warp);
    if (__syncthreads_or(found != ~0u) == 0) break;
  }
  if (threadIdx.x < kListedKeys && key < m) seen[of * stride + key] = found >> threadIdx.x & 1;
}

// Copies v, and sets the keys that are not listed to 0.
__global__ void __launch_bounds__(kThreads) hide_kernel(const Strided from, const Strided to, const unsigned char* seen,
                                                        int64_t batch_stride, int64_t head_stride) {
  const int vecs = static_cast<int>(from.shape[3]) / kVec8;
  const int64_t count = from.shape[0] * from.shape[1] * from.shape[2] * vecs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = i / vecs % from.shape[2], head = i / vecs / from.shape[2];
    const Index4 index{head / from.shape[1], head % from.shape[1], token, i % vecs * kVec8};
    Vec8 x{};
    if (seen[index.batch * batch_stride + index.head * head_stride + token]) read(from, index, x);
    write(to, index, x);
  }
}

}  // namespace

void list_seen_keys(const Problem& p, const LogitTerms& terms, int64_t batches, int64_t heads, int group,
                    unsigned char* seen, int64_t stride, cudaStream_t stream) {
  const auto queries = static_cast<int>(p.tokens_q), keys = static_cast<int>(p.tokens_k);
  // Queries that the mask does not tell apart count once.
  const Rows rows{p.mask.stride[2] || p.windowed ? queries : 1, group};
  const auto grid = static_cast<unsigned>((keys + kListedKeys - 1) / kListedKeys * batches * heads);
  list_kernel<<<grid, kThreads, 0, stream>>>(terms, mask_of(p), queries, keys, static_cast<int>(heads), rows, seen,
                                             stride);
  check(cudaGetLastError(), "list_kernel");
}

SeenValues::SeenValues(const Problem& p, WorkspaceAllocator& workspace)
    : p_(p),
      view_(p.v),
      batches_(p.mask.present() && p.mask.stride[0] ? p.batch : 1),
      heads_(p.mask.present() && p.mask.stride[1] ? p.kv_heads : 1) {
  if (!p.mask.present() || !p.v.elements()) return;
  seen_ = workspace.take<unsigned char>(static_cast<std::size_t>(batches_ * heads_ * p.tokens_k));
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    view_.stride[i] = stride;
    stride *= view_.shape[i];
  }
  view_.data = workspace.take(static_cast<std::size_t>(stride) * bytes_of(p.v.dtype));
}

void SeenValues::preprocess(const LogitTerms& terms, cudaStream_t stream) const {
  if (!seen_) return;
  const auto keys = static_cast<int>(p_.tokens_k);
  list_seen_keys(p_, terms, batches_, heads_, p_.mask.stride[1] ? static_cast<int>(p_.group()) : 1, seen_, keys,
                 stream);
  constexpr int64_t kMostBlocks = 1 << 14;
  const int64_t blocks = (p_.v.elements() / kVec8 + kThreads - 1) / kThreads;
  hide_kernel<<<static_cast<unsigned>(std::min(blocks, kMostBlocks)), kThreads, 0, stream>>>(
      strided(p_.v), strided(view_), seen_, batches_ > 1 ? heads_ * keys : 0, heads_ > 1 ? keys : 0);
  check(cudaGetLastError(), "hide_kernel");
}

}  // namespace octet::cuda::sm80
