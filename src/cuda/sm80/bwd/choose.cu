#include "cuda/host/card.h"
#include "cuda/sm80/bwd/choose.h"

namespace octet::cuda::sm80 {
namespace {

// The kernels of a type of operands.
struct Row {
  BackwardKernel (*plain)(int dim), (*masked)(int dim), (*general)(int dim), (*large_plain)(int dim),
      (*large_masked)(int dim);
};
template <class T>
constexpr Row kRow = {
    backward_kernel<T, Logits::plain, SharedMemory::small>, backward_kernel<T, Logits::masked, SharedMemory::small>,
    backward_kernel<T, Logits::general, SharedMemory::small>, backward_kernel<T, Logits::plain, SharedMemory::large>,
    backward_kernel<T, Logits::masked, SharedMemory::large>};

BackwardKernel int8_kernel_of(const Problem& p, int dim) {
  if (logits_of(p) != Logits::plain) return int8_backward_kernel<Logits::general, SharedMemory::small>(dim);
  if (const BackwardKernel large = int8_backward_kernel<Logits::plain, SharedMemory::large>(dim);
      card(p.device_index).shared_bytes >= large.shared_bytes)
    return large;
  return int8_backward_kernel<Logits::plain, SharedMemory::small>(dim);
}

BackwardKernel kernel_of(const Problem& p, const BackwardChoice& choice, const MaskTensor& mask) {
  if (choice.int8) return int8_kernel_of(p, choice.dim);
  if (choice.blocks)
    return (logits_of(p) == Logits::plain ? block_backward_kernel<Logits::plain>
                                          : block_backward_kernel<Logits::general>)(choice.dim);
  const Row& row = choice.f16 ? kRow<F16> : kRow<Bf16>;
  const Logits logits = logits_of(p);
  const int dim = choice.dim, bytes = card(p.device_index).shared_bytes;
  const auto fits = [&](const BackwardKernel& kernel) { return kernel.bytes_with(mask) <= bytes; };
  if (logits == Logits::plain && dim == 128)
    for (const BackwardKernel& kernel : {row.large_plain(dim), row.large_masked(dim)})
      if (fits(kernel)) return kernel;
  if (logits == Logits::masked && dim <= 128)
    if (const BackwardKernel kernel = (dim == 64 ? row.masked : row.large_masked)(dim); fits(kernel)) return kernel;
  return (logits == Logits::plain ? row.plain : row.general)(dim);
}

// A mask that is the same for all queries may sum pairs that a position hides, which masked logits leave to others.
DmaskKernel dmask_kernel_of(const Problem& p, const BackwardChoice& choice) {
  const bool masked = logits_of(p) == Logits::masked && p.dmask.shape[2] > 1 && p.dmask.shape[3] > 1;
  if (choice.f16) return (masked ? dmask_kernel<F16, Logits::masked> : dmask_kernel<F16, Logits::general>)(choice.dim);
  return (masked ? dmask_kernel<Bf16, Logits::masked> : dmask_kernel<Bf16, Logits::general>)(choice.dim);
}

}  // namespace

BackwardKernels choose_kernels(const Problem& p) {
  const BackwardChoice choice = choose_backward(p);
  if (choice.cast == OCTET_F32 && !choice.int8 && !choice.blocks) return {choice, true};
  const MaskTensor mask = mask_tensor(p);
  BackwardKernel kernel = kernel_of(p, choice, mask);
  const bool stages_mask = kernel.bytes_with(mask) <= card(p.device_index).shared_bytes;
  if (stages_mask) kernel.shared_bytes = kernel.bytes_with(mask);
  return {choice,      false,
          kernel,      kernel.has_classes && mask.data,
          stages_mask, p.dmask.present() ? dmask_kernel_of(p, choice) : DmaskKernel{}};
}

}  // namespace octet::cuda::sm80
