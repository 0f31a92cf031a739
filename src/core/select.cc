// The backends, best first, and what each says to a problem.
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <vector>

#include "core/backend.h"
#include "core/error.h"
#include "core/names.h"

namespace octet {

extern const Backend kSm90, kCpu, kReference;

namespace {

constexpr const Backend* kBackends[] = {
#ifdef OCTET_SM90
    &kSm90,
#endif
    &kCpu, &kReference};

struct Verdict {
  const Backend* backend;
  std::optional<std::string> objection;
};

std::optional<std::string> objection_of(const Backend& backend, const Problem& problem, bool named) {
  if (auto reason = backend.unavailable()) return reason;
  if (problem.device != backend.device)
    return text("the tensors are on ", name(problem.device), "; it works on ", name(backend.device), " tensors");
  if (auto reason = backend.objection(problem)) return reason;
  if (!backend.automatic && !named && problem.precision != OCTET_PRECISION_F64)
    return text("it could, but runs only when asked for by name (or at precision f64)");
  return {};
}

// What every backend says, or only the one that is wanted.
std::vector<Verdict> verdicts(const Problem& problem, const char* wanted) {
  if (!wanted) wanted = std::getenv("OCTET_BACKEND");
  if (wanted && !*wanted) wanted = nullptr;
  std::vector<Verdict> out;
  std::string known;
  for (const Backend* backend : backends()) {
    known += text(known.empty() ? "" : ", ", backend->name);
    const bool named = wanted && std::string_view(wanted) == backend->name;
    if (!wanted || named) out.push_back({backend, objection_of(*backend, problem, named)});
  }
  if (out.empty()) invalid("backend: unknown name \"", wanted, "\"; known: ", known);
  return out;
}

}  // namespace

BackendList backends() { return {kBackends, std::size(kBackends)}; }

const Backend& select(const Problem& problem, const char* wanted) {
  std::string objections;
  for (const Verdict& verdict : verdicts(problem, wanted)) {
    if (!verdict.objection) return *verdict.backend;
    objections += text("\n  ", verdict.backend->name, ": ", *verdict.objection);
  }
  unsupported("no backend can solve this problem:", objections);
}

std::string explain(const Problem& problem, const char* wanted) {
  std::string report;
  bool chosen = false;
  for (const auto& [backend, objection] : verdicts(problem, wanted)) {
    if (objection)
      report += text(backend->name, ": no, ", *objection, '\n');
    else
      report += text(backend->name, chosen ? ": could, " : ": chosen, ", backend->kernel(problem), '\n');
    chosen |= !objection;
  }
  return report;
}

}  // namespace octet
