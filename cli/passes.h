// The three passes over arrays in host memory: their inputs, their outputs, and the calls that join them.
#pragma once
#include <cstdint>
#include <octet/octet.hpp>
#include <string>
#include <vector>

#include "array.h"
#include "io/source.h"
#include "names.h"

namespace octet::cli {

struct Inputs {
  Array q, k, v;
  Array do_;           // backward
  Array tq, tk, tv;    // jvp
  Array sinks;         // optional: [1 or batch, head, 1, 1]
  Array tsinks;        // jvp, optional: as sinks
  Array dlse;          // backward, optional
  Array alibi_slopes;  // optional: as sinks
  Array dropout_seed;  // with --dropout

  // Head dims of q and k and of v as they were given. The arrays have the next multiples of 8, filled with zeros, which
  // add nothing to any sum: the library takes no others.
  int64_t dim = 0, dim_v = 0;
};

constexpr int64_t kDimMultiple = 8, kLargestDim = 256;
inline int64_t filled_dim(int64_t dim) { return (dim + kDimMultiple - 1) / kDimMultiple * kDimMultiple; }

// The options with the default scale of head dim `dim`, where that is filled.
Attention scaled_for(Attention attention, int64_t dim);

// A result of that name without what belongs to filled dims.
Array without_filling(const Inputs& inputs, const std::string& name, const Array& result);

// Shape [b, hq, n, e] of o and [b, hq, n, 1] of lse.
Shape output_shape(const Inputs& inputs);
Shape lse_shape(const Inputs& inputs);

struct ForwardResult {
  Array o, lse, o_residual;
};
struct BackwardResult {
  Array dq, dk, dv;
  Array dsinks;  // with sinks
};
struct JvpResult {
  Array o, lse, to;
  Array tlse;  // where asked for
};

// The type of an output beside an input of this type: the same, but bf16 beside e4m3, which fp8_raw alone writes.
DType output_type(DType input, Precision precision);

// The types that a precision can write, by name.
DType parse_output_type(const std::string& text, Precision precision);

// The types of outputs: those of the inputs, or one for all of them but lse.
struct OutputTypes {
  DType o = DType::none, dq = DType::none, dk = DType::none, dv = DType::none, lse = DType::f32;

  static OutputTypes like(const Inputs& inputs, Precision precision) {
    const DType q = output_type(inputs.q.dtype, precision);
    return {q, q, output_type(inputs.k.dtype, precision), output_type(inputs.v.dtype, precision)};
  }
  static OutputTypes all(DType dtype, DType lse = DType::f32) { return {dtype, dtype, dtype, dtype, lse}; }
};

// The type of o_residual beside an o of this type: one byte, where o was rounded.
DType residual_type(DType o);

// Outputs of the right shapes, full of zeros.
ForwardResult make_forward(const Inputs& inputs, const OutputTypes& types, bool residual);
BackwardResult make_backward(const Inputs& inputs, const OutputTypes& types);
JvpResult make_jvp(const Inputs& inputs, const OutputTypes& types, bool tlse);

// Views of them; the arrays must outlive the call.
Forward forward_call(const Inputs& inputs, const ForwardResult& result);
Backward backward_call(const Inputs& inputs, const ForwardResult& forward, const BackwardResult& result);
Jvp jvp_call(const Inputs& inputs, const JvpResult& result);

// Returns whether a backward pass in this recipe reads the residual of o, which its forward pass then writes.
bool reads_residual(const Attention& attention);

// q, k, v of a file, and for a backward do, for a jvp the tangents. What is absent is rejected, or with `draw` drawn
// from N(0, 1) by a fixed seed in the type of its primal; `drawn` then receives its name. Sinks, alibi_slopes and,
// for a backward, dlse, for a jvp tsinks are read where the file has them.
Inputs read_inputs(const Source& source, Layout layout, bool backward, bool jvp);
Inputs read_inputs(const Source& source, Layout layout, bool backward, bool jvp, std::vector<std::string>& drawn);

// A problem by its sizes: "b,hq,hkv,sq,sk,d".
struct ProblemShape {
  int64_t batch, heads, kv_heads, tokens_q, tokens_k, dim;
};
ProblemShape parse_shape(const std::string& text);

// The type of a do or a tangent beside a primal of this type: they have no 8-bit types.
DType companion_type(DType primal);

// The type that tensors of a model trained or run in this precision have.
DType natural_type(Precision precision);

// Inputs of these sizes to time, drawn from N(0, 1) by fixed seeds. After a million numbers those of a tensor repeat.
Inputs draw_inputs(const ProblemShape& shape, Layout layout, DType dtype, bool backward, bool jvp);

// Pairs of query and key that meet, over all batches and heads of q.
double visible_pairs(const Inputs& inputs, const Attention& attention);

// The backend that would run, as octet_explain names it; empty if none.
struct Choice {
  std::string backend, kernel;
};
Choice chosen(const std::string& explanation);

}  // namespace octet::cli
