// Every header of this folder, compiled for the oldest architecture by a library of its own: they know none.
#include "cuda/fragment/accumulator.h"
#include "cuda/fragment/dropout.h"
#include "cuda/fragment/e4m3.h"
#include "cuda/fragment/finish.h"
#include "cuda/fragment/finish_jvp.h"
#include "cuda/fragment/mask.h"
#include "cuda/fragment/o_residual.h"
#include "cuda/fragment/output.h"
#include "cuda/fragment/positional_mask.h"
#include "cuda/fragment/precision.h"
#include "cuda/fragment/rows.h"
#include "cuda/fragment/sign_flip.h"
#include "cuda/fragment/sinks.h"
#include "cuda/fragment/softmax.h"
#include "cuda/fragment/softmax_8bit.h"
#include "cuda/fragment/strided.h"
#include "cuda/fragment/unmasked_jvp_row.h"
#include "cuda/fragment/unmasked_row.h"

namespace octet::cuda {

// Instances of what would pass unseen in templates.
__global__ void fragment_sm80_kernel(float* x) {
  Accumulator<64> s;
  s.zero();
  OnlineSoftmax softmax{{1.f, 1.f}};
  const RowValues rescale = softmax.exp_update_max<0>(s);
  scale_rows(s, rescale);
  Operand<F16, 64> p;
  convert(s, p);
  store_row(x, true, s, 0, 64);
}

}  // namespace octet::cuda
