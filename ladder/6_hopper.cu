// Rung 6: Hopper.
//
// New: wgmma, which multiplies matrices that lie in shared memory, for a whole warpgroup (four warps) and while its
// threads go on; TMA, by which one thread has whole tiles copied; and mbarriers, which say when a tile has come and
// when its place is free. So warps have roles: a producer only copies, and two warpgroups, of 64 queries each, only
// compute. Gain: wgmma is the only way to the full rate of Hopper's tensor cores, 4096 FLOPs a cycle and
// multiprocessor, where mma.sync reaches 2650. It reads K and V once for 64 queries instead of 32, and no thread spends
// instructions on addresses of copies or on loading fragments. What is hard: at that rate the products of a tile (dim
// 128) take 2048 cycles, and its exponentials 1024. They fit beside the products only if they overlap, in two ways
// here. A warpgroup issues the scores of the next tile and the product p v of this one together, and computes the
// exponentials of the next while p v runs. And the warpgroups issue products in turns (ping-pong), so that one computes
// exponentials while the products of the other run.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_fp16.h>

#include "ladder.h"

namespace ladder {
namespace {

constexpr int kQueries = 128, kKeys = 128;  // of a block; of a tile of K or V
constexpr int kStages = 2;                  // tiles of K and of V in shared memory
constexpr int kConsumers = 2;               // warpgroups, and then that of the producer
constexpr int kThreads = 128 * (kConsumers + 1);

// A tile lies in shared memory as TMA writes and wgmma reads it: in panels of 64 channels, each 128 rows of 128 bytes.
// Chunk c (16 bytes) of row r lies at place c ^ r % 8 of the row, the 128-byte swizzle. It repeats after 1024 bytes.
constexpr int kPanel = 64, kPanelBytes = 128 * 128;

// ---- mbarriers: a phase ends when as many have arrived as init said, and all bytes that were announced.

__device__ void init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has ended. Parities are 0, 1, 0, ...; the phase before the first has ended.
__device__ void wait(uint32_t barrier, int parity) {
  int done = 0;
  while (!done)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
}

// TMA: 64 channels of 128 rows of a [heads, seq, dim] tensor. Rows beyond seq become zeros; their bytes count as well.
__device__ void load_tile(uint32_t tile, const CUtensorMap& x, int dim, int row, int head, uint32_t barrier) {
  arrive_expecting(barrier, dim / kPanel * kPanelBytes);
  for (int panel = 0; panel < dim / kPanel; ++panel)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(tile + panel * kPanelBytes),
        "l"(&x), "r"(panel * kPanel), "r"(row), "r"(head), "r"(barrier)
        : "memory");
}

// ---- wgmma: the warpgroup's sums d[64 x N] (+)= a[64 x 16] b[16 x N]. Each warp has 16 rows of d, in the layout of
// mma.sync: lane l has, of each 8 columns, 2 (l % 4) and the next, of row l / 4 in d[0] and d[1], 8 below in d[2],
// d[3].

// What wgmma knows of a matrix in shared memory: where it starts, bytes between panels (used where the sum runs along
// its rows), bytes between groups of 8 rows, and the swizzle. Addresses are counted in 16 bytes.
__device__ uint64_t matrix(uint32_t start) {
  return uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | uint64_t{kPanelBytes / 16} << 16 | start / 16;
}

// The sums of a wgmma, 32 or 64 registers: as the text of the instruction names them, and as C++ passes them.
#define LADDER_D32                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LADDER_D64                                                                     \
  LADDER_D32                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LADDER_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LADDER_16(d, i) LADDER_4(d, i), LADDER_4(d, i + 4), LADDER_4(d, i + 8), LADDER_4(d, i + 12)
#define LADDER_32(d, i) LADDER_16(d, i), LADDER_16(d, i + 16)

// a and b in shared memory, both with rows along the sum (b is given as K is: a row for each column of d).
__device__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" LADDER_D64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : LADDER_32(d, 0), LADDER_32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}
// a in registers, as for mma.sync; b in shared memory, with rows across the sum, as V is. Adds to d.
__device__ void wgmma(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" LADDER_D64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : LADDER_32(d, 0), LADDER_32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ void wgmma(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" LADDER_D32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : LADDER_32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Products that follow see what threads have written to registers.
__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last `Pending` committed groups have ended. The empty asm stops the compiler from using sums
// earlier.
template <int Pending, int N>
__device__ void wgmma_wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- The softmax of a tile, for the two rows of a thread: element i belongs to row i / 2 % 2.

struct Rows {
  float m[2] = {-INFINITY, -INFINITY};  // the largest score so far, times log2(e)
  float l[2] = {0, 0};                  // this thread's part of the sum of p
  float shrink[2];                      // by what sums over earlier tiles are to be multiplied
};

__device__ void softmax(float (&s)[64], Rows& rows, float scale_log2) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 2 * h; i < 64; i += 4) largest = fmaxf(largest, fmaxf(s[i], s[i + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));  // the four lanes of a row
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float former = rows.m[h];
    rows.m[h] = fmaxf(former, largest * scale_log2);
    rows.shrink[h] = exp2_fast(former - rows.m[h]);
    float sum = 0;
#pragma unroll
    for (int i = 2 * h; i < 64; i += 4) {
      s[i] = exp2_fast(s[i] * scale_log2 - rows.m[h]);
      s[i + 1] = exp2_fast(s[i + 1] * scale_log2 - rows.m[h]);
      sum += s[i] + s[i + 1];
    }
    rows.l[h] = rows.l[h] * rows.shrink[h] + sum;
  }
}

__device__ uint32_t pack(float low, float high) {
  const half2 x = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(x);
}

// ---- One block computes 128 queries of one head. Tiles are taken from the last to the first, so that only the first
// one that is computed has keys to mask: those beyond seq, and under the causal mask those on the diagonal.
template <int Dim, bool Causal>
__global__ void __launch_bounds__(kThreads, 1)
    attention(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
              const __grid_constant__ CUtensorMap v, half* o, int seq, int heads, float scale_log2) {
  constexpr int kTileBytes = Dim / kPanel * kPanelBytes;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t q_tile = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t k_tiles = q_tile + kTileBytes, v_tiles = k_tiles + kStages * kTileBytes;
  // Full: a tile has come. Empty: all consumers have read it. A barrier has 8 bytes, one follows for each stage.
  const uint32_t q_full = v_tiles + kStages * kTileBytes;
  const uint32_t k_full = q_full + 8, k_empty = k_full + 8 * kStages;
  const uint32_t v_full = k_empty + 8 * kStages, v_empty = v_full + 8 * kStages;

  // Blocks start in the order of their index. Causal: those that see the most keys start first, of all heads, so that
  // the last ones to run are short. Otherwise the blocks of one head run together and share its K and V in L2.
  const int blocks = (seq + kQueries - 1) / kQueries, index = blockIdx.x;
  const int head = Causal ? index % heads : index / blocks;
  const int first_query = kQueries * (Causal ? blocks - 1 - index / heads : index % blocks);
  const int keys = Causal ? min(seq, first_query + kQueries) : seq;
  const int tiles = (keys + kKeys - 1) / kKeys;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    if (q_tile % 1024) __trap();  // the swizzle counts from multiples of 1024
    init(q_full, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      init(k_full + 8 * stage, 1), init(k_empty + 8 * stage, 4 * kConsumers);  // a lane of each warp arrives
      init(v_full + 8 * stage, 1), init(v_empty + 8 * stage, 4 * kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // TMA sees them as well
  }
  __syncthreads();

  // A block starts with 168 registers a thread. The producer's warpgroup gives most of them to the others.
  if (warp >= 4 * kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x != 128 * kConsumers) return;
    load_tile(q_tile, q, Dim, first_query, head, q_full);
    for (int i = 0; i < tiles; ++i) {
      const int stage = i % kStages, parity = i / kStages % 2 ^ 1, row = (tiles - 1 - i) * kKeys;
      wait(k_empty + 8 * stage, parity);
      load_tile(k_tiles + stage * kTileBytes, k, Dim, row, head, k_full + 8 * stage);
      wait(v_empty + 8 * stage, parity);
      load_tile(v_tiles + stage * kTileBytes, v, Dim, row, head, v_full + 8 * stage);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

  const int group = warp / 4;
  const int my_query = first_query + 16 * warp + lane / 4;  // and 8 below
  float s[kKeys / 2], sums[Dim / 2] = {};                   // sums of p v
  uint32_t p[kKeys / 4];
  Rows rows;

  const auto wait_for_k = [&](int i) { wait(k_full + 8 * (i % kStages), i / kStages % 2); };
  const auto multiply_qk = [&](int i) {  // s = q k^T of the i-th tile
    const uint32_t q_rows = q_tile + group * 64 * 128, k_tile = k_tiles + i % kStages * kTileBytes;
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < Dim / 16; ++c) {
      const int offset = c / 4 * kPanelBytes + c % 4 * 32;
      wgmma(s, matrix(q_rows + offset), matrix(k_tile + offset), c > 0);
    }
    wgmma_commit();
  };
  const auto multiply_pv = [&](int i) {  // sums += p v
    const uint32_t v_tile = v_tiles + i % kStages * kTileBytes;
    wait(v_full + 8 * (i % kStages), i / kStages % 2);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) wgmma(sums, &p[4 * j], matrix(v_tile + j * 16 * 128));
    wgmma_commit();
  };
  const auto release = [&](uint32_t barrier, int i) {
    if (lane == 0) arrive(barrier + 8 * (i % kStages));
  };
  const auto convert = [&] {  // s is laid out as the left operand is: p stays in its thread
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
  };
  // Named barriers 1 and 2: the turns of the two warpgroups. One waits, the other arrives, 256 threads in all.
  const auto my_turn = [&] { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); };
  const auto pass_turn = [&] { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); };

  wait(q_full, 0);
  wait_for_k(0);
  multiply_qk(0);
  wgmma_wait<0>(s);
  release(k_empty, 0);
  const int first_key = (tiles - 1) * kKeys;
  if (Causal || first_key + kKeys > seq) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2, query = my_query + i / 2 % 2 * 8;
      if (key >= seq || (Causal && key > query)) s[i] = -INFINITY;
    }
  }
  softmax(s, rows, scale_log2);
  convert();
  if (tiles > 1) {
    wait_for_k(1);
    if (group == 1) pass_turn();  // the first turn is warpgroup 0's
  }

  for (int i = 1; i < tiles; ++i) {
    my_turn();
    multiply_qk(i);
    multiply_pv(i - 1);
    if (group == 0 || i + 1 < tiles) pass_turn();
    wgmma_wait<1>(s);  // p v goes on
    release(k_empty, i);
    softmax(s, rows, scale_log2);
    // This wait is a loop, and ptxas does not move instructions from before a loop to behind it. Without it, the wait
    // for p v would stand ahead of the exponentials, which would run after the product instead of beside it.
    if (i + 1 < tiles) wait_for_k(i + 1);
    wgmma_wait<0>(sums);
    release(v_empty, i - 1);
#pragma unroll
    for (int n = 0; n < Dim / 2; ++n) sums[n] *= rows.shrink[n / 2 % 2];
    convert();
  }
  multiply_pv(tiles - 1);
  wgmma_wait<0>(sums);

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float l = rows.l[h];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const float inverse = 1 / l;
    const int query = my_query + 8 * h;
    if (query < seq) {
      half* row = o + (static_cast<int64_t>(head) * seq + query) * Dim + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Dim / 8; ++n)
        *reinterpret_cast<uint32_t*>(row + 8 * n) =
            pack(sums[4 * n + 2 * h] * inverse, sums[4 * n + 2 * h + 1] * inverse);
    }
  }
}

// ---- Launch

size_t shared_bytes(const Problem& p) {
  return (kQueries + 2 * kStages * kKeys) * p.dim * sizeof(half) + 8 * (1 + 4 * kStages);
}

// Tells TMA what [batch * heads, seq, dim] lies at x. The function belongs to the driver; the runtime finds it.
CUtensorMap tensor_map(const Problem& p, const void* x) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result), "TMA");
  if (!found) throw std::runtime_error("the driver has no cuTensorMapEncodeTiled; CUDA 12.0 and later have it");
  const cuuint64_t row = p.dim * sizeof(half);
  const cuuint64_t shape[] = {cuuint64_t(p.dim), cuuint64_t(p.seq), cuuint64_t(p.batch) * p.heads};
  const cuuint64_t strides[] = {row, row * p.seq};  // bytes, of all but the first
  const cuuint32_t box[] = {kPanel, kKeys, 1}, steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult error = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, const_cast<void*>(x), shape, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(error));
  return map;
}

template <int Dim, bool Causal>
void launch_one(const Problem& p, const Arguments& a, cudaStream_t stream) {
  const int heads = p.batch * p.heads;
  launch("attention", attention<Dim, Causal>, dim3(static_cast<unsigned>(ceil_div(p.seq, kQueries) * heads)),
         dim3(kThreads), shared_bytes(p), stream, tensor_map(p, a.q), tensor_map(p, a.k), tensor_map(p, a.v),
         static_cast<half*>(a.o), p.seq, heads, p.scale() * kLog2E);
}

void launch_attention(const Problem& p, const Arguments& a, cudaStream_t stream) {
  const auto causal = p.dim == 64 ? launch_one<64, true> : launch_one<128, true>;
  const auto full = p.dim == 64 ? launch_one<64, false> : launch_one<128, false>;
  (p.causal ? causal : full)(p, a, stream);
}

}  // namespace

const Rung rung = {
    .name = "6_hopper",
    .idea = "wgmma and TMA: a producer warp and two warpgroups in turns, products beside exponentials",
    .element = Element::f16,
    .rotates = false,
    .dims = {64, 128},
    .kernels = {{"attention", shared_bytes, nullptr, launch_attention}},
    .capability = 90,
};

}  // namespace ladder
