// Rung 4: tensor cores.
//
// New: both products run on tensor cores, as mma.sync m16n8k16: one warp multiplies a 16 x 16 by a 16 x 8 matrix of f16
// and adds the result to float32 sums. K and V arrive by cp.async, the next tile while this one is being computed, and
// reach the registers by ldmatrix. P goes from the sums of the first product into the second without leaving its
// registers.
// Gain: an H200 multiplies f16 about ten times faster by mma.sync than float32 by FMA. What is left beside the products
// is the softmax: 16 exponentials a cycle and multiprocessor, where tensor cores finish the 512 FLOPs (dim 128) that
// belong to one score 5 times a cycle.
// Why it is built like this: tensor cores must be fed. A fragment of K or V that a warp loads from shared memory (128
// bytes a cycle) is used for each 16 queries of the warp, so a warp owns 32 queries: with 16, shared memory would be
// slower than the tensor cores. The sums of 32 queries fill the registers, so four warps are a block and two blocks
// share a multiprocessor: while one computes exponentials, the other multiplies.
#include <cuda_fp16.h>

#include "ladder.h"

namespace ladder {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRowTiles = 2;                       // row tiles of 16 queries that a warp owns
constexpr int kBlocks = 2;                         // that share a multiprocessor
constexpr int kQueries = 16 * kRowTiles * kWarps;  // of a block
constexpr int kKeys = 64;                          // of a tile of K or V
constexpr int kStages = 2;                         // tiles of K and of V in shared memory

// A tile in shared memory: rows of Dim f16, in chunks of 16 bytes, which cp.async and ldmatrix move as a whole. Chunk c
// of row r is stored at place c ^ r % 8 of the row. ldmatrix reads the same chunk of eight rows at once. These would
// all lie in the same four banks, as a row is a multiple of 128 bytes long; stored like this they lie in different
// banks.
template <int Dim>
__device__ uint32_t offset(int row, int chunk) {
  return row * Dim * 2 + (chunk ^ row % 8) * 16;
}

// Starts copying `Rows` rows of a [seq, Dim] matrix, from row `first`, into a tile. Rows beyond seq become zeros.
template <int Dim, int Rows>
__device__ void load(uint32_t tile, const half* x, int first, int seq) {
  constexpr int kChunks = Dim / 8;  // of a row
#pragma unroll
  for (int i = 0; i < Rows * kChunks / kThreads; ++i) {
    const int row = (i * kThreads + threadIdx.x) / kChunks, chunk = threadIdx.x % kChunks;
    const bool inside = first + row < seq;
    const half* from = x + static_cast<int64_t>(inside ? first + row : 0) * Dim + chunk * 8;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tile + offset<Dim>(row, chunk)), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
  }
}

// Loads four 8 x 8 matrices of f16. Lane l gives the address of row l % 8 of matrix l / 8. In x[i] it gets two elements
// of matrix i: of row l / 4, columns 2 (l % 4) and the next; transposed, of column l / 4, rows 2 (l % 4) and the next.
__device__ void ldmatrix(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
__device__ void ldmatrix_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// d += a b: a is 16 x 16, b 16 x 8. Lane l holds, of d, columns 2 (l % 4) and the next, of row l / 4 in d[0] and d[1],
// of row l / 4 + 8 in d[2] and d[3]. a is four matrices of 8 x 8: top left, bottom left, top right, bottom right. b is
// two: top (b0) and bottom, with pairs of rows in a register.
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ uint32_t pack(float low, float high) {
  const half2 x = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(x);
}

// One block computes kQueries queries of one head. scale_log2 is scale times log2(e), as exp(x) = 2^(x log2(e)).
template <int Dim, bool Causal>
__global__ void __launch_bounds__(kThreads, kBlocks)
    attention(const half* q, const half* k, const half* v, half* o, int seq, float scale_log2) {
  constexpr int kTileBytes = kKeys * Dim * 2;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t q_tile = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t k_tiles = q_tile + kQueries * Dim * 2, v_tiles = k_tiles + kStages * kTileBytes;

  // Blocks start in the order of x, then y. Causal: those that see the most keys start first, of all heads, so that the
  // last ones to run are short. Otherwise the blocks of one head run together and share its K and V in L2.
  const int head = Causal ? blockIdx.x : blockIdx.y;
  const int first_query = kQueries * (Causal ? gridDim.y - 1 - blockIdx.y : blockIdx.x);
  const int64_t first = static_cast<int64_t>(head) * seq * Dim;
  q += first, k += first, v += first;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp * 16 * kRowTiles;              // of the block's queries, the first of this warp
  const int my_query = first_query + first_row + lane / 4;  // and 8, 16 and 24 below
  const int keys = Causal ? min(seq, first_query + kQueries) : seq;

  load<Dim, kQueries>(q_tile, q, first_query, seq);
  load<Dim, kKeys>(k_tiles, k, 0, seq);
  load<Dim, kKeys>(v_tiles, v, 0, seq);

  // Where this lane's rows for ldmatrix start. The chunk is 0 or 1 there; i times 16 channels further it is chunk ^ 2
  // i. The place, chunk ^ row % 8, changes by the same xor, and so does the address, by 32 i bytes.
  const uint32_t q_row = q_tile + offset<Dim>(first_row + lane % 16, lane / 16);
  float sums[kRowTiles][Dim / 8][4] = {};  // of p v
  float m[kRowTiles][2];                   // the largest score of a row so far, times log2(e)
  float l[kRowTiles][2];                   // this lane's part of the sum of the row's p
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) m[r][0] = m[r][1] = -INFINITY, l[r][0] = l[r][1] = 0;

  for (int first_key = 0; first_key < keys; first_key += kKeys) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // this tile has come, for all threads, and all are done with the one before: its place is free
    const int stage = first_key / kKeys % kStages;
    if (first_key + kKeys < keys) {
      load<Dim, kKeys>(k_tiles + (stage ^ 1) * kTileBytes, k, first_key + kKeys, seq);
      load<Dim, kKeys>(v_tiles + (stage ^ 1) * kTileBytes, v, first_key + kKeys, seq);
    }

    // s = q k^T. Keys are columns of b, whose pairs of rows are neighbours in a row of K.
    float s[kRowTiles][kKeys / 8][4] = {};
    const uint32_t k_row = k_tiles + stage * kTileBytes + offset<Dim>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int c = 0; c < Dim / 16; ++c) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) ldmatrix(a[r], (q_row ^ 32 * c) + 16 * r * Dim * 2);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[4];  // keys 0 to 7 of 16: b[0] and b[1]; keys 8 to 15: b[2] and b[3]
        ldmatrix(b, (k_row ^ 32 * c) + 16 * j * Dim * 2);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma(s[r][2 * j], a[r], b[0], b[1]);
          mma(s[r][2 * j + 1], a[r], b[2], b[3]);
        }
      }
    }

    if (first_key + kKeys > seq || (Causal && first_key + kKeys - 1 > first_query + first_row)) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2, query = my_query + 16 * r + i % 4 / 2 * 8;
          if (key >= seq || (Causal && key > query)) s[r][i / 4][i % 4] = -INFINITY;
        }
    }

    // Online softmax: a larger maximum makes what was summed so far smaller. The first tile has a key for every row.
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = -INFINITY;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[r][j][2 * h], s[r][j][2 * h + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));  // the four lanes of a row
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const float former = m[r][h];
        m[r][h] = fmaxf(former, largest * scale_log2);
        const float shrink = exp2_fast(former - m[r][h]);
        l[r][h] *= shrink;
#pragma unroll
        for (int n = 0; n < Dim / 8; ++n) sums[r][n][2 * h] *= shrink, sums[r][n][2 * h + 1] *= shrink;
      }

    // p = 2^(s - m) and o += p v, 16 keys at a time, so that the exponentials of 16 run beside the product of those
    // before. The sums of two products of 8 keys are laid out as a is: p stays where it is.
    const uint32_t v_row = v_tiles + stage * kTileBytes + offset<Dim>(lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      uint32_t p[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // top left, bottom left, top right, bottom right
          const float* x = &s[r][2 * j + i / 2][i % 2 * 2];
          const float p0 = exp2_fast(x[0] * scale_log2 - m[r][i % 2]);
          const float p1 = exp2_fast(x[1] * scale_log2 - m[r][i % 2]);
          l[r][i % 2] += p0 + p1;
          p[r][i] = pack(p0, p1);
        }
#pragma unroll
      for (int n = 0; n < Dim / 16; ++n) {
        uint32_t b[4];  // channels 0 to 7 of 16: b[0] and b[1]; channels 8 to 15: b[2] and b[3]
        ldmatrix_transposed(b, (v_row ^ 32 * n) + 16 * j * Dim * 2);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma(sums[r][2 * n], p[r], b[0], b[1]);
          mma(sums[r][2 * n + 1], p[r], b[2], b[3]);
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = l[r][h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float inverse = 1 / sum;
      const int query = my_query + 16 * r + 8 * h;
      if (query < seq) {
        half* row = o + (static_cast<int64_t>(head) * seq + query) * Dim + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < Dim / 8; ++n)
          *reinterpret_cast<uint32_t*>(row + 8 * n) =
              pack(sums[r][n][2 * h] * inverse, sums[r][n][2 * h + 1] * inverse);
      }
    }
}

size_t shared_bytes(const Problem& p) { return (kQueries + 2 * kStages * kKeys) * p.dim * sizeof(half); }

template <int Dim, bool Causal>
void launch_one(const Problem& p, const Arguments& a, cudaStream_t stream) {
  launch("attention", attention<Dim, Causal>, grid_of(p, kQueries), dim3(kThreads), shared_bytes(p), stream,
         static_cast<const half*>(a.q), static_cast<const half*>(a.k), static_cast<const half*>(a.v),
         static_cast<half*>(a.o), p.seq, p.scale() * kLog2E);
}

void launch_attention(const Problem& p, const Arguments& a, cudaStream_t stream) {
  const auto causal = p.dim == 64 ? launch_one<64, true> : launch_one<128, true>;
  const auto full = p.dim == 64 ? launch_one<64, false> : launch_one<128, false>;
  (p.causal ? causal : full)(p, a, stream);
}

}  // namespace

const Rung rung = {
    .name = "4_tensor_cores",
    .idea = "both products on tensor cores (mma.sync, f16, float32 sums), tiles by cp.async",
    .element = Element::f16,
    .rotates = false,
    .dims = {64, 128},
    .kernels = {{"attention", shared_bytes, nullptr, launch_attention}},
};

}  // namespace ladder
