#include "support/appending.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace octet::test {
namespace {

constexpr int64_t kCapacity = 48;

// The page of a column of a sequence: pages lie in an order of their own, the last of them in no sequence.
int64_t page_of(const Appending& x, int64_t sequence, int64_t column) {
  const int64_t columns = kCapacity / x.page_size, pages = x.sequences() * columns;
  return (7 * (sequence * columns + column) + 3) % (pages + 1);
}

Values whole_numbers(const Shape& shape, const std::vector<int64_t>& numbers) {
  Values values(shape);
  std::copy(numbers.begin(), numbers.end(), values.data.begin());
  return values;
}

}  // namespace

int64_t Appending::new_tokens(int64_t sequence) const {
  const auto s = static_cast<size_t>(sequence);
  return packed() ? cu_seqlens[s + 1] - cu_seqlens[s] : tokens;
}

Values Appending::rows_of(const Values& all, int64_t sequence) const {
  if (!packed()) return slice(all, 0, sequence, sequence + 1);
  const auto s = static_cast<size_t>(sequence);
  return slice(all, 2, cu_seqlens[s], cu_seqlens[s + 1]);
}

const std::vector<Appending>& appendings() {
  static const std::vector<Appending> list = {
      {.name = "plain"},
      {.name = "cast", .dtype = DType::f32, .cache = DType::bf16, .cache_layout = Layout::bhtd},
      {.name = "narrow",
       .dtype = DType::bf16,
       .cache = DType::f16,
       .layout = Layout::padded,
       .cache_layout = Layout::padded},
      {.name = "pages", .page_size = 16, .dtype = DType::bf16, .cache = DType::bf16},
      {.name = "half",
       .page_size = 16,
       .dtype = DType::bf16,
       .cache = DType::bf16,
       .style = OCTET_ROPE_HALF,
       .with_q = true},
      {.name = "interleaved",
       .tokens = 17,
       .page_size = 16,
       .dtype = DType::f16,
       .cache = DType::f16,
       .cache_layout = Layout::bhtd,
       .style = OCTET_ROPE_INTERLEAVED,
       .rope_dim = 24,
       .rope_offset = 1000,
       .with_q = true,
       .in_place = true},
      {.name = "tables",
       .dtype = DType::f32,
       .cache = DType::f32,
       .style = OCTET_ROPE_HALF,
       .rope_dim = 32,
       .tables = true,
       .with_q = true},
      {.name = "table_pairs",
       .page_size = 16,
       .dtype = DType::bf16,
       .cache = DType::bf16,
       .style = OCTET_ROPE_INTERLEAVED,
       .tables = true},
      {.name = "one_token",
       .lengths = {47, 0, 15, 16},
       .tokens = 1,
       .heads = 8,
       .page_size = 16,
       .dtype = DType::f16,
       .cache = DType::f16,
       .style = OCTET_ROPE_HALF,
       .with_q = true},
      {.name = "int8",
       .page_size = 16,
       .dtype = DType::bf16,
       .cache = DType::i8,
       .scales = true,
       .style = OCTET_ROPE_HALF},
      {.name = "e4m3", .dtype = DType::f32, .cache = DType::e4m3, .scales = true, .cache_layout = Layout::bhtd},
      {.name = "e4m3_as_cast", .page_size = 16, .dtype = DType::f16, .cache = DType::e4m3},
      {.name = "no_tokens", .tokens = 0},
      {.name = "wide",
       .tokens = 2,
       .dim = 256,
       .dim_v = 256,
       .page_size = 16,
       .dtype = DType::bf16,
       .cache = DType::i8,
       .scales = true,
       .style = OCTET_ROPE_HALF,
       .with_q = true},
      {.name = "packed", .lengths = {5, 0, 30, 7}, .cu_seqlens = {0, 4, 4, 5, 13}, .tokens = 13},
      {.name = "packed_pages",
       .lengths = {0, 15, 47, 3, 9},
       .cu_seqlens = {0, 0, 17, 18, 23, 23},
       .tokens = 23,
       .page_size = 16,
       .dtype = DType::bf16,
       .cache = DType::bf16,
       .style = OCTET_ROPE_HALF,
       .with_q = true,
       .in_place = true},
      {.name = "packed_codes",
       .lengths = {2, 40, 0},
       .cu_seqlens = {0, 30, 34, 34},
       .tokens = 34,
       .page_size = 16,
       .dtype = DType::f16,
       .cache = DType::i8,
       .scales = true,
       .style = OCTET_ROPE_INTERLEAVED,
       .tables = true,
       .with_q = true}};
  return list;
}

std::vector<std::vector<std::array<int64_t, 2>>> places_of(const Appending& x) {
  std::vector<std::vector<std::array<int64_t, 2>>> places;
  for (int64_t s = 0; s < x.sequences(); ++s) {
    auto& of = places.emplace_back();
    for (int64_t t = x.lengths[static_cast<size_t>(s)], last = t + x.new_tokens(s); t < last; ++t)
      of.push_back(x.page_size ? std::array{page_of(x, s, t / x.page_size), t % x.page_size} : std::array{s, t});
  }
  return places;
}

Appended::Appended(const Appending& x, Place* place) {
  const int64_t s = x.sequences(), columns = x.page_size ? kCapacity / x.page_size : 0;
  const int64_t elements = x.page_size ? s * columns + 1 : s, size = x.page_size ? x.page_size : kCapacity;
  k = Buffer(rounded(normal({x.batch(), x.kv_heads, x.tokens, x.dim}, 1), x.dtype), x.dtype, x.layout);
  v = Buffer(rounded(normal({x.batch(), x.kv_heads, x.tokens, x.dim_v}, 2), x.dtype), x.dtype, x.layout);
  k_cache = Buffer(x.cache, {elements, x.kv_heads, size, x.dim}, x.cache_layout);
  v_cache = Buffer(x.cache, {elements, x.kv_heads, size, x.dim_v}, x.cache_layout);
  seqused_k = Buffer(whole_numbers({1, 1, 1, s}, x.lengths), DType::i32);
  if (x.page_size) {
    std::vector<int64_t> table;
    for (int64_t i = 0; i < s * columns; ++i) table.push_back(page_of(x, i / columns, i % columns));
    block_table = Buffer(whole_numbers({s, 1, 1, columns}, table), DType::i32);
  }
  if (x.packed()) cu_seqlens = Buffer(whole_numbers({1, 1, 1, s + 1}, x.cu_seqlens), DType::i32);
  if (x.with_q) {
    q = Buffer(rounded(normal({x.batch(), x.heads, x.tokens, x.dim}, 3), x.dtype), x.dtype, x.layout);
    q_turned = x.in_place ? q : Buffer(x.dtype, {x.batch(), x.heads, x.tokens, x.dim}, x.layout);
  }
  octet_rope rope = OCTET_ROPE_INIT;
  rope.style = x.style, rope.dim = x.rope_dim, rope.offset = x.rope_offset;
  if (x.tables) {  // of any numbers
    const int64_t pairs = (x.rope_dim ? x.rope_dim : x.dim) / 2;
    cosine = Buffer(rounded(normal({1, 1, kCapacity, pairs}, 4), DType::f32), DType::f32);
    sine = Buffer(rounded(normal({1, 1, kCapacity, pairs}, 5), x.dtype), x.dtype);
  }
  const auto at = [&](const Buffer& b) { return place && b.present() ? place->tensor(b) : b.view(); };
  Tensor of_k = at(k), of_v = at(v), of_q = at(q), to_k = at(k_cache), to_v = at(v_cache), to_q = at(q_turned);
  Tensor lengths = at(seqused_k), boundaries = at(cu_seqlens), table = at(block_table), of_cosine = at(cosine),
         of_sine = at(sine), scale_k, scale_v;
  octet_quantization how_k = OCTET_QUANTIZATION_INIT, how_v = OCTET_QUANTIZATION_INIT;
  if (x.scales) {
    k_scale = Buffer(DType::f32, {elements, x.kv_heads, size, 1}, x.cache_layout);
    v_scale = Buffer(DType::f32, {elements, x.kv_heads, size, 1}, x.cache_layout);
    scale_k = at(k_scale), scale_v = at(v_scale);
    how_k.operand = OCTET_OPERAND_K, how_k.scale = &scale_k, to_k.quantization = &how_k;
    how_v.operand = OCTET_OPERAND_V, how_v.scale = &scale_v, to_v.quantization = &how_v;
  }
  octet_append_arguments call = OCTET_APPEND_ARGUMENTS_INIT;
  call.k = &of_k, call.v = &of_v, call.k_cache = &to_k, call.v_cache = &to_v, call.seqused_k = &lengths;
  if (x.page_size) call.block_table = &table;
  if (x.packed()) call.cu_seqlens = &boundaries;
  if (x.style) call.rope = &rope;
  if (x.tables) call.rope_cos = &of_cosine, call.rope_sin = &of_sine;
  if (x.with_q) call.q = &of_q, call.q_turned = &to_q;
  if (place) place->workspace(0);
  check(octet_append(&call, place ? place->stream() : nullptr));
  if (place) place->finish();
  for (const Buffer* b : {&k_cache, &v_cache, &k_scale, &v_scale, &q_turned}) EXPECT_EQ(b->damage(), "");
}

}  // namespace octet::test
