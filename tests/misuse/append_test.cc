// octet_append: what it rejects, and that nothing was written.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "misuse/calls.h"

namespace octet::test {
namespace {

constexpr int64_t kSequences = 2, kNew = 2, kPageTokens = 16, kPageCount = 5, kTableColumns = 2, kPairs = 4;

// A complete, valid call with pages and tables of angles, in memory of its own.
struct AppendCall {
  Memory inputs{12 * kSlot}, caches{3 * kSlot};
  octet_append_arguments arguments = OCTET_APPEND_ARGUMENTS_INIT;
  octet_rope rope = OCTET_ROPE_INIT;
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  octet_tensor k, v, q, k_cache, v_cache, q_turned, lengths, table, cosine, sine;

  AppendCall() {
    std::memset(inputs.data(), 0, inputs.size());
    k = tensor(inputs, 0, {kSequences, kKvHeads, kNew, kDim}),
    v = tensor(inputs, 1, {kSequences, kKvHeads, kNew, kDimV});
    q = tensor(inputs, 2, {kSequences, kHeads, kNew, kDim});
    k_cache = tensor(caches, 0, {kPageCount, kKvHeads, kPageTokens, kDim});
    v_cache = tensor(caches, 1, {kPageCount, kKvHeads, kPageTokens, kDimV});
    q_turned = tensor(caches, 2, {kSequences, kHeads, kNew, kDim});
    lengths = tensor(inputs, 3, {1, 1, 1, kSequences}), table = tensor(inputs, 4, {kSequences, 1, 1, kTableColumns});
    cosine = tensor(inputs, 5, {1, 1, 40, kPairs}), sine = tensor(inputs, 6, {1, 1, 40, kPairs});
    lengths.dtype = table.dtype = OCTET_I32;
    length()[0] = 15, length()[1] = 0;
    for (int i = 0; i < 4; ++i) entry()[i] = i;
    rope.style = OCTET_ROPE_HALF;
    arguments.k = &k, arguments.v = &v, arguments.k_cache = &k_cache, arguments.v_cache = &v_cache;
    arguments.seqused_k = &lengths, arguments.block_table = &table, arguments.rope = &rope;
    arguments.rope_cos = &cosine, arguments.rope_sin = &sine, arguments.q = &q, arguments.q_turned = &q_turned;
  }
  int32_t* length() { return static_cast<int32_t*>(lengths.data); }
  int32_t* entry() { return static_cast<int32_t*>(table.data); }

 private:
  static octet_tensor tensor(const Memory& memory, int slot, const std::vector<int64_t>& shape) {
    octet_tensor t = OCTET_TENSOR_INIT;
    t.dtype = OCTET_F32, t.data = static_cast<unsigned char*>(memory.data()) + static_cast<size_t>(slot) * kSlot;
    std::copy(shape.begin(), shape.end(), t.shape);
    for (int64_t i = 3, stride = 1; i >= 0; stride *= shape[static_cast<size_t>(i--)]) t.stride[i] = stride;
    return t;
  }
};

template <class Spoil>
void expect_append_rejected(const std::string& message, const Spoil& spoil) {
  AppendCall call;
  spoil(call);
  EXPECT_EQ(octet_append(&call.arguments, nullptr), OCTET_INVALID_ARGUMENT) << message;
  EXPECT_THAT(octet_message(), testing::StartsWith(message));
  EXPECT_TRUE(call.caches.untouched()) << message;
}

TEST(Append, a_complete_call_is_taken) {
  AppendCall call;
  EXPECT_EQ(octet_append(&call.arguments, nullptr), OCTET_OK) << octet_message();
  EXPECT_FALSE(call.caches.untouched());
}

TEST(Append, needs_its_tensors) {
  EXPECT_EQ(octet_append(nullptr, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "arguments: NULL");
  expect_append_rejected("k: NULL", [](AppendCall& c) { c.arguments.k = nullptr; });
  expect_append_rejected("v: NULL", [](AppendCall& c) { c.arguments.v = nullptr; });
  expect_append_rejected("k_cache: NULL", [](AppendCall& c) { c.arguments.k_cache = nullptr; });
  expect_append_rejected("seqused_k: NULL", [](AppendCall& c) { c.arguments.seqused_k = nullptr; });
  expect_append_rejected("octet_append_arguments: size 3", [](AppendCall& c) { c.arguments.size = 3; });
  AppendCall call;
  EXPECT_EQ(octet_append(&call.arguments, &call), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "stream: given with CPU tensors; pass NULL");
  EXPECT_TRUE(call.caches.untouched());
}

TEST(Append, keys_and_caches_belong_together) {
  expect_append_rejected("v: shape", [](AppendCall& c) { c.v.shape[2] = 1; });
  expect_append_rejected("k_cache: shape", [](AppendCall& c) { c.k_cache.shape[3] = 8; });
  expect_append_rejected("v_cache: shape", [](AppendCall& c) { c.v_cache.shape[0] = 4; });
  expect_append_rejected("k_cache: dtype f64", [](AppendCall& c) { c.k_cache.dtype = OCTET_F64; });
  expect_append_rejected("k: dtype i8, allowed: f32, f16, bf16", [](AppendCall& c) { c.k.dtype = OCTET_I8; });
  expect_append_rejected("k_cache: its memory overlaps that of v_cache",
                         [](AppendCall& c) { c.v_cache.data = c.k_cache.data; });
  expect_append_rejected("k: pages of 8 tokens", [](AppendCall& c) { c.k_cache.shape[2] = c.v_cache.shape[2] = 8; });
}

TEST(Append, tokens_have_places) {
  expect_append_rejected("seqused_k: 31 keys of sequence 0 and 2 new ones, allowed: 0 to 32, the tokens of its pages",
                         [](AppendCall& c) { c.length()[0] = 31; });
  expect_append_rejected("seqused_k: -1 keys of sequence 1", [](AppendCall& c) { c.length()[1] = -1; });
  for (const int which : {0, 1})  // tokens 15 and 16 lie in both pages
    expect_append_rejected("block_table: page 5 in column " + std::to_string(which) + " of sequence 0, allowed: 0 to 4",
                           [&](AppendCall& c) { c.entry()[which] = 5; });
  AppendCall unread;
  unread.length()[0] = 16, unread.entry()[0] = -1;
  EXPECT_EQ(octet_append(&unread.arguments, nullptr), OCTET_OK) << octet_message();
}

// Three new tokens of the first sequence and one of the second.
struct PackedAppendCall : AppendCall {
  octet_tensor cu_seqlens = lengths;

  PackedAppendCall() {
    cu_seqlens.data = static_cast<unsigned char*>(inputs.data()) + size_t{7} * kSlot;
    cu_seqlens.shape[3] = kSequences + 1;
    boundary()[0] = 0, boundary()[1] = 3, boundary()[2] = kSequences * kNew;
    for (octet_tensor* t : {&k, &v, &q, &q_turned}) {
      t->shape[0] = 1, t->shape[2] = kSequences * kNew;
      t->stride[1] = t->shape[2] * t->stride[2], t->stride[0] = t->shape[1] * t->stride[1];
    }
    arguments.cu_seqlens = &cu_seqlens;
  }
  int32_t* boundary() { return static_cast<int32_t*>(cu_seqlens.data); }
};

template <class Spoil>
void expect_packed_rejected(const std::string& message, const Spoil& spoil) {
  PackedAppendCall call;
  spoil(call);
  EXPECT_EQ(octet_append(&call.arguments, nullptr), OCTET_INVALID_ARGUMENT) << message;
  EXPECT_THAT(octet_message(), testing::StartsWith(message));
  EXPECT_TRUE(call.caches.untouched()) << message;
}

TEST(Append, packed_tokens_have_sequences) {
  PackedAppendCall call;
  EXPECT_EQ(octet_append(&call.arguments, nullptr), OCTET_OK) << octet_message();
  using Call = PackedAppendCall;
  expect_packed_rejected("k: batch 2, but packed sequences (cu_seqlens) have batch 1",
                         [](Call& c) { c.k.shape[0] = c.v.shape[0] = 2; });
  expect_packed_rejected("cu_seqlens: dtype f32, allowed: i32", [](Call& c) { c.cu_seqlens.dtype = OCTET_F32; });
  expect_packed_rejected("cu_seqlens: shape [1, 1, 1, 1]", [](Call& c) { c.cu_seqlens.shape[3] = 1; });
  expect_packed_rejected("seqused_k: shape [1, 1, 1, 1]", [](Call& c) { c.lengths.shape[3] = 1; });
  expect_packed_rejected("block_table: shape [1, 1, 1, 2]", [](Call& c) { c.table.shape[0] = 1; });
  expect_packed_rejected("q: shape [1, 4, 3, 16]", [](Call& c) { c.q.shape[2] = c.q_turned.shape[2] = 3; });
  expect_packed_rejected("cu_seqlens: runs from 0 to 3, expected 0 to the 4 tokens of k",
                         [](Call& c) { c.boundary()[2] = 3; });
  expect_packed_rejected("cu_seqlens: falls from 5 to 4 at sequence 1; must ascend",
                         [](Call& c) { c.boundary()[1] = 5; });
  expect_packed_rejected("seqused_k: 30 keys of sequence 0 and 3 new ones, allowed: 0 to 32, the tokens of its pages",
                         [](Call& c) { c.length()[0] = 30; });
  expect_packed_rejected("rope_cos: 17 positions, but those of sequence 0 are 15 to 17",
                         [](Call& c) { c.cosine.shape[2] = c.sine.shape[2] = 17; });
}

TEST(Append, angles_are_complete) {
  expect_append_rejected("rope_cos, rope_sin: only one", [](AppendCall& c) { c.arguments.rope_sin = nullptr; });
  expect_append_rejected("rope_cos: given without a rope", [](AppendCall& c) { c.arguments.rope = nullptr; });
  expect_append_rejected("rope base: 3 given with rope_cos", [](AppendCall& c) { c.rope.base = 3; });
  expect_append_rejected("rope norm: found rms, allowed: none", [](AppendCall& c) { c.rope.norm = OCTET_NORM_RMS; });
  expect_append_rejected("rope_cos: 4 pairs, but rope dim is 16", [](AppendCall& c) { c.rope.dim = 16; });
  expect_append_rejected("rope_sin: shape", [](AppendCall& c) { c.sine.shape[2] = 39; });
  expect_append_rejected("rope_cos: 16 positions, but those of sequence 0 are 15 to 16",
                         [](AppendCall& c) { c.cosine.shape[2] = c.sine.shape[2] = 16; });
  expect_append_rejected("q, q_turned: only one", [](AppendCall& c) { c.arguments.q_turned = nullptr; });
  expect_append_rejected("q: given without a rope", [](AppendCall& c) {
    c.arguments.rope_cos = c.arguments.rope_sin = nullptr, c.arguments.rope = nullptr;
  });
}

TEST(Append, a_quantized_cache_has_scales_of_tokens) {
  const auto quantize = [](AppendCall& c, const auto& spoil) {
    c.how.operand = OCTET_OPERAND_K, c.how.scale = &c.q_turned;
    c.k_cache.dtype = OCTET_I8, c.k_cache.quantization = &c.how;
    c.arguments.q = nullptr, c.arguments.q_turned = nullptr;
    for (int i = 0; i < 4; ++i) c.q_turned.shape[i] = i < 3 ? c.k_cache.shape[i] : 1;
    const int64_t stride[4] = {kKvHeads * kPageTokens, kPageTokens, 1, 1};
    std::copy(stride, stride + 4, c.q_turned.stride);
    spoil();
  };
  AppendCall call;
  quantize(call, [] {});
  EXPECT_EQ(octet_append(&call.arguments, nullptr), OCTET_OK) << octet_message();
  expect_append_rejected("k_cache: quantized as operand v, expected k",
                         [&](AppendCall& c) { quantize(c, [&] { c.how.operand = OCTET_OPERAND_V; }); });
  expect_append_rejected("k_cache: a quantization per token, symmetric, rotated",
                         [&](AppendCall& c) { quantize(c, [&] { c.how.hadamard_seed = 1; }); });
  expect_append_rejected("scale: shape", [&](AppendCall& c) { quantize(c, [&] { c.q_turned.shape[2] = 1; }); });
}

}  // namespace
}  // namespace octet::test
