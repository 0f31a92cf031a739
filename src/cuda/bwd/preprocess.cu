// The preprocessing of the backward pass, three kernels: statistics of a sample (stats.cu), tiles (tiles.cu), and the
// tiles again whose numbers do not fit (rescale.cu).
#include "cuda/bwd/kernels.h"

namespace octet::cuda {
namespace {

// True where all inputs have one 16-bit type, the residual of o bytes, vectors that are whole words, and no rounding to
// another type.
bool direct(const PreprocessParams& p, Element element, octet_dtype type) {
  for (const Strided* x : {&p.q, &p.k, &p.v, &p.do_, &p.o, &p.o_residual}) {
    if (!x->data) continue;
    const bool bytes = x == &p.o_residual;
    if (x->element != (bytes ? Element::i8 : element) || x->stride[3] != 1) return false;
    if (reinterpret_cast<uintptr_t>(x->data) % (bytes ? kVec8 : 2 * kVec8)) return false;
    for (int i = 0; i < 3; ++i)
      // A column steps from token to token beyond the last, where it reads nothing but still has an address.
      if ((x->shape[i] > 1 || i == 2) && x->stride[i] % kVec8) return false;
  }
  for (const octet_dtype round : {p.round_q, p.round_k, p.round_v, p.round_do})
    if (round != type && round != OCTET_F32) return false;
  return true;
}

template <class T, class In>
void preprocess_as(const PreprocessParams& p, cudaStream_t stream) {
  launch_stats<In>(p, stream);
  launch_tiles<T, In>(p, stream);
  launch_rescale<T, In>(p, stream);
}

}  // namespace

void preprocess(const PreprocessParams& p, cudaStream_t stream) {
  if (p.type == OCTET_BF16)
    return (direct(p, Element::bf16, OCTET_BF16) ? preprocess_as<Bf16, Bf16> : preprocess_as<Bf16, void>)(p, stream);
  if (direct(p, Element::bf16, OCTET_BF16)) return preprocess_as<F16, Bf16>(p, stream);
  if (direct(p, Element::f16, OCTET_F16)) return preprocess_as<F16, F16>(p, stream);
  preprocess_as<F16, void>(p, stream);
}

}  // namespace octet::cuda
