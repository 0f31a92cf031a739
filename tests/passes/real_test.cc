// The CPU backend on real activations (examples/data), causal: relative L2 against float64, each tensor at most the bar
// on every file. Gradients of 1e-6, channel outliers in k, sharp and diffuse rows: what normal noise has not.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <octet/formats.hpp>

#include "support/cases.h"

namespace octet::test {
namespace {

const char* const kFiles[] = {"rope128_layer1", "rope128_layer4", "gpt64_layer2", "gpt64_layer5"};

struct Real {
  Case c;
  Inputs in;
  Outputs want;  // of both passes
};

// A safetensors file of ours: length of the JSON header, header, bf16 data.
Real read(const std::string& name) {
  std::ifstream file(std::string(OCTET_EXAMPLES_DATA) + '/' + name + ".safetensors", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (bytes.size() < 8) throw std::runtime_error("cannot read " + name);
  uint64_t length;
  std::memcpy(&length, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  const auto tensor = [&](const char* key) {
    Values x(header[key]["shape"].get<Shape>());
    const char* data = bytes.data() + 8 + length + header[key]["data_offsets"][0].get<size_t>();
    for (size_t i = 0; i < x.data.size(); ++i) x.data[i] = load(OCTET_BF16, data, static_cast<int64_t>(i));
    return x;
  };
  Real real;
  real.in.q = tensor("q"), real.in.k = tensor("k"), real.in.v = tensor("v"), real.in.do_ = tensor("do");
  const Shape& q = real.in.q.shape;
  real.c = {.name = "real",
            .heads = q[1],
            .kv_heads = q[1],
            .tokens_q = q[2],
            .tokens_k = q[2],
            .dim = q[3],
            .dim_v = q[3],
            .causal = true,
            .dtype = DType::bf16};
  real.want = exact(real.c, real.in, Pass::backward);
  real.want.o = exact(real.c, real.in, Pass::forward).o;
  return real;
}

const Real& real(const std::string& name) {
  static std::map<std::string, Real> all;
  if (!all.count(name)) all[name] = read(name);
  return all[name];
}

// The largest relative L2 over the files; 0: the tensor has no bar.
struct Bar {
  const char* row;
  Precision precision;
  DType out;
  double o, dq, dk, dv;
  bool emulated = false;  // the gradients: within a tenth of what the same rounding points cost in float64
};

void PrintTo(const Bar& bar, std::ostream* out) { *out << bar.row; }

class RealActivations : public testing::TestWithParam<Bar> {};

void expect_within_a_tenth_of_emulation(const Case& c, const Real& x, Precision precision, const char* file) {
  const auto gradients = [&](const char* backend) {
    const Attention attention = attention_of(c, precision, backend);
    const Outputs forward = run(c, x.in, attention, Pass::forward);
    return run(c, x.in, attention, Pass::backward, &forward);
  };
  const Outputs got = gradients("cpu"), emulated = gradients("reference");
  for (Values Outputs::*gradient : {&Outputs::dq, &Outputs::dk, &Outputs::dv})
    EXPECT_LE(difference(got.*gradient, x.want.*gradient).relative(),
              1.1 * difference(emulated.*gradient, x.want.*gradient).relative())
        << file;
}

TEST_P(RealActivations, hold_their_bars) {
  const Bar& bar = GetParam();
  for (const char* file : kFiles) {
    const Real& x = real(file);
    Case c = x.c;
    c.out_dtype = bar.out;
    const Attention attention = attention_of(c, bar.precision, "cpu");
    const Outputs forward = run(c, x.in, attention, Pass::forward);
    const auto expect = [&](const char* tensor, const Values& got, const Values& want, double limit) {
      const Difference d = difference(got, want);
      EXPECT_LE(d.relative(), limit) << file << ' ' << tensor << "; worst " << text(d);
    };
    if (bar.o > 0.0) expect("o", forward.o, x.want.o, bar.o);
    if (bar.emulated) {
      expect_within_a_tenth_of_emulation(c, x, bar.precision, file);
      continue;
    }
    if (bar.dq == 0.0) continue;
    const Outputs backward = run(c, x.in, attention, Pass::backward, &forward);
    expect("dq", backward.dq, x.want.dq, bar.dq);
    expect("dk", backward.dk, x.want.dk, bar.dk);
    expect("dv", backward.dv, x.want.dv, bar.dv);
  }
}

INSTANTIATE_TEST_SUITE_P(Bars, RealActivations,
                         testing::Values(Bar{"bf16", Precision::bf16, DType::bf16, .0020, .0022, .0021, .0020},
                                         Bar{"int8", Precision::int8, DType::f32, .0095, .030, .026, .018},
                                         Bar{"int8_f16", Precision::int8_f16, DType::f32, .0090, 0, 0, 0},
                                         Bar{"int8_fp8", Precision::int8_fp8, DType::f32, .029, 0, 0, 0},
                                         Bar{"fp8", Precision::fp8, DType::f32, .040, 0, 0, 0, true},
                                         Bar{"sagebwd", Precision::sagebwd, DType::f32, 0, 0, 0, 0, true}),
                         [](const auto& info) { return std::string(info.param.row); });

// The test has power: without remedy the gradient of q misses its bar.
TEST(RealActivations, without_remedy_miss_the_bar) {
  const Real& x = real("rope128_layer1");
  Case c = x.c;
  c.out_dtype = DType::bf16;
  Attention attention = attention_of(c, Precision::bf16, "cpu");
  attention.remedy = Remedy::none;
  const Outputs forward = run(c, x.in, attention, Pass::forward);
  EXPECT_GE(difference(run(c, x.in, attention, Pass::backward, &forward).dq, x.want.dq).relative(), .005);
}

}  // namespace
}  // namespace octet::test
