// One launch for all codes. Thread blocks draw units of work in an order in which all surveys come first and whatever
// waits for them later, so that nobody waits for a unit that nobody works on.
#include <algorithm>

#include "cuda/host/status.h"
#include "cuda/quant/survey.h"
#include "cuda/quant/values.h"

namespace octet::cuda {
namespace {

constexpr int kUnitBytes = 1 << 14;  // of codes
// Thread blocks on a multiprocessor: as many as there are registers for.
template <class VCode, class Vectors, int Dim>
constexpr int kBlocks = !Vectors::kWhole || Dim == 256            ? 2
                        : std::is_same_v<VCode, S8> && Dim == 128 ? 3
                                                                  : 4;

enum class Task : int { survey_k, survey_v, queries, keys, values, none };
struct Unit {
  Task task;
  int side;  // (batch, kv head), of queries (batch, head)
  int number;
};

// The units of each (batch, kv head). First come the surveys of all, then, from the last head back, as its k and v may
// still be in L2, queries, keys and values.
struct Order {
  int sides, group;           // group: heads of q for each of k
  int chunks, surveys;        // of each k and v; how many of both are surveyed
  int queries, keys, values;  // queries: of a head of q
  bool k_surveyed;

  __host__ __device__ int survey_units() const { return chunks * surveys; }
  __host__ __device__ int code_units() const { return group * queries + keys + values; }

  __device__ Unit at(unsigned number) const {
    const unsigned surveyed = survey_units(), coded = code_units(), first = sides * surveyed;
    if (number < first) {
      const int side = number / surveyed, i = number % surveyed;
      const bool of_k = k_surveyed && i < chunks;
      return {of_k ? Task::survey_k : Task::survey_v, side, i < chunks ? i : i - chunks};
    }
    const int side = sides - 1 - static_cast<int>((number - first) / coded);
    int i = (number - first) % coded;
    if (side < 0) return {Task::none};
    if (i < group * queries) return {Task::queries, side * group + i / queries, i % queries};
    i -= group * queries;
    return i < keys ? Unit{Task::keys, side, i} : Unit{Task::values, side, i - keys};
  }
};

template <int Dim>
struct Shared {
  union {
    RowsShared<Dim> rows;
    SurveyShared<Dim> survey;
  };
  alignas(16) float signs[Dim];  // of the rotation
  Unit unit;
};

template <class QCode, class VCode, class Vectors, int Dim>
__global__ void __launch_bounds__(kPrepareThreads, (kBlocks<VCode, Vectors, Dim>))
    prepare_kernel(const __grid_constant__ Preparation p, const __grid_constant__ Order order) {
  extern __shared__ uint4 bytes[];
  auto& shared = *reinterpret_cast<Shared<Dim>*>(bytes);
  auto* const words = reinterpret_cast<uint32_t*>(&shared + 1);
  const Rows<QCode, Vectors, Dim> rows(p, shared.rows, shared.signs);
  constexpr int kUnitRows = kUnitBytes / Dim;
  const CodesArguments& a = p.codes;
  for (int c = threadIdx.x; c < Dim; c += kPrepareThreads)
    shared.signs[c] = a.rotation.negative[c / 32] >> c % 32 & 1 ? -1.f : 1.f;
  unsigned next = 0;
  if (threadIdx.x == 0) next = atomicAdd(p.scratch.drawn, 1u);
  while (true) {
    if (threadIdx.x == 0) {
      shared.unit = order.at(next);
      next = atomicAdd(p.scratch.drawn, 1u);
    }
    __syncthreads();
    const Unit unit = shared.unit;
    const int first = unit.number * p.tiles, tiles = min(p.tiles, a.keys.count() - first);
    switch (unit.task) {
      case Task::survey_k:
      case Task::survey_v:
        Surveyor<Vectors, Dim>{p, shared.survey}.look(unit.task == Task::survey_k ? Survey::k : Survey::v, unit.side,
                                                      unit.number);
        break;
      case Task::queries:
        rows.queries(unit.side, unit.number * kUnitRows, kUnitRows);
        break;
      case Task::keys:
        rows.keys(unit.side, first, tiles);
        break;
      case Task::values:
        if constexpr (std::is_same_v<VCode, S8>)
          TokenValues<VCode, Vectors, Dim>(p, shared.rows, words).values(unit.side, unit.number);
        else
          ChannelValues<VCode, Vectors, Dim>{p, shared.rows.offset}.values(unit.side, first, tiles);
        break;
      case Task::none:
        return;
    }
    __syncthreads();
  }
}

// How many of a size hold all.
int parts(int64_t all, int64_t size) { return static_cast<int>((all + size - 1) / size); }
std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

Preparation preparation_of(const CodesArguments& a) {
  Preparation p{.codes = a, .chunks = a.keys};
  p.chunks.tile = kUnitBytes / a.dim;
  const int64_t batch = a.v.shape[0];
  p.sequence_sides = static_cast<int>((a.keys.cu_seqlens ? a.keys.sequences : batch) * a.kv_heads);
  p.tiles = a.keys.cu_seqlens || a.v_code == Code::s8 ? 1 : parts(kUnitBytes / a.dim, a.keys.tile);
  p.surveys_k = a.channels.k_mean;
  p.surveys_v = a.channels.v_mean || a.channels.v_step;
  return p;
}

// Returns the bytes used.
std::size_t carve(Preparation& p, void* scratch) {
  auto* const base = static_cast<unsigned char*>(scratch);
  constexpr int kSurveys = static_cast<int>(Survey::count);
  auto* const numbers = reinterpret_cast<unsigned*>(base);
  p.scratch.drawn = numbers;
  p.scratch.arrived = numbers + 1, p.scratch.ready = p.scratch.arrived + kSurveys * p.sequence_sides;
  p.scratch.zeros = (1 + 2 * kSurveys * static_cast<std::size_t>(p.sequence_sides)) * sizeof(unsigned);
  const CodesArguments& a = p.codes;
  const auto count = static_cast<std::size_t>(a.v.shape[0] * a.kv_heads * p.chunks.count() * a.dim);
  std::size_t used = aligned(p.scratch.zeros);
  const auto take = [&](std::size_t size) {
    unsigned char* const at = base ? base + used : nullptr;
    used += aligned(size);
    return at;
  };
  for (double*& sum : p.scratch.sum) sum = reinterpret_cast<double*>(take(count * sizeof(double)));
  p.scratch.most = reinterpret_cast<float*>(take(count * sizeof(float)));
  return used;
}

template <class QCode, class VCode, class Vectors, int Dim>
void launch(const Preparation& p, const Order& order, int device, cudaStream_t stream) {
  constexpr auto kernel = prepare_kernel<QCode, VCode, Vectors, Dim>;
  const int turned = std::is_same_v<VCode, S8> ? TokenValues<VCode, Vectors, Dim>::bytes(p.codes.keys.tile) : 0;
  const int bytes = static_cast<int>(sizeof(Shared<Dim>)) + turned;
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  const int64_t units = static_cast<int64_t>(order.sides) * (order.survey_units() + order.code_units());
  const auto grid = static_cast<unsigned>(std::min<int64_t>(units, processors * kBlocks<VCode, Vectors, Dim>));
  kernel<<<grid, kPrepareThreads, bytes, stream>>>(p, order);
  check(cudaGetLastError(), "prepare");
}

__global__ void fill_kernel(const HeadScale q, const HeadScale k, int heads, int group, int tokens, float* steps) {
  const int side = blockIdx.y, batch = side / heads, head = side % heads;
  const float step = q.at(batch, head) * k.at(batch, head / group);
  for (int i = blockIdx.x * kPrepareThreads + threadIdx.x; i < tokens; i += gridDim.x * kPrepareThreads)
    steps[static_cast<int64_t>(side) * tokens + i] = step;
}

}  // namespace

void fill_steps(const HeadScale& q, const HeadScale& k, int batch, int heads, int kv_heads, int tokens, float* steps,
                cudaStream_t stream) {
  if (!batch || !heads || !tokens) return;
  fill_kernel<<<dim3((tokens + kPrepareThreads - 1) / kPrepareThreads, batch * heads), kPrepareThreads, 0, stream>>>(
      q, k, heads, heads / kv_heads, tokens, steps);
  check(cudaGetLastError(), "fill_steps");
}

std::size_t preparation_bytes(const CodesArguments& a) {
  Preparation p = preparation_of(a);
  return carve(p, nullptr);
}

void prepare(const CodesArguments& a, void* scratch, cudaStream_t stream) {
  Preparation p = preparation_of(a);
  carve(p, scratch);
  const int sides = static_cast<int>(a.v.shape[0]) * a.kv_heads, tiles = parts(a.keys.count(), p.tiles);
  Order order{.sides = sides,
              .group = a.heads / a.kv_heads,
              .chunks = p.chunks.count(),
              .surveys = p.surveys_k + p.surveys_v,
              .queries = a.q_code == Code::none ? 0 : parts(a.q.shape[2], kUnitBytes / a.dim),
              .keys = a.k_code == Code::none ? 0 : tiles,
              .values = a.v_code == Code::none ? 0 : tiles,
              .k_surveyed = p.surveys_k};
  if (!sides || !order.code_units()) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaMemsetAsync(scratch, 0, p.scratch.zeros, stream), "cudaMemsetAsync");
  const Strided& v = a.v_code == Code::none ? a.k : a.v;
  with_vectors({&a.q, &a.k, &v}, [&](auto vectors) {
    using Vectors = decltype(vectors);
    const auto with_dim = [&](auto q_code, auto v_code) {
      using QCode = decltype(q_code);
      using VCode = decltype(v_code);
      a.dim == 64 ? launch<QCode, VCode, Vectors, 64>(p, order, device, stream)
                  : launch<QCode, VCode, Vectors, 128>(p, order, device, stream);
    };
    if (a.dim == 256)
      launch<S8, E4m3, Vectors, 256>(p, order, device, stream);
    else if (a.v_code == Code::s8)
      with_dim(S8{}, S8{});
    else if (a.q_code == Code::s8)
      with_dim(S8{}, E4m3{});
    else
      with_dim(E4m3{}, E4m3{});
  });
}

}  // namespace octet::cuda
