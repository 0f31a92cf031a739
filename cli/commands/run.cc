// octet run: attention of the tensors of one file into another.
#include <memory>
#include <octet/octet.hpp>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "io/sink.h"
#include "io/source.h"
#include "options.h"
#include "passes.h"
#include "place.h"

namespace octet::cli {
namespace {

struct RunOptions {
  std::string in, out, precision, out_dtype;
  bool backward = false, jvp = false, quiet = false;
  AttentionOptions attention;
};

// The recipe for inputs of this type, when none is asked for.
Precision precision_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return Precision::f64;
    case DType::f32:
      return Precision::f32;
    case DType::f16:
      return Precision::f16;
    case DType::bf16:
      return Precision::bf16;
    case DType::e4m3:
      return Precision::fp8;
    default:
      reject("q: dtype {}, allowed: f64, f32, f16, bf16, e4m3", name(dtype));
  }
}

// The arrays to be written. They have as many dimensions as q: from [head, token, dim] comes [head, token, dim].
class Results {
 public:
  explicit Results(bool has_batch) : has_batch_(has_batch) {}

  void add(const char* name, Array& array) {
    if (!has_batch_) array.shape.erase(array.shape.begin());
    arrays_.push_back({name, &array});
  }
  void add_dsinks(Array& dsinks) {
    dsinks.shape.resize(2);  // [batch, head]
    if (dsinks.shape[0] == 1) dsinks.shape.erase(dsinks.shape.begin());
    arrays_.push_back({"dsinks", &dsinks});
  }
  // lse or its tangent.
  void add_lse(const char* name, Array& lse) {
    lse.shape.pop_back();  // [batch, head, token]
    add(name, lse);
  }
  const std::vector<NamedArray>& arrays() const { return arrays_; }

 private:
  bool has_batch_;
  std::vector<NamedArray> arrays_;
};

void run_command(const RunOptions& options) {
  const Source source(options.in);
  Inputs in = read_inputs(source, options.attention.layout(), options.backward, options.jvp);
  in.dropout_seed = options.attention.dropout_seed();
  const Precision precision =
      options.precision.empty() ? precision_of(in.q.dtype) : parse(kPrecisions, "--precision", options.precision);
  const Attention attention = scaled_for(options.attention.attention(precision), in.dim);
  const OutputTypes types = options.out_dtype.empty()
                                ? OutputTypes::like(in, precision)
                                : OutputTypes::all(parse_output_type(options.out_dtype, precision));
  const DeviceName device = options.attention.device();
  expect_writable(options.out, options.in, {"o", "lse", "dq", "dk", "dv", "dsinks", "to", "tlse"});

  Results results(in.q.shape.size() == 4);
  std::vector<std::string> kernels;
  const auto compute = [&](Pass pass, const auto& call) {
    Job(device, attention, call).run();
    const Choice choice = chosen(explain(attention, supposed_on(device, call)));
    kernels.push_back(fmt::format("{} by {} ({})", name(pass), choice.backend, choice.kernel));
  };
  ForwardResult forward;
  BackwardResult backward;
  JvpResult jvp;
  if (options.jvp) {
    jvp = make_jvp(in, types, true);
    compute(Pass::jvp, jvp_call(in, jvp));
  }
  if (options.backward || !options.jvp) {
    forward = make_forward(in, types, options.backward && reads_residual(attention));
    compute(Pass::forward, forward_call(in, forward));
  }
  if (options.backward) {
    backward = make_backward(in, types);
    compute(Pass::backward, backward_call(in, forward, backward));
  }
  for (const auto& [label, array] : {std::pair{"o", &forward.o},
                                     {"o", &jvp.o},
                                     {"to", &jvp.to},
                                     {"dq", &backward.dq},
                                     {"dk", &backward.dk},
                                     {"dv", &backward.dv}})
    if (array->present()) *array = without_filling(in, label, *array);
  results.add("o", forward.o.present() ? forward.o : jvp.o);
  results.add_lse("lse", forward.o.present() ? forward.lse : jvp.lse);
  if (options.backward) results.add("dq", backward.dq), results.add("dk", backward.dk), results.add("dv", backward.dv);
  if (backward.dsinks.present()) results.add_dsinks(backward.dsinks);
  if (options.jvp) results.add("to", jvp.to), results.add_lse("tlse", jvp.tlse);
  write_arrays(options.out, results.arrays());
  if (options.quiet) return;
  std::vector<std::string> written;
  for (const auto& [label, array] : results.arrays())
    written.push_back(fmt::format("{} {}", label, name(array->dtype)));
  fmt::print("{}: {}; precision {}, {}\n", options.out, fmt::join(written, ", "), name(precision),
             fmt::join(kernels, ", "));
}

}  // namespace

void add_run(CLI::App& app) {
  CLI::App* command = app.add_subcommand("run", "Attention of the tensors of one file into another");
  const auto options = std::make_shared<RunOptions>();
  command
      ->add_option("IN", options->in,
                   "Tensors q, k, v (do with --backward; tq, tk, tv with --jvp), [batch, head, token, dim] or [head, "
                   "token, dim], or as --layout says; if there, sinks and alibi_slopes, [head] or [batch, head], with "
                   "--jvp tsinks, shaped "
                   "as sinks, and with "
                   "--backward dlse, shaped as lse: a .safetensors file, or a directory with q.npy, k.npy, ...")
      ->required();
  command
      ->add_option(
          "OUT", options->out,
          "o, lse; dq, dk, dv, and dsinks with sinks; to, tlse: a .safetensors file, or else a directory of .npy files")
      ->required();
  command->add_option("--precision", options->precision, choices(kPrecisions) + "  [the type of q; fp8 for e4m3]")
      ->type_name("P");
  command->add_flag("--backward", options->backward, "Gradients dq, dk, dv too, from do");
  command->add_flag("--jvp", options->jvp, "The tangents to and tlse too, from tq, tk, tv");
  command
      ->add_option(
          "--out-dtype", options->out_dtype,
          "Type of all outputs but lse, tlse and dsinks, which are f32: f32, f16, bf16; f64 with precision f64; e4m3 "
          "with fp8_raw and f64  [the inputs'; bf16 for e4m3, but e4m3 with fp8_raw]")
      ->type_name("T");
  command->add_flag("--quiet", options->quiet, "Do not tell what was written and which kernels ran");
  options->attention.add_to(*command);
  options->attention.add_layout_to(*command);
  command->callback([options] { run_command(*options); });
}

}  // namespace octet::cli
