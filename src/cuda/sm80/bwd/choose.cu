#include "cuda/host/card.h"
#include "cuda/host/tiles.h"
#include "cuda/sm80/bwd/choose.h"
#include "cuda/sm80/passes.h"

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

// The kernels that can run a problem, the default first: the largest tiles that a card's shared memory holds. Those of
// masked logits compute plain ones too, and those of general logits all.
Candidates<BackwardKernel> candidates_of(const Problem& p, const BackwardChoice& choice, const MaskTensor& mask) {
  const Logits logits = logits_of(p);
  const int dim = choice.dim, bytes = card(p.device_index).shared_bytes;
  const bool plain = logits == Logits::plain;
  Candidates<BackwardKernel> all;
  const auto add = [&](const BackwardKernel& kernel, const char* also = "") {
    all.add({kernel.queries, kernel.keys, also}, kernel);
  };
  const auto add_if_it_fits = [&](const BackwardKernel& kernel, const char* also = "") {
    if (kernel.bytes_with(mask) <= bytes) add(kernel, also);
  };
  if (choice.int8) {
    if (plain) add_if_it_fits(int8_backward_kernel<Logits::plain, SharedMemory::large>(dim));
    add((plain ? int8_backward_kernel<Logits::plain, SharedMemory::small>
               : int8_backward_kernel<Logits::general, SharedMemory::small>)(dim));
    return all;
  }
  if (choice.blocks) {
    add((plain ? block_backward_kernel<Logits::plain> : block_backward_kernel<Logits::general>)(dim));
    return all;
  }
  const Row& row = choice.f16 ? kRow<F16> : kRow<Bf16>;
  if (plain && dim == 128) {
    add_if_it_fits(row.large_plain(dim));
    add_if_it_fits(row.large_masked(dim), "-masked");
  }
  if (plain && dim > 256) add_if_it_fits(row.large_plain(dim));
  if (logits == Logits::masked && dim <= 128) add_if_it_fits((dim == 64 ? row.masked : row.large_masked)(dim));
  plain ? add(row.plain(dim)) : add(row.general(dim), logits == Logits::masked ? "-general" : "");
  return all;
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
  BackwardKernel kernel = candidates_of(p, choice, mask).pick(p.tile, kName);
  const bool stages_mask = kernel.bytes_with(mask) <= card(p.device_index).shared_bytes;
  if (stages_mask) kernel.shared_bytes = kernel.bytes_with(mask);
  return {choice,      false,
          kernel,      kernel.has_classes && mask.data,
          stages_mask, p.dmask.present() ? dmask_kernel_of(p, choice) : DmaskKernel{}};
}

std::vector<std::string> backward_tiles(const Problem& p) {
  const BackwardChoice choice = choose_backward(p);
  return candidates_of(p, choice, mask_tensor(p)).names();
}

}  // namespace octet::cuda::sm80
