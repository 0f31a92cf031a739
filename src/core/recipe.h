// A precision is defined here, once for the CPU's kernels, the reference and the GPU: its passes and options, and its
// recipe, which is every rounding of it as a value. Whatever is left at its default is exact float64, so that Recipe{}
// is attention itself.
#pragma once
#include <octet/octet_study.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "core/problem.h"

namespace octet {

class PrecisionSet {
 public:
  constexpr PrecisionSet() = default;
  constexpr PrecisionSet(std::initializer_list<octet_precision> list) {
    for (const octet_precision p : list) bits_ |= 1u << p;
  }
  constexpr bool has(octet_precision p) const { return bits_ >> p & 1; }
  friend constexpr PrecisionSet operator|(PrecisionSet a, PrecisionSet b) {
    a.bits_ |= b.bits_;
    return a;
  }

  // "f64, f32, bf16" in the order of octet.h; with `last` " and ": "f64, f32 and bf16".
  std::string names(const char* last = ", ") const;

 private:
  unsigned bits_ = 0;
};

constexpr octet_precision kLastPrecision = OCTET_PRECISION_SAGEBWD;

bool supports(octet_precision precision, octet_pass pass);
PrecisionSet precisions_with_bias_correction();  // and beta
PrecisionSet precisions_with_int8_options();     // hadamard, smooth_q
PrecisionSet precisions_with_e4m3_outputs();     // beside f64

// Returns why no backend can solve a problem, because its recipe lacks the pass or the call lacks what the pass needs;
// nothing if one can.
std::optional<std::string> unsupported_reason(const Problem& problem);

// Returns whether the un-rounded output is kept. If not, bf16 P errs less than the output's own rounding.
bool keeps_exact_o(const Problem& problem);

// Returns why a backward pass lacks the un-rounded output that its bias correction reads; nothing if it has it.
std::optional<std::string> missing_exact_output(const Problem& problem);
// Returns why kernels reject a forward pass or jvp whose q is smoothed, which only the reference computes.
std::optional<std::string> smooth_q_unsupported_reason(const Problem& problem);

// The elements that share a scale of a quantized operand.
enum class Group {
  cast,    // nothing: the numbers are rounded as they are
  tensor,  // all tokens of the (batch, head)
  block,   // `block` consecutive tokens
  token,
  channel,
  thread_q,      // of each 32 queries those with equal row mod 8 (SageAttention 2, arXiv 2411.10958, section 3.2)
  thread_k,      // of each 64 keys those with equal (row mod 8) div 2
  power_of_two,  // nothing: each number has a power of two, so that range is bought, not another rounding
  nvfp4_dim,     // 16 consecutive channels; e2m1, which octet_dtype lacks, and an e4m3 scale
  nvfp4_token    // 16 consecutive tokens, likewise
};

// Rounds an operand: x ~ scale * value, the value a number of the format.
struct Quantizer {
  octet_dtype format = OCTET_F64;
  Group group = Group::cast;
  int64_t block = 0;

  bool exact() const { return format == OCTET_F64 && group == Group::cast; }
};

// Operands of s = scale q k^T. Smoothing takes the mean of so many consecutive tokens from each of them before they are
// rounded and gives its product back un-rounded; 0: none.
struct LogitRecipe {
  Quantizer q{}, k{};
  int64_t smooth_k = 0, smooth_q = 0;
  bool hadamard = false;  // both rotated after smoothing, signs from kHadamardSeed
};
constexpr int64_t kAllTokens = Problem::kUnbounded;
constexpr int64_t kQueryBlock = 128;  // queries that share a mean
constexpr int64_t kStep = 128;        // keys per step of forward passes whose p has a limited range

// Rounds the un-normalised p = exp(s - m) of one query and one tile of keys, in [0, 1].
struct PRecipe {
  enum class Scale {
    fixed,    // p times factor is rounded
    largest,  // the largest p of the tile becomes the largest number of the format
    nvfp4     // e2m1; 16 keys share an e4m3 scale on top of 1 / (448 * 6)
  };
  octet_dtype format = OCTET_F64;
  Scale scale = Scale::fixed;
  double factor = 1.0;
};

// Rounds p or ds of the backward pass, over tiles of `rows` queries and `cols` keys that share a scale; 0: cast.
struct TileRecipe {
  octet_dtype format = OCTET_F64;
  int64_t rows = 0, cols = 0;
  double factor = 1.0;        // cast only: x times factor is rounded
  bool power_of_two = false;  // cast only: each number has a power of two, so that the format's range does not matter
};

struct BackwardRecipe {
  LogitRecipe logits{};  // their rounded operands are also those of dq = ds k and dk = ds^T q
  std::optional<Quantizer>
      smooth_dq{};                  // set: dq = ds (k - mean), that difference rounded so, whatever the logits took
  std::optional<Quantizer> q_dk{};  // set: dk = ds^T q with q rounded so, whatever the logits took
  bool recompute = false;           // row maximum and sum from these logits instead of the caller's lse
  octet_delta delta = OCTET_DELTA_FROM_O;
  bool exact_o = false;             // delta reads o + o_residual
  octet_dtype o_saved = OCTET_F64;  // what delta reads, rounded once more
  Quantizer v{}, do_dp{};           // operands of dp = do v^T
  bool smooth_v = false;            // v is centred by its mean over tokens, and dp gets the product of that un-rounded
  TileRecipe ds_q{}, ds_k{};        // of dq = ds k, of dk = ds^T q
  TileRecipe p{};                   // of dv = p^T do
  Quantizer do_dv{};
  octet_dtype gproj = OCTET_F64;  // GProj with p and lambda q in this format; f64: none
};

struct Recipe {
  LogitRecipe logits;
  octet_dtype s = OCTET_F64, m = OCTET_F64, arg = OCTET_F64, alpha = OCTET_F64, acc = OCTET_F64, o = OCTET_F64;
  bool scale_first = true;   // s, m are in units of scale * q.k; else of q.k
  int64_t tile = 64;         // keys per step of the online softmax
  double beta = 0.0;         // shifted maximum on ties; 0: off
  double beta_limit = 40.0;  // by at most this much
  double tie_epsilon = 0.0;
  PRecipe p;
  bool sum_rounded_p = false;  // l adds the rounded p
  Quantizer v;
  bool smooth_v = false;            // v is centred by its mean over tokens, and o adds it back
  bool fold_v = false;              // v's token scale is multiplied into p before p is rounded
  octet_dtype tangent = OCTET_F64;  // jvp: tq, tk, tv, p and h
  BackwardRecipe backward;
};

// The recipe of a problem's precision, bias correction, switches and rounding description.
Recipe recipe_of(const Problem& problem);

// Recipes by name: this project's, and those of the implementations it is compared with.
Recipe flash_attention(octet_dtype format);  // FlashAttention 2: p, ds, o in a 16-bit format
Recipe f16_compute(octet_dtype format);      // operands in `format`, everything made of them in f16
Recipe octet_int8(bool hadamard, bool smooth_q);
Recipe octet_int8_training(bool hadamard, bool smooth_q);  // the forward pass whose o and lse a backward pass reads
Recipe octet_int8_f16(bool hadamard, bool smooth_q);
Recipe octet_int8_fp8(bool hadamard, bool smooth_q);
Recipe octet_fp8();
Recipe helion_fp8();             // raw casts, un-scaled p
Recipe sagebwd();                // arXiv 2505.11594, appendix, without the rowsum term
Recipe sage1();                  // arXiv 2410.02367: int8 blocks, f16 p v
Recipe sage2();                  // arXiv 2411.10958: int8 thread groups, e4m3 p v
Recipe sage2_int4();             // its int4 variant with smoothed q
Recipe sage3();                  // arXiv 2505.11594: nvfp4 everywhere, two-level p
Recipe flash_attention_3_fp8();  // arXiv 2407.08608, section 3.3: blocks and Hadamard

}  // namespace octet
