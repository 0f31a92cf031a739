// Rung 5: int8.
//
// New: q, k and v are rounded to 256 levels, x = scale (code - zero), and q k^T multiplies codes, as mma.sync m16n8k32
// with int32 sums. The kernel before attention does the rounding: with one scale and zero point for each tensor
// (per_tensor), or with a scale for each 64 tokens of a head and no zero point (per_block).
// Gain: int8 products run at twice the rate of f16, and q and k are half as large in shared memory, which feeds the
// tensor cores. That saves a quarter of the tensor core time of rung 4. The rounding of q, k and v takes a part of it
// back, which falls as seq grows; at seq 4096 it is most of it, or more (README.md has the counters).
// Why P stays f16: its scale would have to follow each row's maximum, and its 256 levels between 0 and 1 would round
// most of a row's values to 0 where one is large. The other operand of that product has to be f16 as well, and 8-bit
// codes are exact in f16. The rounding kernel writes V's codes as f16, with the zero point subtracted: otherwise each
// block would convert all of V for its 128 queries.
//
// Zero points, exactly: sum (q - zq)(k - zk) = sum q k - zq sum k - zk sum q + dim zq zk, over the channels. The last
// two terms are the same for all keys of a query, and softmax does not see what is added to a whole row. The second
// belongs to the key: the rounding kernel sums the codes of each key, and the int32 sums of the product start at -zq
// sum k. Added to that start are the bits of 12582912.0f, as an integer. Such a sum, its bits read as a float, is
// 12582912 plus what was summed, and needs no conversion, as long as that is less than 2^22: |sum q k - zq sum k| is at
// most 128 * 255 * 128. The largest score of a row is found among the integers, which have the same order.
#include <cuda_fp16.h>

#include <algorithm>

#include "ladder.h"

namespace ladder {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRowTiles = 2;                       // row tiles of 16 queries that a warp owns
constexpr int kBlocks = 2;                         // that share a multiprocessor
constexpr int kQueries = 16 * kRowTiles * kWarps;  // of a block
constexpr int kKeys = 64;                          // of a tile of K or V, and tokens that share a scale
constexpr int kStages = 2;                         // tiles of K and of V in shared memory
constexpr int kRoundThreads = 256, kRangeBlocks = 256;
constexpr int kBias = 0x4b400000;  // 12582912.0f = 1.5 * 2^23: the next float is 12582913.0f

// ---- Rounding

struct Levels {
  float scale, zero;  // x = scale (code - zero)
  __host__ __device__ float code(float x) const { return fminf(fmaxf(rintf(x * (1 / scale)) + zero, -128.f), 127.f); }
};
// The range of a tensor, 0 included, on -128 to 127. An infinite range gives NaN everywhere, as it has no levels.
__host__ __device__ inline Levels levels_of(float low, float high) {
  const float scale = high > low ? (high - low) / 255 : 1;
  return {scale, -128 - rintf(low * (1 / scale))};
}
__host__ __device__ inline Levels symmetric(float largest) { return {largest > 0 ? largest / 127 : 1, 0}; }
// Where the int32 sums of a key start, whose codes have this sum.
__host__ __device__ inline int start_of(int q_zero, int sum) { return kBias - q_zero * sum; }

// Where everything lies in the workspace. In arrays of three, those of q, k and v follow each other.
struct Workspace {
  int8_t *q, *k;
  half* v;
  int* start;      // [heads, seq in whole blocks]: where the sums of a key start
  float* scales;   // [3, heads, blocks]
  float2* ranges;  // [3, kRangeBlocks]: -low, high
  Levels* levels;  // [3]
  size_t bytes;
};
Workspace workspace_of(const Problem& p, void* memory) {
  Workspace w{};
  const auto take = [&](auto*& x, int64_t count) {
    x = reinterpret_cast<std::remove_reference_t<decltype(x)>>(static_cast<char*>(memory) + w.bytes);
    w.bytes += ceil_div(count * sizeof *x, 256) * 256;
  };
  const int64_t blocks = p.batch * p.heads * ceil_div(p.seq, kKeys);
  take(w.q, p.elements()), take(w.k, p.elements()), take(w.v, p.elements());
  take(w.start, blocks * kKeys), take(w.scales, 3 * blocks), take(w.ranges, 3 * kRangeBlocks), take(w.levels, 3);
  return w;
}

// The largest x of the block. What is not a number counts as infinite.
__device__ float block_max(float x) {
  __shared__ float of_warp[kRoundThreads / 32];
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
  __syncthreads();  // of_warp is free
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  for (float y : of_warp) x = fmaxf(x, y);
  return x;
}
__device__ float number(float x) { return x == x ? x : INFINITY; }

__global__ void ranges(const half* q, const half* k, const half* v, float2* ranges, int64_t elements) {
  const half* x = blockIdx.y == 0 ? q : blockIdx.y == 1 ? k : v;
  float low = 0, high = 0;  // low: negative
  for (int64_t i = blockIdx.x * kRoundThreads + threadIdx.x; i < elements / 8; i += kRangeBlocks * kRoundThreads) {
    const uint4 loaded = reinterpret_cast<const uint4*>(x)[i];
    for (int c = 0; c < 8; ++c) {
      const float y = number(__half2float(reinterpret_cast<const half*>(&loaded)[c]));
      low = fmaxf(low, -y), high = fmaxf(high, y);
    }
  }
  low = block_max(low), high = block_max(high);
  if (threadIdx.x == 0) ranges[blockIdx.y * kRangeBlocks + blockIdx.x] = {low, high};
}

// The levels of each tensor, found by one block.
__global__ void find_levels(const float2* ranges, Levels* levels) {
  const float2 range = ranges[blockIdx.x * kRangeBlocks + threadIdx.x];
  const float low = block_max(range.x), high = block_max(range.y);
  if (threadIdx.x == 0) levels[blockIdx.x] = levels_of(-low, high);
}

// Rounds 64 tokens of a head: to given levels, or, where those are null, to levels of their own.
template <int Dim>
__global__ void __launch_bounds__(kRoundThreads)
    round_block(const half* q, const half* k, const half* v, Workspace w, const Levels* given, int seq) {
  constexpr int kLanes = Dim / 8, kRows = kRoundThreads / kLanes;  // threads of a row; rows at a time
  const int blocks = (seq + kKeys - 1) / kKeys, first = blockIdx.x % blocks * kKeys, tensor = blockIdx.y;
  const half* x = tensor == 0 ? q : tensor == 1 ? k : v;
  const int64_t head = static_cast<int64_t>(blockIdx.x / blocks) * seq;
  uint4 loaded[kKeys / kRows];
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kKeys / kRows; ++i) {
    const int row = first + i * kRows + threadIdx.x / kLanes;
    loaded[i] = {};
    if (row < seq) loaded[i] = reinterpret_cast<const uint4*>(x + (head + row) * Dim)[threadIdx.x % kLanes];
    for (int c = 0; c < 8; ++c)
      largest = fmaxf(largest, fabsf(number(__half2float(reinterpret_cast<const half*>(&loaded[i])[c]))));
  }
  const Levels levels = given ? given[tensor] : symmetric(block_max(largest));
  if (threadIdx.x == 0) w.scales[tensor * gridDim.x + blockIdx.x] = levels.scale;
#pragma unroll
  for (int i = 0; i < kKeys / kRows; ++i) {
    const int row = first + i * kRows + threadIdx.x / kLanes;
    const int64_t at = (head + row) * Dim + threadIdx.x % kLanes * 8;
    alignas(8) int8_t codes[8];
    alignas(16) half values[8];
    int sum = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float code = levels.code(__half2float(reinterpret_cast<const half*>(&loaded[i])[c]));
      codes[c] = static_cast<int8_t>(code), values[c] = __float2half(code - levels.zero);
      sum += codes[c];
    }
    if (tensor == 1) {
      for (int lane = kLanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
      if (threadIdx.x % kLanes == 0)
        w.start[static_cast<int64_t>(blockIdx.x) * kKeys + i * kRows + threadIdx.x / kLanes] =
            start_of(given ? static_cast<int>(given[0].zero) : 0, sum);
    }
    if (row >= seq) continue;
    if (tensor == 2)
      *reinterpret_cast<uint4*>(w.v + at) = *reinterpret_cast<const uint4*>(values);
    else
      *reinterpret_cast<uint2*>((tensor ? w.k : w.q) + at) = *reinterpret_cast<const uint2*>(codes);
  }
}

// ---- Attention: as in rung 4, but for what is commented here

// A tile in shared memory has rows of RowBytes; see rung 4. Of 64 bytes, two rows share the 128 bytes of all banks.
template <int RowBytes>
__device__ uint32_t offset(int row, int chunk) {
  return row * RowBytes + (chunk ^ (RowBytes == 64 ? row / 2 % 4 : row % 8)) * 16;
}

template <int RowBytes, int Rows>
__device__ void load(uint32_t tile, const void* x, int first, int seq) {
  constexpr int kChunks = RowBytes / 16;  // of a row
#pragma unroll
  for (int i = 0; i < Rows * kChunks / kThreads; ++i) {
    const int row = (i * kThreads + threadIdx.x) / kChunks, chunk = threadIdx.x % kChunks;
    const bool inside = first + row < seq;
    const char* from =
        static_cast<const char*>(x) + static_cast<int64_t>(inside ? first + row : 0) * RowBytes + chunk * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(tile + offset<RowBytes>(row, chunk)), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
  }
}

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

__device__ int2 load_two(uint32_t address) {
  int2 x;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}

__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same with four int8 in the place of two f16: a is 16 x 32, b 32 x 8. In bytes, rows are as long as those of f16,
// so that ldmatrix loads them alike.
__device__ void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ uint32_t pack(float low, float high) {
  const half2 x = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(x);
}

// PerBlock: scales change from tile to tile. Else the bias stays in the scores, as it is added to all of a row alike.
template <int Dim, bool Causal, bool PerBlock>
__global__ void __launch_bounds__(kThreads, kBlocks) attention(Workspace w, half* o, int seq, float scale_log2) {
  // A stage is a tile of K, one of V, and where the sums of the keys start.
  constexpr int kV = kKeys * Dim, kStarts = 3 * kV, kStageBytes = kStarts + kKeys * 4;
  static_assert(kStageBytes % 256 == 0);  // the period of places in a row
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t q_tile = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t stages = q_tile + kQueries * Dim;

  // Blocks start in the order of x, then y. Causal: those that see the most keys start first, of all heads, so that the
  // last ones to run are short. Otherwise the blocks of one head run together and share its K and V in L2.
  const int head = Causal ? blockIdx.x : blockIdx.y, heads = Causal ? gridDim.x : gridDim.y;
  const int first_query = kQueries * (Causal ? gridDim.y - 1 - blockIdx.y : blockIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp * 16 * kRowTiles;              // of the block's queries, the first of this warp
  const int my_query = first_query + first_row + lane / 4;  // and 8, 16 and 24 below
  const int keys = Causal ? min(seq, first_query + kQueries) : seq;
  const int blocks = (seq + kKeys - 1) / kKeys;  // of 64 tokens, that share scales
  const float* const k_scales = w.scales + (heads + head) * blocks;
  const int scale_block = min((first_query + first_row) / kKeys, blocks - 1);
  const float q_scale_log2 = scale_log2 * w.scales[head * blocks + scale_block] * (PerBlock ? 1 : k_scales[0]);

  const int64_t first = static_cast<int64_t>(head) * seq * Dim;
  const int8_t* const k = w.k + first;
  const half* const v = w.v + first;
  const auto load_tile = [&](int first_key, uint32_t stage) {
    load<Dim, kKeys>(stage, k, first_key, seq);
    load<2 * Dim, kKeys>(stage + kV, v, first_key, seq);
    if (threadIdx.x < kKeys / 4)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(stage + kStarts + threadIdx.x * 16),
                   "l"(w.start + static_cast<int64_t>(head) * blocks * kKeys + first_key + threadIdx.x * 4)
                   : "memory");
  };
  load<Dim, kQueries>(q_tile, w.q + first, first_query, seq);
  load_tile(0, stages);

  // Where this lane's rows for ldmatrix start. The chunk is 0 or 1 there; i times 32 bytes further it is chunk ^ 2 i.
  // The place in the row changes by the same xor, and so does the address, by 32 i bytes.
  const uint32_t q_row = q_tile + offset<Dim>(first_row + lane % 16, lane / 16);
  float sums[kRowTiles][Dim / 8][4] = {};  // of p v
  float m[kRowTiles][2];                   // the largest score of a row so far, times log2(e)
  float l[kRowTiles][2];                   // this lane's part of the sum of the row's p
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) m[r][0] = m[r][1] = -INFINITY, l[r][0] = l[r][1] = 0;

  for (int first_key = 0; first_key < keys; first_key += kKeys) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // this tile has come, for all threads, and all are done with the one before: its place is free
    const uint32_t stage = stages + first_key / kKeys % kStages * kStageBytes;
    if (first_key + kKeys < keys)
      load_tile(first_key + kKeys, stages + (first_key / kKeys + 1) % kStages * kStageBytes);
    const float to_score = PerBlock ? q_scale_log2 * k_scales[first_key / kKeys] : q_scale_log2;
    // sums is in units of the scale of V's tile before.
    const float* const v_scale = k_scales + heads * blocks + first_key / kKeys;
    const float rescale = PerBlock && first_key ? __fdividef(v_scale[-1], v_scale[0]) : 1;
    int s[kRowTiles][kKeys / 8][4];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      const int2 start = load_two(stage + kStarts + 32 * j + lane % 4 * 8);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) s[r][j][0] = s[r][j][2] = start.x, s[r][j][1] = s[r][j][3] = start.y;
    }
    const uint32_t k_row = stage + offset<Dim>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int c = 0; c < Dim / 32; ++c) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) ldmatrix(a[r], (q_row ^ 32 * c) + 16 * r * Dim);
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t b[4];  // keys 0 to 7 of 16: b[0] and b[1]; keys 8 to 15: b[2] and b[3]
        ldmatrix(b, (k_row ^ 32 * c) + 16 * j * Dim);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma(s[r][2 * j], a[r], b[0], b[1]);
          mma(s[r][2 * j + 1], a[r], b[2], b[3]);
        }
      }
    }

    constexpr int kMinusInfinity = static_cast<int>(0xff800000);  // as a float; the smallest here as an integer, too
    if (first_key + kKeys > seq || (Causal && first_key + kKeys - 1 > first_query + first_row)) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2, query = my_query + 16 * r + i % 4 / 2 * 8;
          if (key >= seq || (Causal && key > query)) s[r][i / 4][i % 4] = kMinusInfinity;
        }
    }
    const auto score = [](int x) { return __int_as_float(x) - (PerBlock ? __int_as_float(kBias) : 0.f); };

#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int largest = kMinusInfinity;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) largest = max(largest, max(s[r][j][2 * h], s[r][j][2 * h + 1]));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));  // the four lanes of a row
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        const float former = m[r][h];
        m[r][h] = fmaxf(former, score(largest) * to_score);
        const float shrink = exp2_fast(former - m[r][h]);
        l[r][h] *= shrink;
        const float shrink_sums = PerBlock ? shrink * rescale : shrink;
#pragma unroll
        for (int n = 0; n < Dim / 8; ++n) sums[r][n][2 * h] *= shrink_sums, sums[r][n][2 * h + 1] *= shrink_sums;
      }

    const uint32_t v_row = stage + kV + offset<2 * Dim>(lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      uint32_t p[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // top left, bottom left, top right, bottom right
          const int* x = &s[r][2 * j + i / 2][i % 2 * 2];
          const float p0 = exp2_fast(score(x[0]) * to_score - m[r][i % 2]);
          const float p1 = exp2_fast(score(x[1]) * to_score - m[r][i % 2]);
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
      const float inverse = k_scales[heads * blocks + (keys - 1) / kKeys] / sum;
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

// ---- Launches

size_t shared_bytes(const Problem& p) { return kQueries * p.dim + kStages * kKeys * (3 * p.dim + sizeof(int)); }
size_t workspace_bytes(const Problem& p) { return workspace_of(p, nullptr).bytes; }

template <bool PerBlock>
void launch_rounding(const Problem& p, const Arguments& a, cudaStream_t stream) {
  const Workspace w = workspace_of(p, a.workspace);
  const auto *q = static_cast<const half*>(a.q), *k = static_cast<const half*>(a.k), *v = static_cast<const half*>(a.v);
  if (!PerBlock) {
    launch("ranges", ranges, dim3(kRangeBlocks, 3), dim3(kRoundThreads), 0, stream, q, k, v, w.ranges, p.elements());
    launch("find_levels", find_levels, dim3(3), dim3(kRangeBlocks), 0, stream, w.ranges, w.levels);
  }
  const dim3 grid(static_cast<unsigned>(p.batch * p.heads * ceil_div(p.seq, kKeys)), 3);
  launch("round_block", p.dim == 64 ? round_block<64> : round_block<128>, grid, dim3(kRoundThreads), 0, stream, q, k, v,
         w, PerBlock ? nullptr : w.levels, p.seq);
}

template <int Dim, bool Causal, bool PerBlock>
void launch_one(const Problem& p, const Arguments& a, cudaStream_t stream) {
  launch("attention", attention<Dim, Causal, PerBlock>, grid_of(p, kQueries), dim3(kThreads), shared_bytes(p), stream,
         workspace_of(p, a.workspace), static_cast<half*>(a.o), p.seq, p.scale() * kLog2E);
}

template <bool PerBlock>
void launch_attention(const Problem& p, const Arguments& a, cudaStream_t stream) {
  const auto causal = p.dim == 64 ? launch_one<64, true, PerBlock> : launch_one<128, true, PerBlock>;
  const auto full = p.dim == 64 ? launch_one<64, false, PerBlock> : launch_one<128, false, PerBlock>;
  (p.causal ? causal : full)(p, a, stream);
}

template <bool PerBlock>
void launch_all(const Problem& p, const Arguments& a, cudaStream_t stream) {
  launch_rounding<PerBlock>(p, a, stream);
  launch_attention<PerBlock>(p, a, stream);
}

template <bool PerBlock>
void as_seen(const Problem& p, std::vector<float>& q, std::vector<float>& k, std::vector<float>& v) {
  const int64_t head = static_cast<int64_t>(p.seq) * p.dim, block = kKeys * p.dim;
  for (std::vector<float>* x : {&q, &k, &v})
    for (int64_t i = 0, end; i < p.elements(); i = end) {
      end = PerBlock ? std::min(i + block, (i / head + 1) * head) : p.elements();
      float low = 0, high = 0;
      for (int64_t j = i; j < end; ++j) low = std::min(low, (*x)[j]), high = std::max(high, (*x)[j]);
      const Levels levels = PerBlock ? symmetric(std::max(-low, high)) : levels_of(low, high);
      for (int64_t j = i; j < end; ++j) (*x)[j] = levels.scale * (levels.code((*x)[j]) - levels.zero);
    }
}

}  // namespace

const Rung rung = {
    .name = "5_int8",
    .idea = "q k^T on int8 tensor cores, with scales and zero points; P and V as f16",
    .element = Element::f16,
    .rotates = false,
    .dims = {64, 128},
    .kernels = {{"per_tensor", shared_bytes, workspace_bytes, launch_all<false>, false, as_seen<false>},
                {"round", nullptr, workspace_bytes, launch_rounding<false>, true},
                {"attention", shared_bytes, workspace_bytes, launch_attention<false>, true},
                {"per_block", shared_bytes, workspace_bytes, launch_all<true>, false, as_seen<true>}},
};

}  // namespace ladder
