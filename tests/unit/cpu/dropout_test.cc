// The kept elements of a tile, which the kernels find many at a time, are those that the core's function names.
#include <gtest/gtest.h>

#include <vector>

#include "primitives.h"

namespace octet::cpu::test {
namespace {

TEST(Dropout, tiles_have_the_elements_of_the_core) {
  const DropoutStream stream{.key0 = 0x12345678, .key1 = 0x9abcdef0, .word2 = 5, .word3 = 0xffffffff};
  for (const uint32_t dropped : {1u, kDropoutOne / 10, kDropoutOne / 2, kDropoutOne / 4 * 3 + 77, kDropoutOne - 1})
    for (const int64_t token : {0, 16, 192})
      for (const int64_t rows : {1, 16, 50, 64})
        for (const int64_t key : {int64_t{0}, 3 * kKeys, kKeys << 30}) {
          std::vector<uint64_t> kept(64 + 1, 0x5555);
          primitives().find_kept(stream, dropped, token, rows, key, kept.data());
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < kKeys; ++j)
              ASSERT_EQ(kept[i] >> j & 1, !is_dropped(stream, dropped, token + i, key + j))
                  << "row " << token << " + " << i << ", key " << key << " + " << j;
          for (int64_t i = (rows + 15) / 16 * 16; i <= 64; ++i) ASSERT_EQ(kept[i], 0x5555u) << "row " << i;
        }
}

}  // namespace
}  // namespace octet::cpu::test
