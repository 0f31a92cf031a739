#include "support/random_problems.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <random>
#include <sstream>

#include "support/dequantized.h"
#include "support/row_bars.h"

namespace octet::test {
namespace {

constexpr int64_t kMostTokens = 300;
constexpr double kMostProducts = 0x1p27, kNever = -std::numeric_limits<double>::infinity();

class Picker {
 public:
  explicit Picker(uint64_t seed) : bits_(seed) {}
  int64_t number(int64_t from, int64_t to) {
    return from + static_cast<int64_t>(bits_() % static_cast<uint64_t>(to - from + 1));
  }
  bool percent(int64_t chance) { return number(1, 100) <= chance; }
  double uniform(double from, double to) {
    return from + (to - from) * std::ldexp(static_cast<double>(bits_() >> 11), -53);
  }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[number(0, static_cast<int64_t>(list.size()) - 1)];
  }

  int64_t head_dim() { return percent(50) ? one_of<int64_t>({64, 128, 256}) : 8 * number(1, 32); }
  // Lengths about those of tiles, and others of every order of magnitude.
  int64_t length() {
    if (percent(4)) return 0;
    if (percent(30)) return one_of<int64_t>({1, 2, 16, 32, 48, 64, 96, 128, 192, 256}) + number(-1, 1);
    return static_cast<int64_t>(std::exp(uniform(0.0, std::log(kMostTokens + 0.5))));
  }

 private:
  std::mt19937_64 bits_;
};

// Lengths of packed sequences, empty ones among them, as boundaries.
void pack(Picker& pick, Case& c) {
  c.batch = 1;
  c.cu_seqlens_q = c.cu_seqlens_k = {0};
  for (int64_t left = pick.number(1, 5); left > 0; --left) {
    const int64_t queries = pick.length() / 2, keys = pick.percent(30) ? queries : pick.length() / 2;
    c.cu_seqlens_q.push_back(c.cu_seqlens_q.back() + static_cast<int32_t>(queries));
    c.cu_seqlens_k.push_back(c.cu_seqlens_k.back() + static_cast<int32_t>(keys));
  }
  c.tokens_q = c.cu_seqlens_q.back(), c.tokens_k = c.cu_seqlens_k.back();
}

void pick_sizes(Picker& pick, Case& c) {
  c.batch = pick.percent(2) ? 0 : pick.number(1, 3);
  c.kv_heads = pick.number(1, 3);
  c.heads = c.kv_heads * pick.one_of<int64_t>({1, 1, 2, 3, 4});
  c.tokens_q = pick.length(), c.tokens_k = pick.percent(40) ? c.tokens_q : pick.length();
  c.dim = pick.head_dim(), c.dim_v = pick.percent(60) ? c.dim : pick.head_dim();
  if (pick.percent(20)) pack(pick, c);
  const auto products = [&] {
    return static_cast<double>(c.batch * c.heads * c.tokens_q * c.tokens_k * (c.dim + c.dim_v));
  };
  if (products() > kMostProducts) c.batch = 1;
  if (products() > kMostProducts) c.heads = c.kv_heads;
  if (products() > kMostProducts) c.heads = c.kv_heads = 1;
}

void pick_positional_mask(Picker& pick, Case& c) {
  c.causal = pick.percent(40);
  if (pick.percent(30)) {
    const auto side = [&] { return pick.one_of<int64_t>({-1, 0, 1, 7, 17, 64, 100}); };
    const int64_t left = side(), right = side();
    c.window = {{left, c.causal ? pick.one_of<int64_t>({-1, 0}) : right}};
  }
  if (c.causal || c.window) c.alignment = pick.one_of({Alignment::top_left, Alignment::bottom_right});
}

void pick_layouts(Picker& pick, Case& c) {
  const auto any = [&] {
    return pick.one_of({Layout::bhtd, Layout::bhtd, Layout::bthd, Layout::transposed, Layout::padded, Layout::spaced});
  };
  c.layout = any();
  c.kv_layout = pick.percent(50) ? c.layout : any();
  if (c.batch > 1 && pick.percent(10)) c.kv_layout = Layout::broadcast;
  const bool alike = c.heads == c.kv_heads && c.tokens_q == c.tokens_k && c.dim == c.dim_v;
  c.interleaved = alike && c.kv_layout != Layout::broadcast && pick.percent(50);
}

// Draws the scale, the other terms of the logits, and whether a backward pass gets dlse.
void pick_terms(Picker& pick, Case& c) {
  if (pick.percent(25)) c.scale = static_cast<float>(pick.uniform(0.02, 0.4));
  if (pick.percent(15)) c.softcap = pick.one_of({0.5f, 2.f, 5.f, 30.f});
  if (pick.percent(15)) c.alibi = pick.one_of({Alibi::shared, Alibi::each});
  if (pick.percent(25)) c.sinks = pick.one_of({Sinks::shared, Sinks::of_batch});
  c.dlse = pick.percent(30);
}

// A tensor of any broadcast shape that hides a third of the keys, some queries from all, and may add to the logits; or
// does so in some blocks, and hides or does not change others.
void draw_mask(Picker& pick, const Case& c, uint64_t seed, Inputs& in) {
  const auto size = [&](int64_t full) { return pick.percent(50) ? full : 1; };
  const Shape shape{size(c.batch), size(c.heads), size(c.tokens_q), size(c.tokens_k)};
  in.mask_dtype = pick.one_of({DType::boolean, DType::f32, DType::f16, DType::bf16});
  in.mask_layout = pick.one_of({Layout::bhtd, Layout::spaced, Layout::transposed, Layout::padded});
  const bool blind = pick.percent(30), offsets = pick.percent(20), blocks = pick.percent(40);
  in.mask = normal(shape, seed);
  for_each(shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    double& x = in.mask.at(b, h, i, j);
    const int64_t block = blocks ? (i / 64 + 3 * (j / 64)) % 4 : 3;  // 0: hidden, 1 and 2: zeros
    const bool seen = block > 0 && (block < 3 || x > -.43) && !(blind && i % 7 == 3);
    if (block < 3) x = 0.0;
    const double offset = offsets ? static_cast<double>(i % 5) * 16.0 : 0.0;
    x = in.mask_dtype == DType::boolean ? seen : seen ? 2.0 * x + offset : kNever;
  });
  in.mask = rounded(in.mask, in.mask_dtype);
}

// Powers of two, so that numbers keep their bits, and an offset that all keys have in common.
void scale_inputs(Picker& pick, const Case& c, Precision precision, bool small_do, uint64_t seed, Inputs& in) {
  const auto multiply = [](Values& x, double factor) {
    for (double& value : x.data) value *= factor;
  };
  multiply(in.q, pick.one_of({1.0, 1.0, 1.0, 0.25, 4.0}));
  if (pick.percent(15) && c.kv_layout != Layout::broadcast) {
    const Values offset = normal({1, c.kv_heads, 1, c.dim}, seed, 0.0, 4.0);
    for_each(in.k.shape, [&](int64_t b, int64_t h, int64_t t, int64_t channel) {
      in.k.at(b, h, t, channel) += offset.at(0, h, 0, channel);
    });
  }
  // Sums of many products stay within f16, where outputs are.
  const double large = c.dtype == DType::f16 || c.out_dtype == DType::f16 ? 1.0 : 0x1p6;
  const double v = pick.one_of({1.0, 1.0, 0x1p-6, large}),
               d_o = pick.one_of({1.0, 1.0, small_do ? 0x1p-10 : 1.0, large});
  multiply(in.v, v), multiply(in.tv, v), multiply(in.do_, d_o);
  const DType format = precision == Precision::bf16  ? DType::bf16
                       : precision == Precision::f16 ? DType::f16
                                                     : DType::f32;
  const DType gradient = c.dtype == DType::e4m3 ? DType::f32 : c.dtype;  // do and tangents
  for (Values* x : {&in.q, &in.k, &in.v}) *x = rounded(rounded(*x, format), c.dtype);
  for (Values* x : {&in.do_, &in.tq, &in.tk, &in.tv}) *x = rounded(rounded(*x, format), gradient);
}

template <class T>
std::string list_of(const std::vector<T>& numbers) {
  std::string out;
  for (const T& x : numbers) out += (out.empty() ? "" : " ") + std::to_string(x);
  return out;
}

const char* name(DType type) {
  return type == DType::f32    ? "f32"
         : type == DType::f16  ? "f16"
         : type == DType::bf16 ? "bf16"
         : type == DType::e4m3 ? "e4m3"
                               : "bool";
}

const char* name(BiasCorrection x) {
  static const char* const names[] = {"f16", "none", "beta", "exact_delta", "gproj"};  // in octet.h's order
  return names[static_cast<int>(x)];
}

}  // namespace

RandomProblem random_problem(uint64_t seed) {
  Picker pick(seed);
  RandomProblem x{.seed = seed, .pass = pick.one_of({Pass::forward, Pass::backward, Pass::jvp})};
  Case& c = x.c;
  const Precision precision =
      pick.one_of({Precision::bf16, Precision::bf16, Precision::bf16, Precision::f16, Precision::f16, Precision::f32});
  pick_sizes(pick, c);
  pick_positional_mask(pick, c);
  c.dtype = precision == Precision::f32 || pick.percent(25)
                ? pick.one_of({DType::f32, DType::f16, DType::bf16, DType::e4m3})
            : precision == Precision::f16 ? DType::f16
                                          : DType::bf16;
  c.out_dtype = pick.percent(50) || c.dtype == DType::e4m3 ? DType::f32 : c.dtype;
  pick_layouts(pick, c);
  pick_terms(pick, c);

  Attention& a = x.attention = attention_of(c, precision, nullptr);
  using enum BiasCorrection;
  if (precision != Precision::f32)
    a.bias_correction = x.pass == Pass::backward  ? pick.one_of({f16, f16, f16, none, beta, exact_delta, gproj})
                        : x.pass == Pass::forward ? pick.one_of({f16, f16, none, beta, exact_delta})
                                                  : f16;
  a.deterministic = x.pass == Pass::backward && pick.percent(30);

  x.in = draw(c, seed);
  // At precision f16 ds is taken as it is, but for bias correction f16: small gradients are below its normal numbers.
  const bool small_do = precision != Precision::f16 || a.bias_correction == f16;
  scale_inputs(pick, c, precision, small_do, 100 * seed + 20, x.in);
  if (c.cu_seqlens_q.empty() && pick.percent(30)) draw_mask(pick, c, 100 * seed + 21, x.in);
  return x;
}

RandomProblem random_problem_in_8_bits(uint64_t seed) {
  Picker pick(seed);
  RandomProblem x{.seed = seed, .pass = pick.percent(70) ? Pass::forward : Pass::backward};
  Case& c = x.c;
  const bool backward = x.pass == Pass::backward;
  using enum Precision;
  const Precision precision =
      backward ? pick.one_of({int8, sagebwd}) : pick.one_of({int8, int8, int8_f16, int8_fp8, fp8, fp8_raw, sagebwd});
  pick_sizes(pick, c);
  if (backward) c.dim = std::min<int64_t>(c.dim, 128), c.dim_v = std::min<int64_t>(c.dim_v, 128);
  pick_positional_mask(pick, c);
  c.dtype = pick.one_of({DType::bf16, DType::bf16, DType::f16, DType::f32, DType::e4m3});
  const DType narrow = c.dtype != DType::e4m3 ? c.dtype : precision == fp8_raw ? DType::e4m3 : DType::bf16;
  c.out_dtype = pick.percent(50) ? DType::f32 : narrow;
  c.trains_int8 = precision == int8 && (backward || pick.percent(50));
  pick_layouts(pick, c);
  pick_terms(pick, c);

  Attention& a = x.attention = attention_of(c, precision, nullptr);
  if (precision == int8 || precision == int8_f16 || precision == int8_fp8) {
    if (pick.percent(15)) a.hadamard = Switch::off;
    if (!backward && pick.percent(10) && c.dim < 256) a.smooth_q = Switch::on;  // 512 channels dequantized
  }
  x.in = draw(c, seed);
  scale_inputs(pick, c, precision, true, 100 * seed + 20, x.in);
  if (c.cu_seqlens_q.empty() && pick.percent(30)) draw_mask(pick, c, 100 * seed + 21, x.in);
  return x;
}

std::string text(const RandomProblem& x) {
  const Case& c = x.c;
  const Attention& a = x.attention;
  std::ostringstream out;
  out << "seed " << x.seed << ": " << test::name(x.pass) << ' ' << test::name(a.precision) << ", bias correction "
      << name(a.bias_correction) << (a.deterministic ? ", deterministic" : "") << ", " << name(c.dtype) << " to "
      << name(c.out_dtype) << ", batch " << c.batch << ", heads " << c.heads << " of " << c.kv_heads << ", tokens "
      << c.tokens_q << " x " << c.tokens_k << ", dims " << c.dim << ", " << c.dim_v;
  if (a.hadamard == Switch::off) out << ", not rotated";
  if (a.smooth_q == Switch::on) out << ", smooth_q";
  if (c.trains_int8 && c.has_residual()) out << ", o_residual";
  if (c.causal) out << ", causal";
  if (c.window) out << ", window " << (*c.window)[0] << ' ' << (*c.window)[1];
  if (c.causal || c.window) out << (c.alignment == Alignment::top_left ? ", top_left" : ", bottom_right");
  if (!c.cu_seqlens_q.empty())
    out << ", packed [" << list_of(c.cu_seqlens_q) << "] [" << list_of(c.cu_seqlens_k) << ']';
  if (x.in.mask.present())
    out << ", mask " << name(x.in.mask_dtype) << " ["
        << list_of(std::vector<int64_t>(x.in.mask.shape.begin(), x.in.mask.shape.end())) << "] "
        << test::name(x.in.mask_layout);
  if (c.scale) out << ", scale " << *c.scale;
  if (c.softcap != 0) out << ", softcap " << c.softcap;
  if (c.alibi != Alibi::none)
    out << (c.alibi == Alibi::each ? ", slopes of each batch element or sequence" : ", slopes");
  if (c.sinks != Sinks::none) out << (c.sinks == Sinks::of_batch ? ", sinks of each batch element" : ", sinks");
  if (c.dlse) out << ", dlse";
  out << ", layouts " << (c.interleaved ? "interleaved" : test::name(c.layout)) << ", " << test::name(c.kv_layout)
      << " (again: OCTET_RANDOM_SEED=" << x.seed << " OCTET_RANDOM_PROBLEMS=1)";
  return out.str();
}

namespace {

std::string wrong_in_8_bits(const RandomProblem& x, const Attention& tested, const Outputs& got, const Outputs& saved,
                            KeyOrder places) {
  const Dequantized codes = dequantized(x.c, x.in, tested, x.pass, places);
  const Outputs want = exact(codes, x.pass);
  return wrong_row(got, want, row_bars(codes, tested, x.pass, want, saved), x.pass);
}

}  // namespace

Outcome expect_right(const RandomProblem& x, const Solver& solver) {
  SCOPED_TRACE(text(x));
  Attention plain = x.attention, tested = x.attention;
  plain.backend = "reference", tested.backend = solver.backend;
  Outputs saved, got;
  const bool eight = in_8_bits(x.attention.precision), backward = x.pass == Pass::backward;
  if (backward && !eight) saved = run(x.c, x.in, plain, Pass::forward);
  const bool solves = !solver.solves || solver.solves(x);
  const auto new_place = [&] { return solver.place ? solver.place() : nullptr; };
  const std::unique_ptr<Place> place = new_place();
  try {
    // In 8 bits lse and o are those of the backend's own codes.
    if (backward && eight) saved = run(x.c, x.in, tested, Pass::forward, nullptr, new_place().get());
    got = run(x.c, x.in, tested, x.pass, &saved, place.get());
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), OCTET_UNSUPPORTED) << error.what();
    EXPECT_FALSE(solves) << "rejected: " << error.what();
    return Outcome::rejected;
  }
  EXPECT_TRUE(solves) << "solved, though " << solver.backend << " is said to reject it";
  if (solver.has_bars && !solver.has_bars(x)) return Outcome::solved;
  if (eight) {
    const std::string wrong = wrong_in_8_bits(x, tested, got, saved, KeyOrder::given);
    if (!wrong.empty() && solver.may_move_keys && solver.may_move_keys(x))
      EXPECT_EQ(wrong_in_8_bits(x, tested, got, saved, KeyOrder::seen_first), "") << "or else " << wrong;
    else
      EXPECT_EQ(wrong, "");
    return Outcome::solved;
  }
  const Outputs want = exact(x.c, x.in, x.pass);
  const RowBars bars = row_bars(x.c, x.in, x.attention, x.pass, want, saved);
  EXPECT_EQ(wrong_row(got, want, bars, x.pass), "");
  return Outcome::solved;
}

Draws draws(uint64_t count) {
  const auto number = [](const char* name, uint64_t otherwise) {
    const char* const value = std::getenv(name);
    return value && *value ? std::strtoull(value, nullptr, 10) : otherwise;
  };
  return {number("OCTET_RANDOM_SEED", 0), number("OCTET_RANDOM_PROBLEMS", count)};
}

}  // namespace octet::test
