// q, k and v that came quantized, and what holds for integers with zero points on every backend that takes them.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "support/cases.h"

namespace octet::test {

// How a tensor is quantized.
struct Quantizing {
  DType dtype = DType::i8;
  octet_granularity granularity = OCTET_PER_TOKEN;
  octet_zero_point zero_point = OCTET_SYMMETRIC;
  bool smooth = false;
  uint64_t seed = 0;  // of a rotation
  int64_t block = 0;
  Layout layout = Layout::bhtd;
};

// Codes with what they stand for.
struct Codes {
  Buffer codes, scale, zero_point, mean;
  octet_quantization how = OCTET_QUANTIZATION_INIT;

  Codes() = default;
  Codes(const Buffer& x, octet_operand operand, const Quantizing& by) {
    const Tensor of = x.view();
    const Shape shape{of.shape[0], of.shape[1], of.shape[2], of.shape[3]};
    int64_t groups = 0;
    check(octet_scale_groups(operand, by.granularity, by.block, shape[2], &groups));
    const Shape scales{shape[0], shape[1], groups, by.granularity == OCTET_PER_CHANNEL ? shape[3] : 1};
    codes = Buffer(by.dtype, shape, by.layout), scale = Buffer(DType::f32, scales);
    if (by.zero_point) zero_point = Buffer(DType::f32, scales);
    if (by.smooth) mean = Buffer(DType::f32, {shape[0], shape[1], 1, shape[3]});
    how.operand = operand, how.granularity = by.granularity, how.zero_point_kind = by.zero_point;
    how.hadamard_seed = by.seed, how.block = by.block;
    Tensor scale_view = scale.view(), zero_point_view, mean_view, view = codes.view();
    octet_quantization quantization = how;
    quantization.scale = &scale_view;
    if (by.zero_point) zero_point_view = zero_point.view(), quantization.zero_point = &zero_point_view;
    if (by.smooth) mean_view = mean.view(), quantization.mean = &mean_view;
    view.quantization = &quantization;
    check(octet_quantize(&of, nullptr, &view, nullptr, nullptr));
  }
  Buffer numbers() const;
};

// Codes as an argument of a call, in the memory of a place; null: the test's own.
struct CodesArgument {
  Tensor scale, zero_point, mean;
  octet_quantization quantization;
  Tensor tensor;

  explicit CodesArgument(const Codes& of, Place* place = nullptr) : quantization(of.how) {
    const auto at = [&](const Buffer& x) { return place ? place->tensor(x) : x.view(); };
    scale = at(of.scale), tensor = at(of.codes);
    quantization.scale = &scale;
    if (of.zero_point.present()) zero_point = at(of.zero_point), quantization.zero_point = &zero_point;
    if (of.mean.present()) mean = at(of.mean), quantization.mean = &mean;
    tensor.quantization = &quantization;
  }
  CodesArgument(const CodesArgument&) = delete;  // tensors point into it
};

inline Buffer Codes::numbers() const {
  const CodesArgument of(*this);
  const Buffer x(DType::f32, {of.tensor.shape[0], of.tensor.shape[1], of.tensor.shape[2], of.tensor.shape[3]});
  Tensor view = x.view();
  check(octet_dequantize(&of.tensor, &view, nullptr));
  return x;
}

// A backend, and the memory of one call; null: the test's own.
struct SolverOfCodes {
  const char* backend;
  std::unique_ptr<Place> place;

  Tensor at(const Buffer& x) const { return place ? place->tensor(x) : x.view(); }
  template <class Call>
  void solve(Attention attention, const Call& arguments) const {
    attention.backend = backend;
    if (!place) return run(attention, arguments);
    const size_t bytes = workspace_size(attention, arguments);
    run(attention, arguments, place->workspace(bytes), bytes, place->stream());
    EXPECT_FALSE(place->finish()) << "wrote beyond its workspace";
  }
};

// Integers with a scale of 1 and, unless it is symmetric, a zero point for each token.
struct Integers : Codes {
  Values numbers, zero_points;

  Integers(const Shape& shape, DType dtype, bool symmetric, octet_operand operand, std::mt19937_64& bits)
      : numbers(shape), zero_points({shape[0], shape[1], shape[2], 1}) {
    const int64_t low = dtype == DType::u8 ? 0 : -127, high = dtype == DType::u8 ? 255 : 127;
    std::uniform_int_distribution<int64_t> any(low, high);
    for (double& code : numbers.data) code = static_cast<double>(any(bits));
    // The ends of the range and others; all codes of the last token are one end, which makes the largest sums.
    for (size_t i = 0; i < zero_points.data.size(); ++i)
      zero_points.data[i] = symmetric ? 0.0 : static_cast<double>(i % 3 ? any(bits) : i % 2 ? high : low);
    for (int64_t c = 0; c < shape[3]; ++c)
      numbers.at(shape[0] - 1, shape[1] - 1, shape[2] - 1, c) = static_cast<double>(high);
    codes = Buffer(numbers, dtype), scale = Buffer(Values(zero_points.shape, 1.0), DType::f32);
    if (!symmetric) zero_point = Buffer(zero_points, DType::f32);
    how.operand = operand, how.granularity = OCTET_PER_TOKEN;
    how.zero_point_kind = symmetric ? OCTET_SYMMETRIC : OCTET_ZERO_POINT_INTEGER;
  }

  int64_t number(int64_t b, int64_t t, int64_t c) const {
    return static_cast<int64_t>(numbers.at(b, 0, t, c)) - static_cast<int64_t>(zero_points.at(b, 0, t, 0));
  }
};

constexpr std::pair<DType, bool> kIntegers[] = {
    {DType::i8, true}, {DType::i8, false}, {DType::u8, true}, {DType::u8, false}};

// lse of a query that sees one key is its logit: the exact sum of products, also the largest that there are. `lost`:
// the part of lse that a backend may lose after the sum, which it multiplies by log2 e and ln 2.
inline void expect_exact_logits(const std::function<SolverOfCodes()>& solvers, Precision precision, int64_t dim,
                                double lost = 0.0) {
  std::mt19937_64 bits(5);
  constexpr int64_t kBatch = 7, kQueries = 5;
  for (const auto& [q_type, q_symmetric] : kIntegers)
    for (const auto& [k_type, k_symmetric] : kIntegers) {
      const Integers q({kBatch, 1, kQueries, dim}, q_type, q_symmetric, OCTET_OPERAND_Q, bits),
          k({kBatch, 1, 1, dim}, k_type, k_symmetric, OCTET_OPERAND_K, bits);
      const SolverOfCodes solver = solvers();
      const CodesArgument q_codes(q, solver.place.get()), k_codes(k, solver.place.get());
      const Buffer v(Values({kBatch, 1, 1, 8}, 1.0), DType::f32), o(DType::f32, {kBatch, 1, kQueries, 8}),
          lse(DType::f32, {kBatch, 1, kQueries, 1});
      solver.solve(
          Attention{.precision = precision, .scale = 1.f},
          Forward{
              .q = q_codes.tensor, .k = k_codes.tensor, .v = solver.at(v), .o = solver.at(o), .lse = solver.at(lse)});
      const Values got = lse.values();
      for_each(got.shape, [&](int64_t b, int64_t, int64_t t, int64_t) {
        int64_t sum = 0;
        for (int64_t c = 0; c < dim; ++c) sum += q.number(b, t, c) * k.number(b, 0, c);
        const double exact = static_cast<double>(sum), bound = lost * std::fabs(exact);
        ASSERT_LE(std::fabs(got.at(b, 0, t, 0) - exact), bound)
            << name(precision) << ", dim " << dim << ", batch " << b << ", query " << t;
      });
    }
}

// Queries of zeros weigh all keys alike: o is the mean of v, whose integers are exact, in float32.
inline void expect_exact_sums_of_v(const std::function<SolverOfCodes()>& solvers, int64_t dim) {
  std::mt19937_64 bits(6);
  constexpr int64_t kKeys = 200;
  for (const auto& [type, symmetric] : kIntegers) {
    const Integers v({2, 1, kKeys, dim}, type, symmetric, OCTET_OPERAND_V, bits);
    const SolverOfCodes solver = solvers();
    const CodesArgument v_codes(v, solver.place.get());
    const Buffer q(Values({2, 1, 70, 16}), DType::f32), k(Values({2, 1, kKeys, 16}, 1.0), DType::f32),
        o(DType::f32, {2, 1, 70, dim});
    solver.solve(Attention{.precision = Precision::int8},
                 Forward{.q = solver.at(q), .k = solver.at(k), .v = v_codes.tensor, .o = solver.at(o)});
    const Values got = o.values();
    for_each(got.shape, [&](int64_t b, int64_t, int64_t t, int64_t c) {
      int64_t sum = 0;
      for (int64_t j = 0; j < kKeys; ++j) sum += v.number(b, j, c);
      ASSERT_NEAR(got.at(b, 0, t, c), static_cast<double>(sum) / kKeys, 255 * 0x1p-20) << "dim " << dim;
    });
  }
}

// A zero point that is no code, which no quantizer writes, makes its token NaN.
inline void expect_nan_of_wrong_zero_points(const std::function<SolverOfCodes()>& solvers) {
  std::mt19937_64 bits(7);
  for (const double wrong : {128.0, 0.5, -129.0, double(NAN)}) {
    Integers q({1, 1, 4, 16}, DType::i8, false, OCTET_OPERAND_Q, bits);
    const Integers k({1, 1, 4, 16}, DType::i8, false, OCTET_OPERAND_K, bits);
    q.zero_points.at(0, 0, 2, 0) = wrong;
    q.zero_point = Buffer(q.zero_points, DType::f32);
    const SolverOfCodes solver = solvers();
    const CodesArgument q_codes(q, solver.place.get()), k_codes(k, solver.place.get());
    const Buffer v(Values({1, 1, 4, 8}, 1.0), DType::f32), o(DType::f32, {1, 1, 4, 8});
    solver.solve(Attention{.precision = Precision::int8},
                 Forward{.q = q_codes.tensor, .k = k_codes.tensor, .v = solver.at(v), .o = solver.at(o)});
    const Values got = o.values();
    for (int64_t t = 0; t < 4; ++t) EXPECT_EQ(std::isnan(got.at(0, 0, t, 0)), t == 2) << wrong << ", query " << t;
  }
}

}  // namespace octet::test
