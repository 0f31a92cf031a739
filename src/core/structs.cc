#include "core/structs.h"

#include "core/error.h"

namespace octet::detail {

constexpr std::size_t kLargest = 4096;  // bounds how far a size that was never set makes the library read

void expect_size(const void* given, std::size_t size, std::size_t first, std::size_t known, std::size_t alignment,
                 const char* label, const char* field) {
  if (size < first || size > kLargest || size % alignment)
    invalid(label, field, ": size ", size, ", allowed: a multiple of ", alignment, " from ", first,
            " (octet 0.1.0) to ", kLargest, "; octet ", octet_version(), " has ", known);
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (std::size_t i = known; i < size; ++i)
    if (bytes[i])
      invalid(label, field, ": size ", size, ", but octet ", octet_version(), " knows ", known,
              " bytes of it, and byte ", i, " is ", unsigned{bytes[i]}, "; allowed: size ", known,
              ", or zeros in all other bytes");
}

}  // namespace octet::detail
