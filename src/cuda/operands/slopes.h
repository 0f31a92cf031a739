// The slopes of ALiBi of a problem, as kernels read them.
#pragma once
#include "core/problem.h"
#include "cuda/fragment/alibi.h"

namespace octet::cuda {

inline AlibiSlopes alibi_slopes(const Problem& p) {
  const View& t = p.alibi_slopes;
  return t.present() ? AlibiSlopes{static_cast<const float*>(t.data), t.stride[0], t.stride[1]} : AlibiSlopes{};
}

}  // namespace octet::cuda
