// A backend is a table of functions. Adding one means writing a table and listing it in select.cc.
#pragma once
#include <optional>
#include <string>

#include "core/problem.h"

namespace octet {

// Scratch bytes owned by the caller.
struct Bytes {
  void* data = nullptr;
  std::size_t size = 0;
};

// What a backend does with one problem: everything that depends on the pass, the precision and the sizes, chosen once.
struct Plan {
  std::size_t workspace;  // bytes that `run` needs
  // Names the kernel: "forward bf16 amx, 64 x 64 tiles".
  std::string (*kernel)(const Problem&);
  void (*run)(const Problem&, Bytes workspace, void* stream);
};

struct Backend {
  const char* name;         // what octet_attention.backend, --backend and OCTET_BACKEND accept
  const char* description;  // one line for octet_info
  octet_device device;      // where the tensors of its calls lie

  // Returns why this backend cannot run at all on this machine, or nothing.
  std::optional<std::string> (*unavailable)();
  // Returns why this backend cannot solve this problem, whose tensors are on its kind of device, or nothing.
  std::optional<std::string> (*unsupported_reason)(const Problem&);
  // Returns why it defers a problem that it supports to another backend unless the caller names it, or nothing. Null:
  // it defers none.
  std::optional<std::string> (*deferral_reason)(const Problem&);
  // Plans a problem that it supports.
  Plan (*plan)(const Problem&);
};

// All backends, best first.
struct BackendList {
  const Backend* const* first;
  std::size_t count;
  const Backend* const* begin() const { return first; }
  const Backend* const* end() const { return first + count; }
};
BackendList backends();

// The first backend that supports the problem, or the one asked for by `wanted` (null: OCTET_BACKEND from the
// environment, else any). Throws Failure with every backend's reason if none is left.
const Backend& select(const Problem& problem, const char* wanted);

// A line per backend considered: chosen, could or no, with its kernel or the reason.
std::string explain(const Problem& problem, const char* wanted);

}  // namespace octet
