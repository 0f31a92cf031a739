// The names of the enums of octet.h, as the command line and every message spell them.
#pragma once
#include <octet/octet.h>
#include <octet/octet_study.h>

#include <string>

#include "core/error.h"

namespace octet {

const char* name(octet_dtype);
const char* name(octet_precision);  // recipe.cc
const char* name(octet_pass);
const char* name(octet_alignment);
const char* name(octet_bias_correction);
const char* name(octet_switch);
const char* name(octet_delta);
const char* name(octet_granularity);
const char* name(octet_zero_point);
const char* name(octet_rope_style);
const char* name(octet_norm);
const char* name(octet_device);
const char* name(octet_operand);

// Bytes of one element; 0 for OCTET_DTYPE_NONE.
std::size_t bytes_of(octet_dtype);

bool is_float(octet_dtype);  // f64, f32, f16, bf16, e4m3, e5m2

// "[1, 8, 2048, 128]"
std::string shape_text(const int64_t (&shape)[4]);

// A field of octet.h as its enum. Throws Failure with the numbers and names allowed unless first <= value <= last.
template <class Enum>
Enum checked(uint32_t value, Enum first, Enum last, const char* label, const char* field = "") {
  if (value >= static_cast<uint32_t>(first) && value <= static_cast<uint32_t>(last)) return static_cast<Enum>(value);
  std::string allowed;
  for (uint32_t i = first; i <= static_cast<uint32_t>(last); ++i)
    allowed += text(allowed.empty() ? "" : ", ", i, " (", name(static_cast<Enum>(i)), ')');
  invalid(label, field, ": found ", value, ", allowed: ", allowed);
}

}  // namespace octet
