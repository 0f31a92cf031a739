// Derivatives against each other and against differences of the forward pass, all in f32 through the CPU kernels:
// tangent and gradient are adjoint, the tangent is linear, and both follow o. The bounds are f32 rounding (f32_noise)
// and, for differences, the remainder of Taylor's series.
#include <cmath>

#include "laws/laws.h"

namespace octet::test {
namespace {

constexpr Recipe kJvp{Pass::jvp, Precision::f32}, kBackward{Pass::backward, Precision::f32};

const Case kCases[] = {
    {.name = "plain", .heads = 4, .kv_heads = 2, .tokens_q = 70, .tokens_k = 90, .dim_v = 40},
    {.name = "causal",
     .batch = 2,
     .tokens_q = 100,
     .tokens_k = 70,
     .causal = true,
     .alignment = Alignment::bottom_right},
    {.name = "window", .tokens_q = 100, .tokens_k = 100, .dim = 32, .dim_v = 32, .window = {{20, 3}}},
    {.name = "mask", .heads = 2, .tokens_q = 66, .tokens_k = 70, .mask = MaskTensor::blind},
    {.name = "dlse", .heads = 4, .kv_heads = 2, .tokens_q = 70, .tokens_k = 90, .dim_v = 40, .dlse = true},
    {.name = "sinks",
     .batch = 2,
     .heads = 2,
     .tokens_q = 90,
     .tokens_k = 80,
     .causal = true,
     .alignment = Alignment::bottom_right,
     .sinks = Sinks::shared,
     .dlse = true},
    {.name = "softcap", .heads = 4, .kv_heads = 2, .tokens_q = 70, .tokens_k = 90, .dim_v = 40, .softcap = 1.5f},
    {.name = "alibi",
     .batch = 2,
     .heads = 2,
     .tokens_q = 90,
     .tokens_k = 80,
     .causal = true,
     .alignment = Alignment::bottom_right,
     .sinks = Sinks::shared,
     .dlse = true,
     .softcap = 2.f,
     .alibi = Alibi::shared},
    {.name = "dropout", .heads = 4, .kv_heads = 2, .tokens_q = 70, .tokens_k = 90, .dim_v = 40, .dropout_p = .3},
    {.name = "dropout_sinks",
     .batch = 2,
     .heads = 2,
     .tokens_q = 90,
     .tokens_k = 80,
     .causal = true,
     .alignment = Alignment::bottom_right,
     .sinks = Sinks::shared,
     .dlse = true,
     .softcap = 2.f,
     .dropout_p = .1},
};

Noise noise_of(const Case& c, const Inputs& in) { return f32_noise(c, in, largest_column_sum(c, in), 5.0); }

// <to, do> + <tlse, dlse> = <tq, dq> + <tk, dk> + <tv, dv> + <tsinks, dsinks>, with do = to and dlse = tlse, so that
// the left side is a sum of squares.
TEST(Derivatives, of_both_directions_are_adjoint) {
  for (const Case& c : kCases) {
    Inputs in = draw(c, 1);
    const Outputs tangent = compute(c, in, kJvp);
    in.do_ = tangent.to, in.dlse = tangent.tlse;
    const Outputs gradient = compute(c, in, kBackward);
    const double forwards = inner(in.do_, in.do_) + inner(in.dlse, in.dlse);
    const double parts[] = {inner(in.tq, gradient.dq), inner(in.tk, gradient.dk), inner(in.tv, gradient.dv)};
    const double of_sinks = inner(in.tsinks, gradient.dsinks);
    const Noise noise = noise_of(c, in);
    // Errors of single elements are independent: that of a weighted sum is the root of the sum of squares.
    const auto part = [](double error, const Values& factor) { return error * std::sqrt(inner(factor, factor)); };
    const double bound = part(noise.to, in.do_) + part(noise.dq, in.tq) + part(noise.dk, in.tk) +
                         part(noise.dv, in.tv) + part(noise.tlse, in.dlse) + part(noise.dsinks, in.tsinks);
    EXPECT_NEAR(forwards, parts[0] + parts[1] + parts[2] + of_sinks, bound) << c.name << ", seed 1";
    if (in.tsinks.present()) {
      EXPECT_LT(bound, .2 * std::fabs(of_sinks)) << c.name << ": sinks without a gradient would pass";
    }
    for (double x : parts) EXPECT_LT(bound, .1 * x) << c.name << ": a gradient that is off by a tenth would pass";
  }
}

// (o(x + h t) - o(x - h t)) / 2h = to + O(h^2), h = 2^-7: f32 rounding of o over h and Richardson's estimate of the
// remainder, |difference(2h) - difference(h)|, bound the distance.
struct Quotients {
  Values o, lse;
};

TEST(Derivatives, follow_differences_of_the_forward_pass) {
  for (const Case& c : kCases) {
    const Inputs in = draw(c, 2);
    const auto difference_quotient = [&](double h) {
      Outputs at[2];
      for (int side : {0, 1}) {
        const double step = side ? h : -h;
        Inputs moved = in;
        moved.q = rounded(combined(1, in.q, step, in.tq), DType::f32);
        moved.k = rounded(combined(1, in.k, step, in.tk), DType::f32);
        moved.v = rounded(combined(1, in.v, step, in.tv), DType::f32);
        moved.sinks = rounded(combined(1, in.sinks, step, in.tsinks), DType::f32);
        at[side] = compute(c, moved, {Pass::forward, Precision::f32});
      }
      return Quotients{combined(.5 / h, at[1].o, -.5 / h, at[0].o),
                       c.dlse ? combined(.5 / h, at[1].lse, -.5 / h, at[0].lse) : Values()};
    };
    const double h = 0x1p-7;
    const Quotients fine = difference_quotient(h), coarse = difference_quotient(2 * h);
    const double remainder = difference(fine.o, coarse.o).largest;
    const Noise noise = noise_of(c, in);
    const Outputs tangent = compute(c, in, kJvp);
    const double bound = remainder + noise.o / h + noise.to;
    expect_near(tangent.to, fine.o, bound, std::string(c.name) + ": to, seed 2");
    EXPECT_LT(bound, .2 * largest(tangent.to)) << c.name << ": the bound has no power";
    // The same quotient, weighted by do, is what the gradients say.
    const Outputs gradient = compute(c, in, kBackward);
    double forwards = inner(fine.o, in.do_), all = bound * std::sqrt(inner(in.do_, in.do_));
    if (c.dlse) {
      const double lse_bound = difference(fine.lse, coarse.lse).largest + noise.lse / h + noise.tlse;
      expect_near(tangent.tlse, fine.lse, lse_bound, std::string(c.name) + ": tlse, seed 2");
      EXPECT_LT(lse_bound, .2 * largest(tangent.tlse)) << c.name << ": the bound has no power";
      forwards += inner(fine.lse, in.dlse), all += lse_bound * std::sqrt(inner(in.dlse, in.dlse));
    }
    const double backwards = inner(in.tq, gradient.dq) + inner(in.tk, gradient.dk) + inner(in.tv, gradient.dv) +
                             inner(in.tsinks, gradient.dsinks);
    EXPECT_NEAR(forwards, backwards, all) << c.name;
  }
}

TEST(Derivatives, are_linear_in_the_tangent) {
  for (const Case& c : kCases) {
    const Inputs x = draw(c, 3), other = draw(c, 4);
    const double a = 2.0, b = -.5;
    Inputs y = x, sum = x;
    y.tq = other.tq, y.tk = other.tk, y.tv = other.tv;
    sum.tq = rounded(combined(a, x.tq, b, y.tq), DType::f32);
    sum.tk = rounded(combined(a, x.tk, b, y.tk), DType::f32);
    sum.tv = rounded(combined(a, x.tv, b, y.tv), DType::f32);
    y.tsinks = other.tsinks, sum.tsinks = rounded(combined(a, x.tsinks, b, y.tsinks), DType::f32);
    const Outputs of_x = compute(c, x, kJvp), of_y = compute(c, y, kJvp), of_sum = compute(c, sum, kJvp);
    const Noise at_x = noise_of(c, x), at_y = noise_of(c, y), at_sum = noise_of(c, sum);
    expect_near(of_sum.to, combined(a, of_x.to, b, of_y.to), a * at_x.to - b * at_y.to + at_sum.to,
                std::string(c.name) + ": to, seeds 3 and 4");
    expect_near(of_sum.tlse, combined(a, of_x.tlse, b, of_y.tlse), a * at_x.tlse - b * at_y.tlse + at_sum.tlse,
                std::string(c.name) + ": tlse, seeds 3 and 4");
  }
}

class Tangents : public testing::TestWithParam<Precision> {};

// Rows of P, of which nothing is dropped, sum to 1 with the sink: tv = 1 alone gives to = 1 - exp(sink - lse) where a
// key is seen.
TEST_P(Tangents, of_v_equal_one_give_one) {
  for (const Case& c : kCases) {
    if (c.dropout_p != 0) continue;
    Inputs in = draw(c, 5);
    in.tq = Values(in.tq.shape), in.tk = Values(in.tk.shape), in.tv = Values(in.tv.shape, 1.0);
    in.tsinks = Values(in.tsinks.shape);
    const Recipe recipe{Pass::jvp, GetParam()};
    const Outputs got = compute(c, in, recipe);
    Values want(got.to.shape);
    for_each(want.shape, [&](int64_t b, int64_t h, int64_t t, int64_t i) {
      const double lse = got.lse.at(b, h, t, 0);
      const double of_sink = in.sinks.present() ? std::exp(in.sinks.at(0, h, 0, 0) - lse) : 0.0;
      want.at(b, h, t, i) = std::isinf(lse) ? 0.0 : 1.0 - of_sink;
    });
    expect_near(got.to, want, Allowed(c, in, recipe)(&Outputs::to), c.name);
  }
}

// tk = 1 u^T moves all logits of a row alike, but not a sink, nor where a softcap meets them: to = 0 without both.
TEST_P(Tangents, of_k_equal_in_all_keys_give_zero) {
  for (const Case& c : kCases) {
    if (c.sinks != Sinks::none || c.softcap != 0) continue;
    Inputs in = draw(c, 6);
    in.tq = Values(in.tq.shape), in.tv = Values(in.tv.shape);
    for_each(in.tk.shape,
             [&](int64_t b, int64_t h, int64_t t, int64_t i) { in.tk.at(b, h, t, i) = in.tk.at(b, h, 0, i); });
    const Recipe recipe{Pass::jvp, GetParam()};
    expect_near(compute(c, in, recipe).to, Values(c.o_shape()), Allowed(c, in, recipe)(&Outputs::to), c.name);
  }
}

// A tangent that is absent is 0. Products with zeros add nothing to any sum, so that leaving them out changes no bit.
TEST_P(Tangents, that_are_absent_are_zeros) {
  for (const Case& c : kCases)
    for (int there = 0; there < 7; ++there) {  // bits: of tq, tk, tv
      Inputs in = draw(c, 7), zeros = in;
      int bit = 1;
      for (Values Inputs::*t : {&Inputs::tq, &Inputs::tk, &Inputs::tv}) {
        if (!(there & bit)) in.*t = Values(), zeros.*t = Values((zeros.*t).shape);
        bit *= 2;
      }
      const Recipe recipe{Pass::jvp, GetParam()};
      const Outputs got = compute(c, in, recipe), want = compute(c, zeros, recipe);
      for (const auto& [a, b] :
           {std::pair{&got.o, &want.o}, {&got.to, &want.to}, {&got.lse, &want.lse}, {&got.tlse, &want.tlse}})
        EXPECT_EQ(a->data, b->data) << c.name << ", tangents " << there;
    }
}

INSTANTIATE_TEST_SUITE_P(Precisions, Tangents, testing::ValuesIn(precisions_of(Pass::jvp)),
                         [](const auto& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace octet::test
