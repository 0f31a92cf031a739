// octet_info: the machine and the build as one JSON object, written by hand, as it is small.
#include "core/info.h"

#include "core/backend.h"
#include "core/error.h"
#include "core/names.h"
#include "core/tuning.h"

namespace octet {
namespace {

std::string compiler() {
#if defined(__clang__)
  return text("clang ", __clang_version__);
#elif defined(__GNUC__)
  return text("g++ ", __VERSION__);
#else
  return "unknown";
#endif
}

std::string backends_json() {
  std::string out;
  for (const Backend* backend : backends()) {
    const std::optional<std::string> reason = backend->unavailable();
    out += text(out.empty() ? "" : ", ", "{\"name\": ", json_string(backend->name),
                ", \"description\": ", json_string(backend->description),
                ", \"device\": ", json_string(name(backend->device)), ", \"available\": ", reason ? "false" : "true",
                ", \"reason\": ", reason ? json_string(*reason) : "null", '}');
  }
  return '[' + out + ']';
}

}  // namespace

std::string json_string(std::string_view s) {
  static const char hex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : s) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      out += {'\\', c};
    else if (byte < 0x20)
      out += text("\\u00", hex[byte >> 4], hex[byte & 15]);
    else
      out += c;
  }
  return out + '"';
}

#ifndef OCTET_SM90
// A build without CUDA kernels has no driver to ask for its version or its GPUs.
std::string driver_json() { return "null"; }
std::string gpus_json() { return "[]"; }
#endif

std::string info_json() {
  return text("{\"version\": ", json_string(OCTET_VERSION), ", \"compiler\": ", json_string(compiler()),
              ", \"cuda\": ", json_string(OCTET_CUDA_SUMMARY), ", \"driver\": ", driver_json(),
              ", \"cpu\": ", cpu_json(), ", \"gpus\": ", gpus_json(), ", \"tuning\": ", tuning_json(),
              ", \"backends\": ", backends_json(), '}');
}

}  // namespace octet
