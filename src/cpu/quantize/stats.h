// The first look at the tokens of one (batch, head): channel means, and the statistics that need no quantized values.
#pragma once
#include <octet/octet.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace octet::cpu {

// Sums over the tokens of one (batch, head), per channel. In means, numbers that are not finite count as 0, so that
// they stay in their groups (the kernels do the same); statistics of theirs are NaN.
class ChannelStats {
 public:
  ChannelStats(int64_t dim, bool with_statistics)
      : dim_(dim),
        with_statistics_(with_statistics),
        sum_(dim),
        first_(dim),
        offset_(dim),
        square_(dim),
        low_(dim, std::numeric_limits<float>::infinity()),
        high_(dim, -std::numeric_limits<float>::infinity()) {}

  void add(const float* row) {
    for (int64_t c = 0; c < dim_; ++c) sum_[c] += std::isfinite(row[c]) ? row[c] : 0.f;
    if (with_statistics_) add_statistics(row);
    ++tokens_;
  }

  void mean(float* out) const {
    for (int64_t c = 0; c < dim_; ++c) out[c] = tokens_ ? static_cast<float>(sum_[c] / tokens_) : 0.f;
  }

  // The statistics but the error of rounding; `mean`: what is subtracted from the rows, null: nothing.
  void statistics(const float* mean, float* out) const {
    double variance = 0, bias = 0, norm = 0;
    std::vector<float> top(dim_);
    for (int64_t c = 0; c < dim_ && tokens_; ++c) {
      const double centre = sum_[c] / tokens_, away = centre - (mean ? mean[c] : 0.f);
      const double spread = std::isfinite(square_[c])
                                ? std::fmax(0.0, square_[c] / tokens_ - offset_[c] / tokens_ * (offset_[c] / tokens_))
                                : std::numeric_limits<double>::quiet_NaN();
      variance += spread;
      bias += centre * centre;
      norm += spread + away * away;
      const float subtracted = mean ? mean[c] : 0.f;
      top[c] = std::max(std::fabs(low_[c] - subtracted), std::fabs(high_[c] - subtracted));
    }
    const double rms = std::sqrt(variance / static_cast<double>(std::max<int64_t>(1, dim_)));
    out[OCTET_STATISTIC_NORM] = static_cast<float>(std::sqrt(norm));
    out[OCTET_STATISTIC_BIAS] = bias == 0.0 ? 0.f : static_cast<float>(std::sqrt(bias) / rms);
    out[OCTET_STATISTIC_OUTLIER] = std::isfinite(norm) ? outlier(top) : std::numeric_limits<float>::quiet_NaN();
  }

 private:
  // Sums relative to the first token, so that a common offset of all tokens does not cancel digits.
  void add_statistics(const float* row) {
    if (!tokens_) std::copy(row, row + dim_, first_.begin());
    for (int64_t c = 0; c < dim_; ++c) {
      const double d = static_cast<double>(row[c]) - first_[c];
      offset_[c] += d;
      square_[c] += d * d;
      low_[c] = row[c] < low_[c] ? row[c] : low_[c];
      high_[c] = row[c] > high_[c] ? row[c] : high_[c];
    }
  }

  // Largest over median; 1 if all are 0.
  static float outlier(std::vector<float>& top) {
    if (top.empty()) return 0.f;
    std::sort(top.begin(), top.end());
    const float median = 0.5f * top[(top.size() - 1) / 2] + 0.5f * top[top.size() / 2];
    return top.back() == 0.f ? 1.f : top.back() / median;
  }

  int64_t dim_, tokens_ = 0;
  bool with_statistics_;
  std::vector<double> sum_;
  std::vector<float> first_;
  std::vector<double> offset_, square_;
  std::vector<float> low_, high_;
};

}  // namespace octet::cpu
