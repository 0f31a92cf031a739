// One launch for all codes. Thread blocks draw units of work in an order in which all surveys come first and whatever
// waits for them later, so that nobody waits for a unit that nobody works on.
#include <algorithm>

#include "cuda/host/launch.h"
#include "cuda/ptx/grid.h"
#include "cuda/quant/survey.h"
#include "cuda/quant/values.h"

namespace octet::cuda {
namespace {

constexpr int kUnitBytes = 1 << 14;  // of codes
// Thread blocks on a multiprocessor: as many as there are registers for.
template <class VCode, class Vectors, int Dim>
constexpr int kBlocks = !Vectors::kWhole || Dim == 256                                  ? 2
                        : !Vectors::kPairs || (std::is_same_v<VCode, S8> && Dim == 128) ? 3
                                                                                        : 4;

enum class Task : int { survey_k, survey_v, queries, keys, values, none };
struct Unit {
  Task task;
  int side;  // (batch, kv head), of queries (batch, head)
  int number;
};

// The units of each (batch, kv head): surveys of all, with queries of the heads `lag` before; the last queries, while
// surveys end; then, from the last head back, as its k and v may still be in L2, keys and values.
struct Order {
  int sides, group, lag;      // group: heads of q for each of k
  int chunks, surveys;        // of each k and v; how many of both are surveyed
  int queries, keys, values;  // queries: of a head of q
  bool k_surveyed;

  __host__ __device__ int survey_units() const { return chunks * surveys; }
  __host__ __device__ int query_units() const { return group * queries; }
  __host__ __device__ int units() const { return survey_units() + query_units() + keys + values; }

  __device__ Unit survey(int side, int i) const {
    const bool of_k = k_surveyed && i < chunks;
    return {of_k ? Task::survey_k : Task::survey_v, side, i < chunks ? i : i - chunks};
  }
  __device__ Unit query(int side, int i) const { return {Task::queries, side * group + i / queries, i % queries}; }

  __device__ Unit at(unsigned number) const {
    const unsigned surveyed = survey_units(), asked = query_units(), coded = keys + values;
    if (number < lag * surveyed) return survey(number / surveyed, number % surveyed);
    number -= lag * surveyed;
    if (number < (sides - lag) * (surveyed + asked)) {
      const unsigned side = number / (surveyed + asked), i = number % (surveyed + asked);
      return i < surveyed ? survey(side + lag, i) : query(side, i - surveyed);
    }
    number -= (sides - lag) * (surveyed + asked);
    if (number < lag * asked) return query(sides - lag + number / asked, number % asked);
    number -= lag * asked;
    if (number >= sides * coded) return {Task::none};
    const int side = sides - 1 - static_cast<int>(number / coded), i = number % coded;
    return i < keys ? Unit{Task::keys, side, i} : Unit{Task::values, side, i - keys};
  }
};

template <int Dim>
struct Shared {
  union {
    RowsShared<Dim> rows;
    SurveyShared<Dim> survey;
  };
  uint4 signs[Dim / 4];  // as in RowReader
  Unit unit, next;
  unsigned number;
};

template <class QCode, class VCode, class Vectors, int Dim>
__global__ void __launch_bounds__(kPrepareThreads, (kBlocks<VCode, Vectors, Dim>))
    prepare_kernel(const __grid_constant__ Preparation p, const __grid_constant__ Order order) {
  extern __shared__ __align__(128) uint4 bytes[];
  auto& shared = *reinterpret_cast<Shared<Dim>*>(bytes);
  auto* const words = reinterpret_cast<uint32_t*>(&shared + 1);
  const Rows<QCode, Vectors, Dim> rows(p, shared.rows, shared.signs);
  const CodesArguments& a = p.codes;
  for (int c = threadIdx.x; c < Dim; c += kPrepareThreads) {
    const bool negative = a.rotation.negative[c / 32] >> c % 32 & 1;
    if constexpr (Vectors::kPairs)
      reinterpret_cast<uint16_t*>(shared.signs)[c] = negative ? 0x8000 : 0;
    else
      reinterpret_cast<float*>(shared.signs)[c] = negative ? -1.f : 1.f;
  }
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  // Thread 0 draws: a number two units ahead, which becomes the unit after this one. In shared memory, as rows need all
  // registers. Within each unit threads meet.
  const auto draw = [&] { shared.number = atomicAdd(p.scratch.drawn, 1u); };
  if (threadIdx.x == 0) draw(), shared.unit = order.at(shared.number), draw();
  while (true) {
    __syncthreads();
    const Unit unit = shared.unit;
    if (threadIdx.x == 0) shared.next = order.at(shared.number), draw();
    const auto tiles = [&](int of_unit, const auto& code) {
      const int first = unit.number * of_unit;
      code(unit.side, first, min(of_unit, a.keys.count() - first));
    };
    switch (unit.task) {
      case Task::survey_k:
      case Task::survey_v:
        Surveyor<Vectors, Dim>{p, shared.survey}.look(unit.task == Task::survey_k ? Survey::k : Survey::v, unit.side,
                                                      unit.number);
        break;
      case Task::queries:
        rows.queries(unit.side, unit.number * p.queries, p.queries);
        break;
      case Task::keys:
        tiles(p.key_tiles, [&](int side, int first, int count) { rows.keys(side, first, count); });
        break;
      case Task::values:
        if constexpr (std::is_same_v<VCode, S8>)
          TokenValues<VCode, Vectors, Dim>(p, shared.rows, words).values(unit.side, unit.number);
        else
          tiles(p.value_tiles, [&](int side, int first, int count) {
            ChannelValues<VCode, Vectors, Dim>{p, shared.rows.offset}.values(side, first, count);
          });
        break;
      case Task::none:
        return;
    }
    if (threadIdx.x == 0) shared.unit = shared.next;
  }
}

// How many of a size hold all.
int parts(int64_t all, int64_t size) { return static_cast<int>((all + size - 1) / size); }
std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// Tokens of a survey: more where there are many, as each survey costs some more at its end.
int chunk_of(int least, int64_t tokens) {
  constexpr int kSurveys = 1024, kMost = 2;
  int chunk = least;
  while (chunk < kMost * least && tokens >= int64_t{2} * kSurveys * chunk) chunk *= 2;
  return chunk;
}

Preparation preparation_of(const CodesArguments& a) {
  Preparation p{.codes = a, .chunks = a.keys};
  const int64_t batch = a.v.shape[0];
  p.sequence_sides = static_cast<int>((a.keys.cu_seqlens ? a.keys.sequences : batch) * a.kv_heads);
  const bool packed = a.keys.cu_seqlens;
  p.queries = kUnitBytes / a.dim;
  p.key_tiles = packed ? 1 : parts(p.queries, a.keys.tile);
  p.value_tiles = packed || a.v_code == Code::s8 ? 1 : 2 * p.key_tiles;
  p.chunks.tile = packed ? p.queries : chunk_of(p.queries, batch * a.kv_heads * a.keys.tokens);
  p.surveys_k = a.channels.k_mean;
  p.surveys_v = a.channels.v_mean || a.channels.v_step;
  return p;
}

// Returns the bytes used.
std::size_t allocate_scratch(Preparation& p, void* scratch) {
  auto* const base = static_cast<unsigned char*>(scratch);
  constexpr int kSurveys = static_cast<int>(Survey::count);
  auto* const numbers = reinterpret_cast<unsigned*>(base);
  p.scratch.drawn = numbers + 1;
  p.scratch.arrived = numbers + 2, p.scratch.ready = p.scratch.arrived + kSurveys * p.sequence_sides;
  p.scratch.infinite = p.scratch.ready + kSurveys * p.sequence_sides;
  p.scratch.zeros = (3 + 2 * kSurveys * static_cast<std::size_t>(p.sequence_sides)) * sizeof(unsigned);
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
  for (float*& limit : p.scratch.limit)
    limit = reinterpret_cast<float*>(take(static_cast<std::size_t>(p.sequence_sides) * sizeof(float)));
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
  const int64_t units = static_cast<int64_t>(order.sides) * order.units();
  const auto grid = static_cast<unsigned>(std::min<int64_t>(units, processors * kBlocks<VCode, Vectors, Dim>));
  launch_pdl(kernel, grid, kPrepareThreads, bytes, stream, p, order);
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
  return allocate_scratch(p, nullptr);
}

void prepare(const CodesArguments& a, void* scratch, cudaStream_t stream) {
  Preparation p = preparation_of(a);
  allocate_scratch(p, scratch);
  const int sides = static_cast<int>(a.v.shape[0]) * a.kv_heads;
  Order order{.sides = sides,
              .group = a.heads / a.kv_heads,
              .lag = parts(sides, 2),
              .chunks = p.chunks.count(),
              .surveys = p.surveys_k + p.surveys_v,
              .queries = a.q_code == Code::none ? 0 : parts(a.q.shape[2], p.queries),
              .keys = a.k_code == Code::none ? 0 : parts(a.keys.count(), p.key_tiles),
              .values = a.v_code == Code::none ? 0 : parts(a.keys.count(), p.value_tiles),
              .k_surveyed = p.surveys_k};
  find_limits(p, scratch, stream);
  if (!sides || !(order.query_units() + order.keys + order.values)) return;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
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
