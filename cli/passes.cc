// Calls of the three passes.
#include "passes.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octet::cli {
namespace {

// Sinks, their tangent or slopes, which have the shape [head] or [batch, head].
Array read_by_head(const Source& source, const char* label) {
  Array array = source.read(label);
  std::vector<int64_t>& shape = array.shape;
  if (shape.size() == 1) shape.insert(shape.begin(), 1);
  if (shape.size() != 2) reject("{}: shape {}, expected [head] or [batch, head]", label, shape_text(shape));
  shape.insert(shape.end(), {1, 1});
  return array;
}

// dlse has the shape that lse is written in: [batch, head, token], or [head, token] where q has no batch.
void read_dlse(const Source& source, Inputs& in) {
  in.dlse = source.read("dlse");
  std::vector<int64_t>& shape = in.dlse.shape;
  if (shape.size() + 1 != in.q.shape.size())
    reject("dlse: shape {}, expected the dimensions of q, shape {}, but the last", shape_text(shape),
           shape_text(in.q.shape));
  shape.push_back(1);
}

Array read_in(Layout layout, const Source& source, const char* label) {
  Array array = source.read(label);
  array.layout = layout;
  array.shape4(label);
  return array;
}

// Tensors that octet computes with elsewhere: a result without them would be that of another problem.
void expect_no_mask(const Source& source) {
  if (source.single()) return;
  for (const char* label : {"mask", "cu_seqlens_q", "cu_seqlens_k"})
    if (source.has(label))
      reject(
          "{}: found in the file, but the command takes no mask tensors and no packed sequences; call octet in "
          "Python, C or C++, or leave it out of the file",
          label);
}

Inputs read_primals(const Source& source, Layout layout, bool backward, bool jvp) {
  expect_no_mask(source);
  Inputs in;
  in.q = read_in(layout, source, "q"), in.k = read_in(layout, source, "k"), in.v = read_in(layout, source, "v");
  if (source.has("sinks")) in.sinks = read_by_head(source, "sinks");
  if (source.has("alibi_slopes")) in.alibi_slopes = read_by_head(source, "alibi_slopes");
  if (jvp && source.has("tsinks")) in.tsinks = read_by_head(source, "tsinks");
  if (backward && source.has("dlse")) read_dlse(source, in);
  return in;
}

// A tensor that a pass needs beside q, k, v.
struct Companion {
  const char* label;
  Array* array;
  const Array* primal;  // whose type it has when drawn
  uint64_t seed;
};

std::vector<Companion> companions(Inputs& in, bool backward, bool jvp) {
  std::vector<Companion> out;
  if (backward) out.push_back({"do", &in.do_, &in.q, 1});
  if (jvp) out.insert(out.end(), {{"tq", &in.tq, &in.q, 2}, {"tk", &in.tk, &in.k, 3}, {"tv", &in.tv, &in.v, 4}});
  return out;
}

void read_companion(const Source& source, const Inputs& in, const Companion& c) {
  *c.array = read_in(in.q.layout, source, c.label);
}

void draw_companion(const Inputs& in, const Companion& c, int64_t period = std::numeric_limits<int64_t>::max()) {
  const Shape shape = c.array == &in.do_ ? output_shape(in) : c.primal->shape4();
  *c.array = Array(companion_type(c.primal->dtype), shape, c.primal->layout);
  fill_normal(*c.array, c.seed, period);
}

// Fills head dims up to multiples of 8. Where no dim is filled, the library says what is wrong with them.
void fill_head_dims(Inputs& in) {
  in.dim = in.q.shape.back(), in.dim_v = in.v.shape.back();
  const struct {
    const char* label;
    Array* array;
    int64_t dim;
    const char* owner;
  } tensors[] = {{"q", &in.q, in.dim, "q"},     {"k", &in.k, in.dim, "q"},   {"v", &in.v, in.dim_v, "v"},
                 {"tq", &in.tq, in.dim, "q"},   {"tk", &in.tk, in.dim, "q"}, {"tv", &in.tv, in.dim_v, "v"},
                 {"do", &in.do_, in.dim_v, "v"}};
  for (const auto& t : tensors) {
    if (!t.array->present()) continue;
    const int64_t found = t.array->shape.back();
    if (found < 1 || found > kLargestDim) reject("{}: head dim {}, allowed: 1 to {}", t.label, found, kLargestDim);
    if (found == filled_dim(found) && t.dim == filled_dim(t.dim)) continue;
    if (found != t.dim) reject("{}: head dim {}, expected {}, that of {}", t.label, found, t.dim, t.owner);
    *t.array = with_last(*t.array, filled_dim(found));
  }
}

}  // namespace

Attention scaled_for(Attention attention, int64_t dim) {
  if (!attention.scale && dim != filled_dim(dim))
    attention.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  return attention;
}

Array without_filling(const Inputs& in, const std::string& name, const Array& result) {
  if (name == "dq" || name == "dk") return with_last(result, in.dim);
  if (name == "o" || name == "to" || name == "dv") return with_last(result, in.dim_v);
  return result;
}

DType output_type(DType input, Precision precision) {
  return input == DType::e4m3 && precision != Precision::fp8_raw ? DType::bf16 : input;
}

DType parse_output_type(const std::string& text, Precision precision) {
  const bool e4m3 = precision == Precision::fp8_raw || precision == Precision::f64;
  return parse_tensor_type("--out-dtype", text, precision, e4m3);
}

DType companion_type(DType primal) {
  return primal == DType::f64 || primal == DType::f32 || primal == DType::f16 ? primal : DType::bf16;
}

DType residual_type(DType o) { return o == DType::f32 || o == DType::f64 ? o : DType::i8; }

Shape output_shape(const Inputs& in) {
  const Shape q = in.q.shape4("q"), v = in.v.shape4("v");
  return {q[0], q[1], q[2], v[3]};
}

Shape lse_shape(const Inputs& in) {
  const Shape q = in.q.shape4("q");
  return {q[0], q[1], q[2], 1};
}

ForwardResult make_forward(const Inputs& in, const OutputTypes& types, bool residual) {
  const Layout layout = in.q.layout;
  ForwardResult result{Array(types.o, output_shape(in), layout), Array(types.lse, lse_shape(in)), {}};
  if (residual) result.o_residual = Array(residual_type(types.o), output_shape(in), layout);
  return result;
}

BackwardResult make_backward(const Inputs& in, const OutputTypes& types) {
  BackwardResult result{Array(types.dq, in.q.shape4(), in.q.layout),
                        Array(types.dk, in.k.shape4(), in.k.layout),
                        Array(types.dv, in.v.shape4(), in.v.layout),
                        {}};
  if (in.sinks.present()) result.dsinks = Array(types.lse, in.sinks.shape4());
  return result;
}

JvpResult make_jvp(const Inputs& in, const OutputTypes& types, bool tlse) {
  const Array o(types.o, output_shape(in), in.q.layout);
  JvpResult result{o, Array(types.lse, lse_shape(in)), o, {}};
  if (tlse) result.tlse = Array(types.lse, lse_shape(in));
  return result;
}

namespace {
Extras extras(const Inputs& in) {
  return {.sinks = in.sinks.view(), .alibi_slopes = in.alibi_slopes.view(), .dropout_seed = in.dropout_seed.view()};
}
}  // namespace

Forward forward_call(const Inputs& in, const ForwardResult& r) {
  return {.q = in.q.view(),
          .k = in.k.view(),
          .v = in.v.view(),
          .o = r.o.view(),
          .lse = r.lse.view(),
          .o_residual = r.o_residual.view(),
          .extras = extras(in)};
}

Backward backward_call(const Inputs& in, const ForwardResult& f, const BackwardResult& r) {
  return {.q = in.q.view(),
          .k = in.k.view(),
          .v = in.v.view(),
          .o = f.o.view(),
          .lse = f.lse.view(),
          .do_ = in.do_.view(),
          .dq = r.dq.view(),
          .dk = r.dk.view(),
          .dv = r.dv.view(),
          .o_residual = f.o_residual.view(),
          .dlse = in.dlse.view(),
          .dsinks = r.dsinks.view(),
          .extras = extras(in)};
}

Jvp jvp_call(const Inputs& in, const JvpResult& r) {
  return {.q = in.q.view(),
          .k = in.k.view(),
          .v = in.v.view(),
          .tq = in.tq.view(),
          .tk = in.tk.view(),
          .tv = in.tv.view(),
          .o = r.o.view(),
          .to = r.to.view(),
          .lse = r.lse.view(),
          .tsinks = in.tsinks.view(),
          .tlse = r.tlse.view(),
          .extras = extras(in)};
}

bool reads_residual(const Attention& attention) {
  switch (attention.precision) {
    case Precision::f64:
    case Precision::f32:
      return true;
    case Precision::f16:
    case Precision::bf16:
      return attention.bias_correction == BiasCorrection::f16 ||
             attention.bias_correction == BiasCorrection::exact_delta;
    default:
      return false;
  }
}

Inputs read_inputs(const Source& source, Layout layout, bool backward, bool jvp) {
  Inputs in = read_primals(source, layout, backward, jvp);
  for (const Companion& c : companions(in, backward, jvp)) read_companion(source, in, c);
  fill_head_dims(in);
  return in;
}

Inputs read_inputs(const Source& source, Layout layout, bool backward, bool jvp, std::vector<std::string>& drawn) {
  Inputs in = read_primals(source, layout, backward, jvp);
  for (const Companion& c : companions(in, backward, jvp)) {
    if (source.has(c.label)) {
      read_companion(source, in, c);
    } else {
      draw_companion(in, c);
      drawn.emplace_back(c.label);
    }
  }
  fill_head_dims(in);
  return in;
}

DType natural_type(Precision p) {
  return p == Precision::f64   ? DType::f64
         : p == Precision::f32 ? DType::f32
         : p == Precision::f16 ? DType::f16
                               : DType::bf16;
}

Inputs draw_inputs(const ProblemShape& s, Layout layout, DType dtype, bool backward, bool jvp) {
  Inputs in;
  in.q = Array(dtype, Shape{s.batch, s.heads, s.tokens_q, s.dim}, layout);
  in.k = Array(dtype, Shape{s.batch, s.kv_heads, s.tokens_k, s.dim}, layout);
  in.v = Array(dtype, Shape{s.batch, s.kv_heads, s.tokens_k, s.dim}, layout);
  constexpr int64_t kPeriod = 1'000'003;  // a prime: rows and heads do not begin alike
  fill_normal(in.q, 11, kPeriod), fill_normal(in.k, 12, kPeriod), fill_normal(in.v, 13, kPeriod);
  for (const Companion& c : companions(in, backward, jvp)) draw_companion(in, c, kPeriod);
  fill_head_dims(in);
  return in;
}

ProblemShape parse_shape(const std::string& text) {
  const auto parts = split(text, ',');
  if (parts.size() != 6) reject("--shape: found \"{}\", expected b,hq,hkv,sq,sk,d", text);
  int64_t n[6];
  for (int i = 0; i < 6; ++i)
    if ((n[i] = parse_integer("--shape", parts[i])) < 0)
      reject("--shape: found \"{}\", allowed: no negative numbers", text);
  return {n[0], n[1], n[2], n[3], n[4], n[5]};
}

double visible_pairs(const Inputs& in, const Attention& a) {
  const Shape q = in.q.shape4(), k = in.k.shape4();
  const int64_t n = q[2], m = k[2], all = std::numeric_limits<int64_t>::max() / 4;
  if (!a.causal && !a.window) return static_cast<double>(q[0] * q[1]) * static_cast<double>(n) * static_cast<double>(m);
  const auto bound = [&](int side) { return a.window && (*a.window)[side] >= 0 ? (*a.window)[side] : all; };
  const int64_t left = bound(0), right = a.causal ? 0 : bound(1);
  double pairs = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t diagonal = i + (a.alignment == Alignment::bottom_right ? m - n : 0);
    const int64_t first = std::clamp<int64_t>(diagonal - left, 0, m),
                  last = std::clamp<int64_t>(diagonal + right + 1, 0, m);
    pairs += static_cast<double>(std::max<int64_t>(last - first, 0));
  }
  return static_cast<double>(q[0] * q[1]) * pairs;
}

Choice chosen(const std::string& explanation) {
  for (const std::string& line : split(explanation, '\n')) {
    const std::size_t mark = line.find(": chosen, ");
    if (mark != std::string::npos) return {line.substr(0, mark), line.substr(mark + 10)};
  }
  return {};
}

}  // namespace octet::cli
