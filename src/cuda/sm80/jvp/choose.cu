#include <algorithm>

#include "core/recipe.h"
#include "cuda/sm80/jvp/choose.h"

namespace octet::cuda::sm80 {
namespace {

struct Row {
  octet_dtype type;
  JvpKernel (*kernel[2])(int64_t dim);  // of plain and of general logits
};
constexpr Row kRows[] = {{OCTET_F16, {jvp_kernel<F16, false>, jvp_kernel<F16, true>}},
                         {OCTET_BF16, {jvp_kernel<Bf16, false>, jvp_kernel<Bf16, true>}}};

}  // namespace

JvpChoice choose_jvp(const Problem& p) {
  const octet_dtype type = recipe_of(p).tangent;
  for (const Row& row : kRows)
    if (row.type == type) return {false, type, row.kernel[!p.plain_logits()](std::max(p.dim, p.dim_v))};
  return {.f32 = true, .type = type};
}

}  // namespace octet::cuda::sm80
