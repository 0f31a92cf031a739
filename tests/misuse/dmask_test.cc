// The gradient of a mask tensor: its mask, passes, shape, types and memory.
#include <memory>

#include "misuse/calls.h"

namespace octet::test {
namespace {

std::unique_ptr<Call> complete(octet_precision precision = OCTET_PRECISION_F32) {
  auto call = std::make_unique<Call>(OCTET_BACKWARD, precision);
  call->arguments.mask = &call->mask, call->arguments.dmask = &call->dmask;
  return call;
}

TEST(MaskGradient, has_every_shape_and_type_of_masks) {
  for (const octet_precision precision : {OCTET_PRECISION_F64, OCTET_PRECISION_F32, OCTET_PRECISION_SAGEBWD})
    for (const octet_dtype dtype : {OCTET_F32, OCTET_F16, OCTET_BF16})
      for (int broadcast = 0; broadcast < 16; ++broadcast) {
        auto call = complete(precision);
        call->mask.dtype = dtype;
        for (int i = 0; i < 4; ++i)
          if (broadcast >> i & 1) call->mask.shape[i] = call->dmask.shape[i] = 1;
        expect_accepted(*call);
      }
}

TEST(MaskGradient, belongs_to_a_mask_of_numbers) {
  auto none = complete(), boolean = complete();
  none->arguments.mask = nullptr;
  expect_invalid(*none, "dmask: given without mask, to which it belongs");
  boolean->mask.dtype = OCTET_BOOL;
  expect_invalid(*boolean, "dmask: given with a mask of bool, which has no gradient; pass NULL");
}

TEST(MaskGradient, belongs_to_the_backward_pass) {
  for (const auto& [pass, name] : {std::pair{OCTET_FORWARD, "forward"}, {OCTET_JVP, "jvp"}}) {
    Call call(pass);
    call.arguments.mask = &call.mask, call.arguments.dmask = &call.dmask;
    expect_invalid(call, std::string("dmask: given to a ") + name + " pass, which has no use for it; pass NULL");
  }
}

TEST(MaskGradient, has_the_shape_of_the_mask) {
  auto narrow = complete(), wide = complete();
  narrow->dmask.shape[0] = 1;
  expect_invalid(*narrow, "dmask: shape [1, 4, 5, 7], expected [2, 4, 5, 7] (shape of mask)");
  wide->mask.shape[2] = 1;
  expect_invalid(*wide, "dmask: shape [2, 4, 5, 7], expected [2, 4, 1, 7] (shape of mask)");
}

TEST(MaskGradient, is_f32) {
  for (const auto& [dtype, name] : {std::pair{OCTET_F64, "f64"}, {OCTET_BF16, "bf16"}, {OCTET_F16, "f16"}}) {
    auto call = complete(), oracle = complete(OCTET_PRECISION_F64);
    call->dmask.dtype = oracle->dmask.dtype = dtype;
    expect_invalid(*call, std::string("dmask: dtype ") + name + ", allowed: f32");
    if (dtype == OCTET_F64)
      expect_accepted(*oracle);
    else
      expect_invalid(*oracle, std::string("dmask: dtype ") + name + ", allowed: f32, f64");
  }
  octet_quantization how = OCTET_QUANTIZATION_INIT;
  auto coded = complete();
  coded->dmask.quantization = &how;
  expect_invalid(*coded, "dmask: has a quantization, which only q, k and v may have; leave it NULL");
}

TEST(MaskGradient, has_memory_of_its_own) {
  auto broadcast = complete(), mask = complete(), dq = complete();
  broadcast->dmask.stride[1] = 0;
  expect_invalid(*broadcast, "dmask: strides [140, 0, 7, 1] with shape [2, 4, 5, 7] put several elements of an output");
  mask->mask.data = mask->dmask.data;
  expect_invalid(*mask, "dmask: its memory overlaps that of mask");
  dq->dmask.data = dq->dq.data;
  expect_invalid(*dq, "dq: its memory overlaps that of dmask");
}

// A program compiled before dmask came passes a struct that ends with dropout_seed.
TEST(MaskGradient, smaller_structs_have_none) {
  auto call = complete();
  call->arguments.size = offsetof(octet_arguments, dmask);
  call->dmask.dtype = OCTET_BOOL;  // would be rejected
  expect_accepted(*call);
}

}  // namespace
}  // namespace octet::test
