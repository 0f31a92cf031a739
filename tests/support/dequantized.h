// The operands of 8-bit attention as the numbers that its codes stand for: float64 attention of these is the recipe
// but for the rounding of P and ds.
#pragma once
#include "support/cases.h"

namespace octet::test {

bool in_8_bits(Precision);

// The order in which keys are counted into thread groups, blocks and block means.
enum class KeyOrder {
  given,
  seen_first  // those that a mask tensor hides from all queries do not count: a GPU may copy the others side by side
};

// A case whose float64 result is that of a forward pass of 8 bits, or of s and dp of a backward pass. Its q has the
// scale of the logits in it, and its own scale is 1; further channels of q and k hold the products that no code enters,
// those with means.
struct Dequantized {
  Case c;
  Inputs in;
  Values q_dk{}, k_dq{}, do_dv{};   // what dk, dq and dv multiply ds and P by; with the scale of the logits
  bool trains_int8 = false;         // int8's passes for training, of which GPUs have a forward one of their own
  double largest_product = 0.0;     // of a channel of q and k, in units of the logits
  Values logit_noise{};             // [b h n 1] what codes that float32 decides may move the logits of a row by
  Values v_scale{}, v_code_norm{};  // [b kv_heads m 1] of int8 v: the scale of a token, the norm of its codes
};
Dequantized dequantized(const Case&, const Inputs&, const Attention&, Pass, KeyOrder);

// The results in float64.
Outputs exact(const Dequantized&, Pass);

}  // namespace octet::test
