// Quantizes all operands in one launch. Thread blocks take items in an order in which all statistics come first and the
// items that wait for them later, so that no thread block waits for an item that nobody works on.
#include <algorithm>

#include "cuda/host/card.h"
#include "cuda/host/launch.h"
#include "cuda/operands/quantize/stats.h"
#include "cuda/operands/quantize/v.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {
namespace {

constexpr int kItemBytes = 1 << 14;  // of quantized values
// The thread blocks on a multiprocessor: as many as there are registers for.
template <class VType, class VecLoader, int Dim>
constexpr int kBlocks = !VecLoader::kWhole || Dim == 256                                  ? 2
                        : !VecLoader::kPairs || (std::is_same_v<VType, S8> && Dim == 128) ? 3
                                                                                          : 4;

// Code for GPUs before compute capability 8.9 has no conversions to e4m3: it quantizes to int8 alone. It needs more
// registers, which fewer thread blocks have.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kHasE4m3 = false;
constexpr int kMostBlocks = 3;
#else
constexpr bool kHasE4m3 = true;
constexpr int kMostBlocks = 4;
#endif

enum class Task : int { stats_k, stats_v, queries, keys, values, none };
struct WorkItem {
  Task task;
  int batch_head;  // (batch, kv head); (batch, head) for queries
  int number;
};

// The order of the items. First come the statistics of all (batch, kv head), from the one `lag` on together with the
// queries of the one `lag` before; then the last queries, while the last statistics end; then keys and values from the
// last (batch, kv head) back, as its k and v may still be in L2.
struct Order {
  int batch_heads, group, lag;  // group: heads of q for each of k
  int chunks, stats_count;      // chunks: of k and of v each; stats_count: how many of both have statistics
  int queries, keys, values;    // queries: of each head of q
  bool k_stats;

  __host__ __device__ int stats_items() const { return chunks * stats_count; }
  __host__ __device__ int query_items() const { return group * queries; }
  __host__ __device__ int items() const { return stats_items() + query_items() + keys + values; }

  __device__ WorkItem stats(int batch_head, int i) const {
    const bool of_k = k_stats && i < chunks;
    return {of_k ? Task::stats_k : Task::stats_v, batch_head, i < chunks ? i : i - chunks};
  }
  __device__ WorkItem query(int batch_head, int i) const {
    return {Task::queries, batch_head * group + i / queries, i % queries};
  }

  __device__ WorkItem at(unsigned number) const {
    const unsigned n_stats = stats_items(), n_queries = query_items(), n_quantized = keys + values;
    if (number < lag * n_stats) return stats(number / n_stats, number % n_stats);
    number -= lag * n_stats;
    if (number < (batch_heads - lag) * (n_stats + n_queries)) {
      const unsigned batch_head = number / (n_stats + n_queries), i = number % (n_stats + n_queries);
      return i < n_stats ? stats(batch_head + lag, i) : query(batch_head, i - n_stats);
    }
    number -= (batch_heads - lag) * (n_stats + n_queries);
    if (number < lag * n_queries) return query(batch_heads - lag + number / n_queries, number % n_queries);
    number -= lag * n_queries;
    if (number >= batch_heads * n_quantized) return {Task::none};
    const int batch_head = batch_heads - 1 - static_cast<int>(number / n_quantized), i = number % n_quantized;
    return i < keys ? WorkItem{Task::keys, batch_head, i} : WorkItem{Task::values, batch_head, i - keys};
  }
};

template <int Dim>
struct Shared {
  union {
    RowsShared<Dim> rows;
    StatsShared<Dim> stats;
  };
  uint4 signs[Dim / 4];  // as in RowReader
  WorkItem item, next;
  unsigned number;
};

template <class QkType, class VType, class VecLoader, int Dim>
__global__ void __launch_bounds__(kQuantizeThreads, (std::min(kMostBlocks, kBlocks<VType, VecLoader, Dim>)))
    quantize_kernel(const __grid_constant__ QuantizeKernelParams p, const __grid_constant__ Order order) {
  if constexpr (!kHasE4m3 && std::is_same_v<QkType, E4m3>) return;
  extern __shared__ __align__(128) uint4 bytes[];
  auto& shared = *reinterpret_cast<Shared<Dim>*>(bytes);
  auto* const words = reinterpret_cast<uint32_t*>(&shared + 1);
  const Rows<QkType, VecLoader, Dim> rows(p, shared.rows, shared.signs);
  const QuantizeParams& a = p.args;
  for (int c = threadIdx.x; c < Dim; c += kQuantizeThreads) {
    const bool negative = a.rotation.negative[c / 32] >> c % 32 & 1;
    if constexpr (VecLoader::kPairs)
      reinterpret_cast<uint16_t*>(shared.signs)[c] = negative ? 0x8000 : 0;
    else
      reinterpret_cast<float*>(shared.signs)[c] = negative ? -1.f : 1.f;
  }
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  // Thread 0 takes numbers two items ahead; a number becomes the next item while its predecessor is worked on. Both are
  // in shared memory, as rows need all registers. The threads meet within each item.
  const auto take_number = [&] { shared.number = atomicAdd(p.scratch.next_item, 1u); };
  if (threadIdx.x == 0) take_number(), shared.item = order.at(shared.number), take_number();
  while (true) {
    __syncthreads();
    const WorkItem item = shared.item;
    if (threadIdx.x == 0) shared.next = order.at(shared.number), take_number();
    const auto tiles = [&](int of_item, const auto& f) {
      const int first = item.number * of_item;
      f(item.batch_head, first, min(of_item, a.keys.count() - first));
    };
    switch (item.task) {
      case Task::stats_k:
      case Task::stats_v:
        StatsOfChannels<VecLoader, Dim>{p, shared.stats}.compute(item.task == Task::stats_k ? StatsOf::k : StatsOf::v,
                                                                 item.batch_head, item.number);
        break;
      case Task::queries:
        rows.queries(item.batch_head, item.number * p.queries, p.queries);
        break;
      case Task::keys:
        tiles(p.key_tiles, [&](int batch_head, int first, int count) { rows.keys(batch_head, first, count); });
        break;
      case Task::values:
        if constexpr (std::is_same_v<VType, S8>)
          TokenValues<VType, VecLoader, Dim>(p, shared.rows, words).values(item.batch_head, item.number);
        else if constexpr (kHasE4m3)
          tiles(p.value_tiles, [&](int batch_head, int first, int count) {
            ChannelValues<VType, VecLoader, Dim>{p, shared.rows.offset}.values(batch_head, first, count);
          });
        break;
      case Task::none:
        return;
    }
    if (threadIdx.x == 0) shared.item = shared.next;
  }
}

// Returns how many groups of `size` hold `all`.
int groups_of(int64_t all, int64_t size) { return static_cast<int>((all + size - 1) / size); }
std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// Returns the tokens of a chunk of statistics: more where there are many, as each chunk has a cost at its end.
int chunk_of(int least, int64_t tokens) {
  constexpr int kStats = 1024, kMost = 2;
  int chunk = least;
  while (chunk < kMost * least && tokens >= int64_t{2} * kStats * chunk) chunk *= 2;
  return chunk;
}

QuantizeKernelParams quantize_kernel_params(const QuantizeParams& a) {
  QuantizeKernelParams p{.args = a, .chunks = a.keys};
  const int64_t batch = a.v.shape[0];
  p.sequence_heads = static_cast<int>((a.keys.cu_seqlens ? a.keys.sequences : batch) * a.kv_heads);
  const bool packed = a.keys.cu_seqlens;
  p.queries = kItemBytes / a.dim;
  p.key_tiles = packed || a.block_means.mean ? 1 : groups_of(p.queries, a.keys.tile);
  p.value_tiles = packed || a.v_type == QuantizedFormat::s8 ? 1 : 2 * p.key_tiles;
  p.chunks.tile = packed ? p.queries : chunk_of(p.queries, batch * a.kv_heads * a.keys.tokens);
  p.stats_of_k = a.channels.k_mean;
  p.stats_of_v = a.channels.v_mean || a.channels.v_scale;
  return p;
}

// Allocates the scratch memory; returns the bytes used.
std::size_t allocate_scratch(QuantizeKernelParams& p, void* scratch) {
  auto* const base = static_cast<unsigned char*>(scratch);
  constexpr int kStats = static_cast<int>(StatsOf::count);
  auto* const numbers = reinterpret_cast<unsigned*>(base);
  p.scratch.next_item = numbers + 1;
  p.scratch.arrived = numbers + 2, p.scratch.ready = p.scratch.arrived + kStats * p.sequence_heads;
  p.scratch.infinite = p.scratch.ready + kStats * p.sequence_heads;
  p.scratch.zeros = (3 + 2 * kStats * static_cast<std::size_t>(p.sequence_heads)) * sizeof(unsigned);
  const QuantizeParams& a = p.args;
  const auto count = static_cast<std::size_t>(a.v.shape[0] * a.kv_heads * p.chunks.count() * a.dim);
  std::size_t used = aligned(p.scratch.zeros);
  const auto take = [&](std::size_t size) {
    unsigned char* const at = base ? base + used : nullptr;
    used += aligned(size);
    return at;
  };
  for (double*& sum : p.scratch.sum) sum = reinterpret_cast<double*>(take(count * sizeof(double)));
  p.scratch.most = reinterpret_cast<float*>(take(count * sizeof(float)));
  for (float*& limit : p.scratch.limit)
    limit = reinterpret_cast<float*>(take(static_cast<std::size_t>(p.sequence_heads) * sizeof(float)));
  return used;
}

template <class QkType, class VType, class VecLoader, int Dim>
void launch(const QuantizeKernelParams& p, const Order& order, cudaStream_t stream) {
  constexpr auto kernel = quantize_kernel<QkType, VType, VecLoader, Dim>;
  const int transpose_bytes =
      std::is_same_v<VType, S8> ? TokenValues<VType, VecLoader, Dim>::bytes(p.args.keys.tile) : 0;
  const int bytes = static_cast<int>(sizeof(Shared<Dim>)) + transpose_bytes;
  const int processors = current_card().multiprocessors;
  const int64_t items = static_cast<int64_t>(order.batch_heads) * order.items();
  const auto grid = static_cast<unsigned>(std::min<int64_t>(items, processors * kBlocks<VType, VecLoader, Dim>));
  launch_general_pdl(kernel, grid, kQuantizeThreads, bytes, stream, p, order);
}

__global__ void fill_kernel(const HeadScale q, const HeadScale k, int heads, int group, int tokens, float* scales) {
  const int batch_head = blockIdx.y, batch = batch_head / heads, head = batch_head % heads;
  const float scale = q.at(batch, head) * k.at(batch, head / group);
  for (int i = blockIdx.x * kQuantizeThreads + threadIdx.x; i < tokens; i += gridDim.x * kQuantizeThreads)
    scales[static_cast<int64_t>(batch_head) * tokens + i] = scale;
}

}  // namespace

void fill_scales(const HeadScale& q, const HeadScale& k, int batch, int heads, int kv_heads, int tokens, float* scales,
                 cudaStream_t stream) {
  if (!batch || !heads || !tokens) return;
  fill_kernel<<<dim3((tokens + kQuantizeThreads - 1) / kQuantizeThreads, batch * heads), kQuantizeThreads, 0, stream>>>(
      q, k, heads, heads / kv_heads, tokens, scales);
  check(cudaGetLastError(), "fill_scales");
}

std::size_t quantize_scratch_bytes(const QuantizeParams& a) {
  QuantizeKernelParams p = quantize_kernel_params(a);
  return allocate_scratch(p, nullptr);
}

void quantize(const QuantizeParams& a, void* scratch, cudaStream_t stream) {
  QuantizeKernelParams p = quantize_kernel_params(a);
  allocate_scratch(p, scratch);
  const int batch_heads = static_cast<int>(a.v.shape[0]) * a.kv_heads;
  Order order{.batch_heads = batch_heads,
              .group = a.heads / a.kv_heads,
              .lag = groups_of(batch_heads, 2),
              .chunks = p.chunks.count(),
              .stats_count = p.stats_of_k + p.stats_of_v,
              .queries = a.q_type == QuantizedFormat::none ? 0 : groups_of(a.q.shape[2], p.queries),
              .keys = a.k_type == QuantizedFormat::none ? 0 : groups_of(a.keys.count(), p.key_tiles),
              .values = a.v_type == QuantizedFormat::none ? 0 : groups_of(a.keys.count(), p.value_tiles),
              .k_stats = p.stats_of_k};
  find_limits(p, scratch, stream);
  if (a.block_means.mean) find_block_means(p, stream);
  if (!batch_heads || !order.items()) return;
  constexpr QuantizedFormat none = QuantizedFormat::none;
  const Strided& v = a.v_type == none && !p.stats_of_v ? a.k : a.v;
  const bool stats_alone = a.q_type == none && a.k_type == none && a.v_type == none;
  with_loader({&a.q, &a.k, &v}, [&](auto vectors) {
    using VecLoader = decltype(vectors);
    const auto with_dim = [&](auto q_type, auto v_type) {
      using QkType = decltype(q_type);
      using VType = decltype(v_type);
      a.dim == 64 ? launch<QkType, VType, VecLoader, 64>(p, order, stream)
                  : launch<QkType, VType, VecLoader, 128>(p, order, stream);
    };
    if (a.dim == 256)
      a.v_type == QuantizedFormat::s8 ? launch<S8, S8, VecLoader, 256>(p, order, stream)
                                      : launch<S8, E4m3, VecLoader, 256>(p, order, stream);
    else if (a.v_type == QuantizedFormat::s8)
      with_dim(S8{}, S8{});
    else if (a.q_type == QuantizedFormat::s8 || stats_alone)
      with_dim(S8{}, E4m3{});
    else
      with_dim(E4m3{}, E4m3{});
  });
}

}  // namespace octet::cuda
