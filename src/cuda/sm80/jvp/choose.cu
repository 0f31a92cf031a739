#include <algorithm>
#include <iterator>

#include "core/recipe.h"
#include "cuda/sm80/jvp/choose.h"

namespace octet::cuda::sm80 {
namespace {

// The kernels of a type of operands, with all tangents before those that do with some.
struct Row {
  octet_dtype type;
  Tangents tangents;
  JvpKernel (*plain)(int64_t dim), (*general)(int64_t dim);
};
template <class T, Tangents tangents>
constexpr Row row_of(octet_dtype type) {
  return {type, tangents, jvp_kernel<T, Logits::plain, tangents>, jvp_kernel<T, Logits::general, tangents>};
}
constexpr Row kRows[] = {row_of<F16, Tangents::all>(OCTET_F16), row_of<F16, Tangents::some>(OCTET_F16),
                         row_of<Bf16, Tangents::all>(OCTET_BF16), row_of<Bf16, Tangents::some>(OCTET_BF16),
                         row_of<float, Tangents::some>(OCTET_F32)};

}  // namespace

JvpChoice choose_jvp(const Problem& p) {
  const octet_dtype type = recipe_of(p).tangent;
  const bool all = p.tq.present() && p.tk.present() && p.tv.present();
  const Row* row = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& each) {
    return each.type == type && (all || each.tangents == Tangents::some);
  });
  return {type == OCTET_F32, type,
          (logits_of(p) == Logits::plain ? row->plain : row->general)(std::max(p.dim, p.dim_v))};
}

}  // namespace octet::cuda::sm80
