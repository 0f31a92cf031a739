#include "core/validate.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/o_residual.h"
#include "core/quantization.h"
#include "core/recipe.h"
#include "core/structs.h"
#include "core/validate_parts.h"

namespace octet {
namespace {

enum class Role { absent, in, out, optional_in, optional_out };

// One tensor of octet_arguments, where its view goes, and its role in each pass.
struct Operand {
  const char* label;
  View Problem::*view;
  Role forward, backward, jvp;

  Role role(octet_pass pass) const { return pass == OCTET_FORWARD ? forward : pass == OCTET_BACKWARD ? backward : jvp; }
  bool output(octet_pass pass) const { return role(pass) == Role::out || role(pass) == Role::optional_out; }
};

using enum Role;
constexpr Operand kOperands[] = {
    {"q", &Problem::q, in, in, in},
    {"k", &Problem::k, in, in, in},
    {"v", &Problem::v, in, in, in},
    {"mask", &Problem::mask, optional_in, optional_in, optional_in},
    {"sinks", &Problem::sinks, optional_in, optional_in, optional_in},
    {"cu_seqlens_q", &Problem::cu_seqlens_q, optional_in, optional_in, optional_in},
    {"cu_seqlens_k", &Problem::cu_seqlens_k, optional_in, optional_in, optional_in},
    {"o", &Problem::o, out, in, out},
    {"o_residual", &Problem::o_residual, optional_out, optional_in, absent},
    {"lse", &Problem::lse, optional_out, in, optional_out},
    {"do", &Problem::do_, absent, in, absent},
    {"dq", &Problem::dq, absent, out, absent},
    {"dk", &Problem::dk, absent, out, absent},
    {"dv", &Problem::dv, absent, out, absent},
    {"tq", &Problem::tq, absent, absent, optional_in},
    {"tk", &Problem::tk, absent, absent, optional_in},
    {"tv", &Problem::tv, absent, absent, optional_in},
    {"to", &Problem::to, absent, absent, out},
    {"dlse", &Problem::dlse, absent, optional_in, absent},
    {"dsinks", &Problem::dsinks, absent, optional_out, absent},
    {"tsinks", &Problem::tsinks, absent, absent, optional_in},
    {"tlse", &Problem::tlse, absent, absent, optional_out},
    {"alibi_slopes", &Problem::alibi_slopes, optional_in, optional_in, optional_in},
    {"dropout_seed", &Problem::dropout_seed, optional_in, optional_in, optional_in},
    {"dmask", &Problem::dmask, absent, optional_out, absent},
    {"seqused_k", &Problem::seqused_k, optional_in, absent, absent},
    {"block_table", &Problem::block_table, optional_in, absent, absent},
};

// Validates that tensors are present, each tensor by itself, and that all are on one device.
void validate_operands(const octet_arguments& a, Problem& p) {
  const octet_tensor* const tensors[std::size(kOperands)] = {
      a.q,    a.k,      a.v,      a.mask, a.sinks,        a.cu_seqlens_q, a.cu_seqlens_k, a.o,         a.o_residual,
      a.lse,  a.do_,    a.dq,     a.dk,   a.dv,           a.tq,           a.tk,           a.tv,        a.to,
      a.dlse, a.dsinks, a.tsinks, a.tlse, a.alibi_slopes, a.dropout_seed, a.dmask,        a.seqused_k, a.block_table};
  for (std::size_t i = 0; i < std::size(kOperands); ++i) {
    const Operand& x = kOperands[i];
    const octet_tensor* t = tensors[i];
    const Role role = x.role(p.pass);
    if (!t && (role == in || role == out)) invalid(x.label, ": NULL, but a ", name(p.pass), " pass needs it");
    if (!t) continue;
    if (role == absent) invalid(x.label, ": given to a ", name(p.pass), " pass, which has no use for it; pass NULL");
    p.*x.view = validate_tensor(t, x.label);
    if (t->device != a.q->device || t->device_index != a.q->device_index)
      invalid(x.label, ": on ", name(static_cast<octet_device>(t->device)), ':', t->device_index, ", but q is on ",
              name(static_cast<octet_device>(a.q->device)), ':', a.q->device_index,
              "; all tensors of a call live on one device");
  }
  p.device = static_cast<octet_device>(a.q->device);
  p.device_index = a.q->device_index;
}

void validate_memory(const Problem& p) {
  for (const Operand& out : kOperands) {
    if (!out.output(p.pass)) continue;
    expect_distinct_elements(p.*out.view, out.label);
    for (const Operand& other : kOperands)
      if (&out != &other) expect_no_overlap(p.*out.view, out.label, p.*other.view, other.label);
  }
}

void expect_head_dim(int64_t dim, const char* tensor) {
  if (dim < 8 || dim > kMostHeadDim || dim % 8)
    invalid(tensor, ": head dim ", dim, ", allowed: a multiple of 8 from 8 to ", kMostHeadDim);
}

void validate_shapes(Problem& p) {
  p.batch = p.q.shape[0], p.heads = p.q.shape[1], p.tokens_q = p.q.shape[2], p.dim = p.q.shape[3];
  p.kv_heads = p.k.shape[1], p.tokens_k = p.k.shape[2], p.dim_v = p.v.shape[3];
  const int64_t elements_k = p.block_table.present() ? p.k.shape[0] : p.batch;  // pages, or batch elements
  expect_head_dim(p.dim, "q");
  expect_head_dim(p.dim_v, "v");
  const int64_t q[4] = {p.batch, p.heads, p.tokens_q, p.dim}, k[4] = {elements_k, p.kv_heads, p.tokens_k, p.dim};
  const int64_t v[4] = {elements_k, p.kv_heads, p.tokens_k, p.dim_v}, o[4] = {p.batch, p.heads, p.tokens_q, p.dim_v};
  const int64_t lse[4] = {p.batch, p.heads, p.tokens_q, 1};
  expect_shape(p.k, "k", k, "batch and dim of q");
  expect_shape(p.v, "v", v, "batch, heads and tokens of k");
  if (p.heads && (!p.kv_heads || p.heads % p.kv_heads))
    invalid("q: ", p.heads, " heads, which is not a multiple of the ", p.kv_heads, " heads of k and v");
  const auto expect_like = [](const View& t, const char* label, const int64_t(&shape)[4], const char* why) {
    if (t.present()) expect_shape(t, label, shape, why);
  };
  expect_like(p.o, "o", o, "batch, heads and tokens of q, dim of v");
  expect_like(p.o_residual, "o_residual", o, "shape of o");
  expect_like(p.lse, "lse", lse, "batch, heads and tokens of q, 1");
  expect_like(p.do_, "do", o, "shape of o");
  expect_like(p.dq, "dq", q, "shape of q");
  expect_like(p.dk, "dk", k, "shape of k");
  expect_like(p.dv, "dv", v, "shape of v");
  expect_like(p.tq, "tq", q, "shape of q");
  expect_like(p.tk, "tk", k, "shape of k");
  expect_like(p.tv, "tv", v, "shape of v");
  expect_like(p.to, "to", o, "shape of o");
  expect_like(p.dlse, "dlse", lse, "shape of lse");
  expect_like(p.tlse, "tlse", lse, "shape of lse");
}

void validate_sinks(Problem& p) {
  for (const auto& [t, label] : {std::pair{&p.dsinks, "dsinks"}, {&p.tsinks, "tsinks"}})
    if (t->present() && !p.sinks.present()) invalid(label, ": given without sinks, to which it belongs");
  if (!p.sinks.present()) return;
  const bool shared = p.sinks.shape[0] == 1;
  const int64_t sinks[4] = {shared ? 1 : p.batch, p.heads, 1, 1};
  expect_shape(p.sinks, "sinks", sinks, "1 or the batch of q, heads of q, 1, 1");
  for (const auto& [t, label] : {std::pair{&p.dsinks, "dsinks"}, {&p.tsinks, "tsinks"}})
    if (t->present()) expect_shape(*t, label, sinks, "shape of sinks");
  if (shared) p.sinks.stride[0] = p.tsinks.stride[0] = 0;
}

void validate_alibi(Problem& p) {
  if (!p.alibi_slopes.present()) return;
  const bool shared = p.alibi_slopes.shape[0] == 1;
  const int64_t slopes[4] = {shared ? 1 : p.sequence_count(), p.heads, 1, 1};
  expect_shape(p.alibi_slopes, "alibi_slopes", slopes,
               p.packed() ? "1 or the packed sequences, heads of q, 1, 1" : "1 or the batch of q, heads of q, 1, 1");
  if (shared) p.alibi_slopes.stride[0] = 0;
}

// q, k or v: as they are, or quantized as their own operand.
void validate_input(const octet_tensor& tensor, const View& t, const char* label, octet_operand operand,
                    octet_precision precision) {
  const bool integers = t.dtype == OCTET_I8 || t.dtype == OCTET_U8;
  if (t.quantization && !integers && t.dtype != OCTET_E4M3)
    invalid(label, ": a quantization with dtype ", name(t.dtype), ", allowed: i8, u8, e4m3");
  if (integers && !t.quantization)
    invalid(label, ": dtype ", name(t.dtype),
            " without a quantization; quantize it with octet_quantize, or give f32, f16 or bf16");
  if (!t.quantization && precision == OCTET_PRECISION_F64)
    return expect_dtype(t, label, {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  if (t.dtype == OCTET_F64) invalid(label, ": dtype f64 needs precision f64, found ", name(precision));
  if (!t.quantization) return expect_dtype(t, label, {OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  const Quantization how = validate_quantization(tensor, label, false);
  if (how.operand != operand)
    invalid(label, ": quantized as operand ", name(how.operand), ", expected ", name(operand),
            "; granularities and thread groups depend on it");
}

// Everything but q, k, v: not quantized; f64 with precision f64 only, e4m3 only from the precisions that end in it.
void validate_plain_dtype(const View& t, const char* label, octet_precision precision, bool output) {
  if (t.quantization) invalid(label, ": has a quantization, which only q, k and v may have; leave it NULL");
  if (precision == OCTET_PRECISION_F64 && output)
    return expect_dtype(t, label, {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  if (precision == OCTET_PRECISION_F64) return expect_dtype(t, label, {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16});
  if (t.dtype == OCTET_F64) invalid(label, ": dtype f64 needs precision f64, found ", name(precision));
  if (output && precisions_with_e4m3_outputs().has(precision))
    return expect_dtype(t, label, {OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  expect_dtype(t, label, {OCTET_F32, OCTET_F16, OCTET_BF16});
}

void validate_dtypes(const octet_arguments& args, const Problem& p) {
  validate_input(*args.q, p.q, "q", OCTET_OPERAND_Q, p.precision);
  validate_input(*args.k, p.k, "k", OCTET_OPERAND_K, p.precision);
  validate_input(*args.v, p.v, "v", OCTET_OPERAND_V, p.precision);
  for (const Operand& x : kOperands) {
    const View* t = &(p.*x.view);
    const bool validated_elsewhere = t == &p.q || t == &p.k || t == &p.v || t == &p.mask || t == &p.cu_seqlens_q ||
                                     t == &p.cu_seqlens_k || t == &p.dropout_seed || t == &p.seqused_k ||
                                     t == &p.block_table || (t == &p.o_residual && !t->quantization);
    if (!t->present() || validated_elsewhere) continue;
    const bool of_logits = t == &p.lse || t == &p.dlse || t == &p.tlse || t == &p.sinks || t == &p.dsinks ||
                           t == &p.tsinks || t == &p.alibi_slopes || t == &p.dmask;
    if (of_logits) {
      if (t->quantization) invalid(x.label, ": has a quantization, which only q, k and v may have; leave it NULL");
      if (p.precision == OCTET_PRECISION_F64)
        expect_dtype(*t, x.label, {OCTET_F32, OCTET_F64});
      else
        expect_dtype(*t, x.label, {OCTET_F32});
    } else {  // o is an output of the forward pass, whatever this pass reads it for
      validate_plain_dtype(*t, x.label, p.precision, x.output(p.pass) || t == &p.o);
    }
  }
  if (!p.o_residual.present() || p.o_residual.dtype == p.o.dtype) return;
  if (!has_byte_residual(p.o.dtype))
    invalid("o_residual: dtype ", name(p.o_residual.dtype), ", expected that of o, ", name(p.o.dtype));
  if (p.o_residual.dtype != OCTET_I8)
    invalid("o_residual: dtype ", name(p.o_residual.dtype), ", allowed: i8, and that of o, ", name(p.o.dtype));
}

void validate_mask_tensor(Problem& p) {
  if (p.dmask.present() && !p.mask.present()) invalid("dmask: given without mask, to which it belongs");
  if (!p.mask.present()) return;
  if (p.precision == OCTET_PRECISION_F64)
    expect_dtype(p.mask, "mask", {OCTET_BOOL, OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16});
  else
    expect_dtype(p.mask, "mask", {OCTET_BOOL, OCTET_F32, OCTET_F16, OCTET_BF16});
  const int64_t full[4] = {p.batch, p.heads, p.tokens_q, p.tokens_k};
  for (int i = 0; i < 4; ++i) {
    if (p.mask.shape[i] != full[i] && p.mask.shape[i] != 1)
      invalid("mask: shape ", shape_text(p.mask.shape), " does not broadcast to ", shape_text(full));
    if (p.mask.shape[i] == 1) p.mask.stride[i] = 0;
  }
  if (p.dmask.present() && p.mask.dtype == OCTET_BOOL)
    invalid("dmask: given with a mask of bool, which has no gradient; pass NULL");
  if (p.dmask.present()) expect_shape(p.dmask, "dmask", p.mask.shape, "shape of mask");
}

float effective_scale(float scale, int64_t dim) {
  if (scale == 0.f) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  if (!std::isnormal(scale) || scale < 0.f)
    invalid("scale: found ", scale, ", allowed: positive and finite, 1.17549e-38 to 3.40282e+38, or 0 for 1/sqrt(dim)");
  return scale;
}

float validated_softcap(float softcap) {
  if (softcap != 0.f && (!std::isnormal(softcap) || softcap < 0.f))
    invalid("softcap: found ", softcap, ", allowed: positive and finite, 1.17549e-38 to 3.40282e+38, or 0 for none");
  return softcap;
}

void validate_dropout(double probability, Problem& p) {
  constexpr double one = kDropoutOne;
  if (probability != 0.0 && !(probability >= 1.0 / one && probability <= 1.0 - 1.0 / one))
    invalid("dropout_p: found ", probability,
            ", allowed: 0 for none, or 2^-23 to 1 - 2^-23 (1.19209e-07 to 0.99999988)");
  p.dropout = static_cast<uint32_t>(std::nearbyint(probability * one));
  if (!p.dropout_seed.present()) {
    if (p.dropout) invalid("dropout_seed: NULL, but dropout_p is ", probability, "; pass the seed and the offset");
    return;
  }
  if (!p.dropout) invalid("dropout_seed: given without dropout_p, to which it belongs; pass NULL");
  if (p.dropout_seed.quantization)
    invalid("dropout_seed: has a quantization, which only q, k and v may have; leave it NULL");
  expect_dtype(p.dropout_seed, "dropout_seed", {OCTET_I32});
  const bool shared = p.dropout_seed.shape[0] == 1;
  const int64_t shape[4] = {shared ? 1 : p.sequence_count(), 1, 1, 4};
  expect_shape(p.dropout_seed, "dropout_seed", shape,
               p.packed() ? "1 or the packed sequences, 1, 1, 4" : "1 or the batch of q, 1, 1, 4");
  if (p.dropout_seed.stride[3] != 1) invalid("dropout_seed: last stride ", p.dropout_seed.stride[3], ", allowed: 1");
  if (shared) p.dropout_seed.stride[0] = 0;
}

// A count of keys; -1 and counts beyond any sequence: all.
int64_t window_side(int64_t keys) { return keys < 0 ? Problem::kUnbounded : std::min(keys, Problem::kUnbounded); }

void validate_mask(const octet_attention& a, Problem& p) {
  constexpr uint32_t known = OCTET_MASK_CAUSAL | OCTET_MASK_WINDOW;
  if (a.mask & ~known)
    invalid("mask: found ", a.mask, ", allowed: OCTET_MASK_CAUSAL (1) and OCTET_MASK_WINDOW (2) flags");
  const bool causal = a.mask & OCTET_MASK_CAUSAL, window = a.mask & OCTET_MASK_WINDOW;
  if (!window && (a.window_left || a.window_right))
    invalid("window: ", a.window_left, ", ", a.window_right,
            " given without OCTET_MASK_WINDOW; set the flag or leave both 0");
  if (window && (a.window_left < -1 || a.window_right < -1))
    invalid("window: found ", a.window_left, ", ", a.window_right, ", allowed: a count of keys, or -1 for all");
  if (window && causal && a.window_right > 0)
    invalid("window: right ", a.window_right, " contradicts the causal mask; allowed with it: 0 or -1");
  const auto alignment = checked(a.alignment, OCTET_ALIGNMENT_NONE, OCTET_ALIGNMENT_BOTTOM_RIGHT, "alignment");
  p.windowed = causal || window;
  p.bottom_right = alignment == OCTET_ALIGNMENT_BOTTOM_RIGHT;
  p.left = window_side(window ? a.window_left : -1);
  p.right = causal ? 0 : window_side(window ? a.window_right : -1);
  if (!p.windowed && alignment != OCTET_ALIGNMENT_NONE)
    invalid("alignment: ", name(alignment), " given, but neither a causal mask nor a window has a diagonal to align");
  const bool lengths_differ = p.packed() || p.cached() || p.tokens_q != p.tokens_k;
  if (p.windowed && lengths_differ && alignment == OCTET_ALIGNMENT_NONE)
    invalid("alignment: unspecified, but ",
            p.packed()   ? "the sequences are packed"
            : p.cached() ? "seqused_k has the lengths of k"
                         : text(p.tokens_q, " queries meet ", p.tokens_k, " keys"),
            "; name the diagonal of the mask: top-left (query i sees key i) or bottom-right (the last query sees the "
            "last key)");
}

void validate_packing(const octet_arguments& args, Problem& p) {
  const bool in_pages = p.block_table.present();
  if (in_pages && args.cu_seqlens_k)
    invalid("cu_seqlens_k: given with block_table, whose lengths are seqused_k; pass NULL");
  if (!args.cu_seqlens_q != !args.cu_seqlens_k && !in_pages)
    invalid("cu_seqlens: only one of cu_seqlens_q and cu_seqlens_k given; packed sequences need both");
  p.max_seqlen_q = args.max_seqlen_q;
  p.max_seqlen_k = args.max_seqlen_k;
  if (!p.packed()) {
    if (args.max_seqlen_q || (args.max_seqlen_k && !p.cached()))
      invalid("max_seqlen: given without cu_seqlens; leave it 0");
    return;
  }
  if (p.batch != 1) invalid("q: batch ", p.batch, ", but packed sequences (cu_seqlens) have batch 1");
  if (p.mask.present()) invalid("mask: a mask tensor cannot be combined with packed sequences; use causal or window");
  for (const auto& [t, label] : {std::pair{&p.cu_seqlens_q, "cu_seqlens_q"}, {&p.cu_seqlens_k, "cu_seqlens_k"}})
    if (t->present()) expect_cu_seqlens(*t, label);
  if (!in_pages && p.cu_seqlens_q.shape[3] != p.cu_seqlens_k.shape[3])
    invalid("cu_seqlens: ", p.cu_seqlens_q.shape[3] - 1, " sequences of queries, ", p.cu_seqlens_k.shape[3] - 1,
            " of keys; the counts must agree");
  if (p.max_seqlen_q < 0 || p.max_seqlen_k < 0)
    invalid("max_seqlen: found ", p.max_seqlen_q, ", ", p.max_seqlen_k,
            ", allowed: a bound on the lengths, or 0 if unknown");
}

}  // namespace

Problem validate(const octet_attention* given_attention, const octet_arguments* given_arguments) {
  if (!given_attention) invalid("attention: NULL");
  if (!given_arguments) invalid("arguments: NULL");
  const octet_attention a = whole(*given_attention, "octet_attention");
  const octet_arguments args = whole(*given_arguments, "octet_arguments");
  Problem p{};
  p.pass = checked(args.pass, OCTET_FORWARD, OCTET_JVP, "pass");
  p.precision = checked(a.precision, OCTET_PRECISION_F64, kLastPrecision, "precision");
  validate_operands(args, p);
  validate_shapes(p);
  validate_sinks(p);
  validate_dtypes(args, p);
  validate_mask_tensor(p);
  validate_packing(args, p);
  validate_cache(p);
  validate_alibi(p);
  validate_dropout(a.dropout_p, p);
  validate_mask(a, p);
  validate_recipe(a, p);
  p.scale = effective_scale(a.scale, p.dim);
  p.softcap = validated_softcap(a.softcap);
  if (a.tile && !*a.tile) invalid("tile: empty, allowed: NULL or a name that octet_tiles lists");
  p.tile = {a.tile, nullptr, false};
  validate_memory(p);
  return p;
}

void expect_workspace_apart(const Problem& p, const void* workspace, std::size_t bytes) {
  for (const Operand& x : kOperands) expect_no_overlap(workspace, bytes, "workspace", p.*x.view, x.label);
}

}  // namespace octet
