// octet_append on the CPU: rows are those of octet_apply_rope and octet_quantize at the position of each token, and
// nothing else of the cache changes.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <utility>

#include "support/appending.h"

namespace octet::test {
namespace {

class Appends : public testing::TestWithParam<Appending> {};

// Rows of one sequence as octet_apply_rope turns them; by tables in float64.
Values turned(const Appending& x, const Appended& made, const Buffer& rows, int64_t sequence) {
  const Values of = x.rows_of(rows.values(), sequence);
  if (!x.style || !x.new_tokens(sequence)) return of;
  const int64_t first = x.lengths[static_cast<size_t>(sequence)];
  octet_rope rope = OCTET_ROPE_INIT;
  rope.style = x.style, rope.dim = x.rope_dim, rope.offset = x.rope_offset + first;
  if (!x.tables) {
    const Buffer from(of, DType::f32), to(DType::f32, of.shape);
    const Tensor source = from.view();
    Tensor target = to.view();
    check(octet_apply_rope(&rope, &source, 0, &target, nullptr));
    return to.values();
  }
  Values to = of;
  const Values cosine = made.cosine.values(), sine = made.sine.values();
  const int64_t pairs = cosine.shape[3];
  for_each({1, of.shape[1], of.shape[2], pairs}, [&](int64_t, int64_t h, int64_t t, int64_t pair) {
    const bool half = x.style == OCTET_ROPE_HALF;
    const int64_t a = half ? pair : 2 * pair, b = half ? pair + pairs : 2 * pair + 1;
    const double c = cosine.at(0, 0, first + t, pair), s = sine.at(0, 0, first + t, pair);
    to.at(0, h, t, a) = static_cast<float>(of.at(0, h, t, a) * c - of.at(0, h, t, b) * s);
    to.at(0, h, t, b) = static_cast<float>(of.at(0, h, t, a) * s + of.at(0, h, t, b) * c);
  });
  return to;
}

// What the cache has to hold: codes and scales of rows, or the rows.
std::pair<Values, Values> as_cached(const Appending& x, const Values& rows, octet_operand operand) {
  if (!x.scales) return {rounded(rows, x.cache), Values()};
  const Buffer from(rows, DType::f32), codes(x.cache, rows.shape),
      scale(DType::f32, {rows.shape[0], rows.shape[1], rows.shape[2], 1});
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  Tensor source = from.view(), of_scale = scale.view(), to = codes.view();
  how.operand = operand, how.scale = &of_scale, to.quantization = &how;
  check(octet_quantize(&source, nullptr, &to, nullptr, nullptr));
  return {codes.values(), scale.values()};
}

TEST_P(Appends, rows_at_their_positions_and_nothing_else) {
  const Appending& x = GetParam();
  const Appended made(x);
  const auto places = places_of(x);
  const auto expect_rows = [&](const Buffer& from, const Buffer& cache, const Buffer& scale, octet_operand operand) {
    Buffer want(x.cache, {cache.view().shape[0], x.kv_heads, cache.view().shape[2], cache.view().shape[3]},
                x.cache_layout);
    const Values untouched = want.values();
    Values codes = untouched, scales;
    if (x.scales) scales = Buffer(DType::f32, {codes.shape[0], codes.shape[1], codes.shape[2], 1}).values();
    for (int64_t s = 0; s < x.sequences(); ++s) {
      const bool is_k = operand == OCTET_OPERAND_K;
      const Values rows = is_k ? turned(x, made, from, s) : x.rows_of(from.values(), s);
      if (!x.new_tokens(s)) continue;
      const auto [row_codes, row_scales] = as_cached(x, rows, operand);
      for_each(rows.shape, [&](int64_t, int64_t h, int64_t t, int64_t c) {
        const auto [page, token] = places[static_cast<size_t>(s)][static_cast<size_t>(t)];
        codes.at(page, h, token, c) = row_codes.at(0, h, t, c);
        if (x.scales) scales.at(page, h, token, 0) = row_scales.at(0, h, t, 0);
      });
    }
    // Those that were written are the same numbers, and all others the same bytes: NaN, which is no number.
    const auto expect_same = [](const Values& got, const Values& wanted) {
      int64_t wrong = 0;
      for (size_t i = 0; i < wanted.data.size(); ++i)
        wrong += !(got.data[i] == wanted.data[i] || (std::isnan(got.data[i]) && std::isnan(wanted.data[i])));
      EXPECT_EQ(wrong, 0);
    };
    expect_same(cache.values(), codes);
    if (x.scales) expect_same(scale.values(), scales);
  };
  expect_rows(made.k, made.k_cache, made.k_scale, OCTET_OPERAND_K);
  expect_rows(made.v, made.v_cache, made.v_scale, OCTET_OPERAND_V);
  if (!x.with_q) return;
  const Buffer q =
      x.in_place ? Buffer(rounded(normal({x.batch(), x.heads, x.tokens, x.dim}, 3), x.dtype), x.dtype) : made.q;
  for (int64_t s = 0; s < x.sequences(); ++s)
    EXPECT_EQ(difference(x.rows_of(made.q_turned.values(), s), rounded(turned(x, made, q, s), x.dtype)).largest, 0.0);
}

INSTANTIATE_TEST_SUITE_P(Cases, Appends, testing::ValuesIn(appendings()),
                         [](const testing::TestParamInfo<Appending>& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace octet::test
