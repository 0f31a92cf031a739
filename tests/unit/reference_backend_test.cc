// Tests the oracle on tensors, through the C ABI: poison, groups, packed sequences, residuals, rounding points, codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <octet/octet_study.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <octet/formats.hpp>
#include <octet/octet.hpp>
#include <random>

#include "core/names.h"
#include "core/quant/hadamard.h"

namespace octet::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<double> normals(int64_t count, uint64_t seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<double> normal;
  std::vector<double> x(static_cast<std::size_t>(count));
  for (double& value : x) value = normal(bits);
  return x;
}

struct Tensors {
  int64_t batch = 1, heads = 1, kv_heads = 1, n = 0, m = 0, d = 0, e = 0;
  std::vector<float> q, k, v, do_, o, residual, lse, dq, dk, dv;

  Tensors(int64_t heads, int64_t kv_heads, int64_t n, int64_t m, int64_t d, int64_t e)
      : heads(heads), kv_heads(kv_heads), n(n), m(m), d(d), e(e) {
    const auto draw = [](int64_t count, uint64_t seed) {
      const std::vector<double> x = normals(count, seed);
      return std::vector<float>(x.begin(), x.end());
    };
    q = draw(heads * n * d, 1), k = draw(kv_heads * m * d, 2), v = draw(kv_heads * m * e, 3),
    do_ = draw(heads * n * e, 4);
    for (auto* x : {&q, &k, &v, &do_})
      for (float& value : *x) value = static_cast<float>(round_to(kBf16, value));
    o.resize(do_.size()), residual.resize(do_.size()), lse.resize(static_cast<std::size_t>(heads * n));
    dq.resize(q.size()), dk.resize(k.size()), dv.resize(v.size());
  }
  Tensor of_q(std::vector<float>& x) { return {x.data(), Shape{1, heads, n, d}}; }
  Tensor of_k(std::vector<float>& x) { return {x.data(), Shape{1, kv_heads, m, d}}; }
  Tensor of_v(std::vector<float>& x) { return {x.data(), Shape{1, kv_heads, m, e}}; }
  Tensor of_o(std::vector<float>& x) { return {x.data(), Shape{1, heads, n, e}}; }
  Forward forward() {
    return {.q = of_q(q), .k = of_k(k), .v = of_v(v), .o = of_o(o), .lse = {lse.data(), Shape{1, heads, n, 1}}};
  }
  Backward backward() {
    return {.q = of_q(q),
            .k = of_k(k),
            .v = of_v(v),
            .o = of_o(o),
            .lse = {lse.data(), Shape{1, heads, n, 1}},
            .do_ = of_o(do_),
            .dq = of_q(dq),
            .dk = of_k(dk),
            .dv = of_v(dv)};
  }
};

constexpr Precision kForwardPrecisions[] = {
    Precision::f64,      Precision::f32,      Precision::f16, Precision::bf16,    Precision::int8,
    Precision::int8_f16, Precision::int8_fp8, Precision::fp8, Precision::fp8_raw, Precision::sagebwd};

Attention attention(Precision precision) { return {.precision = precision, .backend = "reference"}; }

std::string label(Precision precision) { return octet::name(static_cast<octet_precision>(precision)); }

TEST(ReferenceBackend, poisoned_future_keys_do_not_reach_the_past) {
  for (Precision precision : kForwardPrecisions)
    for (double poison : {kInf, kNaN}) {
      SCOPED_TRACE(label(precision));
      Attention a = attention(precision);
      a.causal = true;
      Tensors x(1, 1, 96, 96, 16, 16);
      for (int64_t c = 0; c < 16; ++c)
        x.k[static_cast<std::size_t>(80 * 16 + c)] = x.v[static_cast<std::size_t>(80 * 16 + c)] =
            static_cast<float>(poison);
      run(a, x.forward());
      for (int64_t i = 0; i < 96 * 16; ++i)
        EXPECT_EQ(std::isfinite(x.o[static_cast<std::size_t>(i)]),
                  i < 80 * 16 || (precision == Precision::fp8_raw && poison == kInf))
            << i;
    }
}

TEST(ReferenceBackend, a_poisoned_query_stays_in_its_row) {
  for (Precision precision : kForwardPrecisions) {
    SCOPED_TRACE(label(precision));
    Tensors x(1, 1, 70, 70, 16, 16);
    x.q[33 * 16 + 5] = static_cast<float>(kNaN);
    run(attention(precision), x.forward());
    for (int64_t i = 0; i < 70 * 16; ++i) EXPECT_EQ(std::isnan(x.o[static_cast<std::size_t>(i)]), i / 16 == 33) << i;
  }
}

TEST(ReferenceBackend, groups_sum_their_heads_whatever_the_threads) {
  for (Precision precision : {Precision::f32, Precision::bf16, Precision::int8, Precision::fp8, Precision::sagebwd}) {
    SCOPED_TRACE(label(precision));
    Tensors x(4, 2, 40, 24, 8, 16);
    Attention a = attention(precision);
    a.threads = 1;
    run(a, x.forward());
    run(a, x.backward());
    const Tensors one = x;
    a.threads = 3;
    run(a, x.forward());
    run(a, x.backward());
    EXPECT_EQ(x.o, one.o);
    EXPECT_EQ(x.dq, one.dq);
    EXPECT_EQ(x.dk, one.dk);
    EXPECT_EQ(x.dv, one.dv);

    std::vector<double> dv(x.dv.size(), 0.0);  // the same from each head of q alone
    for (int64_t h = 0; h < 4; ++h) {
      Tensors single(1, 1, 40, 24, 8, 16);
      const auto cut = [](const std::vector<float>& from, std::vector<float>& to, int64_t at) {
        std::copy_n(from.begin() + at * static_cast<int64_t>(to.size()), to.size(), to.begin());
      };
      cut(x.q, single.q, h), cut(x.k, single.k, h / 2), cut(x.v, single.v, h / 2), cut(x.do_, single.do_, h);
      run(a, single.forward());
      run(a, single.backward());
      EXPECT_TRUE(std::equal(single.dq.begin(), single.dq.end(), x.dq.begin() + h * 40 * 8));
      for (std::size_t i = 0; i < single.dv.size(); ++i)
        dv[static_cast<std::size_t>(h / 2) * single.dv.size() + i] += single.dv[i];
    }
    for (std::size_t i = 0; i < dv.size(); ++i) EXPECT_NEAR(x.dv[i], dv[i], 1e-6 * (1.0 + std::fabs(dv[i])));
  }
}

TEST(ReferenceBackend, packed_sequences_are_separate_calls) {
  std::vector<int32_t> starts = {0, 30, 30, 70};
  for (Precision precision : kForwardPrecisions) {
    SCOPED_TRACE(label(precision));
    Attention a = attention(precision);
    a.causal = true;
    a.alignment = Alignment::bottom_right;
    Tensors x(1, 1, 70, 70, 16, 16);
    Forward packed = x.forward();
    packed.extras.cu_seqlens_q = packed.extras.cu_seqlens_k = Tensor(starts.data(), Shape{1, 1, 1, 4});
    run(a, packed);
    for (const auto& [first, count] : {std::pair{0, 30}, {30, 40}}) {
      Tensors part(1, 1, count, count, 16, 16);
      for (const auto& [from, to] : {std::pair{&x.q, &part.q}, {&x.k, &part.k}, {&x.v, &part.v}})
        std::copy_n(from->begin() + first * 16, count * 16, to->begin());
      run(a, part.forward());
      EXPECT_TRUE(std::equal(part.o.begin(), part.o.end(), x.o.begin() + first * 16));
      EXPECT_TRUE(std::equal(part.lse.begin(), part.lse.end(), x.lse.begin() + first));
    }
  }
}

TEST(ReferenceBackend, the_residual_completes_a_16_bit_output) {
  Tensors x(1, 1, 20, 20, 16, 16);
  run(attention(Precision::bf16), x.forward());
  std::vector<uint16_t> high(x.o.size()), low(x.o.size());
  Forward f = x.forward();
  f.o = Tensor(high.data(), DType::bf16, Shape{1, 1, 20, 16});
  f.o_residual = Tensor(low.data(), DType::bf16, Shape{1, 1, 20, 16});
  run(attention(Precision::bf16), f);
  for (std::size_t i = 0; i < x.o.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    EXPECT_EQ(load(OCTET_BF16, high.data(), at), round_to(kBf16, x.o[i]));
    EXPECT_NEAR(load(OCTET_BF16, high.data(), at) + load(OCTET_BF16, low.data(), at), x.o[i],
                0x1p-16 * std::fabs(x.o[i]));
  }

  std::vector<int8_t> bytes(x.o.size());
  f.o_residual = Tensor(bytes.data(), DType::i8, Shape{1, 1, 20, 16});
  run(attention(Precision::bf16), f);
  const auto bits = [](float value) { return std::bit_cast<int32_t>(value); };
  for (std::size_t i = 0; i < x.o.size(); ++i) {
    const auto o = static_cast<float>(load(OCTET_BF16, high.data(), static_cast<int64_t>(i)));
    // x.o is the exact o rounded to f32, which may be a step from where it was.
    EXPECT_NEAR(std::clamp(bits(x.o[i]) - bits(o), -127 * 256, 127 * 256), 256 * bytes[i], 129) << x.o[i];
  }
}

TEST(ReferenceBackend, every_rounding_point_rounds) {
  const auto output = [](const std::function<void(octet_rounding&)>& set) {
    octet_rounding rounding = OCTET_ROUNDING_INIT;
    rounding.tile = 16;
    set(rounding);
    Attention a = attention(Precision::f64);
    a.rounding = &rounding;
    Tensors x(1, 1, 48, 48, 16, 16);
    for (auto* values : {&x.q, &x.k, &x.v})
      for (float& value : *values) value *= 1.001f;  // no longer bf16
    run(a, x.forward());
    run(a, x.backward());
    std::vector<float> all = x.o;
    for (const auto* values : {&x.dq, &x.dk, &x.dv}) all.insert(all.end(), values->begin(), values->end());
    return all;
  };
  const auto exact = output([](octet_rounding&) {});
  uint32_t octet_rounding::*const points[] = {
      &octet_rounding::qk,  &octet_rounding::v,       &octet_rounding::s,     &octet_rounding::m,
      &octet_rounding::arg, &octet_rounding::p,       &octet_rounding::alpha, &octet_rounding::acc,
      &octet_rounding::o,   &octet_rounding::o_saved, &octet_rounding::ds,    &octet_rounding::p_backward};
  for (auto point : points) {
    if (point == &octet_rounding::m) continue;  // any maximum gives the same softmax, unless p is rounded
    const auto rounded = output([&](octet_rounding& r) { r.*point = OCTET_BF16; });
    EXPECT_NE(rounded, exact);
  }
  const auto p_and = [&](const std::function<void(octet_rounding&)>& more) {
    return output([&](octet_rounding& r) { r.p = OCTET_BF16, more(r); });
  };
  const auto p_alone = p_and([](octet_rounding&) {});
  EXPECT_NE(p_and([](octet_rounding& r) { r.m = OCTET_BF16; }), p_alone);
  EXPECT_NE(p_and([](octet_rounding& r) { r.l_from_p = 0; }), p_alone);
  EXPECT_NE(output([](octet_rounding& r) { r.s = OCTET_BF16, r.s_scaled = 1; }),
            output([](octet_rounding& r) { r.s = OCTET_F16, r.s_scaled = 1; }));
}

// int8 codes made by hand: x = rotate back(scale * code) + mean, and attention on them is attention on those numbers.
TEST(ReferenceBackend, codes_stand_for_numbers) {
  Tensors x(1, 1, 12, 12, 16, 16);
  std::vector<int8_t> codes(12 * 16);
  std::vector<float> scale(12), mean(16);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<int8_t>(static_cast<int>(i * 37 % 255) - 127);
  for (std::size_t t = 0; t < 12; ++t) scale[t] = 0.01f + 0.001f * static_cast<float>(t);
  for (std::size_t c = 0; c < 16; ++c) mean[c] = static_cast<float>(c) - 8.f;
  std::vector<float> signs;
  for (int64_t c = 0; c < 16; ++c) signs.push_back(hadamard_sign(77, c));
  for (std::size_t t = 0; t < 12; ++t) {
    float* row = x.k.data() + t * 16;
    for (std::size_t c = 0; c < 16; ++c) row[c] = scale[t] * codes[t * 16 + c];
    hadamard_inverse(row, signs.data(), 16);
    for (std::size_t c = 0; c < 16; ++c) row[c] += mean[c];
  }
  run(attention(Precision::f32), x.forward());
  const std::vector<float> want = x.o;
  Tensor scales(scale.data(), Shape{1, 1, 12, 1}), means(mean.data(), Shape{1, 1, 1, 16});
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  how.operand = OCTET_OPERAND_K, how.granularity = OCTET_PER_TOKEN, how.hadamard_seed = 77;
  how.scale = &scales, how.mean = &means;
  Forward f = x.forward();
  f.k = Tensor(codes.data(), Shape{1, 1, 12, 16});
  f.k.quantization = &how;
  run(attention(Precision::f32), f);
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(x.o[i], want[i], 1e-5);
}

// Sums over queries, sequences and, with sinks for all of it, the batch; zeros where there is nothing to sum.
TEST(ReferenceBackend, dsinks_are_complete_sums) {
  const auto backward = [](Tensors& x, std::vector<float>& sinks, std::vector<float>& dsinks,
                           std::vector<float>& dlse) {
    Forward f = x.forward();
    f.extras.sinks = Tensor(sinks.data(), Shape{1, x.heads, 1, 1});
    run(attention(Precision::f64), f);
    Backward b = x.backward();
    b.extras = f.extras;
    b.dlse = Tensor(dlse.data(), Shape{1, x.heads, x.n, 1});
    b.dsinks = Tensor(dsinks.data(), Shape{1, x.heads, 1, 1});
    return b;
  };
  std::vector<float> sinks = {.5f, -1.f, -INFINITY, 2.f}, dsinks(4, NAN), dlse(4 * 30);
  for (std::size_t i = 0; i < dlse.size(); ++i) dlse[i] = .01f * static_cast<float>(i % 17);
  Tensors x(4, 2, 30, 20, 8, 16);
  Backward whole = backward(x, sinks, dsinks, dlse);
  run(attention(Precision::f64), whole);
  EXPECT_EQ(dsinks[2], 0.f);

  std::vector<float> packed(4, NAN);  // the same queries, with the same keys each time, as two sequences
  std::vector<int32_t> q_starts = {0, 11, 30}, k_starts = {0, 20, 40};
  Tensors twice(4, 2, 30, 40, 8, 16);
  twice.q = x.q, twice.do_ = x.do_;
  for (const auto& [from, to, width] : {std::tuple{&x.k, &twice.k, 8}, {&x.v, &twice.v, 16}})
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t copy = 0; copy < 2; ++copy)
        std::copy_n(from->begin() + h * 20 * width, 20 * width, to->begin() + (2 * h + copy) * 20 * width);
  twice.o = x.o, twice.lse = x.lse;
  Backward b = twice.backward();
  b.extras = whole.extras, b.dlse = whole.dlse, b.dsinks = Tensor(packed.data(), Shape{1, 4, 1, 1});
  b.extras.cu_seqlens_q = Tensor(q_starts.data(), Shape{1, 1, 1, 3});
  b.extras.cu_seqlens_k = Tensor(k_starts.data(), Shape{1, 1, 1, 3});
  run(attention(Precision::f64), b);
  for (std::size_t h = 0; h < 4; ++h) EXPECT_NEAR(packed[h], dsinks[h], 1e-5);

  Tensors none(4, 2, 0, 0, 8, 16);
  std::fill(dsinks.begin(), dsinks.end(), NAN);
  run(attention(Precision::f64), backward(none, sinks, dsinks, dlse));
  EXPECT_THAT(dsinks, testing::Each(0.f));
}

std::string rejection(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

TEST(ReferenceBackend, rejections_name_the_choices) {
  Tensors x(1, 1, 8, 8, 8, 8);
  for (Precision precision : {Precision::int8_f16, Precision::int8_fp8, Precision::fp8_raw})
    EXPECT_NE(rejection([&] {
                run(attention(precision), x.backward());
              }).find("has no backward pass; those that have: f64, f32, f16, bf16, int8, fp8, sagebwd"),
              std::string::npos);
  Jvp jvp{.q = x.of_q(x.q),
          .k = x.of_k(x.k),
          .v = x.of_v(x.v),
          .tq = x.of_q(x.q),
          .tk = x.of_k(x.k),
          .tv = x.of_v(x.v),
          .o = x.of_o(x.o),
          .to = x.of_o(x.residual)};
  EXPECT_NE(rejection([&] {
              run(attention(Precision::int8), jvp);
            }).find("precision int8 has no jvp; those that have: f64, f32, f16, bf16"),
            std::string::npos);
  std::vector<uint16_t> o(64);
  Backward b = x.backward();
  b.o = Tensor(o.data(), DType::bf16, Shape{1, 1, 8, 8});
  const std::string message = rejection([&] { run(attention(Precision::bf16), b); });
  EXPECT_NE(message.find("pass o_residual"), std::string::npos) << message;
  EXPECT_NE(message.find("keep o in f32"), std::string::npos) << message;
  octet_rounding rounding = OCTET_ROUNDING_INIT;
  rounding.p = OCTET_I8;
  Attention a = attention(Precision::f64);
  a.rounding = &rounding;
  EXPECT_THAT(rejection([&] { run(a, x.forward()); }), testing::HasSubstr("rounding: p: found 7"));
}

}  // namespace
}  // namespace octet::reference
