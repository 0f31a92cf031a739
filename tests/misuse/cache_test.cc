// KV caches: the lengths of keys and the block table, their shapes, types and values, and what they exclude.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "misuse/calls.h"

namespace octet::test {
namespace {

constexpr int64_t kPages = 6, kPageSize = 16, kColumns = 2;

void make_i32(octet_tensor& t, const int64_t (&shape)[4], const std::vector<int32_t>& values) {
  t.dtype = OCTET_I32;
  std::copy(shape, shape + 4, t.shape);
  const int64_t stride[4] = {shape[3], shape[3], shape[3], 1};
  std::copy(stride, stride + 4, t.stride);
  std::memcpy(t.data, values.data(), values.size() * sizeof(int32_t));
}

// A forward pass over a cache: of batch elements, or in pages.
struct CacheCall : Call {
  octet_tensor seqused_k, block_table;

  explicit CacheCall(bool in_pages, octet_pass pass = OCTET_FORWARD) : Call(pass) {
    seqused_k = sinks, block_table = alibi_slopes;  // their memory
    make_i32(seqused_k, {1, 1, 1, kBatch}, {7, 3});
    arguments.seqused_k = &seqused_k;
    if (!in_pages) return;
    for (octet_tensor* t : {&k, &v}) {
      const int64_t dim = t->shape[3], shape[4] = {kPages, kKvHeads, kPageSize, dim};
      const int64_t stride[4] = {kKvHeads * kPageSize * dim, kPageSize * dim, dim, 1};
      std::copy(shape, shape + 4, t->shape), std::copy(stride, stride + 4, t->stride);
    }
    make_i32(seqused_k, {1, 1, 1, kBatch}, {32, 16});
    make_i32(block_table, {kBatch, 1, 1, kColumns}, {5, 0, 3, -1});
    arguments.block_table = &block_table;
  }
  int32_t* lengths() { return static_cast<int32_t*>(seqused_k.data); }
  int32_t* table() { return static_cast<int32_t*>(block_table.data); }
};

// Lengths and entries are read when a pass runs; nothing has been written where they are wrong.
void expect_wrong_values(CacheCall& call, const std::string& message) {
  EXPECT_EQ(call.run(), OCTET_INVALID_ARGUMENT) << octet_message();
  EXPECT_THAT(octet_message(), testing::StartsWith(message));
  EXPECT_TRUE(call.outputs.untouched()) << "an output was written";
}

TEST(Cache, is_taken_by_the_forward_pass) {
  for (const bool in_pages : {false, true}) {
    CacheCall call(in_pages);
    expect_accepted(call);
    call.attention.backend = "reference";
    expect_accepted(call);
  }
  CacheCall packed(true);
  packed.pack({0, 2, 5}, {0, 1});
  packed.k.shape[0] = packed.v.shape[0] = kPages, packed.arguments.cu_seqlens_k = nullptr;
  expect_accepted(packed);
}

TEST(Cache, has_no_use_in_other_passes) {
  for (const octet_pass pass : {OCTET_BACKWARD, OCTET_JVP}) {
    CacheCall call(false, pass);
    expect_invalid(call, "seqused_k: given to a ");
    call.arguments.seqused_k = nullptr, call.arguments.block_table = &call.block_table;
    expect_invalid(call, "block_table: given to a ");
  }
}

TEST(Cache, lengths_are_within_k) {
  CacheCall negative(false), beyond(false), pages(true);
  negative.lengths()[1] = -1, beyond.lengths()[0] = 8, pages.lengths()[1] = 33;
  expect_wrong_values(negative, "seqused_k: -1 keys of sequence 1, allowed: 0 to 7, the tokens of k");
  expect_wrong_values(beyond, "seqused_k: 8 keys of sequence 0, allowed: 0 to 7, the tokens of k");
  expect_wrong_values(pages, "seqused_k: 33 keys of sequence 1, allowed: 0 to 32, the tokens of its pages");
  CacheCall bound(false);
  bound.arguments.max_seqlen_k = 6;
  expect_wrong_values(bound, "max_seqlen_k: 6, but sequence 0 has 7 keys");
}

TEST(Cache, entries_that_are_read_name_pages) {
  for (const int32_t wrong : {-1, 6, 1 << 30}) {
    CacheCall call(true);
    call.table()[1] = wrong;
    expect_wrong_values(call, "block_table: page " + std::to_string(wrong) +
                                  " in column 1 of sequence 0, allowed: 0 to 5, as k has 6 pages");
    call.lengths()[0] = 16;  // column 1 is not read
    expect_accepted(call);
  }
  CacheCall first(true);
  first.table()[2] = 6;
  expect_wrong_values(first, "block_table: page 6 in column 0 of sequence 1");
}

TEST(Cache, lengths_and_table_have_one_shape) {
  for (const int dimension : {0, 1, 2, 3}) {
    CacheCall lengths(false), table(true);
    lengths.seqused_k.shape[dimension] = 3;
    expect_invalid(lengths, "seqused_k: shape [", {"expected [1, 1, 1, 2] (the batch of q)"});
    if (dimension == 3) continue;
    table.block_table.shape[dimension] = 3;
    expect_invalid(table, "block_table: shape [", {"expected [2, 1, 1, 2] (the batch of q)"});
  }
  CacheCall apart(false), floats(false), transposed(true);
  apart.seqused_k.stride[3] = 2, floats.seqused_k.dtype = OCTET_F32, transposed.block_table.stride[3] = 2;
  expect_invalid(apart, "seqused_k: last stride 2, allowed: 1");
  expect_invalid(floats, "seqused_k: dtype f32, allowed: i32");
  expect_invalid(transposed, "block_table: last stride 2, allowed: 1");
  CacheCall alone(true);
  alone.arguments.seqused_k = nullptr;
  expect_invalid(alone, "block_table: given without seqused_k, the keys of each sequence");
}

TEST(Cache, pages_have_sizes_that_are_powers_of_two) {
  for (const int64_t size : {0, 1, 8, 24}) {
    CacheCall call(true);
    call.k.shape[2] = call.v.shape[2] = size;
    expect_invalid(call, "k: pages of " + std::to_string(size) + " tokens, allowed: a power of two from 16 on");
  }
  CacheCall one(true);
  one.k.shape[2] = one.v.shape[2] = 11, one.block_table.shape[3] = 1;
  one.lengths()[0] = one.lengths()[1] = 11;
  expect_accepted(one);
  CacheCall long_sequences(true);
  long_sequences.block_table.shape[3] = int64_t{1} << 31, long_sequences.block_table.stride[0] = 0;
  expect_invalid(long_sequences,
                 "block_table: 2147483648 pages of 16 tokens for each sequence, allowed: up to 2147483647");
}

TEST(Cache, excludes_what_belongs_to_training_and_mask_tensors) {
  CacheCall mask(false), dropout(false), residual(false);
  mask.arguments.mask = &mask.mask;
  expect_invalid(mask, "mask: cannot be combined with seqused_k; pass NULL");
  dropout.attention.dropout_p = .5, dropout.arguments.dropout_seed = &dropout.dropout_seed;
  expect_invalid(dropout, "dropout_seed: cannot be combined with seqused_k; pass NULL");
  residual.arguments.o_residual = &residual.o_residual;
  residual.o.dtype = residual.o_residual.dtype = OCTET_BF16;
  expect_invalid(residual, "o_residual: cannot be combined with seqused_k; pass NULL");
}

TEST(Cache, packed_queries_have_pages_and_no_offsets_of_keys) {
  CacheCall both(true), without_pages(false);
  both.pack({0, 2, 5}, {0, 2, 7});
  both.k.shape[0] = both.v.shape[0] = kPages;
  expect_invalid(both, "cu_seqlens_k: given with block_table, whose lengths are seqused_k; pass NULL");
  without_pages.pack({0, 2, 5}, {0, 2, 7});
  without_pages.arguments.cu_seqlens_k = nullptr;
  expect_invalid(without_pages, "cu_seqlens: only one of cu_seqlens_q and cu_seqlens_k given");
}

TEST(Cache, a_diagonal_needs_an_alignment) {
  CacheCall call(false);
  call.q.shape[2] = call.o.shape[2] = call.lse.shape[2] = call.k.shape[2] = call.v.shape[2] = 5;
  call.lengths()[0] = 5, call.attention.mask = OCTET_MASK_CAUSAL;
  expect_invalid(call, "alignment: unspecified, but seqused_k has the lengths of k");
}

}  // namespace
}  // namespace octet::test
