// Quantizes tokens that have scales of their own, and turns tokens, in registers (lane_rows.h).
#include <algorithm>

#include "cuda/quantizers/lane_codes.h"
#include "cuda/quantizers/launch.h"

namespace octet::cuda::quantizers {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kHeads = 8;  // of a token, one after the other in a group of lanes
constexpr int kAhead = 4;  // of these, loaded before the first is computed

// The rows of a group of lanes: those of one token in several heads.
template <int Lanes>
struct TokenRows {
  int token, channel, first, end, heads;
  __device__ explicit TokenRows(const View& t)
      : channel(threadIdx.x % Lanes * kLaneChannels), heads(static_cast<int>(t.shape[1])) {
    const unsigned group = (blockIdx.x * kThreads + threadIdx.x) / Lanes, tokens = static_cast<unsigned>(t.shape[2]);
    token = static_cast<int>(group % tokens), first = static_cast<int>(group / tokens) * kHeads;
    end = channel < t.shape[3] ? min(first + kHeads, heads_of(t)) : 0;
  }

  // A walk along this lane's parts of the rows of t, whose numbers have `size` bytes.
  template <class T>
  __device__ HeadWalk<T> walk(const View& t, const HeadSteps& steps, int size) const {
    return {t, steps, size, BatchHead(t, first), token, channel};
  }

  // Calls f(whether there is such a row, row, whether its head is the last of its batch) for all rows of x.
  template <class F>
  __device__ void each(const View& x, const HeadSteps& steps, const F& f) const {
    auto from = walk<const uint4>(x, steps, float_bytes(x.dtype));
    int loaded = first % heads, computed = loaded;
    const auto is_last = [&](int& head) {
      const bool last = ++head == heads;
      if (last) head = 0;
      return last;
    };
#pragma unroll 1
    for (int head = first; head < first + kHeads; head += kAhead) {
      LaneWords words[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (head + a < end) words[a] = load_words(x.dtype, from.at());
        from.next(is_last(loaded));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        LaneRow row = {};
        if (head + a < end) to_floats(x.dtype, words[a], row);
        f(head + a < end, row, is_last(computed));
      }
    }
  }
};

// The steps of all tensors of a call.
struct TokenSteps {
  HeadSteps x, codes, scale, zero_point, mean;
  explicit TokenSteps(const QuantizeParams& p)
      : x(p.rows.x, float_bytes(p.rows.x.dtype)),
        codes(p.codes, 1),
        scale(p.how.scale, sizeof(float)),
        zero_point(p.how.zero_point, sizeof(float)),
        mean(p.rows.mean, sizeof(float)) {}
};

// `Turns`: with RoPE, whose sines take registers.
template <int Lanes, bool Turns, bool Symmetric>
__global__ void __launch_bounds__(kThreads, Turns || !Symmetric ? kBlocks : kBlocks + 1)
    tokens_kernel(const __grid_constant__ QuantizeParams p, const __grid_constant__ TokenSteps steps) {
  const TokenRows<Lanes> rows(p.codes);
  const BatchHead i(p.codes, rows.first);
  auto codes = rows.template walk<uint2>(p.codes, steps.codes, 1);
  HeadWalk<float> scales(p.how.scale, steps.scale, sizeof(float), i, rows.token, 0),
      zero_points(p.how.zero_point, steps.zero_point, sizeof(float), i, rows.token, 0),
      mean(p.rows.mean, steps.mean, sizeof(float), i, 0, rows.channel);
  LaneTurns<Lanes> turns(p.rows.rope);
  const LaneRotation<Lanes> rotation(p.rows);
  if constexpr (Turns) turns.seek(rows.token);
  rows.each(p.rows.x, steps.x, [&](bool present, LaneRow& row, bool last) {
    if constexpr (Turns) turns.turn(row);
    if (p.rows.mean.data && present) subtract(mean.at(), p.rows.mean.stride[3], row);
    rotation.rotate(row);
    Extremes extremes;
    if (present) add_row<Symmetric>(row, extremes);
    const AffineScale scale = lane_scale_of<Symmetric>(p, extremes_of_lanes<Lanes, Symmetric>(extremes));
    if (present) {
      if (rows.channel == 0) {
        *scales.at() = scale.scale;
        if (!Symmetric) *zero_points.at() = scale.zero_point(p.how.zero_point_kind);
      }
      *codes.at() = codes_of<Symmetric>(p, row, [&](int) { return scale; });
    }
    codes.next(last), scales.next(last), mean.next(last);
    if (!Symmetric) zero_points.next(last);
  });
}

template <int Lanes>
__global__ void __launch_bounds__(kThreads, kBlocks)
    turn_kernel(const __grid_constant__ View x, const __grid_constant__ View y, const __grid_constant__ RopeParams rope,
                const __grid_constant__ HeadSteps steps_x, const __grid_constant__ HeadSteps steps_y) {
  const TokenRows<Lanes> rows(x);
  auto turned = rows.template walk<uint4>(y, steps_y, float_bytes(y.dtype));
  LaneTurns<Lanes> turns(rope);
  turns.seek(rows.token);
  rows.each(x, steps_x, [&](bool present, LaneRow& row, bool last) {
    turns.turn(row);
    if (present) store_row(y.dtype, row, turned.at());
    turned.next(last);
  });
}

bool turns_whole_lanes(const RopeParams& rope) {
  return rope.style == OCTET_ROPE_NONE || rope.pairs % (rope.style == OCTET_ROPE_HALF ? kLaneChannels : 4) == 0;
}

// The thread blocks of a launch of which each group of lanes takes a token.
int64_t blocks_of_tokens(const View& t, int64_t lanes) {
  const int64_t groups = t.shape[2] * ((batch_heads(t) + kHeads - 1) / kHeads);
  return (groups * lanes + kThreads - 1) / kThreads;
}

}  // namespace

bool quantize_tokens(const QuantizeParams& p, cudaStream_t stream) {
  const bool symmetric = p.how.zero_point_kind == OCTET_SYMMETRIC, turns = p.rows.rope.style != OCTET_ROPE_NONE;
  if (p.how.granularity != OCTET_PER_TOKEN || !fits_lanes(p) || !turns_whole_lanes(p.rows.rope)) return false;
  if (p.codes.elements())
    with_lanes(p.codes, [&](auto lanes) {
      const auto kernel = turns       ? symmetric ? tokens_kernel<lanes, true, true> : tokens_kernel<lanes, true, false>
                                : symmetric ? tokens_kernel<lanes, false, true>
                                      : tokens_kernel<lanes, false, false>;
      launch(kernel, blocks_of_tokens(p.codes, lanes), kWarps, 0, stream, p, TokenSteps(p));
    });
  return true;
}

bool turn_tokens(const RopeParams& rope, const View& x, const View& y, cudaStream_t stream) {
  if (!has_float_rows(x) || !has_float_rows(y) || !turns_whole_lanes(rope)) return false;
  const HeadSteps steps_x(x, float_bytes(x.dtype)), steps_y(y, float_bytes(y.dtype));
  with_lanes(x, [&](auto lanes) {
    launch(turn_kernel<lanes>, blocks_of_tokens(x, lanes), kWarps, 0, stream, x, y, rope, steps_x, steps_y);
  });
  return true;
}

}  // namespace octet::cuda::quantizers
