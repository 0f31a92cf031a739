// What a GPU backend does not compute, it rejects with a reason of its own. Nothing runs, so the tensors are addresses
// without memory.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

// A problem that both backends solve, to be spoilt in one place.
struct Asked {
  Pass pass = Pass::forward;
  Attention attention{.precision = Precision::bf16, .backend = gpu_backend()};
  DType q_dtype = DType::bf16, k_dtype = DType::bf16, dtype = DType::bf16;  // of q, of k, of v and all else
  bool quantized_v = false;                                                 // int8, with a scale for each head
  DType mask = DType::none;
  Shape mask_shape{1, 1, 130, 250};
  bool alibi = false;
  bool training = false, residual = true;  // o_residual of a forward and of a backward pass
  int64_t heads = 4, tokens_q = 130, tokens_k = 250, dim = 64;
  int device = 0;
  bool dmask = false;
};

std::string answer_to(const Asked& x) {
  uintptr_t next = 0;
  const auto tensor = [&](DType dtype, const Shape& shape) {
    return Tensor(reinterpret_cast<void*>(++next << 42), dtype, shape, contiguous_strides(shape), Device::cuda,
                  x.device);
  };
  const Shape of_q{1, x.heads, x.tokens_q, x.dim}, of_k{1, 2, x.tokens_k, x.dim}, of_row{1, x.heads, x.tokens_q, 1};
  const auto like_q = [&] { return tensor(x.dtype, of_q); };
  const auto like_k = [&] { return tensor(x.dtype, of_k); };
  const Tensor q = tensor(x.q_dtype, of_q), k = tensor(x.k_dtype, of_k), o = like_q(), lse = tensor(DType::f32, of_row);
  Tensor v = like_k(), scale = tensor(DType::f32, {1, 2, 1, 1});
  octet_quantization quantization = OCTET_QUANTIZATION_INIT;
  quantization.operand = OCTET_OPERAND_V, quantization.granularity = OCTET_PER_TENSOR;
  quantization.scale = &scale;
  if (x.quantized_v) v.dtype = OCTET_I8, v.quantization = &quantization;
  Extras extras;
  if (x.mask != DType::none) extras.mask = tensor(x.mask, x.mask_shape);
  if (x.alibi) extras.alibi_slopes = tensor(DType::f32, {1, x.heads, 1, 1});
  if (x.attention.dropout_p != 0) extras.dropout_seed = tensor(DType::i32, {1, 1, 1, 4});
  switch (x.pass) {
    case Pass::forward:
      return explain(x.attention, Forward{.q = q,
                                          .k = k,
                                          .v = v,
                                          .o = o,
                                          .lse = lse,
                                          .o_residual = x.training ? like_q() : Tensor(),
                                          .extras = extras});
    case Pass::backward:
      return explain(x.attention, Backward{.q = q,
                                           .k = k,
                                           .v = v,
                                           .o = o,
                                           .lse = lse,
                                           .do_ = like_q(),
                                           .dq = like_q(),
                                           .dk = like_k(),
                                           .dv = like_k(),
                                           .o_residual = x.residual ? like_q() : Tensor(),
                                           .dmask = x.dmask ? tensor(DType::f32, x.mask_shape) : Tensor(),
                                           .extras = extras});
    case Pass::jvp:
      return explain(x.attention, Jvp{.q = q,
                                      .k = k,
                                      .v = v,
                                      .tq = like_q(),
                                      .tk = like_k(),
                                      .tv = like_k(),
                                      .o = o,
                                      .to = like_q(),
                                      .extras = extras});
  }
  return {};
}

Asked with_precision(Precision precision, Pass pass = Pass::forward) {
  Asked x{.pass = pass};
  x.attention.precision = precision;
  return x;
}

struct Rejected {
  Asked asked;
  std::string reason;
};

constexpr const char* kNoSmoothQ = "smooth_q is on; it takes auto and off, the reference backend and sm80 take on too";

// What neither backend computes.
std::vector<Rejected> rejected_by_both() {
  std::vector<Rejected> list;
  const auto add = [&](const std::string& reason) -> Asked& {
    list.push_back({{}, reason});
    return list.back().asked;
  };
  add("268435457 tokens; it takes up to 268435456").tokens_k = (int64_t{1} << 28) + 1;
  Asked& many = add("536870912 heads of 256 queries are more blocks than it can count");
  many.heads = int64_t{1} << 29, many.tokens_q = 256, many.dim = 8;
  Asked& gproj = add(
      "its backward pass has no bias_correction gproj, which the cpu computes; it has: f16, none, beta, exact_delta");
  gproj.pass = Pass::backward, gproj.attention.bias_correction = BiasCorrection::gproj;
  return list;
}

std::vector<Rejected> rejected_by_sm80() {
  std::vector<Rejected> list = rejected_by_both();
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    list.push_back({with_precision(Precision::int8, pass),
                    std::string("v is quantized i8; its int8 ") +
                        (pass == Pass::forward ? "forward pass with o_residual" : "backward pass") +
                        " takes f32, f16, bf16 and e4m3; octet_dequantize gives these"});
    list.back().asked.quantized_v = list.back().asked.training = true;
  }
  list.push_back({{.pass = Pass::jvp, .quantized_v = true},
                  "v is quantized i8; its jvp takes f32, f16, bf16 and e4m3 as they are"});
  const std::string has = "; it has: f32, f16, bf16, int8, int8_f16, int8_fp8, fp8, fp8_raw, sagebwd";
  list.push_back({with_precision(Precision::f64), "it has no f64" + has});
  list.push_back({with_precision(Precision::sagebwd, Pass::backward),
                  "it has no sagebwd backward pass for head dim 160; it has: up to 128"});
  list.back().asked.dim = 160;
  list.push_back(
      {with_precision(Precision::sagebwd, Pass::backward),
       "v is quantized i8; its sagebwd backward pass takes f32, f16, bf16 and e4m3; octet_dequantize gives these"});
  list.back().asked.quantized_v = true;
  list.push_back({with_precision(Precision::fp8, Pass::backward), "it has no fp8 backward pass; it has: forward"});
  list.push_back({with_precision(Precision::fp8), "it has no dropout in fp8; it has: f32, f16, bf16, int8_f16"});
  list.back().asked.attention.dropout_p = .1;
  list.push_back(
      {with_precision(Precision::int8, Pass::backward),
       "its int8 backward pass needs o_residual, which is NULL; a forward pass that is asked for it writes it, "
       "with the o and lse of this backward pass"});
  list.back().asked.residual = false;
  for (const Precision p : {Precision::int8, Precision::sagebwd}) {
    list.push_back({with_precision(p, Pass::backward),
                    "it has no gradient of masks in " + std::string(name(p)) + "; it has: f32, f16, bf16"});
    list.back().asked.mask = DType::f32, list.back().asked.dmask = true;
  }
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    list.push_back(
        {with_precision(Precision::int8, pass), "it has no dropout in int8; it has: f32, f16, bf16, int8_f16"});
    list.back().asked.attention.dropout_p = .1;
  }
  list.push_back({with_precision(Precision::int8, Pass::backward),
                  "it has no int8 backward pass for head dim 160; it has: up to 128"});
  list.back().asked.dim = 160;
  list.push_back({with_precision(Precision::int8),
                  "it has no int8 forward pass with o_residual for head dim 160; it has: up to 128"});
  list.back().asked.training = true, list.back().asked.dim = 160;
  list.push_back({with_precision(Precision::int8, Pass::jvp), "it has no int8 jvp pass; it has: forward, backward"});
  list.push_back({with_precision(Precision::int8),
                  "smooth_q is on; its int8 forward pass with o_residual takes auto and off, as the backward pass that "
                  "reads its o "
                  "and lse smooths no q"});
  list.back().asked.training = true, list.back().asked.attention.smooth_q = Switch::on;
  list.push_back({{.pass = Pass::jvp}, "it has no bf16 jvp for head dim 512; it has: up to 256"});
  list.back().asked.dim = 512;
  list.push_back({with_precision(Precision::f32, Pass::backward),
                  "it has no f32 backward pass for head dim 512; it has: up to 256"});
  list.back().asked.dim = 512;
  list.push_back({{.pass = Pass::backward}, "it has no gradient of masks for head dim 512; it has: up to 256"});
  list.back().asked.dim = 512, list.back().asked.mask = DType::f32, list.back().asked.dmask = true;
  list.push_back(
      {with_precision(Precision::int8_f16), "it has no int8_f16 forward pass for head dim 512; it has: up to 256"});
  list.back().asked.dim = 512;
  list.push_back({{.device = 200}, "device 200 is no GPU of compute capability 8.0 or later"});
  return list;
}

std::vector<Rejected> rejected_by_sm90() {
  std::vector<Rejected> list = rejected_by_both();
  const auto add = [&](const Asked& asked, const std::string& reason) -> Asked& {
    list.push_back({asked, reason});
    return list.back().asked;
  };
  for (const Precision p : {Precision::f32, Precision::sagebwd})
    add(with_precision(p),
        "it has no " + std::string(name(p)) + "; it has: f16, bf16, int8, int8_f16, int8_fp8, fp8, fp8_raw");
  for (const Precision p : {Precision::int8, Precision::fp8})
    add(with_precision(p, Pass::backward), "it has no " + std::string(name(p)) + " backward pass; it has: forward");
  add(with_precision(Precision::int8, Pass::jvp), "it has no int8 jvp pass; it has: forward");
  const Asked jvp{.pass = Pass::jvp};
  add(jvp, "its jvp has no head dim 136; it has: up to 128").dim = 136;
  add(jvp, "its jvp has no alibi_slopes").alibi = true;
  add(jvp, "its jvp has no dropout").attention.dropout_p = .1;
  add(jvp, "it has no softcap").attention.softcap = 2.f;
  add(with_precision(Precision::int8), "it has no int8 for head dim 160; it has: up to 128").dim = 160;
  add(with_precision(Precision::int8), kNoSmoothQ).attention.smooth_q = Switch::on;
  add(with_precision(Precision::fp8), "q is e4m3 and k is bf16; it takes such a q with a k of e4m3").q_dtype =
      DType::e4m3;
  add(jvp, "its mask tensor is bf16; it takes bool ones of shape [batch or 1, 1, 1, keys]").mask = DType::bf16;
  add(jvp, "its mask tensor has shape [1, 1, 130, 250]; it takes bool ones of shape [batch or 1, 1, 1, keys]").mask =
      DType::boolean;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Asked of_pass{.pass = pass};
    add(of_pass, "its mask tensor is f32; it takes bool and bf16 ones beside these inputs").mask = DType::f32;
    Asked& wide_mask =
        add(of_pass, std::string("it has no mask tensors but key masks for head dim 160; it has: up to ") +
                         (pass == Pass::forward ? "128" : "64"));
    wide_mask.mask = DType::boolean, wide_mask.dim = 160;
    const auto with_key_mask = [&](const std::string& beside) -> Asked& {
      Asked& x = add(of_pass, "it takes no mask tensor together with " + beside);
      x.mask = DType::boolean, x.mask_shape = {1, 1, 1, 250};
      return x;
    };
    with_key_mask("alibi_slopes").alibi = true;
    add(of_pass, "it has no softcap").attention.softcap = 2.f;
    Asked& dropped_mask = add(of_pass, "it takes no mask tensors but key masks together with dropout");
    dropped_mask.mask = DType::boolean, dropped_mask.attention.dropout_p = .1;
    Asked& wide_dropout = add(of_pass, "it has no dropout for head dim 160; it has: up to 128");
    wide_dropout.attention.dropout_p = .1, wide_dropout.dim = 160;
    Asked& both = add(of_pass, "it has no dropout together with alibi_slopes");
    both.attention.dropout_p = .1, both.alibi = true;
    Asked& wide = add(of_pass, "it has no alibi_slopes for head dim 160; it has: up to 128");
    wide.alibi = true, wide.dim = 160;
  }
  for (const Precision p : {Precision::int8, Precision::int8_f16, Precision::fp8})
    add(with_precision(p), "it has no alibi_slopes in " + std::string(name(p)))
        .alibi = true,
   add(with_precision(p), "it has no dropout in " + std::string(name(p))).attention.dropout_p = .1;
  Asked& beta = add({}, "it has no alibi_slopes with bias_correction beta");
  beta.alibi = true, beta.attention.bias_correction = BiasCorrection::beta;
  Asked& deterministic = add({.pass = Pass::backward}, "it has no alibi_slopes in a deterministic backward pass");
  deterministic.alibi = true, deterministic.attention.deterministic = true;
  Asked& dmask = add({.pass = Pass::backward}, "it has no gradient of masks");
  dmask.mask = DType::f32, dmask.dmask = true;
  Asked& biased =
      add({.pass = Pass::backward}, "it has no mask tensors but key masks in a deterministic backward pass");
  biased.mask = DType::bf16, biased.attention.deterministic = true;
  add(with_precision(Precision::int8_f16),
      "its mask tensor is bf16; it takes bool ones of shape [batch or 1, 1, 1, keys]")
      .mask = DType::bf16;
  add({}, "k is e4m3; its bf16 takes f32, f16 and bf16").k_dtype = DType::e4m3;
  add({}, "v is quantized; its bf16 takes f32, f16 and bf16").quantized_v = true;
  add({}, "device 200 is no GPU of compute capability 9.0").device = 200;
  return list;
}

TEST(Rejections, name_what_is_missing) {
  const std::string backend = gpu_backend();
  if (tests_sm80())
    for (Asked x : {with_precision(Precision::bf16), with_precision(Precision::int8), with_precision(Precision::fp8)}) {
      x.quantized_v = true;
      const std::string answer = answer_to(x);
      EXPECT_TRUE(answer.starts_with("sm80: chosen, forward ")) << answer;
      EXPECT_EQ(answer.find(", with v decoded to f32") == std::string::npos, x.attention.precision == Precision::int8)
          << answer;
    }
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::jvp}) {
    const std::string answer = answer_to({.pass = pass});
    EXPECT_TRUE(answer.starts_with(backend + ": chosen, " + name(pass))) << answer;
  }
  for (const Rejected& x : tests_sm80() ? rejected_by_sm80() : rejected_by_sm90())
    EXPECT_EQ(answer_to(x.asked), backend + ": no, " + x.reason + '\n');
}

// A bool mask that is the same for all heads and queries.
TEST(Choice, of_sm90_with_a_key_mask) {
  if (tests_sm80()) GTEST_SKIP() << "these are the choices of another backend";
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::string answer = answer_to({.pass = pass, .mask = DType::boolean, .mask_shape = {1, 1, 1, 250}});
    EXPECT_TRUE(answer.starts_with("sm90: chosen, ")) << answer;
    EXPECT_NE(answer.find(", seen keys copied side by side"), std::string::npos) << answer;
  }
}

// Whatever the environment names: sm80 is chosen for what sm90 declines of a precision that both have, and of f32.
TEST(Choice, of_sm80_where_sm90_declines) {
  std::vector<Asked> all(16);
  all[0].pass = Pass::jvp, all[0].dim = 160;
  all[1].attention.precision = Precision::f32;
  all[2].mask = DType::f32;
  all[3].mask = DType::f32, all[3].pass = Pass::backward;
  all[4].attention.softcap = 2.f;
  all[5].alibi = true, all[5].pass = Pass::backward, all[5].dim = 160;
  all[6].tokens_q = 1, all[6].tokens_k = 4096;  // it could, but would leave most multiprocessors idle
  all[7].k_dtype = DType::e4m3;
  all[8].attention.precision = Precision::int8, all[8].dim = 160;
  all[9].attention.precision = Precision::int8, all[9].attention.softcap = 2.f;
  all[10].attention.precision = Precision::int8_f16, all[10].mask = DType::bf16;
  all[11].attention.precision = Precision::fp8, all[11].q_dtype = DType::e4m3;
  all[12].attention.precision = Precision::int8_fp8, all[12].dim = 160;
  all[13].attention.precision = Precision::fp8_raw, all[13].alibi = true;
  all[14].mask = DType::f32, all[14].pass = Pass::backward, all[14].dmask = true;
  all[15].mask = DType::boolean, all[15].tokens_k = 1200;  // the mask may be causal
  all[15].mask_shape = {1, 1, 130, 1200};
  for (Asked& x : all) {
    x.attention.backend = "";
    const std::string answer = answer_to(x);
    EXPECT_TRUE(answer.starts_with("sm90: no, ")) << answer;
    EXPECT_NE(answer.find("sm80: chosen, "), std::string::npos) << answer;
  }
}

TEST(Choice, of_sm80_tells_the_tiles_of_dmask) {
  if (!tests_sm80()) GTEST_SKIP() << "these are the choices of another backend";
  Asked x{.pass = Pass::backward, .mask = DType::f32, .dmask = true};
  for (const auto& [dim, tiles] : {std::pair{64, "64 x 128"}, {128, "64 x 64"}, {256, "32 x 32"}}) {
    x.dim = dim;
    EXPECT_NE(answer_to(x).find(std::string(", dmask in ") + tiles + " tiles"), std::string::npos) << answer_to(x);
  }
  x.dmask = false;
  EXPECT_EQ(answer_to(x).find("dmask"), std::string::npos) << answer_to(x);
}

TEST(Rejections, of_tensors_on_a_gpu_by_the_cpu) {
  Asked x;
  x.attention.backend = "cpu";
  EXPECT_EQ(answer_to(x), "cpu: no, the tensors are on cuda; it works on cpu tensors\n");
}

}  // namespace
}  // namespace octet::test
