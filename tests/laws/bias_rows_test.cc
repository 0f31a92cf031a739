// A number added to a whole row of logits changes nothing but lse, however large it is: rows that a float mask fills
// with the smallest finite number, as masks of transformers do for queries that see nothing, or with -1e9 or -1e4.
#include <cmath>
#include <limits>

#include "laws/laws.h"

namespace octet::test {
namespace {

class BiasRows : public EveryRecipe {};

constexpr Case kCase{.name = "bias rows", .heads = 2, .tokens_q = 100, .tokens_k = 150, .mask = MaskTensor::bias_f32};

// Returns what is added to row i of an ordinary bias: 0 in every sixth row.
double offset(int64_t i, double lowest) {
  const double offsets[] = {0.0, lowest, -1e9, -1e4, -300.0, 3e4};
  return i % 6 == 1 ? lowest : std::fmax(offsets[i % 6], lowest);
}

// Biases of one row: 0 where a number would be lost beside the row's offset, multiples of 1/4 else; in odd rows the
// second half is hidden by the smallest number of the mask's type.
double bias(int64_t i, int64_t j, double lowest, double places) {
  if (i % 2 && j >= 75) return lowest;
  return std::fabs(offset(i, lowest)) < places ? static_cast<double>((i * 7 + j * 5) % 16) / 4 - 2.0 : 0.0;
}

struct MaskType {
  const char* name;
  DType dtype;
  double lowest, places;  // biases of 1/4 are exact on top of offsets below `places`
};
const MaskType kTypes[] = {{"f32", DType::f32, -0x1.fffffep127, 0x1p20},
                           {"bf16", DType::bf16, -0x1.fep127, 1.0},
                           {"f16", DType::f16, -65504.0, 0x1p8}};

TEST_P(BiasRows, cancel) {
  const Inputs drawn = draw(kCase, 1);
  Inputs unbiased = drawn;  // of which noise is an estimate: what is hidden has no part in it
  unbiased.mask = Values(), unbiased.mask_dtype = DType::none;
  const Allowed allowed(kCase, unbiased, GetParam()),
      allowed_of_o(kCase, unbiased, {Pass::forward, GetParam().precision});
  for (const MaskType& type : kTypes) {
    Inputs plain = drawn;
    plain.mask = Values({1, 1, kCase.tokens_q, kCase.tokens_k});
    plain.mask_dtype = type.dtype;
    Inputs shifted = plain;
    for_each(plain.mask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      const double x = bias(i, j, type.lowest, type.places);
      plain.mask.at(b, h, i, j) = x;
      shifted.mask.at(b, h, i, j) = x == type.lowest ? x : offset(i, type.lowest) + x;
    });
    plain.mask = rounded(plain.mask, type.dtype), shifted.mask = rounded(shifted.mask, type.dtype);
    // A row that is all of the lowest number has no hidden half.
    for_each(plain.mask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      if (shifted.mask.at(b, h, i, 0) == type.lowest) plain.mask.at(b, h, i, j) = 0.0;
    });
    for (const char* backend : {"cpu", "reference"}) {
      SCOPED_TRACE(testing::Message() << backend << ", mask of " << type.name << ", seed 1");
      const Pass pass = GetParam().pass;
      const Outputs got = compute(kCase, shifted, GetParam(), 0, backend),
                    want = compute(kCase, plain, GetParam(), 0, backend);
      for (const auto output : {&Outputs::o, &Outputs::to, &Outputs::dq, &Outputs::dk, &Outputs::dv}) {
        const bool has = output == &Outputs::o    ? true
                         : output == &Outputs::to ? pass == Pass::jvp
                                                  : pass == Pass::backward;
        if (!has) continue;
        const char* name = output == &Outputs::o    ? "o"
                           : output == &Outputs::to ? "to"
                           : output == &Outputs::dq ? "dq"
                           : output == &Outputs::dk ? "dk"
                                                    : "dv";
        const double bound = output == &Outputs::o ? allowed_of_o(output) : allowed(output);
        expect_near(got.*output, want.*output, 2 * bound, name);
      }
      for_each(got.lse.shape, [&](int64_t b, int64_t h, int64_t i, int64_t c) {
        const double shift = offset(i, type.lowest), lse = got.lse.at(b, h, i, c);
        const double rounding = std::fabs(shift) * 0x1p-7 + 0x1p-8;  // of the offset in the mask's type, of lse
        EXPECT_NEAR(lse, want.lse.at(b, h, i, c) + shift, rounding) << "lse of query " << i;
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, BiasRows, testing::ValuesIn(every_recipe()), label);

}  // namespace
}  // namespace octet::test
