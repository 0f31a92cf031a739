// The file of octet tune: JSON {octet, kernels, cards: {NAME: [{cell, call, backend, tile, seconds, default,
// default_seconds}, ...]}}. It is the one that OCTET_TUNE names, else octet/tune.json in the user's cache directory.
#include "core/tuning.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <unordered_map>

#include "core/error.h"
#include "core/info.h"
#include "core/names.h"

namespace octet {
namespace {

namespace fs = std::filesystem;

// The card on which the default kernels were compared with all others (docs/tuning.md).
constexpr std::string_view kMeasuredCard = "NVIDIA H200, 132 multiprocessors";

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

// Returns where the file is, or nothing where tuning is off or there is no place for it.
std::optional<fs::path> file_path() {
  if (const char* named = variable("OCTET_TUNE")) {
    if (std::string_view(named) == "off") return {};
    return named;
  }
#ifdef _WIN32
  if (const char* local = variable("LOCALAPPDATA")) return fs::path(local) / "octet" / "tune.json";
#else
  if (const char* cache = variable("XDG_CACHE_HOME")) return fs::path(cache) / "octet" / "tune.json";
  if (const char* home = variable("HOME")) return fs::path(home) / ".cache" / "octet" / "tune.json";
#endif
  return {};
}

std::string card_name(int device) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    cudaGetLastError();  // else the caller's next call would report it
    return {};
  }
  return text(properties.name, ", ", properties.multiProcessorCount, " multiprocessors");
}

struct Found {
  std::string backend, tile;
};
using Cells = std::unordered_map<uint64_t, Found>;

// The cells of a file by card. A file that is damaged, or was made for other kernels, counts as empty.
struct Tuning {
  std::string path, reason;  // why nothing is read
  std::unordered_map<std::string, Cells> cards;

  Tuning() {
    const std::optional<fs::path> at = file_path();
    if (!at) {
      reason = variable("OCTET_TUNE") ? "OCTET_TUNE is off" : "there is no cache directory: HOME is not set";
      return;
    }
    path = at->string();
    std::error_code error;
    if (!fs::exists(*at, error)) {
      reason = "there is no such file; octet tune writes it";
      return;
    }
    try {
      read(*at);
    } catch (const std::exception& wrong) {
      cards.clear();
      reason = wrong.what();
    }
  }

  void read(const fs::path& at) {
    constexpr uintmax_t kMostBytes = 1 << 20;
    if (!fs::is_regular_file(at)) throw std::runtime_error("it is no file");
    if (const uintmax_t bytes = fs::file_size(at); bytes > kMostBytes)
      throw std::runtime_error(text("it has ", bytes, " bytes, allowed: up to ", kMostBytes));
    std::ifstream stream(at);
    if (!stream) throw std::runtime_error("it cannot be read");
    const nlohmann::json file = nlohmann::json::parse(stream);
    if (const std::string kernels = file.at("kernels"); kernels != OCTET_KERNELS_HASH)
      throw std::runtime_error(text("it was made for the kernels ", kernels, " of octet ",
                                    file.at("octet").get<std::string>(), ", these are ", OCTET_KERNELS_HASH,
                                    " of octet ", OCTET_VERSION, "; run octet tune again"));
    for (const auto& [card, list] : file.at("cards").items())
      for (const nlohmann::json& entry : list) {
        const std::string cell = entry.at("cell");
        std::size_t digits = 0;
        const uint64_t bits = std::stoull(cell, &digits, 16);
        if (digits != 16 || cell.size() != 16) throw std::runtime_error(text("its cell ", quoted(cell), " is none"));
        cards[card][bits] = {entry.at("backend"), entry.at("tile")};
      }
  }
};

const Tuning& tuning() {
  static const Tuning read_once;
  return read_once;
}

// Returns the cells of a device, or null where the file has none.
const Cells* cells_of(int device) {
  static std::mutex mutex;
  static std::unordered_map<int, const Cells*> devices;
  const Tuning& all = tuning();
  if (all.cards.empty()) return nullptr;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = devices.try_emplace(device, nullptr);
  if (is_new)
    if (const auto card = all.cards.find(card_name(device)); card != all.cards.end()) found->second = &card->second;
  return found->second;
}

}  // namespace

void find_tile(Problem& p) {
  if (p.device != OCTET_CUDA || p.tile.name) return;
  const Cells* cells = cells_of(p.device_index);
  if (!cells) return;
  const auto found = cells->find(cell_of(p).bits);
  if (found != cells->end()) p.tile = {found->second.tile.c_str(), found->second.backend.c_str(), true};
}

std::string tuning_json() {
  const Tuning& all = tuning();
  std::size_t cells = 0;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) cudaGetLastError(), count = 0;
  for (int device = 0; device < count; ++device)
    if (const Cells* of_device = cells_of(device)) cells += of_device->size();
  return text("{\"path\": ", all.path.empty() ? "null" : json_string(all.path),
              ", \"kernels\": ", json_string(OCTET_KERNELS_HASH), ", \"cells\": ", cells,
              ", \"reason\": ", all.reason.empty() ? "null" : json_string(all.reason), '}');
}

std::string card_json(const Problem& p) {
  const std::string name = p.device == OCTET_CUDA ? card_name(p.device_index) : "";
  return name.empty() ? "null" : json_string(name);
}

std::string default_json(const Problem& p) {
  const std::string name = p.device == OCTET_CUDA ? card_name(p.device_index) : "";
  return name.empty() ? "null" : json_string(name == kMeasuredCard && has_measured_kind(p) ? "measured" : "predicted");
}

}  // namespace octet
