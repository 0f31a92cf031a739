// The host functions that both forward launches share, beside those of sm90/launch.h.
#include <algorithm>
#include <utility>

#include "cuda/host/card.h"
#include "cuda/sm90/fwd/launch.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

// Returns the time at which the last multiprocessor ends, with `whole` tiles of time 1 followed by `small` tiles of
// time `time`.
double end_of(int64_t whole, int64_t small, double time, int64_t processors) {
  const int64_t late = whole % processors, early = processors - late;
  double early_end = static_cast<double>(whole / processors), late_end = early_end + 1,
         end = late ? late_end : early_end;
  while (small > 0) {
    const bool first = !late || early_end <= late_end;
    double& next = first ? early_end : late_end;
    next += time, end = std::max(end, next);
    small -= first ? early : late;
  }
  return end;
}

}  // namespace

Plan forward(const Problem& p, const ForwardNumerics& numerics, void* workspace) {
  const ForwardChoice choice = choose_forward(p, numerics);
  return (choice.p_8bit ? forward_8bit : forward_16bit)(p, choice, workspace);
}

void shorten_tail(const Problem& p, TileScheduler& scheduler) {
  if (p.packed() || p.windowed) return;
  const int64_t processors = card(p.device_index).multiprocessors, batch_heads = p.batch * p.heads;
  const int most = scheduler.full_blocks;
  double best = end_of(most * batch_heads, 0, 0, processors);
  for (int whole = most - 1; whole >= 0 && (most - whole - 1) * batch_heads <= 2 * processors; --whole)
    for (const auto& [rows, time] : {std::pair{128, .85}, {64, .6}}) {
      const int64_t rest = p.tokens_q - static_cast<int64_t>(whole) * scheduler.rows, small = (rest + rows - 1) / rows;
      const double end = end_of(whole * batch_heads, small * batch_heads, time, processors);
      if (end >= best - .02) continue;
      best = end;
      scheduler.full_blocks = whole, scheduler.tail_blocks = static_cast<int>(small), scheduler.tail_rows = rows;
    }
}

}  // namespace octet::cuda::sm90
