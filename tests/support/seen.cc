#include "support/seen.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace octet::test {
namespace {

struct At {
  int64_t sequence, token, tokens;  // token: within the sequence
};

At place_of(const std::vector<int32_t>& cu_seqlens, int64_t token, int64_t tokens) {
  if (cu_seqlens.empty()) return {0, token, tokens};
  int64_t s = 0;
  while (token >= cu_seqlens[static_cast<size_t>(s) + 1]) ++s;
  const int64_t first = cu_seqlens[static_cast<size_t>(s)];
  return {s, token - first, cu_seqlens[static_cast<size_t>(s) + 1] - first};
}

}  // namespace

bool sees(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  const At q = place_of(c.cu_seqlens_q, i, c.tokens_q), k = place_of(c.cu_seqlens_k, j, c.tokens_k);
  if (q.sequence != k.sequence) return false;
  const int64_t diagonal = q.token + (c.alignment == Alignment::bottom_right ? k.tokens - q.tokens : 0);
  if (c.causal && k.token > diagonal) return false;
  if (c.window) {
    const auto [left, right] = *c.window;
    if (left >= 0 && k.token < diagonal - left) return false;
    if (right >= 0 && k.token > diagonal + right) return false;
  }
  if (!in.mask.present()) return true;
  const auto at = [&](int dimension, int64_t index) { return in.mask.shape[dimension] == 1 ? 0 : index; };
  const double x = in.mask.at(at(0, b), at(1, h), at(2, i), at(3, j));
  return in.mask_dtype == DType::boolean ? x != 0.0 : x != -std::numeric_limits<double>::infinity();
}

Relative relative(const Case& c, int64_t b, int64_t i, int64_t j) {
  const At q = place_of(c.cu_seqlens_q, i, c.tokens_q), k = place_of(c.cu_seqlens_k, j, c.tokens_k);
  return {q.token + k.tokens - q.tokens - k.token, c.cu_seqlens_q.empty() ? b : q.sequence};
}

SeenTokens seen_tokens(const Case& c, const Inputs& in) {
  SeenTokens seen{Values({c.batch, c.kv_heads, c.tokens_k, 1}), Values({c.batch, c.heads, c.tokens_q, 1})};
  for_each({c.batch, c.heads, c.tokens_q, c.tokens_k}, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (!sees(c, in, b, h, i, j)) return;
    seen.keys.at(b, h / (c.heads / c.kv_heads), j, 0) = 1.0;
    seen.queries.at(b, h, i, 0) = 1.0;
  });
  return seen;
}

std::vector<Case> partly_seen_cases() {
  constexpr auto top_left = Alignment::top_left, bottom_right = Alignment::bottom_right;
  return {
      {.name = "causal_top_left", .heads = 2, .tokens_q = 100, .tokens_k = 170, .causal = true, .alignment = top_left},
      {.name = "causal_bottom_right",
       .heads = 2,
       .tokens_q = 150,
       .tokens_k = 60,
       .causal = true,
       .alignment = bottom_right},
      {.name = "window_top_left",
       .heads = 2,
       .tokens_q = 70,
       .tokens_k = 200,
       .window = {{10, 5}},
       .alignment = top_left},
      {.name = "window_bottom_right",
       .tokens_q = 30,
       .tokens_k = 170,
       .dim = 128,
       .dim_v = 128,
       .window = {{20, 0}},
       .alignment = bottom_right},
      {.name = "window_beyond_the_keys",
       .heads = 2,
       .tokens_q = 150,
       .tokens_k = 40,
       .window = {{30, 10}},
       .alignment = top_left},
      {.name = "packed",
       .heads = 2,
       .tokens_q = 130,
       .tokens_k = 210,
       .causal = true,
       .alignment = top_left,
       .cu_seqlens_q = {0, 30, 30, 50, 130},
       .cu_seqlens_k = {0, 70, 80, 80, 210}},
      {.name = "keys", .batch = 2, .heads = 2, .tokens_q = 40, .tokens_k = 150, .mask = MaskTensor::keys},
      {.name = "heads",
       .batch = 2,
       .heads = 4,
       .kv_heads = 2,
       .tokens_q = 70,
       .tokens_k = 140,
       .causal = true,
       .alignment = bottom_right,
       .mask = MaskTensor::heads},
      {.name = "blind", .batch = 2, .heads = 2, .tokens_q = 80, .tokens_k = 130, .mask = MaskTensor::blind},
      {.name = "bias_f32", .heads = 2, .kv_heads = 2, .tokens_q = 80, .tokens_k = 150, .mask = MaskTensor::bias_f32},
      {.name = "bias_bf16", .batch = 2, .heads = 2, .tokens_q = 80, .tokens_k = 150, .mask = MaskTensor::bias_bf16},
      // Rows of the mask start at multiples of 16 bytes.
      {.name = "aligned_keys", .batch = 2, .heads = 2, .tokens_q = 80, .tokens_k = 160, .mask = MaskTensor::keys},
      {.name = "aligned_bias_f32", .heads = 2, .tokens_q = 80, .tokens_k = 152, .mask = MaskTensor::bias_f32},
      {.name = "aligned_bias_bf16",
       .batch = 2,
       .heads = 2,
       .tokens_q = 80,
       .tokens_k = 152,
       .mask = MaskTensor::bias_bf16},
      {.name = "padding",
       .batch = 2,
       .heads = 2,
       .tokens_q = 520,
       .tokens_k = 60,
       .mask = MaskTensor::padding,
       .layout = Layout::bthd},
      {.name = "blocks", .batch = 2, .heads = 2, .tokens_q = 150, .tokens_k = 400, .mask = MaskTensor::blocks},
  };
}

PartlySeen partly_seen(const Case& c, uint64_t seed) {
  PartlySeen x{c, draw(c, seed)};
  // Tensors hide some keys from all queries, among others and at the end, and all keys from some queries.
  const double hides = x.in.mask_dtype == DType::boolean ? 0.0 : -std::numeric_limits<double>::infinity();
  for_each(x.in.mask.shape, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    if (c.mask == MaskTensor::blocks) {
      if (j >= c.tokens_k - 150 || i / 64 == 1) x.in.mask.at(b, h, i, j) = hides;
      return;
    }
    if (j % 5 == 2 || j >= c.tokens_k - 20 || (i % 9 == 4 && x.in.mask.shape[2] > 1)) x.in.mask.at(b, h, i, j) = hides;
  });
  return x;
}

}  // namespace octet::test
