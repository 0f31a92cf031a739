// How far each row of an output may be from float64: bounds derived from what a precision rounds (docs/numerics.md),
// for problems so small that the error of plain rounding, which other tests double, is a matter of luck.
#pragma once
#include <string>

#include "support/dequantized.h"

namespace octet::test {

// The largest euclidean norms of the errors of rows; [batch, head, token, 1], or [batch, head, 1, 1] for sinks;
// of dmask those of the mask, its keys a row.
struct RowBars {
  Values o, o_whole, lse, dq, dk, dv, dsinks, dmask, to, tlse;  // o_whole: o + o_residual
  // Of 8 bits also the norm of the errors of all rows of a head together, and their sum: [batch, head, 1, 1].
  Values o_of_head, lse_of_head;
};

// `want`: exact results; `saved`: what the forward pass left to a backward pass.
RowBars row_bars(const Case&, const Inputs&, const Attention&, Pass, const Outputs& want, const Outputs& saved);
// In 8 bits, on the backend that `Attention` names.
RowBars row_bars(const Dequantized&, const Attention&, Pass, const Outputs& want, const Outputs& saved);

// Says which row of which output differs from `want` by more than its bar; empty if none does.
std::string wrong_row(const Outputs& got, const Outputs& want, const RowBars&, Pass);

}  // namespace octet::test
