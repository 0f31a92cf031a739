#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/error.h"
#include "core/names.h"
#include "cuda/host/launch.h"
#include "cuda/host/status.h"
#include "cuda/operands/cast.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/key_mask.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostTileKeys = 256;  // of any kernel that reads packed keys with dropout

// The keys of the rows of a mask.
struct KeyList {
  int* ranks;         // [row, key]: the place of a seen key among the packed ones, -1: hidden
  int* counts;        // [row]
  int* places;        // [row, places_stride]: by ranks, as KeyPlaces has them; null: not needed
  int places_stride;  // at least the keys and those of a tile that begins with the last
};

// Returns the bits of 32 keys that belong to blocks of 16 of which all are seen.
__device__ unsigned whole_blocks(unsigned seen) {
  return ((seen & 0xffff) == 0xffff ? 0xffff : 0) | (seen >> 16 == 0xffff ? 0xffff0000 : 0);
}

// Lists the keys of row blockIdx.x of a mask: each warp has a run of whole words of 32 keys. The blocks of 16 keys that
// are seen whole come first, so that packed keys lie in blocks that were blocks before, as dropout needs them.
constexpr int kListThreads = 1024, kListWarps = kListThreads / 32;
__global__ void __launch_bounds__(kListThreads)
    list_kernel(const unsigned char* mask, int64_t batch_stride, int64_t key_stride, int keys, const KeyList list) {
  // Counts the seen keys of a warp in whole blocks and the rest, and has the first and the last key of the rest.
  struct Found {
    int whole, rest, first_of_rest, last_of_rest;
  };
  __shared__ Found found_by_warp[kListWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int words = (keys + 31) / 32, of_warp = (words + kListWarps - 1) / kListWarps;
  const int first = min(warp * of_warp, words), last = min(first + of_warp, words);
  const unsigned char* const row = mask + blockIdx.x * batch_stride;
  const auto seen_keys = [&](int word) {
    const int key = word * 32 + lane;
    return __ballot_sync(~0u, key < keys && row[key * key_stride] != 0);
  };
  Found found{0, 0, keys, -1};
#pragma unroll 4
  for (int word = first; word < last; ++word) {
    const unsigned seen = seen_keys(word), whole = whole_blocks(seen), rest = seen & ~whole;
    found.whole += __popc(whole), found.rest += __popc(rest);
    if (!rest) continue;
    found.first_of_rest = min(found.first_of_rest, word * 32 + __ffs(static_cast<int>(rest)) - 1);
    found.last_of_rest = word * 32 + 31 - __clz(static_cast<int>(rest));
  }
  if (lane == 0) found_by_warp[warp] = found;
  __syncthreads();
  Found before{}, all{0, 0, keys, -1};
  for (int other = 0; other < kListWarps; ++other) {
    if (other == warp) before = all;
    const Found& of_other = found_by_warp[other];
    all.whole += of_other.whole, all.rest += of_other.rest;
    all.first_of_rest = min(all.first_of_rest, of_other.first_of_rest);
    all.last_of_rest = max(all.last_of_rest, of_other.last_of_rest);
  }
  // True: the rest is the start of one block, as it is where padding follows the tokens.
  const bool in_place = all.first_of_rest % 16 == 0 && all.last_of_rest - all.first_of_rest + 1 == all.rest;
  int* const places = list.places ? list.places + int64_t{blockIdx.x} * list.places_stride : nullptr;
#pragma unroll 4
  for (int word = first; word < last; ++word) {
    const unsigned seen = seen_keys(word), whole = whole_blocks(seen), rest = seen & ~whole, lower = (1u << lane) - 1;
    const int key = word * 32 + lane;
    int rank = -1;
    if (whole >> lane & 1) {
      rank = before.whole + __popc(whole & lower);
      if (places) places[rank] = key;
    } else if (rest >> lane & 1) {
      rank = all.whole + before.rest + __popc(rest & lower);
      if (places) places[rank] = in_place ? key : ~key;
    }
    if (key < keys) list.ranks[int64_t{blockIdx.x} * keys + key] = rank;
    before.whole += __popc(whole), before.rest += __popc(rest);
  }
  const int count = all.whole + all.rest;
  if (threadIdx.x == 0) list.counts[blockIdx.x] = count;
  if (places)
    for (int rank = count + static_cast<int>(threadIdx.x); rank < list.places_stride; rank += kListThreads)
      places[rank] = rank;
}

// The keys of a problem by their ranks among the seen ones, for the kernels that copy them.
struct RankedKeys {
  const int *ranks, *counts;
  bool shared;  // by all batch elements
  int batch, tokens;

  // Returns the place of a key among the seen ones of its batch element, or -1.
  __device__ int rank(int element, int64_t token) const {
    return ranks[(shared ? 0 : int64_t{element} * tokens) + token];
  }
  // Returns the number of seen keys of the batch elements before one. All threads of a warp call it together.
  __device__ int before(int element) const {
    if (shared) return element * counts[0];
    int sum = 0;
    for (int other = threadIdx.x % 32; other < element; other += 32) sum += counts[other];
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum;
  }
};

// Two tensors of one type: one has all keys of all batch elements, the other those that are seen, side by side. Where
// rows are copied by words, a word counts as an element.
struct KeyRows {
  Strided all, seen;
};

// Calls f(i, token, place) for `kAtOnce` keys of a batch element, i = 0, 1, ..., and then g(i, token, place) for each
// that exists: so f can start as many loads before g stores the first. `place` is that of the key among the seen ones
// of all batch elements, negative where it is not seen. The thread blocks of a head share its keys, and `threads`
// threads have a row each. Returns the number of seen keys of the batch elements before, which is known only after the
// first ranks have been asked for.
constexpr int kAtOnce = 4;
template <class F, class G>
__device__ int for_keys(const RankedKeys& keys, int element, int threads, const F& f, const G& g) {
  const int rows = kThreads / threads, row = static_cast<int>(threadIdx.x) / threads;
  const int step = rows * static_cast<int>(gridDim.y);
  int first = row < rows ? static_cast<int>(blockIdx.y) * rows + row : keys.tokens;
  int ranks[kAtOnce];
  const auto read_ranks = [&] {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      ranks[i] = first + i * step < keys.tokens ? keys.rank(element, first + i * step) : -1;
  };
  read_ranks();
  const int before = keys.before(element);
  for (; first < keys.tokens; first += kAtOnce * step, read_ranks()) {
    const auto place = [&](int i) { return ranks[i] < 0 ? -1 : before + ranks[i]; };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) f(i, first + i * step, place(i));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * step < keys.tokens) g(i, first + i * step, place(i));
  }
  return before;
}

// Copies the keys of a head: with `packs`, the seen ones side by side, else these back, and zeros to the others. Word:
// void where rows are not whole words. Returns the number of seen keys of the batch elements before.
template <class Word, bool packs>
__device__ int copy_keys(const RankedKeys& keys, const KeyRows& rows, int element, int head) {
  const Strided &from = packs ? rows.all : rows.seen, &to = packs ? rows.seen : rows.all;
  constexpr int kElements = std::is_void_v<Word> ? kVec8 : 1;  // of a thread
  const int threads = static_cast<int>(rows.all.shape[3]) / kElements;
  const int column = static_cast<int>(threadIdx.x) % threads * kElements;
  const auto of_all = [&](int token) { return Index4{element, head, token, column}; };
  const auto of_seen = [&](int place) { return Index4{0, head, place, column}; };
  const auto source = [&](int token, int place) { return packs ? of_all(token) : of_seen(place); };
  const auto target = [&](int token, int place) { return packs ? of_seen(place) : of_all(token); };
  if constexpr (std::is_void_v<Word>) {
    const auto nothing = [](int, int, int) {};
    return for_keys(keys, element, threads, nothing, [&](int, int token, int place) {
      Vec8 x{};
      if (place >= 0) read(from, source(token, place), x);
      if (place >= 0 || !packs) write(to, target(token, place), x);
    });
  } else {
    Word words[kAtOnce];
    const auto load = [&](int i, int token, int place) {
      words[i] = Word{};
      if (place >= 0) words[i] = static_cast<const Word*>(from.data)[source(token, place).offset(from)];
    };
    return for_keys(keys, element, threads, load, [&](int i, int token, int place) {
      if (place >= 0 || !packs) static_cast<Word*>(to.data)[target(token, place).offset(to)] = words[i];
    });
  }
}

// Copies k and v, or their gradients: blockIdx.x is (batch element, tensor, head), whose tokens are shared among
// blockIdx.y. Packing writes the start of each sequence, too.
template <class Word, bool packs>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const RankedKeys keys, const __grid_constant__ KeyRows k, const __grid_constant__ KeyRows v, int heads,
                int queries, int* cu_seqlens_q, int* cu_seqlens_k) {
  const int tensor_head = static_cast<int>(blockIdx.x) % (2 * heads);
  const int element = static_cast<int>(blockIdx.x) / (2 * heads);
  const int before = copy_keys<Word, packs>(keys, tensor_head < heads ? k : v, element, tensor_head % heads);
  if (packs && blockIdx.y == 0 && tensor_head == 0 && threadIdx.x == 0) {
    cu_seqlens_q[element] = element * queries, cu_seqlens_k[element] = before;
    if (element == keys.batch - 1) {
      cu_seqlens_q[keys.batch] = cu_seqlens_q[keys.batch + 1] = keys.batch * queries;
      cu_seqlens_k[keys.batch] = before + keys.counts[keys.shared ? 0 : element];
      cu_seqlens_k[keys.batch + 1] = keys.batch * keys.tokens;
    }
  }
}

// Copies the keys of k and v, or of their gradients, between all tokens and those that are seen.
template <bool packs>
void copy_keys(const RankedKeys& keys, const View& k, const View& seen_k, const View& v, const View& seen_v,
               int queries, int* cu_seqlens_q, int* cu_seqlens_k, cudaStream_t stream) {
  const auto launch = [&](auto* word, const KeyRows& k_rows, const KeyRows& v_rows) {
    const auto heads = static_cast<int>(k.shape[1]);
    constexpr int kMostBlocks = 65535;  // of a head
    // The keys that a thread block copies at once, as each of its threads copies kAtOnce words.
    const auto tokens = static_cast<int>(kAtOnce * kThreads * kVec8 / std::max(k.shape[3], v.shape[3]));
    const dim3 grid(static_cast<unsigned>(2 * heads * keys.batch),
                    static_cast<unsigned>(std::clamp((keys.tokens + tokens - 1) / tokens, 1, kMostBlocks)));
    copy_kernel<std::remove_pointer_t<decltype(word)>, packs>
        <<<grid, kThreads, 0, stream>>>(keys, k_rows, v_rows, heads, queries, cu_seqlens_q, cu_seqlens_k);
    check(cudaGetLastError(), "copy_kernel");
  };
  const auto by_words = [&](auto* word) {
    const int64_t bytes = sizeof *word;
    for (const View* t : {&k, &seen_k, &v, &seen_v}) {
      const auto size = static_cast<int>(bytes_of(t->dtype));
      if (bytes != (size == 1 ? 8 : 16) || !in_words(strided(*t), size)) return false;
    }
    launch(word, {of_words(k, bytes), of_words(seen_k, bytes)}, {of_words(v, bytes), of_words(seen_v, bytes)});
    return true;
  };
  if (by_words(static_cast<uint4*>(nullptr)) || by_words(static_cast<uint2*>(nullptr))) return;
  launch(static_cast<void*>(nullptr), {strided(k), strided(seen_k)}, {strided(v), strided(seen_v)});
}

RankedKeys ranked_keys(const View& mask, const View& k, const int* ranks, const int* counts) {
  return {ranks, counts, !mask.stride[0], static_cast<int>(k.shape[0]), static_cast<int>(k.shape[2])};
}

}  // namespace

std::optional<std::string> no_key_mask_reason(const Problem& p) {
  if (p.mask.dtype != OCTET_BOOL)
    return text("its mask tensor is ", name(p.mask.dtype), "; it takes bool ones of shape [batch or 1, 1, 1, keys]");
  if (p.mask.stride[1] || p.mask.stride[2])
    return text("its mask tensor has shape ", shape_text(p.mask.shape),
                "; it takes bool ones of shape [batch or 1, 1, 1, keys]");
  if (p.windowed) return "it takes no mask tensor together with a causal mask or a window";
  if (p.alibi_slopes.present()) return "it takes no mask tensor together with alibi_slopes";
  // Their gradients are apart even where the sinks are one tensor in memory.
  if (p.sinks.shape[0] > 1) return "it takes no mask tensor together with sinks of batch elements";
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}})
    if (t->quantization) return text(label, " is quantized; it takes a mask tensor with q, k and v that are not");
  constexpr int64_t kMostHeads = std::numeric_limits<int32_t>::max() / 2;  // k and v together are a grid
  if (p.batch * p.kv_heads > kMostHeads)
    return text("k has ", p.batch * p.kv_heads, " heads in all batch elements; with a mask tensor it takes up to ",
                kMostHeads);
  return {};
}

// Passes tell packed sequences by the address of their lengths, also where they only count bytes.
PackedKeys::PackedKeys(const Problem& p, void* workspace)
    : PackedKeys(p, WorkspaceAllocator(workspace ? workspace : reinterpret_cast<void*>(std::uintptr_t{256}))) {}

PackedKeys::PackedKeys(const Problem& p, WorkspaceAllocator&& workspace)
    : problem_(p),
      mask_(p.mask),
      k_(p.k),
      v_(p.v),
      tk_(p.tk),
      tv_(p.tv),
      dk_(p.dk),
      dv_(p.dv),
      queries_(p.tokens_q),
      q_(p.q, workspace),
      tq_(p.tq, workspace),
      o_(p.o, workspace),
      o_residual_(p.o_residual, workspace),
      lse_(p.lse, workspace),
      to_(p.to, workspace),
      tlse_(p.tlse, workspace),
      do_(p.do_, workspace),
      dlse_(p.dlse, workspace),
      dq_(p.dq, workspace) {
  const auto rows = static_cast<std::size_t>(p.mask.stride[0] ? p.batch : 1);
  ranks_ = workspace.take<int>(rows * static_cast<std::size_t>(p.tokens_k));
  counts_ = workspace.take<int>(rows);
  if (p.dropout) {
    const int64_t stride = p.tokens_k + kMostTileKeys;
    auto* const places = workspace.take<int>(rows * static_cast<std::size_t>(stride));
    problem_.key_places = {OCTET_I32, places, {1, 1, p.batch, stride}, {0, 0, p.mask.stride[0] ? stride : 0, 1}};
  }
  const int64_t sequences = p.batch + 1;
  cu_seqlens_q_ = workspace.take<int>(static_cast<std::size_t>(sequences) + 1);
  cu_seqlens_k_ = workspace.take<int>(static_cast<std::size_t>(sequences) + 1);
  problem_.mask = {};
  problem_.batch = 1, problem_.tokens_q = p.batch * p.tokens_q, problem_.tokens_k = p.batch * p.tokens_k;
  problem_.max_seqlen_q = p.tokens_q, problem_.max_seqlen_k = p.tokens_k;
  problem_.cu_seqlens_q = cu_seqlens(cu_seqlens_q_, sequences);
  problem_.cu_seqlens_k = cu_seqlens(cu_seqlens_k_, sequences);
  problem_.q = q_.view(), problem_.o = o_.view(), problem_.o_residual = o_residual_.view();
  problem_.lse = lse_.view(), problem_.do_ = do_.view(), problem_.dlse = dlse_.view(), problem_.dq = dq_.view();
  problem_.tq = tq_.view(), problem_.to = to_.view(), problem_.tlse = tlse_.view();
  problem_.k = packed_tokens(p.k, p.batch * p.tokens_k, workspace),
  problem_.v = packed_tokens(p.v, p.batch * p.tokens_k, workspace);
  problem_.tk = packed_tokens(p.tk, p.batch * p.tokens_k, workspace),
  problem_.tv = packed_tokens(p.tv, p.batch * p.tokens_k, workspace);
  problem_.dk = packed_tokens(p.dk, p.batch * p.tokens_k, workspace),
  problem_.dv = packed_tokens(p.dv, p.batch * p.tokens_k, workspace);
  bytes_ = workspace.used();
}

void PackedKeys::preprocess(cudaStream_t stream) const {
  if (!k_.shape[0] || !k_.shape[1]) return;
  const DeviceScope device(problem_.device_index);
  const RankedKeys keys = ranked_keys(mask_, k_, ranks_, counts_);
  const View& places = problem_.key_places;
  list_kernel<<<keys.shared ? 1 : keys.batch, kListThreads, 0, stream>>>(
      static_cast<const unsigned char*>(mask_.data), mask_.stride[0], mask_.stride[3], keys.tokens,
      {ranks_, counts_, static_cast<int*>(places.data), static_cast<int>(places.shape[3])});
  check(cudaGetLastError(), "list_kernel");
  copy_keys<true>(keys, k_, problem_.k, v_, problem_.v, static_cast<int>(queries_), cu_seqlens_q_, cu_seqlens_k_,
                  stream);
  // The kernel copies two tensors: where one tangent is absent, the other twice.
  const bool k = tk_.present(), v = tv_.present();
  if (k || v)
    copy_keys<true>(keys, k ? tk_ : tv_, k ? problem_.tk : problem_.tv, v ? tv_ : tk_, v ? problem_.tv : problem_.tk,
                    static_cast<int>(queries_), cu_seqlens_q_, cu_seqlens_k_, stream);
  for (const MergedBatch* t : {&q_, &tq_, &do_}) t->copy_in(stream);
  if (problem_.pass == OCTET_BACKWARD)
    for (const MergedBatch* t : {&o_, &o_residual_, &lse_, &dlse_}) t->copy_in(stream);
}

void PackedKeys::deliver(cudaStream_t stream) const {
  if (!k_.shape[0] || !k_.shape[1]) return;
  const DeviceScope device(problem_.device_index);
  if (problem_.pass != OCTET_BACKWARD) {
    for (const MergedBatch* t : {&o_, &o_residual_, &lse_, &to_, &tlse_}) t->copy_out(stream);
    return;
  }
  dq_.copy_out(stream);
  if (!dk_.elements() && !dv_.elements()) return;
  copy_keys<false>(ranked_keys(mask_, k_, ranks_, counts_), dk_, problem_.dk, dv_, problem_.dv, 0, nullptr, nullptr,
                   stream);
}

}  // namespace octet::cuda
