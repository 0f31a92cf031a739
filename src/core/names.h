// The names of the enums of octet.h, as the command line and every message spell them.
#pragma once
#include <octet/octet.h>

#include <string>

namespace octet {

const char* name(octet_dtype);
const char* name(octet_precision);
const char* name(octet_pass);
const char* name(octet_alignment);
const char* name(octet_remedy);
const char* name(octet_granularity);
const char* name(octet_device);
const char* name(octet_operand);

// Bytes of one element; 0 for OCTET_DTYPE_NONE.
std::size_t bytes_of(octet_dtype);

bool is_float(octet_dtype);  // f64, f32, f16, bf16, e4m3, e5m2

// "[1, 8, 2048, 128]"
std::string shape_text(const int64_t (&shape)[4]);

}  // namespace octet
