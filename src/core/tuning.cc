#include "core/tuning.h"

#include <bit>
#include <cstdio>

#include "core/error.h"
#include "core/names.h"

namespace octet {
namespace {

// Sizes between powers of two are alike: 0, 1, 2 to 3, 4 to 7, ...
int bucket(int64_t size) { return static_cast<int>(std::bit_width(static_cast<uint64_t>(size))); }
std::string bucket_text(int64_t size) {
  const int64_t least = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size)));
  return least <= 1 ? text(least) : text(least, " to ", 2 * least - 1);
}

enum class Terms { plain, mask, general };
Terms terms_of(const Problem& p) {
  return p.plain_logits() ? Terms::plain : p.softcap != 0.f || p.alibi_slopes.present() ? Terms::general : Terms::mask;
}

bool is_causal(const Problem& p) { return p.windowed && p.left == Problem::kUnbounded && p.right == 0; }

// Sequences are as long as the longest is known to be.
int64_t queries_of(const Problem& p) { return p.max_seqlen_q ? p.max_seqlen_q : p.tokens_q; }
int64_t keys_of(const Problem& p) { return p.max_seqlen_k ? p.max_seqlen_k : p.tokens_k; }

}  // namespace

std::string Cell::name() const {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(bits));
  return digits;
}

Cell cell_of(const Problem& p) {
  uint64_t bits = 0;
  int used = 0;
  const auto add = [&](uint64_t value, int width) { bits |= value << used, used += width; };
  add(p.pass, 2), add(p.precision, 5);
  add(static_cast<uint64_t>(p.dim + 7) / 8, 7), add(static_cast<uint64_t>(p.dim_v + 7) / 8, 7);
  add(static_cast<uint64_t>(terms_of(p)), 2), add(!p.windowed ? 0 : is_causal(p) ? 1 : 2, 2);
  for (const bool flag : {p.packed(), p.cached(), p.dropout != 0, p.deterministic, p.o_residual.present()})
    add(flag, 1);
  add(bucket(p.batch * p.heads), 7), add(bucket(p.group()), 6);
  add(bucket(queries_of(p)), 6), add(bucket(keys_of(p)), 6);
  static_assert(2 + 5 + 7 + 7 + 2 + 2 + 5 + 7 + 6 + 6 + 6 <= 64);
  return {bits};
}

std::string describe_cell(const Problem& p) {
  constexpr const char* kTerms[] = {"plain logits", "a mask tensor", "softcap or ALiBi"};
  std::string also;
  for (const auto& [holds, what] : {std::pair{p.packed(), ", packed"},
                                    {p.cached(), ", cached keys"},
                                    {p.dropout != 0, ", dropout"},
                                    {p.deterministic, ", deterministic"},
                                    {p.o_residual.present(), ", o_residual"}})
    if (holds) also += what;
  return text(name(p.pass), ' ', name(p.precision), ", head dims ", p.dim, " and ", p.dim_v, ", ",
              kTerms[static_cast<int>(terms_of(p))], ", ",
              !p.windowed    ? "full"
              : is_causal(p) ? "causal"
                             : "window",
              also, ", batch times heads ", bucket_text(p.batch * p.heads), ", heads of a key ", bucket_text(p.group()),
              ", queries ", bucket_text(queries_of(p)), ", keys ", bucket_text(keys_of(p)));
}

bool has_measured_kind(const Problem& p) {
  constexpr int64_t kMostDim = 256;
  return p.precision == OCTET_PRECISION_BF16 && p.pass != OCTET_JVP && p.plain_logits() && !p.packed() && !p.cached() &&
         !p.dropout && p.dim <= kMostDim && p.dim_v <= kMostDim && (!p.windowed || is_causal(p));
}

#ifndef OCTET_SM90
// A build without CUDA kernels has nothing to tune.
void find_tile(Problem&) {}
std::string tuning_json() { return "null"; }
std::string card_json(const Problem&) { return "null"; }
std::string default_json(const Problem&) { return "null"; }
#endif

}  // namespace octet
