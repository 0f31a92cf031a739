#include <algorithm>

#include "core/names.h"
#include "cuda/operands/mask_tensor.h"
#include "cuda/operands/masks.h"

namespace octet::cuda {
namespace {

int clamp_side(int64_t keys) { return static_cast<int>(std::min<int64_t>(keys, Mask::kUnbounded)); }

MaskElement element_of(octet_dtype dtype) {
  switch (dtype) {
    case OCTET_BOOL:
      return MaskElement::boolean;
    case OCTET_F32:
      return MaskElement::f32;
    case OCTET_F16:
      return MaskElement::f16;
    default:
      return MaskElement::bf16;
  }
}

}  // namespace

MaskTensor mask_tensor(const Problem& p) {
  if (!p.mask.present() || !p.tokens_q || !p.tokens_k) return {};
  MaskTensor t{.data = p.mask.data, .element = element_of(p.mask.dtype)};
  std::copy_n(p.mask.stride, 4, t.stride);
  t.bytes = static_cast<int>(bytes_of(p.mask.dtype));
  t.chunks = p.mask.stride[3] == 1 && reinterpret_cast<uintptr_t>(p.mask.data) % kMaskChunkBytes == 0;
  for (int i = 0; i < 3; ++i) t.chunks &= p.mask.stride[i] * t.bytes % kMaskChunkBytes == 0;
  return t;
}

int sequences_of(const Problem& p) { return p.packed() ? static_cast<int>(p.cu_seqlens_q.shape[3] - 1) : 0; }

Mask mask_of(const Problem& p) { return {p.windowed, p.bottom_right, clamp_side(p.left), clamp_side(p.right)}; }

SeenKeys seen_keys(const Problem& p) {
  const KeyRange hull = p.tokens_q && !p.packed() ? p.keys_of_block(0, p.tokens_q, p.tokens_q, p.tokens_k)
                                                  : KeyRange{0, p.packed() ? p.tokens_k : 0};
  const int64_t last = std::max(hull.first, hull.last);
  return {.first = static_cast<int>(hull.first),
          .last = static_cast<int>(last),
          .all = !p.packed() && hull.first == 0 && last == p.tokens_k,
          .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data),
          .cu_seqlens_k = static_cast<const int*>(p.cu_seqlens_k.data),
          .sequences = sequences_of(p),
          .mask = mask_of(p)};
}

Dropout dropout_of(const Problem& p) {
  const View& seed = p.dropout_seed;
  return {.seed = static_cast<const int32_t*>(seed.data),
          .stride = seed.stride[0],
          .shared = seed.shape[0] == 1,
          .dropped = p.dropout,
          .scale = static_cast<float>(p.dropout_scale()),
          .places = static_cast<const int*>(p.key_places.data),
          .places_stride = p.key_places.stride[2]};
}

}  // namespace octet::cuda
