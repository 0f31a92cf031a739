// Channel means and statistics, with sums in the order of core/quant/sums.h.
#include "cuda/quantizers/codes.h"
#include "cuda/quantizers/lane_rows.h"
#include "cuda/quantizers/launch.h"

namespace octet::cuda::quantizers {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kStepWarps = 16, kTokens = static_cast<int>(kChunkTokens);

// The bytes of the codes hold the sums of chunks until the codes are written: byte j of the sums of a channel is that
// of token `width` chunk + j. Wherever there are two chunks, there are tokens enough.
class ChunkSums {
 public:
  __device__ ChunkSums(const QuantizeParams& p, const BatchHead& i)
      : p_(p), i_(i), width_(p.statistics.data ? kAll : kMean) {}

  __device__ void store(int chunk, int channel, const ChannelSums& s) const {
    store_word(chunk, channel, 0, s.sum);
    if (width_ == kMean) return;
    store_word(chunk, channel, 8, s.offset), store_word(chunk, channel, 16, s.square);
    store_word(chunk, channel, 24, s.low), store_word(chunk, channel, 28, s.high);
  }
  // The sums for means alone, of the channels of a lane whose codes are whole words.
  __device__ void store(int chunk, int channel, const double (&sums)[kLaneChannels]) const {
    for (int j = 0; j < kMean; ++j) {
      alignas(8) uint8_t bytes[kLaneChannels];
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c)
        bytes[c] = static_cast<uint8_t>(std::bit_cast<uint64_t>(sums[c]) >> 8 * j);
      *reinterpret_cast<uint2*>(at<uint8_t>(p_.codes, i_, kMean * chunk + j, channel)) =
          *reinterpret_cast<const uint2*>(bytes);
    }
  }
  __device__ ChannelSums load(int chunk, int channel) const {
    ChannelSums s;
    load_word(chunk, channel, 0, s.sum);
    if (width_ == kMean) return s;
    load_word(chunk, channel, 8, s.offset), load_word(chunk, channel, 16, s.square);
    load_word(chunk, channel, 24, s.low), load_word(chunk, channel, 28, s.high);
    return s;
  }

 private:
  static constexpr int kMean = 8, kAll = 32;
  static_assert(2 * kAll <= kChunkTokens + 1);

  template <class T>
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  template <class T>
  __device__ void store_word(int chunk, int channel, int first, T x) const {
    const auto bits = std::bit_cast<Bits<T>>(x);
    for (int j = 0; j < static_cast<int>(sizeof(T)); ++j)
      *at<uint8_t>(p_.codes, i_, width_ * chunk + first + j, channel) = static_cast<uint8_t>(bits >> 8 * j);
  }
  template <class T>
  __device__ void load_word(int chunk, int channel, int first, T& x) const {
    Bits<T> bits = 0;
    for (int j = 0; j < static_cast<int>(sizeof(T)); ++j)
      bits |= static_cast<Bits<T>>(*at<uint8_t>(p_.codes, i_, width_ * chunk + first + j, channel)) << 8 * j;
    x = std::bit_cast<T>(bits);
  }

  const QuantizeParams& p_;
  const BatchHead& i_;
  int width_;
};

// The means and statistics of a (batch, head), from the sums of its channels. All threads of a block call it, each with
// the channels that it has.
class Finish {
 public:
  // `moments`: shared memory for those of all channels, and one more.
  __device__ Finish(const QuantizeParams& p, const BatchHead& i, ChannelMoments* moments)
      : p_(p), i_(i), moments_(moments) {}

  __device__ void channel(int c, const ChannelSums& sums) const {
    float mean = 0.f;
    if (p_.how.mean.data) *at<float>(p_.how.mean, i_, 0, c) = mean = sums.mean(p_.tokens());
    if (p_.statistics.data) moments_[c] = moments_of(sums, p_.tokens(), mean);
  }

  __device__ void end() const {
    if (!p_.statistics.data) return;
    const int dim = p_.dim();
    Tops& tops = reinterpret_cast<Tops&>(moments_[dim]);
    __syncthreads();
    for (int c = threadIdx.x; c < dim; c += blockDim.x) {
      int rank = 0;
      for (int j = 0; j < dim; ++j)
        rank += moments_[j].top < moments_[c].top || (moments_[j].top == moments_[c].top && j < c);
      if (rank == (dim - 1) / 2) tops.low_median = moments_[c].top;
      if (rank == dim / 2) tops.high_median = moments_[c].top;
      if (rank == dim - 1) tops.largest = moments_[c].top;
    }
    __syncthreads();
    if (warp()) return;
    ChannelMoments sums;
    for (int c = lane(); c < dim; c += kSumLanes) {
      sums.variance += moments_[c].variance;
      sums.bias += moments_[c].bias;
      sums.norm += moments_[c].norm;
    }
    sums.variance = sum_of_lanes(sums.variance), sums.bias = sum_of_lanes(sums.bias);
    sums.norm = sum_of_lanes(sums.norm);
    if (lane()) return;
    float out[OCTET_STATISTICS];
    statistics_of(sums, tops, dim, out, [](double x) { return sqrt(x); });
    for (int s = OCTET_STATISTIC_NORM; s < OCTET_STATISTICS; ++s) *at<float>(p_.statistics, i_, 0, s) = out[s];
  }

 private:
  const QuantizeParams& p_;
  const BatchHead& i_;
  ChannelMoments* moments_;
};

// Sums a chunk of tokens of a (batch, head), a channel with each thread; one chunk alone is all.
__global__ void __launch_bounds__(kThreads, kBlocks) sums_kernel(const __grid_constant__ QuantizeParams p, int chunks) {
  extern __shared__ float4 memory[];
  const int dim = p.dim(), stride = row_stride(dim), turn_stride = p.rows.turn_stride();
  auto* const moments = reinterpret_cast<ChannelMoments*>(memory);
  auto* const turns = reinterpret_cast<float2*>(moments + dim + 1);
  float* const first_row = reinterpret_cast<float*>(turns + kWarps * turn_stride);
  float* const buffer = first_row + stride;
  Rows rows(p.rows, turns + warp() * turn_stride);
  const BatchHead i(p.codes, blockIdx.x / chunks);
  const int chunk = static_cast<int>(blockIdx.x) % chunks, begin = chunk * kTokens,
            end = min(begin + kTokens, p.tokens());
  const bool with_statistics = p.statistics.data != nullptr;
  const Finish finish(p, i, moments);
  if (with_statistics && warp() == 0 && p.tokens()) rows.embed(i, 0, first_row);
  for (int slice = 0; slice < dim; slice += kThreads) {
    const int c = slice + static_cast<int>(threadIdx.x);
    ChannelSums sums;
    for (int t = begin; t < end; t += kWarps) {
      if (t + warp() < end) rows.embed(i, t + warp(), buffer + warp() * stride);
      __syncthreads();
      for (int r = 0; r < kWarps && t + r < end && c < dim; ++r) {
        const float x = buffer[r * stride + c];
        sums.add_to_mean(x);
        if (with_statistics) sums.add_to_statistics(x, first_row[c]);
      }
      __syncthreads();
    }
    if (c >= dim) continue;
    if (chunks > 1) {
      ChunkSums(p, i).store(chunk, c, sums);
    } else {
      ChannelSums all;
      all.add(sums);
      finish.channel(c, all);
    }
  }
  if (chunks == 1) finish.end();
}

// The same for means alone, in registers (lane_rows.h): a chunk with each group of lanes.
template <int Lanes>
__global__ void __launch_bounds__(kThreads, kBlocks)
    lane_sums_kernel(const __grid_constant__ QuantizeParams p, int chunks) {
  constexpr int kAhead = 4;
  const LaneChannels<Lanes> channels(0);
  const unsigned index = (blockIdx.x * kThreads + threadIdx.x) / Lanes;
  const int head = static_cast<int>(index / chunks), chunk = static_cast<int>(index % chunks), channel = channels.first,
            end = min((chunk + 1) * kTokens, p.tokens());
  if (head >= heads_of(p.codes) || channel >= p.dim()) return;
  const BatchHead i(p.codes, head);
  const View& x = p.rows.x;
  const int size = float_bytes(x.dtype);
  const char* from = static_cast<const char*>(x.data) +
                     (i.batch * x.stride[0] + i.head * x.stride[1] + chunk * kTokens * x.stride[2] + channel) * size;
  double sums[kLaneChannels] = {};
#pragma unroll 1
  for (int t = chunk * kTokens; t < end; t += kAhead) {
    LaneWords words[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a, from += x.stride[2] * size)
      if (t + a < end) words[a] = load_words(x.dtype, channels, from);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (t + a >= end) break;
      LaneRow row;
      to_floats(x.dtype, words[a], row);
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) sums[c] += is_finite(row[c]) ? row[c] : 0.f;
    }
  }
  ChunkSums(p, i).store(chunk, channel, sums);
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    means_kernel(const __grid_constant__ QuantizeParams p, int chunks) {
  extern __shared__ float4 memory[];
  const BatchHead i(p.codes, blockIdx.x);
  const ChunkSums of_chunks(p, i);
  const Finish finish(p, i, reinterpret_cast<ChannelMoments*>(memory));
  for (int c = threadIdx.x; c < p.dim(); c += kThreads) {
    ChannelSums all;
    for (int chunk = 0; chunk < chunks; ++chunk) all.add(of_chunks.load(chunk, c));
    finish.channel(c, all);
  }
  finish.end();
}

// The mean squared error of the quantized values of a token, in all lanes. `row`: memory for its numbers.
__device__ double squared_error_of(const QuantizeParams& p, Rows& rows, const BatchHead& i, int token, float* row) {
  const bool integer = is_integer(p.codes.dtype), per_channel = p.how.per_channel();
  const float* const scale = at<float>(p.how.scale, i, per_channel ? 0 : p.how.group_in_32_bits(token));
  if (integer && !per_channel) return squared_error(*scale);
  if (!integer) rows.prepare(i, token, row);
  double sum = 0;
  for (int c = lane(); c < p.dim(); c += kSumLanes) {
    const float of_channel = scale[per_channel ? c * p.how.scale.stride[3] : 0];
    sum += integer ? squared_error(of_channel)
                   : squared_error(row[c], of_channel, byte_value(p.codes.dtype, *at<uint8_t>(p.codes, i, token, c)));
  }
  return sum_of_lanes(sum) / static_cast<double>(p.dim() > 1 ? p.dim() : 1);
}

// Sums the errors of the tokens of a (batch, head): each warp those of a chunk.
__global__ void __launch_bounds__(32 * kStepWarps, 1)
    step_kernel(const __grid_constant__ QuantizeParams p, int chunks) {
  extern __shared__ float4 memory[];
  __shared__ double of_chunks[kStepWarps];
  const int turn_stride = p.rows.turn_stride();
  auto* const turns = reinterpret_cast<float2*>(memory);
  float* const row = reinterpret_cast<float*>(turns + kStepWarps * turn_stride) + warp() * row_stride(p.dim());
  Rows rows(p.rows, turns + warp() * turn_stride);
  const BatchHead i(p.codes, blockIdx.x);
  double sum = 0;
  for (int chunk = 0; chunk < chunks; chunk += kStepWarps) {
    double of_chunk = 0;
    const int begin = (chunk + warp()) * kTokens;
    for (int t = begin; t < begin + kTokens && t < p.tokens(); ++t) of_chunk += squared_error_of(p, rows, i, t, row);
    if (lane() == 0) of_chunks[warp()] = of_chunk;
    __syncthreads();
    for (int w = 0; w < kStepWarps && chunk + w < chunks; ++w) sum += of_chunks[w];
    __syncthreads();
  }
  if (threadIdx.x == 0)
    *at<float>(p.statistics, i, 0, OCTET_STATISTIC_STEP) =
        p.tokens() ? static_cast<float>(sqrt(sum / static_cast<double>(p.tokens()))) : 0.f;
}

}  // namespace

void find_means(const QuantizeParams& p, cudaStream_t stream) {
  const int64_t heads = batch_heads(p.codes), dim = p.codes.shape[3];
  const int chunks = std::max(1, static_cast<int>(chunks_of(p.codes.shape[2])));
  if (!heads || (!p.how.mean.present() && !p.statistics.present())) return;
  const std::size_t moments = static_cast<std::size_t>(dim + 1) * sizeof(ChannelMoments);
  const bool in_lanes = chunks > 1 && !p.statistics.present() && plain_rows(p.rows) && fits_lanes(p);
  if (in_lanes)
    with_lanes(p.codes, [&](auto lanes) {
      launch(lane_sums_kernel<lanes>, (heads * chunks * lanes + kThreads - 1) / kThreads, kWarps, 0, stream, p, chunks);
    });
  else
    launch(sums_kernel, heads * chunks, kWarps, moments + kWarps * turn_bytes(p.rows) + (kWarps + 1) * row_bytes(dim),
           stream, p, chunks);
  if (chunks > 1) launch(means_kernel, heads, kWarps, moments, stream, p, chunks);
}

void find_step(const QuantizeParams& p, cudaStream_t stream) {
  if (!p.statistics.present() || !batch_heads(p.codes)) return;
  launch(step_kernel, batch_heads(p.codes), kStepWarps, kStepWarps * (turn_bytes(p.rows) + row_bytes(p.codes.shape[3])),
         stream, p, static_cast<int>(chunks_of(p.codes.shape[2])));
}

}  // namespace octet::cuda::quantizers
