// octet quantize: the public quantizer on one tensor of a file, with its statistics and its error.
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <octet/octet.hpp>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "io/sink.h"
#include "io/source.h"
#include "metrics.h"
#include "names.h"
#include "quantized.h"
#include "terminal.h"

namespace octet::cli {
namespace {

struct QuantizeOptions {
  std::string in, out, operand, format = "int8", granularity = "token", zero_point, rope, norm, norm_weight;
  int64_t block = 0, rope_dim = 0, rope_offset = 0;
  double rope_base = 0, norm_eps = 0;
  bool smooth = false;
  uint64_t hadamard_seed = 0;
};

constexpr Name<DType> kFormats[] = {
    {"int8", DType::i8}, {"uint8", DType::u8}, {"int4", DType::i4}, {"e4m3", DType::e4m3}, {"e5m2", DType::e5m2}};

QuantizerOptions parse_options(const QuantizeOptions& o) {
  QuantizerOptions q;
  q.operand = parse(kOperands, "--operand", o.operand);
  q.format = parse(kFormats, "--format", o.format);
  q.granularity = parse(kGranularities, "--granularity", o.granularity);
  q.block = o.block;
  if (!o.zero_point.empty()) q.zero_point = parse(kZeroPoints, "--zero-point", o.zero_point);
  q.smooth = o.smooth;
  q.hadamard_seed = o.hadamard_seed;
  if (!o.rope.empty()) q.rope.style = parse(kRopeStyles, "--rope", o.rope);
  q.rope.dim = o.rope_dim, q.rope.offset = o.rope_offset, q.rope.base = o.rope_base;
  if (o.rope.empty() && (o.rope_dim || o.rope_offset || o.rope_base != 0))
    reject("--rope-dim, --rope-offset, --rope-base: given without --rope");
  if (!o.norm.empty()) q.rope.norm = parse(kNorms, "--norm", o.norm);
  q.rope.norm_eps = static_cast<float>(o.norm_eps);
  if (o.norm.empty() && (o.norm_eps != 0 || !o.norm_weight.empty()))
    reject("--norm-eps, --norm-weight: given without --norm");
  return q;
}

// Reads the weights of a norm, [dim] or [heads, dim], as octet.h takes them.
Array read_weight(const Source& source, const std::string& name) {
  Array weight = source.read(name);
  const std::vector<int64_t> shape = weight.shape;
  if (shape.size() != 1 && shape.size() != 2)
    reject("--norm-weight: {} has the shape {}, allowed: [dim] or [heads, dim]", name, shape_text(shape));
  weight.shape = {1, shape.size() == 2 ? shape[0] : 1, 1, shape.back()};
  return weight;
}

// Returns x after norm and RoPE, which is the tensor that codes are compared with.
Array rotated(const Array& x, const QuantizerOptions& options) {
  Array y(DType::f64, x.shape4());
  for (int64_t i = 0; i < x.size(); ++i) y.set(i, x[i]);
  if (options.rope.style == OCTET_ROPE_NONE && options.rope.norm == OCTET_NORM_NONE) return y;
  Tensor view = y.view();
  options.with_rope([&](const octet_rope& rope) { check(octet_apply_rope(&rope, &view, 0, &view, nullptr)); });
  return y;
}

// The predicted rms error of the logits per head of q, from this operand and the other one in the same format.
Array logit_error(const Source& source, const Quantized& quantized, QuantizerOptions options) {
  const bool is_q = options.operand == OCTET_OPERAND_Q;
  options.operand = is_q ? OCTET_OPERAND_K : OCTET_OPERAND_Q;
  const Quantized other(source.read(is_q ? "k" : "q"), options);
  const Quantized &q = is_q ? quantized : other, &k = is_q ? other : quantized;
  const Shape shape = q.codes.shape4();
  Array error(DType::f32, Shape{shape[0], shape[1], 1, 1});
  const Tensor q_statistics = q.statistics.view(), k_statistics = k.statistics.view();
  Tensor view = error.view();
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape[3])));
  check(octet_logit_error(&q_statistics, &k_statistics, scale, &view, nullptr));
  return error;
}

void print_statistics(const Quantized& quantized, const Array& logit_error) {
  Table table({{"batch"},
               {"head"},
               {"step rms"},
               {"norm rms"},
               {"bias"},
               {"outlier"},
               {logit_error.present() ? "logit error" : ""}});
  const Shape shape = quantized.statistics.shape4();
  const int64_t group =
      logit_error.present() ? logit_error.shape4()[1] / shape[1] : 1;  // heads of q that share one of k
  for (int64_t head = 0; head < shape[0] * shape[1]; ++head) {
    const auto statistic = [&](int i) { return error_text(quantized.statistics[head * OCTET_STATISTICS + i]); };
    double worst = 0;
    for (int64_t i = 0; logit_error.present() && i < group; ++i) worst = std::max(worst, logit_error[head * group + i]);
    table.row({std::to_string(head / shape[1]), std::to_string(head % shape[1]), statistic(OCTET_STATISTIC_STEP),
               statistic(OCTET_STATISTIC_NORM), statistic(OCTET_STATISTIC_BIAS), statistic(OCTET_STATISTIC_OUTLIER),
               logit_error.present() ? error_text(worst) : ""});
  }
  table.print();
}

void quantize_command(const QuantizeOptions& options) {
  QuantizerOptions how = parse_options(options);
  const Source source(options.in);
  if (!options.norm_weight.empty()) how.norm_weight = read_weight(source, options.norm_weight);
  const Array x = source.read(options.operand);
  x.shape4(options.operand);
  const Quantized quantized(x, how);
  std::vector<NamedArray> arrays = {{options.operand, &quantized.codes},
                                    {options.operand + "_scale", &quantized.scale}};
  if (quantized.zero_point.present()) arrays.push_back({options.operand + "_zero_point", &quantized.zero_point});
  if (quantized.mean.present()) arrays.push_back({options.operand + "_mean", &quantized.mean});
  std::vector<std::string> names;
  for (const auto& [name, array] : arrays) names.push_back(name);
  expect_writable(options.out, options.in, names);

  const Errors errors = compare(quantized.dequantized(DType::f64), rotated(x, how));
  // The other operand has weights of its own.
  const bool predicts = how.operand != OCTET_OPERAND_V && source.has("q") && source.has("k") && !source.single() &&
                        !how.norm_weight.present();
  const Array predicted = predicts ? logit_error(source, quantized, how) : Array();

  write_arrays(options.out, arrays,
               {{"operand", options.operand},
                {"format", options.format},
                {"granularity", options.granularity},
                {"block", std::to_string(how.block)},
                {"zero_point", options.zero_point.empty() ? "none" : options.zero_point},
                {"hadamard_seed", std::to_string(how.hadamard_seed)},
                {"rope", options.rope.empty() ? "none" : options.rope},
                {"norm", options.norm.empty() ? "none" : options.norm}});

  fmt::print("{} {} {}: {} per {}, relative L2 {}, cos {}, largest error {}\n", options.operand, shape_text(x.shape),
             name(x.dtype), options.format, options.granularity, error_text(errors.rel_l2),
             number_text("{:.6f}", errors.cos), error_text(errors.max_abs));
  print_statistics(quantized, predicted);
}

}  // namespace

void add_quantize(CLI::App& app) {
  CLI::App* command = app.add_subcommand("quantize", "Quantize one tensor of a file");
  const auto options = std::make_shared<QuantizeOptions>();
  command->add_option("IN", options->in, "Tensors as octet run reads them, or a single .npy file")->required();
  command
      ->add_option("OUT", options->out,
                   "Codes under the operand's name, NAME_scale, NAME_zero_point, NAME_mean; as octet run writes them")
      ->required();
  command->add_option("--operand", options->operand, "Which tensor: " + choices(kOperands))
      ->required()
      ->type_name("NAME");
  command->add_option("--format", options->format, choices(kFormats) + "  [int8]")->type_name("T");
  command
      ->add_option("--granularity", options->granularity,
                   "What shares a scale: " + choices(kGranularities) + "  [token]")
      ->type_name("G");
  command->add_option("--block", options->block, "Tokens that share a scale, with --granularity block")->type_name("N");
  command->add_option("--zero-point", options->zero_point, choices(kZeroPoints) + "  [symmetric]")->type_name("KIND");
  command->add_flag("--smooth", options->smooth, "Subtract the mean of each channel before");
  command->add_flag("--hadamard{1}", options->hadamard_seed,
                    "Rotate each row by a random-sign Hadamard matrix; =SEED chooses the signs");
  command->add_option("--rope", options->rope, "Rotary position embedding before: " + choices(kRopeStyles))
      ->type_name("STYLE");
  command->add_option("--rope-dim", options->rope_dim, "Channels rotated  [all]")->type_name("N");
  command->add_option("--rope-offset", options->rope_offset, "Position of the first token  [0]")->type_name("N");
  command->add_option("--rope-base", options->rope_base, "Base of the angles  [10000]")->type_name("X");
  command->add_option("--norm", options->norm, "Norm of each row before RoPE: " + choices(kNorms))->type_name("KIND");
  command->add_option("--norm-eps", options->norm_eps, "Added to the mean of squares  [0]")->type_name("X");
  command
      ->add_option("--norm-weight", options->norm_weight,
                   "The tensor of IN that has its weights, [dim] or [heads, dim]")
      ->type_name("NAME");
  command->callback([options] { quantize_command(*options); });
}

}  // namespace octet::cli
