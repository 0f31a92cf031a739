// The recipe of a backward pass in 16 bits, in the terms of the kernels of both architectures.
#pragma once
#include <optional>
#include <string>

#include "core/problem.h"
#include "cuda/bwd/tile_sizes.h"

namespace octet::cuda {

struct BackwardChoice {
  int dim;           // of the tiles: 64, 128, 256 or 512
  bool f16;          // the operands of products are f16 with exponents; else bf16
  bool int8;         // s and dp are products of integers; else of these operands
  bool blocks;       // all but dp are, of which blocks of tokens and tiles of P and ds share the scales
  octet_dtype cast;  // the type that q, k and v are rounded to first; f32: none
  bool exact_o;      // delta is computed from the unrounded o
  bool smooth;       // k is centred by its mean
  bool adds_mean;    // dq needs the sums of the rows of ds, which are not 0, together with the mean of k
  bool sums_rows;    // the same, where the kernel alone can find the sums
  Sums sums;
};
BackwardChoice choose_backward(const Problem& p);

// Returns the reason why no GPU computes a backward pass with its bias correction, or nothing.
std::optional<std::string> bias_correction_unsupported_reason(const Problem& p);

// Returns the dim of the tiles of a problem.
int backward_dim(const Problem& p);

// Returns true where the logits of a row may have a large number in common, from a mask tensor or ALiBi.
bool has_row_bias(const Problem& p);

}  // namespace octet::cuda
