#include "passes/real.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <octet/formats.hpp>

#include "support/cache.h"

namespace octet::test {
namespace {

// A safetensors file of ours: length of the JSON header, header, bf16 data.
Known read(const std::string& name) {
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
  Known real;
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
  real.c.trains_int8 = true;
  real.want = exact(real.c, real.in, Pass::backward);
  real.want.o = exact(real.c, real.in, Pass::forward).o;
  return real;
}

}  // namespace

const Known& real(const std::string& file) {
  static std::map<std::string, Known> all;
  if (!all.count(file)) all[file] = read(file);
  return all[file];
}

void PrintTo(const RealBar& bar, std::ostream* out) { *out << bar.row; }

void expect_real_bar(const Tested& tested, const RealBar& bar) {
  for (const char* file : kRealFiles) {
    const Known& x = real(file);
    const auto expect = [&](const char* tensor, const Values& got, const Values& want, double limit) {
      const Difference d = difference(got, want);
      EXPECT_LE(d.relative(), limit) << file << ' ' << tensor << "; worst " << text(d);
    };
    if (bar.o > 0.0) expect("o", compute(tested, x.c, x.in, Pass::forward, bar.precision, bar.out).o, x.want.o, bar.o);
    if (bar.dq == 0.0) continue;
    const Outputs got = compute(tested, x.c, x.in, Pass::backward, bar.precision, bar.out);
    expect("dq", got.dq, x.want.dq, bar.dq);
    expect("dk", got.dk, x.want.dk, bar.dk);
    expect("dv", got.dv, x.want.dv, bar.dv);
  }
}

void PrintTo(const RealCacheBar& bar, std::ostream* out) { *out << bar.row; }

void expect_real_cache_bar(const Tested& tested, const RealCacheBar& bar, Precision precision, std::string* explained) {
  for (const char* file : kRealFiles) {
    const Known& x = real(file);
    const int64_t tokens = x.c.tokens_k, queries = bar.queries ? bar.queries : tokens, first = tokens - queries;
    Case c = x.c;
    c.tokens_q = queries, c.alignment = Alignment::bottom_right;
    c.cu_seqlens_q = {0, static_cast<int32_t>(queries)}, c.cu_seqlens_k = {0, static_cast<int32_t>(tokens)};
    Inputs in = x.in;
    in.q = slice(x.in.q, 2, first, tokens);
    Attention attention = attention_of(c, precision, tested.backend);
    if (precision != Precision::f32) attention.bias_correction = BiasCorrection::none;
    const auto place = tested.place ? tested.place() : nullptr;
    const Outputs got =
        run_cached(c, in, attention, {.packed_q = false, .codes = bar.codes}, 5, place.get(), explained);
    const Difference d = difference(got.o, slice(x.want.o, 2, first, tokens));
    EXPECT_LE(d.relative(), bar.o) << file << "; worst " << text(d);
  }
}

void expect_real_gradients_to_err_as_rounding_costs(const Tested& tested, Precision precision) {
  for (const char* file : kRealFiles) {
    const Known& x = real(file);
    const auto gradients = [&](const Tested& by) {
      return compute(by, x.c, x.in, Pass::backward, precision, DType::f32);
    };
    const Outputs got = gradients(tested), emulated = gradients({"reference"});
    for (Values Outputs::*gradient : {&Outputs::dq, &Outputs::dk, &Outputs::dv})
      EXPECT_LE(difference(got.*gradient, x.want.*gradient).relative(),
                1.1 * difference(emulated.*gradient, x.want.*gradient).relative())
          << file;
  }
}

void expect_that_without_bias_correction_real_dq_misses(const Tested& tested) {
  const Known& x = real("rope128_layer1");
  const Values dq = compute(tested, x.c, x.in, Pass::backward, Precision::bf16, DType::bf16, BiasCorrection::none).dq;
  EXPECT_GE(difference(dq, x.want.dq).relative(), .005);
}

}  // namespace octet::test
