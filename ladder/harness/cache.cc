// Reference results on disk. What is found there is checked, never trusted.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "harness.h"

namespace ladder {
namespace {

// Goes up with every change of what a result means: older entries are then stale.
constexpr int64_t kVersion = 1;

struct Header {
  char magic[16] = "octet-ladder";
  int64_t version = kVersion;
  char key[32] = {};
  int64_t count = 0;
  char checksum[32] = {};
};

std::string checksum(const std::vector<double>& values) {
  Hash hash;
  hash.add(values);
  return hash.hex();
}

Header header_of(const std::string& key, const std::vector<double>& values) {
  Header header;
  header.count = static_cast<int64_t>(values.size());
  std::memcpy(header.key, key.data(), std::min(key.size(), sizeof header.key));
  std::memcpy(header.checksum, checksum(values).data(), sizeof header.checksum);
  return header;
}

// False unless the whole entry is as it was written, under this key.
bool read(const std::filesystem::path& path, const std::string& key, std::vector<double>& values) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error || size != sizeof(Header) + values.size() * sizeof(double)) return false;
  std::ifstream in(path, std::ios::binary);
  Header header;
  in.read(reinterpret_cast<char*>(&header), sizeof header);
  in.read(reinterpret_cast<char*>(values.data()), values.size() * sizeof(double));
  if (!in) return false;
  const Header expected = header_of(key, values);
  return !std::memcmp(&header, &expected, sizeof header);
}

// Written beside its place and moved there, so that nobody reads half of it.
bool write(const std::filesystem::path& path, const std::string& key, const std::vector<double>& values) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  const std::filesystem::path temporary = path.string() + "." + std::to_string(getpid());
  std::ofstream out(temporary, std::ios::binary);
  const Header header = header_of(key, values);
  out.write(reinterpret_cast<const char*>(&header), sizeof header);
  out.write(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  out.close();
  if (out) std::filesystem::rename(temporary, path, error);
  const bool written = out && !error;
  if (!written) std::filesystem::remove(temporary, error);
  return written;
}

}  // namespace

void Hash::add(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, at + i, std::min<size_t>(8, bytes - i));
    a_ = (a_ ^ word) * 0xff51afd7ed558ccd;
    a_ ^= a_ >> 32;
    b_ = (b_ + word) * 0xc4ceb9fe1a85ec53;
    b_ ^= b_ >> 29;
  }
}

std::string Hash::hex() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(a_),
                static_cast<unsigned long long>(b_));
  return text;
}

std::filesystem::path default_cache_dir() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache && *cache == '/') return std::filesystem::path(cache) / "octet-ladder";
  return (home && *home ? std::filesystem::path(home) / ".cache" : std::filesystem::temp_directory_path()) /
         "octet-ladder";
}

std::vector<double> Cache::get(const std::string& key, size_t count,
                               const std::function<std::vector<double>()>& compute) {
  hit_ = false;
  if (!enabled_) return compute();
  const std::filesystem::path path = folder_ / (key + ".reference");
  std::vector<double> values(count);
  if (read(path, key, values)) {
    hit_ = true;
    return values;
  }
  if (std::filesystem::exists(path)) {
    std::fprintf(stderr, "the cached reference %s is damaged or stale, and is computed anew\n", path.c_str());
  }
  values = compute();
  if (!write(path, key, values)) {
    std::fprintf(stderr, "warning: the reference could not be stored in %s; --cache-dir names another folder\n",
                 folder_.c_str());
  }
  return values;
}

}  // namespace ladder
