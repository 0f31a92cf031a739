// Sinks and the derivatives of lse: their shapes, types, passes and memory.
#include <memory>

#include "misuse/calls.h"

namespace octet::test {
namespace {

// With every tensor of sinks and lse that the pass has.
std::unique_ptr<Call> complete(octet_pass pass, octet_precision precision = OCTET_PRECISION_F32) {
  auto call = std::make_unique<Call>(pass, precision);
  octet_arguments& args = call->arguments;
  args.sinks = &call->sinks;
  if (pass == OCTET_BACKWARD) args.dsinks = &call->dsinks, args.dlse = &call->dlse;
  if (pass == OCTET_JVP) args.tsinks = &call->tsinks, args.tlse = &call->tlse;
  return call;
}

constexpr octet_pass kPasses[] = {OCTET_FORWARD, OCTET_BACKWARD, OCTET_JVP};

TEST(Sinks, are_taken_by_every_pass) {
  for (const octet_pass pass : kPasses)
    for (const octet_precision precision : {OCTET_PRECISION_F64, OCTET_PRECISION_F32}) {
      auto call = complete(pass, precision), shared = complete(pass, precision), broadcast = complete(pass, precision);
      expect_accepted(*call);
      for (octet_tensor* t : {&shared->sinks, &shared->dsinks, &shared->tsinks}) t->shape[0] = 1;
      expect_accepted(*shared);
      broadcast->sinks.stride[0] = broadcast->sinks.stride[1] = 0;
      expect_accepted(*broadcast);
    }
}

TEST(Sinks, have_one_shape) {
  const std::pair<int, int64_t> wrongs[] = {{0, 3}, {0, 0}, {1, 2}, {2, 5}, {3, 8}};
  for (const auto& [dimension, size] : wrongs) {
    auto call = complete(OCTET_FORWARD);
    call->sinks.shape[dimension] = size;
    expect_invalid(*call, "sinks: shape [", {"expected [2, 4, 1, 1] (1 or the batch of q, heads of q, 1, 1)"});
  }
  auto dsinks = complete(OCTET_BACKWARD), tsinks = complete(OCTET_JVP);
  dsinks->dsinks.shape[0] = 1;
  expect_invalid(*dsinks, "dsinks: shape [1, 4, 1, 1], expected [2, 4, 1, 1] (shape of sinks)");
  tsinks->sinks.shape[0] = 1;
  expect_invalid(*tsinks, "tsinks: shape [2, 4, 1, 1], expected [1, 4, 1, 1] (shape of sinks)");
}

TEST(Sinks, gradients_of_lse_have_its_shape) {
  auto dlse = complete(OCTET_BACKWARD), tlse = complete(OCTET_JVP);
  dlse->dlse.shape[2] = 1;
  expect_invalid(*dlse, "dlse: shape [2, 4, 1, 1], expected [2, 4, 5, 1] (shape of lse)");
  tlse->tlse.shape[3] = 2;
  expect_invalid(*tlse, "tlse: shape [2, 4, 5, 2], expected [2, 4, 5, 1] (shape of lse)");
}

TEST(Sinks, are_f32) {
  struct Tensor {
    octet_pass pass;
    octet_tensor Call::*tensor;
    const char* label;
  };
  const Tensor tensors[] = {{OCTET_FORWARD, &Call::sinks, "sinks"},
                            {OCTET_BACKWARD, &Call::dsinks, "dsinks"},
                            {OCTET_BACKWARD, &Call::dlse, "dlse"},
                            {OCTET_JVP, &Call::tsinks, "tsinks"},
                            {OCTET_JVP, &Call::tlse, "tlse"}};
  for (const Tensor& t : tensors)
    for (const auto& [dtype, name] : {std::pair{OCTET_F64, "f64"}, {OCTET_BF16, "bf16"}, {OCTET_I8, "i8"}}) {
      auto call = complete(t.pass), oracle = complete(t.pass, OCTET_PRECISION_F64), coded = complete(t.pass);
      ((*call).*t.tensor).dtype = ((*oracle).*t.tensor).dtype = dtype;
      expect_invalid(*call, std::string(t.label) + ": dtype " + name + ", allowed: f32");
      if (dtype == OCTET_F64)
        expect_accepted(*oracle);
      else
        expect_invalid(*oracle, std::string(t.label) + ": dtype " + name + ", allowed: f32, f64");
      octet_quantization how = OCTET_QUANTIZATION_INIT;
      ((*coded).*t.tensor).quantization = &how;
      expect_invalid(*coded,
                     std::string(t.label) + ": has a quantization, which only q, k and v may have; leave it NULL");
    }
}

TEST(Sinks, derivatives_need_sinks) {
  auto dsinks = complete(OCTET_BACKWARD), tsinks = complete(OCTET_JVP);
  dsinks->arguments.sinks = tsinks->arguments.sinks = nullptr;
  expect_invalid(*dsinks, "dsinks: given without sinks, to which it belongs");
  expect_invalid(*tsinks, "tsinks: given without sinks, to which it belongs");
}

TEST(Sinks, belong_to_their_passes) {
  const auto rejected = [](octet_pass pass, auto set, const char* label, const char* pass_name) {
    auto call = complete(pass);
    set(*call);
    expect_invalid(*call,
                   std::string(label) + ": given to a " + pass_name + " pass, which has no use for it; pass NULL");
  };
  const auto dlse = [](Call& c) { c.arguments.dlse = &c.dlse; };
  const auto dsinks = [](Call& c) { c.arguments.dsinks = &c.dsinks; };
  const auto tsinks = [](Call& c) { c.arguments.tsinks = &c.tsinks; };
  const auto tlse = [](Call& c) { c.arguments.tlse = &c.tlse; };
  rejected(OCTET_FORWARD, dlse, "dlse", "forward");
  rejected(OCTET_FORWARD, dsinks, "dsinks", "forward");
  rejected(OCTET_FORWARD, tsinks, "tsinks", "forward");
  rejected(OCTET_FORWARD, tlse, "tlse", "forward");
  rejected(OCTET_BACKWARD, tsinks, "tsinks", "backward");
  rejected(OCTET_BACKWARD, tlse, "tlse", "backward");
  rejected(OCTET_JVP, dlse, "dlse", "jvp");
  rejected(OCTET_JVP, dsinks, "dsinks", "jvp");
}

TEST(Sinks, outputs_have_memory_of_their_own) {
  auto own = complete(OCTET_BACKWARD), input = complete(OCTET_BACKWARD), broadcast = complete(OCTET_BACKWARD);
  auto tangent = complete(OCTET_JVP), workspace = complete(OCTET_BACKWARD);
  own->dsinks.data = own->sinks.data;
  expect_invalid(*own, "dsinks: its memory overlaps that of sinks");
  input->dlse.data = input->dq.data;
  expect_invalid(*input, "dq: its memory overlaps that of dlse");
  broadcast->dsinks.stride[0] = 0;
  expect_invalid(*broadcast, "dsinks: strides [0, 1, 0, 1] with shape [2, 4, 1, 1] put several elements of an output");
  tangent->tlse.data = tangent->lse.data;
  expect_invalid(*tangent, "lse: its memory overlaps that of tlse");
  workspace->dsinks.data = workspace->workspace.data();
  EXPECT_EQ(workspace->run(), OCTET_INVALID_ARGUMENT);
  EXPECT_THAT(octet_message(), testing::HasSubstr("workspace: its memory overlaps that of dsinks"));
}

}  // namespace
}  // namespace octet::test
