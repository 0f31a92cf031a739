#include "cuda/bwd/masked.h"
#include "cuda/bwd/recompute_masked.h"

namespace octet::cuda {
namespace {

struct MaskLogits : AddedLogits {
  MaskRows rows;
  float scale;

  struct Row {
    int batch, head, query;
    float bias;
  };
  __device__ Row row(int batch, int, int head, int query, int, int, const Interval&) const {
    return {batch, head, query, rows.bias(batch, head, query)};
  }
  static __device__ float row_bias(const Row& row) { return row.bias; }
  __device__ float logit(const Row& row, int key, float product) const {
    const float number = rows.number(row.batch, row.head, row.query, key);
    return number == -INFINITY ? number : __fmaf_rn(scale, product, number - row.bias);
  }

  static constexpr bool kHides = true;
  template <class Gradients>
  __device__ Logit operator()(const Gradients& g, int head, int query, int key, float product) const {
    return {logit(row(g.batch, g.batch, head, query, 0, 0, {}), key, product)};
  }
};

}  // namespace

void subtract_row_biases(const LseParams& p, const MaskRows& rows, float scale, cudaStream_t stream) {
  subtract_row_biases(p, MaskLogits{{}, rows, scale}, stream);
}

void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const MaskRows& rows, const Strided& dq,
                      cudaStream_t stream) {
  recompute_masked(p, a, MaskLogits{{}, rows, a.scale}, dq, stream);
}

}  // namespace octet::cuda
