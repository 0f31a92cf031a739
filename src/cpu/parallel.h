// Threads for one call: started, used, joined. The library keeps none between calls.
#pragma once
#include <cstdint>
#include <functional>

namespace octet::cpu {

// Number of threads a call may use: `wanted`, or every CPU this process may run on if 0; at most `tasks`.
unsigned thread_count(unsigned wanted, int64_t tasks);

// Runs body(task, thread) for every task in [0, tasks), in ascending order of start. Exceptions are rethrown after
// all threads have stopped. `threads` as thread_count gave it.
void parallel_for(unsigned threads, int64_t tasks, const std::function<void(int64_t task, unsigned thread)>& body);

}  // namespace octet::cpu
