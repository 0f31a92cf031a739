#include "cuda/bwd/choose.h"

#include <algorithm>

#include "core/recipe.h"

namespace octet::cuda {

int backward_dim(const Problem& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  return dim <= 64 ? 64 : dim <= 128 ? 128 : dim <= 256 ? 256 : 512;
}

bool has_row_bias(const Problem& p) {
  return p.alibi_slopes.present() || (p.mask.present() && p.mask.dtype != OCTET_BOOL);
}

BackwardChoice choose_backward(const Problem& p) {
  const octet::BackwardRecipe r = recipe_of(p).backward;
  // A softcap needs logits that have the mean. Where rows of ds have sums other than 0 and lse has a row bias,
  // preprocessing cannot compute the sums.
  const bool smooth = r.smooth_dq && !p.softcap && !(has_row_bias(p) && p.sinks.present());
  const bool integers = r.logits.q.format == OCTET_I8, blocks = integers && r.logits.q.group == Group::block,
             int8 = integers && !blocks, has_sums = p.sinks.present() || p.dlse.present();
  return {.dim = backward_dim(p),
          .f16 = r.ds_q.format == OCTET_F16 || blocks,
          .int8 = int8,
          .blocks = blocks,
          .cast = integers ? OCTET_F32 : r.logits.q.format,
          .exact_o = r.exact_o || int8,  // delta, which the recipe takes from P, is that of do and its forward pass's o
          .smooth = smooth,
          .adds_mean = (smooth || (blocks && !p.softcap)) && has_sums,
          .sums_rows = blocks && p.softcap,
          .sums = p.deterministic ? Sums::integers : Sums::floats};
}

std::optional<std::string> bias_correction_unsupported_reason(const Problem& p) {
  if (p.pass != OCTET_BACKWARD || recipe_of(p).backward.gproj == OCTET_F64) return {};
  return "its backward pass has no bias_correction gproj, which the cpu computes; it has: f16, none, beta, exact_delta";
}

}  // namespace octet::cuda
