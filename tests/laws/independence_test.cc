// A result does not depend, bit for bit, on the run, the number of threads, the other batch elements, heads and packed
// sequences, the way k and v are repeated for grouped heads, and the layout.
#include "laws/laws.h"

namespace octet::test {
namespace {

class Independence : public EveryRecipe {};

constexpr Case kCase{.name = "independence",
                     .batch = 2,
                     .heads = 4,
                     .kv_heads = 2,
                     .tokens_q = 130,
                     .tokens_k = 150,
                     .causal = true,
                     .alignment = Alignment::bottom_right,
                     .dtype = DType::bf16,
                     .sinks = Sinks::of_batch,
                     .dlse = true};

// The inputs of one batch element, or of one head of k with its group of heads of q.
Inputs part_of(const Inputs& in, int dimension, int64_t index, int64_t group) {
  const auto of_q = [&](const Values& x) { return slice(x, dimension, index * group, (index + 1) * group); };
  const auto of_k = [&](const Values& x) { return slice(x, dimension, index, index + 1); };
  Inputs out = in;
  out.q = of_q(in.q), out.do_ = of_q(in.do_), out.tq = of_q(in.tq);
  out.sinks = of_q(in.sinks), out.tsinks = of_q(in.tsinks), out.dlse = of_q(in.dlse);
  out.k = of_k(in.k), out.v = of_k(in.v), out.tk = of_k(in.tk), out.tv = of_k(in.tv);
  return out;
}

// The same part of outputs.
Outputs part_of(const Outputs& x, int dimension, int64_t index, int64_t group) {
  const auto of_q = [&](const Values& y) {
    return y.present() ? slice(y, dimension, index * group, (index + 1) * group) : y;
  };
  const auto of_k = [&](const Values& y) { return y.present() ? slice(y, dimension, index, index + 1) : y; };
  Outputs out;
  out.o = of_q(x.o), out.lse = of_q(x.lse), out.dq = of_q(x.dq), out.to = of_q(x.to);
  out.dsinks = of_q(x.dsinks), out.tlse = of_q(x.tlse);
  out.dk = of_k(x.dk), out.dv = of_k(x.dv);
  return out;
}

TEST_P(Independence, of_the_run) {
  const Inputs in = draw(kCase, 1);
  expect_same_bits(compute(kCase, in, GetParam()), compute(kCase, in, GetParam()), GetParam().pass, "second run");
}

TEST_P(Independence, of_threads) {
  const Inputs in = draw(kCase, 2);
  const Outputs one = compute(kCase, in, GetParam(), 1);
  for (unsigned threads : {2u, 5u})
    expect_same_bits(compute(kCase, in, GetParam(), threads), one, GetParam().pass,
                     std::to_string(threads) + " threads against 1");
}

TEST_P(Independence, of_other_batch_elements) {
  const Inputs in = draw(kCase, 3);
  const Outputs all = compute(kCase, in, GetParam());
  Case alone = kCase;
  alone.batch = 1;
  for (int64_t b = 0; b < kCase.batch; ++b)
    expect_same_bits(compute(alone, part_of(in, 0, b, 1), GetParam()), part_of(all, 0, b, 1), GetParam().pass,
                     "batch element " + std::to_string(b) + " alone");
}

TEST_P(Independence, of_other_heads) {
  const Inputs in = draw(kCase, 4);
  const Outputs all = compute(kCase, in, GetParam());
  Case alone = kCase;
  alone.heads = 2, alone.kv_heads = 1;
  for (int64_t h = 0; h < kCase.kv_heads; ++h)
    expect_same_bits(compute(alone, part_of(in, 1, h, 2), GetParam()), part_of(all, 1, h, 2), GetParam().pass,
                     "head " + std::to_string(h) + " of k alone");
}

TEST_P(Independence, of_the_layout) {
  const Inputs in = draw(kCase, 5);
  const Outputs dense = compute(kCase, in, GetParam());
  for (Layout layout : {Layout::bthd, Layout::transposed, Layout::padded}) {
    Case other = kCase;
    other.layout = other.kv_layout = layout;
    expect_same_bits(compute(other, in, GetParam()), dense, GetParam().pass, name(layout));
  }
}

TEST_P(Independence, of_repeating_k_and_v_for_grouped_heads) {
  const Inputs in = draw(kCase, 6);
  const Outputs grouped = compute(kCase, in, GetParam());
  const auto repeated = [](const Values& x) {
    return joined({slice(x, 1, 0, 1), slice(x, 1, 0, 1), slice(x, 1, 1, 2), slice(x, 1, 1, 2)}, 1);
  };
  Case plain = kCase;
  plain.kv_heads = kCase.heads;
  Inputs other = in;
  for (Values Inputs::*x : {&Inputs::k, &Inputs::v, &Inputs::tk, &Inputs::tv}) other.*x = repeated(in.*x);
  Outputs got = compute(plain, other, GetParam());
  expect_same_bits(got.o, grouped.o, "o");
  expect_same_bits(got.lse, grouped.lse, "lse");
  if (GetParam().pass == Pass::jvp) expect_same_bits(got.to, grouped.to, "to");
  if (GetParam().pass == Pass::backward) {
    expect_same_bits(got.dq, grouped.dq, "dq");
    expect_same_bits(got.dsinks, grouped.dsinks, "dsinks");
  }
}

// The gradients of k and v add up over the group: in f32 to rounding, shown by do that is zero for all but one head.
TEST(Independence, gradients_of_grouped_heads_add_up) {
  Inputs in = draw(kCase, 7);
  const Outputs all = compute(kCase, in, {Pass::backward, Precision::f32});
  Values dk(kCase.k_shape()), dv(kCase.v_shape());
  for (int64_t h = 0; h < 2; ++h) {
    Inputs one = in;
    for_each(one.do_.shape, [&](int64_t b, int64_t head, int64_t t, int64_t c) {
      if (head % 2 != h) one.do_.at(b, head, t, c) = one.dlse.at(b, head, t, 0) = 0.0;
    });
    const Outputs part = compute(kCase, one, {Pass::backward, Precision::f32});
    dk = combined(1, dk, 1, part.dk), dv = combined(1, dv, 1, part.dv);
  }
  const Noise noise = f32_noise(kCase, in, largest_column_sum(kCase, in), 5.0);
  expect_near(dk, all.dk, 3 * noise.dk, "dk");
  expect_near(dv, all.dv, 3 * noise.dv, "dv");
}

TEST_P(Independence, of_other_packed_sequences) {
  const std::vector<int32_t> q = {0, 70, 70, 133, 200}, k = {0, 65, 80, 80, 213};
  const Case packed{.name = "packed",
                    .heads = 4,
                    .kv_heads = 2,
                    .tokens_q = 200,
                    .tokens_k = 213,
                    .causal = true,
                    .alignment = Alignment::bottom_right,
                    .cu_seqlens_q = q,
                    .cu_seqlens_k = k,
                    .dtype = DType::bf16,
                    .sinks = Sinks::shared,
                    .dlse = true};
  const Inputs in = draw(packed, 8);
  const Outputs all = compute(packed, in, GetParam());
  for (size_t s = 0; s + 1 < q.size(); ++s) {
    Case alone = packed;
    alone.cu_seqlens_q.clear(), alone.cu_seqlens_k.clear();
    alone.tokens_q = q[s + 1] - q[s], alone.tokens_k = k[s + 1] - k[s];
    const auto of_q = [&](const Values& x) { return x.present() ? slice(x, 2, q[s], q[s + 1]) : x; };
    const auto of_k = [&](const Values& x) { return x.present() ? slice(x, 2, k[s], k[s + 1]) : x; };
    Inputs part;
    part.q = of_q(in.q), part.do_ = of_q(in.do_), part.tq = of_q(in.tq), part.dlse = of_q(in.dlse);
    part.sinks = in.sinks, part.tsinks = in.tsinks;
    part.k = of_k(in.k), part.v = of_k(in.v), part.tk = of_k(in.tk), part.tv = of_k(in.tv);
    Outputs want;
    want.o = of_q(all.o), want.lse = of_q(all.lse), want.dq = of_q(all.dq), want.to = of_q(all.to);
    want.tlse = of_q(all.tlse);
    want.dk = of_k(all.dk), want.dv = of_k(all.dv);
    expect_same_bits(compute(alone, part, GetParam()), want, GetParam().pass,
                     "sequence " + std::to_string(s) + " alone");
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, Independence, testing::ValuesIn(every_recipe()), label);

}  // namespace
}  // namespace octet::test
