// The operands of int8's backward pass: q, k, v and do in int8 with a scale for each token
// (operands/quantize/training.h), beside q, k and do in f16. operands.h has the list of the verbs. Integer sums become
// floats as in the forward pass (key_factors.h). s lacks the product of q and the mean of the block of 64 keys, which
// tensor cores compute from q in f16, with the mean in all columns.
#pragma once
#include "cuda/operands/quantize/training.h"
#include "cuda/sm80/bwd/operands.h"
#include "cuda/sm80/key_factors.h"

namespace octet::cuda::sm80 {

struct Int8Operands {
  using Element = F16;
  static constexpr bool kReadsV = false, kRecomputes = false, kSubtractsLse = true, kScalesRows = true,
                        kTileScales = false;

  struct Terms {
    const S8 *q, *k, *v, *do_;
    const KeyPairFactors *k_factors, *v_factors;  // [batch, kv_head, key / 2]
    const float* scales;                          // of q and do, see Int8Inputs
    BlockMeans means;
    int keys;  // rows of a head of k and v
  };

  template <class Kernel>
  using TileQ = SharedTile<S8, Kernel::kQueries, Kernel::kDim>;
  template <class Kernel>
  using TileK = SharedTile<S8, Kernel::kKeys, Kernel::kDim>;
  template <class Kernel>
  static constexpr int kMeans = Kernel::kKeys > kBlockKeys ? Kernel::kKeys / kBlockKeys : 1;

  // Whether the products of q and means are found an iteration ahead, once for all warps. With 64 keys a warp has few
  // of them, and its own are as fast.
  template <class Kernel>
  static constexpr bool kPrepares = (kMeans<Kernel> > 1);

  template <class Kernel>
  struct alignas(128) Shared {
    unsigned char k[TileK<Kernel>::kBytes], v[TileK<Kernel>::kBytes];
    unsigned char q[Kernel::kStages][TileQ<Kernel>::kBytes], do_[Kernel::kDoStages][TileQ<Kernel>::kBytes];
    KeyPairFactors k_factors[Kernel::kKeys / 2], v_factors[Kernel::kKeys / 2];
    alignas(kChunkBytes) F16 mean[kMeans<Kernel>][Kernel::kDim];
    alignas(kChunkBytes) float q_scale[Kernel::kStages][Kernel::kQueries], do_scale[Kernel::kStages][Kernel::kQueries];
    float mean_factor[kMeans<Kernel>];
    // What s lacks, for each mean. Where this is prepared, q_scale and do_scale become what s and dp are multiplied by.
    float lacks[kPrepares<Kernel> ? Kernel::kStages : 0][kMeans<Kernel>][Kernel::kQueries];
    float q_f16_scale;  // of q in f16
  };

  // Returns the row of k and v that is the block's first key.
  template <class Kernel>
  static __device__ int64_t first_row(const Kernel& f) {
    const auto& w = f.w;
    const int start = f.a.k_blocks.cu_seqlens ? (w.k.first / kBlockKeys + w.k.index) * kBlockKeys : 0;
    return int64_t{w.batch * f.a.kv_heads + w.kv_head} * f.params.int8.keys + start + w.first_key;
  }
  template <class Kernel>
  static __device__ void load_keys(const Kernel& f) {
    constexpr int kDim = Kernel::kDim, kKeys = Kernel::kKeys, kThreads = Kernel::kThreads;
    const Terms& terms = f.params.int8;
    auto& shared = f.shared.operands;
    const int64_t first = first_row(f);
    const Interval rows{0, f.w.k.tokens - f.w.first_key};
    load_async<kThreads>(TileK<Kernel>{shared.k}, terms.k + first * kDim, kDim, rows, kDim);
    load_async<kThreads>(TileK<Kernel>{shared.v}, terms.v + first * kDim, kDim, rows, kDim);
    static_assert(kKeys <= kThreads);
    const int i = static_cast<int>(threadIdx.x) % (kKeys / 2), bytes = 2 * i < rows.last ? kChunkBytes : 0;
    const KeyPairFactors* const from = threadIdx.x < kKeys / 2 ? terms.k_factors : terms.v_factors;
    KeyPairFactors* const to = threadIdx.x < kKeys / 2 ? shared.k_factors : shared.v_factors;
    if (threadIdx.x < kKeys) ptx::cp_async(ptx::shared_address(to + i), from + (bytes ? first / 2 + i : 0), bytes);
    constexpr int kChunks = kDim * static_cast<int>(sizeof(F16)) / kChunkBytes;
    if (threadIdx.x >= kMeans<Kernel> * kChunks) return;
    const int mean = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
    const bool there = mean * kBlockKeys < rows.last;
    const int64_t block = first / kBlockKeys + (there ? mean : 0);
    ptx::cp_async(ptx::shared_address(&shared.mean[mean][chunk * kChunkColumns<F16>]),
                  terms.means.mean + block * kDim + chunk * kChunkColumns<F16>, there ? kChunkBytes : 0);
    if (chunk == 0) shared.mean_factor[mean] = terms.means.factor[block];
  }

  template <class Kernel, class Step>
  static __device__ void load_rows_of(const Kernel& f, const Step& step, const S8* from, unsigned char* to) {
    const int head = f.w.batch * f.a.heads + step.head, rows = f.w.q.tokens - step.query;
    const int64_t first = int64_t{head} * f.a.q_blocks.tokens + (f.w.q.first + step.query);
    load_rows<Kernel::kThreads>(TileQ<Kernel>{to}, from + first * Kernel::kDim, rows);
  }
  // Loads a tile whose rows lie one after the other. Those from `rows` on become zeros and are not read.
  template <int Threads, class Tile>
  static __device__ void load_rows(const Tile& tile, const S8* from, int rows) {
    constexpr unsigned kChunks = Tile::kRowBytes / kChunkBytes, kRowsAtOnce = Threads / kChunks;
    static_assert(kRowsAtOnce % 8 == 0 && Tile::kRows % kRowsAtOnce == 0);  // 8: the period of the swizzle
    const unsigned thread = ptx::opaque(static_cast<int>(threadIdx.x));
    const int row = static_cast<int>(thread / kChunks);
    const uint32_t to = tile.address() + Tile::offset(row, static_cast<int>(thread % kChunks));
    from += threadIdx.x * kChunkBytes;
#pragma unroll
    for (int i = 0; i < Tile::kRows; i += kRowsAtOnce)
      ptx::cp_async(to + i * Tile::kRowBytes, from + i * Tile::kRowBytes, row + i < rows ? kChunkBytes : 0);
  }
  template <class Kernel, class Step>
  static __device__ void load_q(const Kernel& f, const Step& step, int stage) {
    auto& shared = f.shared.operands;
    load_rows_of(f, step, f.params.int8.q, shared.q[stage]);
    constexpr unsigned kRows = Kernel::Tiles::kQueries, kChunks = Kernel::kQueries * sizeof(float) / kChunkBytes;
    static_assert(2 * kChunks <= Kernel::kThreads);
    const unsigned thread = threadIdx.x, i = thread % kChunks * 4, which = thread / kChunks;
    if (which >= 2) return;
    float* const to = which ? shared.do_scale[stage] : shared.q_scale[stage];
    const float* const of_tile = f.params.int8.scales + int64_t{step.tile} * (2 * kRows);
    ptx::cp_async(ptx::shared_address(to + i), of_tile + (which * kRows + step.first + i));
  }
  template <class Kernel, class Step>
  static __device__ void load_do(const Kernel& f, const Step& step, int stage) {
    load_rows_of(f, step, f.params.int8.do_, f.shared.operands.do_[stage]);
  }

  template <class Kernel>
  static __device__ void start_bin(const Kernel& f) {
    f.shared.operands.q_f16_scale = exp2f(static_cast<float>(-f.e.q));
  }
  static __device__ float q_k_scale(const Exponents&) { return 1.f; }
  static __device__ float product_scale(const Exponents& e) {
    return exp2f(static_cast<float>(e.do_ + e.v + e.product)) * kUnitsOfSum;
  }
  // Returns what dp of a row is multiplied by.
  template <class Kernel>
  static __device__ float row_scale(const Kernel& f, int stage, int row) {
    const float scale = f.shared.operands.do_scale[stage][row];
    return kPrepares<Kernel> ? scale : f.shared.product_scale * scale;
  }

  // Turns integer sums into floats, in units of kUnitsOfSum and without the scales of rows.
  template <class Kernel>
  static __device__ void to_floats(const Kernel& f, const Accumulator<Kernel::PartS::kColumns, int>& sums,
                                   const KeyPairFactors* factors, Accumulator<Kernel::PartS::kColumns>& to) {
    // opaque() stops the compiler from keeping addresses in registers throughout the loop.
    factors += 8 * Kernel::PartS::column_block(f.warp) + ptx::opaque(f.lane) % 4;
#pragma unroll
    for (int i = 0; i < Kernel::PartS::kColumns / 8; ++i) {
      const KeyPairFactors x = factors[4 * i];
#pragma unroll
      for (int row = 0; row < kRowsPerThread; ++row)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int at = 4 * i + 2 * row + c;
          to.x[at] = __fmaf_rn(__int_as_float(sums.x[at]), x.scale[c], x.begin[c]);
        }
    }
  }
  template <class Kernel, int Blocks>
  static __device__ void multiply(const Kernel& f, Accumulator<Kernel::PartS::kColumns, int> (&sums)[Blocks],
                                  unsigned char* rows, unsigned char* keys) {
#pragma unroll
    for (auto& block : sums)
#pragma unroll
      for (int& x : block.x) x = __float_as_int(kSumsBegin);
    mma_ABt(sums, TileQ<Kernel>{rows}, Kernel::PartS::row_block(f.warp), TileK<Kernel>{keys},
            Kernel::PartS::column_block(f.warp));
  }

  // Multiplies 16 queries of a stage and the means of the keys, which take turns in the columns of the right operand.
  template <class Kernel>
  static __device__ void multiply_means(const Kernel& f, int stage, int row_block, float (&sums)[4]) {
    const int lane = ptx::opaque(f.lane), mean = kPrepares<Kernel> ? lane / 4 % kMeans<Kernel> : 0;
    const F16* const of_lane = f.shared.operands.mean[mean] + lane % 4 * 2;
    const typename Kernel::TileQ q{f.shared.q[stage]};
    const uint32_t of_tile = kPrepares<Kernel> ? Kernel::TileQ::offset(lane % 16, lane / 16) : q.lane_down();
    const uint32_t rows = Kernel::TileQ::move(of_tile, row_block, 0);
    constexpr int kUnrolled = kPrepares<Kernel> ? Kernel::kDim / 16 : 2;
#pragma unroll kUnrolled
    for (int k_step = 0; k_step < Kernel::kDim / 16; ++k_step) {
      uint32_t left[4];
      ptx::ldmatrix(left, q.step(rows, 0, k_step));
      const uint32_t right[2] = {*reinterpret_cast<const uint32_t*>(of_lane + 16 * k_step),
                                 *reinterpret_cast<const uint32_t*>(of_lane + 16 * k_step + 8)};
      ptx::mma_m16n8k16<F16>(sums, left, right);
    }
  }
  // Finds what s lacks, and what s and dp are multiplied by, for the queries of a stage, which have arrived. A warp has
  // 16 of them.
  template <class Kernel>
  static __device__ void prepare(const Kernel& f, int stage) {
    static_assert(kMeans<Kernel> == 2 && Kernel::kPlain);
    auto& shared = f.shared.operands;
    const int warp = ptx::opaque(f.warp), lane = ptx::opaque(f.lane);
    if (warp >= Kernel::kQueries / 16) return;
    float sums[4] = {};
    multiply_means(f, stage, warp, sums);
    // Four lanes have the same sums: the first takes one row, the second the other.
    const int half = lane % 4, row = 16 * warp + lane / 4 + 8 * half;
    if (half >= kRowsPerThread) return;
    shared.q_scale[stage][row] = shared.q_scale[stage][row] * kUnitsOfSum * f.shared.scale_log2;
    shared.do_scale[stage][row] *= f.shared.product_scale;
#pragma unroll
    for (int mean = 0; mean < kMeans<Kernel>; ++mean) {
      const float product = (half ? sums[2 + mean] : sums[mean]) * (shared.mean_factor[mean] * shared.q_f16_scale);
      shared.lacks[stage][mean][row] = __fmaf_rn(product, f.shared.scale_log2, -f.shared.lse[stage][row]);
    }
  }

  // Finds what s of this thread's rows of row block `block` of the warp lacks, and what it is multiplied by before
  // that.
  template <class Kernel>
  static __device__ void find_factors(const Kernel& f, int stage, int block, RowValues& lacks, RowValues& scale) {
    const auto& shared = f.shared.operands;
    const int mean = 16 * Kernel::PartS::column_block(f.warp) / kBlockKeys,
              row_block = Kernel::PartS::row_block(f.warp) + block;
    static_assert(kBlockKeys % Kernel::PartS::kColumns == 0);
    if constexpr (kPrepares<Kernel>) {
      const int row = 16 * row_block + ptx::opaque(f.lane) / 4;
      const float *const scales = shared.q_scale[stage], *const all = shared.lacks[stage][mean];
      lacks = {all[row], all[row + 8]}, scale = {scales[row], scales[row + 8]};
      return;
    }
    float sums[4] = {};
    multiply_means(f, stage, row_block, sums);
    const float of_mean = shared.mean_factor[mean] * shared.q_f16_scale;
    lacks = {sums[0] * of_mean, sums[2] * of_mean};
#pragma unroll
    for (int half = 0; half < kRowsPerThread; ++half) {
      const int row = 16 * row_block + ptx::opaque(f.lane) / 4 + 8 * half;
      scale[half] = shared.q_scale[stage][row] * kUnitsOfSum;
      if constexpr (Kernel::kPlain) {
        scale[half] *= f.shared.scale_log2;
        lacks[half] = __fmaf_rn(lacks[half], f.shared.scale_log2, -f.shared.lse[stage][row]);
      }
    }
  }
  template <class Kernel>
  static __device__ void multiply_s(const Kernel& f, typename Kernel::TileS& s, int stage) {
    Accumulator<Kernel::PartS::kColumns, int> sums[Kernel::PartS::kBlocks];
    multiply(f, sums, f.shared.operands.q[stage], f.shared.operands.k);
#pragma unroll
    for (int m = 0; m < Kernel::PartS::kBlocks; ++m) {
      to_floats(f, sums[m], f.shared.operands.k_factors, s[m]);
      RowValues lacks, scale;
      find_factors(f, stage, m, lacks, scale);
#pragma unroll
      for (int i = 0; i < Kernel::PartS::kColumns / 2; ++i)
        s[m].x[i] = __fmaf_rn(s[m].x[i], scale[i / 2 % 2], lacks[i / 2 % 2]);
    }
  }
  template <class Kernel>
  static __device__ void multiply_dp(const Kernel& f, typename Kernel::TileS& dp, int do_stage) {
    Accumulator<Kernel::PartS::kColumns, int> sums[Kernel::PartS::kBlocks];
    multiply(f, sums, f.shared.operands.do_[do_stage], f.shared.operands.v);
#pragma unroll
    for (int m = 0; m < Kernel::PartS::kBlocks; ++m) to_floats(f, sums[m], f.shared.operands.v_factors, dp[m]);
  }

  // Multiplies this warp's keys and the queries from row block `block` on, and turns the sums into floats as to_floats
  // does.
  template <class Kernel>
  static __device__ void multiply_by_keys(const Kernel& f, typename Kernel::TileS& to, unsigned char* keys,
                                          const KeyPairFactors* factors, unsigned char* rows, int block) {
    Accumulator<Kernel::PartS::kColumns, int> sums[Kernel::PartS::kBlocks];
    // opaque() stops the compiler from keeping addresses in registers throughout the loop.
    const int row_block = Kernel::PartS::row_block(ptx::opaque(f.warp));
    mma_ABt(sums, TileK<Kernel>{keys}, row_block, TileQ<Kernel>{rows}, block, __float_as_int(kSumsBegin));
    const int key = 16 * row_block + ptx::opaque(f.lane) / 4;
#pragma unroll
    for (int m = 0; m < Kernel::PartS::kBlocks; ++m)
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half) {
        const KeyPairFactors& of_keys = factors[key / 2 + 8 * m + 4 * half];
        const float scale = of_keys.scale[key % 2], begin = of_keys.begin[key % 2];
#pragma unroll
        for (int i = 0; i < Kernel::PartS::kColumns / 8; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int at = 4 * i + 2 * half + c;
            to[m].x[at] = __fmaf_rn(__int_as_float(sums[m].x[at]), scale, begin);
          }
      }
  }
  template <class Kernel>
  static __device__ void multiply_s_by_keys(const Kernel& f, typename Kernel::TileS& s, int stage, int block) {
    static_assert(kPrepares<Kernel>);
    const auto& shared = f.shared.operands;
    multiply_by_keys(f, s, f.shared.operands.k, shared.k_factors, f.shared.operands.q[stage], block);
    const int mean = 16 * Kernel::PartS::row_block(ptx::opaque(f.warp)) / kBlockKeys,
              first = 16 * block + fragment_column();
#pragma unroll
    for (int i = 0; i < Kernel::PartS::kColumns / 8; ++i) {
      const auto scale = *reinterpret_cast<const float2*>(&shared.q_scale[stage][first + 8 * i]),
                 lacks = *reinterpret_cast<const float2*>(&shared.lacks[stage][mean][first + 8 * i]);
#pragma unroll
      for (auto& rows : s)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = rows.x[4 * i + j];
          x = __fmaf_rn(x, j % 2 ? scale.y : scale.x, j % 2 ? lacks.y : lacks.x);
        }
    }
  }
  template <class Kernel>
  static __device__ void multiply_dp_by_keys(const Kernel& f, typename Kernel::TileS& dp, int stage, int block) {
    auto& shared = f.shared.operands;
    multiply_by_keys(f, dp, shared.v, shared.v_factors, shared.do_[stage], block);
  }
};

}  // namespace octet::cuda::sm80
