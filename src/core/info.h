// The report that octet_info gives.
#pragma once
#include <string>
#include <string_view>

namespace octet {

// The machine and the build as a JSON object; see octet_info in octet.h.
std::string info_json();

// A JSON string: quoted, with quotes, backslashes and control characters escaped.
std::string json_string(std::string_view text);

// The processor as a JSON object {model, cores, features, instruction_set, instruction_sets, forced}, by
// src/cpu/describe.cc.
std::string cpu_json();

// The version of the CUDA driver as a JSON string or null, and the GPUs {name, compute_capability, multiprocessors,
// memory_bytes}; by src/cuda/host/describe.cc where CUDA is built.
std::string driver_json();
std::string gpus_json();

}  // namespace octet
