// The rotation of rung 2, which needs no GPU: RoPE in f32, with both pairings, against float64.
#include <gtest/gtest.h>

#include "../2_flash.cu"
#include "../harness/harness.h"
#include "device_array.h"

namespace ladder {
namespace {

TEST(Flash, RotationIsThatOfFloat64WithBothPairings) {
  for (int dim : {64, 128}) {
    const int seq = 4100;
    const std::vector<float> x = numbers(seq * dim, 9);
    const std::vector<Rotation> rotations = make_rotations(seq, dim);
    for (Pairing pairing : {Pairing::halves, Pairing::interleaved}) {
      std::vector<double> expected(x.begin(), x.end());
      reference_rope(expected, 1, seq, dim, pairing);
      std::vector<float> found = x;
      for (int row = 0; row < seq; ++row) {
        for (int i = 0; i < dim / 2; ++i) {
          const auto [c, d] = pair_of(i, dim, pairing == Pairing::halves);
          rotate(found[row * dim + c], found[row * dim + d], rotations[row * (dim / 2) + i]);
        }
      }
      // Values are below 1: cosine and sine are rounded, and so are two products and their sum.
      for (int n = 0; n < seq * dim; ++n) ASSERT_NEAR(found[n], expected[n], 4 * 0x1p-24) << name_of(pairing) << n;
    }
  }
}

}  // namespace
}  // namespace ladder
