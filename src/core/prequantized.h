// q, k and v that came quantized: which of them a forward pass takes as they came.
#pragma once
#include "core/problem.h"
#include "core/quantization.h"
#include "core/recipe.h"

namespace octet {

// The operands whose codes and scales are those of the recipe. They are not smoothed, rotated or rounded again; the
// numbers of all others are.
struct Prequantized {
  bool q, k, v;
};
Prequantized prequantized_operands(const Problem& p, const Recipe& recipe);

// Returns whether something is subtracted from the codes of a tensor, which are taken as signed bytes.
bool has_zero_points(const View& t);
// Returns the seed of the rotation that a tensor came with; 0: none.
uint64_t rotation_seed(const View& t);
// Returns how the codes of a validated tensor stand for numbers.
Quantization quantization_of(const View& codes);

}  // namespace octet
