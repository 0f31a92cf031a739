// Heads that differ, and tensors of one layout beside those of the other.
#include "misuse/calls.h"

namespace octet::test {
namespace {

constexpr octet_pass kPasses[] = {OCTET_FORWARD, OCTET_BACKWARD, OCTET_JVP};

// A call of other sizes.
struct Sized : Call {
  Sized(octet_pass pass, int64_t heads, int64_t tokens_q, int64_t kv_heads, int64_t tokens_k) : Call(pass) {
    for (octet_tensor* t : {&q, &o, &do_, &dq, &tq, &to, &lse}) resize(*t, heads, tokens_q);
    for (octet_tensor* t : {&k, &v, &dk, &dv, &tk, &tv}) resize(*t, kv_heads, tokens_k);
    resize(mask, heads, tokens_q), mask.shape[3] = tokens_k;
    for (octet_tensor* t : {&sinks, &alibi_slopes}) t->shape[1] = heads, t->shape[0] = 1;
  }

 private:
  static void resize(octet_tensor& t, int64_t heads, int64_t tokens) {
    t.shape[1] = heads, t.shape[2] = tokens;
    t.stride[2] = t.shape[3], t.stride[1] = tokens * t.shape[3], t.stride[0] = heads * t.stride[1];
  }
};

TEST(GroupedHeads, one_layout_beside_the_other_is_rejected_where_that_is_asked_for) {
  for (const octet_pass pass : kPasses) {
    Sized of_q(pass, 24, 6, 2, 24), of_k(pass, 12, 6, 6, 3);
    for (Call* c : {static_cast<Call*>(&of_q), static_cast<Call*>(&of_k)})
      c->attention.grouped_heads = OCTET_GROUPED_HEADS_UNLESS_SWAPPED;
    expect_invalid(of_q, "q, k: heads and tokens of q seem swapped: q [batch 2, head 24, token 6, dim 16] meets ",
                   {"k [batch 2, head 2, token 24, dim 16]", "q would be [batch 2, head 6, token 24, dim 16]",
                    "grouped_heads as-shaped"});
    expect_invalid(of_k, "q, k: heads and tokens of k and v seem swapped: q [batch 2, head 12, token 6, dim 16] meets ",
                   {"k [batch 2, head 6, token 3, dim 16]", "k would be [batch 2, head 3, token 6, dim 16]"});
    of_q.attention.grouped_heads = of_k.attention.grouped_heads = OCTET_GROUPED_HEADS_AS_SHAPED;
    expect_accepted(of_q);
    expect_accepted(of_k);
  }
}

TEST(GroupedHeads, other_operands_settle_what_the_shapes_leave_open) {
  const auto asked = [](Sized& c) -> Sized& {
    c.attention.grouped_heads = OCTET_GROUPED_HEADS_UNLESS_SWAPPED;
    return c;
  };
  Sized sinks(OCTET_FORWARD, 24, 6, 2, 24), slopes(OCTET_FORWARD, 24, 6, 2, 24), masked(OCTET_FORWARD, 12, 6, 6, 3);
  sinks.arguments.sinks = &sinks.sinks;
  slopes.arguments.alibi_slopes = &slopes.alibi_slopes;
  masked.arguments.mask = &masked.mask;
  for (Sized* c : {&sinks, &slopes, &masked}) expect_accepted(asked(*c));
  Sized broadcast(OCTET_FORWARD, 12, 6, 6, 3);
  broadcast.arguments.mask = &broadcast.mask;
  for (int64_t& extent : broadcast.mask.shape) extent = 1;
  expect_invalid(asked(broadcast), "q, k: heads and tokens of k and v seem swapped");
  Sized packed(OCTET_FORWARD, 24, 6, 2, 24);
  packed.pack({0, 6}, {0, 24});
  expect_accepted(asked(packed));
}

TEST(GroupedHeads, none_wants_as_many) {
  Call call(OCTET_FORWARD);
  call.attention.grouped_heads = OCTET_GROUPED_HEADS_NONE;
  expect_invalid(call, "q: 4 heads, but k and v have 2 heads; allowed with grouped_heads none: as many");
}

TEST(GroupedHeads, unknown_numbers_are_rejected) {
  Call call(OCTET_FORWARD), reserved(OCTET_FORWARD);
  call.attention.grouped_heads = 3;
  expect_invalid(call, "grouped_heads: found 3, allowed: 0 (as-shaped), 1 (unless-swapped), 2 (none)");
  reserved.attention.reserved = 1;
  expect_invalid(reserved, "octet_attention: reserved: found 1, allowed: 0");
}

// A program of octet 0.1.0 has no such field, and runs as it did.
TEST(GroupedHeads, the_struct_of_0_1_0_means_as_shaped) {
  Sized call(OCTET_FORWARD, 24, 6, 2, 24);
  call.attention.size = offsetof(octet_attention, grouped_heads);
  call.attention.grouped_heads = OCTET_GROUPED_HEADS_NONE;
  expect_accepted(call);
}

}  // namespace
}  // namespace octet::test
