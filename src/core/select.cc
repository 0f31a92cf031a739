// The backends, best first, and what each says to a problem.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/error.h"
#include "core/info.h"
#include "core/names.h"
#include "core/tuning.h"

namespace octet {

extern const Backend kSm90, kSm80, kCpu, kReference;

namespace {

constexpr const Backend* kBackends[] = {
#ifdef OCTET_SM90
    &kSm90,
#endif
#ifdef OCTET_SM80
    &kSm80,
#endif
    &kCpu, &kReference};

// Returns the reason why no kernel of a plan has a tile of a name, or nothing.
std::optional<std::string> no_tile_reason(std::string_view wanted, const Plan& plan) {
  if (!plan.tiles) return text("it has no tile ", quoted(wanted), ", as its kernels have none to choose from");
  std::string known;
  for (const std::string& tile : plan.tiles()) {
    if (tile == wanted) return {};
    known += text(known.empty() ? "" : ", ", tile);
  }
  return text("it has no tile ", quoted(wanted), "; it has: ", known);
}

// Returns what a backend answers to a problem; `named`: the caller asks for it by name.
Answer answer_of(const Backend& backend, const Problem& problem, bool named, void* workspace) {
  if (auto reason = backend.unavailable()) return std::move(*reason);
  if (problem.device != backend.device)
    return text("the tensors are on ", name(problem.device), "; it works on ", name(backend.device), " tensors");
  Answer answer = backend.plan(problem, workspace);
  if (!answer.plan) return answer;
  if (problem.tile.name && !problem.tile.tuned)
    if (auto reason = no_tile_reason(problem.tile.name, *answer.plan)) return std::move(*reason);
  if (named || problem.tile.name || !backend.deferral_reason) return answer;
  if (auto reason = backend.deferral_reason(problem)) return text("it could, but ", *reason);
  return answer;
}

// The backends that may run: all, the one first whose tile octet tune found, or the one that the caller or else the
// environment names.
struct Candidates {
  Candidates(const Problem& problem, const char* wanted) {
    if (!wanted) wanted = std::getenv("OCTET_BACKEND");
    named = wanted && *wanted;
    std::string known;
    for (const Backend* const backend : backends()) {
      if (!named || std::string_view(wanted) == backend->name) list[count++] = backend;
      known += text(known.empty() ? "" : ", ", backend->name);
    }
    if (!count) invalid("backend: unknown name ", quoted(wanted), "; known: ", known);
    if (problem.tile.tuned)
      std::stable_partition(begin(), end(), [&](const Backend* x) { return problem.tile.backend == x->name; });
  }

  const Backend** begin() { return list.data(); }
  const Backend** end() { return list.data() + count; }

  std::array<const Backend*, std::size(kBackends)> list;
  std::size_t count = 0;
  bool named;
};

// Why backends do not solve a problem, a line for each reason: "\n  sm90, sm80: no NVIDIA driver".
class Reasons {
 public:
  void add(const char* backend, const std::string& reason) {
    for (auto& [names, known] : lines_)
      if (known == reason) {
        names += octet::text(", ", backend);
        return;
      }
    lines_.emplace_back(backend, reason);
  }
  std::string text() const {
    std::string out;
    for (const auto& [names, reason] : lines_) out += octet::text("\n  ", names, ": ", reason);
    return out;
  }

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
};

}  // namespace

BackendList backends() { return {kBackends, std::size(kBackends)}; }

Plan select(const Problem& problem, const char* wanted, void* workspace) {
  Candidates candidates(problem, wanted);
  Reasons fitting, others;
  for (const Backend* backend : candidates) {
    Answer answer = answer_of(*backend, problem, candidates.named, workspace);
    if (answer.plan) return std::move(*answer.plan);
    (problem.device == backend->device ? fitting : others).add(backend->name, answer.reason);
  }
  unsupported("no backend can solve this problem:", fitting.text(), others.text());
}

std::string explain(const Problem& problem, const char* wanted) {
  Candidates candidates(problem, wanted);
  std::string report;
  bool chosen = false;
  for (const Backend* backend : candidates) {
    const Answer answer = answer_of(*backend, problem, candidates.named, nullptr);
    if (answer.plan)
      report += text(backend->name, chosen ? ": could, " : ": chosen, ", answer.plan->kernel(), '\n');
    else
      report += text(backend->name, ": no, ", answer.reason, '\n');
    chosen |= answer.plan.has_value();
  }
  return report;
}

std::string tiles_json(const Problem& problem, const char* wanted) {
  std::string list, first;
  Candidates candidates(problem, wanted);
  for (const Backend* backend : candidates) {
    const Answer answer = answer_of(*backend, problem, true, nullptr);
    if (!answer.plan || !answer.plan->tiles) continue;
    const bool runs = answer_of(*backend, problem, candidates.named, nullptr).plan.has_value();
    for (const std::string& tile : answer.plan->tiles()) {
      const std::string entry =
          text("{\"backend\": ", json_string(backend->name), ", \"tile\": ", json_string(tile), '}');
      list += text(list.empty() ? "" : ", ", entry);
      if (first.empty() && runs) first = entry;
    }
  }
  return text("{\"cell\": ", json_string(cell_of(problem).name()), ", \"call\": ", json_string(describe_cell(problem)),
              ", \"card\": ", card_json(problem), ", \"default\": ", first.empty() ? "null" : first,
              ", \"default_is\": ", default_json(problem), ", \"tiles\": [", list, "]}");
}

}  // namespace octet
