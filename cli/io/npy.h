// The .npy format, versions 1 to 3: a magic number, a Python dictionary literal with type, order and shape, then the
// elements. Little-endian C order only. NumPy has no bfloat16: "<V2", which ml_dtypes writes for it, is read and
// written as bf16; 8-bit floats have no .npy type and are rejected.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "io/atomic_file.h"
#include "io/file.h"

namespace octet::cli {

struct NpyHeader {
  DType dtype = DType::none;
  std::vector<int64_t> shape;
};

// Validates the dictionary literal.
NpyHeader parse_npy_header(std::string_view text);

Array read_npy(const File& file);

// Rejects dtypes that .npy cannot hold, before anything is written.
void expect_npy_dtype(const std::string& name, DType dtype);
void write_npy(AtomicFile& file, const Array& array);

}  // namespace octet::cli
