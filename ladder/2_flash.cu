// Rung 2: FlashAttention, one kernel that never writes a score to memory.
//
// New: a block keeps kTile queries and walks over the keys tile by tile. The softmax is online: each row knows the
// largest score and the sum of exponentials so far; where a tile has a larger score, what was summed before is scaled
// down to it. Q and K are rotated (RoPE) while they are loaded, so that rotated copies need not exist either. Each
// thread computes 4 x 4 scores in registers instead of one: a value that it reads from shared memory is used four
// times. Gain: half a read of shared memory for each multiplication instead of two, and memory sees q, k, v and o alone
// instead of gigabytes of scores, so that the length of the input is not bound by what scores take. What it leaves: the
// softmax of a row is done by one thread, while the other three quarters of the block wait at one of four barriers a
// tile. K is rotated anew by every block of queries: that costs little beside two products.
#include "ladder.h"

namespace ladder {
namespace {

constexpr int kTile = 64;      // queries of a block, and keys of a tile
constexpr int kThreads = 256;  // 16 x 16: thread (ty, tx) has rows ty + 16 a and, of the scores, columns tx + 16 b
constexpr int kPad = 4;        // keeps rows of tiles in different banks, and float4s aligned

template <int kDim>
struct Shared {
  float q[kTile][kDim + kPad];
  float kv[kTile][kDim + kPad];  // first the keys of a tile, then its values
  float s[kTile][kTile + kPad];  // first scores, then P, not yet divided by the sum
  float sum[kTile];              // of each row, over the tiles so far
  float rescale[kTile];          // what o is multiplied by before the tile is added
};

// The two channels that RoPE turns together: c and c + dim / 2 (halves), or 2 c and 2 c + 1.
struct Pair {
  int c, d;
};
__host__ __device__ Pair pair_of(int index, int dim, bool halves) {
  return {halves ? index : 2 * index, halves ? index + dim / 2 : 2 * index + 1};
}
__host__ __device__ void rotate(float& x, float& y, Rotation r) {
  const float old_x = x;
  x = old_x * r.cosine - y * r.sine;
  y = old_x * r.sine + y * r.cosine;
}

// Rows first to first + kTile - 1 of x [seq, kDim], rotated if rotations is given, with zeros past the end.
template <int kDim>
__device__ void load_tile(float (*tile)[kDim + kPad], const float* x, int first, int seq, const Rotation* rotations,
                          bool halves) {
  for (int n = threadIdx.x; n < kTile * kDim / 2; n += kThreads) {
    const int row = n / (kDim / 2), pair = n % (kDim / 2), position = first + row;
    const auto [c, d] = pair_of(pair, kDim, halves);
    float a = 0, b = 0;
    if (position < seq) {
      a = x[position * kDim + c];
      b = x[position * kDim + d];
      if (rotations) rotate(a, b, rotations[position * (kDim / 2) + pair]);
    }
    tile[row][c] = a;
    tile[row][d] = b;
  }
}

// The online softmax of one row.
struct Row {
  float largest = -INFINITY, sum = 0;

  // Takes in a tile with the given largest score, and returns the factor that scales down what was summed before. The
  // first tile has a key that the row sees, so that largest is finite from then on.
  __device__ float raise(float tile_largest) {
    const float next = fmaxf(largest, tile_largest);
    const float factor = expf(largest - next);  // 0 for the first tile
    largest = next;
    sum *= factor;
    return factor;
  }
  __device__ float add(float score) {
    const float p = expf(score - largest);  // 0 for keys that are masked: their score is minus infinity
    sum += p;
    return p;
  }
};

__device__ void fma4(float4 a, float4 b, float& sum) { sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ float4 at(const float* x) { return *reinterpret_cast<const float4*>(x); }

template <int kDim>
__global__ __launch_bounds__(kThreads) void flash(const float* q, const float* k, const float* v, float* o, int seq,
                                                  float scale, bool causal, const Rotation* rotations, bool halves) {
  extern __shared__ float4 memory[];
  Shared<kDim>& shared = *reinterpret_cast<Shared<kDim>*>(memory);
  const int64_t head = static_cast<int64_t>(blockIdx.y) * seq * kDim;
  q += head, k += head, v += head, o += head;
  // Under the causal mask later queries see more keys: they start first.
  const int first_query = (gridDim.x - 1 - blockIdx.x) * kTile;
  const int keys = causal ? min(seq, first_query + kTile) : seq;
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;

  constexpr int kQuads = kDim / 64;  // each thread has channels 4 tx + 64 n to 4 tx + 64 n + 3 of its four rows of o
  float4 out[4][kQuads] = {};
  Row row;  // of query threadIdx.x, for the first kTile threads
  load_tile<kDim>(shared.q, q, first_query, seq, rotations, halves);

  for (int first_key = 0; first_key < keys; first_key += kTile) {
    load_tile<kDim>(shared.kv, k, first_key, seq, rotations, halves);
    __syncthreads();

    // S = scale q k^T
    float s[4][4] = {};
    for (int c = 0; c < kDim; c += 4) {
      float4 queries[4], tile_keys[4];
#pragma unroll
      for (int a = 0; a < 4; ++a) queries[a] = at(&shared.q[ty + 16 * a][c]);
#pragma unroll
      for (int b = 0; b < 4; ++b) tile_keys[b] = at(&shared.kv[tx + 16 * b][c]);
#pragma unroll
      for (int a = 0; a < 4; ++a) {
#pragma unroll
        for (int b = 0; b < 4; ++b) fma4(queries[a], tile_keys[b], s[a][b]);
      }
    }
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int query = first_query + ty + 16 * a, key = first_key + tx + 16 * b;
        const bool seen = key < seq && (!causal || key <= query);
        shared.s[ty + 16 * a][tx + 16 * b] = seen ? s[a][b] * scale : -INFINITY;
      }
    }
    __syncthreads();  // the scores are complete, and nobody needs the keys any more

    // P = exp(S - largest), by one thread a row, while the others load the values.
    load_tile<kDim>(shared.kv, v, first_key, seq, nullptr, false);
    if (threadIdx.x < kTile) {
      float* scores = shared.s[threadIdx.x];
      float largest = -INFINITY;
      for (int j = 0; j < kTile; ++j) largest = fmaxf(largest, scores[j]);
      shared.rescale[threadIdx.x] = row.raise(largest);
      for (int j = 0; j < kTile; ++j) scores[j] = row.add(scores[j]);
      shared.sum[threadIdx.x] = row.sum;
    }
    __syncthreads();

    // o = o rescale + P v
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const float factor = shared.rescale[ty + 16 * a];
#pragma unroll
      for (int n = 0; n < kQuads; ++n) {
        out[a][n].x *= factor, out[a][n].y *= factor, out[a][n].z *= factor, out[a][n].w *= factor;
      }
    }
    for (int j = 0; j < kTile; ++j) {
      float4 values[kQuads];
#pragma unroll
      for (int n = 0; n < kQuads; ++n) values[n] = at(&shared.kv[j][4 * tx + 64 * n]);
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const float p = shared.s[ty + 16 * a][j];
#pragma unroll
        for (int n = 0; n < kQuads; ++n) {
          out[a][n].x += p * values[n].x, out[a][n].y += p * values[n].y;
          out[a][n].z += p * values[n].z, out[a][n].w += p * values[n].w;
        }
      }
    }
    __syncthreads();  // nobody overwrites the values, or P, while others still read them
  }

#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int i = ty + 16 * a;
    if (first_query + i >= seq) continue;
    const float sum = shared.sum[i];
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const float4 x = out[a][n];
      *reinterpret_cast<float4*>(&o[(first_query + i) * kDim + 4 * tx + 64 * n]) =
          make_float4(x.x / sum, x.y / sum, x.z / sum, x.w / sum);
    }
  }
}

size_t shared_bytes(const Problem& p) { return p.dim == 64 ? sizeof(Shared<64>) : sizeof(Shared<128>); }

void launch_flash(const Problem& p, const Arguments& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.seq, kTile)), p.batch * p.heads);
  launch("flash", p.dim == 64 ? flash<64> : flash<128>, grid, kThreads, shared_bytes(p), stream,
         static_cast<const float*>(a.q), static_cast<const float*>(a.k), static_cast<const float*>(a.v),
         static_cast<float*>(a.o), p.seq, p.scale(), p.causal, a.rotations, a.pairing == Pairing::halves);
}

}  // namespace

const Rung rung = {
    .name = "2_flash",
    .idea = "one kernel with an online softmax, scores in shared memory alone, RoPE on the way in",
    .element = Element::f32,
    .rotates = true,
    .dims = {64, 128},
    .kernels = {{"flash", shared_bytes, nullptr, launch_flash}},
};

}  // namespace ladder
