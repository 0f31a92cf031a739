#include "device.h"

#include <nlohmann/json.hpp>

#include "names.h"

namespace octet::cli {
namespace {

nlohmann::json backends() { return nlohmann::json::parse(info()).at("backends"); }

}  // namespace

DeviceName parse_device(const std::string& text) {
  const auto parts = split(text, ':');
  DeviceName device{parse(kDevices, "--device", parts[0])};
  if (parts.size() == 1) return device;
  if (parts.size() > 2 || device.kind == Device::cpu)
    reject("--device: found \"{}\", expected cpu, cuda or cuda:N", text);
  const int64_t index = parse_integer("--device", parts[1]);
  if (index < 0 || index > 255) reject("--device: found \"{}\", expected cuda:0 to cuda:255", text);
  device.index = static_cast<int32_t>(index);
  return device;
}

DeviceName device_of_backend(const std::string& name) {
  for (const auto& backend : backends())
    if (backend.at("name") == name) return parse_device(backend.at("device"));
  return {};
}

void expect_usable(const DeviceName& device) {
  if (device.kind == Device::cpu) return;
  std::string reasons, last;  // backends that give one reason share it
  for (const auto& backend : backends()) {
    if (backend.at("device") != "cuda") continue;
    if (backend.at("available")) return;
    const std::string reason = backend.at("reason");
    reasons += fmt::format("{}{}",
                           reasons.empty()  ? ""
                           : reason == last ? ", "
                                            : ": " + last + "; ",
                           backend.at("name").get<std::string>());
    last = reason;
  }
  if (reasons.empty())
    last = nlohmann::json::parse(info()).at("cuda");  // "CPU only: ..."
  else
    reasons += ": ";
  reject("no backend can compute on cuda tensors here: {}{}", reasons, last);
}

}  // namespace octet::cli
