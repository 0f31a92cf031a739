// Words and numbers of the command line.
#include "names.h"

#include <charconv>

namespace octet::cli {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (std::size_t first = 0;;) {
    const std::size_t last = text.find(separator, first);
    parts.emplace_back(text.substr(first, last - first));
    if (last == std::string_view::npos) return parts;
    first = last + 1;
  }
}

int64_t parse_integer(std::string_view option, std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    refuse("{}: found \"{}\", expected a whole number", option, text);
  return value;
}

double parse_number(std::string_view option, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    refuse("{}: found \"{}\", expected a number", option, text);
  return value;
}

}  // namespace octet::cli
