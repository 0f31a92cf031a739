// Rotary position embedding (RoFormer, arXiv 2104.09864): pair c of a token turns by position * theta_c. The angles of
// the CPU and of the GPU are the same bits: a fraction of a full turn is an integer, of which position times theta_c
// keeps what is left of whole turns without an error, and sines are polynomials.
//
// Positions are split into start + i with start a multiple of 64. Sines of both are rounded to double and joined by the
// addition theorems, with an error of a few units of 2^-53; the CPU computes them once for many tokens.
#pragma once
#include <cstdint>

namespace octet {

// A fraction of a full turn, in units of 2^-128.
struct Turn {
  uint64_t high, low;
};

// n turns modulo 1, in units of 2^-64.
static constexpr uint64_t times(const Turn& turn, int64_t n) {
  const uint64_t magnitude = n < 0 ? uint64_t{0} - static_cast<uint64_t>(n) : static_cast<uint64_t>(n);
  const uint64_t carry = static_cast<uint64_t>(static_cast<unsigned __int128>(turn.low) * magnitude >> 64);
  const uint64_t product = turn.high * magnitude + carry;
  return n < 0 ? uint64_t{0} - product : product;
}

struct CosSin {
  double cosine, sine;
};

// Returns the polynomial with these coefficients, that of the highest power first.
template <int N>
static constexpr double polynomial(const double (&coefficients)[N], double x) {
  double sum = coefficients[0];
  for (int i = 1; i < N; ++i) sum = sum * x + coefficients[i];
  return sum;
}

// Returns those of a fraction of a turn in units of 2^-64. Within an eighth of a turn, Taylor's series end below 2^-58.
static constexpr CosSin cos_sin(uint64_t turn) {
  const uint64_t quadrant = (turn + (uint64_t{1} << 61)) >> 62;
  const double x =
      static_cast<double>(static_cast<int64_t>(turn - (quadrant << 62))) * (0x1.921fb54442d18p+2 * 0x1p-64);
  const double z = x * x;
  const double s = polynomial({1.0 / 355687428096000.0, -1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800.0,
                               1.0 / 362880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0},
                              z);
  const double sine = x + x * z * s;
  const double c = polynomial({1.0 / 20922789888000.0, -1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0,
                               1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0, -1.0 / 2.0},
                              z);
  const double cosine = 1.0 + z * c;
  switch (quadrant & 3) {
    case 0:
      return {cosine, sine};
    case 1:
      return {-sine, cosine};
    case 2:
      return {-cosine, -sine};
    default:
      return {sine, -cosine};
  }
}

constexpr int64_t kRopeSpan = 64;  // positions from one start to the next

static constexpr CosSin joined(const CosSin& start, const CosSin& i) {
  return {start.cosine * i.cosine - start.sine * i.sine, start.cosine * i.sine + start.sine * i.cosine};
}
static constexpr CosSin cos_sin_at(const Turn& turn, int64_t position) {
  const int64_t i = position & (kRopeSpan - 1);
  return joined(cos_sin(times(turn, position - i)), cos_sin(times(turn, i)));
}

// Rotates a pair by an angle whose cosine and sine are given. Products are taken in double: those of two floats are
// exact there.
template <class T>
static constexpr void rotate(T& x, T& y, T cosine, T sine) {
  const double a = x, b = y, p = cosine, q = sine;
  x = static_cast<T>(a * p - b * q);
  y = static_cast<T>(a * q + b * p);
}

}  // namespace octet
