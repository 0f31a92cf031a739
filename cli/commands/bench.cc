// octet bench: median times of passes, with quantization and, where q, k, v can be quantized beforehand, without it.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <octet/octet.hpp>
#include <optional>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "io/source.h"
#include "options.h"
#include "passes.h"
#include "place.h"
#include "quantized.h"
#include "terminal.h"

namespace octet::cli {
namespace {

struct BenchOptions {
  std::vector<std::string> shapes;
  std::string precisions = "all", passes = "fwd", file;
  int warmup = 1, runs = 5;
  bool random = false, json = false;
  AttentionOptions attention;
};

struct Measurement {
  ProblemShape shape;
  Precision precision;
  Pass pass;
  bool causal;
  Choice choice;
  Timing whole;
  std::optional<double> kernel;  // median without quantization
  double flops;
  int runs;
};

bool is_eight_bit(Precision p) { return p > Precision::bf16; }

// The forward alone: q, k, v are codes already. Nothing where the recipe does not take codes, nor on a GPU.
std::optional<double> kernel_seconds(Attention attention, const Inputs& in, const ForwardResult& result,
                                     const BenchOptions& options) {
  if (attention.precision != Precision::int8 || options.attention.device().kind != Device::cpu) return std::nullopt;
  const Quantized q(in.q, {.operand = OCTET_OPERAND_Q}), k(in.k, {.operand = OCTET_OPERAND_K, .smooth = true}),
      v(in.v, {.operand = OCTET_OPERAND_V, .smooth = true});
  Forward call = forward_call(in, result);
  call.q = q.view(), call.k = k.view(), call.v = v.view();
  attention.hadamard = Switch::off;  // codes are rotated, or not, by who made them
  try {
    workspace_size(attention, call);
  } catch (const Error&) {
    return std::nullopt;
  }
  return Job({}, attention, call).time(options.warmup, options.runs).median;
}

// Floating-point operations of the matrix products that the mask leaves.
double flops(const Inputs& in, const Attention& attention, Pass pass) {
  const auto dims = static_cast<double>(in.dim + in.dim_v);
  return 2 * visible_pairs(in, attention) * dims * (pass == Pass::forward ? 1 : pass == Pass::backward ? 2.5 : 3);
}

Measurement measure(const Inputs& in, Precision precision, Pass pass, const BenchOptions& options) {
  const Attention attention = scaled_for(options.attention.attention_among(precision), in.dim);
  const DeviceName device = options.attention.device();
  const OutputTypes types = OutputTypes::like(in, precision);
  const Shape q = in.q.shape4(), k = in.k.shape4();
  Measurement m{{q[0], q[1], k[1], q[2], k[2], in.dim},
                precision,
                pass,
                options.attention.causal(),
                {},
                {},
                {},
                flops(in, attention, pass),
                options.runs};
  ForwardResult forward = make_forward(in, types, pass == Pass::backward && reads_residual(attention));
  const auto timed = [&](const auto& call) {
    m.whole = Job(device, attention, call).time(options.warmup, options.runs);
    m.choice = chosen(explain(attention, supposed_on(device, call)));
  };
  if (pass == Pass::forward) {
    timed(forward_call(in, forward));
    m.kernel = is_eight_bit(precision) ? kernel_seconds(attention, in, forward, options) : m.whole.median;
  } else if (pass == Pass::backward) {
    BackwardResult result = make_backward(in, types);
    const Backward call = backward_call(in, forward, result);
    workspace_size(attention, supposed_on(device, call));  // rejects before the forward has cost anything
    Job(device, attention, forward_call(in, forward)).run();
    timed(call);
  } else {
    JvpResult result = make_jvp(in, types, false);
    timed(jvp_call(in, result));
  }
  if (pass != Pass::forward && !is_eight_bit(precision)) m.kernel = m.whole.median;
  return m;
}

nlohmann::ordered_json to_json(const Measurement& m) {
  const ProblemShape& s = m.shape;
  return {{"shape", {s.batch, s.heads, s.kv_heads, s.tokens_q, s.tokens_k, s.dim}},
          {"precision", name(m.precision)},
          {"pass", name(m.pass)},
          {"causal", m.causal},
          {"backend", m.choice.backend},
          {"median_seconds", m.whole.median},
          {"min_seconds", m.whole.least},
          {"kernel_seconds", m.kernel ? nlohmann::ordered_json(*m.kernel) : nlohmann::ordered_json()},
          {"tflops", m.flops / m.whole.median * 1e-12},
          {"runs", m.runs}};
}

void print(const std::vector<Measurement>& measurements) {
  Table table({{"shape b,hq,hkv,sq,sk,d", Table::Align::left},
               {"mask", Table::Align::left},
               {"pass", Table::Align::left},
               {"precision", Table::Align::left},
               {"median"},
               {"min"},
               {"kernel alone"},
               {"TFLOP/s"},
               {"kernel", Table::Align::left}});
  for (const Measurement& m : measurements) {
    const ProblemShape& s = m.shape;
    table.row({fmt::format("{},{},{},{},{},{}", s.batch, s.heads, s.kv_heads, s.tokens_q, s.tokens_k, s.dim),
               m.causal ? "causal" : "full", name(m.pass), name(m.precision), seconds_text(m.whole.median),
               seconds_text(m.whole.least), m.kernel ? seconds_text(*m.kernel) : "-",
               fmt::format("{:.4f}", m.flops / m.whole.median * 1e-12), m.choice.backend + ": " + m.choice.kernel});
  }
  table.print();
}

void bench_command(BenchOptions options) {
  const auto precisions = parse_precisions(options.precisions);
  const auto passes = parse_passes(options.passes);
  options.attention.expect_used(precisions);
  expect_usable(options.attention.device());
  if (options.runs < 1 || options.warmup < 0)
    reject("--runs, --warmup: found {}, {}, allowed: at least 1 run and 0 to warm up", options.runs, options.warmup);
  if (!options.file.empty() && (options.random || !options.shapes.empty()))
    reject("--file: gives shape and data; leave out --random and --shape");
  const auto wanted = [&](Pass pass) { return std::find(passes.begin(), passes.end(), pass) != passes.end(); };
  if (options.file.empty() && options.shapes.empty()) options.shapes = {"1,8,8,2048,2048,128", "1,8,8,2048,2048,64"};
  if (!options.file.empty()) options.shapes = {""};
  const Layout layout = options.attention.layout();

  std::vector<Measurement> measurements;
  Progress progress(options.shapes.size() * passes.size() * precisions.size());
  for (const std::string& shape : options.shapes)
    for (Pass pass : passes)
      for (Precision precision : precisions) {
        progress.step(fmt::format("{} {} {}", shape.empty() ? options.file : shape, name(pass), name(precision)));
        std::vector<std::string> drawn;
        Inputs in = shape.empty()
                        ? read_inputs(Source(options.file), layout, wanted(Pass::backward), wanted(Pass::jvp), drawn)
                        : draw_inputs(parse_shape(shape), layout, natural_type(precision), wanted(Pass::backward),
                                      wanted(Pass::jvp));
        in.dropout_seed = options.attention.dropout_seed();
        try {
          measurements.push_back(measure(in, precision, pass, options));
        } catch (const Error& error) {
          if (options.precisions != "all" || error.status() != OCTET_UNSUPPORTED) throw;
        }
      }
  progress.clear();
  if (measurements.empty()) reject("--pass {}: no precision has it", options.passes);
  if (!options.json) {
    fmt::print("layout {}\n", layout_text(layout));
    return print(measurements);
  }
  std::vector<nlohmann::ordered_json> objects;
  for (const Measurement& m : measurements) objects.push_back(to_json(m));
  print_json(objects);
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Median times of passes in each precision");
  const auto options = std::make_shared<BenchOptions>();
  command->add_option("--shape", options->shapes, "May be repeated  [1,8,8,2048,2048,128 and 1,8,8,2048,2048,64]")
      ->type_name("b,hq,hkv,sq,sk,d")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--precision", options->precisions, "P,P,... or all, of " + choices(kPrecisions) + "  [all]")
      ->type_name("P");
  command->add_option("--pass", options->passes, "Passes, of " + choices(kPasses) + "  [fwd]")->type_name("PASS");
  command->add_option("--warmup", options->warmup, "Runs before those that count  [1]")->type_name("N");
  command
      ->add_option("--runs", options->runs,
                   "Runs of which the median is taken: a run is one call by the wall clock, on a GPU as many calls "
                   "back to back as take 5 ms (at most 100) between two CUDA events, copies left out  [5]")
      ->type_name("N");
  command->add_flag("--random", options->random,
                    "Inputs from N(0, 1) with a fixed seed, in the precision's own type; this is the default");
  command->add_option("--file", options->file, "Inputs from a file, as octet check reads them")->type_name("FILE");
  command->add_flag("--json", options->json,
                    "Print an array of {shape, precision, pass, causal, backend, median_seconds, min_seconds, "
                    "kernel_seconds, tflops, runs}");
  options->attention.add_to(*command);
  options->attention.add_layout_to(*command);
  command->callback([options] { bench_command(*options); });
}

}  // namespace octet::cli
