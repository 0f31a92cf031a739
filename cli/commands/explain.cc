// octet explain: which backend and kernel would run, why each better one would not, and whether 8 bits would be faster.
// No data is needed.
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <octet/octet.hpp>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "eight_bits.h"
#include "options.h"
#include "passes.h"
#include "place.h"
#include "terminal.h"

namespace octet::cli {
namespace {

struct ExplainOptions {
  std::string shape, precision = "bf16", passes = "fwd", dtype, card;
  bool json = false;
  AttentionOptions attention;
};

// Tensors at addresses without memory: explaining reads no data, but checks where tensors lie. Each has all the room
// that the library allows a tensor.
class Tensors {
 public:
  Tensor make(DType dtype, const Shape& shape) {
    if (!elements_of({shape.begin(), shape.end()})) reject("--shape: more elements than memory can hold");
    return {reinterpret_cast<void*>(++count_ * kRoom), dtype, shape};
  }

 private:
  static constexpr std::uintptr_t kRoom = std::uintptr_t{1} << 49;
  std::uintptr_t count_ = 0;
};

std::string explanation(const ProblemShape& s, DType dtype, Pass pass, const Attention& attention,
                        const DeviceName& device) {
  Tensors tensors;
  const auto answer = [&](auto call) {
    if (attention.dropout_p != 0) call.extras.dropout_seed = tensors.make(DType::i32, {1, 1, 1, 4});
    return explain(attention, supposed_on(device, call));
  };
  const Shape q_shape{s.batch, s.heads, s.tokens_q, s.dim}, k_shape{s.batch, s.kv_heads, s.tokens_k, s.dim};
  const auto q = [&] { return tensors.make(dtype, q_shape); };
  const auto k = [&] { return tensors.make(dtype, k_shape); };
  const DType o_type = output_type(dtype, attention.precision);
  const auto o = [&] { return tensors.make(o_type, q_shape); };
  const auto o_residual = [&] { return tensors.make(residual_type(o_type), q_shape); };
  const auto like_q = [&] { return tensors.make(companion_type(dtype), q_shape); };  // do, tangents, gradients
  const auto like_k = [&] { return tensors.make(companion_type(dtype), k_shape); };
  const auto lse = [&] { return tensors.make(DType::f32, {s.batch, s.heads, s.tokens_q, 1}); };
  switch (pass) {
    case Pass::forward:
      return answer(Forward{.q = q(), .k = k(), .v = k(), .o = o(), .lse = lse()});
    case Pass::backward:
      return answer(Backward{.q = q(),
                             .k = k(),
                             .v = k(),
                             .o = o(),
                             .lse = lse(),
                             .do_ = like_q(),
                             .dq = like_q(),
                             .dk = like_k(),
                             .dv = like_k(),
                             .o_residual = reads_residual(attention) ? o_residual() : Tensor{}});
    case Pass::jvp:
      return answer(Jvp{.q = q(),
                        .k = k(),
                        .v = k(),
                        .tq = like_q(),
                        .tk = like_k(),
                        .tv = like_k(),
                        .o = o(),
                        .to = o(),
                        .lse = lse()});
  }
  return {};
}

// "cpu: no, the tensors are on cuda" as its parts.
nlohmann::ordered_json answer_of(const std::string& line) {
  const std::size_t colon = line.find(": "), comma = line.find(", ", colon);
  return {{"backend", line.substr(0, colon)},
          {"answer", line.substr(colon + 2, comma - colon - 2)},
          {"detail", line.substr(comma + 2)}};
}

// The name of the GPU that tensors lie on; empty on the CPU and without a GPU.
std::string card_of(const DeviceName& device) {
  const nlohmann::json gpus = nlohmann::json::parse(info()).at("gpus");
  const auto index = static_cast<std::size_t>(device.index);
  return device.kind == Device::cuda && index < gpus.size() ? gpus[index].at("name").get<std::string>() : "";
}

nlohmann::ordered_json to_json(const ProblemShape& s, DType dtype, Pass pass, Precision precision,
                               const std::string& text, const nlohmann::ordered_json& of_8_bits) {
  const Choice choice = chosen(text);
  nlohmann::ordered_json answers = nlohmann::ordered_json::array();
  for (const std::string& line : split(text, '\n'))
    if (!line.empty()) answers.push_back(answer_of(line));
  const auto or_null = [&](const std::string& found) {
    return choice.backend.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(found);
  };
  return {{"shape", {s.batch, s.heads, s.kv_heads, s.tokens_q, s.tokens_k, s.dim}},
          {"precision", name(precision)},
          {"pass", name(pass)},
          {"dtype", name(dtype)},
          {"backend", or_null(choice.backend)},
          {"kernel", or_null(choice.kernel)},
          {"answers", answers},
          {"eight_bits", of_8_bits}};
}

void explain_command(ExplainOptions& options) {
  const ProblemShape given = parse_shape(options.shape);
  ProblemShape shape = given;
  if (shape.dim <= kLargestDim) shape.dim = filled_dim(shape.dim);
  const auto precisions = parse_precisions(options.precision);
  options.attention.expect_used(precisions);
  if (!options.card.empty()) expect_known_card(options.card);
  const std::string card = options.card.empty() ? card_of(options.attention.device()) : options.card;
  std::vector<nlohmann::ordered_json> objects;
  std::vector<std::string> declined;
  std::size_t count = 0;
  for (Precision precision : precisions)
    for (Pass pass : parse_passes(options.passes)) {
      const DType dtype = options.dtype.empty() ? natural_type(precision)
                                                : parse_tensor_type("--dtype", options.dtype, precision, true);
      const Attention attention = scaled_for(precisions.size() == 1 ? options.attention.attention(precision)
                                                                    : options.attention.attention_among(precision),
                                             given.dim);
      const std::string text = explanation(shape, dtype, pass, attention, options.attention.device());
      const std::string asked = fmt::format("{} {} {}", name(pass), name(precision), name(dtype));
      if (chosen(text).backend.empty()) declined.push_back(asked);
      ++count;
      const std::string backend = options.card.empty() ? chosen(text).backend : "";
      const bool has_8_bits = pass == Pass::forward && !card.empty();
      const nlohmann::ordered_json of_8_bits =
          has_8_bits ? eight_bits(card, backend, given, options.attention.causal()) : nullptr;
      if (options.json) {
        objects.push_back(to_json(given, dtype, pass, precision, text, of_8_bits));
        continue;
      }
      const std::string filled = shape.dim == given.dim ? "" : fmt::format(", its head dim as {}", shape.dim);
      fmt::print("{}, shape {}{}\n", asked, options.shape, filled);
      for (const std::string& line : split(text, '\n'))
        if (!line.empty()) fmt::print("  {}\n", line);
      if (has_8_bits) fmt::print("  8 bits: {}\n", describe_eight_bits(card, of_8_bits));
    }
  if (options.json) print_json(objects);
  // "all" asks for what there is.
  if (declined.empty() || (options.precision == "all" && declined.size() < count)) return;
  flush_output();
  throw Failed(fmt::format("no backend computes {}", fmt::join(declined, ", ")));
}

}  // namespace

void add_explain(CLI::App& app) {
  CLI::App* command = app.add_subcommand("explain",
                                         "Which backend and kernel would run for a shape, why the others not, and "
                                         "whether 8 bits would be faster");
  const auto options = std::make_shared<ExplainOptions>();
  command->add_option("--shape", options->shape, "Batch, heads of q, heads of k and v, queries, keys, head dim")
      ->type_name("b,hq,hkv,sq,sk,d")
      ->required();
  command->add_option("--precision", options->precision, "P,P,... or all, of " + choices(kPrecisions) + "  [bf16]")
      ->type_name("P");
  command->add_option("--pass", options->passes, "Passes, of " + choices(kPasses) + "  [fwd]")->type_name("PASS");
  command
      ->add_option("--dtype", options->dtype,
                   "Type of q, k, v: f32, f16, bf16, e4m3; f64 with precision f64  [the precision's]")
      ->type_name("T");
  command
      ->add_option(
          "--card", options->card,
          "Say of this card how fast forward passes of 8 bits are beside bf16, measured or predicted  [the GPU "
          "of the tensors]")
      ->type_name("NAME");
  command->add_flag(
      "--json", options->json,
      "Print an array of {shape, precision, pass, dtype, backend, kernel, answers, eight_bits}; answers: an "
      "array of {backend, answer, detail}, answer: chosen, could or no; eight_bits: {card, measured, "
      "backend, dim, tokens, causal, times_as_fast_as_bf16} or null");
  command->footer("Exits with status 1 where no backend computes what is asked for, of --precision all: any of it.");
  options->attention.add_to(*command);
  command->callback([options] { explain_command(*options); });
}

}  // namespace octet::cli
