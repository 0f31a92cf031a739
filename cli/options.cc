// Options of attention.
#include "options.h"

#include <algorithm>
#include <cstring>

namespace octet::cli {
namespace {

// Asks the library whether an option belongs to a precision: a call without tokens tells.
bool takes(const Attention& attention) {
  const Tensor empty(nullptr, DType::f32, {1, 1, 0, 8});
  try {
    workspace_size(attention, Forward{.q = empty, .k = empty, .v = empty, .o = empty});
    return true;
  } catch (const Error& error) {
    return error.status() != OCTET_INVALID_ARGUMENT;
  }
}

bool takes_bias_correction(Precision p) {
  return takes({.precision = p, .bias_correction = BiasCorrection::none, .backend = "reference"});
}
bool takes_int8_options(Precision p) { return takes({.precision = p, .hadamard = Switch::on, .backend = "reference"}); }

// "f16 and bf16": the precisions that take an option.
template <class Takes>
std::string those(Takes&& takes) {
  std::vector<std::string> names;
  for (const auto& [text, precision] : kPrecisions)
    if (takes(precision)) names.emplace_back(text);
  std::string out;
  for (std::size_t i = 0; i < names.size(); ++i)
    out += (i == 0 ? "" : i + 1 < names.size() ? ", " : " and ") + names[i];
  return out;
}

std::array<int64_t, 2> parse_window(const std::string& text) {
  const auto parts = split(text, ',');
  if (parts.size() != 2) reject("--window: found \"{}\", expected LEFT,RIGHT", text);
  return {parse_integer("--window", parts[0]), parse_integer("--window", parts[1])};
}

template <class Value, class Parse>
std::vector<Value> parse_list(const std::string& text, Parse&& parse) {
  std::vector<Value> out;
  for (const std::string& part : split(text, ',')) {
    const Value value = parse(part);
    if (std::find(out.begin(), out.end(), value) == out.end()) out.push_back(value);
  }
  return out;
}

}  // namespace

void AttentionOptions::add_mask_to(CLI::App& app) {
  app.add_flag("--causal", causal_,
               "No key after the query; =top-left or =bottom-right names the diagonal where lengths differ");
  app.add_option("--scale", scale_, "Logits are scale * q.k  [1/sqrt(dim)]")->type_name("X");
  app.add_option("--window", window_, "Keys seen left and right of the diagonal, -1: all")->type_name("L,R");
}

void AttentionOptions::add_layout_to(CLI::App& app) {
  app.add_option("--layout", layout_,
                 "Axes of the tensors: bhsd, [batch, head, token, dim]; bshd, [batch, token, head, dim]  [bhsd]")
      ->type_name("LAYOUT");
}

void AttentionOptions::add_to(CLI::App& app) {
  add_mask_to(app);
  app.add_option("--softcap", softcap_, "Logits become X tanh(logit / X); 0: none  [0]")->type_name("X");
  app.add_option("--bias-correction", bias_correction_,
                 "How f16 and bf16 keep rounding bias out of gradients: " + choices(kBiasCorrections) + "  [f16]")
      ->type_name("NAME");
  const auto reject_name_of_0_1 = [](const std::string&) {
    reject("--remedy: octet has no such option; use --bias-correction, whose f16 was f16_inside, and gproj project");
  };
  app.add_option_function<std::string>("--remedy", reject_name_of_0_1)->group("");  // not in the help
  app.add_option("--beta", beta_, "Factor of bias correction beta, 2 to 8  [3]")->type_name("X");
  app.add_option("--hadamard", hadamard_, "Rotate q and k before int8: on, off  [the recipe's]")->type_name("SWITCH");
  app.add_option("--smooth-q", smooth_q_, "Subtract the mean of each 128 queries before int8: on, off  [the recipe's]")
      ->type_name("SWITCH");
  app.add_option("--dropout", dropout_, "Probability that an element of P is dropped  [0]")->type_name("P");
  app.add_option("--dropout-seed", dropout_seed_, "Which are dropped, by docs/numerics.md  [0,0]")
      ->type_name("SEED[,OFFSET]");
  app.add_option("--backend", backend_, "Run this backend only (octet info lists them)")->type_name("NAME");
  app.add_option("--tile", tile_, "Run the kernel with this tile only (octet explain names it)")->type_name("NAME");
  app.add_option("--device", device_, "Where the tensors lie: cpu, cuda, cuda:N  [the backend's, else cpu]")
      ->type_name("DEVICE");
  app.add_option("--threads", threads_, "CPU threads, 0: all  [0]")->type_name("N");
  app.add_flag("--deterministic", deterministic_, "Only bitwise repeatable kernels");
}

Attention AttentionOptions::attention(Precision precision) const {
  Attention a;
  a.precision = precision;
  if (!causal_.empty()) {
    a.causal = true;
    if (causal_ != "true") a.alignment = parse(kAlignments, "--causal", causal_);
  }
  if (!scale_.empty()) a.scale = parse_float("--scale", scale_);
  if (!softcap_.empty()) a.softcap = parse_float("--softcap", softcap_);
  if (!window_.empty()) a.window = parse_window(window_);
  if (!dropout_.empty()) a.dropout_p = parse_number("--dropout", dropout_);
  if (!bias_correction_.empty()) a.bias_correction = parse(kBiasCorrections, "--bias-correction", bias_correction_);
  if (!beta_.empty()) a.beta = parse_float("--beta", beta_);
  if (!hadamard_.empty()) a.hadamard = parse(kSwitches, "--hadamard", hadamard_);
  if (!smooth_q_.empty()) a.smooth_q = parse(kSwitches, "--smooth-q", smooth_q_);
  if (!backend_.empty()) a.backend = backend_.c_str();
  if (!tile_.empty()) a.tile = tile_.c_str();
  a.threads = threads_;
  a.deterministic = deterministic_;
  return a;
}

Attention AttentionOptions::attention_among(Precision precision) const {
  Attention a = attention(precision);
  if (!takes_bias_correction(precision)) a.bias_correction = BiasCorrection::f16, a.beta = 0;
  if (!takes_int8_options(precision)) a.hadamard = a.smooth_q = Switch::automatic;
  return a;
}

void AttentionOptions::expect_used(const std::vector<Precision>& precisions) const {
  const auto none = [&](auto&& takes) { return std::none_of(precisions.begin(), precisions.end(), takes); };
  if (!(bias_correction_.empty() && beta_.empty()) && none(takes_bias_correction))
    reject("{}: belongs to precisions {}, and neither is asked for",
           bias_correction_.empty() ? "--beta" : "--bias-correction", those(takes_bias_correction));
  if (!(hadamard_.empty() && smooth_q_.empty()) && none(takes_int8_options))
    reject("{}: belongs to precisions {}, and none is asked for", hadamard_.empty() ? "--smooth-q" : "--hadamard",
           those(takes_int8_options));
}

Array AttentionOptions::dropout_seed() const {
  const std::vector<std::string> numbers = split(dropout_seed_.empty() ? "0" : dropout_seed_, ',');
  if (numbers.size() > 2) reject("--dropout-seed: found \"{}\", expected SEED or SEED,OFFSET", dropout_seed_);
  if (dropout_.empty() || parse_number("--dropout", dropout_) == 0) {
    if (!dropout_seed_.empty()) reject("--dropout-seed: belongs to --dropout, which drops nothing");
    return {};
  }
  Array words(DType::i32, Shape{1, 1, 1, 4});
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto number = static_cast<uint64_t>(parse_integer("--dropout-seed", numbers[i]));
    std::memcpy(words.bytes.data() + i * sizeof number, &number, sizeof number);  // the low word first
  }
  return words;
}

DeviceName AttentionOptions::device() const {
  if (!device_.empty()) return parse_device(device_);
  return backend_.empty() ? DeviceName{} : device_of_backend(backend_);
}

std::vector<Pass> parse_passes(const std::string& text) {
  return parse_list<Pass>(text, [](const std::string& part) { return parse(kPasses, "--pass", part); });
}

std::vector<Precision> parse_precisions(const std::string& text) {
  if (text != "all")
    return parse_list<Precision>(text, [](const std::string& part) {
      if (part == "all") reject("--precision: \"all\" stands alone");
      return parse(kPrecisions, "--precision", part);
    });
  std::vector<Precision> out;
  for (const auto& [word, precision] : kPrecisions)
    if (precision != Precision::f64) out.push_back(precision);
  return out;
}

}  // namespace octet::cli
