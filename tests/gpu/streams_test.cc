// How calls live with CUDA: repeated calls, captured graphs, several streams, several devices.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <string>

#include "gpu/place.h"
#include "support/cases.h"

namespace octet::test {
namespace {

// A place that captures the call into a graph, poisons what the call may write, and replays the graph.
class GraphPlace : public GpuPlace {
 public:
  void* workspace(size_t bytes) override {
    void* const at = GpuPlace::workspace(bytes);
    check_cuda(cudaStreamBeginCapture(static_cast<cudaStream_t>(GpuPlace::stream()), cudaStreamCaptureModeThreadLocal));
    return at;
  }
  bool finish() override {
    const auto stream = static_cast<cudaStream_t>(GpuPlace::stream());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    check_cuda(cudaStreamEndCapture(stream, &graph));
    check_cuda(cudaGraphInstantiate(&program, graph, 0));
    for (int i = 0; i < 2; ++i) check_cuda(cudaGraphLaunch(program, stream));
    check_cuda(cudaStreamSynchronize(stream));
    check_cuda(cudaGraphExecDestroy(program));
    check_cuda(cudaGraphDestroy(graph));
    return GpuPlace::finish();
  }
};

const Case& named(const char* name) {
  for (const Case& c : cases())
    if (std::string(c.name) == name) return c;
  throw std::runtime_error(name);
}

Attention on_gpu(const Case& c, bool deterministic, Precision precision = Precision::bf16) {
  Attention a = attention_of(c, precision, gpu_backend());
  a.deterministic = deterministic;
  return a;
}

void expect_same_bits(const Values& a, const Values& b, const char* what) {
  EXPECT_TRUE(a.data == b.data) << what << " differs between two runs";
}

struct Both {
  Outputs forward, backward;
};
template <class SomePlace = GpuPlace>
Both run_both(const Case& c, const Inputs& in, int device = 0, BiasCorrection bias_correction = BiasCorrection::f16) {
  Both out;
  Attention forward = on_gpu(c, false), backward = on_gpu(c, true);
  forward.bias_correction = backward.bias_correction = bias_correction;
  if constexpr (std::is_same_v<SomePlace, GpuPlace>) {
    SomePlace first(device), second(device);
    out.forward = run(c, in, forward, Pass::forward, nullptr, &first);
    out.backward = run(c, in, backward, Pass::backward, &out.forward, &second);
  } else {
    SomePlace first, second;
    out.forward = run(c, in, forward, Pass::forward, nullptr, &first);
    out.backward = run(c, in, backward, Pass::backward, &out.forward, &second);
  }
  return out;
}

void expect_same(const Both& a, const Both& b) {
  expect_same_bits(a.forward.o, b.forward.o, "o");
  expect_same_bits(a.forward.o_residual, b.forward.o_residual, "o_residual");
  expect_same_bits(a.backward.dq, b.backward.dq, "dq");
  expect_same_bits(a.backward.dk, b.backward.dk, "dk");
  expect_same_bits(a.backward.dv, b.backward.dv, "dv");
}

// Many blocks of keys add to each tile of dq.
const Case kLong{.name = "long",
                 .heads = 4,
                 .kv_heads = 2,
                 .tokens_q = 1500,
                 .tokens_k = 2100,
                 .dim = 128,
                 .dim_v = 128,
                 .causal = true,
                 .alignment = Alignment::bottom_right,
                 .dtype = DType::bf16,
                 .out_dtype = DType::bf16};

void expect_repeatable(const Case& c) {
  SCOPED_TRACE(testing::Message() << "dim " << c.dim << ", " << c.heads << " heads of " << c.tokens_q << " x "
                                  << c.tokens_k << " tokens, causal " << c.causal);
  const Inputs in = draw(c, 5);
  for (const BiasCorrection bias_correction : {BiasCorrection::f16, BiasCorrection::exact_delta}) {
    const Both once = run_both(c, in, 0, bias_correction);
    for (int i = 0; i < 4; ++i) expect_same(run_both(c, in, 0, bias_correction), once);
  }
}

// The same without a mask: there is no diagonal to align either.
Case unmasked(Case c) {
  c.causal = false;
  c.alignment = Case{}.alignment;
  return c;
}

TEST(Streams, DeterministicRunsAgreeBitByBit) {
  for (const int64_t dim : {64, 128, 256}) {
    Case c = kLong;
    c.dim = c.dim_v = dim;
    expect_repeatable(c);
    expect_repeatable(unmasked(c));
    c.causal = false;
    c.window = {{300, 100}};
    expect_repeatable(c);
  }
}

// More blocks of keys than the GPU runs at once, in all heads or in one: which run together differs from run to run.
TEST(Streams, DeterministicRunsAgreeWithMoreBlocksThanTheGpuHolds) {
  for (const bool causal : {true, false}) {
    Case many = kLong;
    many.dim = many.dim_v = 64, many.heads = many.kv_heads = 12;
    expect_repeatable(causal ? many : unmasked(many));
    Case wide = kLong;
    wide.dim = wide.dim_v = 64, wide.heads = wide.kv_heads = 1, wide.tokens_q = 700, wide.tokens_k = 19000;
    expect_repeatable(causal ? wide : unmasked(wide));
  }
}

TEST(Streams, CapturedGraphsDoWhatCallsDo) {
  for (const char* name : {"grouped_heads", "packed", "interleaved"}) {
    SCOPED_TRACE(name);
    const Case& c = named(name);
    const Inputs in = draw(c, 6);
    expect_same(run_both<GraphPlace>(c, in), run_both(c, in));
  }
}

// Forward passes of the precisions with codes.
class CodedStreams : public testing::TestWithParam<Precision> {};

TEST_P(CodedStreams, CapturedGraphsDoWhatCallsDo) {
  if (!gpu_computes(Pass::forward, GetParam())) GTEST_SKIP() << "this backend computes no " << name(GetParam());
  for (const char* name : {"grouped_heads", "packed", "interleaved"}) {
    SCOPED_TRACE(name);
    const Case& c = named(name);
    const Inputs in = draw(c, 6);
    GraphPlace graph;
    GpuPlace place;
    const Outputs want = run(c, in, on_gpu(c, false, GetParam()), Pass::forward, nullptr, &place);
    const Outputs got = run(c, in, on_gpu(c, false, GetParam()), Pass::forward, nullptr, &graph);
    expect_same_bits(got.o, want.o, "o");
    expect_same_bits(got.lse, want.lse, "lse");
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, CodedStreams,
                         testing::Values(Precision::int8, Precision::int8_f16, Precision::int8_fp8, Precision::fp8,
                                         Precision::sagebwd),
                         [](const auto& info) { return std::string(name(info.param)); });

// Both passes of a case on a stream of their own, again and again.
class InFlight {
 public:
  InFlight(const Case& c, const Inputs& in)
      : case_(c),
        q_(in.q, c.dtype),
        k_(in.k, c.dtype),
        v_(in.v, c.dtype),
        do_(in.do_, c.dtype),
        o_(c.out_dtype, c.o_shape()),
        o_residual_(c.residual_dtype(), c.o_shape()),
        lse_(DType::f32, c.lse_shape()),
        dq_(c.out_dtype, c.q_shape()),
        dk_(c.out_dtype, c.k_shape()),
        dv_(c.out_dtype, c.v_shape()) {}

  void launch(const Attention& attention, std::launch how = std::launch::deferred) {
    const auto at = [this](const Buffer& b) { return place_.tensor(b); };
    const Forward forward{
        .q = at(q_), .k = at(k_), .v = at(v_), .o = at(o_), .lse = at(lse_), .o_residual = at(o_residual_)};
    const Backward backward{.q = at(q_),
                            .k = at(k_),
                            .v = at(v_),
                            .o = at(o_),
                            .lse = at(lse_),
                            .do_ = at(do_),
                            .dq = at(dq_),
                            .dk = at(dk_),
                            .dv = at(dv_),
                            .o_residual = at(o_residual_)};
    const size_t bytes = std::max(workspace_size(attention, forward), workspace_size(attention, backward));
    void* const workspace = place_.workspace(bytes);
    const auto run_all = [&, stream = place_.stream()] {
      for (int repeat = 0; repeat < 10; ++repeat) {
        octet::run(attention, forward, workspace, bytes, stream);
        octet::run(attention, backward, workspace, bytes, stream);
      }
    };
    std::async(how, run_all).get();
  }

  Both await() {
    EXPECT_FALSE(place_.finish()) << "wrote beyond its workspace";
    Both out;
    out.forward.o = o_.values(), out.forward.o_residual = residual_of(case_, out.forward.o, o_residual_);
    out.backward.dq = dq_.values(), out.backward.dk = dk_.values(), out.backward.dv = dv_.values();
    return out;
  }

 private:
  Case case_;
  GpuPlace place_;
  Buffer q_, k_, v_, do_, o_, o_residual_, lse_, dq_, dk_, dv_;
};

TEST(Streams, TwoStreamsAtOnceDoNotMeet) {
  const Inputs a = draw(kLong, 7), b = draw(kLong, 8);
  const Both want_a = run_both(kLong, a), want_b = run_both(kLong, b);
  InFlight first(kLong, a), second(kLong, b);
  const Attention attention = on_gpu(kLong, true);
  first.launch(attention), second.launch(attention);
  expect_same(first.await(), want_a);
  expect_same(second.await(), want_b);
}

TEST(Streams, AThreadThatHasNotUsedCudaMayCall) {
  const Inputs in = draw(kLong, 7);
  const Both want = run_both(kLong, in);
  InFlight calls(kLong, in);
  calls.launch(on_gpu(kLong, true), std::launch::async);
  expect_same(calls.await(), want);
}

TEST(Streams, EveryDeviceServes) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one GPU";
  const Case& c = named("grouped_heads");
  const Inputs in = draw(c, 9);
  const Both first = run_both(c, in);
  for (int device = 1; device < count; ++device) {
    const Both other = run_both(c, in, device);
    expect_same(other, first);
    // The caller's current device is another one.
    check_cuda(cudaSetDevice(0));
  }
}

}  // namespace
}  // namespace octet::test
