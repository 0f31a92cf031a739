// Writing files that appear whole or not at all.
#include "io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "error.h"
#include "io/interrupt.h"

namespace octet::cli {
namespace {

mode_t process_umask() {
  const mode_t mask = ::umask(0);
  ::umask(mask);
  return mask;
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)), descriptor_(-1) {
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    reject("{}: cannot write: not a regular file", path_);
  const std::filesystem::path target(path_);
  if (!target.has_filename()) reject("{}: cannot write: no file name", path_);
  temporary_ = (target.parent_path() / fmt::format(".{}.XXXXXX", target.filename().string())).string();
  {
    const auto held = hold_signals();
    descriptor_ = ::mkostemp(temporary_.data(), O_CLOEXEC);
    if (descriptor_ >= 0) note_unfinished(temporary_);
  }
  if (descriptor_ < 0) {
    temporary_.clear();
    reject("{}: cannot write: {}", path_, std::strerror(errno));
  }
  ::fchmod(descriptor_, 0666 & ~process_umask());  // mkostemp lets only the owner read
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (temporary_.empty()) return;
  const auto held = hold_signals();
  ::unlink(temporary_.c_str());
  forget_unfinished(temporary_);
}

void AtomicFile::write(const void* from, std::size_t bytes) {
  const auto* source = static_cast<const char*>(from);
  while (bytes) {
    const ssize_t put = ::write(descriptor_, source, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) reject("{}: cannot write: {}", path_, std::strerror(errno));
    source += put, bytes -= static_cast<std::size_t>(put);
  }
}

void AtomicFile::flush() {
  if (::fsync(descriptor_) != 0) reject("{}: cannot write: {}", path_, std::strerror(errno));
  if (::close(std::exchange(descriptor_, -1)) != 0) reject("{}: cannot write: {}", path_, std::strerror(errno));
}

void AtomicFile::commit() {
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) reject("{}: cannot write: {}", path_, std::strerror(errno));
  forget_unfinished(std::exchange(temporary_, {}));
  // The name itself lasts only once its directory is on the disk; file systems that cannot do this are let be.
  const std::string directory = std::filesystem::path(path_).parent_path().string();
  const int descriptor = ::open(directory.empty() ? "." : directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  ::fsync(descriptor);
  ::close(descriptor);
}

}  // namespace octet::cli
