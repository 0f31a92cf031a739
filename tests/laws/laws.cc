#include "laws/laws.h"

#include <cmath>
#include <cstring>

namespace octet::test {

std::vector<Recipe> every_recipe() {
  std::vector<Recipe> list;
  for (Pass pass : {Pass::forward, Pass::backward, Pass::jvp})
    for (Precision precision : precisions_of(pass)) list.push_back({pass, precision});
  for (BiasCorrection bias_correction :
       {BiasCorrection::none, BiasCorrection::beta, BiasCorrection::exact_delta, BiasCorrection::gproj})
    list.push_back({Pass::backward, Precision::bf16, bias_correction});
  return list;
}

std::string label(const testing::TestParamInfo<Recipe>& info) {
  static const char* const kBiasCorrections[] = {"", "_none", "_beta", "_exact_delta", "_gproj"};  // in octet.h's order
  const Recipe& recipe = info.param;
  return std::string(name(recipe.pass)) + '_' + name(recipe.precision) +
         kBiasCorrections[static_cast<int>(recipe.bias_correction)];
}

void PrintTo(const Recipe& recipe, std::ostream* out) { *out << name(recipe.pass) << ' ' << name(recipe.precision); }

Outputs compute(const Case& c, const Inputs& in, const Recipe& recipe, unsigned threads, const char* backend) {
  Attention attention = attention_of(c, recipe.precision, backend);
  attention.threads = threads;
  attention.bias_correction = recipe.bias_correction;
  if (recipe.pass != Pass::backward) return run(c, in, attention, recipe.pass);
  const Outputs saved = run(c, in, attention, Pass::forward);
  return run(c, in, attention, Pass::backward, &saved);
}

Outputs forward(const Case& c, const Inputs& in, Precision precision) {
  return compute(c, in, {Pass::forward, precision});
}

std::vector<NamedValues> outputs_of(const Outputs& x, Pass pass) {
  std::vector<NamedValues> list = {{"o", &x.o}, {"lse", &x.lse}};
  if (pass == Pass::backward) list.insert(list.end(), {{"dq", &x.dq}, {"dk", &x.dk}, {"dv", &x.dv}});
  if (pass == Pass::jvp) list.push_back({"to", &x.to});
  if (x.dsinks.present()) list.push_back({"dsinks", &x.dsinks});
  if (x.dmask.present()) list.push_back({"dmask", &x.dmask});
  if (x.tlse.present()) list.push_back({"tlse", &x.tlse});
  return list;
}

void expect_same_bits(const Values& got, const Values& want, const std::string& what) {
  ASSERT_EQ(got.shape, want.shape) << what;
  int64_t differ = 0;
  std::string first;
  for_each(want.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
    const double g = got.at(b, h, t, c), w = want.at(b, h, t, c);
    if (std::memcmp(&g, &w, sizeof g) == 0 || (std::isnan(g) && std::isnan(w))) return;
    if (!differ++) {
      Difference d;
      d.where = {b, h, t, c}, d.got = g, d.want = w;
      first = text(d);
    }
  });
  EXPECT_EQ(differ, 0) << what << ": elements differ, first " << first;
}

void expect_same_bits(const Outputs& got, const Outputs& want, Pass pass, const std::string& what) {
  const auto wanted = outputs_of(want, pass);
  for (size_t i = 0; i < wanted.size(); ++i)
    expect_same_bits(*outputs_of(got, pass)[i].values, *wanted[i].values, what + ", " + wanted[i].name);
}

void expect_near(const Values& got, const Values& want, double bound, const std::string& what) {
  ASSERT_EQ(got.shape, want.shape) << what;
  const Difference d = difference(got, want);
  EXPECT_LE(d.largest, bound) << what << ": " << text(d);
}

Allowed::Allowed(const Case& c, const Inputs& in, const Recipe& recipe)
    : exact_(exact(c, in, recipe.pass)),
      plain_(compute(c, in, recipe, 0, "reference")),
      noise_(f32_noise(c, in, recipe.pass == Pass::backward ? largest_column_sum(c, in) : 0.0, 5.0)) {}

double Allowed::operator()(Values Outputs::*output) const {
  const double f32 = output == &Outputs::o        ? noise_.o
                     : output == &Outputs::lse    ? noise_.lse
                     : output == &Outputs::dq     ? noise_.dq
                     : output == &Outputs::dk     ? noise_.dk
                     : output == &Outputs::dv     ? noise_.dv
                     : output == &Outputs::dsinks ? noise_.dsinks
                     : output == &Outputs::dmask  ? noise_.dmask
                     : output == &Outputs::tlse   ? noise_.tlse
                                                  : noise_.to;
  return 2 * difference(plain_.*output, exact_.*output).largest + f32;
}

}  // namespace octet::test
