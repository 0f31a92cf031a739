// octet tune: which of the kernels that can run a call is fastest on this card, kept in a file that every later process
// reads (docs/tuning.md).
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <octet/octet.hpp>
#include <set>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "error.h"
#include "io/atomic_file.h"
#include "io/interrupt.h"
#include "options.h"
#include "passes.h"
#include "place.h"
#include "terminal.h"

namespace octet::cli {
namespace {

using ordered_json = nlohmann::ordered_json;

// A tile replaces the default one only where it is faster by this factor in each round.
constexpr double kGain = 1.03;
constexpr int kRounds = 3, kRunsOfRound = 5;

struct TuneOptions {
  std::vector<std::string> shapes;
  std::string precisions = "bf16", passes = "fwd,bwd", file;
  double seconds = 60;
  bool json = false;
  AttentionOptions attention;
};

// One call to tune.
struct Asked {
  std::string shape;
  Precision precision;
  Pass pass;
  bool causal;  // beside the options of the command
};

struct Tile {
  std::string backend, tile;
  std::vector<double> rounds;  // seconds: medians
  double median() const { return timing_of(rounds).median; }
  std::string text() const { return backend + " " + tile; }
};

struct Result {
  Asked asked;
  std::string cell, call, card;
  std::vector<Tile> tiles;  // the default first; none where this card has no kernel for the call
  bool timed() const { return tiles.size() > 1; }
  const Tile& best() const {
    const Tile* best = &tiles[0];
    for (auto tile = tiles.begin() + 1; tile < tiles.end(); ++tile) {
      bool faster = true;
      for (int round = 0; round < kRounds; ++round) faster &= tile->rounds[round] * kGain <= tiles[0].rounds[round];
      if (faster && tile->median() < best->median()) best = &*tile;
    }
    return *best;
  }
};

// The calls that models make most: training and prefill of long and short sequences, and decoding.
const std::vector<std::string> kShapes = {"4,16,16,512,512,64",  "1,16,16,2048,2048,64",  "1,16,16,8192,8192,64",
                                          "4,16,16,512,512,128", "1,16,16,2048,2048,128", "1,32,8,8192,8192,128",
                                          "1,32,8,1,8192,128",   "16,32,8,1,4096,128"};

// The calls of a file: an array of objects {shape, precision, pass, causal}, as octet bench --json prints them.
std::vector<Asked> read_calls(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) reject("{}: cannot read", path);
  std::vector<Asked> calls;
  try {
    for (const nlohmann::json& object : nlohmann::json::parse(stream)) {
      std::string shape;
      for (const nlohmann::json& n : object.at("shape")) shape += (shape.empty() ? "" : ",") + n.dump();
      calls.push_back({shape, parse(kPrecisions, path, object.at("precision").get<std::string>()),
                       parse(kPasses, path, object.at("pass").get<std::string>()), object.value("causal", false)});
    }
  } catch (const nlohmann::json::exception& error) {
    reject("{}: {}; expected an array of {{shape, precision, pass, causal}}, as octet bench --json prints it", path,
           error.what());
  }
  return calls;
}

std::vector<Asked> calls_of(const TuneOptions& options) {
  if (!options.file.empty()) {
    if (!options.shapes.empty()) reject("--file: gives the shapes; leave out --shape");
    return read_calls(options.file);
  }
  std::vector<Asked> calls;
  for (const std::string& shape : options.shapes.empty() ? kShapes : options.shapes)
    for (const Pass pass : parse_passes(options.passes))
      for (const Precision precision : parse_precisions(options.precisions)) {
        const ProblemShape s = parse_shape(shape);
        // Nobody trains on one query.
        if (options.shapes.empty() && pass != Pass::forward && s.tokens_q == 1) continue;
        calls.push_back({shape, precision, pass, false});
      }
  return calls;
}

// Calls f(the call of a pass) with its inputs and outputs in host memory, and what it needs computed before.
template <class F>
void with_call(const Inputs& in, const Attention& attention, Pass pass, const DeviceName& device, const F& f) {
  const OutputTypes types = OutputTypes::like(in, attention.precision);
  ForwardResult forward = make_forward(in, types, pass == Pass::backward && reads_residual(attention));
  if (pass == Pass::forward) return f(forward_call(in, forward));
  if (pass == Pass::jvp) {
    JvpResult result = make_jvp(in, types, false);
    return f(jvp_call(in, result));
  }
  BackwardResult result = make_backward(in, types);
  Job(device, attention, forward_call(in, forward)).run();
  f(backward_call(in, forward, result));
}

// Times the tiles of a call in turn, so that what changes with time changes for all. `known`: cells that were timed.
std::optional<Result> tune(const Asked& asked, const TuneOptions& options, std::set<std::string>& known) {
  const DeviceName device = options.attention.device();
  Inputs in = draw_inputs(parse_shape(asked.shape), options.attention.layout(), natural_type(asked.precision),
                          asked.pass == Pass::backward, asked.pass == Pass::jvp);
  in.dropout_seed = options.attention.dropout_seed();
  Attention attention = scaled_for(options.attention.attention_among(asked.precision), in.dim);
  if (asked.causal && !attention.causal) attention.causal = true, attention.alignment = Alignment::bottom_right;
  std::optional<Result> result;
  with_call(in, attention, asked.pass, device, [&](const auto& call) {
    const auto answer = nlohmann::json::parse(tiles(attention, supposed_on(device, call)));
    if (!known.insert(answer.at("cell")).second) return;
    result = {asked, answer.at("cell"), answer.at("call"), answer.at("card"), {}};
    if (answer.at("default").is_null()) return;
    const auto tile_of = [](const nlohmann::json& x) { return Tile{x.at("backend"), x.at("tile"), {}}; };
    result->tiles.push_back(tile_of(answer.at("default")));
    for (const nlohmann::json& x : answer.at("tiles"))
      if (x != answer.at("default")) result->tiles.push_back(tile_of(x));
    if (!result->timed()) return;
    Job job(device, attention, call);
    std::vector<Attention> with_tile(result->tiles.size(), attention);
    for (std::size_t i = 0; i < with_tile.size(); ++i)
      with_tile[i].backend = result->tiles[i].backend.c_str(), with_tile[i].tile = result->tiles[i].tile.c_str();
    for (int round = 0; round < kRounds; ++round) {
      std::vector<std::vector<double>> runs(with_tile.size());
      for (int run = 0; run < kRunsOfRound; ++run)
        for (std::size_t i = 0; i < with_tile.size(); ++i) {
          job.become(with_tile[i]);
          runs[i].push_back(job.seconds(0, 1)[0]);
        }
      for (std::size_t i = 0; i < with_tile.size(); ++i) result->tiles[i].rounds.push_back(timing_of(runs[i]).median);
    }
  });
  return result;
}

// A lock that processes which write the same file hold in turn. The system releases it when a process ends.
class Lock {
 public:
  explicit Lock(const std::string& path) : descriptor_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0 || ::flock(descriptor_, LOCK_EX) != 0)
      reject("{}: cannot lock: {}", path, std::strerror(errno));
  }
  ~Lock() { ::close(descriptor_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  int descriptor_;
};

// Returns the content of the file, without cells where it was made for other kernels or is damaged.
ordered_json read_file(const std::string& path, const std::string& kernels) {
  std::ifstream stream(path);
  if (stream) {
    const ordered_json file = ordered_json::parse(stream, nullptr, false);
    if (file.is_object() && file.value("kernels", "") == kernels && file.contains("cards") && file["cards"].is_object())
      return file;
  }
  return {{"octet", octet_version()}, {"kernels", kernels}, {"cards", ordered_json::object()}};
}

// Replaces the cells that were timed, and keeps all others.
void keep(const std::vector<Result>& results, const std::string& path, const std::string& kernels) {
  if (const auto folder = std::filesystem::path(path).parent_path(); !folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) reject("{}: cannot make this folder: {}", folder.string(), error.message());
  }
  const Lock lock(path + ".lock");
  ordered_json file = read_file(path, kernels);
  for (const Result& result : results) {
    ordered_json& cells = file["cards"][result.card];
    if (!cells.is_array()) cells = ordered_json::array();
    for (std::size_t i = cells.size(); i-- > 0;)
      if (cells[i].value("cell", "") == result.cell) cells.erase(i);
    if (!result.timed()) continue;
    const Tile &first = result.tiles[0], &best = result.best();
    if (&best == &first) continue;  // the default needs no entry
    cells.push_back({{"cell", result.cell},
                     {"call", result.call},
                     {"backend", best.backend},
                     {"tile", best.tile},
                     {"seconds", best.median()},
                     {"default", first.text()},
                     {"default_seconds", first.median()}});
  }
  const std::string text = file.dump(1) + "\n";
  AtomicFile out(path);
  out.write(text.data(), text.size());
  out.flush();
  const auto held = hold_signals();
  out.commit();
}

void print(const std::vector<Result>& results, bool as_json) {
  std::vector<ordered_json> objects;
  Table table({{"shape b,hq,hkv,sq,sk,d", Table::Align::left},
               {"pass", Table::Align::left},
               {"precision", Table::Align::left},
               {"default", Table::Align::left},
               {"fastest", Table::Align::left},
               {"default takes"},
               {"fastest takes"}});
  for (const Result& result : results) {
    const bool timed = result.timed(), replaced = timed && &result.best() != &result.tiles[0];
    table.row({result.asked.shape, name(result.asked.pass), name(result.asked.precision),
               result.tiles.empty() ? "no kernel computes it" : result.tiles[0].text(),
               replaced               ? result.best().text()
               : timed                ? "the default"
               : result.tiles.empty() ? "-"
                                      : "the only one",
               timed ? seconds_text(result.tiles[0].median()) : "-",
               timed ? seconds_text(result.best().median()) : "-"});
    ordered_json times = ordered_json::array();
    for (const Tile& tile : result.tiles)
      times.push_back({{"backend", tile.backend}, {"tile", tile.tile}, {"round_seconds", tile.rounds}});
    objects.push_back({{"cell", result.cell},
                       {"call", result.call},
                       {"card", result.card},
                       {"tiles", times},
                       {"kept", replaced ? ordered_json(result.best().text()) : ordered_json()}});
  }
  as_json ? print_json(objects) : table.print();
}

void tune_command(const TuneOptions& options) {
  expect_usable(options.attention.device());
  const auto tuning = nlohmann::json::parse(info()).at("tuning");
  if (options.attention.device().kind != Device::cuda)
    reject("--device: found cpu, allowed: a GPU, cuda or cuda:N; kernels of CPUs have no tiles to choose from");
  if (!(options.seconds > 0)) reject("--seconds: found {}, allowed: above 0", options.seconds);
  if (tuning.at("path").is_null())
    reject("octet tune: there is no file to keep results in: {}", tuning.at("reason").get<std::string>());
  const std::vector<Asked> calls = calls_of(options);
  std::vector<Precision> precisions;
  for (const Asked& asked : calls) precisions.push_back(asked.precision);
  options.attention.expect_used(precisions);

  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  std::vector<Result> results;
  std::set<std::string> known;
  std::size_t done = 0;
  {
    Progress progress(calls.size());
    for (const Asked& asked : calls) {
      if (seconds() > options.seconds) break;
      progress.step(fmt::format("{} {} {}", asked.shape, name(asked.pass), name(asked.precision)));
      if (auto result = tune(asked, options, known)) results.push_back(std::move(*result));
      ++done;
    }
  }
  const std::string path = tuning.at("path");
  keep(results, path, tuning.at("kernels"));
  print(results, options.json);
  if (options.json) return;
  if (done < calls.size())
    fmt::print("{} of {} calls were timed in {:g} seconds; --seconds gives more\n", done, calls.size(),
               options.seconds);
  fmt::print("kept in {}\n", path);
}

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* command = app.add_subcommand("tune", "Find the fastest kernels of calls on this card, and keep them");
  const auto options = std::make_shared<TuneOptions>();
  command->add_option("--shape", options->shapes, "May be repeated  [eight of training, prefill and decoding]")
      ->type_name("b,hq,hkv,sq,sk,d")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--file", options->file, "Calls from a file, as octet bench --json prints them")
      ->type_name("FILE");
  command->add_option("--precision", options->precisions, "P,P,... or all, of " + choices(kPrecisions) + "  [bf16]")
      ->type_name("P");
  command->add_option("--pass", options->passes, "Passes, of " + choices(kPasses) + "  [fwd,bwd]")->type_name("PASS");
  command->add_option("--seconds", options->seconds, "Begin no other call after so long  [60]")->type_name("N");
  command->add_flag("--json", options->json, "Print an array of {cell, call, card, tiles, kept}");
  command->footer(
      "Later calls of the same kind and about the same size then run the fastest kernel. The file is octet/tune.json "
      "in "
      "the cache directory, or the one that the environment variable OCTET_TUNE names; with OCTET_TUNE=off none is "
      "read.");
  options->attention.add_to(*command);
  options->attention.add_layout_to(*command);
  command->callback([options] { tune_command(*options); });
}

}  // namespace octet::cli
