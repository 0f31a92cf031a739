#include "cuda/host/card.h"
#include "cuda/sm80/bwd/choose.h"

namespace octet::cuda::sm80 {
namespace {

// The kernels of a type of operands, by what they are for.
struct Row {
  BackwardKernel (*small)(int dim), (*large)(int dim), (*masked)(int dim), (*general)(int dim);
};
template <class T>
constexpr Row kRow = {backward_kernel<T, BackwardKind::small>, backward_kernel<T, BackwardKind::large>,
                      backward_kernel<T, BackwardKind::masked>, backward_kernel<T, BackwardKind::general>};

BackwardKernel kernel_of(const Problem& p, const BackwardChoice& choice, const MaskTensor& mask) {
  const Row& row = choice.f16 ? kRow<F16> : kRow<Bf16>;
  const int dim = choice.dim, bytes = card(p.device_index).shared_bytes;
  if (!p.plain_logits()) {
    if (!mask.chunks || p.softcap || p.alibi_slopes.present() || dim > 128) return row.general(dim);
    const BackwardKernel masked = row.masked(dim);
    return masked.bytes_with(mask) <= bytes ? masked : row.general(dim);
  }
  if (dim == 128)
    for (const BackwardKernel& kernel : {row.large(dim), row.masked(dim)})
      if (kernel.shared_bytes <= bytes) return kernel;
  return row.small(dim);
}

}  // namespace

BackwardKernels choose_kernels(const Problem& p) {
  const BackwardChoice choice = choose_backward(p);
  if (choice.cast == OCTET_F32) return {choice, true};
  const MaskTensor mask = mask_tensor(p);
  BackwardKernel kernel = kernel_of(p, choice, mask);
  kernel.shared_bytes = kernel.bytes_with(mask);
  return {choice, false, kernel, kernel.has_classes && mask.data};
}

}  // namespace octet::cuda::sm80
