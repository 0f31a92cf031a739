// Tensors by name from safetensors and .npy.
#include "io/source.h"

#include <algorithm>
#include <filesystem>

#include "error.h"
#include "io/npy.h"

namespace octet::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kListed = 12;  // names in a message

std::string listed(std::vector<std::string> names) {
  if (names.empty()) return "nothing";
  std::sort(names.begin(), names.end());
  const std::size_t more = names.size() > kListed ? names.size() - kListed : 0;
  names.resize(names.size() - more);
  std::string out = fmt::format("{}", fmt::join(names, ", "));
  if (more) out += fmt::format(" and {} more", more);
  return out;
}

}  // namespace

Source::Source(const std::string& path) : path_(path) {
  std::error_code ignored;
  directory_ = fs::is_directory(path, ignored);
  single_ = !directory_ && fs::path(path).extension() == ".npy";
  if (single_)
    File file(path);  // rejects what cannot be opened
  else if (!directory_)
    safetensors_.emplace(File(path));
}

bool Source::has(const std::string& name) const {
  if (single_) return true;
  if (directory_) {
    std::error_code ignored;
    return fs::exists(fs::path(path_) / (name + ".npy"), ignored);
  }
  return safetensors_->header().count(name) > 0;
}

Array Source::read(const std::string& name) const {
  if (single_) return read_npy(File(path_));
  if (has(name))
    return directory_ ? read_npy(File((fs::path(path_) / (name + ".npy")).string())) : safetensors_->read(name);
  std::vector<std::string> names;
  if (directory_) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(path_, ignored))
      if (entry.path().extension() == ".npy") names.push_back(entry.path().filename().string());
    reject("{}: no {}.npy; found: {}", path_, name, listed(names));
  }
  for (const auto& [found, entry] : safetensors_->header()) names.push_back(found);
  reject("{}: no tensor \"{}\"; found: {}", path_, name, listed(names));
}

}  // namespace octet::cli
