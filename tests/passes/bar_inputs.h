// Inputs with the difficulties of trained models, each a name in the tables of docs/numerics.md; bf16 numbers.
#pragma once
#include "support/cases.h"

namespace octet::test {

// D1 normal, D2 channel bias of q and k, D3 rare outliers, D4 attention sink, D5 channel bias of v, D6 heavy channels.
// B1 = D1, B2 = D2, B3 keys with a large common offset, B4 = D4, B5 rows of do of very different size, B6 sharp.
// J1 normal, J2 channel bias of k, J3 of tk, J4 of v, J5 of all three, J6 sharp.
// Batch 1, as many heads of k as of q, each with a seed of its own: the very draws that the tables were measured on,
// for figures move by a third from draw to draw (outliers, directions) and bars leave them a tenth.
Inputs bar_inputs(const std::string& name, const Case&);

// Rows with tied maxima, S7 or with `smaller_sink` S8: one query per head. Logits are exact with scale 1. One for each
// seed.
Case tied_case();
std::vector<Inputs> tied_inputs(bool smaller_sink);

}  // namespace octet::test
