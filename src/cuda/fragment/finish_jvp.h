// The end of a row of the jvp pass.
#pragma once
#include "cuda/fragment/finish.h"
#include "cuda/fragment/sinks.h"

namespace octet::cuda {

// The sums l of p and r of h, where the tangents of logits lack `centre`.
struct TangentSums {
  float centre, l, r;
};

// Finishes the sums of a row, and computes its lse and tlse. A sink leaves the keys the share w of all probabilities:
//   o = w o     to = w (to + (1 - w) (tlse - tsink) o)     tlse = w tlse + (1 - w) tsink
struct FinishedRow {
  float inverse, mean, share = 1.f, of_sink = 0.f;  // inverse: of l, times kept_scale; mean: r / l
  float lse, tlse;

  // `kept_scale`: of the elements of P that dropout keeps.
  __device__ FinishedRow(const TangentSums& t, RowSum<> sum, const Sinks& sinks, const Sinks& tsinks, int batch,
                         int head, float kept_scale)
      : inverse(t.l == 0.f ? 0.f : 1.f / t.l), mean(t.r * inverse), tlse(t.l == 0.f ? 0.f : t.centre + mean) {
    if (sinks.data) {
      const float tsink = tsinks.data ? tsinks.at(batch, head) : 0.f;
      share = sum.add_sink(sinks.at(batch, head));
      const float rest = 1.f - share;
      if (rest != 0.f) of_sink = rest * (tlse - tsink), tlse = share * tlse + rest * tsink;
    }
    lse = sum.lse();
    inverse *= kept_scale;
  }
  __device__ void apply(float& o, float& u) const {
    const bool none = inverse == 0.f;
    const float x = none ? 0.f : o * inverse, y = none ? 0.f : __fmaf_rn(u, inverse, -mean * x);
    o = x * share, u = __fmaf_rn(of_sink, x, y) * share;
  }
};

}  // namespace octet::cuda
