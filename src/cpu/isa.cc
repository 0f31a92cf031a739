#include "cpu/isa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "core/error.h"

#ifdef OCTET_X86
#include <cpuid.h>
#endif

namespace octet::cpu {
namespace {

#ifdef OCTET_X86

// Linux hands out AMX state on request, once per process.
bool amx_permitted() {
  constexpr long kArchReqXcompPerm = 0x1023, kTileData = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
  return permitted;
}

// Returns whether there are tiles, with f16 arithmetic and permutations of bytes, which every CPU with tiles has had
// so far.
bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool bf16 = edx >> 22 & 1, tile = edx >> 24 & 1, int8 = edx >> 25 & 1;
  const bool vbmi = ecx >> 1 & 1, f16 = edx >> 23 & 1;
  return bf16 && tile && int8 && vbmi && f16 && amx_permitted();
}

// Returns whether two FMA are faster than a bf16 dot product. Intel's CPUs since Sapphire Rapids, known by f16
// arithmetic, start one every two cycles and two FMA in each; virtual machines may hide their tiles.
bool slow_bf16_dot_products() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && edx >> 23 & 1;
}

bool detect(Isa isa) {
  __builtin_cpu_init();
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return detect(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni");
    case Isa::avx512_bf16:
      return detect(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
    case Isa::amx:
      return detect(Isa::avx512_bf16) && has_amx();
  }
  return false;
}

#else

bool slow_bf16_dot_products() { return false; }
bool detect(Isa isa) { return isa == Isa::portable; }

#endif

}  // namespace

const char* name(Isa isa) {
  static const char* const names[kIsaCount] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
  return names[static_cast<int>(isa)];
}

bool supported(Isa isa) {
  static const struct Detected {
    bool isa[kIsaCount];
    Detected() {
      for (int i = 0; i < kIsaCount; ++i) isa[i] = detect(static_cast<Isa>(i));
    }
  } detected;
  return detected.isa[static_cast<int>(isa)];
}

Isa chosen() {
  // Asked once: in a virtual machine cpuid takes as long as a small call.
  static const Isa fastest = [] {
    Isa best = Isa::portable;
    for (int i = 0; i < kIsaCount; ++i) {
      const Isa isa = static_cast<Isa>(i);
      if (supported(isa) && (isa != Isa::avx512_bf16 || !slow_bf16_dot_products())) best = isa;
    }
    return best;
  }();
  const char* wanted = std::getenv("OCTET_CPU");
  if (!wanted || !*wanted) return fastest;
  std::string choices;
  for (int i = 0; i < kIsaCount; ++i) {
    const Isa isa = static_cast<Isa>(i);
    if (!supported(isa)) continue;
    if (std::string_view(wanted) == name(isa)) return isa;
    choices += text(choices.empty() ? "" : ", ", name(isa));
  }
  invalid("OCTET_CPU: found ", quoted(wanted), ", this machine and build run: ", choices);
}

}  // namespace octet::cpu
