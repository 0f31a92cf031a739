// A sink writes results to one .safetensors file, or for any other path to a directory with NAME.npy for each tensor.
// All files are whole on the disk before the first gets its name.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "io/safetensors.h"

namespace octet::cli {

// Rejects at once, before any work, a path that write_arrays could not write or that is one of the inputs.
void expect_writable(const std::string& path, const std::vector<std::string>& inputs);

// Metadata is kept in .safetensors only.
void write_arrays(const std::string& path, const std::vector<NamedArray>& arrays,
                  const std::map<std::string, std::string>& metadata = {});

}  // namespace octet::cli
