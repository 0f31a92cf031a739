// The kernel of a jvp pass, chosen from its recipe.
#pragma once
#include "cuda/sm80/jvp/params.h"

namespace octet::cuda::sm80 {

struct JvpChoice {
  bool f32;          // operands are in f16 halves
  octet_dtype type;  // of operands
  JvpKernel kernel;
};
JvpChoice choose_jvp(const Problem& p);

}  // namespace octet::cuda::sm80
