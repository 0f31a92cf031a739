#include "cuda/bwd/lse.h"
#include "cuda/sm80/bwd/lse.h"

namespace octet::cuda::sm80 {
namespace {

struct LseLogits {
  LogitTerms terms;
  using Row = RowTerms;
  __device__ Row row(int batch, int sequence, int head, int query, int n, int m, const Interval& seen) const {
    return row_terms(terms, batch, sequence, head, query, n, m, seen);
  }
  static __device__ float row_bias(const Row& row) { return row.row_bias; }
  __device__ float logit(const Row& row, int key, float product) const { return logit_of(terms, row, key, product); }
};

}  // namespace

void subtract_row_biases(const LseParams& p, const LogitTerms& terms, cudaStream_t stream) {
  cuda::subtract_row_biases(p, LseLogits{terms}, stream);
}

}  // namespace octet::cuda::sm80
