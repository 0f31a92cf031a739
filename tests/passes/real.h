// Real activations (examples/data), causal: bars of relative L2 against float64. Gradients of 1e-6, channel outliers in
// k, sharp and diffuse rows: what normal noise has not.
#pragma once
#include "passes/bars.h"

namespace octet::test {

inline constexpr const char* kRealFiles[] = {"rope128_layer1", "rope128_layer4", "gpt64_layer2", "gpt64_layer5"};

// A file and its float64 answers, computed once.
const Known& real(const std::string& file);

// The largest relative L2 over the files; 0: the tensor has no bar.
struct RealBar {
  const char* row;
  Precision precision;
  DType out;
  double o, dq, dk, dv;
};
void PrintTo(const RealBar&, std::ostream*);
void expect_real_bar(const Tested&, const RealBar&);

inline constexpr RealBar kRealBf16{"bf16", Precision::bf16, DType::bf16, .0020, .0022, .0021, .0020};
inline constexpr RealBar kRealInt8{"int8", Precision::int8, DType::f32, .0095, .0178, .0187, .0062};
inline constexpr RealBar kRealInt8F16{"int8_f16", Precision::int8_f16, DType::f32, .0090, 0, 0, 0};

// The last `queries` of each file over a KV cache whose pages are quantized per token; 0: all. The largest relative L2
// of o over the files. A bar is a tenth above what rounding k and v to codes costs in float64.
struct RealCacheBar {
  const char* row;
  DType codes;
  int64_t queries;
  double o;
};
inline constexpr RealCacheBar kRealCacheBars[] = {{"i8", DType::i8, 0, .0093},
                                                  {"i8_of_16", DType::i8, 16, .0089},
                                                  {"e4m3", DType::e4m3, 0, .0388},
                                                  {"e4m3_of_16", DType::e4m3, 16, .0487}};
void PrintTo(const RealCacheBar&, std::ostream*);
// `explained`: gets what octet_explain says of the last call.
void expect_real_cache_bar(const Tested&, const RealCacheBar&, Precision, std::string* explained = nullptr);

// Gradients for which no bar is set are within a tenth of what the same rounding points cost in float64.
void expect_real_gradients_to_err_as_rounding_costs(const Tested&, Precision);

// The bar of bf16 has power: without a bias correction the gradient of q misses it.
void expect_that_without_bias_correction_real_dq_misses(const Tested&);

}  // namespace octet::test
