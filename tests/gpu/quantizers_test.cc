// The quantizers on CUDA tensors give the bits of those on CPU tensors: codes, scales, zero points, means, statistics,
// dequantized and turned numbers. They write nothing else, and wait for no stream.
#include <cmath>
#include <map>
#include <string>

#include "gpu/place.h"
#include "support/quantizing.h"

namespace octet::quantizing {
namespace {

using test::check_cuda;

// Copies of arrays, with their guards and gaps, in the memory of a GPU.
class OnGpu {
 public:
  OnGpu() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~OnGpu() {
    for (const auto& [array, copy] : copies_) cudaFree(copy);
    cudaStreamDestroy(stream_);
  }
  OnGpu(const OnGpu&) = delete;

  Tensor tensor(const Array& array) {
    unsigned char*& copy = copies_[&array];
    if (!copy) {
      check_cuda(cudaMalloc(reinterpret_cast<void**>(&copy), array.bytes().size()));
      check_cuda(cudaMemcpy(copy, array.bytes().data(), array.bytes().size(), cudaMemcpyHostToDevice));
      check_cuda(cudaDeviceSynchronize());
    }
    Tensor t = array.tensor();
    t.data = copy + Array::kGuard, t.device = OCTET_CUDA;
    return t;
  }
  // Waits for the stream and copies all back.
  void finish() {
    check_cuda(cudaStreamSynchronize(stream_));
    for (const auto& [array, copy] : copies_)
      check_cuda(cudaMemcpy(static_cast<unsigned char*>(array->data()) - Array::kGuard, copy, array->bytes().size(),
                            cudaMemcpyDeviceToHost));
  }
  cudaStream_t stream() const { return stream_; }

 private:
  std::map<const Array*, unsigned char*> copies_;
  cudaStream_t stream_ = nullptr;
};

// The results of a quantization in the memory of a GPU.
struct OnGpuQuantized {
  Tensor scale, zero_point, mean, codes;
  octet_quantization quantization;

  OnGpuQuantized(const Quantized& q, OnGpu& gpu) : quantization(q.quantization) {
    scale = gpu.tensor(q.scale), quantization.scale = &scale;
    if (q.recipe.zero_point) zero_point = gpu.tensor(q.zero_point), quantization.zero_point = &zero_point;
    if (q.recipe.smooth) mean = gpu.tensor(q.mean), quantization.mean = &mean;
    codes = gpu.tensor(q.codes);
    codes.quantization = &quantization;
  }
  OnGpuQuantized(const OnGpuQuantized&) = delete;
};

std::unique_ptr<Quantized> quantized_on_gpu(const Array& x, const Recipe& recipe) {
  auto q = std::make_unique<Quantized>(recipe, x.shape());
  OnGpu gpu;
  OnGpuQuantized out(*q, gpu);
  const Tensor in = gpu.tensor(x);
  Tensor statistics = gpu.tensor(q->statistics);
  const Tensor weight = recipe.norm_weight ? gpu.tensor(*recipe.norm_weight) : Tensor();
  octet_rope rope;
  check(octet_quantize(&in, rope_of(recipe, rope, weight), &out.codes, recipe.statistics ? &statistics : nullptr,
                       gpu.stream()));
  gpu.finish();
  return q;
}

// NaNs may have other bits.
void expect_same(const Array& want, const Array& got, const char* name) {
  EXPECT_TRUE(got.intact()) << name << ": written beyond its elements";
  int64_t differences = 0;
  want.each([&](int64_t b, int64_t h, int64_t t, int64_t c) {
    const double a = want.get(b, h, t, c), g = got.get(b, h, t, c);
    const bool same = std::isnan(a) ? std::isnan(g) : a == g && std::signbit(a) == std::signbit(g);
    if (!same && ++differences == 1)
      ADD_FAILURE() << name << " at " << b << ' ' << h << ' ' << t << ' ' << c << ": CPU " << a << ", GPU " << g;
  });
  if (differences > 1) ADD_FAILURE() << name << ": " << differences << " elements differ";
}

void expect_same(const Quantized& want, const Quantized& got) {
  expect_same(want.codes, got.codes, "codes");
  expect_same(want.scale, got.scale, "scale");
  if (want.recipe.zero_point) expect_same(want.zero_point, got.zero_point, "zero_point");
  if (want.recipe.smooth) expect_same(want.mean, got.mean, "mean");
  if (want.recipe.statistics) expect_same(want.statistics, got.statistics, "statistics");
}

std::string text_of(const Recipe& r) {
  return "codes " + std::to_string(static_cast<int>(r.codes)) + ", operand " + std::to_string(r.operand) +
         ", granularity " + std::to_string(r.granularity) + ", block " + std::to_string(r.block) + ", zero point " +
         std::to_string(r.zero_point) + (r.smooth ? ", smooth" : "") + (r.seed ? ", rotated" : "") + ", rope " +
         std::to_string(r.rope.style) + (r.rope.norm ? ", norm" : "") + (r.norm_weight ? " with weights" : "") +
         (r.statistics ? ", statistics" : "");
}

void expect_bits_of_cpu(const Array& x, const Recipe& recipe) {
  SCOPED_TRACE(text_of(recipe));
  expect_same(*quantized(x, recipe), *quantized_on_gpu(x, recipe));
}

octet_rope rope_of(octet_rope_style style, int64_t dim = 0, int64_t offset = 0, double base = 0) {
  octet_rope rope = OCTET_ROPE_INIT;
  rope.style = style, rope.dim = dim, rope.offset = offset, rope.base = base;
  return rope;
}

octet_rope with_norm(octet_rope rope, float eps = 1e-6f) {
  rope.norm = OCTET_NORM_RMS, rope.norm_eps = eps;
  return rope;
}

struct Grouping {
  octet_operand operand;
  octet_granularity granularity;
  int64_t block;
};
const Grouping kGroupings[] = {
    {OCTET_OPERAND_K, OCTET_PER_TENSOR, 0},  {OCTET_OPERAND_Q, OCTET_PER_TOKEN, 0},
    {OCTET_OPERAND_V, OCTET_PER_CHANNEL, 0}, {OCTET_OPERAND_K, OCTET_PER_BLOCK, 3},
    {OCTET_OPERAND_V, OCTET_PER_BLOCK, 48},  {OCTET_OPERAND_K, OCTET_PER_BLOCK, 4096},
    {OCTET_OPERAND_Q, OCTET_PER_THREAD, 0},  {OCTET_OPERAND_K, OCTET_PER_THREAD, 0},
};

class GpuQuantizersOf : public testing::TestWithParam<DType> {};
TEST_P(GpuQuantizersOf, every_granularity_have_the_bits_of_the_cpu) {
  const DType codes = GetParam();
  const Array x = Array(DType::bf16, {1, 2, 135, 24}).random(1, 1, 2);
  for (const Grouping& g : kGroupings)
    for (const octet_zero_point zero : {OCTET_SYMMETRIC, OCTET_ZERO_POINT_INTEGER, OCTET_ZERO_POINT_FLOAT}) {
      if (zero == OCTET_SYMMETRIC ? codes == DType::u8 : codes != DType::u8 && codes != DType::i8) continue;
      expect_bits_of_cpu(x, {.codes = codes,
                             .operand = g.operand,
                             .granularity = g.granularity,
                             .block = g.block,
                             .zero_point = zero,
                             .smooth = true,
                             .seed = 7,
                             .rope = rope_of(OCTET_ROPE_HALF, 16, 50)});
      expect_bits_of_cpu(x, {.codes = codes,
                             .operand = g.operand,
                             .granularity = g.granularity,
                             .block = g.block,
                             .zero_point = zero,
                             .statistics = false});
    }
}
std::string name_of(const testing::TestParamInfo<DType>& info) {
  static const char* const kNames[] = {"i8", "u8", "i4", "e4m3", "e5m2"};  // in the order of the list
  return kNames[info.index];
}
INSTANTIATE_TEST_SUITE_P(Codes, GpuQuantizersOf,
                         testing::Values(DType::i8, DType::u8, DType::i4, DType::e4m3, DType::e5m2), name_of);

TEST(GpuQuantizers, take_every_type_layout_and_dim) {
  const Layout layouts[] = {Layout::dense, Layout::token_major, Layout::transposed, Layout::padded};
  int i = 0;
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::e4m3})
    for (const int64_t dim : {1, 2, 17, 64, 96, 256}) {
      const Layout in = layouts[i % 4], out = layouts[i / 2 % 4];
      SCOPED_TRACE(testing::Message() << "dtype " << static_cast<int>(dtype) << ", dim " << dim << ", layouts " << i % 4
                                      << ' ' << i / 2 % 4);
      const Array x = Array(dtype, {2, 2, 19, dim}, in).random(static_cast<unsigned>(i), 3, 1);
      expect_bits_of_cpu(x, {.smooth = true, .seed = 3, .layout = out});
      ++i;
    }
}

// Rows that are whole words lie in registers, some lanes of which have no channels; all others in shared memory.
TEST(GpuQuantizers, quantize_tokens_in_registers_and_in_shared_memory) {
  int i = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const int64_t dim : {8, 64, 72, 96, 128, 192, 256})
      for (const octet_rope_style style : {OCTET_ROPE_NONE, OCTET_ROPE_HALF, OCTET_ROPE_INTERLEAVED}) {
        SCOPED_TRACE(testing::Message() << "dtype " << static_cast<int>(dtype) << ", dim " << dim);
        const Array x = Array(dtype, {3, 3, 21, dim}, i % 4 ? Layout::token_major : Layout::padded)
                            .random(static_cast<unsigned>(i), 3, 1);
        const octet_zero_point zero = i % 5 == 4   ? OCTET_ZERO_POINT_FLOAT
                                      : i % 5 == 3 ? OCTET_ZERO_POINT_INTEGER
                                                   : OCTET_SYMMETRIC;
        const DType codes = zero != OCTET_SYMMETRIC ? DType::u8
                            : i % 5 == 2            ? DType::e5m2
                            : i % 5                 ? DType::e4m3
                                                    : DType::i8;
        expect_bits_of_cpu(x, {.codes = codes,
                               .operand = OCTET_OPERAND_K,
                               .granularity = OCTET_PER_TOKEN,
                               .zero_point = zero,
                               .smooth = i % 2 == 0,
                               .seed = i % 7 < 4 ? 5u : 0u,
                               .rope = rope_of(style, i % 3 == 1 ? dim / 16 * 8 : 0, 1000),
                               .statistics = false,
                               .layout = i % 8 < 6 ? Layout::dense : Layout::padded});
        ++i;
      }
}

// A norm in registers, in which its sum has the order of shared memory and of the CPU, and there.
TEST(GpuQuantizers, normalise_to_the_bits_of_the_cpu) {
  int i = 0;
  for (const int64_t dim : {8, 17, 64, 72, 96, 128, 192, 256, 264})
    for (const octet_rope_style style : {OCTET_ROPE_NONE, OCTET_ROPE_HALF, OCTET_ROPE_INTERLEAVED})
      for (const bool rotates : {false, true}) {
        SCOPED_TRACE(testing::Message() << "dim " << dim << ", style " << style << ", case " << i);
        const DType dtypes[] = {DType::bf16, DType::f16, DType::f32, DType::f64};
        Array x = Array(dtypes[i % 5 ? i % 3 : 3], {2, 5, 21, dim}, i % 4 ? Layout::token_major : Layout::padded)
                      .random(static_cast<unsigned>(i), 3, 1);
        if (i % 4 == 1) x.set(1, 2, 3, dim - 1, i % 8 == 1 ? NAN : INFINITY);
        for (int64_t c = 0; c < dim; ++c) x.set(0, 4, 20, c, 0);
        const Array weight = Array(dtypes[i % 3], {1, i % 2 ? 5 : 1, 1, dim}, i % 7 ? Layout::dense : Layout::padded)
                                 .random(static_cast<unsigned>(i) + 99, 1, 1);
        const Grouping& g = i % 5 < 3 ? kGroupings[1] : kGroupings[i % 8];
        const octet_rope turns = dim == 17 || !style ? rope_of(OCTET_ROPE_NONE)
                                                     : rope_of(style, i % 3 == 1 || dim > 256 ? dim / 16 * 8 : 0, 70);
        expect_bits_of_cpu(x, {.codes = i % 3 ? DType::i8 : DType::e4m3,
                               .operand = g.operand,
                               .granularity = g.granularity,
                               .block = g.block,
                               .zero_point = i % 6 == 4 ? OCTET_ZERO_POINT_INTEGER : OCTET_SYMMETRIC,
                               .smooth = i % 4 == 2,
                               .seed = rotates ? 5u : 0u,
                               .rope = with_norm(turns, i % 3 ? 1e-6f : 0.f),
                               .norm_weight = i % 4 == 3 ? nullptr : &weight,
                               .statistics = i % 9 == 0});
        ++i;
      }
}

// Groups of whole words lie in registers: those that fit a thread block, and those of two passes, of 64 to 256 tokens
// each; means of several chunks too.
TEST(GpuQuantizers, quantize_groups_in_registers) {
  const Grouping groupings[] = {{OCTET_OPERAND_K, OCTET_PER_TENSOR, 0},  {OCTET_OPERAND_V, OCTET_PER_CHANNEL, 0},
                                {OCTET_OPERAND_Q, OCTET_PER_THREAD, 0},  {OCTET_OPERAND_K, OCTET_PER_THREAD, 0},
                                {OCTET_OPERAND_K, OCTET_PER_BLOCK, 32},  {OCTET_OPERAND_K, OCTET_PER_BLOCK, 64},
                                {OCTET_OPERAND_K, OCTET_PER_BLOCK, 100}, {OCTET_OPERAND_K, OCTET_PER_BLOCK, 128},
                                {OCTET_OPERAND_K, OCTET_PER_BLOCK, 192}, {OCTET_OPERAND_K, OCTET_PER_BLOCK, 256}};
  int i = 0;
  for (const int64_t dim : {64, 72, 128, 256})
    for (const Grouping& g : groupings) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", case " << i);
      const DType dtype = i % 3 == 0 ? DType::bf16 : i % 3 == 1 ? DType::f16 : DType::f32;
      Array x = Array(dtype, {2, 2, 523, dim}, i % 2 ? Layout::token_major : Layout::padded)
                    .random(static_cast<unsigned>(i), 3, 1);
      if (i % 6 == 5) x.set(1, 0, 300, 5, NAN), x.set(0, 1, 40, 7, INFINITY);
      const bool zero = i % 4 == 3;
      expect_bits_of_cpu(x, {.codes = zero         ? DType::u8
                                      : i % 5 == 2 ? DType::e4m3
                                                   : DType::i8,
                             .operand = g.operand,
                             .granularity = g.granularity,
                             .block = g.block,
                             .zero_point = !zero        ? OCTET_SYMMETRIC
                                           : i % 8 == 3 ? OCTET_ZERO_POINT_FLOAT
                                                        : OCTET_ZERO_POINT_INTEGER,
                             .smooth = i % 2 == 0,
                             .seed = i % 7 < 3 ? 5u : 0u,
                             .statistics = false,
                             .layout = i % 8 < 6 ? Layout::dense : Layout::padded});
      ++i;
    }
}

TEST(GpuQuantizers, take_any_length) {
  for (const int64_t tokens : {0, 1, 7, 63, 64, 65, 129, 300})
    for (const Grouping& g : {kGroupings[0], kGroupings[1], kGroupings[2], kGroupings[4], kGroupings[6]}) {
      SCOPED_TRACE(tokens);
      const Array x = Array(DType::f16, {2, 1, tokens, 8}, Layout::padded).random(5, 1, 4);
      expect_bits_of_cpu(x, {.operand = g.operand,
                             .granularity = g.granularity,
                             .block = g.block,
                             .smooth = true,
                             .layout = Layout::transposed});
    }
  for (const Shape& shape : {Shape{0, 2, 4, 8}, Shape{1, 0, 4, 8}, Shape{1, 2, 4, 0}})
    expect_bits_of_cpu(Array(DType::f32, shape), {.smooth = true, .seed = 1});
}

TEST(GpuQuantizers, round_every_number_as_the_cpu) {
  // Magnitudes of 2^-149 to 2^127, ties, zeros of both signs, infinities and NaN.
  Array x(DType::f32, {1, 1, 64, 64});
  x.each([&](auto b, auto h, auto t, auto c) {
    const double size = std::ldexp(1 + static_cast<double>(c % 8) / 8, static_cast<int>(t * 5 - 160));
    x.set(b, h, t, c, (c % 2 ? -1 : 1) * (c == 40 ? 0.0 : size));
  });
  x.set(0, 0, 5, 3, NAN), x.set(0, 0, 9, 3, INFINITY), x.set(0, 0, 20, 4, -INFINITY);
  for (const DType codes : {DType::i8, DType::i4, DType::e4m3, DType::e5m2})
    for (const Grouping& g : {kGroupings[0], kGroupings[1], kGroupings[2], kGroupings[3]})
      expect_bits_of_cpu(x, {.codes = codes, .operand = g.operand, .granularity = g.granularity, .block = g.block});
  for (const octet_zero_point zero : {OCTET_ZERO_POINT_INTEGER, OCTET_ZERO_POINT_FLOAT})
    for (const Grouping& g : {kGroupings[1], kGroupings[2]})
      expect_bits_of_cpu(x,
                         {.codes = DType::u8, .operand = g.operand, .granularity = g.granularity, .zero_point = zero});
}

// The host cannot look for negative numbers without waiting: there, they make their group NaN.
TEST(GpuQuantizers, make_groups_of_symmetric_u8_with_negative_numbers_nan) {
  Array x = Array(DType::f32, {1, 2, 40, 8}).random(5);
  x.each([&](auto b, auto h, auto t, auto c) { x.set(b, h, t, c, std::fabs(x.get(b, h, t, c))); });
  const Recipe recipe{.codes = DType::u8};
  const auto clean = quantized(x, recipe);
  expect_same(*clean, *quantized_on_gpu(x, recipe));
  x.set(0, 1, 11, 3, -0.25);
  const auto q = quantized_on_gpu(x, recipe);
  q->codes.each([&](auto b, auto h, auto t, auto c) {
    const bool spoiled = h == 1 && t == 11;
    ASSERT_EQ(std::isnan(q->step(b, h, t, c)), spoiled);
    ASSERT_EQ(q->codes.get(b, h, t, c), spoiled ? 0.0 : clean->codes.get(b, h, t, c));
  });
}

TEST(GpuQuantizers, dequantize_to_the_bits_of_the_cpu) {
  int i = 0;
  for (const DType codes : {DType::i8, DType::u8, DType::i4, DType::e4m3, DType::e5m2})
    for (const Grouping& g : {kGroupings[1], kGroupings[2], kGroupings[4], kGroupings[7]})
      for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
        const bool zero = codes == DType::u8 || (codes == DType::i8 && i % 2);
        const int64_t dim = i % 3 ? 40 : 64;
        const Recipe recipe{.codes = codes,
                            .operand = g.operand,
                            .granularity = g.granularity,
                            .block = g.block,
                            .zero_point = !zero   ? OCTET_SYMMETRIC
                                          : i % 3 ? OCTET_ZERO_POINT_INTEGER
                                                  : OCTET_ZERO_POINT_FLOAT,
                            .smooth = i % 5 > 1,
                            .seed = i % 3 ? 9u : 0u,
                            .layout = i % 4 == 3 ? Layout::transposed : Layout::dense};
        SCOPED_TRACE(text_of(recipe));
        Array x = Array(DType::f32, {2, 2, 66, dim}).random(static_cast<unsigned>(i), 1, 3);
        x.set(1, 1, 5, 1, NAN);
        const auto q = quantized(x, recipe);
        const Layout layout = i % 2 ? Layout::padded : Layout::token_major;
        const Array want = dequantized(*q, dtype, layout), got(dtype, x.shape(), layout);
        OnGpu gpu;
        const OnGpuQuantized on_gpu(*q, gpu);
        Tensor out = gpu.tensor(got);
        check(octet_dequantize(&on_gpu.codes, &out, gpu.stream()));
        gpu.finish();
        expect_same(want, got, "x");
        ++i;
      }
}

TEST(GpuQuantizers, turn_to_the_bits_of_the_cpu) {
  int i = 0;
  for (const octet_rope_style style : {OCTET_ROPE_HALF, OCTET_ROPE_INTERLEAVED})
    for (const int64_t dim : {0, 2, 16})
      for (const int64_t offset : {int64_t{0}, int64_t{-77}, int64_t{1} << 39})
        for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
          const octet_rope rope = rope_of(style, dim, offset, i % 3 == 2 ? 1e-9 : i % 3 ? 500000.0 : 0.0);
          SCOPED_TRACE(testing::Message() << "style " << style << ", dim " << dim << ", offset " << offset << ", dtype "
                                          << static_cast<int>(dtype));
          const uint32_t inverse = i % 2;
          const Array x = Array(dtype, {3, 3, 70, 40}, i % 2 ? Layout::padded : Layout::token_major).random(13);
          const Array want(dtype, x.shape(), Layout::padded), got(dtype, x.shape(), Layout::padded), in_place = x;
          const Tensor in = x.tensor();
          Tensor to = want.tensor();
          check(octet_apply_rope(&rope, &in, inverse, &to, nullptr));
          OnGpu gpu;
          const Tensor from = gpu.tensor(x), both = gpu.tensor(in_place);
          Tensor out = gpu.tensor(got), same = both;
          check(octet_apply_rope(&rope, &from, inverse, &out, gpu.stream()));
          check(octet_apply_rope(&rope, &both, inverse, &same, gpu.stream()));
          gpu.finish();
          expect_same(want, got, "y");
          expect_same(want, in_place, "y in place of x");
          ++i;
        }
}

TEST(GpuQuantizers, normalise_and_turn_to_the_bits_of_the_cpu) {
  int i = 0;
  for (const octet_rope_style style : {OCTET_ROPE_NONE, OCTET_ROPE_HALF, OCTET_ROPE_INTERLEAVED})
    for (const int64_t dim : {40, 64, 128, 256, 258})
      for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
        SCOPED_TRACE(testing::Message() << "style " << style << ", dim " << dim << ", dtype "
                                        << static_cast<int>(dtype));
        const Array x = Array(dtype, {2, 9, 70, dim}, i % 2 ? Layout::padded : Layout::token_major).random(13, 2);
        const Array weight = Array(i % 3 ? DType::bf16 : DType::f32, {1, i % 2 ? 9 : 1, 1, dim}).random(3);
        const Array want(dtype, x.shape(), Layout::padded), got(dtype, x.shape(), Layout::padded), in_place = x;
        octet_rope rope = with_norm(rope_of(style), 1e-5f);
        if (style) rope.dim = i % 5 == 4 || dim > 256 ? 32 : 0, rope.offset = 9;
        const Tensor in = x.tensor(), of_cpu = weight.tensor();
        Tensor to = want.tensor();
        if (i % 4) rope.norm_weight = &of_cpu;
        check(octet_apply_rope(&rope, &in, 0, &to, nullptr));
        OnGpu gpu;
        const Tensor from = gpu.tensor(x), both = gpu.tensor(in_place), of_gpu = gpu.tensor(weight);
        Tensor out = gpu.tensor(got), same = both;
        if (i % 4) rope.norm_weight = &of_gpu;
        check(octet_apply_rope(&rope, &from, 0, &out, gpu.stream()));
        check(octet_apply_rope(&rope, &both, 0, &same, gpu.stream()));
        gpu.finish();
        expect_same(want, got, "y");
        expect_same(want, in_place, "y in place of x");
        ++i;
      }
}

// What a graph repeats has neither waited nor allocated.
TEST(GpuQuantizers, are_captured_in_graphs) {
  const Array x = Array(DType::bf16, {1, 2, 130, 16}).random(2, 1, 3);
  for (const Grouping& g : {kGroupings[0], kGroupings[1], kGroupings[7]}) {
    const Recipe recipe{.operand = g.operand, .granularity = g.granularity, .smooth = true, .seed = 4};
    SCOPED_TRACE(text_of(recipe));
    Quantized q(recipe, x.shape());
    const Array back(DType::f32, x.shape());
    OnGpu gpu;
    OnGpuQuantized out(q, gpu);
    const Tensor in = gpu.tensor(x);
    Tensor statistics = gpu.tensor(q.statistics), numbers = gpu.tensor(back);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t program = nullptr;
    check_cuda(cudaStreamBeginCapture(gpu.stream(), cudaStreamCaptureModeThreadLocal));
    check(octet_quantize(&in, nullptr, &out.codes, &statistics, gpu.stream()));
    check(octet_dequantize(&out.codes, &numbers, gpu.stream()));
    check_cuda(cudaStreamEndCapture(gpu.stream(), &graph));
    check_cuda(cudaGraphInstantiate(&program, graph, 0));
    for (int i = 0; i < 2; ++i) check_cuda(cudaGraphLaunch(program, gpu.stream()));
    gpu.finish();
    cudaGraphExecDestroy(program), cudaGraphDestroy(graph);
    const auto want = quantized(x, recipe);
    expect_same(*want, q);
    expect_same(dequantized(*want), back, "x");
  }
}

void expect_rejected(octet_status status, octet_status want, const char* message) {
  EXPECT_EQ(status, want) << message;
  EXPECT_NE(std::string(octet_message()).find(message), std::string::npos)
      << "expected: " << message << "\nfound: " << octet_message();
}

TEST(GpuQuantizers, reject_what_they_cannot_do_by_name) {
  const Array x = Array(DType::f32, {1, 1, 4, 8}).random(1), wide(DType::f32, {1, 1, 2, 1032}),
              y(DType::f32, wide.shape());
  Quantized q({.smooth = true}, x.shape());
  OnGpu gpu;
  OnGpuQuantized out(q, gpu);
  const Tensor in = gpu.tensor(x), host = x.tensor(), from = gpu.tensor(wide);
  Tensor statistics = q.statistics.tensor(), to = gpu.tensor(y), on_host = y.tensor();
  expect_rejected(octet_quantize(&host, nullptr, &out.codes, nullptr, nullptr), OCTET_INVALID_ARGUMENT,
                  "codes: on cuda:0, but x is on cpu:0");
  expect_rejected(octet_quantize(&in, nullptr, &out.codes, &statistics, nullptr), OCTET_INVALID_ARGUMENT,
                  "statistics: on cpu:0, but x is on cuda:0");
  Tensor numbers = x.tensor();
  expect_rejected(octet_dequantize(&out.codes, &numbers, nullptr), OCTET_INVALID_ARGUMENT,
                  "x: on cpu:0, but its codes are on cuda:0");
  octet_rope rope = rope_of(OCTET_ROPE_HALF);
  expect_rejected(octet_apply_rope(&rope, &from, 0, &on_host, nullptr), OCTET_INVALID_ARGUMENT,
                  "y: on cpu:0, but x is on cuda:0");
  expect_rejected(octet_apply_rope(&rope, &from, 0, &to, nullptr), OCTET_UNSUPPORTED,
                  "x: head dim 1032 on cuda:0, allowed there: up to 1024");
  Tensor narrow_from = from, narrow_to = to;
  narrow_from.shape[3] = narrow_to.shape[3] = 300;
  expect_rejected(octet_apply_rope(&rope, &narrow_from, 0, &narrow_to, nullptr), OCTET_UNSUPPORTED,
                  "rope dim: found 300 on cuda:0, allowed there: up to 256");
  const Array of_q(DType::f32, {1, 1, 1, 4});
  const Tensor q_statistics = gpu.tensor(of_q);
  const Array of_error(DType::f32, {1, 1, 1, 1});
  Tensor error = gpu.tensor(of_error);
  expect_rejected(octet_logit_error(&q_statistics, &q_statistics, 1.f, &error, nullptr), OCTET_UNSUPPORTED,
                  "q_statistics: on cuda:0, allowed: cpu");
  gpu.finish();
  EXPECT_EQ(q.codes.bytes(), Quantized({.smooth = true}, x.shape()).codes.bytes()) << "written nevertheless";
}

}  // namespace
}  // namespace octet::quantizing
