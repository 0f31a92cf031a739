// Roundings by name, and what they do.
#include "rounding_study.h"

#include <algorithm>
#include <octet/formats.hpp>
#include <random>

namespace octet::cli {
namespace {

struct Point {
  const char* name;
  uint32_t octet_rounding::*format;
};
constexpr Point kPoints[] = {{"qk", &octet_rounding::qk},       {"v", &octet_rounding::v},
                             {"s", &octet_rounding::s},         {"m", &octet_rounding::m},
                             {"arg", &octet_rounding::arg},     {"p", &octet_rounding::p},
                             {"alpha", &octet_rounding::alpha}, {"acc", &octet_rounding::acc},
                             {"o", &octet_rounding::o},         {"o_saved", &octet_rounding::o_saved},
                             {"ds", &octet_rounding::ds},       {"p_backward", &octet_rounding::p_backward}};
constexpr Name<uint32_t> kFormats[] = {{"f64", OCTET_F64},   {"f32", OCTET_F32},   {"f16", OCTET_F16},
                                       {"bf16", OCTET_BF16}, {"e4m3", OCTET_E4M3}, {"e5m2", OCTET_E5M2}};
constexpr Name<uint32_t> kSums[] = {{"exact", 0}, {"p", 1}};
constexpr Name<uint32_t> kScaled[] = {{"before", 0}, {"after", 1}};
constexpr Name<uint32_t> kDeltas[] = {{"o", OCTET_DELTA_FROM_O}, {"p", OCTET_DELTA_FROM_P}};

int mantissa_bits(uint32_t format) {
  switch (format) {
    case OCTET_F32:
      return kF32.mantissa_bits;
    case OCTET_F16:
      return kF16.mantissa_bits;
    case OCTET_E4M3:
      return kE4m3.mantissa_bits;
    case OCTET_E5M2:
      return kE5m2.mantissa_bits;
    default:
      return kBf16.mantissa_bits;  // an exact o is told in the units of bf16
  }
}

void set_point(octet_rounding& r, const std::string& key, const std::string& value) {
  for (const Point& point : kPoints)
    if (key == point.name) {
      r.*point.format = parse(kFormats, "--round " + key, value);
      return;
    }
  if (key == "l")
    r.l_from_p = parse(kSums, "--round l", value);
  else if (key == "scaled")
    r.s_scaled = parse(kScaled, "--round scaled", value);
  else if (key == "delta")
    r.delta = parse(kDeltas, "--round delta", value);
  else if (key == "beta")
    r.beta = parse_float("--round beta", value);
  else if (key == "tie_epsilon")
    r.tie_epsilon = parse_float("--round tie_epsilon", value);
  else if (key == "tile") {
    const int64_t tile = parse_integer("--round tile", value);
    if (tile < 0 || tile > 1 << 30) reject("--round tile: found {}, allowed: keys per tile, or 0 for all in one", tile);
    r.tile = static_cast<uint32_t>(tile);
  } else {
    std::string names;
    for (const Point& point : kPoints) names += std::string(point.name) + ", ";
    reject("--round: unknown point \"{}\", allowed: {}l, scaled, delta, beta, tie_epsilon, tile", key, names);
  }
}

constexpr OutputTypes kExact{DType::f64, DType::f64, DType::f64, DType::f64, DType::f64};

ForwardResult forward_of(const Experiment& e, Attention attention, const octet_rounding* rounding) {
  attention.rounding = rounding;
  ForwardResult result = make_forward(e.in, kExact, false);
  run(attention, forward_call(e.in, result));
  return result;
}

BackwardResult backward_of(const Experiment& e, Attention attention, const octet_rounding* rounding,
                           const ForwardResult& forward) {
  attention.rounding = rounding;
  BackwardResult result = make_backward(e.in, kExact);
  run(attention, backward_call(e.in, forward, result));
  return result;
}

void keep_largest(Effect& effect, const char* tensor, const Array& got, const Array& want) {
  const double error = compare(got, want).rel_l2;
  for (auto& [name, largest] : effect.rel_l2)
    if (name == tensor) {
      if (!(error <= largest)) largest = error;
      return;
    }
  effect.rel_l2.emplace_back(tensor, error);
}

// Row sums of do * o with the saved output and with the exact one.
void add_deltas(Bias& bias, const Array& do_, const Array& saved, const Array& exact) {
  const int64_t dim = do_.shape4()[3];
  for (int64_t row = 0; row < do_.size() / dim; ++row) {
    double got = 0, want = 0;
    for (int64_t i = row * dim; i < (row + 1) * dim; ++i) got += do_[i] * saved[i], want += do_[i] * exact[i];
    bias.add_delta(got, want);
  }
}

constexpr int64_t kRows = 64, kKeys = 1024, kDimV = 16, kDim = 8;
constexpr int kSeeds = 24;

// Rows are heads, as each has its own tied keys. q is a unit vector and the first channel of k holds the logits, so
// that s = q.k is exact.
Inputs bias_inputs(BiasInput input, int seed) {
  std::mt19937_64 random(static_cast<uint64_t>(seed) * 10 + (input == BiasInput::s7 ? 7 : 8));
  const auto uniform = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  Inputs in;
  in.q = Array(DType::bf16, Shape{1, kRows, 1, kDim});
  in.k = Array(DType::bf16, Shape{1, kRows, kKeys, kDim});
  in.v = Array(DType::bf16, Shape{1, kRows, kKeys, kDimV});
  in.do_ = Array(DType::f64, Shape{1, kRows, 1, kDimV});
  fill_normal(in.do_, static_cast<uint64_t>(seed) + 1000);
  for (int64_t row = 0; row < kRows; ++row) {
    in.q.set(row * kDim, 1);
    const double top = round_to(kBf16, 2 + 4 * uniform());
    const auto first = static_cast<int64_t>(uniform() * kKeys);
    const int64_t second = (first + 1 + static_cast<int64_t>(uniform() * (kKeys - 1))) % kKeys;
    for (int64_t key = 0; key < kKeys; ++key) {
      const bool tied = key == first || key == second;
      const int64_t at = row * kKeys + key;
      in.k.set(at * kDim, tied ? top : top - 14 - 4 * uniform());
      for (int64_t c = 0; c < kDimV; ++c)
        in.v.set(at * kDimV + c, -(2 + 1.99 * uniform()) / (tied && input == BiasInput::s8 ? 2 : 1));
    }
    // In half of the channels do has the sign of the error, as it does in training.
    for (int64_t c = 0; c < kDimV / 2; ++c) in.do_.set(row * kDimV + c, -std::fabs(in.do_[row * kDimV + c]));
  }
  return in;
}

}  // namespace

octet_rounding flash_rounding() {
  octet_rounding r = OCTET_ROUNDING_INIT;
  r.s = r.m = r.arg = r.alpha = r.acc = OCTET_F32;
  r.s_scaled = 1;
  r.qk = r.v = r.p = r.o = r.o_saved = r.ds = r.p_backward = OCTET_BF16;
  r.l_from_p = 0;
  return r;
}

octet_rounding parse_rounding(const std::string& text) {
  octet_rounding r = OCTET_ROUNDING_INIT;
  const auto items = split(text, ',');
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::size_t equals = items[i].find('=');
    if (i == 0 && items[i] == "flash")
      r = flash_rounding();
    else if (equals == std::string::npos)
      reject("--round: found \"{}\", expected point=type", items[i]);
    else
      set_point(r, items[i].substr(0, equals), items[i].substr(equals + 1));
  }
  return r;
}

std::string rounding_text(const octet_rounding& r) {
  std::string out;
  for (const Point& point : kPoints)
    if (r.*point.format != OCTET_F64) out += fmt::format("{}={},", point.name, name_of(kFormats, r.*point.format));
  out += fmt::format("l={},scaled={},delta={},tile={}", name_of(kSums, r.l_from_p), name_of(kScaled, r.s_scaled),
                     name_of(kDeltas, r.delta), r.tile);
  if (r.beta != 0) out += fmt::format(",beta={},tie_epsilon={}", r.beta, r.tie_epsilon);
  return out;
}

std::string rounding_help() {
  std::string names;
  for (const Point& point : kPoints) names += (names.empty() ? "" : ", ") + std::string(point.name);
  return "point=type,... Points " + names + " take " + choices(kFormats) +
         "; l=p|exact (which p the sum adds), scaled=after|before (s rounded after or before the scale), delta=o|p "
         "(where it comes from), "
         "beta=X, tie_epsilon=X, tile=N. What is not named is exact; a first item flash starts from bf16 "
         "FlashAttention  [flash]";
}

std::vector<std::pair<std::string, octet_rounding>> lifted(const octet_rounding& rounding) {
  std::vector<std::pair<std::string, octet_rounding>> out;
  for (const Point& point : kPoints) {
    if (rounding.*point.format == OCTET_F64) continue;
    octet_rounding r = rounding;
    r.*point.format = OCTET_F64;
    out.emplace_back(point.name, r);
  }
  if (rounding.l_from_p && rounding.p != OCTET_F64) {
    octet_rounding r = rounding;
    r.l_from_p = 0;
    out.emplace_back("l", r);
  }
  return out;
}

Experiment experiment(Inputs in, const Attention& attention, bool backward) {
  const Attention scaled = scaled_for(attention, in.dim);
  Experiment e{std::move(in), scaled, {}, {}};
  e.attention.precision = Precision::f64;
  e.forward = forward_of(e, e.attention, nullptr);
  if (backward) e.backward = backward_of(e, e.attention, nullptr, e.forward);
  return e;
}

std::vector<Experiment> bias_experiments(BiasInput input) {
  std::vector<Experiment> out;
  for (int seed = 0; seed < kSeeds; ++seed) out.push_back(experiment(bias_inputs(input, seed), {.scale = 1.f}, false));
  return out;
}

Effect examine(const std::vector<Experiment>& experiments, const octet_rounding& rounding) {
  Effect effect;
  for (const Experiment& e : experiments) {
    const ForwardResult forward = forward_of(e, e.attention, &rounding);
    keep_largest(effect, "o", forward.o, e.forward.o);
    for (int64_t i = 0; i < forward.o.size(); ++i)
      effect.bias.add_output(forward.o[i], e.forward.o[i], mantissa_bits(rounding.o));
    if (!e.in.do_.present()) continue;

    octet_rounding saving = rounding;  // writes what delta will read
    saving.o = rounding.o_saved;
    const ForwardResult saved = forward_of(e, e.attention, &saving);
    effect.has_delta = rounding.delta == OCTET_DELTA_FROM_O;
    if (effect.has_delta) add_deltas(effect.bias, e.in.do_, saved.o, e.forward.o);
    if (!e.backward.dq.present()) continue;
    const BackwardResult backward = backward_of(e, e.attention, &rounding, saved);
    keep_largest(effect, "dq", backward.dq, e.backward.dq);
    keep_largest(effect, "dk", backward.dk, e.backward.dk);
    keep_largest(effect, "dv", backward.dv, e.backward.dv);
  }
  return effect;
}

}  // namespace octet::cli
