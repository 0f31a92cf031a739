#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace octet::cpu {

namespace {

// The CPUs on which the threads of a call begin. Left alone, a new thread waits behind its parent until the scheduler
// balances: 3 ms of an 8 ms call were lost to that.
class Places {
 public:
#ifdef __linux__
  Places() {
    if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) return;
    const int here = std::max(0, sched_getcpu());
    for (int i = 1; i < CPU_SETSIZE; ++i) {
      const int cpu = (here + i) % CPU_SETSIZE;
      if (CPU_ISSET(cpu, &allowed_)) others_.push_back(cpu);
    }
  }

  // Moves the given one of the other threads to a CPU of its own, from where it may move on.
  void spread(std::jthread& thread, std::size_t index) const {
    if (index >= others_.size()) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(others_[index], &one);
    if (pthread_setaffinity_np(thread.native_handle(), sizeof one, &one) == 0)
      pthread_setaffinity_np(thread.native_handle(), sizeof allowed_, &allowed_);
  }

 private:
  cpu_set_t allowed_{};
  std::vector<int> others_;
#else
  void spread(std::jthread&, std::size_t) const {}
#endif
};

}  // namespace

unsigned thread_count(unsigned wanted, int64_t tasks) {
  unsigned available = std::max(1u, std::thread::hardware_concurrency());
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) available = std::max(1, CPU_COUNT(&set));
#endif
  const int64_t count = wanted ? wanted : available;
  return static_cast<unsigned>(std::clamp<int64_t>(count, 1, std::max<int64_t>(1, tasks)));
}

void run_tasks(unsigned threads, int64_t tasks, TaskFunction function, void* body) {
  if (threads > tasks) threads = static_cast<unsigned>(std::max<int64_t>(tasks, 1));
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) function(body, task, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&](unsigned thread) {
    try {
      for (int64_t task; (task = next.fetch_add(1)) < tasks;) function(body, task, thread);
    } catch (...) {
      next.store(tasks);
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  };
  const Places places;
  std::vector<std::jthread> team;
  team.reserve(threads - 1);
  for (unsigned t = 1; t < threads; ++t) {
    team.emplace_back(work, t);
    places.spread(team.back(), t - 1);
  }
  work(0);
  team.clear();  // joins
  if (error) std::rethrow_exception(error);
}

}  // namespace octet::cpu
