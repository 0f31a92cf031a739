// A sink writes results to one .safetensors file, or for any other path to a directory with NAME.npy for each tensor.
// All files are whole on the disk before the first gets its name.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace octet::cli {

// Rejects at once, before any work, a path that write_arrays could not write, that is the input, or in which a file of
// arrays of these names would take the place of a file of the input.
void expect_writable(const std::string& path, const std::string& input, const std::vector<std::string>& names);

// Metadata is kept in .safetensors only.
void write_arrays(const std::string& path, const std::vector<NamedArray>& arrays,
                  const std::map<std::string, std::string>& metadata = {});

}  // namespace octet::cli
