// Quantizes tokens that have scales of their own, and turns tokens, in registers (lane_rows.h).
#include <algorithm>

#include "cuda/quantizers/codes.h"
#include "cuda/quantizers/lane_rows.h"
#include "cuda/quantizers/launch.h"

namespace octet::cuda::quantizers {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kHeads = 8;  // of a token, one after the other in a group of lanes
constexpr int kAhead = 4;  // of these, loaded before the first is computed

// The rows of a group of lanes: those of one token in several heads.
template <int Lanes>
struct TokenRows {
  int token, channel, first, end;
  __device__ explicit TokenRows(const View& t) : channel(threadIdx.x % Lanes * kLaneChannels) {
    const unsigned group = (blockIdx.x * kThreads + threadIdx.x) / Lanes, tokens = static_cast<unsigned>(t.shape[2]);
    token = static_cast<int>(group % tokens), first = static_cast<int>(group / tokens) * kHeads;
    end = channel < t.shape[3] ? min(first + kHeads, heads_of(t)) : 0;
  }

  // Calls f(batch and head, whether there is such a row, row) for all rows of x.
  template <class F>
  __device__ void each(const View& x, const F& f) const {
    const LaneParts parts(x, float_bytes(x.dtype), token, channel);
    BatchHead loaded(x, first), computed = loaded;
    const auto advance = [&](BatchHead& i) {
      if (++i.head == x.shape[1]) i.head = 0, ++i.batch;
    };
#pragma unroll 1
    for (int head = first; head < first + kHeads; head += kAhead) {
      LaneWords words[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (head + a < end) words[a] = load_words(x.dtype, parts.at<const uint4>(loaded));
        advance(loaded);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        LaneRow row = {};
        if (head + a < end) to_floats(x.dtype, words[a], row);
        f(computed, head + a < end, row);
        advance(computed);
      }
    }
  }
};

// The scale of a row of `Lanes` lanes. `present`: this lane has channels of it.
template <int Lanes, bool Symmetric>
__device__ AffineScale scale_of_row(const QuantizeParams& p, const LaneRow& row, bool present) {
  Extremes extremes;
  if constexpr (Symmetric) {
    int32_t amax = 0;
#pragma unroll
    for (const float x : row) amax = max(amax, order_of(magnitude_of(x)));
#pragma unroll
    for (int distance = Lanes / 2; distance; distance /= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, distance));
    extremes.add(amax);
    return affine_scale_of(extremes, OCTET_SYMMETRIC, p.range);
  } else {
    if (present)
#pragma unroll
      for (const float x : row) extremes.add(order_of(x));
#pragma unroll
    for (int distance = Lanes / 2; distance; distance /= 2)
      extremes.add({__shfl_xor_sync(~0u, extremes.low, distance), __shfl_xor_sync(~0u, extremes.high, distance)});
    return affine_scale_of(extremes, p.how.zero_point_kind, p.range);
  }
}

// The codes of a lane.
template <bool Symmetric>
__device__ uint2 codes_of(const QuantizeParams& p, const LaneRow& row, const AffineScale& scale) {
  alignas(8) uint8_t codes[kLaneChannels] = {};
  const auto encode = [&](auto byte) {
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) codes[c] = byte(row[c]);
  };
  if (p.codes.dtype == OCTET_E4M3) {
    encode([&](float x) { return e4m3_bits(scaled(x, scale)); });
  } else if (p.codes.dtype == OCTET_E5M2) {
    encode([&](float x) { return e5m2_bits(scaled(x, scale)); });
  } else if constexpr (!Symmetric) {
    encode([&](float x) { return integer_bits(scaled(x, scale), p.range.low, p.range.high); });
  } else if (scale.inverse != 0.f) {  // else a number is not finite, or all are 0
    encode([&](float x) { return integer_bits_in_range(x * scale.inverse); });
  }
  return *reinterpret_cast<const uint2*>(codes);
}

// `Turns`: with RoPE, whose sines take registers. `Symmetric`: without zero points, which take instructions.
template <int Lanes, bool Turns, bool Symmetric>
__global__ void __launch_bounds__(kThreads, Turns ? kBlocks : kBlocks + 1)
    tokens_kernel(const __grid_constant__ QuantizeParams p) {
  const TokenRows<Lanes> rows(p.codes);
  const LaneParts codes(p.codes, 1, rows.token, rows.channel);
  LaneTurns<Lanes> turns(p.rows.rope);
  const LaneRotation<Lanes> rotation(p.rows);
  if constexpr (Turns) turns.seek(rows.token);
  rows.each(p.rows.x, [&](const BatchHead& i, bool present, LaneRow& row) {
    if constexpr (Turns) turns.turn(row);
    if (p.rows.mean.data && present)
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) row[c] -= *at<float>(p.rows.mean, i, 0, rows.channel + c);
    rotation.rotate(row);
    const AffineScale scale = scale_of_row<Lanes, Symmetric>(p, row, present);
    if (!present) return;
    if (rows.channel == 0) write_scale(p, i, rows.token, 0, scale);
    *codes.at<uint2>(i) = codes_of<Symmetric>(p, row, scale);
  });
}

template <int Lanes>
__global__ void __launch_bounds__(kThreads, kBlocks)
    turn_kernel(const __grid_constant__ View x, const __grid_constant__ View y,
                const __grid_constant__ RopeParams rope) {
  const TokenRows<Lanes> rows(x);
  const LaneParts turned(y, float_bytes(y.dtype), rows.token, rows.channel);
  LaneTurns<Lanes> turns(rope);
  turns.seek(rows.token);
  rows.each(x, [&](const BatchHead& i, bool present, LaneRow& row) {
    turns.turn(row);
    if (present) store_row(y.dtype, row, turned.at<uint4>(i));
  });
}

// Returns whether the rows of a tensor are words of `bytes` bytes for every lane.
bool has_whole_words(const View& t, int64_t bytes) {
  const int64_t size = bytes / kLaneChannels;
  const int64_t word = std::min<int64_t>(bytes, 16);
  if (!t.shape[3] || t.shape[3] % kLaneChannels || t.shape[3] > 32 * kLaneChannels || t.stride[3] != 1 ||
      reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(word))
    return false;
  return std::all_of(t.stride, t.stride + 3, [&](int64_t stride) { return stride * size % word == 0; });
}
bool has_float_rows(const View& t) {
  if (t.dtype == OCTET_F32) return has_whole_words(t, kLaneChannels * 4);
  return (t.dtype == OCTET_F16 || t.dtype == OCTET_BF16) && has_whole_words(t, kLaneChannels * 2);
}
bool turns_whole_lanes(const RopeParams& rope) {
  return rope.style == OCTET_ROPE_NONE || rope.pairs % (rope.style == OCTET_ROPE_HALF ? kLaneChannels : 4) == 0;
}

// Calls f with the lanes of a row and with the thread blocks of a launch.
template <class F>
void with_lanes(const View& t, const F& f) {
  const int64_t groups = t.shape[2] * ((batch_heads(t) + kHeads - 1) / kHeads);
  const auto call = [&](auto lanes) { f(lanes, (groups * lanes + kThreads - 1) / kThreads); };
  if (t.shape[3] <= 8 * kLaneChannels) return call(std::integral_constant<int, 8>{});
  if (t.shape[3] <= 16 * kLaneChannels) return call(std::integral_constant<int, 16>{});
  call(std::integral_constant<int, 32>{});
}

}  // namespace

bool quantize_tokens(const QuantizeParams& p, cudaStream_t stream) {
  const bool symmetric = p.how.zero_point_kind == OCTET_SYMMETRIC;
  if (symmetric && p.codes.dtype == OCTET_U8) return false;  // has negative numbers to look for
  if (p.how.granularity != OCTET_PER_TOKEN || !has_float_rows(p.rows.x) || !has_whole_words(p.codes, kLaneChannels) ||
      !turns_whole_lanes(p.rows.rope))
    return false;
  const bool turns = p.rows.rope.style != OCTET_ROPE_NONE;
  if (p.codes.elements())
    with_lanes(p.codes, [&](auto lanes, int64_t blocks) {
      const auto kernel = turns       ? symmetric ? tokens_kernel<lanes, true, true> : tokens_kernel<lanes, true, false>
                                : symmetric ? tokens_kernel<lanes, false, true>
                                      : tokens_kernel<lanes, false, false>;
      launch(kernel, blocks, kWarps, 0, stream, p);
    });
  return true;
}

bool turn_tokens(const RopeParams& rope, const View& x, const View& y, cudaStream_t stream) {
  if (!has_float_rows(x) || !has_float_rows(y) || !turns_whole_lanes(rope)) return false;
  with_lanes(x, [&](auto lanes, int64_t blocks) { launch(turn_kernel<lanes>, blocks, kWarps, 0, stream, x, y, rope); });
  return true;
}

}  // namespace octet::cuda::quantizers
