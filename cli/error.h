// How the command says no: one line that names the value found and the values allowed. main prints it and exits 2, or 1
// where the command worked but the answer is no.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace octet::cli {

class Rejection : public std::runtime_error {
  using runtime_error::runtime_error;
};

class Failed : public std::runtime_error {
  using runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void reject(fmt::format_string<Args...> format, Args&&... args) {
  throw Rejection(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace octet::cli
