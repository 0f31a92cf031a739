#include "support/cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

namespace octet::test {

const char* name(Pass pass) { return pass == Pass::forward ? "forward" : pass == Pass::backward ? "backward" : "jvp"; }

const char* name(Precision precision) {
  static const char* const names[] = {"none",     "f64",      "f32", "f16",     "bf16",   "int8",
                                      "int8_f16", "int8_fp8", "fp8", "fp8_raw", "sagebwd"};
  return names[static_cast<int>(precision)];
}

std::vector<Precision> precisions_of(Pass pass) {
  using enum Precision;
  switch (pass) {
    case Pass::forward:
      return {f32, f16, bf16, int8, int8_f16, int8_fp8, fp8, fp8_raw, sagebwd};
    case Pass::backward:
      return {f32, f16, bf16, int8, fp8, sagebwd};
    case Pass::jvp:
      return {f32, f16, bf16};
  }
  return {};
}

bool is_added(MaskTensor mask) {
  return mask == MaskTensor::bias_f32 || mask == MaskTensor::bias_bf16 || mask == MaskTensor::bias_blocks;
}

double Case::effective_scale() const { return scale ? *scale : 1.0 / std::sqrt(static_cast<double>(dim)); }

namespace {

Values draw_mask(const Case& c, uint64_t seed) {
  const auto full = Shape{c.batch, c.heads, c.tokens_q, c.tokens_k};
  Shape shape = full;
  switch (c.mask) {
    case MaskTensor::none:
      return {};
    case MaskTensor::keys:
      shape = {1, 1, 1, full[3]};
      break;
    case MaskTensor::padding:
    case MaskTensor::left_padding:
      shape = {full[0], 1, 1, full[3]};
      break;
    case MaskTensor::heads:
    case MaskTensor::bias_bf16:
    case MaskTensor::blocks:
      shape[1] = 1;
      break;
    case MaskTensor::blind:
    case MaskTensor::bias_blocks:
      break;
    case MaskTensor::bias_f32:
      shape[0] = 1;
      break;
  }
  Values mask = normal(shape, seed);
  const bool added = is_added(c.mask), blocks = c.mask == MaskTensor::blocks || c.mask == MaskTensor::bias_blocks;
  for_each(shape, [&](int64_t b, int64_t h, int64_t t, int64_t s) {
    double& x = mask.at(b, h, t, s);
    const bool seen = x > -.43;  // two thirds
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    x = added ? seen ? 2.0 * x : kHidden : seen;
    const int64_t kind = (b + h + t / 64 + 3 * (s / 128)) % 4;
    if (blocks && (kind == 0 || (b > 0 && t / 64 == 1)))
      x = added ? kHidden : 0.0;
    else if (blocks && kind < 3)
      x = added ? 0.0 : 1.0;
    if (c.mask == MaskTensor::blind && t % 7 == 3) x = 0.0;
    if (c.mask == MaskTensor::padding) x = s < (b == 2 ? 0 : full[3] - 1 - (b + 1) * full[3] / 5);
    if (c.mask == MaskTensor::left_padding) x = s >= (b + 1) * full[3] / 5;
  });
  return mask;
}

}  // namespace

Inputs draw(const Case& c, uint64_t seed) {
  const auto tensor = [&](const Shape& shape, uint64_t which) {
    return rounded(normal(shape, 100 * seed + which), c.dtype);
  };
  Inputs in;
  in.q = tensor(c.q_shape(), 1);
  in.k = tensor(c.k_shape(), 2);
  in.v = tensor(c.v_shape(), 3);
  in.do_ = tensor(c.o_shape(), 4);
  in.tq = tensor(c.q_shape(), 5);
  in.tk = tensor(c.k_shape(), 6);
  in.tv = tensor(c.v_shape(), 7);
  if (c.kv_layout == Layout::broadcast) {
    for (Values* x : {&in.k, &in.v, &in.tk, &in.tv}) {
      const Values first = slice(*x, 0, 0, 1);
      *x = joined(std::vector<Values>(static_cast<size_t>(c.batch), first), 0);
    }
  }
  const bool added = is_added(c.mask);
  in.mask_dtype = c.mask == MaskTensor::none       ? DType::none
                  : c.mask == MaskTensor::bias_f32 ? DType::f32
                  : added                          ? DType::bf16
                                                   : DType::boolean;
  in.mask = draw_mask(c, 100 * seed + 8);
  if (added) in.mask = rounded(in.mask, in.mask_dtype);
  if (c.sinks != Sinks::none) {
    // About as large as the lse of the keys.
    in.sinks =
        rounded(normal(c.sinks_shape(), 100 * seed + 9, std::log1p(static_cast<double>(c.tokens_k)), 2.0), DType::f32);
    in.tsinks = rounded(normal(c.sinks_shape(), 100 * seed + 10), DType::f32);
    if (c.sinks == Sinks::shared && c.heads > 2)
      in.sinks.at(0, c.heads - 1, 0, 0) = -std::numeric_limits<double>::infinity();
  }
  if (c.alibi != Alibi::none)
    in.alibi_slopes = rounded(normal(c.slopes_shape(), 100 * seed + 12, .06, .08), DType::f32);
  if (c.dropout_p != 0) {
    in.dropout_seed = Values(c.seed_shape());
    for (double& word : in.dropout_seed.data)
      word = static_cast<double>(
          static_cast<int32_t>(0x9e3779b9u * (seed + static_cast<uint64_t>(&word - in.dropout_seed.data.data()) + 1)));
  }
  if (c.dlse) in.dlse = rounded(normal(c.lse_shape(), 100 * seed + 11), DType::f32);
  return in;
}

Attention attention_of(const Case& c, Precision precision, const char* backend) {
  Attention a;
  a.precision = precision;
  a.scale = c.scale;
  a.causal = c.causal;
  a.window = c.window;
  a.alignment = c.alignment;
  a.softcap = c.softcap;
  a.dropout_p = c.dropout_p;
  a.backend = backend;
  return a;
}

namespace {

// The tensors of one call in their layouts.
struct Buffers {
  Buffer q, k, v, mask, sinks, alibi_slopes, dropout_seed, cu_seqlens_q, cu_seqlens_k;  // in
  Buffer do_, dlse, tq, tk, tv, tsinks;                                                 // in
  Buffer o, lse, o_residual, dq, dk, dv, dsinks, dmask, to, tlse;

  struct Named {
    const char* name;
    const Buffer* buffer;
  };
  std::vector<Named> inputs(Pass pass) const {
    std::vector<Named> list = {{"q", &q},
                               {"k", &k},
                               {"v", &v},
                               {"mask", &mask},
                               {"sinks", &sinks},
                               {"alibi_slopes", &alibi_slopes},
                               {"dropout_seed", &dropout_seed},
                               {"do", &do_},
                               {"dlse", &dlse},
                               {"tq", &tq},
                               {"tk", &tk},
                               {"tv", &tv},
                               {"tsinks", &tsinks},
                               {"cu_seqlens_q", &cu_seqlens_q},
                               {"cu_seqlens_k", &cu_seqlens_k}};
    if (pass == Pass::backward) list.insert(list.end(), {{"o", &o}, {"lse", &lse}, {"o_residual", &o_residual}});
    return list;
  }
  std::vector<Named> outputs(Pass pass) const {
    if (pass == Pass::backward) return {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dsinks", &dsinks}, {"dmask", &dmask}};
    if (pass == Pass::jvp) return {{"o", &o}, {"lse", &lse}, {"to", &to}, {"tlse", &tlse}};
    return {{"o", &o}, {"lse", &lse}, {"o_residual", &o_residual}};
  }
};

// A number of f32 as an integer, in which o and its residual in i8 are one number (octet.h).
int64_t bits(double x) { return std::bit_cast<int32_t>(static_cast<float>(x)); }
int64_t residual_unit(DType o) { return o == DType::bf16 ? 1 << 8 : o == DType::f16 ? 1 << 5 : 1 << 12; }

// Residuals as a buffer of the case's type holds them.
Values stored_residual(const Case& c, const Values& o, Values residual) {
  if (c.residual_dtype() != DType::i8) return residual;
  for (size_t i = 0; i < o.data.size(); ++i) {
    if (residual.data[i] == 0.0) continue;  // -0 + 0 is another zero
    const double steps = static_cast<double>(bits(o.data[i] + residual.data[i]) - bits(o.data[i]));
    residual.data[i] = std::clamp(std::nearbyint(steps / static_cast<double>(residual_unit(c.out_dtype))), -127., 127.);
  }
  return residual;
}

Buffers lay_out(const Case& c, const Inputs& in, Precision precision, Pass pass, const Outputs* saved) {
  const bool oracle = precision == Precision::f64;
  const DType dtype = oracle ? DType::f64 : c.dtype, out = oracle ? DType::f64 : c.out_dtype;
  const DType gradient = dtype == DType::e4m3 ? DType::f32 : dtype;  // do and tangents
  const DType lse = oracle ? DType::f64 : DType::f32;
  const Layout layout = oracle ? Layout::bhtd : c.layout, kv = oracle ? Layout::bhtd : c.kv_layout;
  const Layout out_kv = kv == Layout::broadcast ? Layout::bhtd : kv;
  const bool residual =
      !oracle && c.has_residual() && (precision != Precision::int8 || pass != Pass::forward || c.trains_int8);
  Buffers x;
  if (c.interleaved && !oracle) {
    const auto [q, k, v] = interleaved(dtype, c.q_shape());
    x.q = q, x.k = k, x.v = v;
    x.q.set(in.q), x.k.set(in.k), x.v.set(in.v);
  } else {
    x.q = Buffer(in.q, dtype, layout), x.k = Buffer(in.k, dtype, kv), x.v = Buffer(in.v, dtype, kv);
  }
  if (in.mask.present()) x.mask = Buffer(in.mask, in.mask_dtype, in.mask_layout);
  if (in.sinks.present()) x.sinks = Buffer(in.sinks, lse, in.sinks_repeat ? Layout::broadcast : layout);
  if (in.alibi_slopes.present()) x.alibi_slopes = Buffer(in.alibi_slopes, lse, layout);
  if (in.dropout_seed.present()) x.dropout_seed = Buffer(in.dropout_seed, DType::i32);
  const auto cu = [](const std::vector<int32_t>& first) {
    Values values({1, 1, 1, static_cast<int64_t>(first.size())});
    std::copy(first.begin(), first.end(), values.data.begin());
    return Buffer(values, DType::i32);
  };
  if (!c.cu_seqlens_q.empty()) x.cu_seqlens_q = cu(c.cu_seqlens_q), x.cu_seqlens_k = cu(c.cu_seqlens_k);
  x.o = Buffer(out, c.o_shape(), layout);
  x.lse = Buffer(lse, c.lse_shape());
  switch (pass) {
    case Pass::forward:
      if (residual) x.o_residual = Buffer(c.residual_dtype(), c.o_shape(), layout);
      break;
    case Pass::backward:
      x.o.set(saved->o), x.lse.set(saved->lse);
      if (residual && saved->o_residual.present())
        x.o_residual = Buffer(stored_residual(c, saved->o, saved->o_residual), c.residual_dtype(), layout);
      x.do_ = Buffer(in.do_, gradient, layout);
      if (in.dlse.present()) x.dlse = Buffer(in.dlse, lse, layout);
      if (in.sinks.present()) x.dsinks = Buffer(lse, c.sinks_shape(), layout);
      if (c.dmask) x.dmask = Buffer(lse, in.mask.shape, layout);
      if (c.interleaved && !oracle) {
        const auto [dq, dk, dv] = interleaved(out, c.q_shape());
        x.dq = dq, x.dk = dk, x.dv = dv;
      } else {
        x.dq = Buffer(out, c.q_shape(), layout), x.dk = Buffer(out, c.k_shape(), out_kv),
        x.dv = Buffer(out, c.v_shape(), out_kv);
      }
      break;
    case Pass::jvp:
      if (in.tq.present()) x.tq = Buffer(in.tq, gradient, layout);
      if (in.tk.present()) x.tk = Buffer(in.tk, gradient, kv);
      if (in.tv.present()) x.tv = Buffer(in.tv, gradient, kv);
      x.to = Buffer(out, c.o_shape(), layout);
      if (in.sinks.present()) x.tsinks = Buffer(in.tsinks, lse, layout);
      if (in.dlse.present()) x.tlse = Buffer(lse, c.lse_shape(), layout);
      break;
  }
  return x;
}

// Scratch memory full of NaN between guard bytes.
class Scratch {
 public:
  explicit Scratch(size_t bytes) : bytes_(bytes), memory_(bytes + 3 * kGuard, kPattern) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    first_ = kGuard + (64 - address % 64) % 64;
    std::memset(data(), 0xff, bytes);
  }
  void* data() { return memory_.data() + first_; }
  bool damaged() const {
    const auto untouched = [](unsigned char byte) { return byte == kPattern; };
    const auto begin = memory_.begin(), first = begin + static_cast<std::ptrdiff_t>(first_);
    return !std::all_of(begin, first, untouched) ||
           !std::all_of(first + static_cast<std::ptrdiff_t>(bytes_), memory_.end(), untouched);
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr unsigned char kPattern = 0x5a;
  size_t bytes_, first_;
  std::vector<unsigned char> memory_;
};

// Calls f with the arguments of a pass.
template <class F>
void with_arguments(Pass pass, const Buffers& x, Place* place, const F& f) {
  const auto at = [&](const Buffer& b) { return place && b.present() ? place->tensor(b) : b.view(); };
  const Extras extras{.mask = at(x.mask),
                      .sinks = at(x.sinks),
                      .alibi_slopes = at(x.alibi_slopes),
                      .dropout_seed = at(x.dropout_seed),
                      .cu_seqlens_q = at(x.cu_seqlens_q),
                      .cu_seqlens_k = at(x.cu_seqlens_k)};
  switch (pass) {
    case Pass::forward:
      return f(Forward{.q = at(x.q),
                       .k = at(x.k),
                       .v = at(x.v),
                       .o = at(x.o),
                       .lse = at(x.lse),
                       .o_residual = at(x.o_residual),
                       .extras = extras});
    case Pass::backward:
      return f(Backward{.q = at(x.q),
                        .k = at(x.k),
                        .v = at(x.v),
                        .o = at(x.o),
                        .lse = at(x.lse),
                        .do_ = at(x.do_),
                        .dq = at(x.dq),
                        .dk = at(x.dk),
                        .dv = at(x.dv),
                        .o_residual = at(x.o_residual),
                        .dlse = at(x.dlse),
                        .dsinks = at(x.dsinks),
                        .dmask = at(x.dmask),
                        .extras = extras});
    case Pass::jvp:
      return f(Jvp{.q = at(x.q),
                   .k = at(x.k),
                   .v = at(x.v),
                   .tq = at(x.tq),
                   .tk = at(x.tk),
                   .tv = at(x.tv),
                   .o = at(x.o),
                   .to = at(x.to),
                   .lse = at(x.lse),
                   .tsinks = at(x.tsinks),
                   .tlse = at(x.tlse),
                   .extras = extras});
  }
}

void call(const Attention& attention, Pass pass, const Buffers& x, Place* place) {
  with_arguments(pass, x, place, [&](const auto& arguments) {
    const size_t bytes = workspace_size(attention, arguments);
    bool damaged = false;
    if (place) {
      octet::run(attention, arguments, place->workspace(bytes), bytes, place->stream());
      damaged = place->finish();
    } else {
      Scratch scratch(bytes);
      octet::run(attention, arguments, scratch.data(), bytes);
      damaged = scratch.damaged();
    }
    EXPECT_FALSE(damaged) << "wrote beyond its workspace of " << bytes << " bytes";
  });
}

}  // namespace

Values residual_of(const Case& c, const Values& o, const Buffer& o_residual) {
  Values residual = o_residual.values();
  if (!o_residual.present() || c.residual_dtype() != DType::i8) return residual;
  for (size_t i = 0; i < o.data.size(); ++i) {
    if (residual.data[i] == 0.0) continue;  // inf - inf is none
    const int64_t whole = bits(o.data[i]) + static_cast<int64_t>(residual.data[i]) * residual_unit(c.out_dtype);
    residual.data[i] = static_cast<double>(std::bit_cast<float>(static_cast<int32_t>(whole))) - o.data[i];
  }
  return residual;
}

Outputs run(const Case& c, const Inputs& in, const Attention& attention, Pass pass, const Outputs* saved,
            Place* place) {
  const Buffers x = lay_out(c, in, attention.precision, pass, saved);
  std::vector<std::vector<unsigned char>> before;
  for (const auto& input : x.inputs(pass))
    before.push_back(input.buffer->present() ? input.buffer->bytes() : std::vector<unsigned char>());
  call(attention, pass, x, place);
  for (size_t i = 0; i < before.size(); ++i) {
    const auto input = x.inputs(pass)[i];
    if (!input.buffer->present()) continue;
    EXPECT_TRUE(input.buffer->bytes() == before[i]) << input.name << ": an input was modified";
  }
  for (const auto& output : x.outputs(pass)) EXPECT_EQ(output.buffer->damage(), "") << output.name;
  Outputs out;
  out.o = x.o.values(), out.lse = x.lse.values(), out.o_residual = residual_of(c, out.o, x.o_residual);
  out.dq = x.dq.values(), out.dk = x.dk.values(), out.dv = x.dv.values(), out.dsinks = x.dsinks.values(),
  out.dmask = x.dmask.values();
  out.to = x.to.values(), out.tlse = x.tlse.values();
  return out;
}

std::string explained(const Case& c, const Inputs& in, const Attention& attention, Pass pass, Place* place) {
  const Buffers x = lay_out(c, in, attention.precision, pass, nullptr);
  std::string text;
  with_arguments(pass, x, place, [&](const auto& arguments) { text = explain(attention, arguments); });
  return text;
}

std::vector<std::string> tiles_of(const Case& c, const Inputs& in, const Attention& attention, Pass pass,
                                  Place* place) {
  const Outputs zeros{.o = Values(c.o_shape()), .lse = Values(c.lse_shape()), .o_residual = Values(c.o_shape())};
  const Buffers x = lay_out(c, in, attention.precision, pass, &zeros);
  std::vector<std::string> names;
  with_arguments(pass, x, place, [&](const auto& arguments) {
    const auto answer = nlohmann::json::parse(tiles(attention, arguments));
    for (const auto& tile : answer.at("tiles")) names.push_back(tile.at("tile"));
  });
  return names;
}

std::string why_rejected(const Case& c, const Inputs& in, const Attention& attention, Pass pass, Place* place) {
  const Outputs zeros{.o = Values(c.o_shape()), .lse = Values(c.lse_shape()), .o_residual = Values(c.o_shape())};
  const Buffers x = lay_out(c, in, attention.precision, pass, &zeros);
  try {
    with_arguments(pass, x, place, [&](const auto& arguments) { workspace_size(attention, arguments); });
    return {};
  } catch (const Error& error) {
    if (error.status() != OCTET_UNSUPPORTED) throw;
    return error.what();
  }
}

Outputs exact(const Case& c, const Inputs& in, Pass pass) {
  const Attention oracle = attention_of(c, Precision::f64, "reference");
  if (pass != Pass::backward) return run(c, in, oracle, pass);
  const Outputs forward = run(c, in, oracle, Pass::forward);
  return run(c, in, oracle, Pass::backward, &forward);
}

namespace {

// The terms of an element of dmask, and a bound on the sum of their probabilities.
struct SumsOfDmask {
  int64_t terms;
  double probabilities;
};

SumsOfDmask sums_of_dmask(const Case& c, const Inputs& in, double column_sum) {
  const auto summed = [&](size_t dimension, int64_t size) { return in.mask.shape[dimension] == 1 ? size : 1; };
  const int64_t batch = summed(0, c.batch), heads = summed(1, c.heads), queries = summed(2, c.tokens_q),
                keys = summed(3, c.tokens_k);
  const bool columns = in.mask.shape[2] == 1 && in.mask.shape[3] != 1;
  const int64_t groups = summed(1, c.kv_heads);
  return {batch * heads * queries * keys,
          columns ? static_cast<double>(batch * groups) * column_sum : static_cast<double>(batch * heads * queries)};
}

}  // namespace

// With u = 2^-24, s the number of sigmas, |x| the largest row norm of x (so |q_i . k_j| and the sum of its terms'
// magnitudes are at most |q| |k|), max x the largest element, S = scale |q| |k| and B the largest finite bias:
//
//   logits      err by    e_s = s sqrt(d) u S
//   P           relative  e_p = 2 e_s (itself and its row sum) + 2 u (S + B) (argument of exp) + 4 u (exp, 1 / l)
//   o           max v (e_p + 2 s sqrt(m) u)                       as the rows of P sum to 1, twice for both sums
//   lse         e_s + s sqrt(m) u + u |lse| <= e_s + s sqrt(m) u + u (S + B + ln m)
//   dP, delta   each s sqrt(e) u G, G = |do| |v|, both at most G
//   dS = P (dP - delta)  P times e_ds = 2 G e_p + 2 s sqrt(e) u G
//   dq          scale max k (e_ds + 2 G s sqrt(m) u)
//   dk, dv      sum over queries: C = column_sum, the largest of P over the group's queries; n their number
//               scale max q C (e_ds + 2 G s sqrt(n) u);  max do C (e_p + s sqrt(n) u)
//   tS          e_t = s sqrt(2 d) u T, T = scale (|tq| |k| + |q| |tk|), at most T; minus its mean at most 2 T
//   to          max v (2 T e_p + 2 e_t + 4 T s sqrt(m) u) + max tv (e_p + s sqrt(m) u)
//
// A sink counts in B as a logit. It multiplies o and to by the keys' share of the probabilities, exp(lse of the keys -
// lse), which errs by as much as lse does; its own probability errs by e_p. With D the largest |dlse| and |tsink| in T:
//
//   dS          P times e_ds = (2 G + D) (e_p + u) + 2 s sqrt(e) u G; where a mean was taken from k, a row's sum of dS,
//               at most G + D, meets max k once more, and errs by e_ds
//   dsinks      sum over N queries (of the whole batch where it shares its sinks) of probabilities of at most 1 times
//   e_ds tlse        2 T e_p + e_t + 2 T s sqrt(m) u, and in to once more times max v
//
// ALiBi counts in B by its largest number, which errs by u B, and e_s with it. A softcap c adds 8 u min(S, c) to e_s,
// and its derivative, at most 1, errs by e_c = e_s / c + 8 u, as tanh'' is below 1: e_ds grows by (2 G + D) e_c, e_t by
// T e_c. Rows of dS then have any sum, as with D.
//
// An element of dmask is a sum of dS over the dimensions that the mask broadcasts: with N their elements and C the
// largest sum of their probabilities it errs by C (e_ds + (2 G + D) s sqrt(N) u). P is at most 1, its rows are at most
// 1, and its columns at most column_sum over a group's heads.
//
// With dropout the elements of P that meet v and do, and dP, are divided by 1 - p: o, to, dv and G with them.
Noise f32_noise(const Case& c, const Inputs& in, double column_sum, double sigmas) {
  const double u = 0x1p-24;
  const auto sum_of = [&](int64_t n) { return sigmas * std::sqrt(static_cast<double>(std::max<int64_t>(n, 1))) * u; };
  const double scale = c.effective_scale(), m = sum_of(c.tokens_k), n = sum_of(c.tokens_q * c.heads / c.kv_heads);
  const auto largest_finite = [](const Values& values) {
    double largest = 0.0;
    for (double x : values.data) largest = std::max(largest, std::isfinite(x) ? std::fabs(x) : 0.0);
    return largest;
  };
  const bool sinks = in.sinks.present(), capped = c.softcap != 0, unbalanced = sinks || in.dlse.present() || capped;
  const double alibi = largest_finite(in.alibi_slopes) * static_cast<double>(std::max(c.tokens_q, c.tokens_k));
  const double bias = std::max(largest_finite(in.mask), largest_finite(in.sinks)) + alibi;
  const double logit = scale * largest_row(in.q) * largest_row(in.k);
  const double e_s = sum_of(c.dim) * logit + u * alibi + (capped ? 8 * u * std::min<double>(logit, c.softcap) : 0.0);
  const double e_c = capped ? e_s / c.softcap + 8 * u : 0.0;
  const double e_p = 2 * e_s + 2 * u * (logit + bias) + 4 * u;
  Noise noise;
  noise.o = largest(in.v) * (e_p + 2 * m);
  noise.lse = e_s + m + u * (logit + bias + std::log1p(static_cast<double>(c.tokens_k)));
  if (sinks) noise.o += largest(in.v) * noise.lse;
  const double kept = c.dropout_scale(), g = kept * largest_row(in.do_) * largest_row(in.v), dlse = largest(in.dlse);
  const double e_ds = 2 * g * e_p + dlse * (e_p + u) + 2 * sum_of(c.dim_v) * g + (2 * g + dlse) * e_c;
  noise.dq = scale * largest(in.k) * ((unbalanced ? 2 : 1) * e_ds + (capped ? 2 : 1) * (2 * g + dlse) * m);
  noise.dk = scale * largest(in.q) * column_sum * (e_ds + (2 * g + dlse) * n);
  noise.dsinks = static_cast<double>(c.tokens_q * (c.sinks == Sinks::shared ? c.batch : 1)) * e_ds;
  if (c.dmask) {
    const auto [terms, probabilities] = sums_of_dmask(c, in, column_sum);
    noise.dmask = probabilities * (e_ds + (2 * g + dlse) * sum_of(terms));
  }
  noise.dv = kept * largest(in.do_) * column_sum * (e_p + n);
  const double t = std::max(largest(in.tsinks),
                            scale * (largest_row(in.tq) * largest_row(in.k) + largest_row(in.q) * largest_row(in.tk)));
  const double e_t = (sum_of(2 * c.dim) + e_c) * t;
  noise.to = largest(in.v) * (2 * t * e_p + 2 * e_t + 4 * t * m) + largest(in.tv) * (e_p + m);
  noise.tlse = 2 * t * e_p + e_t + 2 * t * m;
  noise.o *= kept, noise.to *= kept;
  if (sinks) noise.to += kept * (largest(in.v) * (noise.tlse + 2 * t * (e_p + noise.lse)) + largest(in.tv) * noise.lse);
  return noise;
}

// dv of a do of ones, of which nothing is dropped.
double largest_column_sum(const Case& given, const Inputs& in) {
  Inputs ones = in;
  Case c = given;
  c.dropout_p = 0, ones.dropout_seed = Values();
  ones.do_ = Values(in.do_.shape, 1.0);
  return largest(exact(c, ones, Pass::backward).dv);
}

}  // namespace octet::test
