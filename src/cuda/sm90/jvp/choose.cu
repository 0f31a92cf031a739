#include <algorithm>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cuda/sm90/jvp/choose.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

struct Row {
  octet_dtype type;
  Kernel (*kernel)(int64_t dim, int64_t dim_v);
};
constexpr Row kRows[] = {{OCTET_F16, jvp_kernel<F16>}, {OCTET_BF16, jvp_kernel<Bf16>}};

constexpr int64_t kMaxJvpDim = 128;

}  // namespace

JvpChoice choose_jvp(const Problem& p) {
  const octet_dtype type = recipe_of(p).tangent;
  const auto* const row =
      std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& x) { return x.type == type; });
  return {type, row->kernel(p.dim, p.dim_v)};
}

std::optional<std::string> jvp_unsupported_reason(const Problem& p) {
  if (const Extra extra = extra_of(p); extra != Extra::none)
    return text("its jvp has no ", extra == Extra::alibi ? "alibi_slopes" : "dropout");
  if (const int64_t dim = std::max(p.dim, p.dim_v); dim > kMaxJvpDim)
    return text("its jvp has no head dim ", dim, "; it has: up to ", kMaxJvpDim);
  return {};
}

}  // namespace octet::cuda::sm90
