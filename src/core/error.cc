#include "core/error.h"

namespace octet {

std::string quoted(std::string_view outside) {
  static const char hex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : outside) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte > 0x7e)
      out += text("\\x", hex[byte >> 4], hex[byte & 15]);
    else
      out += c;
  }
  return out + '"';
}

}  // namespace octet
