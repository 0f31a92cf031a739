// octet_quantize on the CPU. Every row goes through the same operations, in float: load, norm, RoPE, minus mean,
// Hadamard; then amax (or the extremes) of its group gives a scale, and the quantized values are round(row / scale).
//
// Two passes over each (batch, head):
//  1. stats: the channel means and statistics, if either is asked for;
//  2. units of whole groups of tokens: their rows, the scales of their groups, their quantized values.
// Sums have a fixed order (core/quant/sums.h), and units do not depend on the number of threads: results are bitwise
// repeatable, and those of the GPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/quant/affine.h"
#include "core/quant/hadamard.h"
#include "core/quant/scale.h"
#include "core/quant/sums.h"
#include "core/quantization.h"
#include "cpu/parallel.h"
#include "cpu/quantize/elements.h"
#include "cpu/quantize/norm.h"
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

Extremes extremes_of(const float* row, int64_t n, bool symmetric) {
  Extremes e;
  if (symmetric)
    e.add(order_of(amax(row, n)));
  else
    for (int64_t c = 0; c < n; ++c) e.add(order_of(row[c]));
  return e;
}

// Rows of x as they are rounded. One per thread.
class Rows {
 public:
  Rows(const View& x, const Rope& rope, const RopeTable& table, const float* signs)
      : x_(x), norm_(rope, x.shape[3]), rope_(table), signs_(signs) {}

  void embedded(int64_t b, int64_t h, int64_t t, float* row) {
    load_row(x_, b, h, t, row);
    norm_(row, h);
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
  NormRow<float> norm_;
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

  // Quantizes the tokens [first, last), whole groups, and writes their scales, and to errors[token] the mean squared
  // rounding error of a row, if statistics are asked for.
  void unit(int64_t b, int64_t h, int64_t first, int64_t last, const float* mean, double* errors) {
    find_extremes(b, h, first, last, mean);
    write_scales(b, h, first);
    for (int64_t t = first; t < last; ++t) {
      if (!buffered_) rows_.prepared(b, h, t, mean, buffer_.data());
      const AffineScale* const scale = &scales_[group(t, first)];
      quantize(b, h, t, scale, row(t - first));
      if (call_.with_statistics) errors[t] = mean_squared_error(scale, row(t - first));
    }
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
        for (int64_t c = 0; c < dim_; ++c) extremes_[c].add(order_of(call_.symmetric() ? magnitude_of(x[c]) : x[c]));
      } else {
        extremes_[group(t, first)].add(extremes_of(x, dim_, call_.symmetric()));
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
      if (!call_.symmetric()) *how.zero_point.at<float>(b, h, g, c) = scales_[i].zero_point(how.zero_point_kind);
    }
  }

  // `scale`: of the row, or per channel.
  void quantize(int64_t b, int64_t h, int64_t t, const AffineScale* scale, const float* x) {
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
  }

  double mean_squared_error(const AffineScale* scale, const float* x) const {
    if (is_integer(call_.codes.dtype) && !call_.how.per_channel()) return squared_error(scale->scale);
    const double sum = sum_over_channels(dim_, [&](int64_t c) {
      const float distance = scale[call_.how.per_channel() ? c : 0].scale;
      return is_integer(call_.codes.dtype) ? squared_error(distance)
                                           : squared_error(x[c], distance, call_.values[bytes_[c]]);
    });
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
  const RopeTable table(rope, false);
  std::vector<float> signs;
  if (how.hadamard_seed)
    for (int64_t c = 0; c < dim; ++c) signs.push_back(hadamard_sign(how.hadamard_seed, c));
  const Rows rows(x, rope, table, signs.empty() ? nullptr : signs.data());
  if (codes.dtype == OCTET_U8 && how.zero_point_kind == OCTET_SYMMETRIC) expect_non_negative(x, rows);

  const bool smooth = how.mean.present(), with_statistics = statistics.present();
  std::vector<float> means(smooth ? all_heads * dim : 0),
      statistics_of_heads(with_statistics ? all_heads * OCTET_STATISTICS : 0);
  const auto mean_of = [&](int64_t i) { return smooth ? means.data() + i * dim : nullptr; };
  if (smooth || with_statistics)
    parallel_for(threads_for(x, all_heads), all_heads, [&](int64_t i, unsigned) {
      const int64_t b = i / heads, h = i % heads;
      Rows of_task = rows;
      ChannelStats stats(dim, with_statistics);
      std::vector<float> row(dim);
      for (int64_t t = 0; t < tokens; ++t) {
        of_task.embedded(b, h, t, row.data());
        stats.add(row.data());
      }
      stats.end();
      if (smooth) stats.mean(mean_of(i));
      for (int64_t c = 0; c < dim && smooth; ++c) *how.mean.at<float>(b, h, 0, c) = mean_of(i)[c];
      if (with_statistics) stats.statistics(mean_of(i), &statistics_of_heads[i * OCTET_STATISTICS]);
    });

  const Call call{x, codes, how, with_statistics, range_of(codes.dtype), decode_table(codes.dtype)};
  const int64_t unit = unit_tokens(how, tokens);
  // There is a scale per tensor or channel to write even where there are no tokens.
  const bool one_unit = how.granularity == OCTET_PER_TENSOR || how.per_channel();
  const int64_t units = one_unit ? 1 : tokens / unit + (tokens % unit != 0), tasks = all_heads * units;
  std::vector<double> errors(with_statistics ? all_heads * tokens : 0);
  const unsigned threads = threads_for(x, tasks);
  std::vector<TokenQuantizer> quantizers(threads, TokenQuantizer(call, rows, unit));
  parallel_for(threads, tasks, [&](int64_t task, unsigned thread) {
    const int64_t i = task / units, first = task % units * unit;
    quantizers[thread].unit(i / heads, i % heads, first, std::min(tokens, first + unit), mean_of(i),
                            with_statistics ? errors.data() + i * tokens : nullptr);
  });

  for (int64_t i = 0; i < all_heads && with_statistics; ++i) {
    const double sum = sum_over_tokens(tokens, [&](int64_t t) { return errors[i * tokens + t]; });
    statistics_of_heads[i * OCTET_STATISTICS + OCTET_STATISTIC_STEP] =
        tokens ? static_cast<float>(std::sqrt(sum / static_cast<double>(tokens))) : 0.f;
    for (int64_t s = 0; s < OCTET_STATISTICS; ++s)
      *statistics.at<float>(i / heads, i % heads, 0, s) = statistics_of_heads[i * OCTET_STATISTICS + s];
  }
}

}  // namespace octet::cpu
