// Writing results as safetensors or .npy.
#include "io/sink.h"

#include <filesystem>
#include <utility>

#include "error.h"
#include "io/atomic_file.h"
#include "io/interrupt.h"
#include "io/npy.h"

namespace octet::cli {
namespace {

namespace fs = std::filesystem;

bool is_safetensors(const std::string& path) { return fs::path(path).extension() == ".safetensors"; }

// A directory that is made if need be and removed again unless kept.
class Directory {
 public:
  explicit Directory(const fs::path& path) : path_(path) {
    std::error_code error;
    if (fs::is_directory(path, error)) return;
    if (fs::exists(path, error))
      reject("{}: cannot write: neither a .safetensors file nor a directory of .npy files", path.string());
    const auto held = hold_signals();
    made_ = fs::create_directory(path, error);
    if (made_) note_unfinished(path_.string());
    if (error) reject("{}: cannot write: {}", path.string(), error.message());
  }
  ~Directory() {
    if (!made_) return;
    const auto held = hold_signals();
    std::error_code ignored;
    fs::remove(path_, ignored);
    forget_unfinished(path_.string());
  }
  Directory(const Directory&) = delete;
  // Under hold_signals().
  void keep() {
    if (std::exchange(made_, false)) forget_unfinished(path_.string());
  }

 private:
  fs::path path_;
  bool made_ = false;  // and not kept
};

// The files of an input: itself, or the .npy files of a directory.
std::vector<fs::path> files_of(const std::string& input) {
  std::error_code ignored;
  if (!fs::is_directory(input, ignored)) return {input};
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(input, ignored)) files.push_back(entry.path());
  return files;
}

void expect_no_input(const fs::path& path, const fs::path& input) {
  std::error_code ignored;
  if (fs::equivalent(path, input, ignored)) reject("{}: is an input; name another output", path.string());
}

}  // namespace

void expect_writable(const std::string& path, const std::string& input, const std::vector<std::string>& names) {
  expect_no_input(path, input);
  if (fs::path(path).extension() == ".npy")
    reject("{}: a .npy file holds one tensor; name a .safetensors file, or a directory for .npy files", path);
  if (is_safetensors(path)) {
    for (const fs::path& file : files_of(input)) expect_no_input(path, file);
    AtomicFile probe(path);
  } else {
    for (const fs::path& file : files_of(input))
      for (const std::string& name : names) expect_no_input(fs::path(path) / (name + ".npy"), file);
    Directory directory(path);
    AtomicFile probe((fs::path(path) / "probe.npy").string());
  }
}

void write_arrays(const std::string& path, const std::vector<NamedArray>& arrays,
                  const std::map<std::string, std::string>& metadata) {
  if (is_safetensors(path)) {
    AtomicFile file(path);
    write_safetensors(file, arrays, metadata);
    file.flush();
    const auto held = hold_signals();
    file.commit();
    return;
  }
  for (const auto& [name, array] : arrays) expect_npy_dtype(name, array->dtype);
  Directory directory(path);
  std::vector<AtomicFile> files;
  for (const auto& [name, array] : arrays) {
    AtomicFile& file = files.emplace_back((fs::path(path) / (name + ".npy")).string());
    write_npy(file, *array);
    file.flush();
  }
  const auto held = hold_signals();  // all get their names, or none
  for (AtomicFile& file : files) file.commit();
  directory.keep();
}

}  // namespace octet::cli
