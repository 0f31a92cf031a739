// Thread groups are the rows that one thread holds in its mma fragments (SageAttention 2, arXiv 2411.10958,
// section 3.2): of each 32 queries those with equal row mod 8; of each 64 keys those with equal (row mod 8) div 2.
#pragma once
#include <cstdint>

namespace octet {

constexpr int64_t kThreadTileQ = 32, kThreadGroupsQ = 8;
constexpr int64_t kThreadTileK = 64, kThreadGroupsK = 4;

// The group of a token, counted from the first token of its sequence.
constexpr int64_t thread_group_q(int64_t token) { return token / kThreadTileQ * kThreadGroupsQ + token % 8; }
constexpr int64_t thread_group_k(int64_t token) { return token / kThreadTileK * kThreadGroupsK + token % 8 / 2; }

// The token that is number `i` of its group, the inverse of these.
constexpr int64_t token_of_group_q(int64_t group, int64_t i) {
  return group / kThreadGroupsQ * kThreadTileQ + i * 8 + group % kThreadGroupsQ;
}
constexpr int64_t token_of_group_k(int64_t group, int64_t i) {
  return group / kThreadGroupsK * kThreadTileK + i / 2 * 8 + group % kThreadGroupsK * 2 + i % 2;
}

}  // namespace octet
