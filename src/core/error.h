// The one exception of the library's inside; the C ABI turns it into a status and a message.
#pragma once
#include <octet/octet.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace octet {

class Failure : public std::runtime_error {
 public:
  Failure(octet_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  octet_status status() const { return status_; }

 private:
  octet_status status_;
};

// "a" + 1 + "b": the parts of a message, concatenated.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// A text from outside, in quotes, for a message: what is no printable ASCII is shown as \xNN, so that messages are
// UTF-8 and a terminal obeys nothing in them.
std::string quoted(std::string_view outside);

template <class... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  throw Failure(OCTET_INVALID_ARGUMENT, text(parts...));
}

template <class... Parts>
[[noreturn]] void unsupported(const Parts&... parts) {
  throw Failure(OCTET_UNSUPPORTED, text(parts...));
}

}  // namespace octet
