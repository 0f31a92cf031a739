#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/host/launch.h"
#include "cuda/host/status.h"
#include "cuda/operands/key_mask.h"
#include "cuda/operands/listed_keys.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kKeys = 16;  // of a thread, neighbours

// Lists the seen keys of batch element blockIdx.x in their order.
__global__ void __launch_bounds__(kThreads)
    list_seen_kernel(const unsigned char* mask, int64_t batch_stride, int64_t key_stride, int keys, int apart,
                     int* lists, int* counts) {
  __shared__ int of_warps[kWarps];
  const int element = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned char* const row = mask + element * batch_stride;
  int* const list = lists + int64_t{element} * keys;
  int listed = 0;
  for (int start = 0; start < keys; start += kThreads * kKeys) {
    const int first = start + static_cast<int>(threadIdx.x) * kKeys;
    const unsigned char* const from = row + first * key_stride;
    unsigned seen = 0;
    if (key_stride == 1 && first + kKeys <= keys && reinterpret_cast<uintptr_t>(from) % sizeof(uint4) == 0) {
      const uint4 word = *reinterpret_cast<const uint4*>(from);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const unsigned part = i < 4 ? word.x : i < 8 ? word.y : i < 12 ? word.z : word.w;
        seen |= (part >> 8 * (i % 4) & 0xff ? 1u : 0u) << i;
      }
    } else {
      for (int i = 0; i < kKeys && first + i < keys; ++i) seen |= (from[i * key_stride] ? 1u : 0u) << i;
    }
    int before = __popc(seen);  // and then the sum over the lanes up to this one
    for (int offset = 1; offset < 32; offset *= 2) {
      const int lower = __shfl_up_sync(~0u, before, offset);
      if (lane >= offset) before += lower;
    }
    if (lane == 31) of_warps[warp] = before;
    __syncthreads();
    before += listed - __popc(seen);
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) before += of_warps[other];
      listed += of_warps[other];
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
      if (seen >> i & 1) list[before++] = element * apart + first + i;
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[element] = listed;
}

// Returns the keys from one batch element to the next, or 0 where these are no whole number of them.
int64_t keys_apart(const View& t) {
  if (t.shape[0] == 1) return t.shape[2];
  return t.stride[2] && t.stride[0] % t.stride[2] == 0 ? t.stride[0] / t.stride[2] : 0;
}

View in_pages_of_one(View t, int64_t apart, const Pages& pages) {
  t.pages = pages;
  t.shape[0] = (t.shape[0] - 1) * apart + t.shape[2], t.stride[0] = t.stride[2], t.shape[2] = 1;
  return t;
}

}  // namespace

bool can_list_keys(const Problem& p) {
  const int64_t apart = p.k.elements() ? keys_apart(p.k) : 0;
  return p.mask.present() && !p.dropout && !p.o_residual.present() && !no_key_mask_reason(p) && apart > 0 &&
         apart == keys_apart(p.v) && p.batch * apart <= std::numeric_limits<int32_t>::max();
}

ListedKeys::ListedKeys(const Problem& p, void* workspace)
    : ListedKeys(p, WorkspaceAllocator(workspace ? workspace : reinterpret_cast<void*>(std::uintptr_t{256}))) {}

ListedKeys::ListedKeys(const Problem& p, WorkspaceAllocator&& workspace)
    : problem_(p), mask_(p.mask), apart_(keys_apart(p.k)) {
  list_ = workspace.take<int>(static_cast<std::size_t>(p.batch * p.tokens_k));
  counts_ = workspace.take<int>(static_cast<std::size_t>(p.batch));
  const Pages pages{.table = list_, .stride = p.tokens_k, .columns = p.tokens_k, .size = 1};
  problem_.mask = {};
  problem_.k = in_pages_of_one(p.k, apart_, pages), problem_.v = in_pages_of_one(p.v, apart_, pages);
  problem_.seqused_k = {OCTET_I32, counts_, {1, 1, 1, p.batch}, {p.batch, p.batch, p.batch, 1}};
  problem_.block_table = {OCTET_I32, list_, {1, 1, p.batch, p.tokens_k}, {0, 0, p.tokens_k, 1}};
  bytes_ = workspace.used();
}

void ListedKeys::preprocess(cudaStream_t stream) const {
  if (!problem_.o.elements()) return;
  const DeviceScope device(problem_.device_index);
  list_seen_kernel<<<static_cast<unsigned>(problem_.batch), kThreads, 0, stream>>>(
      static_cast<const unsigned char*>(mask_.data), mask_.stride[0], mask_.stride[3],
      static_cast<int>(problem_.tokens_k), static_cast<int>(apart_), list_, counts_);
  check(cudaGetLastError(), "list_seen_kernel");
}

}  // namespace octet::cuda
