// How calls live with CUDA: repeated calls, captured graphs, several streams, several devices.
#include <gtest/gtest.h>

#include <optional>

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

Attention on_gpu(const Case& c, bool deterministic) {
  Attention a = attention_of(c, Precision::bf16, "sm90");
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
Both run_both(const Case& c, const Inputs& in, int device = 0) {
  Both out;
  if constexpr (std::is_same_v<SomePlace, GpuPlace>) {
    SomePlace first(device), second(device);
    out.forward = run(c, in, on_gpu(c, false), Pass::forward, nullptr, &first);
    out.backward = run(c, in, on_gpu(c, true), Pass::backward, &out.forward, &second);
  } else {
    SomePlace first, second;
    out.forward = run(c, in, on_gpu(c, false), Pass::forward, nullptr, &first);
    out.backward = run(c, in, on_gpu(c, true), Pass::backward, &out.forward, &second);
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

TEST(Streams, DeterministicRunsAgreeBitByBit) {
  const Inputs in = draw(kLong, 5);
  const Both once = run_both(kLong, in);
  for (int i = 0; i < 5; ++i) expect_same(run_both(kLong, in), once);
  Case window = kLong;
  window.causal = false;
  window.window = {{300, 100}};
  const Both narrow = run_both(window, in);
  for (int i = 0; i < 5; ++i) expect_same(run_both(window, in), narrow);
}

TEST(Streams, CapturedGraphsDoWhatCallsDo) {
  for (const char* name : {"grouped_heads", "packed", "interleaved"}) {
    SCOPED_TRACE(name);
    const Case& c = named(name);
    const Inputs in = draw(c, 6);
    expect_same(run_both<GraphPlace>(c, in), run_both(c, in));
  }
}

TEST(Streams, TwoStreamsAtOnceDoNotMeet) {
  const Case& c = kLong;
  const Inputs a = draw(c, 7), b = draw(c, 8);
  const Both want_a = run_both(c, a), want_b = run_both(c, b);
  const Attention attention = on_gpu(c, false);
  const size_t elements = static_cast<size_t>(c.heads * c.tokens_q * c.dim_v);
  // Both calls are launched before either is waited for.
  GpuPlace places[2];
  const Inputs* inputs[2] = {&a, &b};
  Buffer o[2];
  std::optional<Buffer> keep[2][3];
  for (int i = 0; i < 2; ++i) {
    keep[i][0].emplace(inputs[i]->q, DType::bf16);
    keep[i][1].emplace(inputs[i]->k, DType::bf16);
    keep[i][2].emplace(inputs[i]->v, DType::bf16);
    o[i] = Buffer(DType::bf16, c.o_shape());
  }
  for (int i = 0; i < 2; ++i) {
    const Forward call{.q = places[i].tensor(*keep[i][0]),
                       .k = places[i].tensor(*keep[i][1]),
                       .v = places[i].tensor(*keep[i][2]),
                       .o = places[i].tensor(o[i])};
    const size_t bytes = workspace_size(attention, call);
    void* const workspace = places[i].workspace(bytes);
    for (int repeat = 0; repeat < 20; ++repeat) octet::run(attention, call, workspace, bytes, places[i].stream());
  }
  for (GpuPlace& place : places) EXPECT_FALSE(place.finish());
  ASSERT_EQ(o[0].values().data.size(), elements);
  // Without o_residual the weights are bf16: not the bits of the other call, but near.
  EXPECT_LT(difference(o[0].values(), want_a.forward.o).relative(), .005);
  EXPECT_LT(difference(o[1].values(), want_b.forward.o).relative(), .005);
}

TEST(Streams, EveryDeviceServes) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
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

TEST(Refusals, NameWhatIsMissing) {
  const Case& c = named("grouped_heads");
  const Inputs in = draw(c, 10);
  const auto message = [&](const Case& which, Attention a) {
    GpuPlace place;
    try {
      run(which, draw(which, 10), a, Pass::forward, nullptr, &place);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  Attention sage = on_gpu(c, false);
  sage.precision = Precision::sagebwd;
  EXPECT_NE(message(c, sage).find("sm90: it has no sagebwd; it has: f16, bf16, int8"), std::string::npos)
      << message(c, sage);
  Attention int8 = on_gpu(c, false);
  int8.precision = Precision::int8;
  EXPECT_NE(message(named("dim_160"), int8).find("sm90: it has no int8 for head dim 160; it has: up to 128"),
            std::string::npos)
      << message(named("dim_160"), int8);
  int8.smooth_q = Switch::on;
  EXPECT_NE(message(c, int8).find("sm90: smooth_q is not in its kernels"), std::string::npos) << message(c, int8);
  Attention beta = on_gpu(c, false);
  beta.remedy = Remedy::beta;
  EXPECT_NE(message(c, beta).find("it has no remedy beta"), std::string::npos) << message(c, beta);
  const Case& masked = named("mask_keys");
  EXPECT_NE(message(masked, on_gpu(masked, false)).find("it takes no mask tensor"), std::string::npos);
  Attention cpu = on_gpu(c, false);
  cpu.backend = "cpu";
  EXPECT_NE(message(c, cpu).find("cpu: the tensors are on cuda"), std::string::npos) << message(c, cpu);
}

}  // namespace
}  // namespace octet::test
