// Dropout: which elements of P are dropped is a pure function of the call's seed and offset and of the place of the
// element, the same on every backend (docs/numerics.md, Dropout).
//
// One call of Philox decides a group of 16 elements: queries {i, i + 1, i + 8, i + 9} and keys {j, j + 1, j + 8, j +
// 9}, for even i and j of which (i mod 16) and (j mod 16) are below 8. Two neighbouring threads of a tensor core's
// accumulator hold such a group together, whether its rows are queries or keys.
//
// Every function is constexpr and `static`, as in core/quant: kernels call them.
#pragma once
#include <cstdint>

namespace octet {

constexpr int kDropoutBits = 23;  // probabilities are multiples of 2^-23
constexpr uint32_t kDropoutOne = 1u << kDropoutBits;

struct PhiloxWords {
  uint32_t word[4];
};

// Philox-4x32-7 (Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011): seven rounds,
// each with the key of the round before plus the steps.
constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9, kPhiloxKeyStep1 = 0xBB67AE85;
static constexpr PhiloxWords philox_round(const PhiloxWords& x, uint32_t key0, uint32_t key1) {
  const uint64_t a = uint64_t{0xD2511F53} * x.word[0], b = uint64_t{0xCD9E8D57} * x.word[2];
  return {{static_cast<uint32_t>(b >> 32) ^ x.word[1] ^ key0, static_cast<uint32_t>(b),
           static_cast<uint32_t>(a >> 32) ^ x.word[3] ^ key1, static_cast<uint32_t>(a)}};
}
static constexpr PhiloxWords philox(uint32_t key0, uint32_t key1, PhiloxWords counter) {
  for (uint32_t round = 0; round < kPhiloxRounds; ++round)
    counter = philox_round(counter, key0 + round * kPhiloxKeyStep0, key1 + round * kPhiloxKeyStep1);
  return counter;
}

// The random numbers of one head of one sequence: the key, and words 2 and 3 of the counter.
struct DropoutStream {
  uint32_t key0, key1, word2, word3;
};

// Returns the stream of a head. `seed`: the four words of dropout_seed for this sequence, which are the seed and then
// the offset, low words first. `sequence`: its number among those that share the seed.
static constexpr DropoutStream dropout_stream(const int32_t* seed, int64_t sequence, int64_t head) {
  const auto word = [&](int i) { return static_cast<uint32_t>(seed[i]); };
  return {word(0), word(1), word(3) + static_cast<uint32_t>(head), word(2) + static_cast<uint32_t>(sequence)};
}

// The number of a query's or key's group along its tokens; its place in the group is that of an element below.
template <class Integer>
static constexpr uint32_t dropout_group(Integer token) {
  return static_cast<uint32_t>(token / 16 * 4 + token % 8 / 2);
}

static constexpr PhiloxWords dropout_counter(const DropoutStream& stream, uint32_t query_group, uint32_t key_group) {
  return {{key_group, query_group, stream.word2, stream.word3}};
}

// A byte of `words` for each element of a group: 7 bits of its own, which are compared with a threshold, and one of the
// 16 that the group has in common, which decide whether that threshold is the one below or above 128 times the
// probability. So every element is dropped with the probability itself.

constexpr uint32_t kDropoutOwnBits = 0x7f7f7f7f, kDropoutCommonBits = 0x80808080;

// The 16 bits of a number from 0 to 65535 in the places that the common bits of a group take in `dropout_common`.
static constexpr uint32_t dropout_spread(uint32_t x) {
  return (x & 0xf) << 4 | (x & 0xf0) << 8 | (x & 0xf00) << 12 | (x & 0xf000) << 16;
}
static constexpr uint32_t dropout_common(const PhiloxWords& words) {
  return (words.word[0] & kDropoutCommonBits) >> 3 | (words.word[1] & kDropoutCommonBits) >> 2 |
         (words.word[2] & kDropoutCommonBits) >> 1 | (words.word[3] & kDropoutCommonBits);
}

// Returns the number that is added to the own bits of four elements, so that the top bit of each byte tells that the
// element is kept.
// `dropped`: the probability times 2^23.
static constexpr uint32_t dropout_addend(const PhiloxWords& words, uint32_t dropped) {
  const bool above = dropout_common(words) < dropout_spread(dropped & 0xffff);
  return (128 - (dropped >> 16) - above) * 0x01010101u;
}

// The elements of a word that are kept: the top bits of its bytes. Word w of a group has the keys j + 8 (w mod 2) and
// the next, of the queries i + 8 (w / 2) and the next: byte b has query b / 2 and key b mod 2 of these.
static constexpr uint32_t dropout_kept(uint32_t word, uint32_t addend) {
  return ((word & kDropoutOwnBits) + addend) & kDropoutCommonBits;
}

// Returns whether the element of one query and one key is dropped.
static constexpr bool is_dropped(const DropoutStream& stream, uint32_t dropped, int64_t query, int64_t key) {
  const PhiloxWords counter = dropout_counter(stream, dropout_group(query), dropout_group(key)),
                    words = philox(stream.key0, stream.key1, counter);
  const bool below = query / 8 % 2, right = key / 8 % 2;
  const uint32_t word = below ? (right ? words.word[3] : words.word[2]) : (right ? words.word[1] : words.word[0]);
  const int byte = static_cast<int>(query % 2 * 2 + key % 2);
  return !(dropout_kept(word, dropout_addend(words, dropped)) >> (8 * byte + 7) & 1);
}

}  // namespace octet
