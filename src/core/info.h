// What octet_info reports.
#pragma once
#include <string>

namespace octet {

// The machine and the build as a JSON object; see octet_info in octet.h.
std::string info_json();

}  // namespace octet
