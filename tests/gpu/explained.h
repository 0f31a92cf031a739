// Helpers of tests that ask which kernel is chosen: the library's description of a forward pass, and a guard that sets
// an environment variable.
#pragma once
#include <cstdlib>
#include <optional>
#include <string>

#include "gpu/place.h"

namespace octet::test {

// Sets a variable, or takes it from the environment, for the time of its life.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* const now = std::getenv(name)) before_ = now;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) const { value ? setenv(name_, value, 1) : unsetenv(name_); }
  const char* name_;
  std::optional<std::string> before_;
};

inline std::string explained(const Case& c, const Attention& attention) {
  const Inputs in = draw(c, 1);
  const Buffer q(in.q, c.dtype), k(in.k, c.dtype), v(in.v, c.dtype), o(c.out_dtype, c.o_shape());
  GpuPlace place;
  return explain(attention,
                 Forward{.q = place.tensor(q), .k = place.tensor(k), .v = place.tensor(v), .o = place.tensor(o)});
}

}  // namespace octet::test
