// octet check: each pass of each precision against float64, on the tensors of files. The float64 results come from the
// unfused oracle (precision f64) through the same C ABI.
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <octet/octet.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "commands/commands.h"
#include "io/source.h"
#include "metrics.h"
#include "options.h"
#include "passes.h"
#include "place.h"
#include "terminal.h"

namespace octet::cli {
namespace {

// The lines are at most 80 columns wide, as a terminal is.
constexpr const char* kCheckColumns = R"(Columns:
  cos         cosine of the angle to the exact result, over all elements
  rel L2      ||error|| / ||exact|| against float64
  worst head  the largest rel L2 of one head of one batch element
  max         the largest |error|
  nan         elements that are NaN, where there are any
  saturated   elements at the largest number of their type, likewise
  median      of the times of 5 calls
  backend     which computed it
--json has rel L1 = sum |error| / sum |exact| too.)";

struct CheckOptions {
  std::vector<std::string> files;
  std::string precisions = "all", passes = "fwd", out_dtype, fail_above;
  bool json = false;
  AttentionOptions attention;
};

constexpr int kRuns = 5;  // of which the median is told

// One line of the answer: an output of a pass in a precision.
struct Finding {
  std::string file;
  Precision precision;
  Pass pass;
  std::string tensor;
  Errors errors;
  double seconds;
  std::string backend;
};

// The float64 results of a file, computed when first asked for.
class Oracle {
 public:
  Oracle(const Inputs& in, const Attention& attention, Progress& progress)
      : in_(in), attention_(attention), progress_(progress) {
    attention_.precision = Precision::f64;
    attention_.backend = nullptr;
    attention_.bias_correction = BiasCorrection::f16, attention_.beta = 0;
    attention_.hadamard = attention_.smooth_q = Switch::automatic;
  }
  const ForwardResult& forward() {
    if (!forward_.o.present()) {
      progress_.say("forward pass in float64");
      forward_ = make_forward(in_, kTypes, false), run(attention_, forward_call(in_, forward_));
    }
    return forward_;
  }
  const BackwardResult& backward() {
    if (!backward_.dq.present()) {
      forward();
      progress_.say("backward pass in float64");
      backward_ = make_backward(in_, kTypes), run(attention_, backward_call(in_, forward_, backward_));
    }
    return backward_;
  }
  const JvpResult& jvp() {
    if (!jvp_.o.present()) {
      progress_.say("jvp pass in float64");
      jvp_ = make_jvp(in_, kTypes, false), run(attention_, jvp_call(in_, jvp_));
    }
    return jvp_;
  }

 private:
  static constexpr OutputTypes kTypes{DType::f64, DType::f64, DType::f64, DType::f64, DType::f64};
  const Inputs& in_;
  Attention attention_;
  Progress& progress_;
  ForwardResult forward_;
  BackwardResult backward_;
  JvpResult jvp_;
};

// Outputs in the inputs' type where the recipe can write it; fp8_raw writes e4m3, as its original does.
OutputTypes types_of(const CheckOptions& options, const Inputs& in, Precision precision) {
  if (!options.out_dtype.empty()) return OutputTypes::all(parse_output_type(options.out_dtype, precision));
  if (precision == Precision::fp8_raw) return OutputTypes::all(DType::e4m3);
  const DType type = in.q.dtype;
  return OutputTypes::all(type == DType::f32 || type == DType::f16 || type == DType::bf16 ? type : DType::f32);
}

// Checks one file; findings are appended.
class Checker {
 public:
  Checker(const CheckOptions& options, const std::string& file, const Inputs& in, std::vector<Finding>& findings,
          Progress& progress)
      : options_(options),
        file_(file),
        in_(in),
        findings_(findings),
        device_(options.attention.device()),
        oracle_(in, scaled_for(options.attention.attention(Precision::f64), in.dim), progress) {}

  void check(Pass pass, Precision precision) {
    const Attention attention = scaled_for(options_.attention.attention_among(precision), in_.dim);
    const OutputTypes types = types_of(options_, in_, precision);
    ForwardResult forward = make_forward(in_, types, pass == Pass::backward && reads_residual(attention));
    if (pass == Pass::forward) {
      const Forward call = forward_call(in_, forward);
      const double seconds = timed(attention, call);
      const ForwardResult& want = oracle_.forward();
      note(pass, attention, call, seconds, {{"o", &forward.o, &want.o}, {"lse", &forward.lse, &want.lse}});
    } else if (pass == Pass::backward) {
      BackwardResult result = make_backward(in_, types);
      const Backward call = backward_call(in_, forward, result);
      workspace_size(attention, supposed_on(device_, call));  // rejects before the forward has cost anything
      Job(device_, attention, forward_call(in_, forward)).run();
      const double seconds = timed(attention, call);
      const BackwardResult& want = oracle_.backward();
      std::vector<Pair> pairs{{"dq", &result.dq, &want.dq}, {"dk", &result.dk, &want.dk}, {"dv", &result.dv, &want.dv}};
      if (result.dsinks.present()) pairs.push_back({"dsinks", &result.dsinks, &want.dsinks});
      note(pass, attention, call, seconds, pairs);
    } else {
      JvpResult result = make_jvp(in_, types, false);
      const Jvp call = jvp_call(in_, result);
      const double seconds = timed(attention, call);
      const JvpResult& want = oracle_.jvp();
      note(pass, attention, call, seconds, {{"o", &result.o, &want.o}, {"to", &result.to, &want.to}});
    }
  }

 private:
  struct Pair {
    const char* tensor;
    const Array *got, *want;
  };

  // Runs a call; returns the median of its seconds.
  template <class Call>
  double timed(const Attention& attention, const Call& call) const {
    return Job(device_, attention, call).time(0, kRuns).median;
  }

  template <class Call>
  void note(Pass pass, const Attention& attention, const Call& call, double seconds, const std::vector<Pair>& pairs) {
    const std::string backend = chosen(explain(attention, supposed_on(device_, call))).backend;
    for (const auto& [tensor, got, want] : pairs)
      findings_.push_back({file_, attention.precision, pass, tensor,
                           compare(without_filling(in_, tensor, *got), without_filling(in_, tensor, *want)), seconds,
                           backend});
  }

  const CheckOptions& options_;
  std::string file_;
  const Inputs& in_;
  std::vector<Finding>& findings_;
  DeviceName device_;
  Oracle oracle_;
};

// Tables of one pass each, at most as wide as a terminal.
void print_findings(const std::vector<Finding>& findings) {
  const auto any = [&](auto field) {
    return std::any_of(findings.begin(), findings.end(), [&](const Finding& f) { return f.errors.*field != 0; });
  };
  const bool nan = any(&Errors::nan), saturated = any(&Errors::saturated);
  std::vector<Table::Column> columns = {{"precision", Table::Align::left}, {"tensor", Table::Align::left}};
  columns.insert(columns.end(), {{"cos"}, {"rel L2"}, {"worst head"}, {"max"}});
  if (nan) columns.push_back({"nan"});
  if (saturated) columns.push_back({"saturated"});
  columns.insert(columns.end(), {{"median"}, {"backend", Table::Align::left}});
  for (std::size_t i = 0; i < findings.size();) {
    const Pass pass = findings[i].pass;
    fmt::print("\n{}\n", bold(name(pass)));
    Table table(columns);
    const Finding* last = nullptr;
    for (; i < findings.size() && findings[i].pass == pass; ++i) {
      const Finding& f = findings[i];
      const bool new_recipe = !last || last->precision != f.precision;
      const Errors& e = f.errors;
      std::vector<std::string> cells = {new_recipe ? name(f.precision) : "", f.tensor,
                                        number_text("{:.6f}", e.cos),        error_text(e.rel_l2),
                                        error_text(e.worst_head_rel_l2),     error_text(e.max_abs)};
      if (nan) cells.push_back(std::to_string(e.nan));
      if (saturated) cells.push_back(std::to_string(e.saturated));
      cells.insert(cells.end(), {new_recipe ? seconds_text(f.seconds) : "", new_recipe ? f.backend : ""});
      table.row(cells);
      last = &f;
    }
    table.print(kWidth);
  }
}

// The end of a name that a column has no room for.
std::string shortened(const std::string& file) {
  constexpr std::size_t kRoom = 24;
  return file.size() <= kRoom ? file : "..." + file.substr(file.size() - (kRoom - 3));
}

// The largest rel L2 of each tensor over all files.
void print_worst(const std::vector<Finding>& findings, std::size_t files) {
  std::vector<const Finding*> worst;  // in order of first appearance
  for (const Finding& f : findings) {
    const auto same = [&](const Finding* w) {
      return w->precision == f.precision && w->pass == f.pass && w->tensor == f.tensor;
    };
    const auto found = std::find_if(worst.begin(), worst.end(), same);
    if (found == worst.end())
      worst.push_back(&f);
    else if (!(f.errors.rel_l2 <= (*found)->errors.rel_l2))
      *found = &f;
  }
  std::stable_sort(worst.begin(), worst.end(), [](const Finding* a, const Finding* b) {
    return std::pair(a->pass, a->precision) < std::pair(b->pass, b->precision);
  });
  fmt::print("\n{}\n", bold(fmt::format("worst of {} files", files)));
  Table table({{"pass", Table::Align::left},
               {"precision", Table::Align::left},
               {"tensor", Table::Align::left},
               {"rel L2"},
               {"cos"},
               {"worst head"},
               {"file", Table::Align::left}});
  const Finding* last = nullptr;
  for (const Finding* f : worst) {
    const bool new_pass = !last || last->pass != f->pass, new_recipe = new_pass || last->precision != f->precision;
    if (last && new_pass) table.gap();
    table.row({new_pass ? name(f->pass) : "", new_recipe ? name(f->precision) : "", f->tensor,
               error_text(f->errors.rel_l2), number_text("{:.6f}", f->errors.cos),
               error_text(f->errors.worst_head_rel_l2), shortened(std::filesystem::path(f->file).filename().string())});
    last = f;
  }
  table.print(kWidth);
}

nlohmann::ordered_json to_json(const Finding& f) {
  const Errors& e = f.errors;
  return {{"file", utf8(f.file)},
          {"precision", name(f.precision)},
          {"pass", name(f.pass)},
          {"tensor", f.tensor},
          {"cos", e.cos},
          {"rel_l1", e.rel_l1},
          {"rel_l2", e.rel_l2},
          {"max_abs", e.max_abs},
          {"worst_head_rel_l2", e.worst_head_rel_l2},
          {"nan", e.nan},
          {"seconds", f.seconds},
          {"runs", kRuns},
          {"backend", f.backend}};
}

// Which results are worse than --fail-above allows. NaN is never good enough, whatever float64 has in its place.
void expect_at_most(const std::vector<Finding>& findings, double most) {
  std::vector<std::string> failed;
  for (const Finding& f : findings) {
    const Errors& e = f.errors;
    if (e.nan == 0 && e.rel_l2 <= most) continue;
    failed.push_back(fmt::format("{}: {} {} {}: {}", f.file, name(f.pass), name(f.precision), f.tensor,
                                 e.nan ? fmt::format("{} NaN", e.nan) : "rel L2 " + error_text(e.rel_l2)));
  }
  if (failed.empty()) return;
  flush_output();
  throw Failed(fmt::format("--fail-above {}: {}", error_text(most), fmt::join(failed, "; ")));
}

void check_command(const CheckOptions& options) {
  const auto precisions = parse_precisions(options.precisions);
  const auto passes = parse_passes(options.passes);
  options.attention.expect_used(precisions);
  expect_usable(options.attention.device());
  const auto wanted = [&](Pass pass) { return std::find(passes.begin(), passes.end(), pass) != passes.end(); };
  const bool all = options.precisions == "all";
  std::optional<double> most;
  if (!options.fail_above.empty()) most = parse_number("--fail-above", options.fail_above);
  if (most && !(*most >= 0 && std::isfinite(*most)))
    reject("--fail-above: found {}, allowed: a relative L2 error, 0 or more", options.fail_above);
  std::FILE* notes = options.json ? stderr : stdout;

  std::vector<Finding> findings;
  {
    Progress progress(options.files.size() * precisions.size() * passes.size());
    for (const std::string& file : options.files) {
      progress.say("reading " + file);
      const Source source(file);
      std::vector<std::string> drawn;
      Inputs in = read_inputs(source, options.attention.layout(), wanted(Pass::backward), wanted(Pass::jvp), drawn);
      in.dropout_seed = options.attention.dropout_seed();
      const std::size_t first = findings.size();
      std::string left_out;
      Checker checker(options, file, in, findings, progress);
      for (Pass pass : passes)
        for (Precision precision : precisions) {
          progress.step(fmt::format("{} {} {}", file, name(pass), name(precision)));
          try {
            checker.check(pass, precision);
          } catch (const Error& error) {
            if (!all || error.status() != OCTET_UNSUPPORTED) throw;
            left_out += fmt::format("{}{} {}", left_out.empty() ? "" : ", ", name(pass), name(precision));
          }
        }
      if (findings.size() == first) reject("{}: no precision has a pass asked for", file);
      progress.clear();
      if (!options.json) {
        fmt::print("{}{}\nlayout {}\n", first ? "\n" : "", bold(file), layout_text(in.q.layout));
        for (const auto& [label, array, dim] :
             {std::tuple{"q", &in.q, in.dim}, {"k", &in.k, in.dim}, {"v", &in.v, in.dim_v}})
          fmt::print("{} {} {}\n", label, axes_text(with_last(*array, dim)), name(array->dtype));
        print_findings({findings.begin() + static_cast<std::ptrdiff_t>(first), findings.end()});
        if (!left_out.empty()) fmt::print("\n{}\n", faint(wrapped("no such pass: " + left_out)));
      }
      if (!drawn.empty())
        fmt::print(notes, "{}: has no {}; drawn from N(0, 1) with a fixed seed\n", file, fmt::join(drawn, ", "));
      flush_output();
    }
  }
  if (options.json) {
    std::vector<nlohmann::ordered_json> objects;
    for (const Finding& f : findings) objects.push_back(to_json(f));
    print_json(objects);
  } else if (options.files.size() > 1) {
    print_worst(findings, options.files.size());
  }
  if (most) expect_at_most(findings, *most);
}

}  // namespace

void add_check(CLI::App& app) {
  CLI::App* command = app.add_subcommand("check", "Error of each precision against float64 on the tensors of files");
  const auto options = std::make_shared<CheckOptions>();
  command
      ->add_option("FILE", options->files,
                   "q, k, v (do, tq, tk, tv) as octet run reads them; do and tangents that are absent are drawn")
      ->required();
  command->add_option("--precision", options->precisions, "P,P,... or all, of " + choices(kPrecisions) + "  [all]")
      ->type_name("P");
  command->add_option("--pass", options->passes, "Passes, of " + choices(kPasses) + "  [fwd]")->type_name("PASS");
  command
      ->add_option(
          "--out-dtype", options->out_dtype,
          "Type of outputs: f32, f16, bf16; f64 with precision f64; e4m3 with fp8_raw and f64  [the inputs', f32 for "
          "f64 and e4m3; e4m3 with fp8_raw]")
      ->type_name("T");
  command
      ->add_option("--fail-above", options->fail_above,
                   "Exit with status 1 if the relative L2 error of a tensor is larger, or if there is a NaN")
      ->type_name("REL");
  command->add_flag(
      "--json", options->json,
      "Print an array of {file, precision, pass, tensor, cos, rel_l1, rel_l2, max_abs, "
      "worst_head_rel_l2, nan, seconds, runs, backend}; seconds: the median of 5 runs, as octet bench times them");
  options->attention.add_to(*command);
  options->attention.add_layout_to(*command);
  command->footer(kCheckColumns);
  command->callback([options] { check_command(*options); });
}

}  // namespace octet::cli
