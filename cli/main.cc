// octet: the command line of the library. It uses nothing but the public headers. Whatever goes wrong is one line on
// standard error and exit status 2.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <octet/octet.hpp>
#include <string>

#include "commands/commands.h"
#include "error.h"

namespace {

constexpr int kError = 2;

// The library's messages may list the objections of backends, a line each.
std::string one_line(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\n') {
      out += text[i];
      continue;
    }
    while (i + 1 < text.size() && text[i + 1] == ' ') ++i;
    if (i + 1 < text.size()) out += out.ends_with(':') ? " " : "; ";
  }
  return out;
}

int fail(const std::string& message) {
  std::fflush(stdout);
  fmt::print(stderr, "octet: {}\n", one_line(message));
  return kError;
}

int run(int argc, char** argv) {
  CLI::App app{"Attention in 16 and 8 bits, to train with and to trust.", "octet"};
  app.set_version_flag("--version", octet_version());
  app.require_subcommand(1);
  octet::cli::add_info(app);
  octet::cli::add_run(app);
  octet::cli::add_check(app);
  octet::cli::add_bench(app);
  octet::cli::add_study(app);
  octet::cli::add_explain(app);
  octet::cli::add_quantize(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError& error) {
    const auto remaining = app.remaining();
    return fail(remaining.empty() ? std::string(error.what()) + " (octet --help, octet COMMAND --help)"
                                  : "unknown command \"" + remaining.front() + "\" (octet --help lists them)");
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return fail(std::string(error.what()) + " (octet --help, octet COMMAND --help)");
  }
  if (std::fflush(stdout) != 0) octet::cli::refuse("standard output: cannot write: {}", std::strerror(errno));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    return fail("out of memory");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}
