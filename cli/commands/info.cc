// octet info: the build, the machine and what can run here.
#include <dlfcn.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <octet/octet.hpp>
#include <string>

#include "commands/commands.h"
#include "error.h"
#include "terminal.h"

namespace octet::cli {
namespace {

using json = nlohmann::ordered_json;

std::string plain(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "none";
  if (!value.is_array()) return value.dump();
  std::string out;
  for (const json& item : value) out += (out.empty() ? "" : " ") + plain(item);
  return out.empty() ? "none" : out;
}

void print_field(const std::string& name, const json& value) {
  fmt::print("{} {}\n", bold(fmt::format("{:<10}", name)), plain(value));
}

void print_backend(const json& backend) {
  const bool available = backend.at("available");
  const std::string state = available ? "" : fmt::format(" (cannot run here: {})", plain(backend.at("reason")));
  fmt::print("  {} {}{}\n", bold(fmt::format("{:<10}", plain(backend.at("name")))), plain(backend.at("description")),
             state);
}

// Returns whether liboctet_jax.so, whose handlers XLA calls, lies beside the library, where jax looks for it.
bool has_xla_handlers() {
  Dl_info library{};
  if (!dladdr(reinterpret_cast<const void*>(&octet_version), &library) || !library.dli_fname) return false;
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::path(library.dli_fname).parent_path() / "liboctet_jax.so", ignored);
}

// Returns one line that names the backends which run on this machine, and what the others lack.
std::string summary(const json& info) {
  std::string gpus, reasons;
  for (const json& backend : info.at("backends")) {
    if (backend.at("device") != "cuda") continue;
    const bool available = backend.at("available");
    std::string& list = available ? gpus : reasons;
    list +=
        (list.empty() ? "" : "; ") + plain(backend.at("name")) + (available ? "" : ": " + plain(backend.at("reason")));
  }
  const std::string gpu = !gpus.empty()      ? "GPU kernels " + gpus
                          : !reasons.empty() ? "no GPU kernels (" + reasons + ")"
                                             : "no GPU kernels (" + plain(info.at("cuda")) + ")";
  return fmt::format("CPU kernels {}; {}; {}", plain(info.at("cpu").at("instruction_set")), gpu,
                     has_xla_handlers() ? "XLA handlers for jax" : "no XLA handlers, jax calls Python");
}

void print(const json& info) {
  fmt::print("This machine: {}\n", plain(info.at("summary")));
  for (const auto& [name, value] : info.items()) {
    if (name == "backends" || name == "summary") continue;
    if (!value.is_object()) {
      print_field(name, value);
      continue;
    }
    fmt::print("{}\n", bold(name));
    for (const auto& [key, item] : value.items()) fmt::print("  {:<10} {}\n", key, plain(item));
  }
  fmt::print("{}\n", bold("backends, best first"));
  for (const json& backend : info.at("backends")) print_backend(backend);
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Version, build, CPU, GPUs, and which backends can run here");
  const auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "Print JSON");
  command->callback([as_json] {
    json info = json::parse(octet::info());
    info["summary"] = summary(info);
    if (*as_json)
      fmt::print("{}\n", info.dump(2));
    else
      print(info);
  });
}

}  // namespace octet::cli
