// Threads for one call: started, used, joined. The library keeps none between calls.
#pragma once
#include <cstdint>
#include <type_traits>

namespace octet::cpu {

// Number of threads a call may use: `wanted`, or every CPU this process may run on if 0; at most `tasks`.
unsigned thread_count(unsigned wanted, int64_t tasks);

using TaskFunction = void (*)(void* body, int64_t task, unsigned thread);
void run_tasks(unsigned threads, int64_t tasks, TaskFunction function, void* body);

// Runs body(task, thread) for every task in [0, tasks), in ascending order of start. Exceptions are rethrown after
// all threads have stopped. `threads` as thread_count gave it.
template <class Body>
void parallel_for(unsigned threads, int64_t tasks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_tasks(
      threads, tasks, [](void* b, int64_t task, unsigned thread) { (*static_cast<Plain*>(b))(task, thread); },
      const_cast<std::remove_const_t<Plain>*>(&body));
}

}  // namespace octet::cpu
