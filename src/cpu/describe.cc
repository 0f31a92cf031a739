// The processor as octet_info shows it: what /proc/cpuinfo says of it, and which of the kernels' instruction sets it
// can run.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <vector>

#include "core/error.h"
#include "core/info.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace octet {
namespace {

// Features that make a difference to attention, as Linux spells them.
constexpr const char* kFeatures[] = {"sse4_2",      "avx",      "avx2",     "fma",      "f16c",        "avx_vnni",
                                     "avx512f",     "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
                                     "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16",    "asimd",
                                     "asimdhp",     "asimddp",  "bf16",     "i8mm",     "sve",         "sve2"};

// The value of the first "key : value" line of /proc/cpuinfo with one of these keys, or nothing.
std::string cpuinfo(std::initializer_list<const char*> keys) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    for (const std::string key : keys)
      if (const auto colon = line.find(": ");
          colon != std::string::npos && line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1) == key)
        return line.substr(colon + 2);
  return {};
}

std::string features_json() {
  std::istringstream words(cpuinfo({"flags", "Features"}));
  const std::vector<std::string> flags{std::istream_iterator<std::string>(words), {}};
  std::string out;
  for (const char* feature : kFeatures)
    if (std::find(flags.begin(), flags.end(), feature) != flags.end())
      out += text(out.empty() ? "" : ", ", json_string(feature));
  return '[' + out + ']';
}

std::string instruction_sets_json() {
  using enum cpu::Isa;
  std::string out;
  for (const cpu::Isa isa : {portable, avx2, avx512, avx512_bf16, amx})
    if (cpu::supported(isa)) out += text(out.empty() ? "" : ", ", json_string(cpu::name(isa)));
  return '[' + out + ']';
}

std::string string_or_null(const std::string& s) { return s.empty() ? "null" : json_string(s); }

}  // namespace

std::string cpu_json() {
  const char* forced = std::getenv("OCTET_CPU");
  return text("{\"model\": ", string_or_null(cpuinfo({"model name", "Model"})),
              ", \"cores\": ", cpu::thread_count(0, std::numeric_limits<int64_t>::max()),
              ", \"features\": ", features_json(), ", \"instruction_set\": ", json_string(cpu::name(cpu::chosen())),
              ", \"instruction_sets\": ", instruction_sets_json(),
              ", \"forced\": ", string_or_null(forced ? forced : ""), '}');
}

}  // namespace octet
