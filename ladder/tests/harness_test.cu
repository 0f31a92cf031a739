// What the harness runs on the GPU around a rung.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include "../harness/harness.h"
#include "device_array.h"

namespace ladder {
namespace {

TEST(Device, RopeIsThatOfFloat64WithBothPairings) {
  constexpr int kHeads = 3, kSeq = 700, kDim = 64;
  const std::vector<float> x = numbers(kHeads * kSeq * kDim, 11);
  for (Pairing pairing : {Pairing::halves, Pairing::interleaved}) {
    std::vector<double> expected(x.begin(), x.end());
    reference_rope(expected, kHeads, kSeq, kDim, pairing);
    const DeviceArray<float> device_x(x);
    const DeviceArray<Rotation> rotations(make_rotations(kSeq, kDim));
    rope(Element::f32, device_x.get(), kHeads, kSeq, kDim, rotations.get(), pairing, nullptr);
    const std::vector<float> found = device_x.values();
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_NEAR(found[i], expected[i], 4 * 0x1p-24) << name_of(pairing) << " " << i;
  }
}

TEST(Device, ProjectionsGoToAndFromTheLayoutOfHeads) {
  const Problem p{.batch = 2, .heads = 3, .seq = 21, .dim = 32};
  constexpr int kModel = 40;
  const int rows = p.batch * p.seq, inner = p.heads * p.dim;
  const std::vector<float> x = numbers(rows * kModel, 12), w = numbers(kModel * inner, 13),
                           w_out = numbers(inner * kModel, 14);
  const DeviceArray<float> device_x(x), device_w(w), device_out(w_out), q(p.elements()), y(rows * kModel);
  project_in(Element::f32, p, kModel, device_x.get(), device_w.get(), q.get(), nullptr);
  project_out(Element::f32, p, kModel, q.get(), device_out.get(), y.get(), nullptr);
  const std::vector<double> expected_q = reference_product({x.begin(), x.end()}, w, rows, kModel, inner);
  const std::vector<double> expected_y = reference_product(expected_q, w_out, rows, inner, kModel);
  const std::vector<float> found_q = q.values(), found_y = y.values();
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.heads; ++h) {
      for (int s = 0; s < p.seq; ++s) {
        for (int c = 0; c < p.dim; ++c) {
          ASSERT_NEAR(found_q[((b * p.heads + h) * p.seq + s) * p.dim + c],
                      expected_q[(b * p.seq + s) * inner + h * p.dim + c], kModel * kModel * 0x1p-24);
        }
      }
    }
  }
  for (int i = 0; i < rows * kModel; ++i) ASSERT_NEAR(found_y[i], expected_y[i], inner * inner * kModel * 0x1p-23) << i;
}

// f16 and bf16 bits of the GPU are those of the CPU, ties and subnormal numbers among them.
TEST(Device, RoundsToTheElementTypesAsTheHostDoes) {
  std::vector<float> x = numbers(4096, 15);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(x[i], static_cast<int>(i % 40) - 28);
  for (float tie :
       {1 + 0x1p-11f, 1 + 3 * 0x1p-11f, 1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 0x1p-25f, 3 * 0x1p-25f, 65519.0f, 65520.0f}) {
    x.push_back(tie);
  }
  for (Element element : {Element::f16, Element::bf16}) {
    const DeviceArray<float> device_x(x), back(x.size());
    const DeviceArray<uint16_t> rounded(x.size());
    to_element(element, device_x.get(), rounded.get(), x.size(), nullptr);
    to_float(element, rounded.get(), back.get(), x.size(), nullptr);
    const std::vector<float> found = back.values();
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(found[i], round_to(element, x[i])) << name_of(element) << " " << x[i];
  }
}

}  // namespace
}  // namespace ladder
