// Reading regular files.
#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"

namespace octet::cli {

File::File(const std::string& path)
    : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)), label_(path) {  // a FIFO must not block
  if (descriptor_ < 0) reject("{}: cannot open: {}", label_, std::strerror(errno));
  validate();
}

File::File(int descriptor, std::string label) : descriptor_(descriptor), label_(std::move(label)) { validate(); }

File::File(File&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), label_(std::move(other.label_)), size_(other.size_) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::validate() {
  struct stat status {};
  const bool regular = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  if (!regular) {
    ::close(std::exchange(descriptor_, -1));
    reject("{}: not a regular file", label_);
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

void File::read(uint64_t offset, void* to, std::size_t bytes) const {
  if (offset > size_ || bytes > size_ - offset)
    reject("{}: truncated: {} bytes wanted at offset {}, but the file has {}", label_, bytes, offset, size_);
  auto* target = static_cast<char*>(to);
  while (bytes) {
    const ssize_t got = ::pread(descriptor_, target, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) reject("{}: cannot read: {}", label_, std::strerror(errno));
    if (got == 0) reject("{}: truncated while it was read", label_);
    target += got, offset += static_cast<uint64_t>(got), bytes -= static_cast<std::size_t>(got);
  }
}

}  // namespace octet::cli
