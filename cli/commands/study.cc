// octet study: what a description of roundings costs, on a file or on the inputs where rounding is biased, and with
// --sweep which of its points costs most.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <octet/octet.hpp>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "io/source.h"
#include "options.h"
#include "rounding_study.h"
#include "terminal.h"

namespace octet::cli {
namespace {

struct StudyOptions {
  std::string file, round = "flash";
  bool bias = false, sweep = false, json = false;
  AttentionOptions attention;
};

// The lines are at most 80 columns wide, as a terminal is.
constexpr const char* kStudyColumns = R"(Columns:
  input             the file, or the inputs of --bias
  exact             with --sweep the one point that is exact in this row, else
                    "as given": none beside those that --round leaves exact
  cost              with --sweep the part of rel L2, the mean over tensors, that
                    is gone where the point is exact; with --bias the part of
                    delta's mean error
  o, dq, .. rel L2  ||error|| / ||exact|| against float64, with --bias the
                    largest of the inputs
  outward ulps      mean error of o in units in the last place of its format,
                    counted away from zero: 0 where rounding is unbiased
  t                 that mean over its standard error: beyond 3 it is no chance
  delta mean error  sum of the errors of delta = rowsum(do o) over the sum of
                    |delta|: what is left of them when rows add up
  kappa             |sum of delta's errors| / sum of |delta's errors|: 0 where
                    they cancel, 1 where all have one sign)";

struct Row {
  std::string input, lifted;  // lifted: the point that is exact here; empty: none
  octet_rounding rounding;
  Effect effect;
  double cost = 0;  // see cost_of
};

double part_gone(double before, double after) { return before == 0 ? 0 : 1 - after / before; }

// Returns what lifting a rounding point gains. On a file it is the part of the relative L2 error that goes, the mean
// over tensors. On bias inputs it is the part of delta's mean error that goes (kappa alone would call tiny errors
// coherent).
double cost_of(const Effect& given, const Effect& lifted, bool bias) {
  if (bias) return part_gone(std::fabs(given.bias.delta_mean()), std::fabs(lifted.bias.delta_mean()));
  double sum = 0;
  for (std::size_t i = 0; i < given.rel_l2.size(); ++i)
    sum += part_gone(given.rel_l2[i].second, lifted.rel_l2[i].second);
  return sum / static_cast<double>(given.rel_l2.size());
}

std::vector<Row> study(const std::string& input, const std::vector<Experiment>& experiments,
                       const octet_rounding& rounding, const StudyOptions& options, Progress& progress) {
  progress.step(input);
  std::vector<Row> rows = {{input, "", rounding, examine(experiments, rounding)}};
  if (!options.sweep) return rows;
  const Effect given = rows[0].effect;
  for (const auto& [point, r] : lifted(rounding)) {
    progress.step(fmt::format("{} without rounding {}", input, point));
    Row row{input, point, r, examine(experiments, r)};
    row.cost = cost_of(given, row.effect, options.bias);
    rows.push_back(std::move(row));
  }
  std::stable_sort(rows.begin() + 1, rows.end(), [](const Row& a, const Row& b) { return a.cost > b.cost; });
  return rows;
}

void print(const std::vector<Row>& rows, const StudyOptions& options) {
  std::vector<Table::Column> columns = {{"input", Table::Align::left}, {"exact", Table::Align::left}};
  if (options.sweep) columns.push_back({"cost"});
  for (const auto& [tensor, error] : rows[0].effect.rel_l2) columns.push_back({tensor + " rel L2"});
  columns.insert(columns.end(), {{"outward ulps"}, {"t"}, {"delta mean error"}, {"kappa"}});
  Table table(columns);
  for (const Row& row : rows) {
    const bool given = row.lifted.empty();
    std::vector<std::string> cells = {given ? std::filesystem::path(row.input).filename().string() : "",
                                      given ? "as given" : row.lifted};
    if (options.sweep) cells.push_back(given ? "" : number_text("{:+.1f} %", 100 * row.cost));
    for (const auto& [tensor, error] : row.effect.rel_l2) cells.push_back(error_text(error));
    const Bias& bias = row.effect.bias;
    cells.insert(cells.end(), {number_text("{:+.4f}", bias.outward_ulps()), number_text("{:+.1f}", bias.t()),
                               row.effect.has_delta ? number_text("{:+.1e}", bias.delta_mean()) : "-",
                               row.effect.has_delta ? number_text("{:.3f}", bias.kappa()) : "-"});
    table.row(cells);
  }
  fmt::print("rounding {}\n", rounding_text(rows[0].rounding));
  table.print(kWidth);
}

nlohmann::ordered_json to_json(const Row& row, bool sweep) {
  nlohmann::ordered_json errors = nlohmann::ordered_json::object();
  for (const auto& [tensor, error] : row.effect.rel_l2) errors[tensor] = error;
  const auto or_null = [](bool present, const nlohmann::ordered_json& value) {
    return present ? value : nlohmann::ordered_json();
  };
  return {{"input", utf8(row.input)},
          {"rounding", rounding_text(row.rounding)},
          {"lifted", or_null(!row.lifted.empty(), row.lifted)},
          {"rel_l2", errors},
          {"outward_ulps", row.effect.bias.outward_ulps()},
          {"t", row.effect.bias.t()},
          {"delta_mean_error", or_null(row.effect.has_delta, row.effect.bias.delta_mean())},
          {"kappa", or_null(row.effect.has_delta, row.effect.bias.kappa())},
          {"cost", or_null(sweep && !row.lifted.empty(), row.cost)}};
}

void study_command(const StudyOptions& options) {
  if (options.file.empty() != options.bias)
    reject("study: {}", options.bias ? "give a file or --bias, not both" : "give a file or --bias");
  if (options.bias && options.attention.given())
    reject("--causal, --scale, --window: belong to a file; --bias has its own inputs");
  const octet_rounding rounding = parse_rounding(options.round);
  const std::size_t inputs = options.bias ? 2 : 1;
  Progress progress(inputs * (options.sweep ? 1 + lifted(rounding).size() : 1));
  std::vector<Row> rows;
  const auto add = [&](const std::string& input, const std::vector<Experiment>& experiments) {
    const auto more = study(input, experiments, rounding, options, progress);
    rows.insert(rows.end(), more.begin(), more.end());
  };
  if (options.bias) {
    add("S7", bias_experiments(BiasInput::s7));
    add("S8", bias_experiments(BiasInput::s8));
  } else {
    progress.say("float64 of " + options.file);
    const Source source(options.file);
    const bool backward = source.has("do");
    const Attention attention = options.attention.attention(Precision::f64);
    std::vector<Experiment> one;
    one.push_back(experiment(read_inputs(source, Layout::bhsd, backward, false), attention, backward));
    add(options.file, one);
  }
  progress.clear();
  if (!options.json) return print(rows, options);
  std::vector<nlohmann::ordered_json> objects;
  for (const Row& row : rows) objects.push_back(to_json(row, options.sweep));
  print_json(objects);
}

}  // namespace

void add_study(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("study", "A study of roundings: error and bias of any description of roundings");
  const auto options = std::make_shared<StudyOptions>();
  command->add_option("FILE", options->file, "q, k, v and, for gradients, do, as octet run reads them");
  command->add_flag("--bias", options->bias, "Instead of a file: inputs S7 and S8, on which rounding is biased");
  command->add_option("--round", options->round, rounding_help())->type_name("POINTS");
  command->add_flag("--sweep", options->sweep, "Make one point at a time exact, and rank the points by what they cost");
  command->add_flag(
      "--json", options->json,
      "Print an array of {input, rounding, lifted, rel_l2, outward_ulps, t, delta_mean_error, kappa, cost}");
  options->attention.add_mask_to(*command);
  command->footer(kStudyColumns);
  command->callback([options] { study_command(*options); });
}

}  // namespace octet::cli
