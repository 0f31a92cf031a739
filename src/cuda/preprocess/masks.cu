#include <algorithm>

#include "cuda/preprocess/masks.h"

namespace octet::cuda {
namespace {

int clamp_side(int64_t keys) { return static_cast<int>(std::min<int64_t>(keys, Mask::kUnbounded)); }

}  // namespace

int sequences_of(const Problem& p) { return p.packed() ? static_cast<int>(p.cu_seqlens_q.shape[3] - 1) : 0; }

Mask mask_of(const Problem& p) { return {p.windowed, p.bottom_right, clamp_side(p.left), clamp_side(p.right)}; }

SeenKeys seen_keys(const Problem& p) {
  const octet::KeyRange hull = p.tokens_q && !p.packed() ? p.keys_of_block(0, p.tokens_q, p.tokens_q, p.tokens_k)
                                                         : octet::KeyRange{0, p.packed() ? p.tokens_k : 0};
  const int64_t last = std::max(hull.first, hull.last);
  return {.first = static_cast<int>(hull.first),
          .last = static_cast<int>(last),
          .all = !p.packed() && hull.first == 0 && last == p.tokens_k,
          .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data),
          .cu_seqlens_k = static_cast<const int*>(p.cu_seqlens_k.data),
          .sequences = sequences_of(p),
          .mask = mask_of(p)};
}

}  // namespace octet::cuda
