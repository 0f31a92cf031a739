// A study of roundings: what a description of roundings (octet_rounding) does to attention, against float64.
#pragma once
#include <octet/octet_study.h>

#include <octet/octet.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "metrics.h"
#include "passes.h"

namespace octet::cli {

// bf16 as FlashAttention computes it: bf16 operands, float32 softmax and accumulator, sum from the un-rounded p, delta
// from the bf16 output.
octet_rounding flash_rounding();

// "point=type,...": the points named, all others exact; a first item "flash" starts from flash_rounding instead.
octet_rounding parse_rounding(const std::string& text);
std::string rounding_text(const octet_rounding& rounding);  // what parse_rounding takes
std::string rounding_help();

// The points of `rounding` that are not exact, each with the description in which it is.
std::vector<std::pair<std::string, octet_rounding>> lifted(const octet_rounding& rounding);

// Inputs with their float64 results.
struct Experiment {
  Inputs in;
  Attention attention;
  ForwardResult forward;
  BackwardResult backward;  // absent: forward only
};
Experiment experiment(Inputs in, const Attention& attention, bool backward);

// Inputs on which rounding is biased (arXiv 2510.04212; docs/numerics.md). Each row has two exactly tied largest
// logits, all others 14 to 18 below; v lies in [-3.99, -2], one sign and one binade. S8: the tied keys' v are halved,
// as attention sinks are. One experiment per seed, 64 rows each.
enum class BiasInput { s7, s8 };
std::vector<Experiment> bias_experiments(BiasInput input);

struct Effect {
  std::vector<std::pair<std::string, double>> rel_l2;  // by tensor, the largest of the experiments
  Bias bias;
  bool has_delta = false;  // delta was read from o, so bias.kappa() tells of it
};
Effect examine(const std::vector<Experiment>& experiments, const octet_rounding& rounding);

}  // namespace octet::cli
