// Stores the results of the backward kernel: it adds dq to the sums over blocks of keys, and writes dk and dv.
#pragma once
#include <cstring>
#include <type_traits>

#include "cuda/sm80/bwd/backward.h"

namespace octet::cuda::sm80 {

// Adds N floats, which lie at a multiple of as many, by one instruction where the GPU has it.
template <int N>
__device__ void add_at_once(float* to, const float* x) {
#if __CUDA_ARCH__ >= 900
  using Numbers = std::conditional_t<N == 4, float4, std::conditional_t<N == 2, float2, float>>;
  Numbers numbers;
  memcpy(&numbers, x, sizeof numbers);
  atomicAdd(reinterpret_cast<Numbers*>(to), numbers);
#else
  for (int i = 0; i < N; ++i) atomicAdd(to + i, x[i]);
#endif
}

// Returns where the sums of this thread's first number of dq lie, where threads add AtOnce of them at a time. The
// layout of the sums is that of two warpgroups' accumulators (see postprocess_dq.cu): 64 queries each, with all
// channels or half of them.
template <class Kind>
template <int AtOnce>
__device__ int64_t Backward<Kind>::sums_of(const Step& step) const {
  const int row = step.first + 16 * PartDq::row_block(warp);
  return int64_t{step.tile} * (Tiles::kQueries * kDim) + row / kWarpgroupRows * (kWarpgroupRows * kDim) +
         2 * PartDq::column_block(warp) * (4 * kWarpgroup) + (row % kWarpgroupRows * 2 + lane) * AtOnce;
}

// Returns where from there on those of the thread's four numbers `quad` lie.
template <class Kind>
template <int AtOnce>
__device__ int Backward<Kind>::sums_of_quad(int half, int quad) {
  constexpr int kQuadsOfBlock = kDqColumns / 8;
  return quad / kQuadsOfBlock * (32 * AtOnce) + (half * kQuadsOfBlock + quad % kQuadsOfBlock) * (4 * kWarpgroup);
}

// Adds four numbers of a thread's dq, times `scale`, to sums of floats.
template <class Kind>
__device__ void Backward<Kind>::add_floats(const TileDq& dq, float* sums, float scale, int half, int quad) const {
  constexpr int kAtOnce = kSumsAtOnce<kDim, Sums::floats>, kQuadsOfBlock = kDqColumns / 8;
  const float* const x = &dq[quad / kQuadsOfBlock].x[quad % kQuadsOfBlock * 4];
#pragma unroll
  for (int j = 0; j < 4; j += kAtOnce) {
    float scaled[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) scaled[i] = x[j + i] * scale;
    add_at_once<kAtOnce>(sums + sums_of_quad<kAtOnce>(half, quad) + j * kWarpgroup, scaled);
  }
}

// Adds share `share` of `shares` of a thread's dq.
template <class Kind>
__device__ void Backward<Kind>::add_share(const TileDq& dq, float* sums, float scale, int share, int shares) const {
#pragma unroll
  for (int quad = 0; quad < kDqQuads; ++quad)
    if (quad * shares / kDqQuads == share) add_floats(dq, sums, scale, 0, quad);
}

// Adds a thread's dq to sums of integers.
template <class Kind>
__device__ void Backward<Kind>::add_integers(const TileDq& dq, const Step& step, int half) const {
  constexpr int kQuadsOfBlock = kDqColumns / 8;
  int* const sums = static_cast<int*>(a.dq) + sums_of<1>(step);
  // Each bin has its own scales; postprocessing reads those of the first.
  const Rows& rows = rows_at<Tiles::kQueries>(a.rows, w.bin, a.q_tiles(), step.tile);
  auto& of_first = rows_at<Tiles::kQueries>(a.rows, 0, a.q_tiles(), step.tile).dq_row_scale;
#pragma unroll
  for (int m = 0; m < PartDq::kBlocks; ++m)
#pragma unroll
    for (int below = 0; below < kRowsPerThread; ++below) {
      const int query = step.first + 16 * (PartDq::row_block(warp) + m) + lane / 4 + 8 * below;
      const float by = dq_scale_of(rows.dq_row_scale[query], e.dq_sums_scale);
#pragma unroll
      for (int i = 0; i < kQuadsOfBlock; ++i) {
        const float* const x = &dq[m].x[4 * i + 2 * below];
        // An inf or NaN makes the row's scale NaN, and thereby the row.
        if (!isfinite(x[0]) || !isfinite(x[1])) of_first[query] = __int_as_float(0x7fffffff);
        for (int c = 0; c < 2; ++c)
          atomicAdd(sums + sums_of_quad<1>(half, m * kQuadsOfBlock + i) + (2 * below + c) * kWarpgroup,
                    __float2int_rn(x[c] * by));
      }
    }
}

// Adds a thread's dq to the sums.
template <class Kind>
__device__ void Backward<Kind>::add(const TileDq& dq, const Step& step, int half) const {
  if (params.integers) return add_integers(dq, step, half);
  float* const sums = float_sums(step);
  const float scale = shared.dq_scale;
#pragma unroll
  for (int quad = 0; quad < kDqQuads; ++quad) add_floats(dq, sums, scale, half, quad);
}

// Adds what earlier bins of the queries have written to a row.
template <class Type, int Columns>
__device__ void add_row(const Type* from, Accumulator<Columns>& x, int which, int columns) {
#pragma unroll
  for (int i = 0; i < Columns / 8; ++i) {
    if (8 * i >= columns) continue;
    struct alignas(2 * sizeof(Type)) {
      Type numbers[2];
    } pair;
    memcpy(&pair, from + 8 * i + fragment_column(), sizeof pair);
    x.x[4 * i + 2 * which] += float(pair.numbers[0]), x.x[4 * i + 2 * which + 1] += float(pair.numbers[1]);
  }
}

// Writes x scale 2^exponent to rows of dk or dv, added to what earlier bins of the queries have written. 2^exponent
// may not be a float, so it is applied as two factors.
template <class Kind>
__device__ void Backward<Kind>::write(const Output& out, TileDk& x, float scale, int exponent, int columns) const {
  const float first = scale * exp2f(static_cast<float>(exponent / 2)),
              second = exp2f(static_cast<float>(exponent - exponent / 2));
  // opaque() stops the compiler from keeping what follows in registers throughout the mainloop.
  const int warp = ptx::opaque(this->warp), lane = ptx::opaque(this->lane), channel = 16 * PartK::column_block(warp);
  const auto write_as = [&](auto* type) {
    using Type = std::remove_pointer_t<decltype(type)>;
#pragma unroll
    for (int m = 0; m < PartK::kBlocks; ++m)
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half) {
        const int key = w.first_key + 16 * (PartK::row_block(warp) + m) + lane / 4 + 8 * half;
        Type* const row = out.row<Type>(w.batch, w.kv_head, int64_t{w.k.first} + key) + channel;
        if (w.bin > 0 && key < w.k.tokens) add_row(row, x[m], half, columns - channel);
        store_row<Type, CachePolicy::evict_first>(row, key < w.k.tokens, x[m], half, columns - channel);
      }
  };
#pragma unroll
  for (auto& block : x)
#pragma unroll
    for (float& element : block.x) element = element * first * second;
  with_output_type(out.element, write_as);
}

}  // namespace octet::cuda::sm80
