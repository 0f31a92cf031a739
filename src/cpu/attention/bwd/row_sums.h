// A block of queries needs sums over its whole rows before any tile: for delta or the projection, and for lse beside a
// large mask.
#pragma once
#include <cmath>

#include "cpu/attention/bwd/preprocess.h"
#include "cpu/attention/bwd/products.h"

namespace octet::cpu::OCTET_ISA {

// The sums of one row.
struct RowSums {
  float m = kMinusInfinity;
  double p = 0, weighted = 0;  // sum p, and of ds minus what it should be or of p dp

  void add(const float* p_row, const float* ds_row) {
    for (int64_t j = 0; j < kKeys; ++j) p += p_row[j], weighted += ds_row[j];
  }

  template <bool partial>
  void add_logits(const TileRow& row, float to_logit, float scale_log2, const float* s, const float* dp) {
    Vf x[kVectors], sum{}, product{};
    load_logits<partial>(s, row, to_logit, x);
    const float top = std::max(m, largest_of(x) * scale_log2);
    if (top == kMinusInfinity) return;
    const double alpha = std::exp2(static_cast<double>(m) - top);
    for (int v = 0; v < kVectors; ++v) {
      // At most 1, also where a fused multiply-add takes a large logit beyond `top`, which was rounded.
      const Vf e = x[v] == kMinusInfinity ? Vf{} : min(splat(1.f), exp2(x[v] * scale_log2 - top));
      sum += e;
      product += x[v] == kMinusInfinity ? Vf{} : e * load(dp + v * kLanes);
    }
    m = top;
    p = alpha * p + reduce_add(sum);
    weighted = alpha * weighted + reduce_add(product);
  }
};

// Passes over the whole rows of a block of queries.
struct BlockRowSums : BackwardTile {
  // Beside a large row bias lse has lost the bits of the logits: such rows get their own.
  void renew_lse(const Sequence& seq, const Block& block) {
    constexpr float kLarge = 16.f;
    const int64_t h = block.head, token = block.token, first = row_index(p, seq, h, token);
    const int64_t rows = std::min(seq.q_tokens - token, kQueries);
    const auto large = [&](int64_t i) { return __builtin_fabsf(w.row_bias[first + i]) >= kLarge; };
    bool any = false;
    for (int64_t i = 0; i < rows; ++i) any |= large(i);
    if (!any) return;
    const Block keys{block.sequence, h / p.group(), 0, block.first_tile};
    const KeyRange tiles = tiles_of(p, seq, token, rows);
    RowSums sums[kQueries];
    split_queries(first, rows);
    for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
      products(first, rows, tile_index(keys, tile), 0);
      for_tile_rows(seq, h, token, rows, tile, [&](int64_t i, const TileRow& row, auto partial) {
        sums[i].template add_logits<partial>(row, p.scale, softmax_scale_log2(), scratch.s + i * kKeys,
                                             scratch.dp + i * kKeys);
      });
    }
    for (int64_t i = 0; i < rows; ++i) {
      float& lse = w.lse[first + i];
      if (!large(i) || lse != lse || lse == __builtin_inff()) continue;
      constexpr double kLog2e = 1.44269504088896340736;
      const double of_keys = sums[i].m + std::log2(sums[i].p);
      if (numerics.smooth_k)  // the row's mean logit, which lse lacks too, is not kept
        lse = static_cast<float>(of_keys - (w.sink ? std::log2(1.0 - w.sink[first + i]) : 0.0));
      else
        lse =
            static_cast<float>(with_sink(of_keys / kLog2e, sink_of(p, seq.batch, h) - w.row_bias[first + i]) * kLog2e);
    }
  }

  // Computes what a block of queries must know of its whole rows before any tile: with Delta::from_p their sums, with
  // `gproj` the projection.
  template <GradientFormat format>
  void compute(const Sequence& seq, const Block& block) {
    const int64_t h = block.head, token = block.token, first = row_index(p, seq, h, token);
    const int64_t rows = std::min(seq.q_tokens - token, kQueries);
    const Block keys{block.sequence, h / p.group(), 0, block.first_tile};
    const KeyRange tiles = tiles_of(p, seq, token, rows);
    RowSums sums[kQueries];
    for (int64_t i = 0; i < rows; ++i) sums[i] = sums_before_keys(seq, h, token + i);
    split_queries(first, rows);
    for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
      products(first, rows, tile_index(keys, tile), 0);
      drop_dp(seq, h, token, rows, tile);
      if (numerics.gproj) {
        gradient_tile<format>(seq, h, token, rows, tile, false);
        for (int64_t i = 0; i < rows; ++i) sums[i].add(scratch.s + i * kKeys, scratch.dp + i * kKeys);
      } else {
        for_tile_rows(seq, h, token, rows, tile, [&](int64_t i, const TileRow& row, auto partial) {
          sums[i].template add_logits<partial>(row, p.scale, softmax_scale_log2(), scratch.s + i * kKeys,
                                               scratch.dp + i * kKeys);
        });
      }
    }
    for (int64_t i = 0; i < rows; ++i) finish_row(sums[i], first + i);
  }

  // The sink counts as one more key.
  RowSums sums_before_keys(const Sequence& seq, int64_t h, int64_t token) const {
    const int64_t r = row_index(p, seq, h, token);
    if (numerics.gproj) return {kMinusInfinity, w.sink ? w.sink[r] : 0.0, -row_sum_of_ds(p, w, seq, h, token)};
    if (!w.sink || w.sink[r] == kMinusInfinity) return {};
    return {w.sink[r], 1.0, 0.0};
  }

  void finish_row(const RowSums& sums, int64_t r) {
    const double ratio = sums.p != 0 ? sums.weighted / sums.p : 0.0;
    if (numerics.gproj) {
      const float lambda = w.lambda[r] = static_cast<float>(ratio);
      // A row whose lambda is NaN has a ds of NaN for each key that it sees; keys that it does not see meet 0 here.
      const float factor = std::isnan(lambda) ? 0.f : -lambda;
      for (int64_t c = 0; c < w.k_columns; ++c)
        w.lambda_q[r * w.k_columns + c] = factor == 0.f ? 0.f : factor * w.q[r * w.k_columns + c];
      round_row_to(numerics.gproj, 1.f, w.lambda_q + r * w.k_columns, w.k_columns);
    } else if (w.lse[r] == w.lse[r]) {
      w.lse[r] = sums.p != 0 ? static_cast<float>(sums.m + std::log2(sums.p)) : __builtin_inff();
      w.delta[r] += static_cast<float>(ratio);
    }
    if (w.sink && !numerics.gproj) w.sink[r] = w.sink[r] == kMinusInfinity ? 0.f : std::exp2(w.sink[r] - w.lse[r]);
  }
};

}  // namespace octet::cpu::OCTET_ISA
