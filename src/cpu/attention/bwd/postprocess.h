// Postprocessing starts when dq is complete: it scales and stores it, and sums dsinks.
#pragma once
#include "cpu/attention/bwd/preprocess.h"
#include "cpu/parallel.h"

namespace octet::cpu::OCTET_ISA {

// Adds to a row of dq what the mean that was taken from k contributes to it.
inline void add_row_sum(float sum, const float* mean, int64_t n, float* dq) {
  if (sum == 0.f) return;
  for (int64_t c = 0; c < n; ++c) dq[c] += sum * mean[c];
}

// Sums over queries, and over the batch where it shares its sinks, in their order; 0 where there are none.
inline void store_dsinks(const Job& job, const GradientOperands& w) {
  const Problem& p = *job.problem;
  if (!p.dsinks.present()) return;
  parallel_for(job.threads, p.dsinks.shape[0] * p.heads, [&](int64_t task, unsigned) {
    const int64_t b = task / p.heads, h = task % p.heads;
    double sum = 0;
    for (int64_t n = 0; n < job.sequence_count; ++n) {
      const Sequence& seq = job.sequences[n];
      if (p.dsinks.shape[0] > 1 && seq.batch != b) continue;
      const int64_t first = row_index(p, seq, h, 0);
      for (int64_t r = first; r < first + seq.q_tokens; ++r)
        if (w.sink[r] != 0.f) sum -= w.sink[r] * (static_cast<double>(w.delta[r]) + (w.lambda ? w.lambda[r] : 0.f));
    }
    *p.dsinks.at<float>(b, h, 0) = static_cast<float>(sum);
  });
}

inline void store_dq(const Problem& p, const BackwardNumerics& numerics, const Sequence& seq, const Block& block,
                     const GradientOperands& w) {
  const int64_t rows = std::min(seq.q_tokens - block.token, kQueries),
                first = row_index(p, seq, block.head, block.token);
  const float* mean = w.k_mean + (block.sequence * p.kv_heads + block.head / p.group()) * kMaxDim;
  for (int64_t i = 0; i < rows; ++i) {
    float* dq = w.dq + (first + i) * w.k_columns;
    if (centred(numerics)) {
      const float sum = w.ds_sum ? w.ds_sum[first + i] : row_sum_of_ds(p, w, seq, block.head, block.token + i);
      add_row_sum(sum, mean, p.dim, dq);
    }
    multiply(dq, p.scale, p.dim);
    store_row(p.dq, seq.batch, block.head, seq.q_first + block.token + i, dq);
  }
}

}  // namespace octet::cpu::OCTET_ISA
