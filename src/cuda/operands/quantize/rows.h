// Quantizes rows of q and k, and rows of v where its quantized values have a scale per token: subtracts the mean,
// rotates, scales and rounds in the order of operations of the CPU (core/quant). A warp takes a row tile of 16 rows.
// Two lanes share a row: of each 32 channels one has the first 16 and the other the rest. So the butterflies exchange
// between lanes only once, and quantized values are stored in 16-byte words.
#pragma once
#include "cuda/operands/quantize/row_reader.h"

namespace octet::cuda {

template <class QuantizedType, class VecLoader, int Dim>
struct Rows : RowReader<VecLoader, Dim> {
  using Base = RowReader<VecLoader, Dim>;
  using Base::half, Base::row, Base::shared, Base::warp, Base::kHalf;

  const QuantizeKernelParams& p;

  __device__ Rows(const QuantizeKernelParams& p, RowsShared<Dim>& shared, const uint4* signs)
      : Base{shared, signs}, p(p) {}

  // Calls f(row, stage), with the row relative to the first, for this lane's row of each of the warp's row tiles among
  // `count` rows, while the next row tile is being loaded. All threads call begin() when the first is in flight.
  template <class Begin, class F>
  __device__ void for_row_tiles(const RowTiles& s, int count, const Begin& begin, const F& f) const {
    typename Base::Loader loader(s, shared);
    const auto fetch = [&](int row_tile, int stage) { row_tile < count ? loader.fetch(stage) : Base::fetch_nothing(); };
    // The first row of each of the warp's row tiles, in the order without groups.
    const int first = warp() * kRowTile;
    int stage = 0, lane_row = s.row(row());
    fetch(first, stage);
    begin();
    for (int row_tile = first; row_tile < count; row_tile += RowTiles::kRows) {
      __syncwarp();
      fetch(row_tile + RowTiles::kRows, stage ^ 1);
      Base::await();
      f(lane_row, stage);
      lane_row += RowTiles::kRows, stage ^= 1;
    }
  }

  // Sets the offsets that are added to rows, minus the mean; with Signed, multiplied by the signs of the channels.
  template <bool Signed>
  __device__ void set_offsets(const float* mean) const {
    set_offsets_of<Signed>([&](int c) { return mean ? -__ldcg(mean + c) : 0.f; });
  }
  // The same for the mean of one tile of keys.
  template <bool Signed>
  __device__ void set_offsets(const BlockMeans& means, int64_t tile) const {
    set_offsets_of<Signed>([&](int c) { return -means.factor[tile] * float(means.mean[tile * Dim + c]); });
  }
  template <bool Signed, class Offset>
  __device__ void set_offsets_of(const Offset& offset_of) const {
#pragma unroll 1
    for (int c = threadIdx.x; c < Dim; c += kQuantizeThreads) {
      const float offset = offset_of(c);
      bool negative = false;
      if constexpr (Signed && VecLoader::kPairs)
        negative = reinterpret_cast<const uint16_t*>(this->signs)[c];
      else if constexpr (Signed)
        negative = reinterpret_cast<const float*>(this->signs)[c] < 0.f;
      shared.offset[c] = negative ? -offset : offset;
    }
    __syncthreads();
  }

  __device__ void queries(int head_index, int first, int count) const {
    const QuantizeParams& a = p.args;
    const int tokens = static_cast<int>(a.q.shape[2]), batch = head_index / a.heads, head = head_index % a.heads;
    const RowTiles row_tiles{head_of(a.q, batch, head), first, min(first + count, tokens), false};
    const int64_t rows = static_cast<int64_t>(head_index) * tokens + first;
    const int kv_head = head / (a.heads / a.kv_heads);
    const float norm = a.rotation.block ? a.rotation.norm : 1.f;
    for_row_tiles(
        row_tiles, row_tiles.end - first,
        [&] {
          if (!a.mean_logit || a.cu_seqlens_q) return __syncthreads();
          const int batch_head = batch * a.kv_heads + kv_head;
          p.wait_together(StatsOf::k, batch_head);
          set_offsets<true>(a.channels.k_mean + static_cast<int64_t>(batch_head) * Dim);
        },
        [&](int row, int stage) {
          const bool present = first + row < row_tiles.end;
          float x[kHalf];
          Base::template read<true>(row_tiles, first + row, stage, x);
          Base::template smooth<true, false>(present, x);
          if (a.mean_logit) {
            const float product =
                a.cu_seqlens_q ? times_mean(row_tiles, present ? first + row : first, stage, kv_head) : times_offset(x);
            if (present && half() == 0) a.mean_logit[rows + row] = product;
          }
          Base::rotate(a.rotation.block, x);
          const Scale scale = Base::template scale_of_row<QuantizedType>(false, norm, x);
          if (!present) return;
          if (half() == 0) a.q_scale[rows + row] = scale.scale;
          write(static_cast<unsigned char*>(a.q_quantized) + (rows + row) * Dim, x, norm, scale.inverse);
        });
  }

  // Return the product of a row of q with the mean of its keys: times_offset with the mean in the offsets, times_mean
  // with that of its packed sequence.
  __device__ float times_offset(const float (&x)[kHalf]) const {
    float product[4] = {};
    Base::for_fours([&](int c, int i) {
      const float4 o = *reinterpret_cast<const float4*>(&shared.offset[c]);
      product[0] = fmaf(x[i], o.x, product[0]), product[1] = fmaf(x[i + 1], o.y, product[1]);
      product[2] = fmaf(x[i + 2], o.z, product[2]), product[3] = fmaf(x[i + 3], o.w, product[3]);
    });
    const float sum = product[0] + product[1] + (product[2] + product[3]);
    return -(sum + __shfl_xor_sync(~0u, sum, 1));
  }
  __device__ float times_mean(const RowTiles& s, int token, int stage, int kv_head) const {
    const QuantizeParams& a = p.args;
    const int sequence = last_at_most(token, a.keys.sequences, [&](int s) { return a.cu_seqlens_q[s]; });
    const int batch_head = sequence * a.kv_heads + kv_head;
    p.wait(StatsOf::k, batch_head);
    float product = 0.f;
#pragma unroll 1
    for (int v = 0; v < kHalf / kVec8; ++v) {
      const float* const mean = a.channels.k_mean + static_cast<int64_t>(batch_head) * Dim + Base::word(v) * kVec8;
      Vec8 x;
      VecLoader::convert(Base::vector(s, token, stage, v), x);
      for (int i = 0; i < kVec8; i += 4) {
        const float4 m = fetch_channels(mean + i);
        product = fmaf(x[i], m.x, fmaf(x[i + 1], m.y, fmaf(x[i + 2], m.z, fmaf(x[i + 3], m.w, product))));
      }
    }
    __syncwarp();
    return product + __shfl_xor_sync(~0u, product, 1);
  }

  __device__ void write(unsigned char* to, const float (&x)[kHalf], float norm, float inverse) const {
#pragma unroll
    for (int w = 0; w < kHalf / 16; ++w)
      *reinterpret_cast<uint4*>(to + 32 * w + 16 * half()) =
          Base::template encode<QuantizedType>(x, 16 * w, norm, inverse);
  }

  // Quantizes `tiles` tiles of k of a (batch, kv head), which belong to one sequence.
  __device__ void keys(int batch_head, int first_tile, int tiles) const {
    const QuantizeParams& a = p.args;
    const TileOfKeys run = tile_of_keys(a.keys, first_tile, tiles);
    const RowTiles row_tiles{head_of(a.k, batch_head / a.kv_heads, batch_head % a.kv_heads), run.first,
                             run.first + run.tokens(), a.k_groups};
    const int64_t rows = (static_cast<int64_t>(batch_head) * a.keys.count() + first_tile) * a.keys.tile;
    const int sequence_head = p.sequence_head(batch_head, run.sequence);
    const float norm = a.rotation.block ? a.rotation.norm : 1.f;
    for_row_tiles(
        row_tiles, a.keys.tile * tiles,
        [&] {
          const float* const mean = a.channels.k_mean;
          if (a.block_means.mean)
            return set_offsets<true>(a.block_means, static_cast<int64_t>(batch_head) * a.keys.count() + first_tile);
          if (mean) p.wait_together(StatsOf::k, sequence_head);
          set_offsets<true>(mean ? mean + static_cast<int64_t>(sequence_head) * Dim : nullptr);
        },
        [&](int row, int stage) {
          bool seen = run.sees(row);
          if (seen && a.seen.counts)
            seen = a.seen.keys.of(batch_head / a.kv_heads, batch_head % a.kv_heads)[run.first + row];
          float x[kHalf];
          Base::template read<true>(row_tiles, run.first + row, stage, x);
          Base::template smooth<true, true>(seen, x);
          Base::rotate(a.rotation.block, x);
          const Scale scale = Base::template scale_of_row<QuantizedType>(a.k_groups, norm, x);
          if (a.k_groups) {
            if (threadIdx.x % 32 == 0) a.k_scale[rows / kRowTile + row / kGroupTile * kGroups + warp()] = scale.scale;
          } else if (half() == 0) {
            a.k_scale[rows + row] = scale.scale;
          }
          write(static_cast<unsigned char*>(a.k_quantized) + (rows + row) * Dim, x, norm, scale.inverse);
        });
  }
};

}  // namespace octet::cuda
