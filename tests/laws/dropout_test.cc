// Dropout told by other calls: which elements it takes from P, that it takes the same ones at every precision and on
// every backend, and that it changes nothing else.
#include <cmath>

#include "laws/laws.h"

namespace octet::test {
namespace {

// v is the unit matrix, so that o is P.
const Case kCase{.name = "dropout",
                 .batch = 2,
                 .heads = 2,
                 .kv_heads = 1,
                 .tokens_q = 150,
                 .tokens_k = 200,
                 .dim_v = 200,
                 .dropout_p = .3};

Inputs with_unit_v(const Case& c, uint64_t seed) {
  Inputs in = draw(c, seed);
  for_each(in.v.shape, [&](int64_t b, int64_t h, int64_t t, int64_t e) { in.v.at(b, h, t, e) = t == e; });
  return in;
}

Case without(Case c) {
  c.dropout_p = 0;
  return c;
}
Inputs without(Inputs in) {
  in.dropout_seed = Values();
  return in;
}

class DropoutForward : public EveryForward {};

TEST_P(DropoutForward, takes_the_same_elements_at_every_precision_and_scales_the_others) {
  const Inputs in = with_unit_v(kCase, 1);
  const Outputs p = exact(without(kCase), without(in), Pass::forward), kept = exact(kCase, in, Pass::forward);
  const Outputs got = compute(kCase, in, {Pass::forward, GetParam()}),
                whole = compute(without(kCase), without(in), {Pass::forward, GetParam()});
  // int8 takes the mean of v from it only where nothing is dropped: its P is rounded otherwise.
  const bool same_p = GetParam() != Precision::int8;
  int64_t dropped = 0;
  for_each(got.o.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    const double x = got.o.at(b, h, i, j), want = whole.o.at(b, h, i, j) / .7;
    if (kept.o.at(b, h, i, j) == 0) {
      ASSERT_EQ(x, 0) << "query " << i << ", key " << j << " is kept";
      ++dropped;
    } else {
      ASSERT_NEAR(kept.o.at(b, h, i, j), p.o.at(b, h, i, j) / .7, 1e-6 * p.o.at(b, h, i, j)) << "query " << i;
      if (same_p)
        ASSERT_NEAR(x, want, 0x1p-21 * std::fabs(want)) << "query " << i << ", key " << j;
      else if (want > .01)
        ASSERT_NE(x, 0) << "query " << i << ", key " << j << " is dropped";
    }
  });
  const double n = 2 * 2 * 150 * 200;
  EXPECT_NEAR(static_cast<double>(dropped), .3 * n, 5 * std::sqrt(.3 * .7 * n));
  expect_same_bits(got.lse, whole.lse, "lse");
}

INSTANTIATE_TEST_SUITE_P(Precisions, DropoutForward, testing::ValuesIn(precisions_of(Pass::forward)),
                         [](const auto& info) { return name(info.param); });

class Dropout : public EveryRecipe {};

const Case kSmall{.name = "dropout_small",
                  .batch = 2,
                  .heads = 4,
                  .kv_heads = 2,
                  .tokens_q = 130,
                  .tokens_k = 150,
                  .causal = true,
                  .alignment = Alignment::bottom_right,
                  .dtype = DType::bf16,
                  .sinks = Sinks::shared,
                  .dlse = true,
                  .dropout_p = .2};

TEST_P(Dropout, does_not_depend_on_threads) {
  const Inputs in = draw(kSmall, 2);
  const Outputs one = compute(kSmall, in, GetParam(), 1);
  expect_same_bits(compute(kSmall, in, GetParam(), 5), one, GetParam().pass, "5 threads against 1");
}

// The sequences of a call take the offsets from that of its seed on.
TEST_P(Dropout, of_a_sequence_is_that_of_a_call_with_its_offset) {
  const Inputs in = draw(kSmall, 3);
  const Outputs all = compute(kSmall, in, GetParam());
  Case alone = kSmall;
  alone.batch = 1;
  for (int64_t b = 0; b < kSmall.batch; ++b) {
    Inputs part = in;
    for (Values Inputs::*x :
         {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::do_, &Inputs::tq, &Inputs::tk, &Inputs::tv, &Inputs::dlse})
      part.*x = slice(in.*x, 0, b, b + 1);
    part.dropout_seed.at(0, 0, 0, 2) += static_cast<double>(b);
    const Outputs got = compute(alone, part, GetParam());
    const auto wanted = outputs_of(all, GetParam().pass);
    for (size_t i = 0; i < wanted.size(); ++i)
      if (std::string(wanted[i].name) != "dsinks")  // summed over the batch
        expect_same_bits(*outputs_of(got, GetParam().pass)[i].values, slice(*wanted[i].values, 0, b, b + 1),
                         std::string("batch element ") + std::to_string(b) + ", " + wanted[i].name);
  }
}

// Packed sequences with seeds of their own drop what they drop alone.
TEST_P(Dropout, of_packed_sequences_is_theirs) {
  Case packed = kSmall;
  packed.batch = 1, packed.sinks = Sinks::none, packed.seeds = Seeds::each;
  packed.cu_seqlens_q = {0, 50, 130}, packed.cu_seqlens_k = {0, 90, 150};
  const Inputs in = draw(packed, 4);
  const Outputs all = compute(packed, in, GetParam());
  for (size_t n = 0; n < 2; ++n) {
    const int64_t q[] = {packed.cu_seqlens_q[n], packed.cu_seqlens_q[n + 1]},
                  k[] = {packed.cu_seqlens_k[n], packed.cu_seqlens_k[n + 1]};
    Case alone = packed;
    alone.cu_seqlens_q = alone.cu_seqlens_k = {}, alone.seeds = Seeds::shared;
    alone.tokens_q = q[1] - q[0], alone.tokens_k = k[1] - k[0];
    Inputs part = in;
    for (Values Inputs::*x : {&Inputs::q, &Inputs::do_, &Inputs::tq, &Inputs::dlse})
      part.*x = slice(in.*x, 2, q[0], q[1]);
    for (Values Inputs::*x : {&Inputs::k, &Inputs::v, &Inputs::tk, &Inputs::tv}) part.*x = slice(in.*x, 2, k[0], k[1]);
    part.dropout_seed = slice(in.dropout_seed, 0, static_cast<int64_t>(n), static_cast<int64_t>(n) + 1);
    const Outputs got = compute(alone, part, GetParam());
    for (const auto& [output, of_keys] : {std::pair{&Outputs::o, false},
                                          {&Outputs::lse, false},
                                          {&Outputs::to, false},
                                          {&Outputs::dq, false},
                                          {&Outputs::dk, true},
                                          {&Outputs::dv, true}})
      if ((all.*output).present())
        expect_same_bits(got.*output, slice(all.*output, 2, of_keys ? k[0] : q[0], of_keys ? k[1] : q[1]),
                         "sequence " + std::to_string(n));
  }
}

// What is dropped has no part in a call, whatever v holds there; precisions that scale v by token count it as seen.
TEST(DroppedValues, that_are_not_finite_reach_no_query_that_drops_them) {
  for (const Precision precision : {Precision::f32, Precision::f16, Precision::bf16}) {
    Inputs in = with_unit_v(kCase, 5);
    const Outputs kept = exact(kCase, in, Pass::forward);
    in.v.at(1, 0, 17, 3) = std::numeric_limits<double>::quiet_NaN();
    for (const char* backend : {"cpu", "reference"}) {
      const Outputs got = compute(kCase, in, {Pass::forward, precision}, 0, backend);
      for_each(got.lse.shape, [&](int64_t b, int64_t h, int64_t i, int64_t) {
        EXPECT_EQ(std::isnan(got.o.at(b, h, i, 3)), b == 1 && kept.o.at(b, h, i, 17) != 0)
            << backend << ' ' << name(precision) << ", query " << i;
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Dropout, testing::ValuesIn(every_recipe()), label);

}  // namespace
}  // namespace octet::test
