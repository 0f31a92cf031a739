#include "core/problem.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "core/error.h"
#include "core/names.h"

namespace octet {
namespace {

constexpr int64_t kMaxDim = 256;

std::string choices(std::initializer_list<octet_dtype> allowed) {
  std::string out;
  for (octet_dtype d : allowed) out += text(out.empty() ? "" : ", ", name(d));
  return out;
}

template <class Enum>
Enum checked(uint32_t value, Enum last, const char* what) {
  if (value > static_cast<uint32_t>(last)) invalid(what, ": found ", value, ", allowed: 0 to ", static_cast<int>(last));
  return static_cast<Enum>(value);
}

void expect_dtype(const View& t, const char* tensor, std::initializer_list<octet_dtype> allowed) {
  if (std::find(allowed.begin(), allowed.end(), t.dtype) == allowed.end())
    invalid(tensor, ": dtype ", name(t.dtype), ", allowed: ", choices(allowed));
}

void expect_shape(const View& t, const char* tensor, const int64_t (&want)[4], const char* why) {
  if (!std::equal(t.shape, t.shape + 4, want))
    invalid(tensor, ": shape ", shape_text(t.shape), ", expected ", shape_text(want), " (", why, ")");
}

int64_t elements(const View& t) { return t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3]; }

void expect_head_dim(int64_t dim, const char* tensor) {
  if (dim < 8 || dim > kMaxDim || dim % 8)
    invalid(tensor, ": head dim ", dim, ", allowed: a multiple of 8 from 8 to ", kMaxDim);
}

// [first, last) of the bytes a view touches.
struct Extent {
  const char *first, *last;
};

Extent extent(const View& t) {
  int64_t low = 0, high = 0;
  for (int i = 0; i < 4; ++i) {
    const int64_t reach = (t.shape[i] - 1) * t.stride[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto size = static_cast<int64_t>(bytes_of(t.dtype));
  const char* base = static_cast<const char*>(t.data);
  return {base + low * size, base + (high + 1) * size};
}

void expect_no_overlap(const View& out, const char* out_name, const View& other, const char* other_name) {
  if (!out.present() || !other.present() || !elements(out) || !elements(other)) return;
  const Extent a = extent(out), b = extent(other);
  if (a.first >= b.last || b.first >= a.last) return;
  // Tensors interleaved in one buffer (a packed qkv) overlap as ranges but not as elements. They are accepted
  // when they share their strides and start within one row of each other.
  const bool interleaved = std::equal(out.stride, out.stride + 4, other.stride) && out.dtype == other.dtype &&
                           a.first != b.first;
  if (interleaved) {
    const auto size = static_cast<int64_t>(bytes_of(out.dtype));
    const int64_t distance = std::abs(a.first - b.first) / size;
    const int64_t row = std::min(std::abs(out.stride[2]), std::abs(out.stride[1]) ? std::abs(out.stride[1]) : std::abs(out.stride[2]));
    if (distance >= std::max(out.shape[3], other.shape[3]) && distance < std::max<int64_t>(row, std::abs(out.stride[2]))) return;
  }
  invalid(out_name, ": its memory overlaps that of ", other_name, "; outputs must have memory of their own");
}

struct Named {
  const char* label;
  const octet_tensor* tensor;
};

void expect_absent(std::initializer_list<Named> unused, octet_pass pass) {
  for (const Named& t : unused)
    if (t.tensor) invalid(t.label, ": given to a ", name(pass), " pass, which has no use for it; pass NULL");
}

View required(const octet_tensor* tensor, const char* label, bool output, octet_pass pass) {
  if (!tensor) invalid(label, ": NULL, but a ", name(pass), " pass needs it");
  return validate_tensor(tensor, label, output);
}

View optional(const octet_tensor* tensor, const char* label, bool output) {
  return tensor ? validate_tensor(tensor, label, output) : View{};
}

float effective_scale(float scale, int64_t dim) {
  if (scale == 0.f) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  if (!std::isfinite(scale) || scale < 0.f) invalid("scale: found ", scale, ", allowed: positive and finite, or 0 for 1/sqrt(dim)");
  return scale;
}

void validate_mask(const octet_attention& a, Problem& p) {
  constexpr uint32_t known = OCTET_MASK_CAUSAL | OCTET_MASK_WINDOW;
  if (a.mask & ~known) invalid("mask: found ", a.mask, ", allowed: OCTET_MASK_CAUSAL (1) and OCTET_MASK_WINDOW (2) flags");
  const bool causal = a.mask & OCTET_MASK_CAUSAL, window = a.mask & OCTET_MASK_WINDOW;
  if (!window && (a.window_left || a.window_right))
    invalid("window: ", a.window_left, ", ", a.window_right, " given without OCTET_MASK_WINDOW; set the flag or leave both 0");
  if (window && (a.window_left < -1 || a.window_right < -1))
    invalid("window: found ", a.window_left, ", ", a.window_right, ", allowed: a count of keys, or -1 for all");
  if (window && causal && a.window_right > 0)
    invalid("window: right ", a.window_right, " contradicts the causal mask; allowed with it: 0 or -1");
  const auto alignment = checked(a.alignment, OCTET_ALIGNMENT_BOTTOM_RIGHT, "alignment");
  p.windowed = causal || window;
  p.bottom_right = alignment == OCTET_ALIGNMENT_BOTTOM_RIGHT;
  p.left = window && a.window_left >= 0 ? a.window_left : Problem::kUnbounded;
  p.right = causal ? 0 : window && a.window_right >= 0 ? a.window_right : Problem::kUnbounded;
  if (!p.windowed && alignment != OCTET_ALIGNMENT_NONE)
    invalid("alignment: ", name(alignment), " given, but neither a causal mask nor a window has a diagonal to align");
  const bool lengths_differ = p.packed() || p.tokens_q != p.tokens_k;
  if (p.windowed && lengths_differ && alignment == OCTET_ALIGNMENT_NONE)
    invalid("alignment: unspecified, but ", p.packed() ? "the sequences are packed" : text(p.tokens_q, " queries meet ", p.tokens_k, " keys"),
            "; name the diagonal of the mask: top-left (query i sees key i) or bottom-right (the last query sees the last key)");
}

void validate_packing(const octet_arguments& args, Problem& p) {
  if (!args.cu_seqlens_q != !args.cu_seqlens_k)
    invalid("cu_seqlens: only one of cu_seqlens_q and cu_seqlens_k given; packed sequences need both");
  p.cu_seqlens_q = optional(args.cu_seqlens_q, "cu_seqlens_q", false);
  p.cu_seqlens_k = optional(args.cu_seqlens_k, "cu_seqlens_k", false);
  p.max_seqlen_q = args.max_seqlen_q;
  p.max_seqlen_k = args.max_seqlen_k;
  if (!p.packed()) {
    if (args.max_seqlen_q || args.max_seqlen_k) invalid("max_seqlen: given without cu_seqlens; leave it 0");
    return;
  }
  if (p.batch != 1) invalid("q: batch ", p.batch, ", but packed sequences (cu_seqlens) have batch 1");
  if (p.mask.present()) invalid("mask: a mask tensor cannot be combined with packed sequences; use causal or window");
  for (const auto& [t, label] : {std::pair{&p.cu_seqlens_q, "cu_seqlens_q"}, {&p.cu_seqlens_k, "cu_seqlens_k"}}) {
    expect_dtype(*t, label, {OCTET_I32});
    const int64_t n = t->shape[3];
    if (n < 2 || elements(*t) != n || t->stride[3] != 1)
      invalid(label, ": shape ", shape_text(t->shape), " and last stride ", t->stride[3], ", expected [1, 1, 1, sequences + 1], contiguous");
  }
  if (p.cu_seqlens_q.shape[3] != p.cu_seqlens_k.shape[3])
    invalid("cu_seqlens: ", p.cu_seqlens_q.shape[3] - 1, " sequences of queries, ", p.cu_seqlens_k.shape[3] - 1, " of keys; the counts must agree");
  if (p.max_seqlen_q < 0 || p.max_seqlen_k < 0)
    invalid("max_seqlen: found ", p.max_seqlen_q, ", ", p.max_seqlen_k, ", allowed: a bound on the lengths, or 0 if unknown");
}

void validate_inputs(const octet_arguments& args, Problem& p) {
  p.q = required(args.q, "q", false, p.pass);
  p.k = required(args.k, "k", false, p.pass);
  p.v = required(args.v, "v", false, p.pass);
  p.batch = p.q.shape[0], p.heads = p.q.shape[1], p.tokens_q = p.q.shape[2], p.dim = p.q.shape[3];
  p.kv_heads = p.k.shape[1], p.tokens_k = p.k.shape[2], p.dim_v = p.v.shape[3];
  expect_head_dim(p.dim, "q");
  expect_head_dim(p.dim_v, "v");
  expect_shape(p.k, "k", {p.batch, p.kv_heads, p.tokens_k, p.dim}, "batch and dim of q");
  expect_shape(p.v, "v", {p.batch, p.kv_heads, p.tokens_k, p.dim_v}, "batch, heads and tokens of k");
  if (p.heads && (!p.kv_heads || p.heads % p.kv_heads))
    invalid("q: ", p.heads, " heads, which is not a multiple of the ", p.kv_heads, " heads of k and v");
  if (!p.heads && p.kv_heads) p.heads = 0;
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}}) {
    expect_dtype(*t, label, {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3, OCTET_I8});
    if (t->dtype == OCTET_I8 && !t->quantization)
      invalid(label, ": dtype i8 without a quantization; quantise it with octet_quantize, or give f32, f16 or bf16");
    if (t->dtype == OCTET_F64 && p.precision != OCTET_PRECISION_F64)
      invalid(label, ": dtype f64 needs precision f64, found ", name(p.precision));
    if (t->quantization && t->dtype != OCTET_I8 && t->dtype != OCTET_E4M3)
      invalid(label, ": a quantization with dtype ", name(t->dtype), ", allowed: i8, e4m3");
  }
  p.mask = optional(args.mask, "mask", false);
  if (p.mask.present()) {
    expect_dtype(p.mask, "mask", {OCTET_BOOL, OCTET_F32, OCTET_F16, OCTET_BF16});
    const int64_t full[4] = {p.batch, p.heads, p.tokens_q, p.tokens_k};
    for (int i = 0; i < 4; ++i) {
      if (p.mask.shape[i] != full[i] && p.mask.shape[i] != 1)
        invalid("mask: shape ", shape_text(p.mask.shape), " does not broadcast to ", shape_text(full));
      if (p.mask.shape[i] == 1) p.mask.stride[i] = 0;
    }
  }
  if (args.sinks) unsupported("sinks: learnable sinks are not supported; append a key with a zero value instead");
}

octet_dtype output_dtype_limit(const View& t, const char* label, octet_precision precision) {
  if (precision == OCTET_PRECISION_F64)
    expect_dtype(t, label, {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  else if (precision == OCTET_PRECISION_FP8_RAW)
    expect_dtype(t, label, {OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  else
    expect_dtype(t, label, {OCTET_F32, OCTET_F16, OCTET_BF16});
  return t.dtype;
}

void validate_outputs(const octet_arguments& args, Problem& p) {
  const int64_t q_shape[4] = {p.batch, p.heads, p.tokens_q, p.dim};
  const int64_t k_shape[4] = {p.batch, p.kv_heads, p.tokens_k, p.dim};
  const int64_t v_shape[4] = {p.batch, p.kv_heads, p.tokens_k, p.dim_v};
  const int64_t o_shape[4] = {p.batch, p.heads, p.tokens_q, p.dim_v};
  const int64_t lse_shape[4] = {p.batch, p.heads, p.tokens_q, 1};
  const bool backward = p.pass == OCTET_BACKWARD;

  p.o = required(args.o, "o", !backward, p.pass);
  expect_shape(p.o, "o", o_shape, "batch, heads and tokens of q, dim of v");
  output_dtype_limit(p.o, "o", p.precision);
  p.lse = backward ? required(args.lse, "lse", false, p.pass) : optional(args.lse, "lse", true);
  if (p.lse.present()) {
    expect_shape(p.lse, "lse", lse_shape, "batch, heads and tokens of q, 1");
    if (p.precision == OCTET_PRECISION_F64) expect_dtype(p.lse, "lse", {OCTET_F32, OCTET_F64});
    else expect_dtype(p.lse, "lse", {OCTET_F32});
  }
  p.o_residual = optional(args.o_residual, "o_residual", !backward);
  if (p.o_residual.present()) {
    expect_shape(p.o_residual, "o_residual", o_shape, "shape of o");
    if (p.o_residual.dtype != p.o.dtype)
      invalid("o_residual: dtype ", name(p.o_residual.dtype), ", expected that of o, ", name(p.o.dtype));
  }

  const auto like = [&](View& t, const octet_tensor* arg, const char* label, bool output, const int64_t (&shape)[4], const char* why) {
    t = required(arg, label, output, p.pass);
    expect_shape(t, label, shape, why);
    if (output) output_dtype_limit(t, label, p.precision);
    else expect_dtype(t, label, {OCTET_F64, OCTET_F32, OCTET_F16, OCTET_BF16});
    if (t.dtype == OCTET_F64 && p.precision != OCTET_PRECISION_F64)
      invalid(label, ": dtype f64 needs precision f64, found ", name(p.precision));
  };
  switch (p.pass) {
    case OCTET_FORWARD:
      expect_absent({{"do_", args.do_}, {"dq", args.dq}, {"dk", args.dk}, {"dv", args.dv},
                     {"tq", args.tq}, {"tk", args.tk}, {"tv", args.tv}, {"to", args.to}}, p.pass);
      break;
    case OCTET_BACKWARD:
      expect_absent({{"tq", args.tq}, {"tk", args.tk}, {"tv", args.tv}, {"to", args.to}}, p.pass);
      like(p.do_, args.do_, "do", false, o_shape, "shape of o");
      like(p.dq, args.dq, "dq", true, q_shape, "shape of q");
      like(p.dk, args.dk, "dk", true, k_shape, "shape of k");
      like(p.dv, args.dv, "dv", true, v_shape, "shape of v");
      break;
    case OCTET_JVP:
      expect_absent({{"o_residual", args.o_residual}, {"do_", args.do_}, {"dq", args.dq}, {"dk", args.dk}, {"dv", args.dv}}, p.pass);
      like(p.tq, args.tq, "tq", false, q_shape, "shape of q");
      like(p.tk, args.tk, "tk", false, k_shape, "shape of k");
      like(p.tv, args.tv, "tv", false, v_shape, "shape of v");
      like(p.to, args.to, "to", true, o_shape, "shape of o");
      break;
  }
  const std::pair<const View*, const char*> outputs[] = {
      {backward ? nullptr : &p.o, "o"}, {backward ? nullptr : &p.lse, "lse"}, {backward ? nullptr : &p.o_residual, "o_residual"},
      {&p.dq, "dq"}, {&p.dk, "dk"}, {&p.dv, "dv"}, {&p.to, "to"}};
  const std::pair<const View*, const char*> all[] = {
      {&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}, {&p.mask, "mask"}, {&p.o, "o"}, {&p.lse, "lse"}, {&p.o_residual, "o_residual"},
      {&p.do_, "do"}, {&p.dq, "dq"}, {&p.dk, "dk"}, {&p.dv, "dv"}, {&p.tq, "tq"}, {&p.tk, "tk"}, {&p.tv, "tv"}, {&p.to, "to"}};
  for (const auto& [out, out_name] : outputs)
    if (out)
      for (const auto& [other, other_name] : all)
        if (other != out && other->data != nullptr) expect_no_overlap(*out, out_name, *other, other_name);
}

void validate_one_device(const octet_arguments& args, Problem& p) {
  const Named tensors[] = {{"q", args.q}, {"k", args.k}, {"v", args.v}, {"mask", args.mask}, {"cu_seqlens_q", args.cu_seqlens_q},
                           {"cu_seqlens_k", args.cu_seqlens_k}, {"o", args.o}, {"o_residual", args.o_residual}, {"lse", args.lse},
                           {"do", args.do_}, {"dq", args.dq}, {"dk", args.dk}, {"dv", args.dv}, {"tq", args.tq}, {"tk", args.tk},
                           {"tv", args.tv}, {"to", args.to}};
  p.device = static_cast<octet_device>(args.q->device);
  p.device_index = args.q->device_index;
  for (const Named& t : tensors)
    if (t.tensor && (t.tensor->device != args.q->device || t.tensor->device_index != args.q->device_index))
      invalid(t.label, ": on ", name(static_cast<octet_device>(t.tensor->device)), ':', t.tensor->device_index, ", but q is on ",
              name(p.device), ':', p.device_index, "; all tensors of a call live on one device");
}

void validate_recipe(const octet_attention& a, Problem& p) {
  p.remedy = checked(a.remedy, OCTET_REMEDY_PROJECT, "remedy");
  const bool sixteen = p.precision == OCTET_PRECISION_F16 || p.precision == OCTET_PRECISION_BF16;
  if (!sixteen && p.remedy != OCTET_REMEDY_F16_INSIDE)
    invalid("remedy: ", name(p.remedy), " given with precision ", name(p.precision), "; remedies are for f16 and bf16");
  p.beta = a.beta == 0.f ? 2.f : a.beta;
  if (a.beta != 0.f && p.remedy != OCTET_REMEDY_BETA) invalid("beta: ", a.beta, " given with remedy ", name(p.remedy), "; it belongs to remedy beta");
  if (!(p.beta > 1.f && p.beta <= 8.f)) invalid("beta: found ", a.beta, ", allowed: above 1, at most 8, or 0 for 2");
  if (a.softcap != 0.f) unsupported("softcap: found ", a.softcap, "; soft-capped logits are not supported, leave it 0");
  const bool int8_logits = p.precision == OCTET_PRECISION_INT8 || p.precision == OCTET_PRECISION_INT8_F16 || p.precision == OCTET_PRECISION_INT8_FP8;
  const auto hadamard = checked(a.hadamard, OCTET_OFF, "hadamard"), smooth_q = checked(a.smooth_q, OCTET_OFF, "smooth_q");
  if (!int8_logits && (hadamard != OCTET_AUTO || smooth_q != OCTET_AUTO))
    invalid(hadamard != OCTET_AUTO ? "hadamard" : "smooth_q", ": given with precision ", name(p.precision), "; it belongs to int8, int8_f16 and int8_fp8");
  p.hadamard = int8_logits && hadamard != OCTET_OFF;
  p.smooth_q = smooth_q == OCTET_ON;
  if (a.deterministic > 1) invalid("deterministic: found ", a.deterministic, ", allowed: 0, 1");
  p.deterministic = a.deterministic;
  if (a.threads > 4096) invalid("threads: found ", a.threads, ", allowed: 0 (all) to 4096");
  p.threads = a.threads;
  p.rounding = a.rounding;
  if (a.rounding) {
    if (p.precision != OCTET_PRECISION_F64) invalid("rounding: given with precision ", name(p.precision), "; it belongs to precision f64");
    if (a.rounding->size != sizeof(octet_rounding)) invalid("octet_rounding: size ", a.rounding->size, ", expected ", sizeof(octet_rounding));
  }
}

}  // namespace

KeyRange Problem::keys_of(int64_t i, int64_t n, int64_t m) const {
  if (!windowed) return {0, m};
  const int64_t diagonal = i + (bottom_right ? m - n : 0);
  const int64_t first = std::clamp<int64_t>(diagonal - left, 0, m);
  const int64_t last = std::clamp<int64_t>(diagonal + right + 1, 0, m);
  return {first, std::max(first, last)};
}

View validate_tensor(const octet_tensor* t, const char* label, bool output) {
  if (t->size != sizeof(octet_tensor)) invalid(label, ": octet_tensor of size ", t->size, ", expected ", sizeof(octet_tensor));
  if (t->dtype == OCTET_DTYPE_NONE || !bytes_of(static_cast<octet_dtype>(t->dtype)))
    invalid(label, ": unknown dtype ", t->dtype, ", allowed: 1 (f64) to 11 (bool)");
  if (t->device > OCTET_CUDA) invalid(label, ": unknown device ", t->device, ", allowed: 0 (cpu), 1 (cuda)");
  View view;
  view.dtype = static_cast<octet_dtype>(t->dtype);
  view.data = t->data;
  view.quantization = t->quantization;
  bool empty = false;
  __int128 low = 0, high = 0, count = 1;
  for (int i = 0; i < 4; ++i) {
    if (t->shape[i] < 0) invalid(label, ": shape ", shape_text(t->shape), " has a negative dimension");
    empty |= t->shape[i] == 0;
    view.shape[i] = t->shape[i];
    view.stride[i] = t->stride[i];
    count *= t->shape[i];
    if (count > Problem::kUnbounded) invalid(label, ": shape ", shape_text(t->shape), " has more elements than memory can hold");
    const __int128 reach = static_cast<__int128>(t->shape[i] - 1) * t->stride[i];
    (reach < 0 ? low : high) += t->shape[i] ? reach : 0;
    if (output && t->shape[i] > 1 && t->stride[i] == 0)
      invalid(label, ": stride 0 in dimension ", i, "; an output cannot broadcast");
  }
  if (!empty && high - low > Problem::kUnbounded / 8)
    invalid(label, ": strides ", shape_text(t->stride), " reach beyond the address space");
  if (!t->data && !empty) invalid(label, ": null data, but shape ", shape_text(t->shape), " is not empty");
  return view;
}

Problem validate(const octet_attention* a, const octet_arguments* args) {
  if (!a) invalid("attention: NULL");
  if (!args) invalid("arguments: NULL");
  if (a->size != sizeof(octet_attention)) invalid("octet_attention: size ", a->size, ", expected ", sizeof(octet_attention));
  if (args->size != sizeof(octet_arguments)) invalid("octet_arguments: size ", args->size, ", expected ", sizeof(octet_arguments));
  Problem p{};
  p.pass = checked(args->pass, OCTET_JVP, "pass");
  p.precision = checked(a->precision, OCTET_PRECISION_SAGEBWD, "precision");
  if (p.precision == OCTET_PRECISION_NONE)
    invalid("precision: not set, allowed: f64, f32, f16, bf16, int8, int8_f16, int8_fp8, fp8, fp8_raw, sagebwd");
  validate_inputs(*args, p);
  validate_one_device(*args, p);
  validate_packing(*args, p);
  validate_mask(*a, p);
  validate_recipe(*a, p);
  p.scale = effective_scale(a->scale, p.dim);
  validate_outputs(*args, p);
  return p;
}

std::vector<Sequence> sequences(const Problem& p) {
  std::vector<Sequence> out;
  if (!p.packed()) {
    for (int64_t b = 0; b < p.batch; ++b) out.push_back({b, 0, p.tokens_q, 0, p.tokens_k});
    return out;
  }
  const int64_t count = p.cu_seqlens_q.shape[3] - 1;
  const auto* q = static_cast<const int32_t*>(p.cu_seqlens_q.data);
  const auto* k = static_cast<const int32_t*>(p.cu_seqlens_k.data);
  const struct Side {
    const int32_t* cu;
    int64_t total, longest;
    const char* label;
  } sides[] = {{q, p.tokens_q, p.max_seqlen_q, "q"}, {k, p.tokens_k, p.max_seqlen_k, "k"}};
  for (const auto& [cu, total, longest, label] : sides) {
    if (cu[0] != 0 || cu[count] != total)
      invalid("cu_seqlens_", label, ": runs from ", cu[0], " to ", cu[count], ", expected 0 to the ", total, " tokens of ", label);
    for (int64_t s = 0; s < count; ++s) {
      if (cu[s + 1] < cu[s]) invalid("cu_seqlens_", label, ": falls from ", cu[s], " to ", cu[s + 1], " at sequence ", s, "; must ascend");
      if (longest && cu[s + 1] - cu[s] > longest)
        invalid("max_seqlen_", label, ": ", longest, ", but sequence ", s, " has ", cu[s + 1] - cu[s], " tokens");
    }
  }
  for (int64_t s = 0; s < count; ++s) out.push_back({0, q[s], q[s + 1] - q[s], k[s], k[s + 1] - k[s]});
  return out;
}

}  // namespace octet
