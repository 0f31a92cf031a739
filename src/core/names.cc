#include "core/names.h"

#include <iterator>

namespace octet {
namespace {

template <class Enum, std::size_t N>
const char* lookup(const char* const (&names)[N], Enum value) {
  const auto index = static_cast<std::size_t>(value);
  return index < N ? names[index] : "unknown";
}

}  // namespace

const char* name(octet_dtype v) {
  static const char* const names[] = {"none", "f64", "f32", "f16", "bf16", "e4m3",
                                      "e5m2", "i8",  "u8",  "i4",  "i32",  "bool"};
  return lookup(names, v);
}

const char* name(octet_pass v) {
  static const char* const names[] = {"forward", "backward", "jvp"};
  return lookup(names, v);
}

const char* name(octet_alignment v) {
  static const char* const names[] = {"unspecified", "top-left", "bottom-right"};
  return lookup(names, v);
}

const char* name(octet_bias_correction v) {
  static const char* const names[] = {"f16", "none", "beta", "exact_delta", "gproj"};
  return lookup(names, v);
}

const char* name(octet_switch v) {
  static const char* const names[] = {"auto", "on", "off"};
  return lookup(names, v);
}

const char* name(octet_delta v) {
  static const char* const names[] = {"o", "p"};
  return lookup(names, v);
}

const char* name(octet_granularity v) {
  static const char* const names[] = {"tensor", "token", "channel", "block", "thread"};
  return lookup(names, v);
}

const char* name(octet_zero_point v) {
  static const char* const names[] = {"symmetric", "integer", "float"};
  return lookup(names, v);
}

const char* name(octet_rope_style v) {
  static const char* const names[] = {"none", "half", "interleaved"};
  return lookup(names, v);
}

const char* name(octet_norm v) {
  static const char* const names[] = {"none", "rms"};
  return lookup(names, v);
}

const char* name(octet_device v) {
  static const char* const names[] = {"cpu", "cuda"};
  return lookup(names, v);
}

const char* name(octet_operand v) {
  static const char* const names[] = {"q", "k", "v"};
  return lookup(names, v);
}

std::size_t bytes_of(octet_dtype v) {
  static constexpr std::size_t bytes[] = {0, 8, 4, 2, 2, 1, 1, 1, 1, 1, 4, 1};
  const auto index = static_cast<std::size_t>(v);
  return index < std::size(bytes) ? bytes[index] : 0;
}

bool is_float(octet_dtype v) { return v >= OCTET_F64 && v <= OCTET_E5M2; }

std::string shape_text(const int64_t (&s)[4]) { return text('[', s[0], ", ", s[1], ", ", s[2], ", ", s[3], ']'); }

}  // namespace octet
