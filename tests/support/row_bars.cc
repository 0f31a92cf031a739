#include "support/row_bars.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <sstream>

#include "support/seen.h"

namespace octet::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kF32 = 0x1p-24, kF16 = 0x1p-11, kBf16 = 0x1p-8, kE4m3 = 0x1p-4;  // unit roundoffs
constexpr double kSigmas = 6.0;

// The norm of a sum of vectors of which each errs by at most its bound, independently and with mean 0: no more than all
// bounds together, and with probability 1 - 2 exp(-kSigmas^2 / 2) no more than kSigmas times the root of the sum of
// their squares (Pinelis, Optimum bounds for the distributions of martingales in Banach spaces, 1994).
class Errors {
 public:
  void add(double bound) { sum_ += bound, squares_ += bound * bound; }
  double sum() const { return sum_; }
  double random() const { return std::min(sum_, kSigmas * root()); }
  double root() const { return std::sqrt(squares_); }

 private:
  double sum_ = 0.0, squares_ = 0.0;
};

double unit_of(DType type) {
  return type == DType::bf16 ? kBf16 : type == DType::f16 ? kF16 : type == DType::e4m3 ? kE4m3 : kF32;
}
// The largest error of numbers that are too small for the type.
double least_of(DType type) { return type == DType::f16 ? 0x1p-25 : type == DType::e4m3 ? 0x1p-10 : 0x1p-126; }

// What a precision rounds: relative errors, and absolute ones where numbers may be too small for f16.
struct Roundings {
  double p = 0.0, p_least = 0x1p-126;  // P, whose largest is 1
  double l = p, l_least = p_least;     // P in the sum l
  double codes = 0.0;                  // P and ds in integers: the largest of them, which stands for that of a tile
  double dp = 0.0;                     // do and v of dp, both together
  double ds = 0.0, ds_least = 0.0;     // ds; at jvp h. ds_least: of the largest |do| |v| + |dlse| where `ds_scaled`
  double centred = 0.0;                // v or k less its mean, as f16
  bool ds_scaled = false, ds_of_heads = false;      // ds_of_heads: see ds_least_of_heads
  double exp2 = 0.0;                                // of the polynomial, relative
  bool recomputed = false;                          // the backward pass finds lse and delta itself
  bool truncated_qk = false, truncated_pv = false;  // sums of e4m3 products that keep 13 bits
};

constexpr double kExp2 = 3.5e-6;  // of the polynomial

// P is f16 times 2^7 or 2^15, and ds is f16 times 2^a where 2^a (|do| |v| + ...) >= 2^13.
constexpr Roundings kF16Training{
    .p = kF16, .p_least = 0x1p-32, .ds = kF16, .ds_least = 0x1p-38, .centred = kF16, .ds_scaled = true, .exp2 = kExp2};

Roundings roundings_of(const Attention& a, Pass pass) {
  const bool f16 = a.precision == Precision::f16;
  if (!f16 && a.precision != Precision::bf16) return {};
  // P is at least exp(-4) where bias correction beta moves the maximum of f16.
  const double plain_least = f16 ? (a.bias_correction == BiasCorrection::beta ? 0x1p-19 : 0x1p-25) : 0x1p-126;
  const double u = f16 ? kF16 : kBf16;
  const Roundings r{.p = u, .p_least = plain_least, .ds = u, .ds_least = f16 ? 0x1p-25 : 0.0, .exp2 = kExp2};
  if (pass == Pass::jvp || a.bias_correction != BiasCorrection::f16) return r;
  return kF16Training;  // tests keep o in f32, or its residual
}

// Returns true if the tensor cores of a backend multiply e4m3: those of sm90, and in sm80 if OCTET_E4M3_PRODUCTS is 1.
bool multiplies_e4m3(const std::string& backend) {
  const char* const wanted = std::getenv("OCTET_E4M3_PRODUCTS");
  return backend == "sm90" || (backend == "sm80" && wanted && std::string(wanted) == "1");
}

// Passes of 8 bits (docs/numerics.md). The CPU's exponentials of 8-bit P are polynomials, or f16 arithmetic,
// whose l adds eight numbers in f16. A GPU rounds P of e4m3 where its largest is 448, or on Hopper 56 and more.
Roundings roundings_of(const Dequantized& x, const Attention& a, Pass pass) {
  const std::string backend = a.backend;
  const bool cpu = backend == "cpu", sm90 = backend == "sm90", truncates = multiplies_e4m3(backend);
  if (pass == Pass::backward && a.precision == Precision::int8) {
    Roundings r = kF16Training;
    r.ds_of_heads = !cpu, r.recomputed = cpu;
    return r;
  }
  if (pass == Pass::backward) return {.codes = 127.0, .dp = 2 * kF16, .exp2 = kExp2};
  const Roundings f16{.p = kF16, .p_least = 0x1p-25, .centred = kF16, .exp2 = kExp2};
  const Roundings integers{.p = cpu ? 2 * kF16 : 0.0,
                           .p_least = cpu ? 0x1p-24 : 0x1p-126,
                           .l = cpu ? 8 * kF16 : 0.0,
                           .codes = a.precision == Precision::sagebwd ? 127.0 : 255.0,
                           .exp2 = cpu ? 1e-3 : kExp2};
  switch (a.precision) {
    case Precision::int8:
      return x.trains_int8 ? f16 : integers;
    case Precision::int8_f16:
      return f16;
    case Precision::sagebwd:
      return integers;
    case Precision::fp8_raw:
      return {.p = kE4m3,
              .p_least = 0x1p-10,
              .l = 0.0,
              .l_least = 0x1p-126,
              .exp2 = kExp2,
              .truncated_qk = truncates,
              .truncated_pv = truncates};
    default:
      return {.p = kE4m3,
              .p_least = 0x1p-10 / (sm90 ? 56 : 448),
              .exp2 = kExp2,
              .truncated_qk = truncates && a.precision == Precision::fp8,
              .truncated_pv = truncates};
  }
}

double row_norm(const Values& x, int64_t b, int64_t h, int64_t t) {
  double square = 0.0;
  for (int64_t c = 0; c < x.shape[3]; ++c) square += x.at(b, h, t, c) * x.at(b, h, t, c);
  return std::sqrt(square);
}

std::vector<double> row_norms(const Values& x, int64_t b, int64_t h) {
  std::vector<double> norms;
  for (int64_t t = 0; t < x.shape[2]; ++t) norms.push_back(row_norm(x, b, h, t));
  return norms;
}

double largest_of(const std::vector<double>& list) {
  return list.empty() ? 0.0 : *std::max_element(list.begin(), list.end());
}

double dot(const Values& x, int64_t xh, int64_t xt, const Values& y, int64_t yh, int64_t yt, int64_t b) {
  const double *const u = x.data.data() + x.index(b, xh, xt, 0), *const v = y.data.data() + y.index(b, yh, yt, 0);
  double sum = 0.0;
  for (int64_t c = 0; c < x.shape[3]; ++c) sum += u[c] * v[c];
  return sum;
}

double largest_finite(const Values& x) {
  double most = 0.0;
  for (const double value : x.data)
    if (std::isfinite(value)) most = std::max(most, std::fabs(value));
  return most;
}

size_t at(int64_t i) { return static_cast<size_t>(i); }

// What a GPU's ds may lose to the range of f16. Heads that share k and v have one power of two, by a bound of
// |dp - delta + dlse|: D V, with D the largest of what a row has for |do|, sqrt(|do|_1 |do|_inf), and V that of v,
// which stands for |o|, and sqrt(d) |v|_inf. Both are rounded up to powers of two, whose product is 2^e; with dlse 2^e
// is twice the larger of this product and a power of two above |dlse|. With 2^15 P and four bits of room, ds times
// 2^(11 - e) is rounded, and numbers that are small for f16 lose up to 2^-25.
double ds_least_of_heads(const Case& c, const Inputs& in, const Values& d_o, int64_t b, int64_t g) {
  const auto power_above = [](double x) { return x > 0.0 ? std::exp2(std::ilogb(x) + 1) : 0.0; };
  double most_size = 0.0, most = 0.0;
  const auto measure = [&](const Values& x, int64_t first_head, int64_t heads) {
    most_size = most = 0.0;
    for (int64_t h = first_head; h < first_head + heads; ++h)
      for (int64_t t = 0; t < x.shape[2]; ++t) {
        double sum = 0.0, largest = 0.0;
        for (int64_t channel = 0; channel < x.shape[3]; ++channel)
          sum += std::fabs(x.at(b, h, t, channel)), largest = std::max(largest, std::fabs(x.at(b, h, t, channel)));
        most_size = std::max(most_size, std::sqrt(sum * largest)), most = std::max(most, largest);
      }
  };
  const int64_t group = c.heads / c.kv_heads;
  measure(d_o, g * group, group);
  const double of_do = power_above(most_size);
  measure(in.v, g, 1);
  double bound = of_do * power_above(most_size + std::sqrt(static_cast<double>(c.dim_v)) * most);
  if (in.dlse.present()) {
    measure(in.dlse, g * group, group);
    if (most > 0.0) bound = 2 * std::max(bound, power_above(most));
  }
  return 0x1p-36 * bound;
}

// The logits of one head and what they are made of.
class Logits {
 public:
  Logits(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t g) : c_(c), in_(in), b_(b), h_(h), g_(g) {
    if (in.mask.present()) mask_ = largest_finite(in.mask);
    if (in.alibi_slopes.present())
      alibi_ = largest_finite(in.alibi_slopes) * static_cast<double>(std::max(c.tokens_q, c.tokens_k));
  }

  struct Logit {
    double s, slope;  // slope: of the softcap
  };
  // -inf if query i does not see key j.
  Logit operator()(int64_t i, int64_t j) const {
    if (!sees(c_, in_, b_, h_, i, j)) return {-kInfinity, 0.0};
    double s = c_.effective_scale() * dot(in_.q, h_, i, in_.k, g_, j, b_), slope = 1.0;
    if (c_.softcap != 0) {
      const double tanh = std::tanh(s / c_.softcap);
      s = c_.softcap * tanh, slope = 1.0 - tanh * tanh;
    }
    const Values &mask = in_.mask, &slopes = in_.alibi_slopes;
    if (mask.present() && in_.mask_dtype != DType::boolean) {
      const auto in_mask = [&](size_t dimension, int64_t index) { return mask.shape[dimension] == 1 ? 0 : index; };
      s += mask.at(in_mask(0, b_), in_mask(1, h_), in_mask(2, i), in_mask(3, j));
    }
    if (slopes.present()) {
      const Relative place = relative(c_, b_, i, j);
      s -=
          slopes.at(slopes.shape[0] == 1 ? 0 : place.slopes, h_, 0, 0) * std::fabs(static_cast<double>(place.distance));
    }
    return {s, slope};
  }

  // Errors of float32: of the products, and of the logits and their exponential, as in f32_noise.
  double product(double size) const { return 5 * std::sqrt(static_cast<double>(c_.dim)) * kF32 * size; }
  double logit(double size) const {
    return product(size) + kF32 * (alibi_ + mask_) +
           (c_.softcap != 0 ? 8 * kF32 * std::min<double>(size, c_.softcap) : 0);
  }
  double p(double size) const { return 2 * logit(size) + 2 * kF32 * (size + mask_ + alibi_ + sink_) + 4 * kF32; }
  void set_sink(double sink) { sink_ = std::isfinite(sink) ? std::fabs(sink) : 0.0; }
  double largest(double size) const { return size + mask_ + alibi_ + sink_; }

 private:
  const Case& c_;
  const Inputs& in_;
  int64_t b_, h_, g_;
  double mask_ = 0.0, alibi_ = 0.0, sink_ = 0.0;
};

// A key that a query sees.
struct Key {
  int64_t j;
  double w, slope, product;  // product: do v of the backward pass, ts of the jvp
};

// What 8 bits add to the errors of a row.
struct EightBitErrors {
  Errors p;           // of o: P in integers
  double lse = 0.0;   // of l, relative
  double sums = 0.0;  // of P v, relative
};

EightBitErrors errors_of_codes(const Dequantized& x, const Roundings& u, int64_t b, int64_t g,
                               const std::vector<Key>& keys) {
  EightBitErrors errors;
  double most_w = 0.0, most_wt = 0.0;
  for (const Key& key : keys) {
    most_w = std::max(most_w, key.w);
    if (u.codes != 0.0) most_wt = std::max(most_wt, key.w * x.v_scale.at(b, g, key.j, 0));
    if (u.truncated_pv) errors.lse += std::min(key.w, 0x1p-13);
  }
  for (const Key& key : keys)
    if (u.codes != 0.0) errors.p.add(most_wt / (2 * u.codes) * x.v_code_norm.at(b, g, key.j, 0));
  // Means that a GPU sums in float32 may move a number of two keys to the next code.
  if (x.trains_int8) errors.lse += 2 * most_w * x.largest_product / 127;
  if (u.truncated_pv)
    errors.sums = kSigmas * 0x1p-13 * std::sqrt(33.0 * std::ceil(static_cast<double>(keys.size()) / 32));
  return errors;
}

// The bars of all rows of a head together, row by row.
class HeadBars {
 public:
  // `lse`, `o`: what is no independent error of P; `p`: the root of the sum of squares of those of o.
  void add(double l, const Errors& w, double lse, double p, double o) {
    lse_.add(l * w.root()), lse_sum_ += l * w.sum(), rest_of_lse_ += lse;
    p_.add(p), largest_p_ = std::max(largest_p_, p), rest_of_o_.add(o);
  }
  // What a row adds to `lse_` is the root of the squares of its errors, which their sum may exceed.
  double lse(bool same_p) const {
    return (same_p ? lse_sum_ : std::min(lse_sum_, kSigmas * lse_.root())) + rest_of_lse_;
  }
  double o() const { return p_.root() + 2 * kSigmas * largest_p_ + rest_of_o_.root(); }

 private:
  Errors lse_, p_, rest_of_o_;
  double lse_sum_ = 0.0, rest_of_lse_ = 0.0, largest_p_ = 0.0;
};

// The rounding of P and ds to integers, of which the largest stands for that of a tile: at most that of the head.
struct TileErrors {
  TileErrors(int64_t queries, int64_t keys) : dq(at(queries)), dk(at(keys)), dv(at(keys)) {}
  // `ds` and the norms of what it and P are multiplied by.
  void add(const Key& key, double ds, size_t row, double k, double q, double d_o) {
    largest_p = std::max(largest_p, key.w), largest_ds = std::max(largest_ds, ds);
    dq[row].add(k), dk[at(key.j)].add(q), dv[at(key.j)].add(d_o);
  }

  std::vector<Errors> dq, dk, dv;  // of numbers that err by at most 1
  double largest_p = 0.0, largest_ds = 0.0;
};

// For each row, with w the probabilities, |x| norms of rows, u the unit roundoff of P and ds, e the relative error of P
// that float32 makes (of one sign within a row, so that no squares are taken), R the norm of a sum of independent
// errors (Errors), and f = 5 sqrt(n) 2^-24 the error of a sum of n products in float32:
//
//   o       u (R(w |v|) + R(w) |o|) + e (sum w |v| + |o|) + f sum w |v|; with bias correction f16 also the rounding of
//           v less a mean, which is no longer than the longest v
//   lse     u R(w) + the error of a logit + f + 2^-24 (|lse| + the largest term of a logit)
//   to      h = p (ts - z), where z is a mean of ts, so |ts - z| <= A = |ts| + max |ts|:
//           u (2 R(w A |v|) + R(w |tv|) + 2 R(w A) |o| + R(w) sum w (A |v| + |tv|)) + sum w A times that of o
//   tlse    u (2 R(w A) + R(w) max A)
//   dv      2 u R(w |do|) + sum (|eta| + e) w |do|, eta: the error of the lse that the forward pass saved
//   dq, dk  scale times: 2 u R(|ds| |k'|) + sum ((|eta| + e) |ds| + w Delta) |k'|, where |k'| is |k| and that of a
//   mean,
//           Delta the error of delta: that of the saved o, and of do v, delta and the softcap's slope in float32. With
//           gproj also lambda, the error of a row's sum of ds. Where k is centred, the sum of a row with a sink,
//           dlse - p_z (dlse - delta), meets the mean and errs by p_z (Delta + (|eta| + e) |dlse - delta|) + 2^-24
//           |dlse|
//   dsinks  sum of p_z, the sink's probability, times (Delta + lambda + (|eta| + e) |dlse - delta|)
//   dmask   of each element the sum over what the mask broadcasts of (|eta| + e + f) |ds| + w Delta, where ds is not
//           rounded and lacks the softcap's slope
//
// A sink's share of the probabilities errs as lse does. Probabilities below 2^-126 may be 0. Outputs are rounded once
// more.
//
// In 8 bits q, k, v and do are the numbers of codes (dequantized.h). What remains is the rounding of P and ds:
//
//   P in integers up to T    each number errs by half a unit. In a forward pass that is at most max w t / 2 T of the
//                            largest w t of the row, where t is the scale of a token of v: R(|codes of v|) times that.
//                            With ds in sagebwd's gradients it is half a unit of a tile, at most max w / 2 T and
//                            max |ds| / 2 T of the head
//   P of e4m3                u = 2^-4, which is coarse beside a key among many. So the rows of a head also have bars as
//                            a whole: the sum of the errors of lse, of independent errors again, and the norm of those
//                            of o. Its mean is at most the root of the sum of squares, and with probability 1 -
//                            exp(-18) it exceeds that by no more than 12 times the largest of a row, as a convex
//                            function of bounded independent numbers (Boucheron, Lugosi, Massart, Concentration
//                            inequalities, 2013, theorem 6.10)
//   sums of e4m3 on Hopper   33 terms at a time lose what is 2^-13 of the largest of them
//                            (docs/kernels/forward_8bit.md)
RowBars bars_of(const Case& c, const Inputs& in, const Attention& a, Pass pass, const Outputs& want,
                const Outputs& saved, const Roundings& u, const Dequantized* coded) {
  const int64_t n = c.tokens_q, m = c.tokens_k, group = c.kv_heads ? c.heads / c.kv_heads : 1;
  const double scale = c.effective_scale(), u_out = unit_of(c.out_dtype), least = least_of(c.out_dtype);
  // Rounding to a residual in i8, which has eight bits whatever the type of o, loses 2^-8 of what rounding to o may
  // lose, but twice as much at a tie, where the residual saturates; and all numbers of a row may be ties.
  const double u_residual = c.residual_dtype() == DType::i8 ? 0x1p-7 : u_out;
  const auto f32_sum = [](int64_t terms) {
    return 5 * std::sqrt(static_cast<double>(std::max<int64_t>(terms, 1))) * kF32;
  };
  const auto written = [&](double error, double norm, int64_t dim) {
    return error + u_out * (norm + error) + std::sqrt(static_cast<double>(dim)) * least;
  };
  // A saturated softcap gives many keys of a row the same P, and so the same rounding.
  const auto total = [&](const Errors& x) { return c.softcap != 0 ? x.sum() : x.random(); };
  const bool gproj = a.bias_correction == BiasCorrection::gproj && u.p != 0.0;
  const bool backward = pass == Pass::backward, coded_gradients = coded && backward;
  const Values &q_dk = coded_gradients ? coded->q_dk : in.q, &k_dq = coded_gradients ? coded->k_dq : in.k,
               &do_dv = coded_gradients ? coded->do_dv : in.do_;
  RowBars bars;
  bars.o = bars.o_whole = bars.lse = bars.dq = bars.to = bars.tlse = Values(c.lse_shape());
  bars.dk = bars.dv = Values({c.batch, c.kv_heads, m, 1});
  if (coded && !backward) bars.o_of_head = bars.lse_of_head = Values({c.batch, c.heads, 1, 1});
  if (in.sinks.present()) bars.dsinks = Values(c.sinks_shape());
  Values dmask;  // of each element
  if (c.dmask) dmask = Values(in.mask.shape);
  const auto in_mask = [&](size_t dimension, int64_t i) { return in.mask.shape[dimension] == 1 ? 0 : i; };

  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t g = 0; g < c.kv_heads; ++g) {
      const std::vector<double> k = row_norms(k_dq, b, g), v = row_norms(in.v, b, g), tk = row_norms(in.tk, b, g),
                                tv = row_norms(in.tv, b, g);
      const double most_k = largest_of(k), most_v = largest_of(v), most_tk = largest_of(tk),
                   most_logit_k = largest_of(row_norms(in.k, b, g));
      const double ds_least_of_gpu = u.ds_of_heads ? ds_least_of_heads(c, in, do_dv, b, g) : 0.0;
      std::vector<Errors> dk_random(at(m)), dv_random(at(m));
      std::vector<double> dk_known(at(m)), dv_known(at(m));
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        Logits logits(c, in, b, h, g);
        const double sink = in.sinks.present() ? in.sinks.at(c.sinks == Sinks::shared ? 0 : b, h, 0, 0) : -kInfinity;
        logits.set_sink(sink);
        const std::vector<double> q = row_norms(q_dk, b, h), d_o = row_norms(do_dv, b, h), tq = row_norms(in.tq, b, h),
                                  o = row_norms(want.o, b, h);
        const double most_ds = largest_of(d_o) * most_v + 2 * largest_finite(in.dlse);
        HeadBars of_head;
        TileErrors of_tiles(coded_gradients ? n : 0, coded_gradients ? m : 0);
        const double ds_least =
            std::max(u.ds_least * (u.ds_scaled ? most_ds : 1.0) + 0x1p-126 * 2 * most_ds, ds_least_of_gpu);
        for (int64_t i = 0; i < n; ++i) {
          const size_t row = at(i);
          const double lse = want.lse.at(b, h, i, 0), size = scale * row_norm(in.q, b, h, i) * most_logit_k;
          if (lse == -kInfinity) continue;  // sees nothing: zeros
          const double noise = coded ? coded->logit_noise.at(b, h, i, 0) : 0.0,
                       e = logits.p(size) + kF32 * std::fabs(lse) + u.exp2 + 2 * noise;
          std::vector<Key> keys;
          double delta = 0.0, most_t = 0.0, most_s = 0.0;
          for (int64_t j = 0; j < m; ++j) {
            const auto [s, slope] = logits(i, j);
            if (s == -kInfinity) continue;
            most_s = std::max(most_s, std::fabs(s));
            Key key{j, std::exp(s - lse), slope, 0.0};
            if (backward) {
              key.product = dot(in.do_, h, i, in.v, g, j, b);
              delta += key.w * key.product;
            } else if (pass == Pass::jvp) {
              key.product = scale * slope * (dot(in.tq, h, i, in.k, g, j, b) + dot(in.q, h, i, in.tk, g, j, b));
              most_t = std::max(most_t, std::fabs(key.product));
            }
            keys.push_back(key);
          }
          Errors w, wv, centred;
          double values = 0.0;
          for (const Key& key : keys) {
            w.add(key.w), wv.add(key.w * v[at(key.j)]), centred.add(key.w * (v[at(key.j)] + most_v));
            values += v[at(key.j)];
          }
          double p = u.p, l = u.l;
          if (u.truncated_qk) {
            const double lost = 0x1p-13 * std::sqrt(33.0 * std::ceil(static_cast<double>(c.dim) / 32)) *
                                std::max(coded->largest_product, most_s);
            p += lost, l += lost;
          }
          const EightBitErrors of_codes =
              coded && !backward ? errors_of_codes(*coded, u, b, g, keys) : EightBitErrors{};
          const double e_lse = l * total(w) + logits.logit(size) + u.exp2 + f32_sum(m) +
                               static_cast<double>(m) * u.l_least + kF32 * (std::fabs(lse) + logits.largest(size)) +
                               noise + of_codes.lse;
          const double of_p = p * (total(wv) + total(w) * o[row]) + total(of_codes.p);
          const double e_o = of_p + u.centred * total(centred) +
                             (e + e_lse * (std::isfinite(sink) ? 1.0 : 0.0)) * (wv.sum() + o[row]) +
                             f32_sum(m) * 2 * wv.sum() + u.p_least * values + of_codes.lse * (wv.sum() + o[row]) +
                             of_codes.sums * wv.sum();
          bars.o.at(b, h, i, 0) = written(e_o, o[row], c.dim_v);
          if (coded && !backward)
            of_head.add(l, w, e_lse - l * total(w),
                        c.softcap != 0 ? of_p : p * (wv.root() + w.root() * o[row]) + of_codes.p.root(),
                        bars.o.at(b, h, i, 0) - of_p);
          bars.o_whole.at(b, h, i, 0) =
              e_o + u_out * u_residual * o[row] + 2 * std::sqrt(static_cast<double>(c.dim_v)) * least;
          bars.lse.at(b, h, i, 0) = e_lse;

          const double capped = c.softcap != 0 ? logits.logit(size) / c.softcap + 8 * kF32 : 0.0;
          if (pass == Pass::jvp) {
            const double t = scale * (tq[row] * most_k + q[row] * most_tk), e_t = (f32_sum(2 * c.dim) + capped) * t;
            const double ttop =
                in.tsinks.present() ? std::fabs(in.tsinks.at(c.sinks == Sinks::shared ? 0 : b, h, 0, 0)) : 0.0;
            Errors wa, wav, wtv;
            double tangents = 0.0;
            for (const Key& key : keys) {
              const double size_of = std::fabs(key.product) + std::max(most_t, ttop);
              wa.add(key.w * size_of), wav.add(key.w * size_of * v[at(key.j)]), wtv.add(key.w * tv[at(key.j)]);
              tangents += tv[at(key.j)];
            }
            const double terms = wav.sum() + wtv.sum();
            const double e_to = u.p * (2 * total(wav) + total(wtv) + 2 * total(wa) * o[row] + total(w) * terms) +
                                (wa.sum() + 2 * e_t) * e_o + 2 * e * (terms + wa.sum() * o[row]) +
                                2 * e_t * (wv.sum() + o[row]) + 3 * f32_sum(m) * (terms + wa.sum() * o[row]) +
                                (std::isfinite(sink) ? e_lse * (terms + 2 * wa.sum() * o[row]) : 0.0) +
                                u.p_least * ((1 + most_t) * (values + static_cast<double>(m) * o[row]) + tangents);
            bars.to.at(b, h, i, 0) = written(e_to, row_norm(want.to, b, h, i), c.dim_v);
            bars.tlse.at(b, h, i, 0) = u.p * (2 * total(wa) + total(w) * (most_t + ttop)) + 2 * e_t +
                                       (2 * e + 3 * f32_sum(m) + e_lse) * (wa.sum() + most_t + ttop) +
                                       u.p_least * static_cast<double>(m) * (1 + most_t);
          }
          if (!backward) continue;

          const double dlse = in.dlse.present() ? in.dlse.at(b, h, i, 0) : 0.0;
          const double eta = (u.recomputed ? f32_sum(m) : std::fabs(std::expm1(lse - saved.lse.at(b, h, i, 0)))) + e;
          double of_saved = 0.0;
          const bool whole =
              a.bias_correction == BiasCorrection::f16 || a.bias_correction == BiasCorrection::exact_delta;
          for (int64_t channel = 0; channel < c.dim_v; ++channel) {
            double x = saved.o.at(b, h, i, channel);
            if (whole && saved.o_residual.present()) x += saved.o_residual.at(b, h, i, channel);
            of_saved += in.do_.at(b, h, i, channel) * x;
          }
          const double e_dp = 2 * f32_sum(c.dim_v) * d_o[row] * (most_v + o[row]) + kF32 * std::fabs(dlse) +
                              capped * (d_o[row] * (most_v + o[row]) + std::fabs(dlse)) +
                              u.dp * d_o[row] * (most_v + o[row]);
          const double of_delta = (u.recomputed ? 2 * eta * d_o[row] * most_v : std::fabs(of_saved - delta)) + e_dp;
          Errors ds, dsk;
          double wk = 0.0, lost_k = 0.0;
          for (const Key& key : keys) {
            const double x = key.w * std::fabs(key.product - delta + dlse) * key.slope,
                         centred_k = k[at(key.j)] + most_k;
            // Rounding loses no more than the number itself.
            const double lost = std::min(ds_least, x * (1 + eta) + of_delta * key.w);
            ds.add(x), dsk.add(x * centred_k), wk += key.w * centred_k, lost_k += lost * centred_k;
            if (c.dmask) {
              const double of_logit = key.w * std::fabs(key.product - delta + dlse);
              dmask.at(in_mask(0, b), in_mask(1, h), in_mask(2, i), in_mask(3, key.j)) +=
                  (eta + f32_sum(c.batch * c.heads * n * m)) * of_logit + of_delta * key.w + 0x1p-126 * 2 * most_ds;
            }
            dk_random[at(key.j)].add(x * q[row]);
            dv_random[at(key.j)].add(key.w * d_o[row]);
            if (coded_gradients)
              of_tiles.add(key, x * (1 + eta) + of_delta * key.w, row, k[at(key.j)], q[row], d_o[row]);
            dk_known[at(key.j)] += (eta * x + of_delta * key.w + lost) * q[row];
            dv_known[at(key.j)] += (eta * key.w + u.p_least) * d_o[row];
          }
          const double of_sink = std::isfinite(sink) ? std::exp(sink - lse) : 0.0;
          const double e_sink =
              of_sink * (of_delta + (eta + f32_sum(n * c.batch)) * (std::fabs(delta) + std::fabs(dlse)));
          // The exact lambda is 0.
          const double lambda = gproj ? of_delta + u.ds * total(ds) + eta * ds.sum() + e_sink : 0.0;
          for (const Key& key : keys) dk_known[at(key.j)] += lambda * (1 + u.p) * key.w * q[row];
          const double e_sum = coded || u.centred != 0.0 ? e_sink + kF32 * std::fabs(dlse) : 0.0;
          const double e_dq = scale * (2 * u.ds * total(dsk) + eta * dsk.sum() + (of_delta + lambda * (1 + u.p)) * wk +
                                       lost_k + 2 * f32_sum(m) * dsk.sum() + e_sum * most_k);
          bars.dq.at(b, h, i, 0) = written(e_dq, row_norm(want.dq, b, h, i), c.dim);
          if (in.sinks.present())
            bars.dsinks.at(c.sinks == Sinks::shared ? 0 : b, h, 0, 0) += e_sink + of_sink * lambda;
        }
        if (bars.o_of_head.present())
          bars.o_of_head.at(b, h, 0, 0) = of_head.o(), bars.lse_of_head.at(b, h, 0, 0) = of_head.lse(c.softcap != 0);
        if (coded_gradients && u.codes != 0.0) {
          const double p = of_tiles.largest_p / (2 * u.codes), ds = of_tiles.largest_ds / (2 * u.codes);
          for (int64_t i = 0; i < n; ++i) bars.dq.at(b, h, i, 0) += (1 + u_out) * ds * total(of_tiles.dq[at(i)]);
          for (int64_t j = 0; j < m; ++j)
            dk_known[at(j)] += ds * total(of_tiles.dk[at(j)]), dv_known[at(j)] += p * total(of_tiles.dv[at(j)]);
        }
      }
      if (!backward) continue;
      const std::vector<double> dk = row_norms(want.dk, b, g), dv = row_norms(want.dv, b, g);
      for (int64_t j = 0; j < m; ++j) {
        const Errors &k_errors = dk_random[at(j)], &v_errors = dv_random[at(j)];
        bars.dk.at(b, g, j, 0) =
            written(scale * (2 * u.ds * total(k_errors) + dk_known[at(j)] + 2 * f32_sum(n * group) * k_errors.sum()),
                    dk[at(j)], c.dim);
        bars.dv.at(b, g, j, 0) = written(
            2 * u.p * total(v_errors) + dv_known[at(j)] + 2 * f32_sum(n * group) * v_errors.sum(), dv[at(j)], c.dim_v);
      }
    }
  for (double& bar : bars.dsinks.data) bar += 0x1p-126;
  if (c.dmask) bars.dmask = Values({dmask.shape[0], dmask.shape[1], dmask.shape[2], 1});
  for_each(dmask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    double& bar = bars.dmask.at(b, h, i, 0);
    bar = std::hypot(bar, dmask.at(b, h, i, j) + 0x1p-126);
  });
  return bars;
}

// Says which head's rows differ from `want` by more than they may together; empty if none does.
std::string wrong_head(const Outputs& got, const Outputs& want, const RowBars& bars) {
  std::ostringstream out;
  for_each(bars.o_of_head.shape, [&](int64_t b, int64_t h, int64_t, int64_t) {
    double square = 0.0, sum = 0.0;
    for (int64_t t = 0; t < want.lse.shape[2]; ++t) {
      const double g = got.lse.at(b, h, t, 0), w = want.lse.at(b, h, t, 0);
      if (g != w) sum += g - w;
      for (int64_t c = 0; c < got.o.shape[3]; ++c) square += std::pow(got.o.at(b, h, t, c) - want.o.at(b, h, t, c), 2);
    }
    const double o = bars.o_of_head.at(b, h, 0, 0), lse = bars.lse_of_head.at(b, h, 0, 0);
    if (!(std::sqrt(square) <= o) || !(std::fabs(sum) <= lse))
      out << "head [" << b << ", " << h << "]: all rows of o err by " << std::sqrt(square) << ", allowed " << o
          << "; errors of lse sum to " << sum << ", allowed " << lse << "; ";
  });
  return out.str();
}

}  // namespace

RowBars row_bars(const Case& c, const Inputs& in, const Attention& a, Pass pass, const Outputs& want,
                 const Outputs& saved) {
  return bars_of(c, in, a, pass, want, saved, roundings_of(a, pass), nullptr);
}

RowBars row_bars(const Dequantized& x, const Attention& a, Pass pass, const Outputs& want, const Outputs& saved) {
  return bars_of(x.c, x.in, a, pass, want, saved, roundings_of(x, a, pass), &x);
}

std::string wrong_row(const Outputs& got, const Outputs& want, const RowBars& bars, Pass pass) {
  const Values whole =
      got.o_residual.present() && pass == Pass::forward ? combined(1, got.o, 1, got.o_residual) : Values();
  struct Compared {
    const char* name;
    const Values *got, *want, *bars;
  };
  std::vector<Compared> list;
  if (pass == Pass::backward)
    list = {{"dq", &got.dq, &want.dq, &bars.dq},
            {"dk", &got.dk, &want.dk, &bars.dk},
            {"dv", &got.dv, &want.dv, &bars.dv},
            {"dsinks", &got.dsinks, &want.dsinks, &bars.dsinks},
            {"dmask", &got.dmask, &want.dmask, &bars.dmask}};
  else
    list = {{"o", &got.o, &want.o, &bars.o},
            {"lse", &got.lse, &want.lse, &bars.lse},
            {"o + o_residual", &whole, &want.o, &bars.o_whole},
            {"to", &got.to, &want.to, &bars.to},
            {"tlse", &got.tlse, &want.tlse, &bars.tlse}};
  for (const Compared& x : list) {
    if (!x.got->present()) continue;
    const Shape& shape = x.want->shape;
    for (int64_t b = 0; b < shape[0]; ++b)
      for (int64_t h = 0; h < shape[1]; ++h)
        for (int64_t t = 0; t < shape[2]; ++t) {
          double square = 0.0;
          for (int64_t channel = 0; channel < shape[3]; ++channel) {
            const double g = x.got->at(b, h, t, channel), w = x.want->at(b, h, t, channel);
            if (g != w) square += (g - w) * (g - w);
          }
          if (std::sqrt(square) <= x.bars->at(b, h, t, 0)) continue;
          std::ostringstream out;
          out << x.name << ", row [" << b << ", " << h << ", " << t << "]: errs by " << std::sqrt(square)
              << ", allowed " << x.bars->at(b, h, t, 0) << "; channel 0 is " << x.got->at(b, h, t, 0) << ", exactly "
              << x.want->at(b, h, t, 0);
          return out.str();
        }
  }
  return bars.o_of_head.present() ? wrong_head(got, want, bars) : std::string();
}

}  // namespace octet::test
