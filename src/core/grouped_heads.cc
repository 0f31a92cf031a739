#include "core/grouped_heads.h"

#include <utility>

#include "core/error.h"

namespace octet {
namespace {

// "q [batch 2, head 100, token 8, dim 64]"
std::string with_axes(const char* label, const View& t, bool swapped) {
  const int64_t heads = t.shape[swapped ? 2 : 1], tokens = t.shape[swapped ? 1 : 2];
  return text(label, swapped ? " would be" : "", " [batch ", t.shape[0], ", head ", heads, ", token ", tokens, ", dim ",
              t.shape[3], ']');
}

// With its heads and tokens swapped, q has as many tokens as k, and a multiple of its heads. One query is one step of
// a decoder, whose keys are any number; as many queries as heads read the same either way.
bool q_seems_swapped(const Problem& p) {
  if (p.heads != p.tokens_k || p.tokens_q < 2 || p.tokens_q == p.heads || p.tokens_q % p.kv_heads) return false;
  const bool by_head = p.sinks.present() || p.alibi_slopes.present();
  const bool masked = p.mask.present() && (p.mask.shape[1] == p.heads || p.mask.shape[2] == p.tokens_q);
  return !by_head && !masked;
}

// With their heads and tokens swapped, k and v have as many tokens as q, whose heads are a multiple of theirs.
bool k_seems_swapped(const Problem& p) {
  if (p.tokens_q != p.kv_heads || p.tokens_q < 2 || p.tokens_k == p.kv_heads || !p.tokens_k || p.heads % p.tokens_k)
    return false;
  const bool masked = p.mask.present() && p.tokens_k > 1 && p.mask.shape[3] == p.tokens_k;
  return !masked;
}

}  // namespace

void validate_grouped_heads(const Problem& p, octet_grouped_heads wanted) {
  if (wanted == OCTET_GROUPED_HEADS_AS_SHAPED || p.heads == p.kv_heads || !p.kv_heads) return;
  if (wanted == OCTET_GROUPED_HEADS_NONE)
    invalid("q: ", p.heads, " heads, but k and v have ", p.kv_heads,
            " heads; allowed with grouped_heads none: as many");
  if (p.packed()) return;  // cu_seqlens name the tokens
  const bool of_q = q_seems_swapped(p);
  if (!of_q && !k_seems_swapped(p)) return;
  invalid("q, k: heads and tokens of ", of_q ? "q" : "k and v", " seem swapped: ", with_axes("q", p.q, false),
          " meets ", with_axes("k", p.k, false), ", but swapped, ",
          of_q ? with_axes("q", p.q, true) : with_axes("k", p.k, true), ", as ",
          of_q ? "many tokens as k has" : "many tokens as q has",
          "; give q, k and v in one layout, or, if these shapes are meant, grouped_heads as-shaped");
}

}  // namespace octet
