// The flags that every rung's program takes.
#include <CLI/CLI.hpp>
#include <sstream>

#include "harness.h"

namespace ladder {
namespace {

template <typename T>
std::string list(const std::vector<T>& values) {
  std::ostringstream text;
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
  return text.str();
}

// A whole number from low to high.
CLI::Validator between(int64_t low, int64_t high) {
  const std::string range = std::to_string(low) + " to " + std::to_string(high);
  return CLI::Validator(
      [=](std::string& text) {
        int64_t value;
        if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return std::string();
        return "found " + text + ", allowed: whole numbers from " + range;
      },
      "(" + range + ")");
}

// One of the given words.
CLI::Validator one_of(const std::vector<std::string>& words) {
  return CLI::Validator(
      [=](std::string& text) {
        if (std::find(words.begin(), words.end(), text) != words.end()) return std::string();
        return "found " + text + ", allowed: " + list(words);
      },
      "(" + list(words) + ")");
}

}  // namespace

const char* name_of(Element element) {
  return element == Element::f32 ? "f32" : element == Element::f16 ? "f16" : "bf16";
}

const char* name_of(Pairing pairing) {
  return pairing == Pairing::none ? "none" : pairing == Pairing::halves ? "halves" : "interleaved";
}

const Kernel& kernel_of(const Rung& rung, const std::string& name) {
  for (const Kernel& kernel : rung.kernels) {
    if (kernel.name == name) return kernel;
  }
  throw Stop{"--kernel: found " + name + ", which " + rung.name + " lacks", kUsage};
}

Options parse(int argc, const char* const* argv, const Rung& rung) {
  Options options;
  Problem& problem = options.problem;
  problem.dim = rung.dims.front();
  for (int dim : rung.dims) {
    if (dim == 64) problem.dim = dim;
  }
  options.kernel = rung.kernels.front().name;
  options.cache_dir = default_cache_dir();

  std::vector<std::string> kernels;
  for (const Kernel& kernel : rung.kernels) kernels.push_back(kernel.name);
  std::vector<std::string> dims;
  for (int dim : rung.dims) dims.push_back(std::to_string(dim));
  std::string rope = "none";
  bool random = false, constant = false, check = false, no_check = false, no_cache = false;

  CLI::App app{std::string(rung.name) + ": " + rung.idea};
  app.set_help_flag("-h,--help", "Print this text");
  app.add_option("--batch", problem.batch)->check(between(1, 65535))->capture_default_str();
  app.add_option("--heads", problem.heads)->check(between(1, 65535))->capture_default_str();
  app.add_option("--seq", problem.seq, "Queries, and keys, of each head")
      ->check(between(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--dim", problem.dim, "Channels of each head")->check(one_of(dims))->capture_default_str();
  app.add_flag("--causal", problem.causal, "Query i sees keys 0 to i");
  app.add_option("--kernel", options.kernel, "The kernel, or the step of it, that is timed")
      ->check(one_of(kernels))
      ->capture_default_str();
  app.add_option("--rope", rope, "Rotate q and k: channels c and c + dim / 2, or 2c and 2c + 1")
      ->check(one_of({"none", "halves", "interleaved"}))
      ->capture_default_str();
  app.add_option("--d-model", options.d_model, "Width of a whole layer, with projections; 0: attention alone")
      ->check(between(0, 65536))
      ->capture_default_str();
  app.add_option("--warmup", options.warmup, "Launches before those that are timed")
      ->check(between(0, 1000000))
      ->capture_default_str();
  app.add_option("--runs", options.runs, "Launches that are timed; 0: none")
      ->check(between(0, 1000000))
      ->capture_default_str();
  auto* random_flag = app.add_flag("--random", random, "Normal values, always the same (the default)");
  auto* constant_flag = app.add_flag("--constant", constant, "Ones: o is 1 as well")->excludes(random_flag);
  app.add_option("--file", options.file, "q, k and v one after the other, f32 [batch, heads, seq, dim] each")
      ->excludes(random_flag)
      ->excludes(constant_flag);
  auto* check_flag = app.add_flag("--check", check, "Compare with float64 (the default)");
  app.add_flag("--no-check", no_check)->excludes(check_flag);
  app.add_flag("--json", options.json, "Print one JSON object instead of text");
  app.add_flag("--no-cache", no_cache, "Compute the reference, and store it nowhere");
  app.add_option("--cache-dir", options.cache_dir, "Where reference results are kept")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, err;
    const int status = app.exit(error, out, err);
    throw Stop{status ? std::string(rung.name) + ": " + err.str() : out.str(), status ? kUsage : 0};
  }

  options.rope = rope == "none" ? Pairing::none : rope == "halves" ? Pairing::halves : Pairing::interleaved;
  options.check = !no_check;
  options.cache = !no_cache;
  options.input = constant ? Input::constant : !options.file.empty() ? Input::file : Input::random;
  const auto reject = [&](const std::string& text) { throw Stop{std::string(rung.name) + ": " + text + "\n", kUsage}; };
  if (static_cast<int64_t>(problem.batch) * problem.heads > 65535) {
    reject("--batch times --heads: found " + std::to_string(static_cast<int64_t>(problem.batch) * problem.heads) +
           ", allowed: at most 65535, the largest grid of a GPU in its third dimension");
  }
  if (options.input == Input::file && options.d_model) {
    reject("--d-model: found " + std::to_string(options.d_model) +
           " with --file, allowed: 0, as the file holds q, k and v");
  }
  if (kernel_of(rung, options.kernel).part && options.d_model) {
    reject("--kernel: found " + options.kernel + " with --d-model, allowed: " + kernels.front() +
           ", as the others are steps of it");
  }
  return options;
}

}  // namespace ladder
