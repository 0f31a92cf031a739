// Postprocessing of the backward pass: converts the sums of dq to dq in the caller's type.
#include <type_traits>

#include "cuda/bwd/preprocess.h"
#include "cuda/bwd/wide_tiles.h"
#include "cuda/fragment/accumulator.h"
#include "cuda/host/launch.h"
#include "cuda/operands/vec8.h"
#include "cuda/ptx/grid.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// Reads the sums of eight channels of rows r and r + 8, which the same four threads had in their accumulators. The
// layout of a warpgroup's part is [8 channels][a thread's 4 numbers / at_once][thread][at_once].
template <class Number, int at_once>
__device__ void read_sums(const void* part, int vec, int thread, Vec8 (&x)[kRowsPerThread]) {
  struct alignas(16) Four {
    Number numbers[4];
  };
  constexpr int kTogether = 4 * at_once;  // contiguous numbers of the four threads
  const auto* const from = static_cast<const Number*>(part) + vec * (4 * kWarpgroup) + thread * at_once;
  for (int first = 0; first < 16; first += 4) {
    const int number = first / kTogether * at_once;  // the index within each thread's four
    const Four four = *reinterpret_cast<const Four*>(from + number * kWarpgroup + first % kTogether);
    for (int j = 0; j < 4; ++j) {
      const int of_thread = number + j % at_once, threads = (first + j) % kTogether / at_once;
      x[of_thread / 2][2 * threads + of_thread % 2] = static_cast<float>(four.numbers[j]);
    }
  }
}

// Returns the channel of a column of the sums of dq, or a number that is no channel: that of the tiles of q, or else of
// the caller's panels. Where a 2-CTA cluster divides one of these, its first thread block has the first panels, and the
// second has the last ones, from the last one back, so that its half of the panel between is the second half.
template <int Dim, Sums sums>
__device__ int channel_of_sums(const BackwardParams& a, int column) {
  if (sums == Sums::integers) return column;  // kernels whose sums are integers divide no channels
  const int of_block = column % (Dim / 2), channels = a.block_channels;
  if (Dim < 256 || a.q || channels % kPanelColumns == 0 || column < Dim / 2) return channel_of<Dim>(column, channels);
  const int from_the_end = of_block < kPanelColumns ? kPanelColumns - of_block : 3 * kPanelColumns - of_block;
  return from_the_end > channels ? Dim : 2 * channels - from_the_end;
}

// Each thread block converts one tile of one head, from the last one down, as the last sums may still be in L2.
// kAddsMean: adds the sums of the rows of ds times the mean of k.
template <int Dim, Sums sums, bool kAddsMean>
__global__ void __launch_bounds__(kThreads, kAddsMean ? 5 : 6)
    postprocess_dq_kernel(const __grid_constant__ BackwardParams a, const __grid_constant__ Strided dq) {
  constexpr int kQueries = BackwardTile<Dim>::kQueries, kVecs = Dim / kVec8;
  // Each of two warpgroups had half of a tile: 64 queries, and all channels or half of them.
  constexpr bool kByQueries = kQueries > kWarpgroupRows;
  constexpr int kVecsOfWarpgroup = kByQueries ? kVecs : kVecs / 2;
  ptx::griddepcontrol_wait();
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int head_index = tile / a.q_blocks.count, block = tile % a.q_blocks.count;
  const int batch = head_index / a.heads, head = head_index % a.heads;
  const Blocks::Sequence sequence = a.q_blocks.sequence_of(block);
  if (sequence.index < 0) return;
  const int kv_head = batch * a.kv_heads + head / (a.heads / a.kv_heads);
  const Exponents e = a.exponents[kv_head];
  // 2^exponent may not be a float, so it is applied as two factors.
  const int exponent = -e.p - e.product - e.do_ - e.v - e.k;
  const float first = ldexpf(a.scale, exponent / 2), second = ldexpf(1.f, exponent - exponent / 2);
  auto& rows = reinterpret_cast<QueryRows<kQueries>*>(a.rows)[tile];
  const auto* const row_scales = rows.dq_row_scale;
  const char* const tile_sums = static_cast<const char*>(a.dq) + static_cast<int64_t>(tile) * kQueries * Dim * 4;
  float nonfinite = 0.f;  // the sum of 0 times each number: not 0 if any is not finite
#pragma unroll 2
  for (int i = threadIdx.x; i < kQueries / 2 * kVecs; i += kThreads) {
    const int vec = i / 8 % kVecs, row = i / (8 * kVecs) * 16 + i % 8, r = row % kWarpgroupRows;
    const int channel = channel_of_sums<Dim, sums>(a, vec * kVec8);
    if (channel >= a.dim) continue;
    const int warpgroup = kByQueries ? row / kWarpgroupRows : vec / kVecsOfWarpgroup;
    Vec8 x[kRowsPerThread];
    using Number = std::conditional_t<sums == Sums::integers, int, float>;
    read_sums<Number, kSumsAtOnce<Dim, sums>>(tile_sums + warpgroup * (kQueries * Dim * 2), vec % kVecsOfWarpgroup,
                                              r / 16 * 32 + r % 8 * 4, x);
    for (int half = 0; half < kRowsPerThread; ++half) {
      const int query = (block - sequence.first_block) * kQueries + row + 8 * half;
      const float to_float =
          sums == Sums::integers ? 1.f / dq_scale_of(row_scales[row + 8 * half], e.dq_sums_scale) : 1.f;
      for (float& element : x[half]) element = element * to_float * first * second;
      if constexpr (kAddsMean) {
        const float by = a.scale * a.row_sums[static_cast<int64_t>(tile) * kQueries + row + 8 * half];
        const int mean_head = a.sequence_means ? sequence.index * a.kv_heads + kv_head : kv_head;
        const float* const mean = a.k_mean + static_cast<int64_t>(mean_head) * a.mean_dim + channel;
        for (int c = 0; c < kVec8; ++c) x[half][c] = fmaf(by, mean[c], x[half][c]);
      }
      for (const float element : x[half]) nonfinite = fmaf(element, 0.f, nonfinite);
      if (query < sequence.tokens)
        write(dq, {batch, head, static_cast<int64_t>(sequence.first) + query, channel}, x[half]);
    }
  }
  if (nonfinite != 0.f) rows.nonfinite = 1;
}

template <Sums sums, bool kAddsMean>
auto postprocess_dq_kernel_of(int dim) {
  return with_wide_tile_dim(dim, [](auto tile_dim) { return postprocess_dq_kernel<tile_dim, sums, kAddsMean>; });
}
template <Sums sums>
auto postprocess_dq_kernel_of(int dim, bool adds_mean) {
  return adds_mean ? postprocess_dq_kernel_of<sums, true>(dim) : postprocess_dq_kernel_of<sums, false>(dim);
}

}  // namespace

void postprocess_dq(const BackwardParams& a, int tile_dim, Sums sums, const Strided& dq, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(a.batch * a.heads * a.q_blocks.count);
  const bool adds_mean = a.row_sums;
  const auto kernel = sums == Sums::floats ? postprocess_dq_kernel_of<Sums::floats>(tile_dim, adds_mean)
                                           : postprocess_dq_kernel_of<Sums::integers>(tile_dim, adds_mean);
  launch_general_pdl(kernel, tiles, kThreads, 0, stream, a, dq);
}

}  // namespace octet::cuda
