// A complete, valid call of each pass over poisoned memory, to be spoilt in one place by a test.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <octet/octet.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

namespace octet::test {

// Memory whose every byte starts as kPoison, aligned as a workspace must be.
class Memory {
 public:
  static constexpr unsigned char kPoison = 0xa5;

  explicit Memory(size_t bytes)
      : size_(bytes), data_(static_cast<unsigned char*>(::operator new (bytes, std::align_val_t{64}))) {
    std::memset(data_, kPoison, bytes);
  }
  ~Memory() { ::operator delete (data_, std::align_val_t{64}); }
  Memory(const Memory&) = delete;

  void* data() const { return data_; }
  size_t size() const { return size_; }
  bool untouched() const {
    for (size_t i = 0; i < size_; ++i)
      if (data_[i] != kPoison) return false;
    return true;
  }

 private:
  size_t size_;
  unsigned char* data_;
};

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kTokensQ = 5, kTokensK = 7, kDim = 16, kDimV = 8;
constexpr size_t kSlot = 1 << 16;  // bytes of memory for each tensor

// Every tensor of the pass in memory of its own; inputs are zero, outputs poisoned.
struct Call {
  octet_attention attention = OCTET_ATTENTION_INIT;
  octet_arguments arguments = OCTET_ARGUMENTS_INIT;
  octet_tensor q, k, v, o, o_residual, lse, do_, dq, dk, dv, tq, tk, tv, to, mask, cu_q, cu_k;
  // Optional: a test that wants them sets the arguments.
  octet_tensor sinks, dsinks, tsinks, dlse, tlse, alibi_slopes, dropout_seed, dmask;
  Memory inputs{16 * kSlot}, outputs{10 * kSlot}, workspace{1 << 22};

  explicit Call(octet_pass pass, octet_precision precision = OCTET_PRECISION_F32) {
    std::memset(inputs.data(), 0, inputs.size());
    attention.precision = precision;
    arguments.pass = pass;
    const bool backward = pass == OCTET_BACKWARD;
    q = in(0, kHeads, kTokensQ, kDim), k = in(1, kKvHeads, kTokensK, kDim), v = in(2, kKvHeads, kTokensK, kDimV);
    tq = in(3, kHeads, kTokensQ, kDim), tk = in(4, kKvHeads, kTokensK, kDim), tv = in(5, kKvHeads, kTokensK, kDimV);
    do_ = in(6, kHeads, kTokensQ, kDimV), mask = in(7, kHeads, kTokensQ, kTokensK);
    cu_q = in(8, 1, 1, 1), cu_k = in(9, 1, 1, 1);
    o = backward ? in(10, kHeads, kTokensQ, kDimV) : out(0, kHeads, kTokensQ, kDimV);
    lse = out(1, kHeads, kTokensQ, 1), o_residual = out(2, kHeads, kTokensQ, kDimV);
    dq = out(3, kHeads, kTokensQ, kDim), dk = out(4, kKvHeads, kTokensK, kDim), dv = out(5, kKvHeads, kTokensK, kDimV);
    to = out(6, kHeads, kTokensQ, kDimV);
    sinks = in(11, kHeads, 1, 1), dsinks = out(7, kHeads, 1, 1), tsinks = in(12, kHeads, 1, 1);
    dlse = in(13, kHeads, kTokensQ, 1), tlse = out(8, kHeads, kTokensQ, 1);
    alibi_slopes = in(14, kHeads, 1, 1), dropout_seed = in(15, 1, 1, 4), dropout_seed.dtype = OCTET_I32;
    dmask = out(9, kHeads, kTokensQ, kTokensK);
    arguments.q = &q, arguments.k = &k, arguments.v = &v, arguments.o = &o, arguments.lse = &lse;
    if (backward) arguments.do_ = &do_, arguments.dq = &dq, arguments.dk = &dk, arguments.dv = &dv;
    if (pass == OCTET_JVP) arguments.tq = &tq, arguments.tk = &tk, arguments.tv = &tv, arguments.to = &to;
  }

  // Makes this a packed call: one batch element of sequences with the given boundaries.
  void pack(const std::vector<int32_t>& q_first, const std::vector<int32_t>& k_first) {
    for (octet_tensor* t : {&q, &k, &v, &o, &lse, &do_, &dq, &dk, &dv, &tq, &tk, &tv, &to}) t->shape[0] = 1;
    const auto boundaries = [](octet_tensor& t, const std::vector<int32_t>& first) {
      t.dtype = OCTET_I32;
      const auto n = static_cast<int64_t>(first.size());
      for (int i = 0; i < 4; ++i) t.shape[i] = i == 3 ? n : 1, t.stride[i] = i == 3 ? 1 : n;
      std::memcpy(t.data, first.data(), first.size() * sizeof(int32_t));
    };
    boundaries(cu_q, q_first), boundaries(cu_k, k_first);
    arguments.cu_seqlens_q = &cu_q, arguments.cu_seqlens_k = &cu_k;
  }

  octet_status run() { return octet_run(&attention, &arguments, workspace.data(), workspace.size(), nullptr); }

 private:
  static octet_tensor tensor(const Memory& memory, int slot, int64_t heads, int64_t tokens, int64_t dim) {
    octet_tensor t = OCTET_TENSOR_INIT;
    t.dtype = OCTET_F32;
    t.data = static_cast<unsigned char*>(memory.data()) + static_cast<size_t>(slot) * kSlot;
    const int64_t shape[4] = {kBatch, heads, tokens, dim}, stride[4] = {heads * tokens * dim, tokens * dim, dim, 1};
    std::copy(shape, shape + 4, t.shape);
    std::copy(stride, stride + 4, t.stride);
    return t;
  }
  octet_tensor in(int slot, int64_t heads, int64_t tokens, int64_t dim) {
    return tensor(inputs, slot, heads, tokens, dim);
  }
  octet_tensor out(int slot, int64_t heads, int64_t tokens, int64_t dim) {
    return tensor(outputs, slot, heads, tokens, dim);
  }
};

// The call is rejected by octet_workspace_size, octet_explain and octet_run alike, with a message that starts as
// given and contains the rest, and nothing is written.
inline void expect_rejected(Call& call, octet_status status, const std::string& start,
                            const std::vector<std::string>& parts = {}) {
  using testing::HasSubstr;
  using testing::StartsWith;
  size_t bytes = 0, length = 0;
  char text[4096];
  const auto expect_message = [&](const char* function) {
    EXPECT_THAT(octet_message(), StartsWith(start)) << function;
    for (const std::string& part : parts) EXPECT_THAT(octet_message(), HasSubstr(part)) << function;
  };
  EXPECT_EQ(octet_workspace_size(&call.attention, &call.arguments, &bytes), status) << octet_message();
  expect_message("octet_workspace_size");
  EXPECT_EQ(octet_run(&call.attention, &call.arguments, call.workspace.data(), call.workspace.size(), nullptr), status)
      << octet_message();
  expect_message("octet_run");
  if (status == OCTET_INVALID_ARGUMENT) {
    EXPECT_EQ(octet_explain(&call.attention, &call.arguments, text, sizeof text, &length), status) << octet_message();
    expect_message("octet_explain");
  }
  EXPECT_TRUE(call.outputs.untouched()) << "an output was written";
  EXPECT_TRUE(call.workspace.untouched()) << "the workspace was written";
}

inline void expect_invalid(Call& call, const std::string& start, const std::vector<std::string>& parts = {}) {
  expect_rejected(call, OCTET_INVALID_ARGUMENT, start, parts);
}
inline void expect_unsupported(Call& call, const std::string& start, const std::vector<std::string>& parts = {}) {
  expect_rejected(call, OCTET_UNSUPPORTED, start, parts);
}

// The call's own memory is valid: what a test spoils is what is rejected.
inline void expect_accepted(Call& call) { EXPECT_EQ(call.run(), OCTET_OK) << octet_message(); }

}  // namespace octet::test
