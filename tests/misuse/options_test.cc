// Options that contradict each other, the tensors or the precision; masks, packing, workspaces, streams.
#include <octet/octet_study.h>

#include <limits>

#include "misuse/calls.h"

namespace octet::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

TEST(Options, scale_is_positive_and_finite) {
  const std::pair<float, const char*> scales[] = {
      {kNan, "nan"}, {kInfinity, "inf"}, {-kInfinity, "-inf"}, {-0.125f, "-0.125"}, {0x1p-127f, "5.87747e-39"}};
  for (const auto& [scale, text] : scales) {
    Call call(OCTET_FORWARD);
    call.attention.scale = scale;
    expect_invalid(call, std::string("scale: found ") + text +
                             ", allowed: positive and finite, 1.17549e-38 to 3.40282e+38, or 0 for 1/sqrt(dim)");
  }
}

TEST(Options, different_lengths_need_an_alignment) {
  for (const uint32_t mask : {OCTET_MASK_CAUSAL, OCTET_MASK_WINDOW}) {
    Call call(OCTET_FORWARD);
    call.attention.mask = mask;
    expect_invalid(call, "alignment: unspecified, but 5 queries meet 7 keys", {"top-left", "bottom-right"});
    call.attention.alignment = OCTET_ALIGNMENT_BOTTOM_RIGHT;
    expect_accepted(call);
  }
}

TEST(Options, an_alignment_needs_a_diagonal) {
  Call call(OCTET_FORWARD);
  call.attention.alignment = OCTET_ALIGNMENT_TOP_LEFT;
  expect_invalid(call, "alignment: top-left given, but neither a causal mask nor a window has a diagonal to align");
}

TEST(Options, windows_need_their_flag_and_sane_sides) {
  Call flag(OCTET_FORWARD), side(OCTET_FORWARD), both(OCTET_FORWARD), huge(OCTET_FORWARD);
  flag.attention.window_left = 3;
  expect_invalid(flag, "window: 3, 0 given without OCTET_MASK_WINDOW; set the flag or leave both 0");
  for (Call* c : {&side, &both, &huge})
    c->attention.mask = OCTET_MASK_WINDOW, c->attention.alignment = OCTET_ALIGNMENT_TOP_LEFT;
  side.attention.window_left = -2;
  expect_invalid(side, "window: found -2, 0, allowed: a count of keys, or -1 for all");
  both.attention.mask |= OCTET_MASK_CAUSAL;
  both.attention.window_right = 1;
  expect_invalid(both, "window: right 1 contradicts the causal mask; allowed with it: 0 or -1");
  huge.attention.alignment = OCTET_ALIGNMENT_BOTTOM_RIGHT;
  huge.attention.window_left = huge.attention.window_right = INT64_MAX;
  expect_accepted(huge);
}

TEST(Options, mask_tensors_broadcast_or_are_rejected) {
  Call shape(OCTET_FORWARD), dtype(OCTET_FORWARD), good(OCTET_FORWARD);
  for (Call* c : {&shape, &dtype, &good}) c->arguments.mask = &c->mask;
  shape.mask.shape[3] = 6;
  expect_invalid(shape, "mask: shape [2, 4, 5, 6] does not broadcast to [2, 4, 5, 7]");
  dtype.mask.dtype = OCTET_I32;
  expect_invalid(dtype, "mask: dtype i32, allowed: bool, f32, f16, bf16");
  good.mask.shape[0] = good.mask.shape[1] = 1;
  expect_accepted(good);
}

TEST(Options, bias_corrections_belong_to_16_bits) {
  for (const octet_precision precision :
       {OCTET_PRECISION_F32, OCTET_PRECISION_INT8, OCTET_PRECISION_FP8, OCTET_PRECISION_F64}) {
    Call call(OCTET_BACKWARD, precision);
    call.attention.bias_correction = OCTET_BIAS_CORRECTION_GPROJ;
    expect_invalid(call, "bias_correction: gproj given with precision ", {"bias corrections are for f16 and bf16"});
  }
}

TEST(Options, beta_belongs_to_its_bias_correction_and_range) {
  Call alone(OCTET_FORWARD, OCTET_PRECISION_BF16);
  alone.attention.beta = 4.f;
  expect_invalid(alone, "beta: 4 given with bias_correction f16; it belongs to bias_correction beta");
  for (const float beta : {1.f, 1.5f, 8.5f, -2.f, kInfinity, kNan}) {
    Call call(OCTET_FORWARD, OCTET_PRECISION_BF16);
    call.attention.bias_correction = OCTET_BIAS_CORRECTION_BETA;
    call.attention.beta = beta;
    expect_invalid(call, "beta: found ", {"allowed: 2 to 8, or 0 for 3"});
  }
}

TEST(Options, int8_options_belong_to_int8_logits) {
  for (const octet_precision precision :
       {OCTET_PRECISION_F32, OCTET_PRECISION_BF16, OCTET_PRECISION_FP8, OCTET_PRECISION_SAGEBWD}) {
    Call hadamard(OCTET_FORWARD, precision), smooth(OCTET_FORWARD, precision);
    hadamard.attention.hadamard = OCTET_ON;
    expect_invalid(hadamard, "hadamard: given with precision ", {"it belongs to int8, int8_f16 and int8_fp8"});
    smooth.attention.smooth_q = OCTET_OFF;
    expect_invalid(smooth, "smooth_q: given with precision ", {"it belongs to int8, int8_f16 and int8_fp8"});
  }
}

TEST(Options, rounding_is_for_f64_and_well_formed) {
  octet_rounding good = OCTET_ROUNDING_INIT, size = good, format = good, flag = good, epsilon = good, beta = good;
  size.size = 4, format.p = OCTET_I8, flag.l_from_p = 2, epsilon.tie_epsilon = kNan, beta.beta = .5f;
  Call f32(OCTET_FORWARD);
  f32.attention.rounding = &good;
  expect_invalid(f32, "rounding: given with precision f32; it belongs to precision f64");
  const std::pair<const octet_rounding*, const char*> wrongs[] = {
      {&size, "octet_rounding: size 4, allowed: a multiple of 4 from 76 (octet 0.1.0) to 4096; octet "},
      {&format, "rounding: p: found 7, allowed: 1 (f64), 2 (f32), 3 (f16), 4 (bf16), 5 (e4m3), 6 (e5m2)"},
      {&flag, "rounding: l_from_p: found 2, allowed: 0, 1"},
      {&epsilon, "rounding: tie_epsilon: found nan, allowed: finite, at least 0"},
      {&beta, "rounding: beta: found 0.5, allowed: "}};
  for (const auto& [rounding, message] : wrongs) {
    Call call(OCTET_FORWARD, OCTET_PRECISION_F64);
    call.attention.rounding = rounding;
    expect_invalid(call, message);
  }
}

TEST(Packing, both_boundaries_or_none) {
  Call one(OCTET_FORWARD), longest(OCTET_FORWARD);
  one.pack({0, 2, 5}, {0, 3, 7});
  one.arguments.cu_seqlens_k = nullptr;
  expect_invalid(one, "cu_seqlens: only one of cu_seqlens_q and cu_seqlens_k given; packed sequences need both");
  longest.arguments.max_seqlen_q = 5;
  expect_invalid(longest, "max_seqlen: given without cu_seqlens; leave it 0");
}

TEST(Packing, its_shape_is_checked) {
  Call good(OCTET_FORWARD), batch(OCTET_FORWARD), counts(OCTET_FORWARD), dtype(OCTET_FORWARD), shape(OCTET_FORWARD),
      mask(OCTET_FORWARD);
  Call alignment(OCTET_FORWARD), negative(OCTET_FORWARD);
  for (Call* c : {&good, &batch, &dtype, &shape, &mask, &alignment, &negative}) c->pack({0, 2, 5}, {0, 3, 7});
  expect_accepted(good);
  for (octet_tensor* t : {&batch.q, &batch.k, &batch.v, &batch.o, &batch.lse}) t->shape[0] = 2;
  expect_invalid(batch, "q: batch 2, but packed sequences (cu_seqlens) have batch 1");
  counts.pack({0, 2, 5}, {0, 7});
  expect_invalid(counts, "cu_seqlens: 2 sequences of queries, 1 of keys; the counts must agree");
  dtype.cu_q.dtype = OCTET_F32;
  expect_invalid(dtype, "cu_seqlens_q: dtype f32, allowed: i32");
  shape.cu_k.stride[3] = 2;
  expect_invalid(shape,
                 "cu_seqlens_k: shape [1, 1, 1, 3] and last stride 2, expected [1, 1, 1, sequences + 1], contiguous");
  mask.arguments.mask = &mask.mask;
  mask.mask.shape[0] = 1;
  expect_invalid(mask, "mask: a mask tensor cannot be combined with packed sequences; use causal or window");
  alignment.attention.mask = OCTET_MASK_CAUSAL;
  expect_invalid(alignment, "alignment: unspecified, but the sequences are packed");
  negative.arguments.max_seqlen_k = -1;
  expect_invalid(negative, "max_seqlen: found 0, -1, allowed: a bound on the lengths, or 0 if unknown");
}

// Expects a rejection by octet_run alone, which reads the offsets of packed sequences; octet_workspace_size does not.
void expect_rejected_by_run(Call& call, const std::string& message) {
  size_t bytes = 0;
  EXPECT_EQ(octet_workspace_size(&call.attention, &call.arguments, &bytes), OCTET_OK) << octet_message();
  EXPECT_EQ(call.run(), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_message(), message);
  EXPECT_TRUE(call.outputs.untouched());
}

TEST(Packing, the_boundaries_ascend_from_0_to_the_total) {
  Call start(OCTET_FORWARD), end(OCTET_FORWARD), falls(OCTET_FORWARD), wild(OCTET_FORWARD), longest(OCTET_FORWARD);
  start.pack({1, 2, 5}, {0, 3, 7});
  expect_rejected_by_run(start, "cu_seqlens_q: runs from 1 to 5, expected 0 to the 5 tokens of q");
  end.pack({0, 2, 5}, {0, 3, 6});
  expect_rejected_by_run(end, "cu_seqlens_k: runs from 0 to 6, expected 0 to the 7 tokens of k");
  falls.pack({0, 4, 3, 5}, {0, 3, 5, 7});
  expect_rejected_by_run(falls, "cu_seqlens_q: falls from 4 to 3 at sequence 1; must ascend");
  wild.pack({0, INT32_MIN, 5}, {0, 3, 7});
  expect_rejected_by_run(wild, "cu_seqlens_q: falls from 0 to -2147483648 at sequence 0; must ascend");
  longest.pack({0, 2, 5}, {0, 3, 7});
  longest.arguments.max_seqlen_q = 2, longest.arguments.max_seqlen_k = 7;
  expect_rejected_by_run(longest, "max_seqlen_q: 2, but sequence 1 has 3 tokens");
}

TEST(Workspace, size_address_and_memory_are_checked) {
  Call call(OCTET_BACKWARD);
  size_t needed = 0;
  ASSERT_EQ(octet_workspace_size(&call.attention, &call.arguments, &needed), OCTET_OK) << octet_message();
  ASSERT_GT(needed, 0u);
  const auto run = [&](void* workspace, size_t bytes) {
    return octet_run(&call.attention, &call.arguments, workspace, bytes, nullptr);
  };
  const std::string need = std::to_string(needed);
  EXPECT_EQ(run(call.workspace.data(), needed - 1), OCTET_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(octet_message(),
            "workspace: " + std::to_string(needed - 1) + " bytes, needed: " + need + " (octet_workspace_size)");
  EXPECT_EQ(run(nullptr, needed), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_message(), "workspace: NULL, needed: " + need + " bytes");
  EXPECT_EQ(run(static_cast<char*>(call.workspace.data()) + 8, needed), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "workspace: not aligned to 64 bytes");
  void* const dv = call.dv.data;
  call.dv.data = call.workspace.data();
  EXPECT_EQ(run(call.workspace.data(), needed), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "workspace: its memory overlaps that of dv");
  call.dv.data = dv;
  EXPECT_TRUE(call.outputs.untouched());
  EXPECT_EQ(run(call.workspace.data(), needed), OCTET_OK) << octet_message();
}

TEST(Workspace, its_size_depends_on_no_data) {
  Call call(OCTET_FORWARD);
  size_t with = 0, without = 0;
  call.pack({0, 2, 5}, {0, 3, 7});
  ASSERT_EQ(octet_workspace_size(&call.attention, &call.arguments, &with), OCTET_OK);
  std::memset(call.cu_q.data, 0xff, 12);
  ASSERT_EQ(octet_workspace_size(&call.attention, &call.arguments, &without), OCTET_OK);
  EXPECT_EQ(with, without);
}

TEST(Workspace, guard_bytes_behind_it_survive) {
  for (const octet_pass pass : {OCTET_FORWARD, OCTET_BACKWARD, OCTET_JVP}) {
    Call call(pass);
    size_t needed = 0;
    ASSERT_EQ(octet_workspace_size(&call.attention, &call.arguments, &needed), OCTET_OK);
    ASSERT_EQ(octet_run(&call.attention, &call.arguments, call.workspace.data(), needed, nullptr), OCTET_OK)
        << octet_message();
    const auto* bytes = static_cast<const unsigned char*>(call.workspace.data());
    for (size_t i = needed; i < call.workspace.size(); ++i)
      ASSERT_EQ(bytes[i], Memory::kPoison) << "byte " << i << " of " << needed;
  }
}

TEST(Streams, cpu_tensors_take_none) {
  Call call(OCTET_FORWARD);
  int stream = 0;
  EXPECT_EQ(octet_run(&call.attention, &call.arguments, call.workspace.data(), call.workspace.size(), &stream),
            OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "stream: given with CPU tensors; pass NULL");
  EXPECT_TRUE(call.outputs.untouched());
}

}  // namespace
}  // namespace octet::test
