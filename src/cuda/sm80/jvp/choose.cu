#include <algorithm>

#include "core/recipe.h"
#include "cuda/sm80/jvp/choose.h"

namespace octet::cuda::sm80 {
namespace {

struct Row {
  octet_dtype type;
  JvpKernel (*plain)(int64_t dim), (*general)(int64_t dim);
};
constexpr Row kRows[] = {{OCTET_F16, jvp_kernel<F16, Logits::plain>, jvp_kernel<F16, Logits::general>},
                         {OCTET_BF16, jvp_kernel<Bf16, Logits::plain>, jvp_kernel<Bf16, Logits::general>}};

}  // namespace

JvpChoice choose_jvp(const Problem& p) {
  const octet_dtype type = recipe_of(p).tangent;
  for (const Row& row : kRows)
    if (row.type == type)
      return {false, type, (logits_of(p) == Logits::plain ? row.plain : row.general)(std::max(p.dim, p.dim_v))};
  return {.f32 = true, .type = type};
}

}  // namespace octet::cuda::sm80
