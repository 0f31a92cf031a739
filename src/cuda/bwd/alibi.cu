#include "cuda/bwd/alibi.h"
#include "cuda/bwd/recompute_masked.h"

namespace octet::cuda {
namespace {

struct AlibiLogits : AddedLogits {
  AlibiSlopes slopes;
  float scale;

  struct Row {
    float slope;
    AlibiRow alibi;
  };
  __device__ Row row(int, int sequence, int head, int query, int n, int m, const Interval& seen) const {
    const float slope = slopes.at(sequence, head);
    return {slope, AlibiRow::of(slope, query + m - n, seen)};
  }
  static __device__ float row_bias(const Row& row) { return row.alibi.row_bias(row.slope); }
  __device__ float logit(const Row& row, int key, float product) const {
    return __fmaf_rn(scale, product, row.alibi.term(row.slope, key));
  }

  template <class Gradients>
  __device__ Logit operator()(const Gradients& g, int head, int query, int key, float product) const {
    const int sequence = g.a.k_blocks.cu_seqlens ? g.k.index : g.batch, n = g.q.tokens, m = g.k.tokens;
    return {logit(row(g.batch, sequence, head, query, n, m, g.a.mask.keys_of(query, n, m)), key, product)};
  }
};

}  // namespace

void subtract_row_biases(const LseParams& p, const AlibiSlopes& slopes, float scale, cudaStream_t stream) {
  subtract_row_biases(p, AlibiLogits{{}, slopes, scale}, stream);
}

void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const AlibiSlopes& slopes, const Strided& dq,
                      cudaStream_t stream) {
  recompute_masked(p, a, AlibiLogits{{}, slopes, a.scale}, dq, stream);
}

}  // namespace octet::cuda
