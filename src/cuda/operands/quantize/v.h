// Quantizes v and transposes it, so that its keys run along rows, each 16 of them in the order of key_permutation.
#pragma once
#include "cuda/fragment/accumulator.h"
#include "cuda/operands/quantize/rows.h"
#include "cuda/operands/quantize/value_scales.h"

namespace octet::cuda {

// Quantizes v with a scale for each channel, or without scales. A thread takes 16 keys of 8 channels, and 8
// neighbouring threads take 64 channels; 4 such groups, of 64 keys, store whole 64-byte rows.
template <class QuantizedType, class VecLoader, int Dim>
struct ChannelValues {
  static constexpr int kGroup = 16, kHalves = Dim / 64;
  static constexpr bool kScaled =
      !VecLoader::kWhole || sizeof(typename VecLoader::Raw) == kVec8;  // 16-bit v has no scale

  const QuantizeKernelParams& p;
  float* inverse;  // [Dim] in shared memory: 1 / scale

  __device__ void values(int batch_head, int first_tile, int tiles) const {
    const QuantizeParams& a = p.args;
    const int batch = batch_head / a.kv_heads, head = batch_head % a.kv_heads, groups = a.keys.tile / kGroup * tiles;
    const Head rows = head_of(a.v, batch, head);
    const TileOfKeys run = tile_of_keys(a.keys, first_tile, tiles);
    const int channel = (threadIdx.x / 32 % kHalves * 8 + threadIdx.x % 8) * kVec8;
    const int64_t row = static_cast<int64_t>(a.keys.count()) * a.keys.tile;
    auto* const to = static_cast<unsigned char*>(a.v_quantized) +
                     (static_cast<int64_t>(batch_head) * Dim + channel) * row +
                     static_cast<int64_t>(first_tile) * a.keys.tile;
    const float scale = kScaled ? a.v_input_scale.at(batch, head) : 1.f;
    int group = threadIdx.x / (32 * kHalves) * 4 + threadIdx.x % 32 / 8;
    typename VecLoader::Raw raw[kGroup];
    load(rows, run, group * kGroup, channel, raw);
    const bool may_be_infinite = fetch_inverse(p.sequence_head(batch_head, run.sequence));
    while (group < groups) {
      may_be_infinite ? write<true>(raw, scale, channel, row, to + group * kGroup)
                      : write<false>(raw, scale, channel, row, to + group * kGroup);
      group += kQuantizeThreads / 8 / kHalves;
      if (group < groups) load(rows, run, group * kGroup, channel, raw);
    }
  }

  // Stores the quantized values of 16 keys of 8 channels, which lie `row` bytes apart. Infinities become NaN instead of
  // the largest number.
  template <bool MayBeInfinite>
  __device__ void write(const typename VecLoader::Raw (&raw)[kGroup], float scale, int channel, int64_t row,
                        unsigned char* to) const {
#pragma unroll
    for (int c = 0; c < kVec8; c += 2) {
      const float2 factor = *reinterpret_cast<const float2*>(inverse + channel + c);
      const auto scaled = [&](float x, float by) {
        if constexpr (kScaled) x = __fmul_rn(x, scale);
        return MayBeInfinite ? fmaf(x, 0.f, __fmul_rn(x, by)) : __fmul_rn(x, by);
      };
      uint32_t words[2][kGroup / 4];
#pragma unroll
      for (int w = 0; w < kGroup / 4; ++w) {
        float y[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = VecLoader::pair(raw[key_permutation(4 * w + i)], c / 2);
          y[0][i] = scaled(two.x, factor.x), y[1][i] = scaled(two.y, factor.y);
        }
        for (int j = 0; j < 2; ++j) words[j][w] = ptx::pack<QuantizedType>(y[j][0], y[j][1], y[j][2], y[j][3]);
      }
      for (int j = 0; j < 2; ++j, to += row)
        *reinterpret_cast<uint4*>(to) = {words[j][0], words[j][1], words[j][2], words[j][3]};
    }
  }

  // Loads 16 keys from `key` of a run on.
  __device__ static void load(const Head& rows, const TileOfKeys& run, int key, int channel,
                              typename VecLoader::Raw (&raw)[kGroup]) {
    if (run.sees(key) && run.sees(key + kGroup - 1) && channel < rows.dim) {
      const typename VecLoader::Column column(rows, run.first + key, channel, 1);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) raw[i] = column[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      raw[i] = {};
      if (run.sees(key + i) && channel < rows.dim) raw[i] = VecLoader::load(rows, run.first + key + i, channel);
    }
  }

  // Fetches the inverses of the scales. Returns true if v may hold infinities.
  __device__ bool fetch_inverse(int sequence_head) const {
    const float* const from = p.args.channels.v_inverse;
    if (from) p.wait_together(StatsOf::v, sequence_head);
#pragma unroll 1
    for (int c = threadIdx.x; c < Dim; c += kQuantizeThreads)
      inverse[c] = from ? __ldcg(from + static_cast<int64_t>(sequence_head) * Dim + c) : 1.f;
    const bool may = !from || __ldcg(p.scratch.infinite);
    __syncthreads();
    return may;
  }
};

// Quantizes v with a scale for each token: rows are quantized and then transposed in shared memory.
template <class QuantizedType, class VecLoader, int Dim>
struct TokenValues : Rows<QuantizedType, VecLoader, Dim> {
  using Base = Rows<QuantizedType, VecLoader, Dim>;
  using Base::half, Base::row, Base::kHalf, Base::p;
  static constexpr int kGroup = 16, kWords = Dim / 4;

  uint32_t* words;  // [key][kWords] with gaps, followed by the scales of the keys

  __device__ TokenValues(const QuantizeKernelParams& p, RowsShared<Dim>& shared, uint32_t* words)
      : Base(p, shared, nullptr), words(words) {}

  static int bytes(int tile) { return tile * (Dim + 1 + static_cast<int>(sizeof(float))); }

  // Groups of 16 keys have gaps of four words between them, so that threads read from different banks.
  static __device__ int word_of(int key, int word) { return key * kWords + key / kGroup * 4 + word; }

  __device__ void values(int batch_head, int tile_number) const {
    const QuantizeParams& a = p.args;
    const int keys = a.keys.tile;
    const Head rows = head_of(a.v, batch_head / a.kv_heads, batch_head % a.kv_heads);
    const TileOfKeys tile = tile_of_keys(a.keys, tile_number);
    const int sequence_head = p.sequence_head(batch_head, tile.sequence);
    auto* const scales = reinterpret_cast<float*>(words + keys * kWords + keys / kGroup * 4);
    const RowTiles row_tiles{rows, tile.first, tile.first + tile.tokens(), false};
    Base::for_row_tiles(
        row_tiles, keys,
        [&] {
          p.wait_together(StatsOf::v, sequence_head);
          Base::template set_offsets<false>(a.channels.v_mean + static_cast<int64_t>(sequence_head) * Dim);
        },
        [&](int key, int stage) {
          float x[kHalf];
          Base::template read<false>(row_tiles, tile.first + key, stage, x);
          Base::template smooth<false, true>(tile.sees(key), x);
          const Scale scale = Base::template scale_of_row<QuantizedType>(false, 1.f, x);
          if (half() == 0) scales[key] = scale.scale;
          Base::write(reinterpret_cast<unsigned char*>(words + word_of(key, 0)), x, 1.f, scale.inverse);
        });
    __syncthreads();
    write_value_scales(scales, keys,
                       a.v_scale + 2 * (static_cast<int64_t>(batch_head) * a.keys.count() + tile_number) * keys,
                       kQuantizeThreads);
    const int groups = keys / kGroup;
    const int64_t row_bytes = static_cast<int64_t>(a.keys.count()) * keys;
    auto* const to = static_cast<unsigned char*>(a.v_quantized) + static_cast<int64_t>(batch_head) * Dim * row_bytes +
                     static_cast<int64_t>(tile_number) * keys;
    for (int item = threadIdx.x; item < groups * kWords; item += kQuantizeThreads) {
      const int group = item % groups, word = item / groups;
      uint32_t tokens[4][4];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) tokens[i / 4][i % 4] = words[word_of(group * kGroup + key_permutation(i), word)];
#pragma unroll
      for (int b = 0; b < 4; ++b)
        *reinterpret_cast<uint4*>(to + (4 * word + b) * row_bytes + group * kGroup) = {
            gather(tokens[0], b), gather(tokens[1], b), gather(tokens[2], b), gather(tokens[3], b)};
    }
  }

  // Returns byte b of each of four words.
  static __device__ uint32_t gather(const uint32_t (&words)[4], int b) {
    const uint32_t low = __byte_perm(words[0], words[1], b | (b + 4) << 4);
    const uint32_t high = __byte_perm(words[2], words[3], b | (b + 4) << 4);
    return __byte_perm(low, high, 0x5410);
  }
};

}  // namespace octet::cuda
