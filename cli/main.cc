// octet: the command line of the library. It uses nothing but the public headers. Whatever goes wrong is one line on
// standard error and exit status 2; 1 says that octet check found an error above --fail-above,
// or octet explain no backend.
#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>
#include <octet/octet.hpp>
#include <sstream>
#include <string>

#include "commands/commands.h"
#include "error.h"
#include "io/interrupt.h"
#include "terminal.h"

namespace {

constexpr int kFailed = 1, kError = 2;

// The library's messages may list the reasons of backends, a line each.
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

int fail(const std::string& message, int status = kError) {
  std::fflush(stdout);
  std::fputs(fmt::format("octet: {}\n", one_line(message)).c_str(), stderr);
  return status;
}

// Files that are opened later must not become a closed standard stream. Reading is no way to write there, so that
// printing to one fails as it should.
void occupy_standard_streams() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor)
    if (::fcntl(descriptor, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
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
  octet::cli::add_tune(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError& error) {
    const auto remaining = app.remaining();
    return fail(remaining.empty() ? std::string(error.what()) + " (octet --help, octet COMMAND --help)"
                                  : "unknown command \"" + remaining.front() + "\" (octet --help lists them)");
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      std::ostringstream text;
      app.exit(error, text, text);
      fmt::print("{}", text.str());
      octet::cli::flush_output();
      return 0;
    }
    return fail(std::string(error.what()) + " (octet --help, octet COMMAND --help)");
  }
  octet::cli::flush_output();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_streams();
  octet::cli::remove_unfinished_on_signals();
  try {
    return run(argc, argv);
  } catch (const octet::cli::Failed& failed) {
    return fail(failed.what(), kFailed);
  } catch (const std::bad_alloc&) {
    return fail("out of memory");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}
