#include "support/cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <map>
#include <random>
#include <utility>

namespace octet::test {
namespace {

int64_t sequences_of(const Case& c) { return static_cast<int64_t>(c.cu_seqlens_k.size()) - 1; }

int64_t length_of(const std::vector<int32_t>& cu, int64_t sequence) {
  const auto at = static_cast<std::size_t>(sequence);
  return cu[at + 1] - cu[at];
}

Values whole_numbers(const Shape& shape, const std::vector<int64_t>& numbers) {
  Values values(shape);
  std::copy(numbers.begin(), numbers.end(), values.data.begin());
  return values;
}

// Copies tokens of a head-major tensor.
void copy_tokens(const Values& from, int64_t from_b, int64_t from_t, Values& to, int64_t to_b, int64_t to_t,
                 int64_t count) {
  for_each({1, from.shape[1], count, from.shape[3]}, [&](int64_t, int64_t h, int64_t t, int64_t c) {
    to.at(to_b, h, to_t + t, c) = from.at(from_b, h, from_t + t, c);
  });
}

// [1, h, s n, c] as [s, h, n, c], or back.
Values regrouped(const Values& x, int64_t batch) {
  const int64_t tokens = x.shape[0] * x.shape[2];
  Values to({batch, x.shape[1], tokens / batch, x.shape[3]});
  for (int64_t token = 0; token < tokens; ++token)
    copy_tokens(x, token / x.shape[2], token % x.shape[2], to, token / to.shape[2], token % to.shape[2], 1);
  return to;
}

// A tensor as codes per token, with their scales.
struct Codes {
  Buffer codes, scale;
  octet_quantization how = OCTET_QUANTIZATION_INIT;

  Codes(const Values& x, octet_operand operand, DType dtype, Layout layout)
      : codes(dtype, x.shape, layout), scale(DType::f32, {x.shape[0], x.shape[1], x.shape[2], 1}, layout) {
    const Buffer from(x, DType::f32);
    const Tensor source = from.view();
    Tensor of_scale = scale.view(), to = codes.view();
    how.operand = operand, how.scale = &of_scale, to.quantization = &how;
    check(octet_quantize(&source, nullptr, &to, nullptr, nullptr));
    how.scale = nullptr;
  }
};

}  // namespace

Inputs as_cached(const Inputs& in, const CacheLayout& how) {
  Inputs numbers = in;
  if (how.codes == DType::none) return numbers;
  const auto decode = [&](Values& x, octet_operand operand) {
    if (x.data.empty()) return;
    Codes of(x, operand, how.codes, Layout::bhtd);
    const Buffer to(DType::f32, x.shape);
    Tensor scale = of.scale.view(), codes = of.codes.view(), target = to.view();
    of.how.scale = &scale, codes.quantization = &of.how;
    check(octet_dequantize(&codes, &target, nullptr));
    x = to.values();
  };
  decode(numbers.k, OCTET_OPERAND_K), decode(numbers.v, OCTET_OPERAND_V);
  return numbers;
}

Cache::Cache(const Case& c, const Inputs& in, const CacheLayout& how, uint64_t seed) {
  const int64_t sequences = sequences_of(c);
  std::vector<int64_t> lengths;
  for (int64_t s = 0; s < sequences; ++s) lengths.push_back(length_of(c.cu_seqlens_k, s));
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  seqused_k = Buffer(whole_numbers({1, 1, 1, sequences}, lengths), DType::i32);
  constexpr double kPoison = std::numeric_limits<double>::quiet_NaN();
  const auto fill = [&](const Values& k_pages, const Values& v_pages) {
    k = Buffer(k_pages, c.dtype, how.kv), v = Buffer(v_pages, c.dtype, how.kv);
    if (how.codes == DType::none) return;
    const Codes k_codes(k_pages, OCTET_OPERAND_K, how.codes, how.kv),
        v_codes(v_pages, OCTET_OPERAND_V, how.codes, how.kv);
    k = k_codes.codes, k_scale = k_codes.scale, v = v_codes.codes, v_scale = v_codes.scale;
  };
  if (!how.page_size) {
    Values all_k({sequences, c.kv_heads, longest + 5, c.dim}, kPoison),
        all_v({sequences, c.kv_heads, longest + 5, c.dim_v}, kPoison);
    for (int64_t s = 0; s < sequences; ++s)
      for (const auto& [from, to] : {std::pair{&in.k, &all_k}, {&in.v, &all_v}})
        copy_tokens(*from, 0, c.cu_seqlens_k[static_cast<std::size_t>(s)], *to, s, 0, lengths[s]);
    fill(all_k, all_v);
    return;
  }

  const int64_t size = how.page_size, columns = std::max<int64_t>((longest + size - 1) / size + how.spare_columns, 1);
  std::vector<std::pair<Values, Values>> contents;
  std::map<std::vector<double>, int64_t> known;
  std::vector<int64_t> table(static_cast<std::size_t>(sequences * columns));
  std::mt19937_64 random(seed);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = random() % 2 ? -7 : 1 << 30;
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t first = 0; first < lengths[s]; first += size) {
      const int64_t token = c.cu_seqlens_k[static_cast<std::size_t>(s)] + first,
                    count = std::min(size, lengths[s] - first);
      Values page_k({1, c.kv_heads, size, c.dim}, kPoison), page_v({1, c.kv_heads, size, c.dim_v}, kPoison);
      copy_tokens(in.k, 0, token, page_k, 0, 0, count), copy_tokens(in.v, 0, token, page_v, 0, 0, count);
      std::vector<double> content = page_k.data;
      content.insert(content.end(), page_v.data.begin(), page_v.data.end());
      const auto next = static_cast<int64_t>(contents.size());
      // Numbers that are not equal to themselves are in no page that another sequence could share.
      const int64_t page = count == size ? known.try_emplace(std::move(content), next).first->second : next;
      if (page == next) contents.emplace_back(page_k, page_v);
      table[static_cast<std::size_t>(s * columns + first / size)] = page;
    }
  pages = static_cast<int64_t>(contents.size());
  constexpr int64_t kUnused = 3;
  std::vector<int64_t> place(contents.size() + kUnused);
  for (std::size_t i = 0; i < place.size(); ++i) place[i] = static_cast<int64_t>(i);
  std::shuffle(place.begin(), place.end(), random);
  const auto count = static_cast<int64_t>(place.size());
  Values all_k({count, c.kv_heads, size, c.dim}, kPoison), all_v({count, c.kv_heads, size, c.dim_v}, kPoison);
  for (std::size_t i = 0; i < contents.size(); ++i)
    copy_tokens(contents[i].first, 0, 0, all_k, place[i], 0, size),
        copy_tokens(contents[i].second, 0, 0, all_v, place[i], 0, size);
  for (int64_t& entry : table)
    if (entry >= 0 && entry < pages) entry = place[static_cast<std::size_t>(entry)];
  block_table = Buffer(whole_numbers({sequences, 1, 1, columns}, table), DType::i32);
  fill(all_k, all_v);
}

Outputs run_cached(const Case& c, const Inputs& in, const Attention& attention, const CacheLayout& how, uint64_t seed,
                   Place* place, std::string* explained) {
  const int64_t sequences = sequences_of(c);
  const auto as_called = [&](const Shape& s) {
    return how.packed_q ? s : Shape{sequences, s[1], s[2] / sequences, s[3]};
  };
  const Cache cache(c, in, how, seed);
  const bool f64 = attention.precision == Precision::f64;
  const DType of_lse = f64 ? DType::f64 : DType::f32;
  const Buffer q(how.packed_q ? in.q : regrouped(in.q, sequences), c.dtype, c.layout);
  const Buffer o(f64 ? DType::f64 : c.out_dtype, as_called(c.o_shape()), c.layout),
      lse(of_lse, as_called(c.lse_shape()));
  Buffer sinks, slopes, cu_q;
  if (in.sinks.present()) sinks = Buffer(in.sinks, of_lse);
  if (in.alibi_slopes.present()) slopes = Buffer(in.alibi_slopes, of_lse);
  if (how.packed_q)
    cu_q = Buffer(whole_numbers({1, 1, 1, sequences + 1}, {c.cu_seqlens_q.begin(), c.cu_seqlens_q.end()}), DType::i32);
  const auto at = [&](const Buffer& b) { return place && b.present() ? place->tensor(b) : b.view(); };
  Forward call{.q = at(q), .k = at(cache.k), .v = at(cache.v), .o = at(o), .lse = at(lse)};
  octet_quantization of_k = OCTET_QUANTIZATION_INIT, of_v = OCTET_QUANTIZATION_INIT;
  Tensor k_scale = at(cache.k_scale), v_scale = at(cache.v_scale);
  of_k.operand = OCTET_OPERAND_K, of_k.scale = &k_scale, of_v.operand = OCTET_OPERAND_V, of_v.scale = &v_scale;
  if (how.codes != DType::none) call.k.quantization = &of_k, call.v.quantization = &of_v;
  call.extras = {.sinks = at(sinks),
                 .alibi_slopes = at(slopes),
                 .cu_seqlens_q = at(cu_q),
                 .max_seqlen_k = how.max_seqlen_k,
                 .seqused_k = at(cache.seqused_k),
                 .block_table = at(cache.block_table)};
  if (explained) *explained = explain(attention, call);
  const std::vector<unsigned char> before_k = cache.k.bytes(), before_v = cache.v.bytes();
  if (place) {
    const std::size_t bytes = workspace_size(attention, call);
    octet::run(attention, call, place->workspace(bytes), bytes, place->stream());
    EXPECT_FALSE(place->finish()) << "wrote beyond its workspace of " << bytes << " bytes";
  } else {
    octet::run(attention, call);
  }
  EXPECT_TRUE(cache.k.bytes() == before_k && cache.v.bytes() == before_v) << "the cache was modified";
  EXPECT_EQ(o.damage() + lse.damage(), "");
  Outputs out;
  out.o = o.values(), out.lse = lse.values();
  if (!how.packed_q) out.o = regrouped(out.o, 1), out.lse = regrouped(out.lse, 1);
  return out;
}

RandomCache random_cache(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto among = [&]<class T>(std::initializer_list<T> list) { return *(list.begin() + random() % list.size()); };
  const auto upto = [&](int64_t most) { return static_cast<int64_t>(random() % static_cast<uint64_t>(most + 1)); };
  RandomCache x;
  Case& c = x.c;
  c.name = "cache", c.kv_heads = 1 + upto(2), c.heads = c.kv_heads * among(std::initializer_list<int64_t>{1, 2, 4});
  c.dim = among(std::initializer_list<int64_t>{8, 64, 104, 128, 200}),
  c.dim_v = random() % 3 ? c.dim : among(std::initializer_list<int64_t>{16, 64, 128});
  c.dtype = among({DType::f32, DType::f16, DType::bf16});
  if (random() % 2) c.out_dtype = c.dtype;
  const Precision own = c.dtype == DType::f16    ? Precision::f16
                        : c.dtype == DType::bf16 ? Precision::bf16
                                                 : Precision::f32;
  const Precision precision = random() % 3 ? own : Precision::f32;
  c.layout = among({Layout::bhtd, Layout::bthd, Layout::padded});
  x.how.packed_q = random() % 2, x.how.kv = among({Layout::bhtd, Layout::bthd, Layout::spaced});
  x.how.page_size = among(std::initializer_list<int64_t>{0, 16, 16, 32, 64, 256});
  if (!x.how.page_size) x.how.packed_q = false;
  const int64_t sequences = 1 + upto(4), most = among(std::initializer_list<int64_t>{1, 1, 5, 40, 130}),
                same = 1 + upto(most - 1);
  c.cu_seqlens_q = c.cu_seqlens_k = {0};
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t n = x.how.packed_q ? upto(most) : same,
                  m = random() % 5 ? upto(among(std::initializer_list<int64_t>{20, 300})) : 0;
    c.cu_seqlens_q.push_back(c.cu_seqlens_q.back() + static_cast<int32_t>(n));
    c.cu_seqlens_k.push_back(c.cu_seqlens_k.back() + static_cast<int32_t>(m));
    longest = std::max(longest, m);
  }
  c.tokens_q = c.cu_seqlens_q.back(), c.tokens_k = c.cu_seqlens_k.back();
  if (random() % 2) x.how.max_seqlen_k = std::max<int64_t>(longest, 1) + upto(20);
  if (random() % 2) c.causal = true;
  if (random() % 3 == 0) c.window = {{upto(60), c.causal ? 0 : upto(30)}};
  if (c.causal || c.window) c.alignment = random() % 4 ? Alignment::bottom_right : Alignment::top_left;
  if (random() % 4 == 0) c.softcap = 5;
  if (random() % 4 == 0) c.alibi = random() % 2 ? Alibi::shared : Alibi::each;
  if (random() % 3 == 0) c.sinks = Sinks::shared;
  const bool codes = random() % 4 == 0;
  if (codes) x.how.codes = among({DType::i8, DType::e4m3});
  x.in = draw(c, seed), x.numbers = as_cached(x.in, x.how);
  x.attention = attention_of(c, codes ? Precision::f32 : precision, nullptr);
  // P is bf16 then anyway, which row_bars takes from the bias correction.
  if (!codes && precision == Precision::bf16 && c.out_dtype == DType::bf16)
    x.attention.bias_correction = BiasCorrection::none;
  return x;
}

}  // namespace octet::test
