// Words and numbers of the command line.
#include "names.h"

#include <charconv>
#include <cmath>

namespace octet::cli {

DType parse_tensor_type(std::string_view option, std::string_view text, Precision precision, bool e4m3) {
  std::string allowed;
  for (const auto& [word, type] : {Name<DType>{"f64", DType::f64},
                                   {"f32", DType::f32},
                                   {"f16", DType::f16},
                                   {"bf16", DType::bf16},
                                   {"e4m3", DType::e4m3}}) {
    if ((type == DType::f64 && precision != Precision::f64) || (type == DType::e4m3 && !e4m3)) continue;
    if (text == word) return type;
    allowed += (allowed.empty() ? "" : ", ") + std::string(word);
  }
  reject("{}: found \"{}\", allowed with precision {}: {}", option, text, name(precision), allowed);
}

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
    reject("{}: found \"{}\", expected a whole number", option, text);
  return value;
}

double parse_number(std::string_view option, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    reject("{}: found \"{}\", expected a number", option, text);
  return value;
}

float parse_float(std::string_view option, std::string_view text) {
  const double wide = parse_number(option, text);
  const auto value = static_cast<float>(wide);
  if ((value == 0) != (wide == 0) || std::isinf(value) != std::isinf(wide))
    reject("{}: found {}, beyond float32; allowed: sizes from 1.2e-38 to 3.4e38", option, text);
  return value;
}

}  // namespace octet::cli
