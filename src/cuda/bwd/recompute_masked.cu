#include "cuda/bwd/recompute_masked.h"

namespace octet::cuda {
namespace {

struct PlainLogits : AddedLogits {
  template <class Gradients>
  __device__ Logit operator()(const Gradients& g, int, int, int, float product) const {
    return {g.a.scale * product};
  }
};

struct DroppedLogits : PlainLogits {
  static constexpr bool kHides = true;
  Dropout dropout;
  template <class Gradients>
  __device__ float kept(const Gradients& g, int head, int query, int key) const {
    return dropout.drops(g.a.k_blocks.cu_seqlens ? g.k.index : g.batch, head, query, key) ? 0.f : dropout.scale;
  }
};

}  // namespace

void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const Strided& dq, cudaStream_t stream) {
  recompute_masked(p, a, PlainLogits{}, dq, stream);
}

void recompute_masked(const PreprocessParams& p, const BackwardParams& a, const Dropout& dropout, const Strided& dq,
                      cudaStream_t stream) {
  recompute_masked(p, a, DroppedLogits{{}, dropout}, dq, stream);
}

}  // namespace octet::cuda
