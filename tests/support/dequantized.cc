#include "support/dequantized.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <octet/formats.hpp>

#include "support/quantizing.h"
#include "support/seen.h"

namespace octet::test {
namespace {

constexpr uint64_t kHadamardSeed = 0x6f63746574;  // of attention itself: "octet"
constexpr int64_t kKeyBlock = 64, kQueryBlock = 128;

// How the numbers of an operand become codes.
struct Coding {
  DType codes = DType::none;  // none: they stay as they are
  octet_granularity granularity = OCTET_PER_TOKEN;
  int64_t block = 0;
  bool cast = false;  // no scale
};

// docs/numerics.md, Forward.
struct Operands {
  Coding q, k, v;
  bool smooth_k = true, smooth_v = false, hadamard = false;
};

Operands operands_of(const Case& c, const Attention& a) {
  const Coding int8{DType::i8}, e4m3{DType::e4m3}, raw{.codes = DType::e4m3, .cast = true};
  const Coding channels{DType::e4m3, OCTET_PER_CHANNEL}, keys{DType::i8, OCTET_PER_BLOCK, kKeyBlock};
  const bool rotates = a.hadamard != Switch::off;
  switch (a.precision) {
    case Precision::int8:
      return {int8, int8, int8, true, true, rotates};
    case Precision::int8_f16:
      return {int8, int8, {}, true, false, rotates};
    case Precision::int8_fp8:
      return {int8, {DType::i8, OCTET_PER_THREAD}, channels, true, false, rotates};
    case Precision::fp8:  // q and k of e4m3 are codes already
      return c.dtype == DType::e4m3 ? Operands{{}, {}, channels, false} : Operands{e4m3, e4m3, channels};
    case Precision::fp8_raw:
      return {raw, raw, raw, false};
    default:
      return {{DType::i8, OCTET_PER_BLOCK, kQueryBlock}, keys, keys};
  }
}

// The numbers of the codes of rows in float32. The public quantizers have the arithmetic of attention, bit by bit.
Values coded(const Values& rows, const Coding& how, octet_operand operand, uint64_t seed) {
  if (how.codes == DType::none || rows.data.empty()) return rows;
  if (how.cast) return rounded(rows, how.codes);
  quantizing::Array x(DType::f32, rows.shape);
  for_each(rows.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) { x.set(b, h, t, c, rows.at(b, h, t, c)); });
  const auto codes = quantizing::quantized(x, {.codes = how.codes,
                                               .operand = operand,
                                               .granularity = how.granularity,
                                               .block = how.block,
                                               .seed = seed,
                                               .statistics = false});
  Values out(rows.shape);
  for_each(rows.shape,
           [&](int64_t b, int64_t h, int64_t t, int64_t c) { out.at(b, h, t, c) = codes->value(b, h, t, c); });
  return out;
}

// Consecutive tokens of a sequence.
struct Span {
  int64_t batch, first, count;

  Values of(const Values& x) const { return slice(slice(x, 0, batch, batch + 1), 2, first, first + count); }
};

std::vector<Span> spans_of(int64_t batch, const std::vector<int32_t>& cu_seqlens, int64_t tokens) {
  std::vector<Span> list;
  if (cu_seqlens.empty())
    for (int64_t b = 0; b < batch; ++b) list.push_back({b, 0, tokens});
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s)
    list.push_back({0, cu_seqlens[s], cu_seqlens[s + 1] - cu_seqlens[s]});
  return list;
}

// Rows of a span in the order in which blocks count them, and back.
Values in_order(const Values& rows, const std::vector<int64_t>& order, bool back) {
  Values out(rows.shape);
  for_each(rows.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    const int64_t at = order[static_cast<size_t>(t)];
    back ? out.at(b, h, at, c) = rows.at(b, h, t, c) : out.at(b, h, t, c) = rows.at(b, h, at, c);
  });
  return out;
}

enum class MeanFormat { f32, f16 };

// The means over the seen ones of each `block` rows, [1 h blocks c]. Takes them from seen rows; the others become 0.
Values take_means(Values& rows, const Values& seen, int64_t block, MeanFormat format) {
  const int64_t tokens = rows.shape[2], blocks = (tokens + block - 1) / block;
  Values means({1, rows.shape[1], blocks, rows.shape[3]});
  for (int64_t h = 0; h < rows.shape[1]; ++h)
    for (int64_t n = 0; n < blocks; ++n) {
      const int64_t first = n * block, last = std::min(tokens, first + block);
      double count = 0.0, most = 0.0;
      for (int64_t t = first; t < last; ++t) count += seen.at(0, h, t, 0);
      for (int64_t c = 0; c < rows.shape[3]; ++c) {
        double& mean = means.at(0, h, n, c);
        for (int64_t t = first; t < last; ++t) mean += seen.at(0, h, t, 0) * rows.at(0, h, t, c);
        mean = static_cast<float>(mean / std::max(count, 1.0)), most = std::max(most, std::fabs(mean));
      }
      // f16 with a power of two that brings the largest number of the mean to [2^13, 2^14).
      const int exponent = most > 0.0 ? std::ilogb(most) - 13 : 0;
      for (int64_t c = 0; c < rows.shape[3]; ++c) {
        double& mean = means.at(0, h, n, c);
        if (format == MeanFormat::f16) mean = std::ldexp(round_to(kF16, std::ldexp(mean, -exponent)), exponent);
        for (int64_t t = first; t < last; ++t) {
          double& x = rows.at(0, h, t, c);
          x = seen.at(0, h, t, 0) == 0.0 ? 0.0 : static_cast<float>(static_cast<float>(x) - static_cast<float>(mean));
        }
      }
    }
  return means;
}

void hide_unseen(Values& rows, const Values& seen) {
  for_each(rows.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    if (seen.at(b, h, t, 0) == 0.0) rows.at(b, h, t, c) = 0.0;
  });
}

double amax(const Values& x, int64_t b, int64_t h, int64_t t) {
  double most = 0.0;
  for (int64_t c = 0; c < x.shape[3]; ++c) most = std::max(most, std::fabs(x.at(b, h, t, c)));
  return most;
}

// The same of the rows of the block of `block` rows that row t lies in.
double amax_of_block(const Values& x, int64_t h, int64_t t, int64_t block) {
  double most = 0.0;
  for (int64_t i = t / block * block; i < std::min(x.shape[2], t / block * block + block); ++i)
    most = std::max(most, amax(x, 0, h, i));
  return most;
}

double dot(const Values& x, int64_t xh, int64_t xt, const Values& y, int64_t yh, int64_t yt) {
  double sum = 0.0;
  for (int64_t c = 0; c < x.shape[3]; ++c) sum += x.at(0, xh, xt, c) * y.at(0, yh, yt, c);
  return sum;
}

// The channels of the case that `dequantized` makes.
struct Channels {
  int64_t dim, means, queries, all;  // of codes; the first of means of k, the first of means of q; a multiple of 8

  Channels(int64_t dim, int64_t blocks, bool smooth_q)
      : dim(dim), means(dim), queries(dim + blocks), all((queries + (smooth_q ? dim : 0) + 7) / 8 * 8) {}
};

}  // namespace

bool in_8_bits(Precision p) {
  using enum Precision;
  return p == int8 || p == int8_f16 || p == int8_fp8 || p == fp8 || p == fp8_raw || p == sagebwd;
}

// With q = q' + q_mean and k = k' + k_mean and codes of q' and k', a logit is codes . codes + q_mean . k' + q . k_mean.
Dequantized dequantized(const Case& c, const Inputs& in, const Attention& a, Pass pass, KeyOrder places) {
  const Operands how = operands_of(c, a);
  const bool backward = pass == Pass::backward, int8_backward = backward && a.precision == Precision::int8;
  const SeenTokens seen = seen_tokens(c, in);
  const bool on_cpu = a.backend && std::strcmp(a.backend, "cpu") == 0, smooth_q = a.smooth_q == Switch::on;
  const int64_t group = c.kv_heads ? c.heads / c.kv_heads : 1;
  const std::vector<Span> q_spans = spans_of(c.batch, c.cu_seqlens_q, c.tokens_q),
                          k_spans = spans_of(c.batch, c.cu_seqlens_k, c.tokens_k);
  Dequantized x{.c = c, .in = in};
  x.trains_int8 = a.precision == Precision::int8 && c.trains_int8 && c.has_residual() && !on_cpu;
  const int64_t key_block = x.trains_int8 || int8_backward ? kKeyBlock : std::max<int64_t>(c.tokens_k, 1);
  const int64_t blocks = how.smooth_k ? (c.tokens_k + key_block - 1) / key_block : 0;
  const Channels channels(c.dim, blocks, smooth_q);
  const double scale = c.effective_scale();
  x.c.dim = channels.all, x.c.scale = 1.f;
  x.in.q = Values(x.c.q_shape()), x.in.k = Values(x.c.k_shape());
  x.logit_noise = Values(c.lse_shape());
  if (backward) x.q_dk = Values(c.q_shape()), x.k_dq = Values(c.k_shape()), x.do_dv = Values(c.o_shape());
  if (how.v.codes == DType::i8) x.v_scale = x.v_code_norm = Values({c.batch, c.kv_heads, c.tokens_k, 1});

  for (size_t s = 0; s < k_spans.size(); ++s) {
    const Span &qs = q_spans[s], &ks = k_spans[s];
    std::vector<int64_t> order(static_cast<size_t>(ks.count));
    std::iota(order.begin(), order.end(), 0);
    if (places == KeyOrder::seen_first)
      std::stable_partition(order.begin(), order.end(),
                            [&](int64_t t) { return seen.keys.at(ks.batch, 0, ks.first + t, 0) != 0.0; });
    const Values q_seen = qs.of(seen.queries), k_seen = in_order(ks.of(seen.keys), order, false);
    Values q = qs.of(in.q), k = in_order(ks.of(in.k), order, false), v = in_order(ks.of(in.v), order, false);
    Values d_o = qs.of(in.do_);
    const Values given_q = q, given_k = k, given_v = v;
    Values k_means, q_means, v_means;
    if (how.smooth_k) k_means = take_means(k, k_seen, key_block, x.trains_int8 ? MeanFormat::f16 : MeanFormat::f32);
    if (smooth_q) q_means = take_means(q, q_seen, kQueryBlock, MeanFormat::f32);
    if (how.smooth_v) v_means = take_means(v, k_seen, std::max<int64_t>(ks.count, 1), MeanFormat::f32);
    hide_unseen(q, q_seen), hide_unseen(k, k_seen), hide_unseen(v, k_seen), hide_unseen(d_o, q_seen);
    const uint64_t seed = how.hadamard ? kHadamardSeed : 0;
    const Values q_codes = coded(q, how.q, OCTET_OPERAND_Q, seed), k_codes = coded(k, how.k, OCTET_OPERAND_K, seed),
                 v_codes = coded(v, how.v, OCTET_OPERAND_V, 0);
    // The other operand of dp is v. At sagebwd neither is coded, and do of dv is.
    const Values do_codes = !backward       ? d_o
                            : int8_backward ? coded(d_o, {DType::i8}, OCTET_OPERAND_Q, 0)
                                            : coded(d_o, {DType::i8, OCTET_PER_BLOCK, kKeyBlock}, OCTET_OPERAND_Q, 0);
    const double unit = std::max(largest_row(k_codes), 1e-30);  // keeps the norms of further channels with the others
    x.largest_product = std::max(x.largest_product, scale * largest(q_codes) * largest(k_codes));

    for_each({1, c.kv_heads, ks.count, 1}, [&](int64_t, int64_t g, int64_t place, int64_t) {
      const int64_t token = ks.first + order[static_cast<size_t>(place)];
      for (int64_t i = 0; i < c.dim; ++i) {
        x.in.k.at(ks.batch, g, token, i) = k_codes.at(0, g, place, i);
        if (smooth_q) x.in.k.at(ks.batch, g, token, channels.queries + i) = k.at(0, g, place, i);
      }
      if (how.smooth_k) x.in.k.at(ks.batch, g, token, channels.means + place / key_block) = unit;
      for (int64_t i = 0; i < c.dim_v; ++i)
        x.in.v.at(ks.batch, g, token, i) =
            backward && !int8_backward ? given_v.at(0, g, place, i)
                                       : v_codes.at(0, g, place, i) + (how.smooth_v ? v_means.at(0, g, 0, i) : 0.0);
      for (int64_t i = 0; i < c.dim && backward; ++i)
        x.k_dq.at(ks.batch, g, token, i) =
            scale * (int8_backward ? given_k.at(0, g, place, i)
                                   : k_codes.at(0, g, place, i) + k_means.at(0, g, place / key_block, i));
      if (!x.v_scale.present()) return;
      // The largest number of what shares a scale has the largest code.
      const double step = amax_of_block(v_codes, g, place, std::max<int64_t>(how.v.block, 1)) / 127;
      x.v_scale.at(ks.batch, g, token, 0) = step;
      if (step > 0.0)
        x.v_code_norm.at(ks.batch, g, token, 0) = std::sqrt(dot(v_codes, g, place, v_codes, g, place)) / step;
    });
    for_each({1, c.heads, qs.count, 1}, [&](int64_t, int64_t h, int64_t t, int64_t) {
      const int64_t token = qs.first + t, g = h / group;
      double noise = 0.0;
      for (int64_t i = 0; i < c.dim; ++i) {
        x.in.q.at(qs.batch, h, token, i) = scale * q_codes.at(0, h, t, i);
        if (smooth_q)
          x.in.q.at(qs.batch, h, token, channels.queries + i) = scale * q_means.at(0, h, t / kQueryBlock, i);
      }
      for (int64_t i = 0; i < c.dim && backward; ++i)
        x.q_dk.at(qs.batch, h, token, i) = scale * (int8_backward ? given_q : q_codes).at(0, h, t, i);
      for (int64_t i = 0; i < c.dim_v && backward; ++i) {
        x.in.do_.at(qs.batch, h, token, i) = (int8_backward ? do_codes : d_o).at(0, h, t, i);
        x.do_dv.at(qs.batch, h, token, i) = (int8_backward ? d_o : do_codes).at(0, h, t, i);
      }
      for (int64_t n = 0; n < k_means.shape[2]; ++n) {
        x.in.q.at(qs.batch, h, token, channels.means + n) = scale * dot(given_q, h, t, k_means, g, n) / unit;
        // q of f16 meets the means of blocks.
        double square = 0.0;
        for (int64_t i = 0; i < c.dim; ++i) square += std::pow(given_q.at(0, h, t, i) * k_means.at(0, g, n, i), 2);
        if (x.trains_int8) noise = std::max(noise, 6 * 0x1p-11 * scale * std::sqrt(square));
      }
      // Means that a GPU sums in float32 may move a number of q to the next code.
      if (smooth_q) noise += scale * amax(q_codes, 0, h, t) / 127 * largest(k_codes);
      x.logit_noise.at(qs.batch, h, token, 0) = noise;
    });
  }
  return x;
}

// Products with operands of their own are those of further channels, which add nothing to logits and dp: with
// q = [q, q_dk, 0] and k = [k, 0, k_dq], dq = ds k and dk = ds^T q; with v = [v, 0] and do = [do, do_dv], dv = p^T do.
Outputs exact(const Dequantized& x, Pass pass) {
  if (pass != Pass::backward) return exact(x.c, x.in, pass);
  const auto zeros = [](const Values& like) { return Values(like.shape); };
  const auto beside = [](std::vector<Values> parts) { return joined(parts, 3); };
  Case c = x.c;
  Inputs in = x.in;
  const int64_t first = c.dim, dim = x.q_dk.shape[3], dim_v = c.dim_v;
  c.dim = first + 2 * dim, c.dim_v = 2 * dim_v;
  in.q = beside({x.in.q, x.q_dk, zeros(x.q_dk)}), in.k = beside({x.in.k, zeros(x.k_dq), x.k_dq});
  in.v = beside({x.in.v, zeros(x.in.v)}), in.do_ = beside({x.in.do_, x.do_dv});
  Outputs out = exact(c, in, pass);
  out.o = slice(out.o, 3, 0, dim_v);
  out.dq = slice(out.dq, 3, first + dim, c.dim), out.dk = slice(out.dk, 3, first, first + dim);
  out.dv = slice(out.dv, 3, dim_v, c.dim_v);
  return out;
}

}  // namespace octet::test
