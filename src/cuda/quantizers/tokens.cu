// Quantizes tokens that have scales of their own, and turns tokens, in registers (lane_rows.h).
#include <algorithm>

#include "cuda/quantizers/lane_codes.h"
#include "cuda/quantizers/launch.h"

namespace octet::cuda::quantizers {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

// A thread block takes neighbouring tokens, each with several groups of lanes where RoPE's sines are theirs together.
template <Pairs Where>
constexpr int kTeams = Where == Pairs::none ? 1 : 4;
// The most heads of a token that a group of lanes takes, one after the other.
template <Pairs Where>
constexpr int kHeads = Where == Pairs::none ? 8 : 16;
// How many of these are loaded before the first is computed, and how many thread blocks then have registers enough:
// `Rotates`, where quantized values may be those of a rotation.
template <Pairs Where, bool Normed>
constexpr int kAhead = Normed && (Where == Pairs::none || Where == Pairs::halves) ? 4 : 2;
template <Pairs Where, bool Normed, bool Rotates>
constexpr int kResident = Where == Pairs::across || (Rotates && Where == Pairs::neighbours) || Normed ? kBlocks
                                                                                                      : kBlocks + 1;
// How many are computed together. Without norm and RoPE one by one is faster. Before 12.0 ptxas finds the registers for
// four; there it would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kMostTogether = 2;
#else
constexpr int kMostTogether = 4;
#endif
template <Pairs Where, bool Normed, bool Scales>
constexpr int kTogether = Normed || (Scales && Where != Pairs::none) ? std::min(kAhead<Where, Normed>, kMostTogether)
                                                                     : 1;
template <int Lanes, Pairs Where>
constexpr int kTokens = kThreads / Lanes / kTeams<Where>;

// The rows of a group of lanes: those of one token in `run` neighbouring heads.
template <int Lanes, Pairs Where>
struct TokenRows {
  LaneChannels<Lanes, Where == Pairs::halves> channels;
  int first_token, token, first, last, heads;
  bool present;
  __device__ TokenRows(const View& t, const RopeParams& rope, int run)
      : channels(rope.pairs), heads(static_cast<int>(t.shape[1])) {
    constexpr int kBlock = kTokens<Lanes, Where>;
    const auto tokens = static_cast<int>(t.shape[2]);
    const unsigned slot = threadIdx.x / Lanes, blocks = (tokens + kBlock - 1) / kBlock;
    first_token = static_cast<int>(blockIdx.x % blocks) * kBlock, token = first_token + static_cast<int>(slot % kBlock);
    first = static_cast<int>(blockIdx.x / blocks * kTeams<Where> + slot / kBlock) * run;
    last = min(first + run, heads_of(t));
    present = channels.first < t.shape[3] && token < tokens;
  }

  // A walk along this lane's parts of the rows of t, whose numbers have `size` bytes.
  template <class T>
  __device__ HeadWalk<T> walk(const View& t, const HeadSteps& steps, int size) const {
    return {t, steps, size, BatchHead(t, first), token, channels.first};
  }

  // Calls f for `Together` rows of x after the other, of which `Ahead` are loaded first: whether there are such rows,
  // the rows, and whether their heads are the last of their batches. All lanes of a warp have as many.
  template <int Ahead, int Together, class F>
  __device__ void each(const View& x, const HeadSteps& steps, const F& f) const {
    auto from = walk<const char>(x, steps, float_bytes(x.dtype));
    int loaded = first % heads, computed = loaded;
    const auto is_last = [&](int& head) {
      const bool last = ++head == heads;
      if (last) head = 0;
      return last;
    };
#pragma unroll 1
    for (int head = first; head < last; head += Ahead) {
      LaneWords words[Ahead];
#pragma unroll
      for (int a = 0; a < Ahead; ++a) {
        if (present && head + a < last) words[a] = load_words(x.dtype, channels, from.at());
        from.next(is_last(loaded));
      }
#pragma unroll
      for (int a = 0; a < Ahead; a += Together) {
        bool there[Together], lasts[Together];
        LaneRow rows[Together] = {};
#pragma unroll
        for (int r = 0; r < Together; ++r) {
          there[r] = present && head + a + r < last, lasts[r] = is_last(computed);
          if (there[r]) to_floats(x.dtype, words[a + r], rows[r]);
        }
        f(there, rows, lasts);
      }
    }
  }
};

// Normalises and turns the rows of a group of lanes. All threads of a block make one together.
template <int Lanes, Pairs Where, bool Normed>
class RowMaker {
 public:
  static constexpr int kBlock = kTokens<Lanes, Where>;
  // `sines`: shared memory for those of all tokens of the block.
  using Sines = float2[Where == Pairs::none ? 1 : kBlock * kLanePairs<Lanes>];

  __device__ RowMaker(const TokenRows<Lanes, Where>& rows, const NormParams& norm, const RopeParams& rope,
                      const HeadSteps& weight_steps, int dim, Sines& sines)
      : channels_(rows.channels),
        norm_(norm, dim),
        weights_(rows.template walk<const char>(norm.weight, weight_steps, float_bytes(norm.weight.dtype))),
        of_heads_(Normed && weight_steps.head),
        turns_(rope) {
    if (Normed && norm.weight.data) norm_.load(channels_, weights_.at());
    if constexpr (Where != Pairs::none) {
      find_sines<Lanes, kBlock>(rope, rows.first_token, sines);
      turns_.load(sines + (rows.token - rows.first_token) * kLanePairs<Lanes>);
    }
  }

  // `lasts`: their heads are the last of their batches.
  template <int Rows>
  __device__ void make(LaneRow (&rows)[Rows], const bool (&lasts)[Rows]) {
    if constexpr (Normed) {
      const auto factors = norm_.factors(rows);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (of_heads_) norm_.load(channels_, weights_.at()), weights_.next(lasts[r]);
        norm_.normalise(rows[r], factors.of(r));
      }
    }
#pragma unroll
    for (LaneRow& row : rows) turns_.turn(row);
  }

 private:
  const LaneChannels<Lanes, Where == Pairs::halves>& channels_;
  LaneNorm<Lanes, Where == Pairs::halves> norm_;
  HeadWalk<const char> weights_;
  bool of_heads_;
  LaneTurns<Lanes, Where> turns_;
};

// The steps of all tensors of a call.
struct TokenSteps {
  HeadSteps x, norm_weight, codes, scale, zero_point, mean;
  explicit TokenSteps(const QuantizeParams& p)
      : x(p.rows.x, float_bytes(p.rows.x.dtype)),
        norm_weight(p.rows.rms.weight, float_bytes(p.rows.rms.weight.dtype)),
        codes(p.codes, 1),
        scale(p.how.scale, sizeof(float)),
        zero_point(p.how.zero_point, sizeof(float)),
        mean(p.rows.mean, sizeof(float)) {}
};

template <int Lanes, Pairs Where, bool Symmetric, bool Normed>
__global__ void __launch_bounds__(kThreads, Symmetric ? kResident<Where, Normed, true> : kBlocks)
    tokens_kernel(const __grid_constant__ QuantizeParams p, const __grid_constant__ TokenSteps steps, int run) {
  const TokenRows<Lanes, Where> rows(p.codes, p.rows.rope, run);
  const auto& channels = rows.channels;
  const BatchHead i(p.codes, rows.first);
  auto codes = rows.template walk<char>(p.codes, steps.codes, 1);
  HeadWalk<float> scales(p.how.scale, steps.scale, sizeof(float), i, rows.token, 0),
      zero_points(p.how.zero_point, steps.zero_point, sizeof(float), i, rows.token, 0),
      mean(p.rows.mean, steps.mean, sizeof(float), i, 0, channels.first);
  using Maker = RowMaker<Lanes, Where, Normed>;
  __shared__ typename Maker::Sines sines;
  Maker maker(rows, p.rows.rms, p.rows.rope, steps.norm_weight, p.dim(), sines);
  const LaneRotation<Lanes> rotation(p.rows);
  constexpr int kRows = kTogether<Where, Normed, true>;
  rows.template each<kAhead<Where, Normed>, kRows>(
      p.rows.x, steps.x, [&](const bool(&present)[kRows], LaneRow(&x)[kRows], const bool(&lasts)[kRows]) {
        maker.make(x, lasts);
        Extremes extremes[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (p.rows.mean.data && present[r]) subtract(channels, mean.at(), p.rows.mean.stride[3], x[r]);
          mean.next(lasts[r]);
          if constexpr (Where != Pairs::halves) rotation.rotate(x[r]);  // whose lanes have neighbouring channels
          if (present[r]) add_row<Symmetric>(x[r], extremes[r]);
        }
        const LaneScales<Lanes, kRows, Symmetric> all(p, extremes);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const AffineScale scale = all.of(r);
          if (present[r]) {
            if (channels.first == 0) {
              *scales.at() = scale.scale;
              if (!Symmetric) *zero_points.at() = scale.zero_point(p.how.zero_point_kind);
            }
            store_codes(channels, codes_of<Symmetric>(p, x[r], [&](int) { return scale; }), codes.at());
          }
          codes.next(lasts[r]), scales.next(lasts[r]);
          if (!Symmetric) zero_points.next(lasts[r]);
        }
      });
}

struct TurnSteps {
  HeadSteps x, y, norm_weight;
  explicit TurnSteps(const TurnParams& p)
      : x(p.x, float_bytes(p.x.dtype)),
        y(p.y, float_bytes(p.y.dtype)),
        norm_weight(p.rms.weight, float_bytes(p.rms.weight.dtype)) {}
};

template <int Lanes, Pairs Where, bool Normed>
__global__ void __launch_bounds__(kThreads, kResident<Where, Normed, false>)
    turn_kernel(const __grid_constant__ TurnParams p, const __grid_constant__ TurnSteps steps, int run) {
  const TokenRows<Lanes, Where> rows(p.x, p.rope, run);
  auto turned = rows.template walk<char>(p.y, steps.y, float_bytes(p.y.dtype));
  using Maker = RowMaker<Lanes, Where, Normed>;
  __shared__ typename Maker::Sines sines;
  Maker maker(rows, p.rms, p.rope, steps.norm_weight, static_cast<int>(p.x.shape[3]), sines);
  constexpr int kRows = kTogether<Where, Normed, false>;
  rows.template each<kAhead<Where, Normed>, kRows>(
      p.x, steps.x, [&](const bool(&present)[kRows], LaneRow(&x)[kRows], const bool(&lasts)[kRows]) {
        maker.make(x, lasts);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (present[r]) store_row(p.y.dtype, rows.channels, x[r], turned.at());
          turned.next(lasts[r]);
        }
      });
}

// Returns whether lanes can normalise: their weights are whole words.
bool fits_norm(const NormParams& norm) { return !norm.weight.data || has_float_rows(norm.weight); }

// Calls f with the lanes of a row of t, where the pairs of RoPE lie and whether there is a norm, all constants, unless
// pairs are no whole parts of lanes. `rotates`: a rotation follows, for which each lane has neighbouring channels.
// Returns whether it did.
template <class F>
bool with_rows(const View& t, const NormParams& norm, const RopeParams& rope, bool rotates, const F& f) {
  constexpr int kHalf = kLaneChannels / 2;
  const bool halves = rope.style == OCTET_ROPE_HALF;
  bool done = true;
  with_lanes(t, [&](auto lanes) {
    // The sum of a norm has one order, which lanes of two parts of a row give where they have all of it.
    const bool across = rotates || (norm.present && 2 * rope.pairs != lanes * kLaneChannels);
    const auto with_norm = [&](auto pairs) {
      if (norm.present) return f(lanes, pairs, std::true_type{});
      f(lanes, pairs, std::false_type{});
    };
    if (rope.style == OCTET_ROPE_NONE)
      with_norm(std::integral_constant<Pairs, Pairs::none>{});
    else if (rope.pairs % (halves && across ? kLaneChannels : kHalf))
      done = false;
    else if (!halves)
      with_norm(std::integral_constant<Pairs, Pairs::neighbours>{});
    else if (across)
      with_norm(std::integral_constant<Pairs, Pairs::across>{});
    else
      with_norm(std::integral_constant<Pairs, Pairs::halves>{});
  });
  return done;
}

// The thread blocks of a launch, and the rows of each of their groups of lanes.
struct Launch {
  int64_t blocks;
  int run;
};
template <int Lanes, Pairs Where>
Launch launch_of(const View& t) {
  const int64_t heads = batch_heads(t), teams = kTeams<Where>, tokens = kTokens<Lanes, Where>;
  const int64_t head_blocks = (heads + teams * kHeads<Where> - 1) / (teams * kHeads<Where>), all = head_blocks * teams;
  return {(t.shape[2] + tokens - 1) / tokens * head_blocks, static_cast<int>((heads + all - 1) / all)};
}

}  // namespace

bool quantize_tokens(const QuantizeParams& p, cudaStream_t stream) {
  const bool symmetric = p.how.zero_point_kind == OCTET_SYMMETRIC;
  if (p.how.granularity != OCTET_PER_TOKEN || !fits_lanes(p) || !fits_norm(p.rows.rms)) return false;
  if (p.rows.rms.present && !symmetric) return false;
  return with_rows(p.codes, p.rows.rms, p.rows.rope, p.rows.seed != 0, [&](auto lanes, auto pairs, auto normed) {
    if (!p.codes.elements()) return;
    const auto kernel =
        symmetric || normed ? tokens_kernel<lanes, pairs, true, normed> : tokens_kernel<lanes, pairs, normed, normed>;
    const auto [blocks, run] = launch_of<lanes, pairs>(p.codes);
    launch(kernel, blocks, kWarps, 0, stream, p, TokenSteps(p), run);
  });
}

bool turn_tokens(const TurnParams& p, cudaStream_t stream) {
  if (!has_float_rows(p.x) || !has_float_rows(p.y) || !fits_norm(p.rms)) return false;
  return with_rows(p.x, p.rms, p.rope, false, [&](auto lanes, auto pairs, auto normed) {
    const auto [blocks, run] = launch_of<lanes, pairs>(p.x);
    launch(turn_kernel<lanes, pairs, normed>, blocks, kWarps, 0, stream, p, TurnSteps(p), run);
  });
}

}  // namespace octet::cuda::quantizers
