// A signal that ends the command leaves no unfinished file behind. SIGINT, SIGTERM and SIGHUP remove the files and
// directories that are noted as unfinished, then end the process as they would have, so that a shell reports 128 + the
// signal.
#pragma once
#include <mutex>
#include <string>

namespace octet::cli {

// Call once, before any other thread exists. Signals that the process was started to ignore stay ignored.
void remove_unfinished_on_signals();

// While the lock is held, a signal waits. A path is created and noted, or finished and forgotten, under one lock.
std::unique_lock<std::mutex> hold_signals();

// Under the lock. A directory is noted before what is in it.
void note_unfinished(const std::string& path);
void forget_unfinished(const std::string& path);

}  // namespace octet::cli
