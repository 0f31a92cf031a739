#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/prequantized.h"
#include "cuda/host/launch.h"
#include "cuda/host/status.h"
#include "cuda/operands/cache.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {
namespace {

constexpr int kWarp = 32, kThreads = 256;

// Writes where packed sequences begin, by one warp. Lengths beyond `most` keys count as that, as the workspace has room
// for no more.
struct Lengths {
  const int *seqused_k, *cu_seqlens_q;  // of the cache; cu_seqlens_q null: each sequence has `queries`
  int sequences, queries, most;
  bool in_place;  // sequences begin `apart` tokens apart; else keys lie side by side
  int apart, total;
  int *to_q, *to_k;
};
__global__ void lengths_kernel(const __grid_constant__ Lengths x) {
  const int lane = threadIdx.x;
  int before = 0;
  for (int first = 0; first < x.sequences; first += kWarp) {
    const int s = first + lane;
    const bool present = s < x.sequences;
    const int length = present ? min(max(x.seqused_k[s], 0), x.most) : 0;
    const int q = !present ? 0 : x.cu_seqlens_q ? x.cu_seqlens_q[s] : s * x.queries;
    int sum = length;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int lower = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += lower;
    }
    if (present && x.in_place) {
      x.to_q[2 * s] = q, x.to_q[2 * s + 1] = q + x.queries;
      x.to_k[2 * s] = s * x.apart, x.to_k[2 * s + 1] = s * x.apart + length;
    } else if (present) {
      x.to_q[s] = q, x.to_k[s] = before + sum - length;
    }
    before += __shfl_sync(~0u, sum, kWarp - 1);
  }
  if (lane > 0) return;
  const int end = x.in_place ? 2 * x.sequences : x.sequences;
  const int queries = x.cu_seqlens_q ? x.cu_seqlens_q[x.sequences] : x.sequences * x.queries;
  x.to_q[end] = queries, x.to_k[end] = x.in_place ? x.total : before;
  if (!x.in_place) x.to_q[end + 1] = queries, x.to_k[end + 1] = x.total;
}

// A tensor in a cache, and the one of packed sequences that it is copied to. An element is one of the tensor or a word.
struct CacheRows {
  Strided cache, packed;
};

// Copies the keys of a head of a sequence: blockIdx.x is (sequence, tensor, head), whose tokens are shared among
// blockIdx.y.
template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_cache_kernel(const PageTable pages, const __grid_constant__ CacheRows k, const __grid_constant__ CacheRows v,
                      int heads, const int* cu_seqlens) {
  const int tensor_head = static_cast<int>(blockIdx.x) % (2 * heads), head = tensor_head % heads;
  const int sequence = static_cast<int>(blockIdx.x) / (2 * heads);
  const CacheRows& rows = tensor_head < heads ? k : v;
  const int first = cu_seqlens[sequence], length = cu_seqlens[sequence + 1] - first;
  const unsigned columns = static_cast<unsigned>(rows.cache.shape[3]);
  const int64_t all = int64_t{length} * columns, step = int64_t{gridDim.y} * kThreads;
  for (int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x; i < all; i += step) {
    const int token = static_cast<int>(i / columns), column = static_cast<int>(i % columns);
    const Index4 from{pages.page(sequence, token), head, pages.token_in_page(token), column};
    const Index4 to{0, head, first + token, column};
    static_cast<T*>(rows.packed.data)[to.offset(rows.packed)] =
        static_cast<const T*>(rows.cache.data)[from.offset(rows.cache)];
  }
}

// A tensor of a cache beside the one that it is copied to; both absent where there is none.
struct Copied {
  View cache, packed;
};

// Copies the keys of two tensors, of which one may be absent.
void copy_cache(const PageTable& pages, const Copied& k, const Copied& v, int64_t heads, const View& cu_seqlens_k,
                int64_t most_keys, cudaStream_t stream) {
  const View& any = k.cache.present() ? k.cache : v.cache;
  if (!any.present()) return;
  const auto size = static_cast<int>(bytes_of(any.dtype));
  if (k.cache.present() && v.cache.present() && bytes_of(k.cache.dtype) != bytes_of(v.cache.dtype)) {
    copy_cache(pages, k, {}, heads, cu_seqlens_k, most_keys, stream);
    return copy_cache(pages, {}, v, heads, cu_seqlens_k, most_keys, stream);
  }
  const auto launch = [&]<class T>(T*) {
    constexpr int64_t kOfBlock = 16 * kThreads, kMostBlocks = 65535;  // elements of a thread block, blocks of a head
    const auto rows = [](const Copied& x) {
      return x.cache.present() ? CacheRows{of_words(x.cache, sizeof(T)), of_words(x.packed, sizeof(T))} : CacheRows{};
    };
    const CacheRows k_rows = rows(k), v_rows = rows(v);
    const int64_t elements = most_keys * std::max(k_rows.cache.shape[3], v_rows.cache.shape[3]);
    const int64_t sequences = cu_seqlens_k.shape[3] - 2;  // but for the one that has the rest of the memory
    const dim3 grid(static_cast<unsigned>(2 * heads * sequences),
                    static_cast<unsigned>(std::clamp<int64_t>((elements + kOfBlock - 1) / kOfBlock, 1, kMostBlocks)));
    copy_cache_kernel<T><<<grid, kThreads, 0, stream>>>(pages, k_rows, v_rows, static_cast<int>(heads),
                                                        static_cast<const int*>(cu_seqlens_k.data));
    check(cudaGetLastError(), "copy_cache_kernel");
  };
  bool by_words = any.shape[3] > 1;
  for (const View* x : {&k.cache, &k.packed, &v.cache, &v.packed})
    if (x->present()) by_words &= in_words(strided(*x), size);
  if (by_words) return size == 1 ? launch(static_cast<uint2*>(nullptr)) : launch(static_cast<uint4*>(nullptr));
  switch (size) {
    case 4:
      return launch(static_cast<uint32_t*>(nullptr));
    case 2:
      return launch(static_cast<uint16_t*>(nullptr));
    default:
      return launch(static_cast<uint8_t*>(nullptr));
  }
}

int64_t most_keys_of(const Problem& p) { return p.max_seqlen_k ? std::min(p.max_seqlen_k, p.tokens_k) : p.tokens_k; }

}  // namespace

bool lies_in_place(const Problem& p) {
  return !p.block_table.present() && can_merge(p.k) && can_merge(p.v) && !p.alibi_slopes.stride[0] &&
         !p.k.quantization && !p.v.quantization;
}

std::optional<std::string> no_cache_reason(const Problem& p) {
  if (p.sinks.stride[0]) return "it takes no KV cache together with sinks of batch elements";
  if (p.q.quantization) return "q is quantized; it takes a KV cache with a q that is not";
  for (const auto& [t, label] : {std::pair{&p.k, "k"}, {&p.v, "v"}})
    if (const octet_quantization* how = t->quantization;
        how && (how->granularity != OCTET_PER_TOKEN || how->zero_point_kind != OCTET_SYMMETRIC || how->mean))
      return text(label, " is quantized per ", name(static_cast<octet_granularity>(how->granularity)), ", ",
                  name(static_cast<octet_zero_point>(how->zero_point_kind)), how->mean ? ", with a mean" : "",
                  "; it takes a KV cache per token, symmetric, without a mean");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t heads = 2 * p.kv_heads * p.sequence_count();
  if (heads > kMost) return text(heads / 2, " heads of k in all sequences; with a KV cache it takes up to ", kMost / 2);
  return {};
}

PageTable page_table(const Problem& p) {
  const Pages& pages = p.k.pages;
  const bool many = pages.size && pages.columns > 1;
  return {pages.table, pages.stride, many ? std::countr_zero(static_cast<uint64_t>(pages.size)) : 31,
          static_cast<const int*>(p.seqused_k.data), static_cast<int>(most_keys_of(p))};
}

// Passes tell packed sequences by the address of their lengths, also where they only count bytes.
CachedKeys::CachedKeys(const Problem& p, bool reads_pages, void* workspace)
    : CachedKeys(p, reads_pages,
                 WorkspaceAllocator(workspace ? workspace : reinterpret_cast<void*>(std::uintptr_t{256}))) {}

CachedKeys::CachedKeys(const Problem& p, bool reads_pages, WorkspaceAllocator&& workspace)
    : cached_(p),
      problem_(p),
      sequences_(p.sequence_count()),
      most_keys_(most_keys_of(p)),
      in_place_(!reads_pages && lies_in_place(p)),
      packs_(!reads_pages || p.packed()),
      q_(packs_ ? p.q : View{}, workspace),
      o_(packs_ ? p.o : View{}, workspace),
      lse_(packs_ ? p.lse : View{}, workspace) {
  if (reads_pages && !p.k.pages.size)  // a batch element is a page
    problem_.k.pages = problem_.v.pages = {.columns = 1, .size = p.tokens_k};
  if (!packs_) {
    bytes_ = workspace.used();
    return;
  }
  const int64_t sequences = in_place_ ? 2 * sequences_ : sequences_ + 1;
  cu_seqlens_q_ = workspace.take<int>(static_cast<std::size_t>(sequences) + 1);
  cu_seqlens_k_ = workspace.take<int>(static_cast<std::size_t>(sequences) + 1);
  problem_.seqused_k = problem_.block_table = {};
  problem_.cu_seqlens_q = cu_seqlens(cu_seqlens_q_, sequences);
  problem_.cu_seqlens_k = cu_seqlens(cu_seqlens_k_, sequences);
  problem_.max_seqlen_q = p.packed() ? p.max_seqlen_q : p.tokens_q, problem_.max_seqlen_k = most_keys_;
  problem_.batch = 1, problem_.tokens_q = q_.view().shape[2];
  problem_.q = q_.view(), problem_.o = o_.view(), problem_.lse = lse_.view();
  problem_.tokens_k = sequences_ * (in_place_ ? p.tokens_k : most_keys_);
  if (in_place_)
    problem_.k = merged(p.k), problem_.v = merged(p.v);
  else if (!reads_pages)
    problem_.k = packed_tokens(p.k, problem_.tokens_k, workspace),
    problem_.v = packed_tokens(p.v, problem_.tokens_k, workspace), pack_scales(p.k, k_scales_, problem_.k, workspace),
    pack_scales(p.v, v_scales_, problem_.v, workspace);
  bytes_ = workspace.used();
}

void CachedKeys::pack_scales(const View& cache, Scales& scales, View& packed, WorkspaceAllocator& workspace) {
  if (!cache.quantization) return;
  scales.cache = quantization_of(cache).scale;
  scales.packed = packed_tokens(scales.cache, problem_.tokens_k, workspace);
  scales.how = *cache.quantization;
  scales.tensor = *cache.quantization->scale;
  scales.tensor.data = scales.packed.data;
  std::copy_n(scales.packed.shape, 4, scales.tensor.shape);
  std::copy_n(scales.packed.stride, 4, scales.tensor.stride);
  scales.how.scale = &scales.tensor;
  packed.quantization = &scales.how;
}

void CachedKeys::preprocess(cudaStream_t stream) const {
  if (!problem_.o.elements() || !packs_) return;
  const DeviceScope device(problem_.device_index);
  const Lengths lengths{.seqused_k = static_cast<const int*>(cached_.seqused_k.data),
                        .cu_seqlens_q = static_cast<const int*>(cached_.cu_seqlens_q.data),
                        .sequences = static_cast<int>(sequences_),
                        .queries = static_cast<int>(cached_.tokens_q),
                        .most = static_cast<int>(most_keys_),
                        .in_place = in_place_,
                        .apart = static_cast<int>(cached_.tokens_k),
                        .total = static_cast<int>(problem_.tokens_k),
                        .to_q = cu_seqlens_q_,
                        .to_k = cu_seqlens_k_};
  lengths_kernel<<<1, kWarp, 0, stream>>>(lengths);
  check(cudaGetLastError(), "lengths_kernel");
  if (!in_place_ && !in_pages() && problem_.k.elements()) {
    const auto copy = [&](const Copied& k, const Copied& v) {
      copy_cache(page_table(cached_), k, v, cached_.kv_heads, problem_.cu_seqlens_k, most_keys_, stream);
    };
    copy({cached_.k, problem_.k}, {cached_.v, problem_.v});
    copy({k_scales_.cache, k_scales_.packed}, {v_scales_.cache, v_scales_.packed});
  }
  q_.copy_in(stream);
}

void CachedKeys::deliver(cudaStream_t stream) const {
  if (!problem_.o.elements() || !packs_) return;
  const DeviceScope device(problem_.device_index);
  o_.copy_out(stream), lse_.copy_out(stream);
}

}  // namespace octet::cuda
