// Quantizes tokens that share scales, in registers (lane_rows.h). A group whose rows a thread block can hold is
// quantized in one pass over x. Of larger ones, and of channels, one pass finds the extremes and another one writes the
// codes.
#include "cuda/quantizers/extremes.h"
#include "cuda/quantizers/lane_codes.h"
#include "cuda/quantizers/launch.h"

namespace octet::cuda::quantizers {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = 4;                                 // of a group of lanes, loaded before the first is computed
constexpr int kPassTokens = 256, kLeastPassTokens = 64;  // of a thread block, in two passes
template <int Lanes>
constexpr int kSlots = kThreads / Lanes;  // the rows that a thread block takes at a time

// Loads rows with one group of lanes, and makes of them what is to be rounded.
template <int Lanes>
class RowLoader {
 public:
  __device__ explicit RowLoader(const QuantizeParams& p)
      : p_(p), channels_(0), in_row_(channel() < p.dim()), rotation_(p.rows) {}

  __device__ int channel() const { return channels_.first; }
  // Returns whether this lane has channels of the row.
  __device__ bool in_row() const { return in_row_; }

  // The rows of kRows tokens of a (batch, head); present[a]: there is such a token. All lanes call it.
  __device__ void load(const BatchHead& i, const int (&tokens)[kRows], const bool (&present)[kRows],
                       LaneRow (&rows)[kRows]) const {
    const View& x = p_.rows.x;
    const int size = float_bytes(x.dtype);
    const char* const head =
        static_cast<const char*>(x.data) + (i.batch * x.stride[0] + i.head * x.stride[1] + channel()) * size;
    LaneWords words[kRows];
#pragma unroll
    for (int a = 0; a < kRows; ++a)
      if (present[a] && in_row_) words[a] = load_words(x.dtype, channels_, head + tokens[a] * x.stride[2] * size);
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
      if (present[a] && in_row_) {
        to_floats(x.dtype, words[a], rows[a]);
        if (p_.rows.mean.data)
          subtract(channels_, at<float>(p_.rows.mean, i, 0, channel()), p_.rows.mean.stride[3], rows[a]);
      } else {
#pragma unroll
        for (float& number : rows[a]) number = 0.f;
      }
      rotation_.rotate(rows[a]);
    }
  }

 private:
  const QuantizeParams& p_;
  LaneChannels<Lanes> channels_;
  bool in_row_;
  LaneRotation<Lanes> rotation_;
};

// One pass. A team of `team` groups of lanes has up to kRows rows for each.
template <int Lanes, bool Symmetric>
__global__ void __launch_bounds__(kThreads, kBlocks)
    lane_groups_kernel(const __grid_constant__ QuantizeParams p, const Groups groups, int team) {
  __shared__ Extremes of_teams[kSlots<Lanes>];
  const int slot = threadIdx.x / Lanes, member = slot % team;
  if (threadIdx.x < kSlots<Lanes>) of_teams[threadIdx.x] = {};
  __syncthreads();
  const unsigned index = blockIdx.x * (kSlots<Lanes> / team) + slot / team;
  const int group = static_cast<int>(index % groups.count), head = static_cast<int>(index / groups.count);
  const BatchHead i(p.codes, head);
  const RowLoader<Lanes> loader(p);
  int tokens[kRows];
  bool present[kRows];
#pragma unroll
  for (int a = 0; a < kRows; ++a) {
    const int r = member + a * team;
    tokens[a] = groups.token_of(p.how, group, r);
    present[a] = head < heads_of(p.codes) && r < groups.rows && tokens[a] < p.tokens();
  }
  LaneRow rows[kRows];
  loader.load(i, tokens, present, rows);
  Extremes extremes;
#pragma unroll
  for (int a = 0; a < kRows; ++a)
    if (present[a] && loader.in_row()) add_row<Symmetric>(rows[a], extremes);
  extremes = extremes_of_lanes<Lanes, Symmetric>(extremes);
  Extremes& of_team = of_teams[slot / team];
  if (loader.channel() == 0) {
    atomicMax(&of_team.high, extremes.high);
    if (!Symmetric) atomicMin(&of_team.low, extremes.low);
  }
  __syncthreads();
  const AffineScale scale = lane_scale_of<Symmetric>(p, of_team);
  if (head < heads_of(p.codes) && member == 0 && loader.channel() == 0) write_scale(p, i, group, 0, scale);
#pragma unroll
  for (int a = 0; a < kRows; ++a)
    if (present[a] && loader.in_row())
      *reinterpret_cast<uint2*>(at<uint8_t>(p.codes, i, tokens[a], loader.channel())) =
          codes_of<Symmetric>(p, rows[a], [&](int) { return scale; });
}

// Two passes: a thread block takes `pass_tokens` tokens of a (batch, head), which share their scales.
// Calls f(tokens, present, rows) for the rows of a group of lanes.
template <int Lanes, class F>
__device__ void each_row(const QuantizeParams& p, const RowLoader<Lanes>& loader, const BatchHead& i, int first,
                         int pass_tokens, const F& f) {
  const int slot = threadIdx.x / Lanes, end = min(first + pass_tokens, p.tokens());
#pragma unroll 1
  for (int t = first; t < end; t += kRows * kSlots<Lanes>) {
    int tokens[kRows];
    bool present[kRows];
#pragma unroll
    for (int a = 0; a < kRows; ++a) tokens[a] = t + slot + a * kSlots<Lanes>, present[a] = tokens[a] < end;
    LaneRow rows[kRows];
    loader.load(i, tokens, present, rows);
    f(tokens, present, rows);
  }
}

template <int Lanes, bool Symmetric, bool PerChannel>
__global__ void __launch_bounds__(kThreads, kBlocks)
    lane_extremes_kernel(const __grid_constant__ QuantizeParams p, unsigned chunks, int pass_tokens) {
  constexpr int kGroups = PerChannel ? kLaneChannels : 1;
  __shared__ Extremes of_all[PerChannel ? Lanes * kLaneChannels : 1];
  for (int c = threadIdx.x; c < (PerChannel ? p.dim() : 1); c += kThreads) of_all[c] = {};
  __syncthreads();
  const BatchHead i(p.codes, blockIdx.x / chunks);
  const int first = static_cast<int>(blockIdx.x % chunks) * pass_tokens;
  const RowLoader<Lanes> loader(p);
  Extremes extremes[kGroups];
  each_row(p, loader, i, first, pass_tokens,
           [&](const int(&)[kRows], const bool(&present)[kRows], LaneRow(&rows)[kRows]) {
#pragma unroll
             for (int a = 0; a < kRows; ++a) {
               if (!present[a] || !loader.in_row()) continue;
               if constexpr (PerChannel) {
#pragma unroll
                 for (int c = 0; c < kLaneChannels; ++c)
                   extremes[c].add(Symmetric ? order_of(magnitude_of(rows[a][c])) : order_of(rows[a][c]));
               } else {
                 add_row<Symmetric>(rows[a], extremes[0]);
               }
             }
           });
#pragma unroll
  for (int c = 0; c < kGroups; ++c) {
    const Extremes e = PerChannel ? extremes[c] : extremes_of_lanes<Lanes, Symmetric>(extremes[0]);
    if (!loader.in_row() || (!PerChannel && loader.channel() != 0)) continue;
    Extremes& shared = of_all[PerChannel ? loader.channel() + c : 0];
    atomicMax(&shared.high, e.high);
    if (!Symmetric) atomicMin(&shared.low, e.low);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < (PerChannel ? p.dim() : 1); c += kThreads) {
    Extremes e = of_all[c];
    if (Symmetric) e.low = e.high;
    raise_extremes(p, i, PerChannel ? 0 : p.how.group_in_32_bits(first), c, e);
  }
}

template <int Lanes, bool Symmetric, bool PerChannel>
__global__ void __launch_bounds__(kThreads, kBlocks)
    lane_codes_kernel(const __grid_constant__ QuantizeParams p, unsigned chunks, int pass_tokens) {
  const BatchHead i(p.codes, blockIdx.x / chunks);
  const int first = static_cast<int>(blockIdx.x % chunks) * pass_tokens;
  const RowLoader<Lanes> loader(p);
  AffineScale scales[PerChannel ? kLaneChannels : 1];
  const int group = PerChannel ? 0 : p.how.group_in_32_bits(first);
#pragma unroll
  for (int c = 0; c < (PerChannel ? kLaneChannels : 1); ++c)
    if (loader.in_row()) scales[c] = scale_of_extremes(p, i, group, PerChannel ? loader.channel() + c : 0);
  each_row(p, loader, i, first, pass_tokens,
           [&](const int(&tokens)[kRows], const bool(&present)[kRows], LaneRow(&rows)[kRows]) {
#pragma unroll
             for (int a = 0; a < kRows; ++a)
               if (present[a] && loader.in_row())
                 *reinterpret_cast<uint2*>(at<uint8_t>(p.codes, i, tokens[a], loader.channel())) =
                     codes_of<Symmetric>(p, rows[a], [&](int c) { return scales[PerChannel ? c : 0]; });
           });
}

bool fits(const QuantizeParams& p) { return fits_lanes(p) && plain_rows(p.rows); }

// Calls f with the lanes of a row and whether there are no zero points, both constants.
template <class F>
void with_lanes_and_symmetry(const QuantizeParams& p, const F& f) {
  with_lanes(p.codes, [&](auto lanes) {
    if (p.how.zero_point_kind == OCTET_SYMMETRIC) return f(lanes, std::true_type{});
    f(lanes, std::false_type{});
  });
}

}  // namespace

bool quantize_lane_groups(const QuantizeParams& p, const Groups& groups, cudaStream_t stream) {
  if (!fits(p)) return false;
  int team = 1;  // a power of two, so that teams fill thread blocks
  while (team * kRows < groups.rows) team *= 2;
  bool done = false;
  with_lanes_and_symmetry(p, [&](auto lanes, auto symmetric) {
    if (team > kSlots<lanes>) return;
    const int64_t teams = batch_heads(p.codes) * groups.count, in_block = kSlots<lanes> / team;
    launch(lane_groups_kernel<lanes, symmetric>, (teams + in_block - 1) / in_block, kWarps, 0, stream, p, groups, team);
    done = true;
  });
  return done;
}

bool pass_lanes(const QuantizeParams& p, cudaStream_t stream) {
  if (!fits(p) || p.how.granularity == OCTET_PER_THREAD) return false;
  int tokens = kPassTokens;  // of one scale
  if (p.how.granularity == OCTET_PER_BLOCK)
    while (p.how.block % tokens) tokens /= 2;
  if (tokens < kLeastPassTokens) return false;
  const unsigned chunks = (static_cast<unsigned>(p.codes.shape[2]) + tokens - 1) / tokens;
  with_lanes_and_symmetry(p, [&](auto lanes, auto symmetric) {
    const auto pass = [&](auto per_channel) {
      for (const auto kernel :
           {lane_extremes_kernel<lanes, symmetric, per_channel>, lane_codes_kernel<lanes, symmetric, per_channel>})
        launch(kernel, batch_heads(p.codes) * chunks, kWarps, 0, stream, p, chunks, tokens);
    };
    if (p.how.per_channel())
      pass(std::true_type{});
    else
      pass(std::false_type{});
  });
  return true;
}

}  // namespace octet::cuda::quantizers
