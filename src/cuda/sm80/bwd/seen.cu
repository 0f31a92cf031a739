#include "core/names.h"
#include "cuda/host/launch.h"
#include "cuda/preprocess/masks.h"
#include "cuda/preprocess/operands.h"
#include "cuda/preprocess/vec8.h"
#include "cuda/sm80/bwd/seen.h"
#include "cuda/sm80/seen_values.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// The flags of a problem's tokens.
struct Flags {
  unsigned char* data;
  int batches, heads;  // of the mask tensor: 1 where it is the same for all
  int n, m;

  __device__ unsigned char* of(int batch, int head) const {
    return data + (int64_t{batch % batches} * heads + head % heads) * (n + m);
  }
};

Flags flags_of(const Problem& p, const LogitTerms& t, unsigned char* data) {
  return {data, t.mask_stride[0] ? static_cast<int>(p.batch) : 1, t.mask_stride[1] ? static_cast<int>(p.heads) : 1,
          static_cast<int>(p.tokens_q), static_cast<int>(p.tokens_k)};
}

// Sets the flags of queries that see a key; one warp has a row of the mask tensor.
__global__ void __launch_bounds__(kThreads)
    list_queries_kernel(const __grid_constant__ LogitTerms t, const Mask mask, const Flags flags) {
  const int64_t rows = int64_t{flags.batches} * flags.heads * flags.n;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const int i = static_cast<int>(row % flags.n), head = static_cast<int>(row / flags.n % flags.heads);
    const int batch = static_cast<int>(row / flags.n / flags.heads);
    const int64_t start = batch * t.mask_stride[0] + head * t.mask_stride[1] + i * t.mask_stride[2];
    const KeyRange keys = mask.keys_of(i, flags.n, flags.m);
    bool found = false;
    for (int first = keys.first; first < keys.last && !found; first += 32) {
      const int key = first + static_cast<int>(threadIdx.x) % 32;
      found = __any_sync(
          ~0u, key < keys.last && mask_number(t.element, t.mask, start + key * t.mask_stride[3]) != -INFINITY);
    }
    if (threadIdx.x % 32 == 0) flags.of(batch, head)[i] = found;
  }
}

// Sets to = from, and 0 where a token is not seen. Keys of a head count as seen if any of the `group` heads that share
// it sees them; queries have a group of 1.
__global__ void __launch_bounds__(kThreads)
    copy_seen_kernel(const Strided from, const Strided to, const Flags flags, bool queries, int group) {
  const int64_t vecs = from.shape[3] / kVec8, all = from.shape[0] * from.shape[1] * from.shape[2] * vecs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const Index4 at{i / vecs / from.shape[2] / from.shape[1], i / vecs / from.shape[2] % from.shape[1],
                    i / vecs % from.shape[2], i % vecs * kVec8};
    bool seen = false;
    for (int head = 0; head < group; ++head)
      seen |= flags.of(static_cast<int>(at.batch),
                       static_cast<int>(at.head) * group + head)[(queries ? 0 : flags.n) + at.token] != 0;
    Vec8 x{};
    if (seen) read(from, at, x);
    write(to, at, x);
  }
}

Strided copy_of(const View& t, WorkspaceAllocator& workspace) {
  Strided s = strided(t);
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) s.stride[i] = stride, stride *= s.shape[i];
  s.data = workspace.take(static_cast<std::size_t>(stride) * bytes_of(t.dtype));
  return s;
}

}  // namespace

SeenOperands::SeenOperands(const Problem& p, const LogitTerms& t, WorkspaceAllocator& workspace)
    : q(strided(p.q)), k(strided(p.k)), v(strided(p.v)), do_(strided(p.do_)) {
  if (!p.mask.present() || !p.tokens_q || !p.tokens_k) return;
  q = copy_of(p.q, workspace), k = copy_of(p.k, workspace);
  v = copy_of(p.v, workspace), do_ = copy_of(p.do_, workspace);
  const Flags flags = flags_of(p, t, nullptr);
  flags_ = workspace.take<unsigned char>(static_cast<std::size_t>(flags.batches) * flags.heads * (flags.n + flags.m));
}

void SeenOperands::preprocess(const Problem& p, const LogitTerms& t, cudaStream_t stream) const {
  if (!flags_) return;
  const Flags flags = flags_of(p, t, flags_);
  const int64_t heads = int64_t{flags.batches} * flags.heads;
  list_queries_kernel<<<blocks_for(heads * flags.n, kWarps), kThreads, 0, stream>>>(t, mask_of(p), flags);
  check(cudaGetLastError(), "list_queries_kernel");
  list_seen_keys(p, t, flags.batches, flags.heads, 1, flags_ + flags.n, flags.n + flags.m, stream);
  const auto copy = [&](const View& from, const Strided& to, bool queries) {
    copy_seen_kernel<<<blocks_for(from.elements() / kVec8, kThreads), kThreads, 0, stream>>>(
        strided(from), to, flags, queries, queries ? 1 : static_cast<int>(p.group()));
    check(cudaGetLastError(), "copy_seen_kernel");
  };
  copy(p.q, q, true), copy(p.do_, do_, true), copy(p.k, k, false), copy(p.v, v, false);
}

}  // namespace octet::cuda::sm80
