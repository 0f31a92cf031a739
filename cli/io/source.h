// A source reads tensors from a .safetensors file, a directory with NAME.npy for each tensor, or a single .npy file,
// which holds one tensor of whatever name.
#pragma once
#include <optional>
#include <string>

#include "array.h"
#include "io/safetensors.h"

namespace octet::cli {

class Source {
 public:
  explicit Source(const std::string& path);

  bool has(const std::string& name) const;
  bool single() const { return single_; }     // a .npy file, which has one tensor under every name
  Array read(const std::string& name) const;  // rejects what is absent, naming what is there

 private:
  std::string path_;
  bool directory_ = false, single_ = false;
  std::optional<Safetensors> safetensors_;
};

}  // namespace octet::cli
