// Where the backward kernel leaves its results: dq in the sums over blocks of keys, dk and dv in the caller's tensors.
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

// Adds dq of an iteration to the sums, whose layout is that of two warpgroups' accumulators (see postprocess_dq.cu).
template <class T, int Dim, bool General>
__device__ void Backward<T, Dim, General>::add(TileDq& dq, const Step& step) const {
  constexpr bool kByQueries = Tiles::kQueries > kWarpgroupRows;
  constexpr int kVecs = (kByQueries ? Dim : Dim / 2) / 8;  // of 8 channels, in each part
  constexpr int kPartNumbers = kWarpgroupRows * 8 * kVecs;
  constexpr int kAtOnce = kSumsAtOnce<Dim, Sums::floats>;
  auto* const sums = static_cast<float*>(a.dq) + int64_t{step.tile} * (Tiles::kQueries * Dim);
  const float scale = exp2f(static_cast<float>(e.dq));
#pragma unroll
  for (int m = 0; m < PartDq::kBlocks; ++m) {
    const int row = step.first + 16 * (PartDq::row_block(warp) + m);
    const int first_vec = 2 * PartDq::column_block(warp);
    const int thread = row % kWarpgroupRows * 2 + lane;
    const auto at = [&](int i) {
      const int vec = first_vec + i;
      const int part = kByQueries ? row / kWarpgroupRows : vec / kVecs;
      return part * kPartNumbers + vec % kVecs * (4 * kWarpgroup);
    };
    if (params.integers) {
      auto& rows = reinterpret_cast<Rows*>(a.rows)[step.tile];
#pragma unroll
      for (int half = 0; half < kRowsPerThread; ++half) {
        float& row_scale = rows.dq_row_scale[row + lane / 4 + 8 * half];
        const float by = dq_scale_of(row_scale, e.dq_sums_scale);
        // An inf or NaN comes from ds and is in every column. It makes the row's scale NaN, and thereby the row.
        if (!isfinite(dq[m].x[2 * half])) row_scale = __int_as_float(0x7fffffff);
#pragma unroll
        for (int i = 0; i < PartDq::kColumns / 8; ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            atomicAdd(reinterpret_cast<int*>(sums) + at(i) + (2 * half + c) * kWarpgroup + thread,
                      __float2int_rn(dq[m].x[4 * i + 2 * half + c] * by));
      }
      continue;
    }
    if (e.dq != 0) dq[m].scale(scale);
#pragma unroll
    for (int i = 0; i < PartDq::kColumns / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; j += kAtOnce)
        add_floats<kAtOnce>(sums + at(i) + j * kWarpgroup + thread * kAtOnce, &dq[m].x[4 * i + j]);
  }
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
template <class T, int Dim, bool General>
__device__ void Backward<T, Dim, General>::write(const Output& out, TileDk& x, float scale, int exponent,
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
