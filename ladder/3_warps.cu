// Rung 3: warps that own their queries.
//
// New: a warp owns kRows queries from their first score to their output. Its softmax needs no other warp: the largest
// score and the sum of a row stay in the registers of the 8 lanes that share the row, and are combined by shuffles. P
// goes through a piece of shared memory that only this warp sees. All warps of the block share the tiles of K and V.
// exp becomes exp2, which the hardware has, with log2(e) folded into the scale of q.
// Gain: two barriers a tile instead of four, no thread that idles while others do a softmax, and half as many reads of
// shared memory for each multiplication as in rung 2, since a lane reads no more but computes on 4 rows x 8 or 16
// channels of o.
// What it leaves: every multiplication is one f32 instruction of one thread. Tensor cores do hundreds at once.
//
// A warp computes the scores of 16 queries and 32 keys. Of these, lane 8 y + x has rows y, y + 4, y + 8, y + 12 and
// keys x, x + 8, x + 16, x + 24; of o it has the same rows and the channels 4 x to 4 x + 3, 4 x + 32 to 4 x + 35, ...
#include "ladder.h"

namespace ladder {
namespace {

constexpr int kWarps = 4, kRows = 16;     // queries of a warp
constexpr int kQueries = kWarps * kRows;  // of a block
constexpr int kKeys = 32;                 // of a tile
constexpr int kPad = 4;                   // keeps rows in different banks, and float4s aligned

template <int kDim>
struct Shared {
  float q[kQueries][kDim + kPad];  // scaled
  float k[kKeys][kDim + kPad];
  float v[kKeys][kDim + kPad];
  float p[kQueries][kKeys + kPad];  // each warp has its own rows
};

// Combines the values of the 8 lanes that share a row; all of them get the result.
template <typename Combine>
__device__ float reduce_row(float x, Combine combine) {
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  return x;
}
__device__ float row_max(float x) {
  return reduce_row(x, [](float a, float b) { return fmaxf(a, b); });
}
__device__ float row_sum(float x) {
  return reduce_row(x, [](float a, float b) { return a + b; });
}

__device__ float4 at(const float* x) { return *reinterpret_cast<const float4*>(x); }
__device__ float4 operator*(float a, float4 b) { return make_float4(a * b.x, a * b.y, a * b.z, a * b.w); }
__device__ void fma4(float4& sum, float a, float4 b) {
  sum.x += a * b.x, sum.y += a * b.y, sum.z += a * b.z, sum.w += a * b.w;
}

// Rows first to first + rows - 1 of x [seq, kDim], times scale, with zeros past the end.
template <int kDim>
__device__ void load_tile(float (*tile)[kDim + kPad], const float* x, int first, int rows, int seq, float scale) {
  for (int n = threadIdx.x; n < rows * kDim / 4; n += kWarps * 32) {
    const int row = n / (kDim / 4), c = n % (kDim / 4) * 4;
    float4 value = make_float4(0, 0, 0, 0);
    if (first + row < seq) value = scale * at(&x[(first + row) * kDim + c]);
    *reinterpret_cast<float4*>(&tile[row][c]) = value;
  }
}

// The scores of this lane: s[a][b] of rows y + 4 a of q and rows x + 8 b of k.
template <int kDim>
__device__ void scores(const float (*q)[kDim + kPad], const float (*k)[kDim + kPad], int y, int x, float (&s)[4][4]) {
#pragma unroll 4
  for (int c = 0; c < kDim; c += 4) {
    float4 queries[4], keys[4];
#pragma unroll
    for (int a = 0; a < 4; ++a) queries[a] = at(&q[y + 4 * a][c]);
#pragma unroll
    for (int b = 0; b < 4; ++b) keys[b] = at(&k[x + 8 * b][c]);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        s[a][b] +=
            queries[a].x * keys[b].x + queries[a].y * keys[b].y + queries[a].z * keys[b].z + queries[a].w * keys[b].w;
      }
    }
  }
}

// out[a][n] += the sum over the keys of the tile of p[y + 4 a][key] times channels 4 x + 32 n to 4 x + 32 n + 3 of v.
template <int kDim>
__device__ void add_values(const float (*p)[kKeys + kPad], const float (*v)[kDim + kPad], int y, int x,
                           float4 (&out)[4][kDim / 32]) {
#pragma unroll 2
  for (int j = 0; j < kKeys; j += 4) {
    float4 weights[4];  // P of four keys
#pragma unroll
    for (int a = 0; a < 4; ++a) weights[a] = at(&p[y + 4 * a][j]);
#pragma unroll
    for (int n = 0; n < kDim / 32; ++n) {
      const float* values = &v[j][4 * x + 32 * n];
      const float4 v0 = at(values), v1 = at(values + kDim + kPad);
      const float4 v2 = at(values + 2 * (kDim + kPad)), v3 = at(values + 3 * (kDim + kPad));
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        fma4(out[a][n], weights[a].x, v0);
        fma4(out[a][n], weights[a].y, v1);
        fma4(out[a][n], weights[a].z, v2);
        fma4(out[a][n], weights[a].w, v3);
      }
    }
  }
}

template <int kDim>
__global__ __launch_bounds__(kWarps * 32, 2) void warps(const float* q, const float* k, const float* v, float* o,
                                                        int seq, float scale, bool causal) {
  extern __shared__ float4 memory[];
  Shared<kDim>& shared = *reinterpret_cast<Shared<kDim>*>(memory);
  const int64_t head = static_cast<int64_t>(blockIdx.y) * seq * kDim;
  q += head, k += head, v += head, o += head;
  const int first_query = (gridDim.x - 1 - blockIdx.x) * kQueries;
  const int keys = causal ? min(seq, first_query + kQueries) : seq;
  const int warp = threadIdx.x / 32, y = threadIdx.x % 32 / 8, x = threadIdx.x % 8;
  const int first_row = first_query + warp * kRows;  // of this warp

  float4 out[4][kDim / 32] = {};
  float largest[4], sum[4];  // of rows y + 4 a; sum is over the keys of this lane alone
#pragma unroll
  for (int a = 0; a < 4; ++a) largest[a] = -INFINITY, sum[a] = 0;
  load_tile<kDim>(shared.q, q, first_query, kQueries, seq, scale * kLog2E);

  for (int first_key = 0; first_key < keys; first_key += kKeys) {
    load_tile<kDim>(shared.k, k, first_key, kKeys, seq, 1);
    load_tile<kDim>(shared.v, v, first_key, kKeys, seq, 1);
    __syncthreads();
    // Under the causal mask the last tiles are for the last warps alone: the same for all lanes of a warp.
    if (!causal || first_key < first_row + kRows) {
      float s[4][4] = {};
      scores<kDim>(&shared.q[warp * kRows], shared.k, y, x, s);
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        float tile_largest = -INFINITY;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int key = first_key + x + 8 * b;
          if (key >= seq || (causal && key > first_row + y + 4 * a)) s[a][b] = -INFINITY;
          tile_largest = fmaxf(tile_largest, s[a][b]);
        }
        // The first tile has key 0, which every row sees: largest is finite from then on.
        const float next = fmaxf(largest[a], row_max(tile_largest));
        const float factor = exp2f(largest[a] - next);
        largest[a] = next;
        sum[a] *= factor;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const float p = exp2f(s[a][b] - next);
          sum[a] += p;
          shared.p[warp * kRows + y + 4 * a][x + 8 * b] = p;
        }
#pragma unroll
        for (int n = 0; n < kDim / 32; ++n) out[a][n] = factor * out[a][n];
      }
      __syncwarp();  // P is complete: its rows belong to this warp
      add_values<kDim>(&shared.p[warp * kRows], shared.v, y, x, out);
    }
    __syncthreads();  // the tiles, and P, may be overwritten
  }

#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const float total = row_sum(sum[a]);  // all lanes take part, before any leaves
    const int row = first_row + y + 4 * a;
    if (row >= seq) continue;
#pragma unroll
    for (int n = 0; n < kDim / 32; ++n) {
      *reinterpret_cast<float4*>(&o[row * kDim + 4 * x + 32 * n]) = (1 / total) * out[a][n];
    }
  }
}

size_t shared_bytes(const Problem& p) { return p.dim == 64 ? sizeof(Shared<64>) : sizeof(Shared<128>); }

void launch_warps(const Problem& p, const Arguments& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.seq, kQueries)), p.batch * p.heads);
  launch("warps", p.dim == 64 ? warps<64> : warps<128>, grid, kWarps * 32, shared_bytes(p), stream,
         static_cast<const float*>(a.q), static_cast<const float*>(a.k), static_cast<const float*>(a.v),
         static_cast<float*>(a.o), p.seq, p.scale(), p.causal);
}

}  // namespace

const Rung rung = {
    .name = "3_warps",
    .idea = "each warp owns 16 queries: its softmax stays in registers, barriers guard the tiles of K and V alone",
    .element = Element::f32,
    .rotates = false,
    .dims = {64, 128},
    .kernels = {{"warps", shared_bytes, nullptr, launch_warps}},
};

}  // namespace ladder
