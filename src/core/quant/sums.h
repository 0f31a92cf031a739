// The order of the sums of the quantizers, which those of the CPU and of the GPU keep, and what they make of sums over
// the tokens of a channel. All sums are of doubles, and none is contracted with a product.
#pragma once
#include <octet/octet.h>

#include <cstdint>
#include <limits>

#include "core/quant/elements.h"

namespace octet {

// Sums over tokens: those of each chunk of 64 in their order, then those of the chunks in theirs.
constexpr int64_t kChunkTokens = 64;
static constexpr int64_t chunks_of(int64_t tokens) { return tokens / kChunkTokens + (tokens % kChunkTokens != 0); }
template <class F>
static constexpr double sum_over_tokens(int64_t tokens, const F& f) {
  double sum = 0;
  for (int64_t first = 0; first < tokens; first += kChunkTokens) {
    double of_chunk = 0;
    for (int64_t t = first; t < tokens && t < first + kChunkTokens; ++t) of_chunk += f(t);
    sum += of_chunk;
  }
  return sum;
}

// Sums over channels: those of each of 32 lanes in their order, c being of lane c mod 32; then the sums of lanes i and
// i + 16, of i and i + 8, and so on, which is how a warp adds.
constexpr int kSumLanes = 32;
template <class F>
static constexpr double sum_over_channels(int64_t dim, const F& f) {
  double lanes[kSumLanes] = {};
  int64_t first = 0;
  for (; first + kSumLanes <= dim; first += kSumLanes)
    for (int i = 0; i < kSumLanes; ++i) lanes[i] += f(first + i);
  for (int64_t c = first; c < dim; ++c) lanes[c - first] += f(c);
  for (int half = kSumLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Sums over the tokens of a channel, for the mean and for statistics. In the mean, numbers that are not finite count as
// 0, so that they stay in their groups (the kernels of attention do the same); statistics of theirs are NaN.
// The types are double and float, or references, where the sums of many channels lie in arrays.
template <class Double, class Float>
struct ChannelSumsOf {
  Double sum, offset, square;
  Float low, high;

  constexpr void clear() {
    sum = offset = square = 0;
    low = std::numeric_limits<float>::infinity(), high = -low;
  }
  constexpr void add_to_mean(float x) { sum += is_finite(x) ? x : 0.f; }
  // Sums are relative to the first token, so that a common offset of all tokens does not cancel digits.
  constexpr void add_to_statistics(float x, float first) {
    const double d = static_cast<double>(x) - first;
    offset += d;
    square += d * d;
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  // Adds the sums of a chunk.
  template <class OtherDouble, class OtherFloat>
  constexpr void add(const ChannelSumsOf<OtherDouble, OtherFloat>& chunk) {
    sum += chunk.sum, offset += chunk.offset, square += chunk.square;
    low = chunk.low < low ? chunk.low : low;
    high = chunk.high > high ? chunk.high : high;
  }
  constexpr float mean(int64_t tokens) const {
    return tokens ? static_cast<float>(sum / static_cast<double>(tokens)) : 0.f;
  }
};
struct ChannelSums : ChannelSumsOf<double, float> {
  constexpr ChannelSums() : ChannelSumsOf{} { clear(); }
};

// The shares of a channel in the statistics. `mean` is subtracted from its numbers.
struct ChannelMoments {
  double variance = 0, bias = 0, norm = 0;
  float top = 0;  // largest magnitude
};
template <class Double, class Float>
static constexpr ChannelMoments moments_of(const ChannelSumsOf<Double, Float>& sums, int64_t tokens, float mean) {
  if (!tokens) return {};
  const auto n = static_cast<double>(tokens);
  const double centre = sums.sum / n, away = centre - mean,
               spread = sums.square / n - sums.offset / n * (sums.offset / n);
  const bool finite = sums.square <= std::numeric_limits<double>::max();
  ChannelMoments m;
  m.variance = !finite ? std::numeric_limits<double>::quiet_NaN() : spread > 0.0 ? spread : 0.0;
  m.bias = centre * centre;
  m.norm = m.variance + away * away;
  const float low = magnitude_of(sums.low - mean), high = magnitude_of(sums.high - mean);
  m.top = low < high ? high : low;
  return m;
}

// The statistics of the sums of moments over channels, but the rounding error of a quantized value. `tops`: the smaller
// and the larger median of the largest magnitudes, and their largest.
struct Tops {
  float low_median, high_median, largest;
};
template <class Sqrt>
static constexpr void statistics_of(const ChannelMoments& sums, const Tops& tops, int64_t dim, float* out,
                                    const Sqrt& sqrt) {
  const double rms = sqrt(sums.variance / static_cast<double>(dim > 1 ? dim : 1));
  out[OCTET_STATISTIC_NORM] = static_cast<float>(sqrt(sums.norm));
  out[OCTET_STATISTIC_BIAS] = sums.bias == 0.0 ? 0.f : static_cast<float>(sqrt(sums.bias) / rms);
  const float median = 0.5f * tops.low_median + 0.5f * tops.high_median;
  const float outlier = !dim ? 0.f : tops.largest == 0.f ? 1.f : tops.largest / median;
  const bool finite = sums.norm <= std::numeric_limits<double>::max();
  out[OCTET_STATISTIC_OUTLIER] = finite ? outlier : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace octet
