// The cases of attention that every backend is held to, and how tests run one through the C ABI.
#pragma once
#include <octet/octet.hpp>
#include <optional>
#include <string>
#include <vector>

#include "support/tensors.h"

namespace octet::test {

enum class Pass { forward, backward, jvp };
const char* name(Pass);
const char* name(Precision);

// The precisions that have a pass.
std::vector<Precision> precisions_of(Pass);

enum class MaskTensor {
  none,
  keys,          // bool [1 1 1 m]
  padding,       // bool [b 1 1 m]: the last keys of each batch element; all of the third one
  left_padding,  // bool [b 1 1 m]: the first keys of each batch element
  heads,         // bool [b 1 n m]: one per batch element
  blind,         // bool [b h n m]: some queries see no key
  bias_f32,      // f32 [1 h n m] added to the logits, a third of it -inf
  bias_bf16,     // bf16 [b 1 n m]
  // The same in blocks of 64 queries and 128 keys, of which some are hidden, some are 0, and some as above; the second
  // 64 queries of each batch element but the first see no key.
  blocks,      // bool [b 1 n m]
  bias_blocks  // bf16 [b h n m]
};
bool is_added(MaskTensor);  // to the logits

enum class Sinks {
  none,
  shared,    // [1 h 1 1]; the last of three or more heads has -inf, which is none
  of_batch,  // [b h 1 1]
};

enum class Alibi {
  none,
  shared,  // slopes [1 h 1 1]
  each     // [b h 1 1], or of each packed sequence [s h 1 1]
};

enum class Seeds {
  shared,  // dropout_seed [1 1 1 4]
  each     // [b 1 1 4], or of each packed sequence [s 1 1 4]
};

struct Case {
  const char* name;
  int64_t batch = 1, heads = 1, kv_heads = 1, tokens_q = 64, tokens_k = 64, dim = 64, dim_v = 64;
  bool causal = false;
  std::optional<std::array<int64_t, 2>> window{};
  Alignment alignment = Alignment::unspecified;
  MaskTensor mask = MaskTensor::none;
  std::vector<int32_t> cu_seqlens_q{}, cu_seqlens_k{};
  std::optional<float> scale{};
  DType dtype = DType::f32;      // of the inputs
  DType out_dtype = DType::f32;  // of the outputs
  Layout layout = Layout::bhtd;  // of all but k and v
  Layout kv_layout = Layout::bhtd;
  bool interleaved = false;  // q, k, v in one buffer; dq, dk, dv in another
  Sinks sinks = Sinks::none;
  bool dlse = false;  // backward passes get dlse, jvps give tlse
  float softcap = 0;
  Alibi alibi = Alibi::none;
  double dropout_p = 0;
  Seeds seeds = Seeds::shared;
  bool dmask = false;  // backward passes give the gradient of the mask, which is added to the logits

  // Outputs of 16 and 8 bits come with o_residual. A fourth of the cases keeps it in the type of o.
  bool has_residual() const { return out_dtype == DType::bf16 || out_dtype == DType::f16 || out_dtype == DType::e4m3; }
  bool trains_int8 = false;  // at int8 o_residual asks for another forward pass, so only where this is set
  DType residual_dtype() const { return (heads + tokens_q) % 4 == 0 ? out_dtype : DType::i8; }
  Shape q_shape() const { return {batch, heads, tokens_q, dim}; }
  Shape k_shape() const { return {batch, kv_heads, tokens_k, dim}; }
  Shape v_shape() const { return {batch, kv_heads, tokens_k, dim_v}; }
  Shape o_shape() const { return {batch, heads, tokens_q, dim_v}; }
  Shape lse_shape() const { return {batch, heads, tokens_q, 1}; }
  Shape sinks_shape() const { return {sinks == Sinks::of_batch ? batch : 1, heads, 1, 1}; }
  int64_t sequences() const { return cu_seqlens_q.empty() ? batch : static_cast<int64_t>(cu_seqlens_q.size()) - 1; }
  Shape slopes_shape() const { return {alibi == Alibi::each ? sequences() : 1, heads, 1, 1}; }
  Shape seed_shape() const { return {seeds == Seeds::each ? sequences() : 1, 1, 1, 4}; }
  double dropout_scale() const { return 1.0 / (1.0 - dropout_p); }
  double effective_scale() const;
};
const std::vector<Case>& cases();  // of tests/cases.json

// Numbers that the case's input type can hold.
struct Inputs {
  Values q, k, v, do_, tq, tk, tv;
  Values mask;                 // absent: none
  Values sinks, tsinks, dlse;  // f32; absent: none
  bool sinks_repeat = false;   // the sinks of all batch elements are one tensor in memory, of stride 0
  Values alibi_slopes;         // f32; absent: none
  Values dropout_seed;         // i32; absent: none
  DType mask_dtype = DType::none;
  Layout mask_layout = Layout::bhtd;
};
Inputs draw(const Case&, uint64_t seed);

// The outputs that a pass wrote; o_residual is absent where the case has none, and the un-rounded o minus o whatever
// its type.
struct Outputs {
  Values o, lse, o_residual, dq, dk, dv, dsinks, dmask, to, tlse;
};

// A place that the tensors of a call lie in while it runs, if it is not the test's own memory: a GPU.
class Place {
 public:
  virtual ~Place() = default;
  virtual Tensor tensor(const Buffer&) = 0;
  // Aligned to 64 bytes, full of NaN, between guards.
  virtual void* workspace(size_t bytes) = 0;
  virtual void* stream() = 0;
  // Waits, and brings everything back. True if the guards of the workspace were overwritten.
  virtual bool finish() = 0;
};

// The case's mask, scale and layouts with a precision and a backend.
Attention attention_of(const Case&, Precision, const char* backend);

// Returns the un-rounded o minus o, of an o_residual in the case's type.
Values residual_of(const Case&, const Values& o, const Buffer& o_residual);

// Runs a pass on fresh buffers and checks that it wrote every element of its outputs and nothing else: not the gaps
// and guards of outputs, not the inputs, not beyond the workspace, which holds NaN before. `saved`: what the forward
// pass left to a backward pass. `place`: where it runs; null: here. At precision f64 all tensors are f64 and dense.
Outputs run(const Case&, const Inputs&, const Attention&, Pass, const Outputs* saved = nullptr, Place* place = nullptr);

// Returns why a backend does not solve a case, or nothing if it does. Nothing runs.
std::string why_rejected(const Case&, const Inputs&, const Attention&, Pass, Place* place = nullptr);

// Returns the tiles of a backend's kernels that can run a case, its default first.
std::vector<std::string> tiles_of(const Case&, const Inputs&, const Attention&, Pass, Place* place = nullptr);

// Returns what octet_explain says of a case.
std::string explained(const Case&, const Inputs&, const Attention&, Pass, Place* place = nullptr);

// Float64 attention on the same inputs.
Outputs exact(const Case&, const Inputs&, Pass);

// How far f32 arithmetic may carry a pass from exact arithmetic; derived at the definition of f32_noise.
struct Noise {
  double o = 0.0, lse = 0.0, dq = 0.0, dk = 0.0, dv = 0.0, dsinks = 0.0, dmask = 0.0, to = 0.0, tlse = 0.0;
};

// Sums of n products in f32 err by at most sigmas * sqrt(n) * 2^-24 times the sum of their magnitudes (Higham and Mary,
// A new approach to probabilistic rounding error analysis, 2019): 1 for root mean squares, 5 for the largest of all
// elements.
Noise f32_noise(const Case&, const Inputs&, double column_sum, double sigmas);

// The largest sum over queries (of all heads of a group) of one key's probabilities.
double largest_column_sum(const Case&, const Inputs&);

}  // namespace octet::test
