// The structs of octet.h as callers pass them: their size is that of the octet.h which the caller was compiled with.
#pragma once
#include <octet/octet.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace octet {

// The size that a struct had in octet.h 0.1.0, the first. No struct is smaller, so the fields of 0.1.0 may be read
// where they lie; a field that came later is read from the copy that `whole` makes.
template <class Struct>
inline constexpr std::size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr std::size_t kFirstSize<octet_attention> = offsetof(octet_attention, dropout_p);
template <>
inline constexpr std::size_t kFirstSize<octet_arguments> = offsetof(octet_arguments, dlse);
template <>
inline constexpr std::size_t kFirstSize<octet_rope> = offsetof(octet_rope, norm);

namespace detail {
void expect_size(const void* given, std::size_t size, std::size_t first, std::size_t known, std::size_t alignment,
                 const char* label, const char* field);
}

// Rejects a size that no octet.h has, and fields of a newer octet.h that are not zero. `label` and `field` name the
// struct.
template <class Struct>
void expect_size(const Struct& given, const char* label, const char* field = "") {
  detail::expect_size(&given, given.size, kFirstSize<Struct>, sizeof(Struct), alignof(Struct), label, field);
}

// The same, then a copy with the fields of this library's octet.h; those that the caller's lacks are zero.
template <class Struct>
Struct whole(const Struct& given, const char* label) {
  expect_size(given, label);
  Struct copy{};
  std::memcpy(&copy, &given, std::min<std::size_t>(given.size, sizeof(Struct)));
  return copy;
}

}  // namespace octet
