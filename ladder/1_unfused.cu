// Rung 1: unfused attention, as the formula reads.
//
// New: three kernels, one for each step of softmax(q k^T / sqrt(dim)) v. The scores, seq x seq of them for every head,
// are written to memory by the first, normalised in place by the second and read again by the third.
// Gain: none, this is what the other rungs are measured against.
// Why it is slow: the products are textbook tiles. Each block keeps 16 x 16 tiles of both factors in shared memory, so
// that every value that is loaded from memory is used 16 times, but each multiplication still reads two numbers from
// shared memory. And at seq 4096 the scores of 16 heads are 1 GiB, which crosses the memory bus four times (written and
// read by scores and softmax, read by product), while q, k, v and o together are 64 MiB.
#include "ladder.h"

namespace ladder {
namespace {

constexpr int kTile = 16;  // a block of 16 x 16 threads computes 16 x 16 results
constexpr int kSoftmaxThreads = 256;

// s[i, j] = scale * sum over c of q[i, c] k[j, c]; minus infinity where j > i under the causal mask.
// One block computes one tile of s; blockIdx.z is the head.
__global__ void scores(const float* q, const float* k, float* s, int seq, int dim, float scale, bool causal) {
  __shared__ float q_tile[kTile][kTile];
  __shared__ float k_tile[kTile][kTile + 1];  // read down its columns: the extra one keeps the banks apart
  const int64_t head = blockIdx.z;
  q += head * seq * dim;
  k += head * seq * dim;
  s += head * seq * seq;
  const int i = blockIdx.y * kTile + threadIdx.y;      // the query of this thread
  const int j = blockIdx.x * kTile + threadIdx.x;      // the key of this thread
  const int k_row = blockIdx.x * kTile + threadIdx.y;  // the key that this thread loads
  if (causal && blockIdx.x > blockIdx.y) {             // no query of this tile sees any key of it
    if (i < seq && j < seq) s[static_cast<int64_t>(i) * seq + j] = -INFINITY;
    return;
  }

  float sum = 0;
  for (int c = 0; c < dim; c += kTile) {
    const int channel = c + threadIdx.x;
    q_tile[threadIdx.y][threadIdx.x] = i < seq && channel < dim ? q[static_cast<int64_t>(i) * dim + channel] : 0;
    k_tile[threadIdx.y][threadIdx.x] =
        k_row < seq && channel < dim ? k[static_cast<int64_t>(k_row) * dim + channel] : 0;
    __syncthreads();
    for (int x = 0; x < kTile; ++x) sum += q_tile[threadIdx.y][x] * k_tile[threadIdx.x][x];
    __syncthreads();  // nobody overwrites the tiles while others still read them
  }
  if (i < seq && j < seq) s[static_cast<int64_t>(i) * seq + j] = causal && j > i ? -INFINITY : sum * scale;
}

// Combines one value of each thread of the block; every thread gets the result.
template <typename Combine>
__device__ float reduce_block(float x, Combine combine) {
  __shared__ float partial[kSoftmaxThreads];
  partial[threadIdx.x] = x;
  __syncthreads();
  for (int half = kSoftmaxThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] = combine(partial[threadIdx.x], partial[threadIdx.x + half]);
    __syncthreads();
  }
  const float result = partial[0];
  __syncthreads();  // partial may be written again
  return result;
}

// s[i, :] = exp(s[i, :] - max) / sum. Each row has a block, which reads it three times and writes it twice.
__global__ void softmax(float* s, int seq) {
  s += static_cast<int64_t>(blockIdx.x) * seq;
  float largest = -INFINITY;
  for (int j = threadIdx.x; j < seq; j += kSoftmaxThreads) largest = fmaxf(largest, s[j]);
  largest = reduce_block(largest, [](float a, float b) { return fmaxf(a, b); });

  // The largest score is subtracted so that exp cannot overflow: the quotient stays the same.
  float sum = 0;
  for (int j = threadIdx.x; j < seq; j += kSoftmaxThreads) {
    s[j] = expf(s[j] - largest);
    sum += s[j];
  }
  sum = reduce_block(sum, [](float a, float b) { return a + b; });
  for (int j = threadIdx.x; j < seq; j += kSoftmaxThreads) s[j] /= sum;
}

// o[i, c] = sum over j of p[i, j] v[j, c].
__global__ void product(const float* p, const float* v, float* o, int seq, int dim) {
  __shared__ float p_tile[kTile][kTile], v_tile[kTile][kTile];
  const int64_t head = blockIdx.z;
  p += head * seq * seq;
  v += head * seq * dim;
  o += head * seq * dim;
  const int i = blockIdx.y * kTile + threadIdx.y;
  const int c = blockIdx.x * kTile + threadIdx.x;

  float sum = 0;
  for (int j = 0; j < seq; j += kTile) {
    const int p_column = j + threadIdx.x, v_row = j + threadIdx.y;
    p_tile[threadIdx.y][threadIdx.x] = i < seq && p_column < seq ? p[static_cast<int64_t>(i) * seq + p_column] : 0;
    v_tile[threadIdx.y][threadIdx.x] = v_row < seq && c < dim ? v[static_cast<int64_t>(v_row) * dim + c] : 0;
    __syncthreads();
    for (int x = 0; x < kTile; ++x) sum += p_tile[threadIdx.y][x] * v_tile[x][threadIdx.x];
    __syncthreads();
  }
  if (i < seq && c < dim) o[static_cast<int64_t>(i) * dim + c] = sum;
}

// ---- Launches: each of the three kernels can be run and timed alone (--kernel scores, softmax, product).

unsigned tiles(int n) { return static_cast<unsigned>(ceil_div(n, kTile)); }

void launch_scores(const Problem& p, const Arguments& a, cudaStream_t stream) {
  launch("scores", scores, dim3(tiles(p.seq), tiles(p.seq), p.batch * p.heads), dim3(kTile, kTile), 0, stream,
         static_cast<const float*>(a.q), static_cast<const float*>(a.k), static_cast<float*>(a.workspace), p.seq, p.dim,
         p.scale(), p.causal);
}

void launch_softmax(const Problem& p, const Arguments& a, cudaStream_t stream) {
  launch("softmax", softmax, dim3(static_cast<unsigned>(p.rows())), dim3(kSoftmaxThreads), 0, stream,
         static_cast<float*>(a.workspace), p.seq);
}

void launch_product(const Problem& p, const Arguments& a, cudaStream_t stream) {
  launch("product", product, dim3(tiles(p.dim), tiles(p.seq), p.batch * p.heads), dim3(kTile, kTile), 0, stream,
         static_cast<const float*>(a.workspace), static_cast<const float*>(a.v), static_cast<float*>(a.o), p.seq,
         p.dim);
}

void launch_all(const Problem& p, const Arguments& a, cudaStream_t stream) {
  launch_scores(p, a, stream);
  launch_softmax(p, a, stream);
  launch_product(p, a, stream);
}

size_t shared_bytes(const Problem&) { return kTile * (2 * kTile + 1) * sizeof(float); }
size_t workspace_bytes(const Problem& p) { return p.rows() * p.seq * sizeof(float); }

}  // namespace

const Rung rung = {
    .name = "1_unfused",
    .idea = "scores, softmax and product as three kernels, with the scores in memory",
    .element = Element::f32,
    .rotates = false,
    .dims = {32, 64, 80, 96, 128, 256},
    .kernels = {{"all", shared_bytes, workspace_bytes, launch_all},
                {"scores", shared_bytes, workspace_bytes, launch_scores, true},
                {"softmax", shared_bytes, workspace_bytes, launch_softmax, true},
                {"product", shared_bytes, workspace_bytes, launch_product, true}},
};

}  // namespace ladder
