// k and v of the backward pass: the kernel itself converts rows of 16 bits, and takes others as tiles that a pass
// before it writes. Both are the same numbers times powers of two, so gradients err alike, but for what of ds lies
// below the normal numbers of f16: little of an error, for which these tests allow a tenth. Of more heads than are
// worked on at once, the kernel also clears what dq is summed in, but where it takes tiles up to head dim 128.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <vector>

#include "gpu/gpu_tensor.h"
#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

// More heads, of one block of keys each, than the GPU works on at once.
Case many_heads(int64_t dim) {
  return {.name = dim > 128 ? "many_heads_of_256" : "many_heads",
          .batch = 3,
          .heads = 128,
          .kv_heads = 64,
          .tokens_q = 70,
          .tokens_k = 100,
          .dim = dim,
          .dim_v = dim};
}

// Causal, with heads for three sections of the schedule, and more than it has zeros for at the start.
Case many_sections(int64_t dim) {
  const int64_t heads = dim > 128 ? 60 : 120;
  return {.name = dim > 128 ? "many_sections_of_256" : "many_sections",
          .heads = heads,
          .kv_heads = heads,
          .tokens_q = 500,
          .tokens_k = 500,
          .dim = dim,
          .dim_v = dim,
          .causal = true};
}

// More blocks than the GPU runs at once, of one step each: sequences of 0 to 6 tokens.
Case many_sequences(int64_t dim, bool causal) {
  constexpr int kSequences = 300;
  std::vector<int32_t> tokens(kSequences + 1), first(kSequences + 1);
  for (int i = 0; i < kSequences; ++i) tokens[static_cast<size_t>(i) + 1] = i % 7;
  std::partial_sum(tokens.begin(), tokens.end(), first.begin());
  return {.name = causal ? "many_sequences_causal" : "many_sequences",
          .heads = 6,
          .kv_heads = 3,
          .tokens_q = first.back(),
          .tokens_k = first.back(),
          .dim = dim,
          .dim_v = dim,
          .causal = causal,
          .alignment = causal ? Alignment::top_left : Alignment::unspecified,
          .cu_seqlens_q = first,
          .cu_seqlens_k = first};
}

std::vector<Case> key_cases() {
  const Case ragged{.name = "ragged",
                    .batch = 2,
                    .heads = 4,
                    .kv_heads = 2,
                    .tokens_q = 150,
                    .tokens_k = 333,
                    .dim = 40,
                    .dim_v = 64,
                    .window = {{70, 20}},
                    .alignment = Alignment::bottom_right};
  Case wide = ragged;
  wide.name = "ragged_wide", wide.dim = 72, wide.dim_v = 120;
  return {many_sequences(64, false),
          many_sequences(128, true),
          ragged,
          wide,
          {.name = "many_blocks",
           .heads = 12,
           .kv_heads = 12,
           .tokens_q = 130,
           .tokens_k = 2100,
           .dim = 128,
           .dim_v = 128,
           .causal = true,
           .alignment = Alignment::bottom_right},
          many_heads(128),
          many_heads(256),
          many_sections(72),
          many_sections(160),
          {.name = "many_heads_causal",
           .heads = 96,
           .kv_heads = 96,
           .tokens_q = 1000,
           .tokens_k = 200,
           .dim = 72,
           .dim_v = 72,
           .causal = true,
           .alignment = Alignment::bottom_right},
          {.name = "no_queries", .tokens_q = 0, .tokens_k = 70},
          {.name = "no_keys", .tokens_q = 70, .tokens_k = 0},
          {.name = "packed_no_keys", .tokens_q = 70, .tokens_k = 0, .cu_seqlens_q = {0, 70}, .cu_seqlens_k = {0, 0}}};
}

class GpuKeys : public testing::TestWithParam<std::tuple<size_t, DType>> {};

TEST_P(GpuKeys, of_16_bits_give_what_prepared_tiles_give) {
  const auto [index, type] = GetParam();
  const Precision precision = type == DType::f16 ? Precision::f16 : Precision::bf16;
  Case rows = key_cases()[index];
  rows.dtype = type;
  Case tiles = rows;
  tiles.dtype = DType::f32;
  const Inputs in = draw(rows, 11);
  const Outputs want = exact(rows, in, Pass::backward);
  const Outputs saved = run(rows, in, attention_of(rows, precision, "reference"), Pass::forward);
  const Attention gpu = attention_of(rows, precision, gpu_backend());
  GpuPlace place;
  const Outputs prepared = run(tiles, in, gpu, Pass::backward, &saved, &place);
  for (int i = 0; i < 3; ++i) {  // as which blocks run together differs
    GpuPlace again;
    const Outputs got = run(rows, in, gpu, Pass::backward, &saved, &again);
    for (const auto& [name, g, p, w] : {std::tuple{"dq", &got.dq, &prepared.dq, &want.dq},
                                        {"dk", &got.dk, &prepared.dk, &want.dk},
                                        {"dv", &got.dv, &prepared.dv, &want.dv}}) {
      if (w->data.empty()) continue;
      EXPECT_LE(difference(*g, *w).rms, 1.1 * difference(*p, *w).rms) << name << ": " << text(difference(*g, *w));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuKeys,
                         testing::Combine(testing::Range<size_t>(0, key_cases().size()),
                                          testing::Values(DType::bf16, DType::f16)),
                         [](const auto& info) {
                           return std::string(key_cases()[std::get<0>(info.param)].name) +
                                  (std::get<1>(info.param) == DType::f16 ? "_f16" : "_bf16");
                         });

struct Kind {
  const char* name;
  BiasCorrection bias_correction;
  bool deterministic;
};
constexpr Kind kKinds[] = {{"f16", BiasCorrection::f16, false},
                           {"none", BiasCorrection::none, false},
                           {"deterministic", BiasCorrection::f16, true}};

// Most blocks of keys have no query, so they follow each other as fast as their zeros can be stored, and loads from
// shared memory wait behind the stores. Which thread block takes which differs from run to run.
class GpuKeysWithoutQueries : public testing::TestWithParam<std::tuple<int, Kind>> {};

TEST_P(GpuKeysWithoutQueries, have_gradients_of_zero_each_time) {
  const auto [dim, kind] = GetParam();
  struct Shapes {
    int64_t heads, queries, keys, seen;
    Alignment alignment;  // top_left: the first `seen` keys are seen, bottom_right: the last
    int runs;
  };
  for (const auto& [heads, queries, keys, seen, alignment, runs] :
       {Shapes{2, 16, 30000, 10000, Alignment::bottom_right, 20},
        {2, 16, 30000, 10000, Alignment::top_left, 20},
        {12, 16, 4000, 500, Alignment::bottom_right, 20},
        {12, 777, 4000, 785, Alignment::top_left, 100}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads of " << queries << " x " << keys << " keys, seen: the "
                                    << (alignment == Alignment::top_left ? "first " : "last ") << seen);
    constexpr int kSmall = 0x3c, kNaN = 0xff;  // 0.0115 and NaN in bf16
    const Shape of_queries{1, heads, queries, dim}, of_keys{1, heads, keys, dim};
    GpuTensor q(DType::bf16, of_queries, kSmall), k(DType::bf16, of_keys, kSmall), v(DType::bf16, of_keys, kSmall),
        do_(DType::bf16, of_queries, kSmall), o(DType::bf16, of_queries, kNaN), o_residual(DType::i8, of_queries, kNaN),
        lse(DType::f32, {1, heads, queries, 1}, kNaN), dq(DType::bf16, of_queries, kNaN),
        dk(DType::bf16, of_keys, kNaN), dv(DType::bf16, of_keys, kNaN);
    const int64_t reach = seen - queries;
    Attention attention{.precision = Precision::bf16,
                        .alignment = alignment,
                        .bias_correction = kind.bias_correction,
                        .deterministic = kind.deterministic,
                        .backend = gpu_backend()};
    attention.window =
        alignment == Alignment::top_left ? std::array<int64_t, 2>{-1, reach} : std::array{reach, int64_t{-1}};
    GpuPlace place;
    call(attention,
         Forward{.q = q.view(),
                 .k = k.view(),
                 .v = v.view(),
                 .o = o.view(),
                 .lse = lse.view(),
                 .o_residual = o_residual.view()},
         place);
    const Backward backward{.q = q.view(),
                            .k = k.view(),
                            .v = v.view(),
                            .o = o.view(),
                            .lse = lse.view(),
                            .do_ = do_.view(),
                            .dq = dq.view(),
                            .dk = dk.view(),
                            .dv = dv.view(),
                            .o_residual = o_residual.view()};
    const size_t bytes = workspace_size(attention, backward);
    void* const workspace = place.workspace(bytes);
    std::vector<uint16_t> first_dk, first_dv;
    for (int run = 0; run < runs; ++run) {
      for (GpuTensor* x : {&dq, &dk, &dv}) x->fill(kNaN);
      octet::run(attention, backward, workspace, bytes, place.stream());
      check_cuda(cudaDeviceSynchronize());
      const std::vector<uint16_t> got_dk = dk.words<uint16_t>(), got_dv = dv.words<uint16_t>();
      if (run > 0) {
        ASSERT_TRUE(got_dk == first_dk) << "dk differs in run " << run;
        ASSERT_TRUE(got_dv == first_dv) << "dv differs in run " << run;
        continue;
      }
      first_dk = got_dk, first_dv = got_dv;
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t key = 0; key < keys; ++key) {
          const bool is_seen = alignment == Alignment::top_left ? key < seen : key >= keys - seen;
          const auto at = static_cast<std::ptrdiff_t>((head * keys + key) * dim);
          // dv of a key is the sum of its p times do, and positive.
          const auto right_dv = [&](uint16_t x) { return is_seen ? x > 0 && x < 0x7f80 : x == 0; };
          ASSERT_TRUE(std::all_of(got_dv.begin() + at, got_dv.begin() + at + dim, right_dv))
              << "dv of head " << head << ", key " << key;
          const auto is_zero = [](uint16_t x) { return x == 0; };
          ASSERT_TRUE(is_seen || std::all_of(got_dk.begin() + at, got_dk.begin() + at + dim, is_zero))
              << "dk of head " << head << ", key " << key;
        }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, GpuKeysWithoutQueries,
                         testing::Combine(testing::Values(64, 80, 128, 192, 256), testing::ValuesIn(kKinds)),
                         [](const auto& info) {
                           return "d" + std::to_string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace octet::test
