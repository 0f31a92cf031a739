// Shapes, strides, types, devices and memory that a call must reject, and layouts that only look wrong.
#include "misuse/calls.h"

namespace octet::test {
namespace {

TEST(Tensors, shapes_that_disagree_are_rejected_with_both) {
  struct Wrong {
    octet_pass pass;
    octet_tensor Call::*tensor;
    int dimension;
    const char *label, *expected;
  };
  const Wrong wrongs[] = {
      {OCTET_FORWARD, &Call::k, 0, "k", "[2, 2, 7, 16]"},
      {OCTET_FORWARD, &Call::k, 3, "k", "[2, 2, 7, 16]"},
      {OCTET_FORWARD, &Call::v, 0, "v", "[2, 2, 7, 8]"},
      {OCTET_FORWARD, &Call::v, 1, "v", "[2, 2, 7, 8]"},
      {OCTET_FORWARD, &Call::v, 2, "v", "[2, 2, 7, 8]"},
      {OCTET_FORWARD, &Call::o, 2, "o", "[2, 4, 5, 8]"},
      {OCTET_FORWARD, &Call::o, 3, "o", "[2, 4, 5, 8]"},
      {OCTET_FORWARD, &Call::lse, 3, "lse", "[2, 4, 5, 1]"},
      {OCTET_FORWARD, &Call::o_residual, 1, "o_residual", "[2, 4, 5, 8]"},
      {OCTET_BACKWARD, &Call::do_, 1, "do", "[2, 4, 5, 8]"},
      {OCTET_BACKWARD, &Call::dq, 1, "dq", "[2, 4, 5, 16]"},
      {OCTET_BACKWARD, &Call::dk, 2, "dk", "[2, 2, 7, 16]"},
      {OCTET_BACKWARD, &Call::dv, 3, "dv", "[2, 2, 7, 8]"},
      {OCTET_JVP, &Call::tq, 2, "tq", "[2, 4, 5, 16]"},
      {OCTET_JVP, &Call::tk, 1, "tk", "[2, 2, 7, 16]"},
      {OCTET_JVP, &Call::tv, 0, "tv", "[2, 2, 7, 8]"},
      {OCTET_JVP, &Call::to, 3, "to", "[2, 4, 5, 8]"},
  };
  for (const Wrong& w : wrongs) {
    SCOPED_TRACE(w.label);
    Call call(w.pass);
    octet_tensor& t = call.*w.tensor;
    if (w.tensor == &Call::o_residual) call.arguments.o_residual = &t;
    t.shape[w.dimension] = w.dimension == 3 ? 3 : 1;
    expect_invalid(call, std::string(w.label) + ": shape [", {std::string("expected ") + w.expected});
  }
}

TEST(Tensors, head_dims_are_multiples_of_8_up_to_512) {
  for (const int64_t dim : {0, 1, 4, 12, 15, 260, 520, 1024}) {
    Call q(OCTET_FORWARD), v(OCTET_FORWARD);
    q.q.shape[3] = q.k.shape[3] = dim;
    expect_invalid(q, "q: head dim " + std::to_string(dim) + ", allowed: a multiple of 8 from 8 to 512");
    v.v.shape[3] = v.o.shape[3] = dim;
    expect_invalid(v, "v: head dim " + std::to_string(dim) + ", allowed: a multiple of 8 from 8 to 512");
  }
}

TEST(Tensors, query_heads_are_a_multiple_of_key_heads) {
  Call three(OCTET_FORWARD), none(OCTET_FORWARD);
  three.k.shape[1] = three.v.shape[1] = 3;
  expect_invalid(three, "q: 4 heads, which is not a multiple of the 3 heads of k and v");
  none.k.shape[1] = none.v.shape[1] = 0;
  expect_invalid(none, "q: 4 heads, which is not a multiple of the 0 heads of k and v");
}

TEST(Tensors, absurd_shapes_and_strides_are_rejected) {
  Call negative(OCTET_FORWARD), overflow(OCTET_FORWARD), hidden(OCTET_FORWARD), far(OCTET_FORWARD),
      below(OCTET_FORWARD);
  negative.q.shape[2] = -1;
  expect_invalid(negative, "q: shape [2, 4, -1, 16] has a negative dimension");
  for (int i = 0; i < 3; ++i) overflow.k.shape[i] = int64_t{1} << 40;
  expect_invalid(overflow, "k: shape [1099511627776, ", {"has more elements than memory can hold"});
  hidden.q.shape[0] = 0, hidden.q.shape[1] = hidden.q.shape[2] = INT64_MAX;
  expect_invalid(hidden, "q: shape [0, ", {"has more elements than memory can hold"});
  far.v.stride[2] = INT64_MAX / 8;
  expect_invalid(far, "v: strides [", {"reach beyond the address space"});
  below.q.stride[1] = INT64_MIN / 2;
  expect_invalid(below, "q: strides [", {"reach beyond the address space"});
}

TEST(Tensors, memory_must_be_there_and_aligned) {
  Call null(OCTET_FORWARD), odd(OCTET_FORWARD);
  null.o.data = nullptr;
  expect_invalid(null, "o: null data, but shape [2, 4, 5, 8] is not empty");
  odd.q.data = static_cast<char*>(odd.q.data) + 2;
  expect_invalid(odd, "q: data is not aligned to its elements of 4 bytes (dtype f32)");
}

TEST(Tensors, dtypes_are_rejected_with_the_choices) {
  const auto with = [](octet_pass pass, octet_tensor Call::*tensor, uint32_t dtype,
                       octet_precision precision = OCTET_PRECISION_F32) {
    auto call = std::make_unique<Call>(pass, precision);
    (*call.*tensor).dtype = dtype;
    return call;
  };
  expect_invalid(*with(OCTET_FORWARD, &Call::q, 0), "q: dtype: found 0, allowed: 1 (f64)", {"11 (bool)"});
  expect_invalid(*with(OCTET_FORWARD, &Call::q, 12), "q: dtype: found 12, allowed: 1 (f64)");
  expect_invalid(*with(OCTET_FORWARD, &Call::q, OCTET_I32), "q: dtype i32, allowed: f32, f16, bf16, e4m3");
  expect_invalid(*with(OCTET_FORWARD, &Call::q, OCTET_I32, OCTET_PRECISION_F64),
                 "q: dtype i32, allowed: f64, f32, f16, bf16, e4m3");
  expect_invalid(*with(OCTET_FORWARD, &Call::k, OCTET_BOOL), "k: dtype bool, allowed: f32, f16, bf16, e4m3");
  expect_invalid(*with(OCTET_FORWARD, &Call::v, OCTET_E5M2), "v: dtype e5m2, allowed: f32, f16, bf16, e4m3");
  expect_invalid(*with(OCTET_FORWARD, &Call::o, OCTET_I8), "o: dtype i8, allowed: f32, f16, bf16");
  expect_invalid(*with(OCTET_FORWARD, &Call::o, OCTET_E4M3), "o: dtype e4m3, allowed: f32, f16, bf16");
  expect_invalid(*with(OCTET_FORWARD, &Call::lse, OCTET_BF16), "lse: dtype bf16, allowed: f32");
  expect_invalid(*with(OCTET_BACKWARD, &Call::do_, OCTET_E4M3), "do: dtype e4m3, allowed: f32, f16, bf16");
  expect_invalid(*with(OCTET_BACKWARD, &Call::dq, OCTET_I32), "dq: dtype i32, allowed: f32, f16, bf16");
  expect_invalid(*with(OCTET_JVP, &Call::tv, OCTET_I8), "tv: dtype i8, allowed: f32, f16, bf16");
}

TEST(Tensors, i8_needs_a_quantization_and_others_none) {
  Call bare(OCTET_FORWARD, OCTET_PRECISION_INT8), extra(OCTET_FORWARD), output(OCTET_FORWARD);
  bare.q.dtype = OCTET_I8;
  expect_invalid(bare, "q: dtype i8 without a quantization; quantize it with octet_quantize, or give f32, f16 or bf16");
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  extra.k.quantization = &how;
  expect_invalid(extra, "k: a quantization with dtype f32, allowed: i8, u8, e4m3");
  output.o.quantization = &how;
  expect_invalid(output, "o: has a quantization, which only q, k and v may have");
}

TEST(Tensors, f64_is_for_precision_f64) {
  Call in(OCTET_FORWARD), tangent(OCTET_JVP), out(OCTET_FORWARD), lse(OCTET_FORWARD),
      oracle(OCTET_FORWARD, OCTET_PRECISION_F64);
  in.v.dtype = OCTET_F64;
  expect_invalid(in, "v: dtype f64 needs precision f64, found f32");
  tangent.tq.dtype = OCTET_F64;
  expect_invalid(tangent, "tq: dtype f64 needs precision f64, found f32");
  out.o.dtype = OCTET_F64;
  expect_invalid(out, "o: dtype f64 needs precision f64, found f32");
  lse.lse.dtype = OCTET_F64;
  expect_invalid(lse, "lse: dtype f64, allowed: f32");
  for (octet_tensor* t : {&oracle.q, &oracle.k, &oracle.v, &oracle.o, &oracle.lse}) t->dtype = OCTET_F64;
  expect_accepted(oracle);
}

TEST(Tensors, the_residual_is_a_byte_or_has_the_type_of_o) {
  Call call(OCTET_FORWARD, OCTET_PRECISION_BF16);
  call.arguments.o_residual = &call.o_residual;
  call.o_residual.dtype = OCTET_I8;
  expect_invalid(call, "o_residual: dtype i8, expected that of o, f32");
  call.o.dtype = OCTET_BF16, call.o_residual.dtype = OCTET_F16;
  expect_invalid(call, "o_residual: dtype f16, allowed: i8, and that of o, bf16");
  call.o_residual.dtype = OCTET_U8;
  expect_invalid(call, "o_residual: dtype u8, allowed: i8, and that of o, bf16");
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  call.o_residual.dtype = OCTET_I8, call.o_residual.quantization = &how;
  expect_invalid(call, "o_residual: has a quantization, which only q, k and v may have");
  for (const octet_dtype o : {OCTET_BF16, OCTET_F16})
    for (const octet_dtype residual : {OCTET_I8, o}) {
      Call accepted(OCTET_FORWARD, OCTET_PRECISION_BF16);
      accepted.arguments.o_residual = &accepted.o_residual;
      accepted.o.dtype = o, accepted.o_residual.dtype = residual;
      expect_accepted(accepted);
    }
}

TEST(Tensors, devices_are_known_and_one) {
  Call unknown(OCTET_FORWARD), mixed(OCTET_FORWARD), index(OCTET_BACKWARD);
  unknown.q.device = 7;
  expect_invalid(unknown, "q: device: found 7, allowed: 0 (cpu), 1 (cuda)");
  mixed.k.device = OCTET_CUDA;
  expect_invalid(mixed, "k: on cuda:0, but q is on cpu:0; all tensors of a call live on one device");
  index.dv.device_index = 1;
  expect_invalid(index, "dv: on cpu:1, but q is on cpu:0; all tensors of a call live on one device");
}

TEST(Tensors, cuda_tensors_are_unsupported_with_every_backends_reason) {
  Call call(OCTET_FORWARD);
  for (octet_tensor* t : {&call.q, &call.k, &call.v, &call.o, &call.lse}) t->device = OCTET_CUDA;
  expect_unsupported(call, "no backend can solve this problem:",
                     {"\n  cpu, reference: the tensors are on cuda; it works on cpu tensors"});
}

TEST(Tensors, an_output_may_not_alias_itself) {
  Call broadcast(OCTET_FORWARD), folded(OCTET_FORWARD), input(OCTET_FORWARD);
  broadcast.o.stride[1] = 0;
  expect_invalid(broadcast,
                 "o: strides [160, 0, 8, 1] with shape [2, 4, 5, 8] put several elements of an output in one place");
  folded.o.stride[1] = 8;  // head 1 token 0 is head 0 token 1
  expect_invalid(folded,
                 "o: strides [160, 8, 8, 1] with shape [2, 4, 5, 8] put several elements of an output in one place");
  input.q.stride[0] = input.q.stride[1] = 0;
  expect_accepted(input);
}

TEST(Tensors, outputs_may_not_share_memory_with_anything) {
  Call same(OCTET_FORWARD), partly(OCTET_BACKWARD), two(OCTET_BACKWARD), mask(OCTET_FORWARD);
  same.o.data = same.v.data;
  expect_invalid(same, "o: its memory overlaps that of v; outputs must have memory of their own");
  partly.dq.data = static_cast<float*>(partly.q.data) + 300;
  expect_invalid(partly, "dq: its memory overlaps that of q; outputs must have memory of their own");
  two.dv.data = static_cast<float*>(two.dk.data) + 1;
  expect_invalid(two, "dk: its memory overlaps that of dv; outputs must have memory of their own");
  mask.arguments.mask = &mask.mask;
  mask.lse.data = mask.mask.data;
  expect_invalid(mask, "lse: its memory overlaps that of mask; outputs must have memory of their own");
}

// dq, dk and dv as a packed projection wants them: [batch, token, (heads of q, of k, of v), dim].
void interleave(Call& call, int64_t shift_of_dk) {
  const int64_t rows = kHeads + 2 * kKvHeads;
  float* base = static_cast<float*>(call.dq.data);
  for (octet_tensor* t : {&call.v, &call.dv, &call.o, &call.do_}) t->shape[3] = kDim;
  int64_t head = 0;
  for (octet_tensor* t : {&call.dq, &call.dk, &call.dv}) {
    t->shape[2] = kTokensQ;
    t->data = base + head * kDim;
    const int64_t stride[4] = {kTokensQ * rows * kDim, kDim, rows * kDim, 1};
    std::copy(stride, stride + 4, t->stride);
    head += t->shape[1];
  }
  call.k.shape[2] = call.v.shape[2] = kTokensQ;
  call.dk.data = static_cast<float*>(call.dk.data) + shift_of_dk;
}

TEST(Tensors, interleaved_outputs_share_a_buffer_but_no_element) {
  Call call(OCTET_BACKWARD);
  interleave(call, 0);
  expect_accepted(call);
}

TEST(Tensors, interleaved_outputs_that_touch_are_rejected) {
  Call left(OCTET_BACKWARD), right(OCTET_BACKWARD);
  interleave(left, -1);
  expect_invalid(left, "dq: its memory overlaps that of dk");
  interleave(right, 1);
  expect_invalid(right, "dk: its memory overlaps that of dv");
}

TEST(Tensors, negative_strides_are_views_like_others) {
  Call call(OCTET_FORWARD), overlapping(OCTET_FORWARD);
  for (Call* c : {&call, &overlapping}) {
    c->o.data = static_cast<float*>(c->o.data) + (kTokensQ - 1) * kDimV;
    c->o.stride[2] = -kDimV;
  }
  expect_accepted(call);
  overlapping.lse.data = static_cast<float*>(overlapping.o.data) - kDimV;
  expect_invalid(overlapping, "o: its memory overlaps that of lse");
}

TEST(Tensors, strides_of_one_element_are_not_read) {
  for (const octet_pass pass : {OCTET_FORWARD, OCTET_BACKWARD, OCTET_JVP})
    for (const int64_t stride : {int64_t{0}, int64_t{3}, INT64_MAX, INT64_MIN}) {
      SCOPED_TRACE(stride);
      Call call(pass);
      for (octet_tensor* t : {&call.q, &call.k, &call.v, &call.o, &call.lse, &call.do_, &call.dq, &call.dk, &call.dv,
                              &call.tq, &call.tk, &call.tv, &call.to})
        t->shape[0] = 1, t->stride[0] = stride;
      call.lse.stride[3] = stride;
      expect_accepted(call);
    }
}

TEST(Tensors, empty_tensors_need_no_memory) {
  Call call(OCTET_FORWARD);
  for (octet_tensor* t : {&call.q, &call.o, &call.lse}) t->shape[2] = 0, t->data = nullptr;
  expect_accepted(call);
}

}  // namespace
}  // namespace octet::test
