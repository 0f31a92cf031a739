// Inputs, and the element types on the host.
#include <cstdio>
#include <cstring>
#include <fstream>

#include "harness.h"

namespace ladder {
namespace {

// A well mixed number for each counter (splitmix64).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// x with the given number of significant bits, in multiples of 2^lowest.
float keep_bits(float x, int bits, int lowest) {
  if (!std::isfinite(x) || x == 0) return x;
  int exponent;  // |x| is in [2^(exponent - 1), 2^exponent)
  std::frexp(x, &exponent);
  const int ulp = std::max(exponent - bits, lowest);
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(x), -ulp)), ulp));
}

// count normal values times scale, with 8 significant bits and in multiples of 2^-24, which f32, f16 and bf16 hold.
std::vector<float> normal(int64_t count, uint64_t stream, double scale) {
  std::vector<float> x(count);
  constexpr int64_t kChunk = 1 << 16;
  parallel_for(ceil_div(count, kChunk), [&](int64_t chunk) {
    for (int64_t i = chunk * kChunk; i < std::min(count, (chunk + 1) * kChunk); ++i) {
      const uint64_t a = mix((stream << 40) + 2 * i), b = mix((stream << 40) + 2 * i + 1);
      const double u = ((a >> 11) + 1) * 0x1p-53, angle = (b >> 11) * 0x1p-53 * 2 * M_PI;
      x[i] = keep_bits(static_cast<float>(scale * std::sqrt(-2 * std::log(u)) * std::cos(angle)), 8, -24);
    }
  });
  return x;
}

Tensors read_tensors(const Options& options, Element element) {
  const auto reject = [&](const std::string& text) {
    throw Stop{"--file: " + options.file.string() + " " + text + "\n", kUsage};
  };
  const int64_t elements = options.problem.elements(), needed = 3 * elements * static_cast<int64_t>(sizeof(float));
  std::error_code error;
  const auto found = std::filesystem::file_size(options.file, error);
  if (error) reject("cannot be read: " + error.message());
  if (static_cast<int64_t>(found) != needed) {
    reject("holds " + std::to_string(found) + " bytes, allowed: " + std::to_string(needed) +
           ", for q, k and v in f32 of the given shape");
  }
  Tensors tensors;
  std::ifstream in(options.file, std::ios::binary);
  for (auto* x : {&tensors.q, &tensors.k, &tensors.v}) {
    x->resize(elements);
    in.read(reinterpret_cast<char*>(x->data()), elements * sizeof(float));
    if (!in) reject("cannot be read to its end");
    for (int64_t i = 0; i < elements; ++i) {
      const float value = round_to(element, (*x)[i]);
      if (!std::isfinite(value)) {
        reject("holds " + std::to_string((*x)[i]) + " at element " + std::to_string(i) + " of " +
               (x == &tensors.q   ? "q"
                : x == &tensors.k ? "k"
                                  : "v") +
               ", allowed: finite values of " + name_of(element));
      }
      (*x)[i] = value;
    }
  }
  return tensors;
}

}  // namespace

float round_to(Element element, float x) {
  if (element == Element::f32) return x;
  if (element == Element::bf16) return keep_bits(x, 8, -133);
  const float rounded = keep_bits(x, 11, -24);
  return std::abs(rounded) > 65504 ? std::copysign(INFINITY, x) : rounded;
}

Tensors make_tensors(const Options& options, Element element) {
  const int64_t elements = options.problem.elements();
  if (options.input == Input::file) return read_tensors(options, element);
  if (options.input == Input::constant) {
    const std::vector<float> ones(elements, 1.0f);
    return {ones, ones, ones};
  }
  return {normal(elements, 1, 1), normal(elements, 2, 1), normal(elements, 3, 1)};
}

Layer make_layer(const Options& options) {
  const Problem& p = options.problem;
  const int64_t width = options.d_model, inner = static_cast<int64_t>(p.heads) * p.dim;
  const int64_t x = static_cast<int64_t>(p.batch) * p.seq * width, w = width * inner;
  if (options.input == Input::constant) {
    const std::vector<float> in(w, round_to(Element::bf16, 1.0f / width)),
        out(w, round_to(Element::bf16, 1.0f / inner));
    return {std::vector<float>(x, 1.0f), in, in, in, out};
  }
  const double in = 1 / std::sqrt(width), out = 1 / std::sqrt(inner);
  return {normal(x, 4, 1), normal(w, 5, in), normal(w, 6, in), normal(w, 7, in), normal(w, 8, out)};
}

std::vector<Rotation> make_rotations(int seq, int dim) {
  std::vector<Rotation> rotations;
  rotations.reserve(static_cast<size_t>(seq) * (dim / 2));
  for (int position = 0; position < seq; ++position) {
    for (int pair = 0; pair < dim / 2; ++pair) {
      const double angle = position * std::pow(10000.0, -2.0 * pair / dim);
      rotations.push_back({static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))});
    }
  }
  return rotations;
}

}  // namespace ladder
