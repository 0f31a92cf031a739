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
template <int Lanes, Pairs Where>
struct TokenRows {
  LaneChannels<Lanes, Where == Pairs::halves> channels;
  int token, first, end, heads;
  __device__ explicit TokenRows(const View& t, const RopeParams& rope)
      : channels(rope.pairs), heads(static_cast<int>(t.shape[1])) {
    const unsigned group = (blockIdx.x * kThreads + threadIdx.x) / Lanes, tokens = static_cast<unsigned>(t.shape[2]);
    token = static_cast<int>(group % tokens), first = static_cast<int>(group / tokens) * kHeads;
    end = channels.first < t.shape[3] ? min(first + kHeads, heads_of(t)) : 0;
  }

  // A walk along this lane's parts of the rows of t, whose numbers have `size` bytes.
  template <class T>
  __device__ HeadWalk<T> walk(const View& t, const HeadSteps& steps, int size) const {
    return {t, steps, size, BatchHead(t, first), token, channels.first};
  }

  // Calls f(whether there is such a row, row, whether its head is the last of its batch) for all rows of x.
  template <class F>
  __device__ void each(const View& x, const HeadSteps& steps, const F& f) const {
    auto from = walk<const char>(x, steps, float_bytes(x.dtype));
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
        if (head + a < end) words[a] = load_words(x.dtype, channels, from.at());
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

template <int Lanes, Pairs Where, bool Symmetric>
__global__ void __launch_bounds__(kThreads, Where != Pairs::none || !Symmetric ? kBlocks : kBlocks + 1)
    tokens_kernel(const __grid_constant__ QuantizeParams p, const __grid_constant__ TokenSteps steps) {
  const TokenRows<Lanes, Where> rows(p.codes, p.rows.rope);
  const auto& channels = rows.channels;
  const BatchHead i(p.codes, rows.first);
  auto codes = rows.template walk<char>(p.codes, steps.codes, 1);
  HeadWalk<float> scales(p.how.scale, steps.scale, sizeof(float), i, rows.token, 0),
      zero_points(p.how.zero_point, steps.zero_point, sizeof(float), i, rows.token, 0),
      mean(p.rows.mean, steps.mean, sizeof(float), i, 0, channels.first);
  LaneTurns<Lanes, Where> turns(p.rows.rope);
  const LaneRotation<Lanes> rotation(p.rows);
  turns.seek(rows.token);
  rows.each(p.rows.x, steps.x, [&](bool present, LaneRow& row, bool last) {
    turns.turn(row);
    if (p.rows.mean.data && present) subtract(channels, mean.at(), p.rows.mean.stride[3], row);
    if constexpr (Where != Pairs::halves) rotation.rotate(row);  // whose lanes have neighbouring channels
    Extremes extremes;
    if (present) add_row<Symmetric>(row, extremes);
    const AffineScale scale = lane_scale_of<Symmetric>(p, extremes_of_lanes<Lanes, Symmetric>(extremes));
    if (present) {
      if (channels.first == 0) {
        *scales.at() = scale.scale;
        if (!Symmetric) *zero_points.at() = scale.zero_point(p.how.zero_point_kind);
      }
      store_codes(channels, codes_of<Symmetric>(p, row, [&](int) { return scale; }), codes.at());
    }
    codes.next(last), scales.next(last), mean.next(last);
    if (!Symmetric) zero_points.next(last);
  });
}

template <int Lanes, Pairs Where>
__global__ void __launch_bounds__(kThreads, kBlocks)
    turn_kernel(const __grid_constant__ View x, const __grid_constant__ View y, const __grid_constant__ RopeParams rope,
                const __grid_constant__ HeadSteps steps_x, const __grid_constant__ HeadSteps steps_y) {
  const TokenRows<Lanes, Where> rows(x, rope);
  auto turned = rows.template walk<char>(y, steps_y, float_bytes(y.dtype));
  LaneTurns<Lanes, Where> turns(rope);
  turns.seek(rows.token);
  rows.each(x, steps_x, [&](bool present, LaneRow& row, bool last) {
    turns.turn(row);
    if (present) store_row(y.dtype, rows.channels, row, turned.at());
    turned.next(last);
  });
}

// Calls f with where the pairs of RoPE lie, a constant, unless they are no whole parts of lanes. `rotates`: a rotation
// follows, for which each lane has neighbouring channels. Returns whether it did.
template <class F>
bool with_pairs(const RopeParams& rope, bool rotates, const F& f) {
  constexpr int kHalf = kLaneChannels / 2;
  const bool halves = rope.style == OCTET_ROPE_HALF;
  if (rope.style == OCTET_ROPE_NONE)
    f(std::integral_constant<Pairs, Pairs::none>{});
  else if (rope.pairs % (halves && rotates ? kLaneChannels : kHalf))
    return false;
  else if (!halves)
    f(std::integral_constant<Pairs, Pairs::neighbours>{});
  else if (rotates)
    f(std::integral_constant<Pairs, Pairs::across>{});
  else
    f(std::integral_constant<Pairs, Pairs::halves>{});
  return true;
}

// The thread blocks of a launch of which each group of lanes takes a token.
int64_t blocks_of_tokens(const View& t, int64_t lanes) {
  const int64_t groups = t.shape[2] * ((batch_heads(t) + kHeads - 1) / kHeads);
  return (groups * lanes + kThreads - 1) / kThreads;
}

}  // namespace

bool quantize_tokens(const QuantizeParams& p, cudaStream_t stream) {
  if (p.how.granularity != OCTET_PER_TOKEN || !fits_lanes(p)) return false;
  return with_pairs(p.rows.rope, p.rows.seed != 0, [&](auto pairs) {
    if (!p.codes.elements()) return;
    with_lanes(p.codes, [&](auto lanes) {
      const auto kernel = p.how.zero_point_kind == OCTET_SYMMETRIC ? tokens_kernel<lanes, pairs, true>
                                                                   : tokens_kernel<lanes, pairs, false>;
      launch(kernel, blocks_of_tokens(p.codes, lanes), kWarps, 0, stream, p, TokenSteps(p));
    });
  });
}

bool turn_tokens(const RopeParams& rope, const View& x, const View& y, cudaStream_t stream) {
  if (!has_float_rows(x) || !has_float_rows(y)) return false;
  const HeadSteps steps_x(x, float_bytes(x.dtype)), steps_y(y, float_bytes(y.dtype));
  return with_pairs(rope, false, [&](auto pairs) {
    with_lanes(x, [&](auto lanes) {
      launch(turn_kernel<lanes, pairs>, blocks_of_tokens(x, lanes), kWarps, 0, stream, x, y, rope, steps_x, steps_y);
    });
  });
}

}  // namespace octet::cuda::quantizers
