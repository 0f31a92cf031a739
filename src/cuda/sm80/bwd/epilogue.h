// Stores the results of the backward kernel: it adds dq to the sums over blocks of keys, and writes dk and dv.
#pragma once
#include <cstring>
#include <type_traits>

#include "cuda/sm80/bwd/backward.h"

namespace octet::cuda::sm80 {

// Adds N floats, which lie at a multiple of as many, by one instruction where the GPU has it.
template <int N>
__device__ void add_floats(float* to, const float* x) {
#if __CUDA_ARCH__ >= 900
  using Numbers = std::conditional_t<N == 4, float4, std::conditional_t<N == 2, float2, float>>;
  Numbers numbers;
  memcpy(&numbers, x, sizeof numbers);
  atomicAdd(reinterpret_cast<Numbers*>(to), numbers);
#else
  for (int i = 0; i < N; ++i) atomicAdd(to + i, x[i]);
#endif
}

// Adds four numbers of a thread's dq to the sums, whose layout is that of two warpgroups' accumulators (see
// postprocess_dq.cu).
template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::add(TileDq& dq, const Step& step, int half, int quad) const {
  constexpr bool kByQueries = Tiles::kQueries > kWarpgroupRows;
  constexpr int kVecs = (kByQueries ? Dim : Dim / 2) / 8;  // of 8 channels, in each part
  constexpr int kPartNumbers = kWarpgroupRows * 8 * kVecs;
  constexpr int kAtOnce = kSumsAtOnce<Dim, Sums::floats>;
  constexpr int kQuadsOfBlock = kDqColumns / 8;
  const int m = quad / kQuadsOfBlock, i = quad % kQuadsOfBlock;
  float* const x = &dq[m].x[4 * i];
  const int row = step.first + 16 * (PartDq::row_block(warp) + m),
            vec = 2 * PartDq::column_block(warp) + half * kQuadsOfBlock + i;
  const int thread = row % kWarpgroupRows * 2 + ptx::opaque(lane),
            part = kByQueries ? row / kWarpgroupRows : vec / kVecs;
  float* const sums = static_cast<float*>(a.dq) + int64_t{step.tile} * (Tiles::kQueries * Dim) + part * kPartNumbers +
                      vec % kVecs * (4 * kWarpgroup);
  if (params.integers) {
    // Each part has its own scales; postprocessing reads those of the first.
    const Rows& rows = rows_at<Tiles::kQueries>(a.rows, w.part, a.q_tiles(), step.tile);
    auto& of_first = rows_at<Tiles::kQueries>(a.rows, 0, a.q_tiles(), step.tile).dq_row_scale;
#pragma unroll
    for (int below = 0; below < kRowsPerThread; ++below) {
      const int query = row + lane / 4 + 8 * below;
      const float by = dq_scale_of(rows.dq_row_scale[query], e.dq_sums_scale);
      // An inf or NaN makes the row's scale NaN, and thereby the row.
      if (!isfinite(x[2 * below]) || !isfinite(x[2 * below + 1])) of_first[query] = __int_as_float(0x7fffffff);
      for (int c = 0; c < 2; ++c)
        atomicAdd(reinterpret_cast<int*>(sums) + (2 * below + c) * kWarpgroup + thread,
                  __float2int_rn(x[2 * below + c] * by));
    }
    return;
  }
  if (const float scale = shared.dq_scale; scale != 1.f)
    for (int j = 0; j < 4; ++j) x[j] *= scale;
#pragma unroll
  for (int j = 0; j < 4; j += kAtOnce) add_floats<kAtOnce>(sums + j * kWarpgroup + thread * kAtOnce, x + j);
}

// Adds what earlier parts of the queries have written to a row.
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

// Writes x scale 2^exponent to rows of dk or dv, added to what earlier parts of the queries have written. 2^exponent
// may not be a float, so it is applied as two factors.
template <class T, int Dim, BackwardKind kind>
__device__ void Backward<T, Dim, kind>::write(const Output& out, TileDk& x, float scale, int exponent,
                                              int columns) const {
  const float first = scale * exp2f(static_cast<float>(exponent / 2)),
              second = exp2f(static_cast<float>(exponent - exponent / 2));
  const int channel = 16 * PartK::column_block(warp);
  const auto write_as = [&](auto* type) {
    using Type = std::remove_pointer_t<decltype(type)>;
#pragma unroll
    for (int m = 0; m < PartK::kBlocks; ++m)
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half) {
        const int key = w.first_key + 16 * (PartK::row_block(warp) + m) + lane / 4 + 8 * half;
        Type* const row = out.row<Type>(w.batch, w.kv_head, int64_t{w.k.first} + key) + channel;
        if (w.part > 0 && key < w.k.tokens) add_row(row, x[m], half, columns - channel);
        store_row<Type, CachePolicy::evict_first>(row, key < w.k.tokens, x[m], half, columns - channel);
      }
  };
#pragma unroll
  for (auto& block : x)
#pragma unroll
    for (float& element : block.x) element = element * first * second;
  switch (out.element) {
    case Element::f32:
      return write_as(static_cast<float*>(nullptr));
    case Element::f16:
      return write_as(static_cast<F16*>(nullptr));
    default:
      return write_as(static_cast<Bf16*>(nullptr));
  }
}

}  // namespace octet::cuda::sm80
