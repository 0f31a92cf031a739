// The first look at the tokens of one (batch, head): channel means, and the statistics that need no quantized values
// (core/quant/sums.h).
#pragma once
#include <octet/octet.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/quant/sums.h"

namespace octet::cpu {

// Sums over the tokens of one (batch, head), per channel.
class ChannelStats {
 public:
  ChannelStats(int64_t dim, bool with_statistics)
      : dim_(dim), with_statistics_(with_statistics), first_(dim), chunk_(dim), all_(dim) {}

  void add(const float* row) {
    if (!tokens_) std::copy(row, row + dim_, first_.begin());
    for (int64_t c = 0; c < dim_; ++c) chunk_[c].add_to_mean(row[c]);
    if (with_statistics_)
      for (int64_t c = 0; c < dim_; ++c) chunk_[c].add_to_statistics(row[c], first_[c]);
    if (++tokens_ % kChunkTokens == 0) end_chunk();
  }
  // No token follows.
  void end() {
    if (tokens_ % kChunkTokens) end_chunk();
  }

  void mean(float* out) const {
    for (int64_t c = 0; c < dim_; ++c) out[c] = all_[c].mean(tokens_);
  }

  // The statistics but the error of rounding; `mean`: what is subtracted from the rows, null: nothing.
  void statistics(const float* mean, float* out) const {
    std::vector<ChannelMoments> moments(dim_);
    std::vector<float> top(dim_);
    for (int64_t c = 0; c < dim_; ++c) {
      moments[c] = moments_of(all_[c], tokens_, mean ? mean[c] : 0.f);
      top[c] = moments[c].top;
    }
    const auto sum = [&](double ChannelMoments::*of) {
      return sum_over_channels(dim_, [&](int64_t c) { return moments[c].*of; });
    };
    const ChannelMoments sums{sum(&ChannelMoments::variance), sum(&ChannelMoments::bias), sum(&ChannelMoments::norm)};
    Tops tops{};
    if (std::isfinite(sums.norm) && dim_) {  // numbers that are not are not sorted
      std::sort(top.begin(), top.end());
      tops = {top[(dim_ - 1) / 2], top[dim_ / 2], top.back()};
    }
    statistics_of(sums, tops, dim_, out, [](double x) { return std::sqrt(x); });
  }

 private:
  // Sums of all channels, in arrays, which vectorise.
  class Sums {
   public:
    explicit Sums(int64_t dim) : sum_(dim), offset_(dim), square_(dim), low_(dim), high_(dim) {
      for (int64_t c = 0; c < dim; ++c) (*this)[c].clear();
    }
    ChannelSumsOf<double&, float&> operator[](int64_t c) {
      return {sum_[c], offset_[c], square_[c], low_[c], high_[c]};
    }
    ChannelSumsOf<const double&, const float&> operator[](int64_t c) const {
      return {sum_[c], offset_[c], square_[c], low_[c], high_[c]};
    }

   private:
    std::vector<double> sum_, offset_, square_;
    std::vector<float> low_, high_;
  };

  void end_chunk() {
    for (int64_t c = 0; c < dim_; ++c) all_[c].add(chunk_[c]), chunk_[c].clear();
  }

  int64_t dim_, tokens_ = 0;
  bool with_statistics_;
  std::vector<float> first_;
  Sums chunk_, all_;
};

}  // namespace octet::cpu
