// The acceptance bars of docs/numerics.md as any backend is held to them: relative L2 and cosine against float64, on
// inputs with the difficulties of trained models (bar_inputs.h). Bars that several backends share stand here.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "passes/bar_inputs.h"

namespace octet::test {

// A backend and where its calls run.
struct Tested {
  const char* backend;
  std::function<std::unique_ptr<Place>()> place{};  // empty: the test's own memory
  bool deterministic = false;
};

// Runs a pass on the backend that `attention` names.
Outputs run_on(const Tested&, const Case&, const Inputs&, const Attention&, Pass, const Outputs* saved = nullptr);
// Runs a pass; a backward pass after its own forward pass. `out`: the type of its outputs.
Outputs compute(const Tested&, Case, const Inputs&, Pass, Precision, DType out, BiasCorrection = BiasCorrection::f16,
                Switch smooth_q = Switch::automatic);

// The errors that a bar bounds: those of the worst head, or, where heads of one input differ by as much as recipes do
// (a direction or a few rows decide), of all of them together, as the best figures were measured.
enum class Over { worst_head, all_heads };

struct Bar {
  double relative_l2, cosine;
  Over over = Over::worst_head;
};
void expect_bar(const Values& got, const Values& want, const Bar&, const std::string& what);

// Inputs of bar_inputs and their float64 answers, computed once for all precisions.
struct Known {
  Case c;
  Inputs in;
  Outputs want;
};
const Known& known(const std::string& name, Pass pass);

struct ForwardBar {
  const char* row;
  Precision precision;
  DType out;
  std::map<std::string, Bar> inputs;
  Switch smooth_q = Switch::automatic;
};
void PrintTo(const ForwardBar&, std::ostream*);
void expect_forward_bar(const Tested&, const ForwardBar&);

struct Limits {
  double dq, dk, dv;
  Over over = Over::worst_head;
};

struct BackwardBar {
  const char* row;
  Precision precision;
  BiasCorrection bias_correction;
  std::map<std::string, Limits> inputs;  // relative L2
  double cosine;
};
void PrintTo(const BackwardBar&, std::ostream*);
void expect_backward_bar(const Tested&, const BackwardBar&);

// The tangent `to` of all inputs J, in f32 and in the precision's own type, of the first `queries` of them.
void expect_jvp_bars(const Tested&, Precision, int64_t queries);

// The rows that CPU and GPU share.
ForwardBar bf16_forward_bar(DType out);
ForwardBar int8_forward_bar();
ForwardBar int8_f16_forward_bar();
ForwardBar int8_f16_smooth_q_forward_bar();
ForwardBar int8_fp8_forward_bar();
ForwardBar fp8_forward_bar();
ForwardBar fp8_raw_forward_bar(DType out);  // f32 or e4m3
ForwardBar sagebwd_forward_bar();
BackwardBar bf16_backward_bar(BiasCorrection);
BackwardBar sagebwd_backward_bar();

// Without a bias correction the rounding of dS meets the common offset of the keys: dq of B3 misses by far.
void expect_that_without_bias_correction_a_common_offset_ruins_dq(const Tested&);

// Bias correction f16: every gradient within 1.3 times the rounding of its own output format, with o saved in that
// format and its residual.
void expect_gradients_to_err_little_more_than_outputs_round(const Tested&);

}  // namespace octet::test
