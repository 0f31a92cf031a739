// The backends, best first, and what each says to a problem.
#include <cstdlib>
#include <iterator>
#include <string_view>

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

// Returns why a backend cannot run a problem, or nothing; `named`: the caller asks for it by name.
std::optional<std::string> reason_against(const Backend& backend, const Problem& problem, bool named) {
  if (auto reason = backend.unavailable()) return reason;
  if (problem.device != backend.device)
    return text("the tensors are on ", name(problem.device), "; it works on ", name(backend.device), " tensors");
  if (auto reason = backend.unsupported_reason(problem)) return reason;
  if (named || !backend.deferral_reason) return {};
  if (auto reason = backend.deferral_reason(problem)) return text("it could, but ", *reason);
  return {};
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
    invalid("backend: unknown name \"", wanted, "\"; known: ", known);
  }

  BackendList all;
  bool named = false;
};

}  // namespace

BackendList backends() { return {kBackends, std::size(kBackends)}; }

const Backend& select(const Problem& problem, const char* wanted) {
  const Candidates candidates(wanted);
  std::string reasons;
  for (const Backend* backend : candidates.all) {
    const auto reason = reason_against(*backend, problem, candidates.named);
    if (!reason) return *backend;
    reasons += text("\n  ", backend->name, ": ", *reason);
  }
  unsupported("no backend can solve this problem:", reasons);
}

std::string explain(const Problem& problem, const char* wanted) {
  const Candidates candidates(wanted);
  std::string report;
  bool chosen = false;
  for (const Backend* backend : candidates.all) {
    const auto reason = reason_against(*backend, problem, candidates.named);
    if (reason)
      report += text(backend->name, ": no, ", *reason, '\n');
    else
      report += text(backend->name, chosen ? ": could, " : ": chosen, ", backend->plan(problem).kernel(problem), '\n');
    chosen |= !reason;
  }
  return report;
}

}  // namespace octet
