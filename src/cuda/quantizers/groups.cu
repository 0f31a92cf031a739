// Scales and codes of rows in shared memory, which may be any. Groups that fit there are quantized in one pass over x;
// of larger ones, and of channels, the extremes are found first.
#include "cuda/host/card.h"
#include "cuda/quantizers/extremes.h"
#include "cuda/quantizers/launch.h"

namespace octet::cuda::quantizers {
namespace {

constexpr int kWarps = 8;
constexpr int kWarpRows = 4;     // the most rows of a group that a warp quantizes by itself
constexpr int kHeadsInTurn = 8;  // rows of one token that a warp takes one after the other, for their sines

// The shared memory of a thread block for rows: the turns of each warp, rows, and then what channels have.
struct RowMemory {
  int stride;     // of rows
  float2* turns;  // of this warp
  float* rows;

  __device__ RowMemory(const QuantizeParams& p, void* memory, int warps) : stride(row_stride(p.dim())) {
    auto* const of_warps = static_cast<float2*>(memory);
    turns = of_warps + warp() * p.rows.turn_stride();
    rows = reinterpret_cast<float*>(of_warps + warps * p.rows.turn_stride());
  }
  // Returns what channels have, behind a row of each of `warps` warps.
  template <class T>
  __device__ T* of_channels(int warps) const {
    return reinterpret_cast<T*>(rows + warps * stride);
  }
};

// Quantizes groups, each with a team: a warp, or all warps of a thread block.
template <bool OfWarp>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    groups_kernel(const __grid_constant__ QuantizeParams p, const Groups groups) {
  extern __shared__ float4 memory[];
  __shared__ Extremes of_warps[kWarps];
  const int warps = blockDim.x / 32;
  const RowMemory shared(p, memory, warps);
  float* const buffer = shared.rows + (OfWarp ? warp() * groups.rows * shared.stride : 0);
  Rows rows(p.rows, shared.turns);
  const int first_row = OfWarp ? 0 : warp(), row_step = OfWarp ? 1 : warps, heads = heads_of(p.codes);
  const unsigned team = OfWarp ? blockIdx.x * warps + warp() : blockIdx.x;
  // The groups of a (batch, head) follow each other, and so do the runs of (batch, head)s.
  const int group = static_cast<int>(team % groups.count),
            first_head = static_cast<int>(team / groups.count) * groups.run;
  for (int head = first_head; head < heads && head < first_head + groups.run; ++head) {
    const BatchHead i(p.codes, head);
    Extremes extremes;
    for (int r = first_row; r < groups.rows; r += row_step) {
      const int token = groups.token_of(p.how, group, r);
      if (token >= p.tokens()) break;
      rows.prepare(i, token, buffer + r * shared.stride);
      add_row(p, buffer + r * shared.stride, extremes);
    }
    extremes = extremes_of_warp(extremes);
    if constexpr (!OfWarp) {
      if (lane() == 0) of_warps[warp()] = extremes;
      __syncthreads();
      for (int w = 0; w < warps; ++w) extremes.add(of_warps[w]);
    }
    const AffineScale scale = affine_scale_of(extremes, p.how.zero_point_kind, p.range);
    if (first_row == 0 && lane() == 0) write_scale(p, i, group, 0, scale);
    for (int r = first_row; r < groups.rows; r += row_step) {
      const int token = groups.token_of(p.how, group, r);
      if (token >= p.tokens()) break;
      write_codes(p, i, token, buffer + r * shared.stride, [&](int) { return scale; });
    }
    if constexpr (!OfWarp) __syncthreads();
  }
}

// Calls f(batch and head, group, channel) for each scale.
template <class F>
__device__ void for_scales(const QuantizeParams& p, const F& f) {
  const auto groups = static_cast<unsigned>(p.how.scale.shape[2]),
             channels = static_cast<unsigned>(p.how.scale.shape[3]);
  const unsigned count = heads_of(p.codes) * groups * channels;
  for (unsigned n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += gridDim.x * blockDim.x)
    f(BatchHead(p.codes, n / (groups * channels)), static_cast<int>(n / channels % groups),
      static_cast<int>(n % channels));
}
__global__ void clear_kernel(const __grid_constant__ QuantizeParams p) {
  for_scales(p, [&](const BatchHead& i, int group, int channel) { clear_extremes(p, i, group, channel); });
}
__global__ void scales_kernel(const __grid_constant__ QuantizeParams p) {
  for_scales(p, [&](const BatchHead& i, int group, int channel) {
    write_scale(p, i, group, channel, scale_of_extremes(p, i, group, channel));
  });
}

// A thread block takes a chunk of tokens of a (batch, head), and each of its warps neighbouring ones.
struct Chunk {
  BatchHead i;
  int first, end;  // of the warp
  __device__ Chunk(const QuantizeParams& p, unsigned chunks) : i(p.codes, blockIdx.x / chunks) {
    constexpr int kTokens = kChunkTokens / kWarps;
    first = static_cast<int>(blockIdx.x % chunks) * static_cast<int>(kChunkTokens) + warp() * kTokens;
    end = min(first + kTokens, p.tokens());
  }
};

__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    extremes_kernel(const __grid_constant__ QuantizeParams p, unsigned chunks) {
  extern __shared__ float4 memory[];
  const RowMemory shared(p, memory, kWarps);
  float* const row = shared.rows + warp() * shared.stride;
  Rows rows(p.rows, shared.turns);
  const Chunk chunk(p, chunks);
  auto* const of_channels = shared.of_channels<Extremes>(kWarps);
  const bool per_channel = p.how.per_channel();
  for (int c = threadIdx.x; c < p.dim() && per_channel; c += blockDim.x) of_channels[c] = {};
  __syncthreads();
  Extremes extremes;
  for (int t = chunk.first; t < chunk.end; ++t) {
    rows.prepare(chunk.i, t, row);
    if (per_channel) {
      for (int c = lane(); c < p.dim(); c += 32) {
        const int32_t order = order_in_group(p, row[c]);
        atomicMin(&of_channels[c].low, order), atomicMax(&of_channels[c].high, order);
      }
      continue;
    }
    add_row(p, row, extremes);
    const int group = p.how.group_in_32_bits(t);
    if (t + 1 < chunk.end && p.how.group_in_32_bits(t + 1) == group) continue;
    extremes = extremes_of_warp(extremes);
    if (lane() == 0) raise_extremes(p, chunk.i, group, 0, extremes);
    extremes = {};
  }
  if (!per_channel) return;
  __syncthreads();
  for (int c = threadIdx.x; c < p.dim(); c += blockDim.x) raise_extremes(p, chunk.i, 0, c, of_channels[c]);
}

__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    codes_kernel(const __grid_constant__ QuantizeParams p, unsigned chunks) {
  extern __shared__ float4 memory[];
  const RowMemory shared(p, memory, kWarps);
  float* const row = shared.rows + warp() * shared.stride;
  auto* const scales = shared.of_channels<AffineScale>(kWarps);
  Rows rows(p.rows, shared.turns);
  const Chunk chunk(p, chunks);
  const bool per_channel = p.how.per_channel();
  for (int c = threadIdx.x; c < p.dim() && per_channel; c += blockDim.x)
    scales[c] = scale_of_extremes(p, chunk.i, 0, c);
  __syncthreads();
  for (int t = chunk.first; t < chunk.end; ++t) {
    rows.prepare(chunk.i, t, row);
    if (per_channel) {
      write_codes(p, chunk.i, t, row, [&](int c) { return scales[c]; });
    } else {
      const AffineScale scale = scale_of_extremes(p, chunk.i, p.how.group_in_32_bits(t), 0);
      write_codes(p, chunk.i, t, row, [&](int) { return scale; });
    }
  }
}

void quantize_in_passes(const QuantizeParams& p, cudaStream_t stream) {
  const int64_t heads = batch_heads(p.codes), chunks = chunks_of(p.codes.shape[2]), dim = p.codes.shape[3];
  const int64_t scales = heads * p.how.scale.shape[2] * p.how.scale.shape[3];
  const unsigned blocks_of_scales = blocks_for(scales, 32 * kWarps);
  const std::size_t bytes = kWarps * (turn_bytes(p.rows) + row_bytes(dim)),
                    of_channels = p.how.per_channel() ? static_cast<std::size_t>(dim) : 0;
  if (!scales) return;
  launch(clear_kernel, blocks_of_scales, kWarps, 0, stream, p);
  if (chunks && dim && !pass_lanes(p, stream)) {
    launch(extremes_kernel, heads * chunks, kWarps, bytes + of_channels * sizeof(Extremes), stream, p,
           static_cast<unsigned>(chunks));
    launch(codes_kernel, heads * chunks, kWarps, bytes + of_channels * sizeof(AffineScale), stream, p,
           static_cast<unsigned>(chunks));
  }
  launch(scales_kernel, blocks_of_scales, kWarps, 0, stream, p);
}

}  // namespace

void quantize_groups(const QuantizeParams& p, cudaStream_t stream) {
  const Quantization& how = p.how;
  const int64_t heads = batch_heads(p.codes), count = how.scale.shape[2];
  int64_t rows = 1;
  if (how.granularity == OCTET_PER_THREAD)
    rows = how.operand == OCTET_OPERAND_Q ? kThreadTileQ / kThreadGroupsQ : kThreadTileK / kThreadGroupsK;
  if (how.granularity == OCTET_PER_BLOCK) rows = how.block;
  const std::size_t row = row_bytes(p.codes.shape[3]), turns = turn_bytes(p.rows);
  const auto most = static_cast<std::size_t>(current_card().shared_bytes) - kReserve;
  if (how.granularity == OCTET_PER_TENSOR || how.per_channel() || kWarps * turns + rows * row > most)
    return quantize_in_passes(p, stream);
  if (!heads || !count) return;
  if (quantize_lane_groups(p, {static_cast<int>(count), static_cast<int>(rows), 1}, stream)) return;
  const int64_t run = turns ? std::min<int64_t>(kHeadsInTurn, heads) : 1, teams = count * ((heads + run - 1) / run);
  const Groups groups{static_cast<int>(count), static_cast<int>(rows), static_cast<int>(run)};
  if (rows > kWarpRows)
    return launch(groups_kernel<false>, teams, kWarps, kWarps * turns + rows * row, stream, p, groups);
  int warps = kWarps;
  while (warps > 1 && warps * (turns + rows * row) > most) warps /= 2;
  launch(groups_kernel<true>, (teams + warps - 1) / warps, warps, warps * (turns + rows * row), stream, p, groups);
}

}  // namespace octet::cuda::quantizers
