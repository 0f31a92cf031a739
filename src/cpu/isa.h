// Instruction sets that the CPU kernels are compiled for, and which one runs.
#pragma once

namespace octet::cpu {

// Best last, but for avx512_bf16 where its dot products are slow. Each includes what the ones before it have.
enum class Isa {
  portable,     // the compiler's baseline
  avx2,         // AVX2, FMA, F16C
  avx512,       // AVX-512 F, BW, DQ, VL and VNNI
  avx512_bf16,  // and BF16 dot products
  amx           // and AMX tiles of bf16 and int8
};
constexpr int kIsaCount = 5;

const char* name(Isa);

// Returns whether this build has the instruction set and this machine runs it.
bool supported(Isa);

// The fastest supported one, or the one named by the environment variable OCTET_CPU. Throws Failure naming the choices
// if that is unknown or unsupported.
Isa chosen();

}  // namespace octet::cpu
