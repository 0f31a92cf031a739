#include "core/rope.h"

#include <bit>
#include <cmath>
#include <iterator>

namespace octet {
namespace {

// 1 / (2 pi), of which each word has the 64 bits after those of the one before.
constexpr uint64_t kInverseTurn[] = {
    0x28be60db9391054a, 0x7f09d5f47d4d3770, 0x36d8a5664f10e410, 0x7f9458eaf7aef158, 0x6dc91b8e909374b8,
    0x01924bba82746487, 0x3f877ac72c4a69cf, 0xba208d7d4baed121, 0x3a671c09ad17df90, 0x4e64758e60d4ce7d,
    0x272117e2ef7e4a0e, 0xc7fe25fff7816603, 0xfbcbc462d6829b47, 0xdb4d9fb3c9f2c26d, 0xd3d18fd9a797fa8b,
    0x5d49eeb1faf97c5e, 0xcf41ce7de294a4ba, 0x9afed7ec47e35742, 0x1580cc11bf1edaea, 0xfc33ef0826bd0d87,
};
constexpr int64_t kWords = std::size(kInverseTurn);

// The 64 bits of 1 / (2 pi) from bit `first` after the point on; bits before the point are 0.
uint64_t bits_from(int64_t first) {
  const auto word = [](int64_t i) { return i >= 0 && i < kWords ? kInverseTurn[i] : 0; };
  const int64_t i = first >> 6, shift = first & 63;
  return shift ? word(i) << shift | word(i + 1) >> (64 - shift) : word(i);
}

}  // namespace

// An angle is an integer times 2^exponent. Bits of 1 / (2 pi) that give whole turns are left out, and so are those
// beyond 192 bits, which would add less than 2^-138.
Turn turn_of(double angle) {
  int exponent = 0;
  const auto mantissa = static_cast<uint64_t>(std::ldexp(std::frexp(angle, &exponent), 53));
  exponent -= 53;
  using Wide = unsigned __int128;
  const Wide low = Wide{bits_from(exponent + 128)} * mantissa, middle = Wide{bits_from(exponent + 64)} * mantissa;
  const Wide sum = middle + (low >> 64);
  const uint64_t high = bits_from(exponent) * mantissa + static_cast<uint64_t>(sum >> 64);
  return {high, static_cast<uint64_t>(sum)};
}

std::vector<Turn> rope_turns(const Rope& rope, bool inverse) {
  std::vector<Turn> turns(static_cast<std::size_t>(rope.dim / 2));
  for (int64_t c = 0; c < rope.dim / 2; ++c) {
    const double theta = std::pow(rope.base, -2.0 * static_cast<double>(c) / static_cast<double>(rope.dim));
    Turn turn = turn_of(theta);
    if (inverse) turn = {~turn.high + (turn.low == 0), uint64_t{0} - turn.low};
    turns[static_cast<std::size_t>(c)] = turn;
  }
  return turns;
}

}  // namespace octet
