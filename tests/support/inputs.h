// The standard inputs: what real activations do to attention, in distributions that anyone can draw. One head each,
// float64 numbers row by row, rounded to 16 bits after generation; the same seed gives the same numbers everywhere.
#pragma once
#include <octet/octet.h>

#include <cstdint>
#include <vector>

namespace octet::test {

struct HeadInput {
  int64_t tokens = 0, dim = 0;
  std::vector<double> q{}, k{}, v{}, do_{};  // [tokens dim]
  std::vector<double> tq{}, tk{}, tv{};      // tangents; empty unless asked for
};

// d1 to d6 for the forward pass; b1 to b6 for the backward, where b1, b2 and b4 draw q, k, v as d1, d2, d4 do.
enum class Standard {
  d1,  // normal
  d2,  // k: a bias per channel, +-40 in four of them; q: a bias, +-5 in the same
  d3,  // outliers: one number in a thousand gets a normal one of deviation 10 on top
  d4,  // sink: four keys get 10 more logits, and small values
  d5,  // v: +-8 in eight channels
  d6,  // k: four channels times 20, q: the same channels times 1/2
  b3,  // k: one common offset of length 100 sqrt(dim)
  b5,  // do: rows of very different size
  b6   // q times 4: sharp rows
};
constexpr Standard kForwardInputs[] = {Standard::d1, Standard::d2, Standard::d3, Standard::d4, Standard::d5, Standard::d6};
constexpr Standard kBackwardInputs[] = {Standard::d1, Standard::d2, Standard::b3, Standard::d4, Standard::b5, Standard::b6};

HeadInput standard_input(Standard which, int64_t tokens, int64_t dim, uint64_t seed);

// For the jvp: normal; a bias of +-20 in four channels of k, of tk; of +-8 in v; all three; q times 4. Rounded to `format`.
enum class Tangent { normal, k_bias, tk_bias, v_bias, all_biases, sharp };
constexpr Tangent kTangentInputs[] = {Tangent::normal, Tangent::k_bias, Tangent::tk_bias, Tangent::v_bias, Tangent::all_biases, Tangent::sharp};
HeadInput tangent_input(Tangent which, int64_t tokens, int64_t dim, octet_dtype format, uint64_t seed);

// One query whose two largest logits tie exactly, the others 14 to 18 below, and whose values have one sign and one
// binade: sums of them fall on rounding boundaries, and the small rest pushes all of them the same way (arXiv 2510.04212).
struct TiedRow {
  std::vector<double> logits;  // [keys]
  std::vector<double> v;       // [keys dim] in [-3.99, -2]
  std::vector<double> do_;     // [dim], the first half negative
};
constexpr int64_t kTiedKeys = 1024, kTiedDim = 16, kTiedSeeds = 24, kTiedRows = 64;
// S7; S8 with `small_ties`: the tied keys have values of half the size, as attention sinks have. kTiedSeeds * kTiedRows rows.
std::vector<TiedRow> tied_rows(bool small_ties);

}  // namespace octet::test
