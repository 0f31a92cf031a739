// GoogleTest's main for the primitives of one instruction set: the one that OCTET_CPU names, or the best that this
// machine runs. Where the machine lacks it, exits with 77, which CTest counts as skipped.
#include <gtest/gtest.h>

#include <cstdio>

#include "core/error.h"
#include "cpu/isa.h"
#include "primitives.h"

namespace octet::cpu::test {

extern const Primitives primitives_portable;
#ifdef OCTET_X86
extern const Primitives primitives_avx2, primitives_avx512, primitives_avx512_bf16, primitives_amx;
#endif

const Primitives& primitives() {
#ifdef OCTET_X86
  static const Primitives* const tables[] = {&primitives_portable, &primitives_avx2, &primitives_avx512,
                                             &primitives_avx512_bf16, &primitives_amx};
#else
  static const Primitives* const tables[] = {&primitives_portable};
#endif
  return *tables[static_cast<int>(chosen())];
}

}  // namespace octet::cpu::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    std::printf("instruction set: %s\n", octet::cpu::test::primitives().name);
  } catch (const octet::Failure& failure) {
    std::printf("skipped: %s\n", failure.what());
    return 77;
  }
  return RUN_ALL_TESTS();
}
