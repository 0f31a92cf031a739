#include "core/problem.h"

#include <algorithm>
#include <cstdlib>

#include "core/error.h"
#include "core/validate_parts.h"

namespace octet {

KeyRange Problem::keys_of(int64_t i, int64_t n, int64_t m) const {
  if (!windowed) return {0, m};
  const int64_t diagonal = i + (bottom_right ? m - n : 0);
  const int64_t first = std::clamp<int64_t>(diagonal - left, 0, m);
  const int64_t last = std::clamp<int64_t>(diagonal + right + 1, 0, m);
  return {first, std::max(first, last)};
}

Problem::Distances Problem::distances_of(int64_t i, int64_t n, int64_t m, KeyRange keys) {
  if (keys.first >= keys.last) return {0, 0};
  const int64_t diagonal = i + m - n, nearest = std::clamp(diagonal, keys.first, keys.last - 1);
  return {std::abs(diagonal - nearest),
          std::max(std::abs(diagonal - keys.first), std::abs(diagonal - (keys.last - 1)))};
}

KeyRange Problem::keys_of_block(int64_t i, int64_t rows, int64_t n, int64_t m) const {
  // Both ends of a range grow with the query.
  return {keys_of(i, n, m).first, keys_of(i + rows - 1, n, m).last};
}

DropoutStream Problem::dropout_stream(const Sequence& seq, int64_t h) const {
  const bool shared = dropout_seed.shape[0] == 1;
  return octet::dropout_stream(dropout_seed.at<int32_t>(seq.index, 0, 0), shared ? seq.index : 0, h);
}

namespace {

int64_t cached_keys(const Problem& p, int64_t sequence) {
  const int64_t length = expect_in_cache(p.seqused_k, sequence, p.k, p.tokens_k, 0, "k");
  if (p.max_seqlen_k && length > p.max_seqlen_k)
    invalid("max_seqlen_k: ", p.max_seqlen_k, ", but sequence ", sequence, " has ", length, " keys");
  return length;
}

}  // namespace

std::vector<Sequence> sequences(const Problem& p) {
  std::vector<Sequence> out;
  if (!p.packed()) {
    const bool nothing_to_write = p.pass == OCTET_BACKWARD ? !p.dq.elements() && !p.dk.elements() : !p.o.elements();
    if (nothing_to_write) return out;
    for (int64_t b = 0; b < p.batch; ++b)
      out.push_back({b, 0, p.tokens_q, 0, p.cached() ? cached_keys(p, b) : p.tokens_k, b});
    return out;
  }
  const int64_t count = p.cu_seqlens_q.shape[3] - 1;
  const auto* q = static_cast<const int32_t*>(p.cu_seqlens_q.data);
  const auto* k = static_cast<const int32_t*>(p.cu_seqlens_k.data);
  const struct Side {
    const View& cu_seqlens;
    int64_t total, longest;
    const char *name, *label;
  } sides[] = {{p.cu_seqlens_q, p.tokens_q, p.max_seqlen_q, "q", "cu_seqlens_q"},
               {p.cu_seqlens_k, p.tokens_k, p.max_seqlen_k, "k", "cu_seqlens_k"}};
  for (const auto& [cu_seqlens, total, longest, name, label] : sides) {
    if (!cu_seqlens.present()) continue;  // the keys lie in a cache
    expect_ascending(cu_seqlens, label, total, name);
    const auto* const cu = static_cast<const int32_t*>(cu_seqlens.data);
    for (int64_t s = 0; s < count; ++s)
      if (longest && cu[s + 1] - cu[s] > longest)
        invalid("max_seqlen_", name, ": ", longest, ", but sequence ", s, " has ", cu[s + 1] - cu[s], " tokens");
  }
  for (int64_t s = 0; s < count; ++s)
    out.push_back({0, q[s], q[s + 1] - q[s], k ? k[s] : s * p.tokens_k, k ? k[s + 1] - k[s] : cached_keys(p, s), s});
  return out;
}

}  // namespace octet
