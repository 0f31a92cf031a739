// A thread waits for the signals that end the command.
#include "io/interrupt.h"

#include <csignal>
#include <cstdio>
#include <thread>
#include <vector>

namespace octet::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Never destroyed: the waiting thread lives as long as the process.
struct Unfinished {
  std::mutex mutex;
  std::vector<std::string> paths;
};

Unfinished& unfinished() {
  static Unfinished* const all = new Unfinished;
  return *all;
}

[[noreturn]] void wait_for(sigset_t signals) {
  int signal = 0;
  while (sigwait(&signals, &signal) != 0) {
  }
  const auto held = hold_signals();
  auto& paths = unfinished().paths;
  for (auto path = paths.rbegin(); path != paths.rend(); ++path) std::remove(path->c_str());
  std::signal(signal, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  std::raise(signal);
  std::_Exit(128 + signal);
}

}  // namespace

void remove_unfinished_on_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kSignals) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) sigaddset(&signals, signal);
  }
  unfinished();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // later threads inherit it
  std::thread(wait_for, signals).detach();
}

std::unique_lock<std::mutex> hold_signals() { return std::unique_lock(unfinished().mutex); }

void note_unfinished(const std::string& path) { unfinished().paths.push_back(path); }

void forget_unfinished(const std::string& path) { std::erase(unfinished().paths, path); }

}  // namespace octet::cli
