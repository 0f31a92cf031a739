// The words of the command line for the enums of the C ABI, in both directions.
#pragma once
#include <octet/octet.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "array.h"
#include "error.h"

namespace octet::cli {

enum class Pass { forward, backward, jvp };

inline constexpr Name<DType> kDTypes[] = {{"f64", DType::f64},   {"f32", DType::f32},     {"f16", DType::f16},
                                          {"bf16", DType::bf16}, {"e4m3", DType::e4m3},   {"e5m2", DType::e5m2},
                                          {"int8", DType::i8},   {"uint8", DType::u8},    {"int4", DType::i4},
                                          {"int32", DType::i32}, {"bool", DType::boolean}};
inline constexpr Name<Pass> kPasses[] = {{"fwd", Pass::forward}, {"bwd", Pass::backward}, {"jvp", Pass::jvp}};
inline constexpr Name<BiasCorrection> kBiasCorrections[] = {{"f16", BiasCorrection::f16},
                                                            {"none", BiasCorrection::none},
                                                            {"beta", BiasCorrection::beta},
                                                            {"exact_delta", BiasCorrection::exact_delta},
                                                            {"gproj", BiasCorrection::gproj}};
inline constexpr Name<Layout> kLayouts[] = {{"bhsd", Layout::bhsd}, {"bshd", Layout::bshd}};
inline constexpr Name<Device> kDevices[] = {{"cpu", Device::cpu}, {"cuda", Device::cuda}};
inline constexpr Name<Alignment> kAlignments[] = {{"top-left", Alignment::top_left},
                                                  {"bottom-right", Alignment::bottom_right}};
inline constexpr Name<Switch> kSwitches[] = {{"on", Switch::on}, {"off", Switch::off}};
inline constexpr Name<octet_operand> kOperands[] = {
    {"q", OCTET_OPERAND_Q}, {"k", OCTET_OPERAND_K}, {"v", OCTET_OPERAND_V}};
inline constexpr Name<octet_granularity> kGranularities[] = {{"tensor", OCTET_PER_TENSOR},
                                                             {"token", OCTET_PER_TOKEN},
                                                             {"channel", OCTET_PER_CHANNEL},
                                                             {"block", OCTET_PER_BLOCK},
                                                             {"thread", OCTET_PER_THREAD}};
inline constexpr Name<octet_zero_point> kZeroPoints[] = {{"integer", OCTET_ZERO_POINT_INTEGER},
                                                         {"float", OCTET_ZERO_POINT_FLOAT}};
inline constexpr Name<octet_rope_style> kRopeStyles[] = {{"half", OCTET_ROPE_HALF},
                                                         {"interleaved", OCTET_ROPE_INTERLEAVED}};
inline constexpr Name<octet_norm> kNorms[] = {{"rms", OCTET_NORM_RMS}};

// "f64, f32, f16"
template <class Names>
std::string choices(const Names& names) {
  std::string out;
  for (const auto& name : names) out += (out.empty() ? "" : ", ") + std::string(name.text);
  return out;
}

// The value called `text`; `option` names the culprit in the message.
template <class Value, std::size_t N>
Value parse(const Name<Value> (&names)[N], std::string_view option, std::string_view text) {
  for (const auto& name : names)
    if (text == name.text) return name.value;
  reject("{}: found \"{}\", allowed: {}", option, text, choices(names));
}

template <class Value, std::size_t N>
const char* name_of(const Name<Value> (&names)[N], Value value) {
  for (const auto& name : names)
    if (value == name.value) return name.text;
  return "unknown";
}

// "bhsd: [batch, head, token, dim]"
inline std::string layout_text(Layout v) {
  return v == Layout::bhsd ? "bhsd: [batch, head, token, dim]" : "bshd: [batch, token, head, dim]";
}

inline const char* name(DType v) { return name_of(kDTypes, v); }
inline const char* name(Precision v) { return name_of(kPrecisions, v); }
inline const char* name(Pass v) { return name_of(kPasses, v); }

// A type of tensors for `precision`: f64 belongs to precision f64, and `e4m3` says whether e4m3 is a choice.
DType parse_tensor_type(std::string_view option, std::string_view text, Precision precision, bool e4m3);

// The parts of "a,b,c"; empty parts are kept, so that the parser of each can reject them.
std::vector<std::string> split(std::string_view text, char separator);

// A whole number or a decimal number and nothing else, or a rejection that names the option.
int64_t parse_integer(std::string_view option, std::string_view text);
double parse_number(std::string_view option, std::string_view text);

// A number for the library, which holds it as float32: rejects those that would become 0 or infinite.
float parse_float(std::string_view option, std::string_view text);

}  // namespace octet::cli
