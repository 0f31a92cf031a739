// Who sees whom, from the definition of the masks, and cases in which some tokens are seen by nobody.
#pragma once
#include <vector>

#include "support/cases.h"

namespace octet::test {

// Returns whether query i of head h in batch element b sees key j.
bool sees(const Case&, const Inputs&, int64_t b, int64_t h, int64_t i, int64_t j);

// Returns the position of query i as ALiBi counts it, at which the last query of its sequence is that of the last key,
// less that of key j; and the row of the slopes that are each sequence's own.
struct Relative {
  int64_t distance, slopes;
};
Relative relative(const Case&, int64_t b, int64_t i, int64_t j);

// By (batch, head of k and v, token) and (batch, head of q, token): whether any query of any head that shares it sees
// the key; whether the query sees any key.
struct SeenTokens {
  Values keys, queries;  // 1 or 0, one channel
};
SeenTokens seen_tokens(const Case&, const Inputs&);

// Cases with keys that no query sees and queries that see no key, by every kind of mask; and the inputs of one.
struct PartlySeen {
  Case c;
  Inputs in;
};
std::vector<Case> partly_seen_cases();
PartlySeen partly_seen(const Case& c, uint64_t seed);

// The inputs with `content(draw)` in the place of every number of k, v and their tangents that no query sees, and of q,
// do and its tangent where they see no key; draws count up from 0.
template <class Content>
Inputs with_unseen(const PartlySeen& x, const Content& content) {
  const SeenTokens seen = seen_tokens(x.c, x.in);
  Inputs in = x.in;
  uint64_t draws = 0;
  const auto fill = [&](Values& to, const Values& which) {
    for_each(to.shape, [&](int64_t b, int64_t h, int64_t t, int64_t c) {
      if (which.at(b, h, t, 0) == 0.0) to.at(b, h, t, c) = content(draws++);
    });
  };
  for (Values* k : {&in.k, &in.v, &in.tk, &in.tv}) fill(*k, seen.keys);
  for (Values* q : {&in.q, &in.do_, &in.tq}) fill(*q, seen.queries);
  return in;
}

}  // namespace octet::test
