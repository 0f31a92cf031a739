// A backend is a table of functions. Adding one means writing a table and listing it in select.cc.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"

namespace octet {

// A plan is what a backend does with one problem: it has everything that depends on the pass, the recipe and the sizes,
// found once a call. It refers to the problem, and to the workspace that it was made for.
struct Plan {
  std::size_t workspace;  // bytes that `run` needs
  // Names the kernel: "forward bf16 amx, 64 x 64 tiles".
  std::function<std::string()> kernel;
  std::function<void(void* stream)> run;
  // Names the tiles of the kernels that can run the problem, the default first. Empty: there are none to choose from.
  std::function<std::vector<std::string>()> tiles{};
};

// A plan, or the reason why there is none.
struct Answer {
  Answer(Plan&& p) : plan(std::move(p)) {}
  Answer(std::string&& r) : reason(std::move(r)) {}
  std::optional<Plan> plan;
  std::string reason;  // where there is no plan
};

struct Backend {
  const char* name;         // what octet_attention.backend, --backend and OCTET_BACKEND accept
  const char* description;  // one line for octet_info
  octet_device device;      // where the tensors of its calls lie

  // Returns why this backend cannot run at all on this machine, or nothing.
  std::optional<std::string> (*unavailable)();
  // Plans a problem whose tensors are on its kind of device. It writes nothing. The plan of a null workspace, which
  // asks for its size alone, is not run.
  Answer (*plan)(const Problem&, void* workspace);
  // Returns why it defers a problem that it can solve to another backend unless the caller names it, or nothing. Null:
  // it defers none.
  std::optional<std::string> (*deferral_reason)(const Problem&);
};

// All backends, best first.
struct BackendList {
  const Backend* const* first;
  std::size_t count;
  const Backend* const* begin() const { return first; }
  const Backend* const* end() const { return first + count; }
};
BackendList backends();

// The plan of the first backend that can solve the problem, or of the one asked for by `wanted` (null: OCTET_BACKEND
// from the environment, else any). Throws Failure with every backend's reason if none can.
Plan select(const Problem& problem, const char* wanted, void* workspace);

// A line per backend considered: chosen, could or no, with its kernel or the reason.
std::string explain(const Problem& problem, const char* wanted);

// The tiles of all backends' kernels that can run a problem, as octet_tiles has them.
std::string tiles_json(const Problem& problem, const char* wanted);

}  // namespace octet
