// The backends, best first, and what each says to a problem.
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/error.h"
#include "core/names.h"

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

// Returns what a backend answers to a problem; `named`: the caller asks for it by name.
Answer answer_of(const Backend& backend, const Problem& problem, bool named, void* workspace) {
  if (auto reason = backend.unavailable()) return std::move(*reason);
  if (problem.device != backend.device)
    return text("the tensors are on ", name(problem.device), "; it works on ", name(backend.device), " tensors");
  Answer answer = backend.plan(problem, workspace);
  if (!answer.plan || named || !backend.deferral_reason) return answer;
  if (auto reason = backend.deferral_reason(problem)) return text("it could, but ", *reason);
  return answer;
}

// The backends that may run: all, or the one that the caller or else the environment names.
struct Candidates {
  explicit Candidates(const char* wanted) : all(backends()) {
    if (!wanted) wanted = std::getenv("OCTET_BACKEND");
    if (!wanted || !*wanted) return;
    named = true;
    std::string known;
    for (const Backend* const& backend : backends()) {
      if (std::string_view(wanted) == backend->name) {
        all = {&backend, 1};
        return;
      }
      known += text(known.empty() ? "" : ", ", backend->name);
    }
    invalid("backend: unknown name ", quoted(wanted), "; known: ", known);
  }

  BackendList all;
  bool named = false;
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
  const Candidates candidates(wanted);
  Reasons fitting, others;
  for (const Backend* backend : candidates.all) {
    Answer answer = answer_of(*backend, problem, candidates.named, workspace);
    if (answer.plan) return std::move(*answer.plan);
    (problem.device == backend->device ? fitting : others).add(backend->name, answer.reason);
  }
  unsupported("no backend can solve this problem:", fitting.text(), others.text());
}

std::string explain(const Problem& problem, const char* wanted) {
  const Candidates candidates(wanted);
  std::string report;
  bool chosen = false;
  for (const Backend* backend : candidates.all) {
    const Answer answer = answer_of(*backend, problem, candidates.named, nullptr);
    if (answer.plan)
      report += text(backend->name, chosen ? ": could, " : ": chosen, ", answer.plan->kernel(), '\n');
    else
      report += text(backend->name, ": no, ", answer.reason, '\n');
    chosen |= answer.plan.has_value();
  }
  return report;
}

}  // namespace octet
