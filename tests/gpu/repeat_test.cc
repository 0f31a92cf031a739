// Problems drawn at random, larger than those of random_test, called again and again: each call gives the bits of the
// first. Which thread block takes which block, and when, differs from call to call, so that a race that spoils one call
// of a hundred shows itself here; one that makes a kernel wait forever does not let the program end.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "gpu/gpu_tensor.h"
#include "gpu/place.h"
#include "support/cases.h"
#include "support/tensors.h"

namespace octet::test {
namespace {

struct Problem {
  Attention attention;
  Pass pass;  // the backward pass follows a forward pass
  int64_t batch, heads, kv_heads, tokens_q, tokens_k, dim;
  DType type;         // of all tensors but statistics
  bool tokens_first;  // memory is [batch, token, head, dim]
  bool sinks, dlse, alibi, masked, padded;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k;
};

std::string text(const Problem& x) {
  std::ostringstream out;
  const Attention& a = x.attention;
  out << name(x.pass) << ' ' << name(a.precision) << suffix_of(a.bias_correction)
      << (a.deterministic ? ", deterministic" : "") << ", batch " << x.batch << ", heads " << x.heads << " of "
      << x.kv_heads << ", tokens " << x.tokens_q << " x " << x.tokens_k << ", head dim " << x.dim
      << (x.type == DType::f32 ? ", f32" : "") << (x.tokens_first ? ", tokens first" : "") << (x.sinks ? ", sinks" : "")
      << (x.dlse ? ", dlse" : "") << (x.alibi ? ", alibi" : "") << (x.masked ? ", mask" : "")
      << (x.padded ? ", key mask" : "") << (a.softcap > 0 ? ", softcap" : "");
  if (a.causal) out << ", causal";
  if (a.window) out << ", window " << (*a.window)[0] << ' ' << (*a.window)[1];
  if (a.alignment != Alignment::unspecified)
    out << (a.alignment == Alignment::top_left ? ", top left" : ", bottom right");
  for (const auto* first : {&x.cu_seqlens_q, &x.cu_seqlens_k}) {
    if (!first->empty()) out << ", packed";
    for (const int32_t token : *first) out << ' ' << token;
  }
  return out.str();
}

Problem draw(uint64_t seed) {
  std::mt19937_64 generator(seed);
  const auto one_of = [&]<class T>(const std::vector<T>& choices) { return choices[generator() % choices.size()]; };
  const auto happens = [&](int percent) { return static_cast<int>(generator() % 100) < percent; };
  Problem x{};
  using enum Precision;
  const std::vector<Precision> precisions = tests_sm80()
                                                ? std::vector{bf16, bf16, bf16, f16, f32, int8, int8_f16, sagebwd}
                                                : std::vector{bf16, bf16, bf16, f16, int8, int8_f16, int8_fp8, fp8};
  Attention& a = x.attention;
  a.precision = one_of(precisions);
  a.backend = gpu_backend();
  const bool of_8_bits = a.precision != bf16 && a.precision != f16 && a.precision != f32;
  x.dim = of_8_bits ? one_of(std::vector<int64_t>{64, 128})
                    : one_of(std::vector<int64_t>{40, 64, 64, 80, 96, 128, 128, 160, 192, 256, 256});
  const bool has_jvp = gpu_computes(Pass::jvp, a.precision) && x.dim <= gpu_most_dim(a.precision, Pass::jvp);
  x.pass = !of_8_bits && happens(80) ? Pass::backward : has_jvp ? Pass::jvp : Pass::forward;
  if (a.precision == bf16 && x.pass != Pass::jvp) {
    using enum BiasCorrection;
    a.bias_correction = one_of(std::vector{BiasCorrection::f16, exact_delta, none, beta});
  }
  a.deterministic = happens(40);
  x.type = a.precision == f32 || happens(20) ? DType::f32 : a.precision == Precision::f16 ? DType::f16 : DType::bf16;
  const std::vector<int64_t> lengths = {1, 16, 100, 128, 300, 777, 1024, 4000, 16384, 60000};
  const int64_t most_work = (a.precision == f32 ? 1 : 8) * int64_t{10'000'000'000}, most_numbers = 12'000'000;
  do {
    x.batch = one_of(std::vector<int64_t>{1, 1, 2, 5});
    x.kv_heads = one_of(std::vector<int64_t>{1, 2, 3, 12, 32});
    x.heads = x.kv_heads * one_of(std::vector<int64_t>{1, 1, 2, 4});
    x.tokens_q = one_of(lengths), x.tokens_k = one_of(lengths);
  } while (x.batch * x.heads * x.dim * x.tokens_q * x.tokens_k > most_work ||
           x.batch * x.heads * x.dim * (x.tokens_q + x.tokens_k) > most_numbers);
  x.tokens_first = happens(50);
  x.sinks = happens(20), x.dlse = x.pass == Pass::backward && happens(20);
  // A backward pass follows a forward pass of the same kind.
  if (gpu_takes_alibi(x.pass, a, x.dim) && gpu_takes_alibi(Pass::forward, a, x.dim)) x.alibi = happens(15);
  if (gpu_has_general_logits()) {
    x.masked = x.tokens_q * x.tokens_k <= 4'000'000 && happens(30);
    a.softcap = happens(15) ? 20.f : 0.f;
  }
  if (happens(35)) {
    a.causal = true;
  } else if (happens(50)) {
    a.window = {one_of(std::vector<int64_t>{-1, 0, 10, 100, 1000, x.tokens_k / 3}),
                one_of(std::vector<int64_t>{-1, 0, 7, 200, x.tokens_k / 2})};
  }
  if (a.causal || a.window) a.alignment = one_of(std::vector{Alignment::top_left, Alignment::bottom_right});
  if (x.batch == 1 && !x.masked && happens(30)) {
    const int64_t sequences = one_of(std::vector<int64_t>{1, 3, 12});
    const auto cut = [&](int64_t tokens) {
      std::vector<int32_t> first = {0, static_cast<int32_t>(tokens)};
      for (int64_t i = 1; i < sequences; ++i)
        first.push_back(static_cast<int32_t>(generator() % static_cast<uint64_t>(tokens + 1)));
      std::sort(first.begin(), first.end());
      return first;
    };
    x.cu_seqlens_q = cut(x.tokens_q), x.cu_seqlens_k = cut(x.tokens_k);
  }
  const bool takes_key_masks = tests_sm80() || x.pass != Pass::jvp;
  x.padded =
      takes_key_masks && !x.masked && !x.alibi && !a.causal && !a.window && x.cu_seqlens_q.empty() && happens(40);
  return x;
}

// The tensors of a problem by name, and its calls.
class Calls {
 public:
  explicit Calls(const Problem& x) : x_(x) {
    const DType type = x.type;
    const Shape of_queries{x.batch, x.heads, x.tokens_q, x.dim}, of_keys{x.batch, x.kv_heads, x.tokens_k, x.dim};
    const Buffer numbers(normal({1, 1, 1, 100'003}, 1), type);  // an odd number, so that no two rows are alike
    const auto* const bytes = static_cast<const unsigned char*>(numbers.view().data);
    const auto add = [&](const char* name, DType dtype, const Shape& shape) {
      const Shape tokens_first{shape[1] * shape[2] * shape[3], shape[3], shape[1] * shape[3], 1};
      tensors_[name] =
          std::make_unique<GpuTensor>(dtype, shape, x.tokens_first ? tokens_first : contiguous_strides(shape));
    };
    for (const char* name : {"q", "o", "do", "dq", "tq", "to"}) add(name, type, of_queries);
    for (const char* name : {"k", "v", "dk", "dv", "tk", "tv"}) add(name, type, of_keys);
    tensors_["lse"] = std::make_unique<GpuTensor>(DType::f32, Shape{x.batch, x.heads, x.tokens_q, 1}, 0xff);
    if (saves()) add("o_residual", DType::i8, of_queries);
    const auto add_f32 = [&](const char* name, const Shape& shape) {
      tensors_[name] = std::make_unique<GpuTensor>(DType::f32, shape, contiguous_strides(shape));
      const Buffer of_f32(normal(shape, 2), DType::f32);
      tensors_[name]->fill(static_cast<const unsigned char*>(of_f32.view().data), of_f32.values().data.size() * 4);
    };
    if (x.sinks) add_f32("sinks", {1, x.heads, 1, 1});
    if (x.dlse) add_f32("dlse", {x.batch, x.heads, x.tokens_q, 1});
    if (x.alibi) add_f32("alibi_slopes", {1, x.heads, 1, 1});
    if (x.masked || x.padded) {
      std::mt19937 generator(3);
      std::vector<unsigned char> bits(65'537);
      for (unsigned char& bit : bits) bit = generator() % 4 > 0;
      const Shape shape = x.padded ? Shape{x.batch, 1, 1, x.tokens_k} : Shape{1, 1, x.tokens_q, x.tokens_k};
      tensors_["mask"] = std::make_unique<GpuTensor>(DType::boolean, shape, 0);
      tensors_["mask"]->fill(bits.data(), bits.size());
    }
    size_t shift = 0;
    for (const char* name : {"q", "k", "v", "do", "tq", "tk", "tv"}) {
      const size_t skipped = 1000 * shift++ * bytes_of(type);
      tensors_[name]->fill(bytes + skipped, 100'003 * bytes_of(type) - skipped);
    }
    for (const auto& [name, first] : {std::pair{"cu_seqlens_q", &x.cu_seqlens_q}, {"cu_seqlens_k", &x.cu_seqlens_k}}) {
      if (first->empty()) continue;
      const Shape shape{1, 1, 1, static_cast<int64_t>(first->size())};
      tensors_[name] = std::make_unique<GpuTensor>(DType::i32, shape, contiguous_strides(shape));
      tensors_[name]->fill(reinterpret_cast<const unsigned char*>(first->data()), first->size() * sizeof(int32_t));
    }
  }

  void run() {
    const Extras extras{.mask = at("mask"),
                        .sinks = at("sinks"),
                        .alibi_slopes = at("alibi_slopes"),
                        .cu_seqlens_q = at("cu_seqlens_q"),
                        .cu_seqlens_k = at("cu_seqlens_k")};
    const Tensor o_residual = at("o_residual");
    repeat(Forward{.q = at("q"),
                   .k = at("k"),
                   .v = at("v"),
                   .o = at("o"),
                   .lse = at("lse"),
                   .o_residual = o_residual,
                   .extras = extras},
           saves() ? std::vector{"o", "lse", "o_residual"} : std::vector{"o", "lse"});
    // Sums of dq come in any order, unless they are deterministic.
    if (x_.pass == Pass::backward)
      repeat(Backward{.q = at("q"),
                      .k = at("k"),
                      .v = at("v"),
                      .o = at("o"),
                      .lse = at("lse"),
                      .do_ = at("do"),
                      .dq = at("dq"),
                      .dk = at("dk"),
                      .dv = at("dv"),
                      .o_residual = o_residual,
                      .dlse = at("dlse"),
                      .extras = extras},
             {"dk", "dv", "dq"}, x_.attention.deterministic ? "" : "dq");
    if (x_.pass == Pass::jvp)
      repeat(Jvp{.q = at("q"),
                 .k = at("k"),
                 .v = at("v"),
                 .tq = at("tq"),
                 .tk = at("tk"),
                 .tv = at("tv"),
                 .o = at("o"),
                 .to = at("to"),
                 .lse = at("lse"),
                 .extras = extras},
             {"o", "to", "lse"});
  }

 private:
  static constexpr int kCalls = 12;
  const Problem& x_;
  std::map<std::string, std::unique_ptr<GpuTensor>> tensors_;

  // Returns true if the backward pass needs the residual of o that the forward pass saves.
  bool saves() const {
    const Attention& a = x_.attention;
    const bool corrects = a.bias_correction == BiasCorrection::f16 || a.bias_correction == BiasCorrection::exact_delta;
    return x_.pass == Pass::backward && x_.type != DType::f32 &&
           (a.precision == Precision::f16 || (a.precision == Precision::bf16 && corrects));
  }

  Tensor at(const char* name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? Tensor{} : found->second->view();
  }

  template <class Call>
  void repeat(const Call& arguments, const std::vector<const char*>& outputs, const std::string& varies = "") {
    GpuPlace place;
    const size_t bytes = workspace_size(x_.attention, arguments);
    std::map<std::string, std::vector<unsigned char>> first;
    for (int call = 0; call < kCalls; ++call) {
      // A new workspace each time, poisoned as the outputs are.
      void* const workspace = place.workspace(bytes);
      for (const char* name : outputs) tensors_[name]->fill(0xff);
      octet::run(x_.attention, arguments, workspace, bytes, place.stream());
      check_cuda(cudaDeviceSynchronize());
      for (const char* name : outputs) {
        std::vector<unsigned char> got = tensors_[name]->words<unsigned char>();
        if (call == 0) {
          expect_written(name, got);
          first[name] = std::move(got);
        } else if (name != varies) {
          ASSERT_TRUE(got == first[name]) << name << " of call " << call << " differs from that of the first";
        }
      }
    }
  }

  // Numbers are not what the memory held before. An element of o_residual may be.
  void expect_written(const std::string& name, const std::vector<unsigned char>& got) const {
    if (name == "o_residual") return;
    const size_t size = bytes_of(static_cast<DType>(tensors_.at(name)->view().dtype));
    for (size_t i = 0; i < got.size(); i += size)
      ASSERT_FALSE(std::all_of(got.begin() + static_cast<std::ptrdiff_t>(i),
                               got.begin() + static_cast<std::ptrdiff_t>(i + size),
                               [](unsigned char x) { return x == 0xff; }))
          << name << ": element " << i / size << " was not written";
  }
};

class GpuRepeatedProblems : public testing::TestWithParam<uint64_t> {
 public:
  static constexpr uint64_t kParts = 16, kProblems = 640;
};

TEST_P(GpuRepeatedProblems, give_the_same_bits_each_time) {
  for (uint64_t seed = GetParam(); seed < kProblems; seed += kParts) {
    const Problem x = draw(seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + text(x));
    Calls(x).run();
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, GpuRepeatedProblems, testing::Range<uint64_t>(0, GpuRepeatedProblems::kParts));

}  // namespace
}  // namespace octet::test
