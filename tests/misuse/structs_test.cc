// Sizes, null pointers, enums and messages: what can be wrong before any tensor is looked at.
#include <algorithm>
#include <cstddef>
#include <thread>

#include "misuse/calls.h"

namespace octet::test {
namespace {

// Returns whether no byte of an output has been written.
bool untouched(const octet_tensor& t) {
  const auto* bytes = static_cast<const unsigned char*>(t.data);
  return std::all_of(bytes, bytes + kSlot, [](unsigned char b) { return b == Memory::kPoison; });
}

constexpr octet_pass kPasses[] = {OCTET_FORWARD, OCTET_BACKWARD, OCTET_JVP};

TEST(Structs, the_unspoilt_calls_are_accepted) {
  for (const octet_pass pass : kPasses) {
    Call call(pass);
    expect_accepted(call);
  }
}

TEST(Structs, null_pointers_are_rejected) {
  Call call(OCTET_FORWARD);
  size_t bytes = 0;
  EXPECT_EQ(octet_workspace_size(nullptr, &call.arguments, &bytes), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "attention: NULL");
  EXPECT_EQ(octet_workspace_size(&call.attention, nullptr, &bytes), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "arguments: NULL");
  EXPECT_EQ(octet_workspace_size(&call.attention, &call.arguments, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "bytes: NULL");
  EXPECT_EQ(octet_run(nullptr, &call.arguments, nullptr, 0, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_run(&call.attention, nullptr, nullptr, 0, nullptr), OCTET_INVALID_ARGUMENT);
}

TEST(Structs, text_functions_check_their_buffer) {
  Call call(OCTET_FORWARD);
  size_t length = 0;
  EXPECT_EQ(octet_info(nullptr, 0, nullptr), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "length: NULL");
  EXPECT_EQ(octet_info(nullptr, 10, &length), OCTET_INVALID_ARGUMENT);
  EXPECT_STREQ(octet_message(), "text: NULL with capacity 10");
  call.attention.backend = "cpu";  // alone in the text
  ASSERT_EQ(octet_explain(&call.attention, &call.arguments, nullptr, 0, &length), OCTET_OK);
  char text[8];
  std::memset(text, 'x', sizeof text);
  size_t again = 0;
  ASSERT_EQ(octet_explain(&call.attention, &call.arguments, text, 4, &again), OCTET_OK);
  EXPECT_EQ(again, length);
  EXPECT_EQ(std::string(text), "cpu");
  EXPECT_EQ(text[4], 'x') << "wrote beyond the capacity";
}

// The sizes that the structs had in octet.h 0.1.0, the first: the smallest.
constexpr uint32_t kAttention = 80, kArguments = 168, kTensor = 96, kQuantization = 56;

std::string sizes(uint32_t found, uint32_t first, size_t known) {
  return "size " + std::to_string(found) + ", allowed: a multiple of 8 from " + std::to_string(first) +
         " (octet 0.1.0) to 4096; octet " + octet_version() + " has " + std::to_string(known);
}

TEST(Structs, sizes_that_no_header_has_are_rejected) {
  for (const uint32_t wrong : {0u, 1u, 48u, 164u, 201u, 4104u, ~0u}) {
    Call a(OCTET_FORWARD), b(OCTET_FORWARD), c(OCTET_FORWARD), d(OCTET_FORWARD, OCTET_PRECISION_INT8);
    a.attention.size = wrong;
    expect_invalid(a, "octet_attention: " + sizes(wrong, kAttention, sizeof(octet_attention)));
    b.arguments.size = wrong;
    expect_invalid(b, "octet_arguments: " + sizes(wrong, kArguments, sizeof(octet_arguments)));
    c.v.size = wrong;
    expect_invalid(c, "v: octet_tensor: " + sizes(wrong, kTensor, sizeof(octet_tensor)));
    octet_quantization how = OCTET_QUANTIZATION_INIT;
    d.q.dtype = OCTET_I8, d.q.quantization = &how, how.size = wrong;
    expect_invalid(d, "q: octet_quantization: " + sizes(wrong, kQuantization, sizeof(octet_quantization)));
  }
}

TEST(Structs, of_a_smaller_struct_the_missing_fields_are_zero) {
  Call whole(OCTET_BACKWARD), cut(OCTET_BACKWARD), gone(OCTET_BACKWARD);
  for (Call* c : {&whole, &cut, &gone}) c->arguments.sinks = &c->sinks, c->arguments.dsinks = &c->dsinks;
  expect_accepted(whole);
  EXPECT_FALSE(untouched(whole.dsinks));
  // Up to dlse: dsinks lies behind, whatever the memory there holds.
  cut.arguments.size = offsetof(octet_arguments, dsinks);
  expect_accepted(cut);
  EXPECT_TRUE(untouched(cut.dsinks));
  gone.arguments.size = kArguments;
  std::memset(reinterpret_cast<char*>(&gone.arguments) + kArguments, 0xff, sizeof(octet_arguments) - kArguments);
  expect_accepted(gone);
}

// A struct of octet.h that a newer one has given more fields.
template <class Struct>
struct Newer {
  Struct known;
  unsigned char more[24] = {};

  explicit Newer(const Struct& s) : known(s) { known.size = sizeof *this; }
};

TEST(Structs, larger_ones_are_accepted_where_the_rest_is_zero) {
  Call call(OCTET_FORWARD);
  Newer attention(call.attention);
  Newer q(call.q);
  call.arguments.q = &q.known;
  Newer arguments(call.arguments);
  const auto run = [&] {
    return octet_run(&attention.known, &arguments.known, call.workspace.data(), call.workspace.size(), nullptr);
  };
  const auto rejection = [](const char* label, size_t known, int byte) {
    return label + (": size " + std::to_string(known + 24)) + ", but octet " + octet_version() + " knows " +
           std::to_string(known) + " bytes of it, and byte " + std::to_string(byte) + " is 1; allowed: size " +
           std::to_string(known) + ", or zeros in all other bytes";
  };
  attention.more[0] = 1;
  EXPECT_EQ(run(), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_message(), rejection("octet_attention", sizeof(octet_attention), sizeof(octet_attention)));
  attention.more[0] = 0, arguments.more[23] = 1;
  EXPECT_EQ(run(), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_message(), rejection("octet_arguments", sizeof(octet_arguments), sizeof(octet_arguments) + 23));
  arguments.more[23] = 0, q.more[8] = 1;
  EXPECT_EQ(run(), OCTET_INVALID_ARGUMENT);
  EXPECT_EQ(octet_message(), rejection("q: octet_tensor", sizeof(octet_tensor), sizeof(octet_tensor) + 8));
  EXPECT_TRUE(call.outputs.untouched());
  q.more[8] = 0;
  EXPECT_EQ(run(), OCTET_OK) << octet_message();
  EXPECT_FALSE(call.outputs.untouched());
}

TEST(Structs, missing_tensors_are_named) {
  const auto without = [](octet_pass pass, const char* label, auto member) {
    Call call(pass);
    call.arguments.*member = nullptr;
    expect_invalid(call, std::string(label) + ": NULL, but a ", {"pass needs it"});
  };
  for (const octet_pass pass : kPasses) {
    without(pass, "q", &octet_arguments::q);
    without(pass, "k", &octet_arguments::k);
    without(pass, "v", &octet_arguments::v);
    without(pass, "o", &octet_arguments::o);
  }
  without(OCTET_BACKWARD, "lse", &octet_arguments::lse);
  without(OCTET_BACKWARD, "do", &octet_arguments::do_);
  without(OCTET_BACKWARD, "dq", &octet_arguments::dq);
  without(OCTET_BACKWARD, "dk", &octet_arguments::dk);
  without(OCTET_BACKWARD, "dv", &octet_arguments::dv);
  without(OCTET_JVP, "to", &octet_arguments::to);
}

TEST(Structs, tensors_without_use_are_rejected) {
  const auto with = [](octet_pass pass, const char* label, auto member, octet_tensor Call::*tensor) {
    Call call(pass);
    call.arguments.*member = &(call.*tensor);
    expect_invalid(call, std::string(label) + ": given to a ", {"which has no use for it; pass NULL"});
  };
  with(OCTET_FORWARD, "do", &octet_arguments::do_, &Call::do_);
  with(OCTET_FORWARD, "dq", &octet_arguments::dq, &Call::dq);
  with(OCTET_FORWARD, "to", &octet_arguments::to, &Call::to);
  with(OCTET_BACKWARD, "tq", &octet_arguments::tq, &Call::tq);
  with(OCTET_BACKWARD, "to", &octet_arguments::to, &Call::to);
  with(OCTET_JVP, "do", &octet_arguments::do_, &Call::do_);
  with(OCTET_JVP, "dv", &octet_arguments::dv, &Call::dv);
  with(OCTET_JVP, "o_residual", &octet_arguments::o_residual, &Call::o_residual);
}

TEST(Structs, unknown_enums_are_rejected_with_the_choices) {
  struct Field {
    uint32_t octet_attention::*field;
    uint32_t value;
    const char *start, *choices;
  };
  const Field fields[] = {
      {&octet_attention::precision, 0, "precision: found 0, allowed: ", "1 (f64), 2 (f32)"},
      {&octet_attention::precision, 11, "precision: found 11, allowed: ", "10 (sagebwd)"},
      {&octet_attention::alignment, 3, "alignment: found 3, allowed: ", "1 (top-left), 2 (bottom-right)"},
      {&octet_attention::bias_correction, 5,
       "bias_correction: found 5, allowed: ", "0 (f16), 1 (none), 2 (beta), 3 (exact_delta), 4 (gproj)"},
      {&octet_attention::hadamard, 3, "hadamard: found 3, allowed: ", "0 (auto), 1 (on), 2 (off)"},
      {&octet_attention::smooth_q, 9, "smooth_q: found 9, allowed: ", "0 (auto), 1 (on), 2 (off)"},
      {&octet_attention::deterministic, 2, "deterministic: found 2, allowed: ", "0, 1"},
      {&octet_attention::threads, 4097, "threads: found 4097, allowed: ", "0 (all) to 4096"},
      {&octet_attention::mask, 4, "mask: found 4, allowed: ", "OCTET_MASK_CAUSAL (1)"},
      {&octet_attention::mask, ~0u, "mask: found 4294967295, allowed: ", "OCTET_MASK_WINDOW (2)"},
  };
  for (const Field& f : fields) {
    Call call(OCTET_FORWARD);
    call.attention.*f.field = f.value;
    expect_invalid(call, f.start, {f.choices});
  }
  Call pass(OCTET_FORWARD);
  pass.arguments.pass = 3;
  expect_invalid(pass, "pass: found 3, allowed: 0 (forward), 1 (backward), 2 (jvp)");
}

TEST(Structs, unknown_backends_are_rejected_with_the_known) {
  Call call(OCTET_FORWARD);
  call.attention.backend = "tpu";
  const std::string start = "backend: unknown name \"tpu\"; known: ";
  expect_invalid(call, start);
  EXPECT_THAT(std::string(octet_message()),
              testing::AnyOf(start + "cpu, reference", start + "sm90, sm80, cpu, reference"));
}

TEST(Structs, odd_bytes_of_names_are_told_as_ascii) {
  Call call(OCTET_FORWARD), environment(OCTET_FORWARD);
  call.attention.backend = "caf\xe9\x1b[31m\x7f \"x";
  expect_invalid(call, R"(backend: unknown name "caf\xe9\x1b[31m\x7f "x"; known: )");
  ASSERT_EQ(setenv("OCTET_BACKEND", "\xff\n", 1), 0);
  expect_invalid(environment, R"(backend: unknown name "\xff\x0a"; known: )");
  ASSERT_EQ(unsetenv("OCTET_BACKEND"), 0);
}

TEST(Structs, the_environment_names_a_backend_unless_the_call_does) {
  ASSERT_EQ(setenv("OCTET_BACKEND", "nowhere", 1), 0);
  Call call(OCTET_FORWARD), named(OCTET_FORWARD);
  expect_invalid(call, "backend: unknown name \"nowhere\"");
  named.attention.backend = "cpu";
  expect_accepted(named);
  ASSERT_EQ(unsetenv("OCTET_BACKEND"), 0);
}

TEST(Structs, messages_belong_to_their_thread) {
  Call call(OCTET_FORWARD);
  call.attention.precision = 0;
  ASSERT_NE(call.run(), OCTET_OK);
  const std::string here = octet_message();
  std::thread([] {
    EXPECT_STREQ(octet_message(), "") << "a new thread starts without a message";
    EXPECT_EQ(octet_info(nullptr, 0, nullptr), OCTET_INVALID_ARGUMENT);
    EXPECT_STREQ(octet_message(), "length: NULL");
  }).join();
  EXPECT_EQ(octet_message(), here);
  Call good(OCTET_FORWARD);
  ASSERT_EQ(good.run(), OCTET_OK);
  EXPECT_EQ(octet_message(), here) << "success keeps the message of the last failure";
}

}  // namespace
}  // namespace octet::test
