// octet_quantize on the CPU. Every row goes through the same operations, in float: load, RoPE, minus mean, Hadamard;
// then amax (or the extremes) of its group gives a scale, and the quantized values are round(row / scale).
//
// Two passes over each (batch, head):
//  1. stats: the channel means and statistics, if either is asked for;
//  2. units of whole groups of tokens: their rows, the scales of their groups, their quantized values.
// Means are summed in double in the order of tokens, and units do not depend on the number of threads: results are
// bitwise repeatable.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/quant/hadamard.h"
#include "core/quant/scale.h"
#include "core/quantization.h"
#include "cpu/parallel.h"
#include "cpu/quantize/elements.h"
#include "cpu/quantize/rope.h"
#include "cpu/quantize/stats.h"

namespace octet::cpu {
namespace {

constexpr int64_t kUnitTokens = 64;     // tokens per unit, where groups are smaller
constexpr int64_t kBufferedRows = 256;  // rows of a unit kept between finding its scales and rounding
constexpr int64_t kElementsPerThread = 1 << 15;

unsigned threads_for(const View& x, int64_t tasks) {
  const int64_t elements = x.shape[0] * x.shape[1] * x.shape[2] * x.shape[3];
  return thread_count(0, std::min(tasks, 1 + elements / kElementsPerThread));
}

// The range of a format: x / scale lies in [low, high].
struct Range {
  float low, high;
};

Range range_of(octet_dtype dtype) {
  switch (dtype) {
    case OCTET_I8:
      return {-127.f, 127.f};
    case OCTET_U8:
      return {0.f, 255.f};
    case OCTET_I4:
      return {-7.f, 7.f};
    case OCTET_E4M3:
      return {-448.f, 448.f};
    default:
      return {-57344.f, 57344.f};
  }
}

bool is_integer(octet_dtype dtype) { return dtype == OCTET_I8 || dtype == OCTET_U8 || dtype == OCTET_I4; }

// Integers that order as floats do, NaN at both ends, so that extremes keep NaN. Its own inverse.
int32_t order_of(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
float of_order(int32_t order) { return std::bit_cast<float>(order ^ (order >> 31 & 0x7fffffff)); }

// The extremes of a group: amax where there are no zero points, else the lowest and the highest.
struct Extremes {
  int32_t low = std::numeric_limits<int32_t>::max(), high = std::numeric_limits<int32_t>::min();  // as order_of

  bool empty() const { return low > high; }
  void add(float smallest, float largest) {
    low = std::min(low, order_of(smallest));
    high = std::max(high, order_of(largest));
  }
};

Extremes extremes_of(const float* row, int64_t n, bool symmetric) {
  Extremes e;
  if (symmetric) {
    const float top = amax(row, n);
    e.add(top, top);
    return e;
  }
  for (int64_t c = 0; c < n; ++c) {
    const int32_t order = order_of(row[c]);
    e.low = order < e.low ? order : e.low;
    e.high = order > e.high ? order : e.high;
  }
  return e;
}

// x ~ scale * (value - zero) + shift, and value = round((x - shift) * inverse) + zero.
struct AffineScale {
  float scale = 0.f, inverse = 0.f, zero = 0.f, shift = 0.f;
};

AffineScale affine_scale_of(const Extremes& extremes, octet_zero_point kind, Range range) {
  if (extremes.empty()) return {};
  float low = of_order(extremes.low), high = of_order(extremes.high);
  if (kind == OCTET_SYMMETRIC) {
    const Scale s = scale_of(high, range.high);
    return {s.scale, s.inverse};
  }
  AffineScale scale;
  if (kind ==
      OCTET_ZERO_POINT_INTEGER) {  // the range always holds 0, so that the zero point is itself a quantized value
    low = std::min(low, 0.f), high = std::max(high, 0.f);
    const Scale s = scale_of(high - low, range.high - range.low);
    scale = {s.scale, s.inverse};
    if (s.scale > 0.f) scale.zero = std::nearbyint(range.low - low * s.inverse);
  } else {  // the range is centred on its middle, or starts at its lower end where quantized values do at 0
    const float shift = range.low < 0.f ? 0.5f * low + 0.5f * high : low;
    const Scale s = scale_of(std::max(high - shift, shift - low), range.high);
    scale = {s.scale, s.inverse};
    if (std::isfinite(shift)) scale.shift = shift;
  }
  return scale;
}

// Rows of x as they are rounded. One per thread.
class Rows {
 public:
  Rows(const View& x, const RopeTable& rope, const float* signs) : x_(x), rope_(rope), signs_(signs) {}

  void embedded(int64_t b, int64_t h, int64_t t, float* row) {
    load_row(x_, b, h, t, row);
    rope_(row, t);
  }

  // `mean` may be null.
  void prepared(int64_t b, int64_t h, int64_t t, const float* mean, float* row) {
    embedded(b, h, t, row);
    const int64_t dim = x_.shape[3];
    if (mean)
      for (int64_t c = 0; c < dim; ++c) row[c] -= mean[c];
    if (signs_) hadamard(row, signs_, dim);
  }

 private:
  const View& x_;
  RopeRow<float> rope_;
  const float* signs_;
};

// One call: what its threads share.
struct Call {
  const View& x;
  const View& codes;
  const Quantization& how;
  bool with_statistics;
  Range range;
  std::array<float, 256> values;  // of fp8 numbers
  bool symmetric() const { return how.zero_point_kind == OCTET_SYMMETRIC; }
};

// Quantizes one unit of tokens after the other. One per thread.
class TokenQuantizer {
 public:
  TokenQuantizer(const Call& call, Rows rows, int64_t unit)
      : call_(call),
        rows_(std::move(rows)),
        dim_(call.x.shape[3]),
        buffered_(unit <= kBufferedRows),
        buffer_((buffered_ ? unit : 1) * dim_),
        scaled_(dim_),
        bytes_(dim_) {}

  // Quantizes the tokens [first, last), whole groups, and writes their scales. Returns the sum over tokens of the mean
  // squared rounding error of a row, if statistics are asked for.
  double unit(int64_t b, int64_t h, int64_t first, int64_t last, const float* mean) {
    find_extremes(b, h, first, last, mean);
    write_scales(b, h, first);
    double error = 0;
    for (int64_t t = first; t < last; ++t) {
      if (!buffered_) rows_.prepared(b, h, t, mean, buffer_.data());
      error += quantize(b, h, t, &scales_[group(t, first)], row(t - first));
    }
    return error;
  }

 private:
  float* row(int64_t i) { return buffer_.data() + (buffered_ ? i * dim_ : 0); }
  int64_t group(int64_t t, int64_t first) const { return call_.how.group_of(t) - call_.how.group_of(first); }

  // Groups of a unit. The last tile of thread groups has all of them, with or without tokens.
  int64_t groups(int64_t first, int64_t last) const {
    if (call_.how.granularity == OCTET_PER_THREAD)
      return call_.how.operand == OCTET_OPERAND_Q ? kThreadGroupsQ : kThreadGroupsK;
    return last > first ? group(last - 1, first) + 1 : 1;
  }

  void find_extremes(int64_t b, int64_t h, int64_t first, int64_t last, const float* mean) {
    const Quantization& how = call_.how;
    extremes_.assign(how.per_channel() ? dim_ : groups(first, last), Extremes{});
    for (int64_t t = first; t < last; ++t) {
      float* x = row(t - first);
      rows_.prepared(b, h, t, mean, x);
      if (how.per_channel()) {
        for (int64_t c = 0; c < dim_; ++c)
          call_.symmetric() ? extremes_[c].add(std::fabs(x[c]), std::fabs(x[c])) : extremes_[c].add(x[c], x[c]);
      } else {
        const Extremes e = extremes_of(x, dim_, call_.symmetric());
        Extremes& of_group = extremes_[group(t, first)];
        of_group.low = std::min(of_group.low, e.low), of_group.high = std::max(of_group.high, e.high);
      }
    }
  }

  void write_scales(int64_t b, int64_t h, int64_t first) {
    const Quantization& how = call_.how;
    scales_.resize(extremes_.size());
    for (std::size_t i = 0; i < scales_.size(); ++i) {
      scales_[i] = affine_scale_of(extremes_[i], how.zero_point_kind, call_.range);
      const auto index = static_cast<int64_t>(i);
      const int64_t g = how.per_channel() ? 0 : how.group_of(first) + index, c = how.per_channel() ? index : 0;
      *how.scale.at<float>(b, h, g, c) = scales_[i].scale;
      if (!call_.symmetric())
        *how.zero_point.at<float>(b, h, g, c) =
            how.zero_point_kind == OCTET_ZERO_POINT_FLOAT ? scales_[i].shift : scales_[i].zero;
    }
  }

  // `scale`: of the row, or per channel.
  double quantize(int64_t b, int64_t h, int64_t t, const AffineScale* scale, const float* x) {
    float* r = scaled_.data();
    if (call_.how.per_channel()) {
      for (int64_t c = 0; c < dim_; ++c) r[c] = scaled(x[c], scale[c]);
    } else {
      const AffineScale all = *scale;
      if (call_.how.zero_point_kind == OCTET_ZERO_POINT_INTEGER)
        for (int64_t c = 0; c < dim_; ++c) r[c] = scaled(x[c], all);
      else
        for (int64_t c = 0; c < dim_; ++c) r[c] = (x[c] - all.shift) * all.inverse;
    }
    switch (call_.codes.dtype) {
      case OCTET_E4M3:
        encode_e4m3(r, dim_, bytes_.data());
        break;
      case OCTET_E5M2:
        encode_e5m2(r, dim_, bytes_.data());
        break;
      default:
        encode_integers(r, dim_, call_.range.low, call_.range.high, bytes_.data());
    }
    detail::convert_row(bytes_.data(), 1, call_.codes.at<uint8_t>(b, h, t), call_.codes.stride[3], dim_,
                        [](uint8_t v) { return v; });
    return call_.with_statistics ? mean_squared_error(scale, x) : 0.0;
  }

  // (x - shift) / scale + zero; what is added to the zero point is an integer, for zero points to be exact.
  static float scaled(float x, const AffineScale& scale) {
    float r = (x - scale.shift) * scale.inverse;
    r = r == r ? r : 0.f;
    if (scale.zero == 0.f) return r;
    r = r > -512.f ? r : -512.f;
    r = r < 512.f ? r : 512.f;
    return nearest_even(r) + scale.zero;
  }

  // Values at equal distances err uniformly within half a scale: scale^2 / 12. The distances of fp8 numbers vary, so
  // their error is measured.
  double mean_squared_error(const AffineScale* scale, const float* x) const {
    if (is_integer(call_.codes.dtype) && !call_.how.per_channel())
      return scale->scale * static_cast<double>(scale->scale) / 12;
    double sum = 0;
    for (int64_t c = 0; c < dim_; ++c) {
      const double distance = scale[call_.how.per_channel() ? c : 0].scale;
      const double error =
          is_integer(call_.codes.dtype) ? distance / std::sqrt(12.0) : x[c] - distance * call_.values[bytes_[c]];
      sum += error * error;
    }
    return sum / static_cast<double>(std::max<int64_t>(1, dim_));
  }

  const Call& call_;
  Rows rows_;
  int64_t dim_;
  bool buffered_;
  std::vector<float> buffer_, scaled_;
  std::vector<uint8_t> bytes_;
  std::vector<Extremes> extremes_;
  std::vector<AffineScale> scales_;
};

// Tokens per unit: whole groups.
int64_t unit_tokens(const Quantization& how, int64_t tokens) {
  switch (how.granularity) {
    case OCTET_PER_TOKEN:
      return kUnitTokens;
    case OCTET_PER_THREAD:
      return how.operand == OCTET_OPERAND_Q ? kThreadTileQ : kThreadTileK;
    case OCTET_PER_BLOCK:
      if (how.block < tokens) return how.block * std::max<int64_t>(1, kUnitTokens / how.block);
      [[fallthrough]];
    default:
      return std::max<int64_t>(1, tokens);
  }
}

// Nothing may have been written when this throws.
void expect_non_negative(const View& x, Rows rows) {
  std::vector<float> row(x.shape[3]);
  for (int64_t b = 0; b < x.shape[0]; ++b)
    for (int64_t h = 0; h < x.shape[1]; ++h)
      for (int64_t t = 0; t < x.shape[2]; ++t) {
        rows.embedded(b, h, t, row.data());
        const auto negative = std::find_if(row.begin(), row.end(), [](float v) { return v < 0.f; });
        if (negative != row.end())
          invalid("x: found ", *negative, " at [", b, ", ", h, ", ", t, ", ", negative - row.begin(),
                  "], but symmetric u8 codes hold x >= 0 only; use a zero point, or i8");
      }
}

}  // namespace

void quantize(const View& x, const Rope& rope, const View& codes, const Quantization& how, const View& statistics) {
  const int64_t heads = x.shape[1], tokens = x.shape[2], dim = x.shape[3], all_heads = x.shape[0] * heads;
  const RopeTable table(rope, 1.0);
  std::vector<float> signs;
  if (how.hadamard_seed)
    for (int64_t c = 0; c < dim; ++c) signs.push_back(hadamard_sign(how.hadamard_seed, c));
  const Rows rows(x, table, signs.empty() ? nullptr : signs.data());
  if (codes.dtype == OCTET_U8 && how.zero_point_kind == OCTET_SYMMETRIC) expect_non_negative(x, rows);

  const bool smooth = how.mean.present(), with_statistics = statistics.present();
  std::vector<float> means(smooth ? all_heads * dim : 0),
      statistics_of_heads(with_statistics ? all_heads * OCTET_STATISTICS : 0);
  const auto mean_of = [&](int64_t i) { return smooth ? means.data() + i * dim : nullptr; };
  if (smooth || with_statistics)
    parallel_for(threads_for(x, all_heads), all_heads, [&](int64_t i, unsigned) {
      const int64_t b = i / heads, h = i % heads;
      Rows mine = rows;
      ChannelStats stats(dim, with_statistics);
      std::vector<float> row(dim);
      for (int64_t t = 0; t < tokens; ++t) {
        mine.embedded(b, h, t, row.data());
        stats.add(row.data());
      }
      if (smooth) stats.mean(mean_of(i));
      for (int64_t c = 0; c < dim && smooth; ++c) *how.mean.at<float>(b, h, 0, c) = mean_of(i)[c];
      if (with_statistics) stats.statistics(mean_of(i), &statistics_of_heads[i * OCTET_STATISTICS]);
    });

  const Call call{x, codes, how, with_statistics, range_of(codes.dtype), decode_table(codes.dtype)};
  const int64_t unit = unit_tokens(how, tokens);
  // There is a scale per tensor or channel to write even where there are no tokens.
  const bool one_unit = how.granularity == OCTET_PER_TENSOR || how.per_channel();
  const int64_t units = one_unit ? 1 : tokens / unit + (tokens % unit != 0), tasks = all_heads * units;
  std::vector<double> errors(tasks);
  const unsigned threads = threads_for(x, tasks);
  std::vector<TokenQuantizer> quantizers(threads, TokenQuantizer(call, rows, unit));
  parallel_for(threads, tasks, [&](int64_t task, unsigned thread) {
    const int64_t i = task / units, first = task % units * unit;
    errors[task] = quantizers[thread].unit(i / heads, i % heads, first, std::min(tokens, first + unit), mean_of(i));
  });

  for (int64_t i = 0; i < all_heads && with_statistics; ++i) {
    double sum = 0;
    for (int64_t u = 0; u < units; ++u) sum += errors[i * units + u];
    statistics_of_heads[i * OCTET_STATISTICS + OCTET_STATISTIC_STEP] =
        tokens ? static_cast<float>(std::sqrt(sum / static_cast<double>(tokens))) : 0.f;
    for (int64_t s = 0; s < OCTET_STATISTICS; ++s)
      *statistics.at<float>(i / heads, i % heads, 0, s) = statistics_of_heads[i * OCTET_STATISTICS + s];
  }
}

}  // namespace octet::cpu
