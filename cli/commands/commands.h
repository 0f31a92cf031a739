// The subcommands: each adds itself, with its options, to the application, and runs while the command line is parsed.
#pragma once
#include <CLI/CLI.hpp>

namespace octet::cli {

void add_info(CLI::App& app);
void add_run(CLI::App& app);
void add_check(CLI::App& app);
void add_bench(CLI::App& app);
void add_study(CLI::App& app);
void add_explain(CLI::App& app);
void add_quantize(CLI::App& app);
void add_tune(CLI::App& app);

}  // namespace octet::cli
