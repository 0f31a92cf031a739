#include <algorithm>

#include "core/error.h"
#include "core/names.h"
#include "cuda/fragment/mask.h"
#include "cuda/host/launch.h"
#include "cuda/host/tensor_map.h"
#include "cuda/operands/mask_rows.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/seen_keys.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// The rows of a mask that differ, in the order of their biases.
struct DistinctRows {
  int batches, heads, queries;
  __host__ __device__ int64_t count() const { return int64_t{batches} * heads * queries; }
};

DistinctRows distinct_rows(const Problem& p) {
  return {p.mask.stride[0] ? static_cast<int>(p.batch) : 1, p.mask.stride[1] ? static_cast<int>(p.heads) : 1,
          p.mask.stride[2] || p.windowed ? static_cast<int>(p.tokens_q) : 1};
}

// One warp finds the bias of a row, and whether its query, or all of those that share it, see a key.
template <class T>
__device__ void summarize_rows(unsigned block, unsigned blocks, const MaskRows& t, const DistinctRows& rows,
                               const Mask& mask, int n, int m, const TokenFlags& seen_queries) {
  constexpr int kNumbers = kMaskChunkBytes / sizeof(T);
  const int lane = threadIdx.x % 32;
  for (int64_t row = int64_t{block} * kWarps + threadIdx.x / 32; row < rows.count(); row += int64_t{blocks} * kWarps) {
    const int query = static_cast<int>(row % rows.queries), head = static_cast<int>(row / rows.queries % rows.heads);
    const int batch = static_cast<int>(row / rows.queries / rows.heads);
    const Interval keys = mask.keys_of(query, n, m);
    const T* const from = static_cast<const T*>(t.mask.data) + t.mask.row(batch, head, query);
    float most = -INFINITY;
    bool sees = false;
    const auto add = [&](int key, float number) {
      if (keys.first <= key && key < keys.last) most = fmaxf(most, number), sees |= number != -INFINITY;
    };
    if (t.mask.chunks) {
      const int first = keys.first / kNumbers * kNumbers, whole = keys.last / kNumbers * kNumbers;
#pragma unroll 4
      for (int key = first + lane * kNumbers; key < whole; key += 32 * kNumbers) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(from + key);
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) add(key + i, MaskNumbers<T>::one(&chunk, i));
      }
      for (int key = max(whole, first) + lane; key < keys.last; key += 32) add(key, MaskNumbers<T>::one(from, key));
    } else {
#pragma unroll 4
      for (int key = keys.first + lane; key < keys.last; key += 32)
        add(key, MaskNumbers<T>::one(from, key * t.mask.stride[3]));
    }
    for (int offset = 16; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    if (t.biases && lane == 0) t.biases[row] = isfinite(most) ? most : 0.f;
    if (!seen_queries.data) continue;
    const bool any_sees = __any_sync(~0u, sees);
    const int first = rows.queries > 1 ? query : 0, last = rows.queries > 1 ? query + 1 : n;
    for (int i = first + lane; i < last; i += 32) seen_queries.of(batch, head)[i] = any_sees;
  }
}

// The first `key_blocks` thread blocks list keys, the others summarize rows.
template <class T>
__global__ void __launch_bounds__(kListThreads)
    mask_summary_kernel(const __grid_constant__ MaskRows t, const DistinctRows distinct, const Mask mask, int n, int m,
                        const TokenFlags seen_queries, unsigned key_blocks, const SeeingRows rows,
                        const TokenFlags seen_keys) {
  static_assert(kListThreads == kThreads);
  if (blockIdx.x < key_blocks)
    list_keys_of_block<T>(blockIdx.x, t.mask, mask, n, m, rows, seen_keys, nullptr);
  else
    summarize_rows<T>(blockIdx.x - key_blocks, gridDim.x - key_blocks, t, distinct, mask, n, m, seen_queries);
}

// Writes the mask in bf16 or f16. Rows of the copy beyond those of the mask repeat them.
template <class T>
__global__ void __launch_bounds__(kThreads)
    mask_tiles_kernel(const MaskTensor t, T* to, int batches, int heads, int rows, int keys, int padded_keys) {
  const int64_t pairs = int64_t{batches} * heads * rows * (padded_keys / 2);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pairs; i += int64_t{gridDim.x} * kThreads) {
    const int key = static_cast<int>(i % (padded_keys / 2)) * 2, row = static_cast<int>(i / (padded_keys / 2) % rows);
    const int head = static_cast<int>(i / (padded_keys / 2) / rows % heads);
    const int batch = static_cast<int>(i / (padded_keys / 2) / rows / heads);
    const int64_t start = t.row(batch, head, row);
    const auto number = [&](int j) { return j < keys ? mask_number(t.element, t.data, start + j * t.stride[3]) : 0.f; };
    reinterpret_cast<uint32_t*>(to)[i] = ptx::pack<T>(number(key), number(key + 1));
  }
}

constexpr int kKeysPerWord = 8;

// The shape of a copy.
struct CopyShape {
  int64_t batches, heads, rows, keys;
  int64_t elements() const { return batches * heads * rows * keys; }
};
CopyShape copy_shape(const Problem& p, int rows) {
  return {p.mask.stride[0] ? p.batch : 1, p.mask.stride[1] ? p.heads : 1, p.mask.stride[2] ? p.tokens_q : rows,
          (p.tokens_k + kKeysPerWord - 1) / kKeysPerWord * kKeysPerWord};
}

View full_view(const Problem& p) {
  View t = p.mask;
  t.shape[0] = p.batch, t.shape[1] = p.heads, t.shape[2] = p.tokens_q, t.shape[3] = p.tokens_k;
  return t;
}

bool read_in_place(const Problem& p, octet_dtype type) {
  return p.mask.dtype == type && p.mask.stride[2] && p.mask.stride[3] == 1 && reads_directly(full_view(p));
}

}  // namespace

MaskSummary::MaskSummary(const Problem& p, Seen seen, WorkspaceAllocator& workspace)
    : p_(p), rows_{.mask = mask_tensor(p)} {
  if (!rows_.mask.bytes) return;
  const auto flags = [&](int64_t heads, int64_t tokens) {
    TokenFlags f{nullptr, p.mask.stride[0] ? static_cast<int>(p.batch) : 1,
                 p.mask.stride[1] ? static_cast<int>(heads) : 1, tokens};
    f.data = workspace.take<unsigned char>(static_cast<std::size_t>(f.batches * f.heads * tokens));
    return f;
  };
  if (seen != Seen::none) seen_keys_ = flags(p.kv_heads, p.tokens_k);
  if (seen == Seen::keys_and_queries) seen_queries_ = flags(p.heads, p.tokens_q);
  if (p.mask.dtype == OCTET_BOOL) return;
  const DistinctRows distinct = distinct_rows(p);
  rows_.biases = workspace.take<float>(static_cast<std::size_t>(distinct.count()));
  rows_.stride[2] = distinct.queries > 1 ? 1 : 0;
  rows_.stride[1] = distinct.heads > 1 ? distinct.queries : 0;
  rows_.stride[0] = distinct.batches > 1 ? int64_t{distinct.heads} * distinct.queries : 0;
}

void MaskSummary::preprocess(cudaStream_t stream) const {
  if (!rows_.biases && !seen_keys_.data) return;
  const auto queries = static_cast<int>(p_.tokens_q), keys = static_cast<int>(p_.tokens_k);
  const DistinctRows distinct = distinct_rows(p_);
  // Queries that the mask does not tell apart count once.
  const SeeingRows rows{distinct.queries, p_.mask.stride[1] ? static_cast<int>(p_.group()) : 1};
  const unsigned key_blocks = seen_keys_.data ? key_list_blocks(seen_keys_, keys) : 0;
  const unsigned row_blocks = rows_.biases || seen_queries_.data ? blocks_for(distinct.count(), kWarps) : 0;
  const auto launch = [&](const auto& kernel) {
    kernel<<<key_blocks + row_blocks, kThreads, 0, stream>>>(rows_, distinct, mask_of(p_), queries, keys, seen_queries_,
                                                             key_blocks, rows, seen_keys_);
  };
  switch (rows_.mask.element) {
    case MaskElement::boolean:
      launch(mask_summary_kernel<bool>);
      break;
    case MaskElement::f16:
      launch(mask_summary_kernel<F16>);
      break;
    default:
      launch(mask_summary_kernel<Bf16>);
  }
  check(cudaGetLastError(), "mask_summary_kernel");
}

MaskTiles::MaskTiles(const Problem& p, octet_dtype type, int rows, WorkspaceAllocator& workspace)
    : p_(p), view_(full_view(p)) {
  if (!mask_tensor(p).bytes || read_in_place(p, type)) return;
  const CopyShape shape = copy_shape(p, rows);
  view_.dtype = type;
  view_.data = workspace.take(static_cast<std::size_t>(shape.elements() * 2));
  view_.shape[2] = shape.rows;
  const int64_t head = shape.rows * shape.keys;
  view_.stride[0] = shape.batches > 1 ? shape.heads * head : 0, view_.stride[1] = shape.heads > 1 ? head : 0;
  view_.stride[2] = shape.keys, view_.stride[3] = 1;
}

void MaskTiles::preprocess(cudaStream_t stream) const {
  if (view_.data == p_.mask.data) return;
  const CopyShape shape = copy_shape(p_, static_cast<int>(view_.shape[2]));
  const auto write = [&](auto* to, const auto& kernel) {
    kernel<<<blocks_for(shape.elements() / 2, kThreads), kThreads, 0, stream>>>(
        mask_tensor(p_), to, static_cast<int>(shape.batches), static_cast<int>(shape.heads),
        static_cast<int>(shape.rows), static_cast<int>(p_.tokens_k), static_cast<int>(shape.keys));
  };
  view_.dtype == OCTET_F16 ? write(static_cast<F16*>(view_.data), mask_tiles_kernel<F16>)
                           : write(static_cast<Bf16*>(view_.data), mask_tiles_kernel<Bf16>);
  check(cudaGetLastError(), "mask_tiles_kernel");
}

void MaskTiles::set_broadcast(int (&broadcast)[3]) const {
  broadcast[0] = p_.mask.stride[2] != 0, broadcast[1] = view_.stride[1] != 0, broadcast[2] = view_.stride[0] != 0;
}

std::optional<std::string> MaskTiles::unsupported_reason(const Problem& p, octet_dtype type) {
  constexpr int kRows = 128;
  constexpr int64_t kMostBytes = int64_t{256} << 20;
  if (p.mask.dtype != OCTET_BOOL && p.mask.dtype != type)
    return text("its mask tensor is ", name(p.mask.dtype), "; it takes bool and ", name(type),
                " ones beside these inputs");
  if (read_in_place(p, type)) return {};
  if (const int64_t bytes = copy_shape(p, kRows).elements() * 2; bytes > kMostBytes)
    return text("its mask tensor takes ", bytes, " bytes as a copy in 16 bits; it copies up to ", kMostBytes);
  return {};
}

}  // namespace octet::cuda
