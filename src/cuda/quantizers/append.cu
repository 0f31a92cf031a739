// octet_append on a GPU. A warp takes a row: it turns it, and writes it to its place in the cache.
#include <algorithm>

#include "core/append.h"
#include "core/error.h"
#include "core/names.h"
#include "core/rope.h"
#include "cuda/host/backend.h"
#include "cuda/quantizers/launch.h"
#include "cuda/quantizers/rows.h"

namespace octet::cuda {
namespace quantizers {
namespace {

constexpr int kWarps = 8;

struct AppendParams {
  Append::Part k, v, q;
  const int* seqused_k;
  const int* cu_seqlens;  // of packed new tokens; or null
  int sequences;
  int capacity;
  RopeParams rope;
  View cosine, sine;  // null data: the angles are those of the rope
};

// The rows of k, of v and of q, one after the other.
struct RowCounts {
  unsigned k, v, q;
};

// Turns a row in shared memory.
__device__ void turn(const AppendParams& p, float* row, int64_t position) {
  for (int pair = lane(); pair < p.rope.pairs; pair += 32) {
    float cosine = 0.f, sine = 0.f;
    if (p.cosine.data) {
      const auto read = [&](const View& t, float& x) {
        with_floats(t, [&](auto* data, auto value, auto) {
          x = static_cast<float>(value(data[position * t.stride[2] + pair * t.stride[3]]));
        });
      };
      read(p.cosine, cosine), read(p.sine, sine);
    } else {
      const CosSin both = cos_sin_at(p.rope.turns[pair], position);
      cosine = static_cast<float>(both.cosine), sine = static_cast<float>(both.sine);
    }
    rotate(row[first_of_pair(p.rope, pair)], row[second_of_pair(p.rope, pair)], cosine, sine);
  }
  __syncwarp();
}

// Returns the sequence of a packed token: the last that does not begin behind it, as empty ones begin where the next
// does.
__device__ int sequence_of(const AppendParams& p, int token) {
  int first = 0, last = p.sequences;  // it is one of [first, last)
  while (last - first > 1) {
    const int middle = (first + last) / 2;
    (p.cu_seqlens[middle] <= token ? first : last) = middle;
  }
  return first;
}

// Writes a row as codes with a scale of its own.
__device__ void write_codes(const Append::Part& part, const BatchHead& i, int token, const float* row) {
  const octet_dtype dtype = part.to.dtype;
  const Range range = range_of(dtype);
  const int dim = static_cast<int>(part.to.shape[3]);
  Extremes extremes;
  for (int c = lane(); c < dim; c += 32) extremes.add(order_of(magnitude_of(row[c])));
  extremes = {__reduce_min_sync(~0u, extremes.low), __reduce_max_sync(~0u, extremes.high)};
  const AffineScale scale = affine_scale_of(extremes, OCTET_SYMMETRIC, range);
  if (lane() == 0) *at<float>(part.scale, i, token) = scale.scale;
  for (int c = lane(); c < dim; c += 32)
    *at<uint8_t>(part.to, i, token, c) = byte_of(dtype, range, scaled(row[c], scale));
}

__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    append_kernel(const __grid_constant__ AppendParams p, const RowCounts rows, int stride) {
  extern __shared__ float4 memory[];
  float* const row = reinterpret_cast<float*>(memory) + warp() * stride;
  unsigned n = blockIdx.x * kWarps + warp();
  const bool of_k = n < rows.k, of_v = !of_k && n < rows.k + rows.v;
  if (n >= rows.k + rows.v + rows.q) return;
  if (!of_k) n -= of_v ? rows.k : rows.k + rows.v;
  const Append::Part& part = of_k ? p.k : of_v ? p.v : p.q;
  const auto tokens = static_cast<unsigned>(part.from.shape[2]);
  const BatchHead from(part.from, n / tokens);
  const int token = static_cast<int>(n % tokens), sequence = p.cu_seqlens ? sequence_of(p, token) : from.batch;
  if (p.cu_seqlens && token >= p.cu_seqlens[p.sequences]) return;  // it belongs to no sequence
  const int64_t place = int64_t{p.seqused_k[sequence]} + token - (p.cu_seqlens ? p.cu_seqlens[sequence] : 0);
  const bool to_cache = of_k || of_v;
  if (to_cache && (place < 0 || place >= p.capacity)) return;  // there is no room for it
  load_row(part.from, from, token, row);
  __syncwarp();
  if (!of_v && p.rope.pairs) turn(p, row, place + p.rope.offset);
  BatchHead to = from;
  if (to_cache) to.batch = sequence;
  auto to_token = to_cache ? static_cast<int>(place) : token;
  if (const Pages& pages = part.to.pages; pages.size) {
    const auto size = static_cast<int>(pages.size);
    to.batch = pages.table[sequence * pages.stride + to_token / size], to_token %= size;
  }
  if (part.scale.data)
    write_codes(part, to, to_token, row);
  else
    store_row(row, part.to, to, to_token);
}

}  // namespace
}  // namespace quantizers

void append(const Append& a, const Place& place) {
  using namespace quantizers;
  for (const auto& [part, label] : {std::pair{&a.k, "k"}, {&a.v, "v"}, {&a.q, "q"}})
    expect_supported(part->from, a.rope, place.device);
  const DeviceScope device(place.device);
  AppendParams p{.k = a.k,
                 .v = a.v,
                 .q = a.q,
                 .seqused_k = static_cast<const int*>(a.seqused_k.data),
                 .cu_seqlens = static_cast<const int*>(a.cu_seqlens.data),
                 .sequences = static_cast<int>(a.sequences()),
                 .capacity = static_cast<int>(std::min<int64_t>(a.capacity, std::numeric_limits<int32_t>::max())),
                 .rope = a.cosine.present() ? RopeParams{.style = a.rope.style,
                                                         .pairs = static_cast<int>(a.rope.dim / 2),
                                                         .offset = a.rope.offset}
                                            : rope_params(a.rope, false),
                 .cosine = a.cosine,
                 .sine = a.sine};
  const auto rows_of = [](const View& t) {
    return static_cast<unsigned>(t.elements() ? batch_heads(t) * t.shape[2] : 0);
  };
  const RowCounts rows{rows_of(a.k.from), rows_of(a.v.from), rows_of(a.q.from)};
  const int64_t all = int64_t{rows.k} + rows.v + rows.q;
  if (!all) return;
  const int64_t dim = std::max(a.k.from.shape[3], a.v.from.shape[3]);
  launch(append_kernel, (all + kWarps - 1) / kWarps, kWarps, kWarps * row_bytes(dim),
         static_cast<cudaStream_t>(place.stream), p, rows, row_stride(static_cast<int>(dim)));
}

}  // namespace octet::cuda
