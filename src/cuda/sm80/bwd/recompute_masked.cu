#include "cuda/bwd/recompute_masked.h"
#include "cuda/sm80/bwd/lse.h"

namespace octet::cuda::sm80 {
namespace {

struct GeneralLogits {
  static constexpr bool kHides = true;
  LogitTerms terms;
  Dropout dropout;
  struct Logit {
    float x, derivative;
    __device__ float derivative_of(float ds) const { return ds == 0.f ? 0.f : ds * derivative; }
  };
  template <class Gradients>
  __device__ int sequence(const Gradients& g) const {
    return g.a.k_blocks.cu_seqlens ? g.k.index : g.batch;
  }
  template <class Gradients>
  __device__ float kept(const Gradients& g, int head, int query, int key) const {
    return dropout.drops(sequence(g), head, query, key) ? 0.f : dropout.scale;
  }
  template <class Gradients>
  __device__ Logit operator()(const Gradients& g, int head, int query, int key, float product) const {
    const int n = g.q.tokens, m = g.k.tokens;
    const RowTerms row = row_terms(terms, g.batch, sequence(g), head, query, n, m, g.a.mask.keys_of(query, n, m));
    const float derivative = terms.softcap != 0.f ? softcap(terms, product * terms.scale).derivative : 1.f;
    return {logit_of(terms, row, key, product), derivative};
  }
};

}  // namespace

void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const LogitTerms& terms,
                      const Dropout& dropout, const Strided& dq, cudaStream_t stream) {
  recompute_masked(p, a, GeneralLogits{terms, dropout}, dq, stream);
}

}  // namespace octet::cuda::sm80
