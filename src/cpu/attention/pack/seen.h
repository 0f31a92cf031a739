// Keys that some query sees, and queries that see some key, take part in a call. The others may hold anything, so they
// count neither in means nor in scales.
#pragma once
#include <algorithm>
#include <type_traits>

#include "cpu/attention/job.h"
#include "cpu/attention/pack/numbers.h"

namespace octet::cpu::OCTET_ISA {

// The tokens of one sequence that are seen: an interval, and within it those that a mask tensor leaves.
struct SeenTokens {
  KeyRange range;
  const bool* listed = nullptr;  // [range.last]; null: all of the range

  bool operator[](int64_t token) const {
    return token >= range.first && token < range.last && (!listed || listed[token]);
  }
  int64_t count() const {
    return listed ? std::count(listed + range.first, listed + range.last, true) : range.last - range.first;
  }
  // Calls body(token) for up to kSampledTokens of them, evenly spread.
  template <class Body>
  OCTET_INLINE_MEMBER void for_sample(Body&& body) const {
    const int64_t tokens = count(), sampled = std::min(tokens, kSampledTokens);
    int64_t token = range.first, number = 0;
    for (int64_t i = 0; i < sampled; ++i, ++token, ++number) {
      const int64_t wanted = i * tokens / sampled;
      if (!listed) token += wanted - number, number = wanted;
      while (listed && (!listed[token] || number < wanted)) number += listed[token++];
      body(token);
    }
  }
};

// The keys that positional masks leave to any query of a sequence: an interval, as each query's begins and ends no
// earlier than the one before.
inline KeyRange keys_of_sequence(const Problem& p, const Sequence& seq) {
  if (!seq.q_tokens) return {0, 0};
  return p.keys_of_block(0, seq.q_tokens, seq.q_tokens, seq.k_tokens);
}

// Tells from the bits of an element of a mask tensor whether it hides its key.
struct HidesBool {
  using Element = uint8_t;
  OCTET_INLINE bool hides(Element x) { return !x; }
};
template <class T, T minus_infinity>
struct HidesFloat {
  using Element = T;
  OCTET_INLINE bool hides(Element x) { return x == minus_infinity; }
};

// Calls body with what hides keys in a mask of a dtype.
template <class Body>
OCTET_INLINE auto with_mask(octet_dtype dtype, Body&& body) {
  switch (dtype) {
    case OCTET_BOOL:
      return body(HidesBool());
    case OCTET_F32:
      return body(HidesFloat<uint32_t, 0xff800000u>());
    case OCTET_F16:
      return body(HidesFloat<uint16_t, 0xfc00>());
    default:
      return body(HidesFloat<uint16_t, 0xff80>());
  }
}

inline int64_t mask_bytes(octet_dtype dtype) { return dtype == OCTET_BOOL ? 1 : dtype == OCTET_F32 ? 4 : 2; }

// Row i of the mask tensor at `key`.
OCTET_INLINE const void* mask_row(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t key) {
  return static_cast<const char*>(p.mask.data) + p.mask.offset(b, h, i, key) * mask_bytes(p.mask.dtype);
}

// Returns whether query i of head h sees a key.
inline bool sees_a_key(const Problem& p, const Sequence& seq, int64_t h, int64_t i) {
  const KeyRange keys = p.keys_of(i, seq.q_tokens, seq.k_tokens);
  if (!p.mask.present()) return keys.first < keys.last;
  return with_mask(p.mask.dtype, [&](auto mask) {
    const auto* row = static_cast<const typename decltype(mask)::Element*>(mask_row(p, seq.batch, h, i, 0));
    for (int64_t j = keys.first; j < keys.last; ++j)
      if (!mask.hides(row[j * p.mask.stride[3]])) return true;
    return false;
  });
}

// Lists which keys of a sequence any query of the heads of kv head g sees through the mask tensor, [seq.k_tokens].
inline void list_seen_keys(const Problem& p, const Sequence& seq, int64_t g, bool* seen) {
  constexpr int64_t kAtOnce = 16;  // queries
  std::fill(seen, seen + seq.k_tokens, false);
  const KeyRange of_sequence = keys_of_sequence(p, seq);
  const int64_t heads = p.mask.stride[1] ? p.group() : 1;
  const int64_t queries = p.windowed || p.mask.stride[2] ? seq.q_tokens : std::min<int64_t>(seq.q_tokens, 1);
  with_mask(p.mask.dtype, [&](auto mask) {
    const auto look = [&](int64_t h, int64_t i, int64_t first, int64_t last, const auto& step) {
      const KeyRange keys = p.keys_of(i, seq.q_tokens, seq.k_tokens);
      const auto* row = static_cast<const typename decltype(mask)::Element*>(mask_row(p, seq.batch, h, i, 0));
      for (int64_t j = std::max(first, keys.first); j < std::min(last, keys.last); ++j)
        seen[j] |= !mask.hides(row[j * step]);
    };
    for (int64_t first = of_sequence.first; first < of_sequence.last; first += kKeys) {
      const int64_t last = std::min(first + kKeys, of_sequence.last);
      const auto done = [&] { return std::all_of(seen + first, seen + last, [](bool x) { return x; }); };
      // The last queries first: under a causal mask they see most.
      for (int64_t h = g * p.group(); h < g * p.group() + heads; ++h)
        for (int64_t i = queries; i > 0 && !done(); i -= kAtOnce)
          for (int64_t own = std::max<int64_t>(i - kAtOnce, 0); own < i; ++own)
            if (p.mask.stride[3] == 1)
              look(h, own, first, last, std::integral_constant<int64_t, 1>());
            else
              look(h, own, first, last, p.mask.stride[3]);
    }
  });
}

}  // namespace octet::cpu::OCTET_ISA
