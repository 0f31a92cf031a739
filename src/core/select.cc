#include <cstdlib>
#include <string_view>

#include "core/backend.h"
#include "core/error.h"

namespace octet {

extern const Backend kCpu, kReference;

namespace {

constexpr const Backend* kBackends[] = {&kCpu, &kReference};

std::optional<std::string> objection_of(const Backend& backend, const Problem& problem, bool named) {
  if (auto reason = backend.unavailable()) return reason;
  if (!backend.automatic && !named && problem.precision != OCTET_PRECISION_F64)
    return text("runs only when asked for by name (or at precision f64)");
  return backend.objection(problem);
}

}  // namespace

BackendList backends() { return {kBackends, std::size(kBackends)}; }

const Backend& select(const Problem& problem, const char* wanted, std::string* report) {
  if (!wanted) wanted = std::getenv("OCTET_BACKEND");
  if (wanted && !*wanted) wanted = nullptr;
  std::string objections, names;
  bool known = false;
  const Backend* chosen = nullptr;
  for (const Backend* backend : backends()) {
    names += text(names.empty() ? "" : ", ", backend->name);
    const bool named = wanted && std::string_view(wanted) == backend->name;
    if (wanted && !named) continue;
    known = true;
    const auto objection = objection_of(*backend, problem, named);
    if (!objection && !chosen) chosen = backend;
    if (objection) objections += text("\n  ", backend->name, ": ", *objection);
    if (report)
      *report += objection ? text(backend->name, ": no, ", *objection, '\n')
                           : text(backend->name, chosen == backend ? ": chosen, " : ": could, ",
                                  backend->kernel(problem), '\n');
  }
  if (!known) invalid("backend: unknown name \"", wanted, "\"; known: ", names);
  if (!chosen && !report) unsupported("no backend can solve this problem:", objections);
  return chosen ? *chosen : *kBackends[0];
}

}  // namespace octet
