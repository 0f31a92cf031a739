#include <bit>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/names.h"
#include "core/validate_parts.h"

namespace octet {
namespace {

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();  // of a sequence, whose length is an i32

// Rejects what has no meaning, or none yet, together with lengths of its own for each sequence.
void expect_no_more(const Problem& p) {
  for (const auto& [t, label] :
       {std::pair{&p.mask, "mask"}, {&p.dropout_seed, "dropout_seed"}, {&p.o_residual, "o_residual"}})
    if (t->present()) invalid(label, ": cannot be combined with seqused_k; pass NULL");
}

void expect_whole_numbers(const View& t, const char* label) {
  if (t.quantization) invalid(label, ": has a quantization, which only q, k and v may have; leave it NULL");
  expect_dtype(t, label, {OCTET_I32});
  if (t.stride[3] != 1 && t.elements()) invalid(label, ": last stride ", t.stride[3], ", allowed: 1");
}

}  // namespace

void expect_lengths(const View& seqused_k, int64_t sequences, const char* of_sequences) {
  expect_whole_numbers(seqused_k, "seqused_k");
  expect_shape(seqused_k, "seqused_k", {1, 1, 1, sequences}, of_sequences);
}

Pages validate_pages(const View& block_table, const View& k, int64_t sequences, const char* of_sequences) {
  expect_whole_numbers(block_table, "block_table");
  const int64_t columns = block_table.shape[3], size = k.shape[2];
  expect_shape(block_table, "block_table", {sequences, 1, 1, columns}, of_sequences);
  const bool power = size >= 16 && std::has_single_bit(static_cast<uint64_t>(size));
  if (size < 1 || (columns != 1 && !power))
    invalid("k: pages of ", size, " tokens, allowed: a power of two from 16 on",
            columns == 1 ? ", or with one page for each sequence any number" : "");
  if (columns > kMostTokens / size)
    invalid("block_table: ", columns, " pages of ", size, " tokens for each sequence, allowed: up to ", kMostTokens,
            " tokens");
  return {static_cast<const int32_t*>(block_table.data), block_table.stride[0], columns, size};
}

int64_t expect_in_cache(const View& seqused_k, int64_t sequence, const View& k, int64_t most, int64_t more,
                        const char* where) {
  const int64_t length = static_cast<const int32_t*>(seqused_k.data)[sequence], last = length + more;
  if (length < 0 || last > most)
    invalid("seqused_k: ", length, " keys of sequence ", sequence, more ? text(" and ", more, " new ones") : "",
            ", allowed: 0 to ", most, ", the tokens of ", k.pages.size ? "its pages" : where);
  const Pages& pages = k.pages;
  if (!pages.size) return length;
  for (int64_t column = more ? length / pages.size : 0; column * pages.size < last; ++column) {
    const int64_t page = pages.table[sequence * pages.stride + column];
    if (page < 0 || page >= k.shape[0])
      invalid("block_table: page ", page, " in column ", column, " of sequence ", sequence, ", allowed: 0 to ",
              k.shape[0] - 1, ", as k has ", k.shape[0], " pages");
  }
  return length;
}

void validate_cache(Problem& p) {
  if (!p.cached()) {
    if (p.block_table.present()) invalid("block_table: given without seqused_k, the keys of each sequence");
    return;
  }
  const char* const of_sequences = p.packed() ? "the packed sequences" : "the batch of q";
  const int64_t sequences = p.sequence_count();
  expect_lengths(p.seqused_k, sequences, of_sequences);
  expect_no_more(p);
  if (p.max_seqlen_k < 0)
    invalid("max_seqlen_k: found ", p.max_seqlen_k, ", allowed: a bound on the lengths, or 0 if unknown");
  if (!p.block_table.present()) return;

  p.k.pages = p.v.pages = validate_pages(p.block_table, p.k, sequences, of_sequences);
  for (const auto& [t, label] : {std::pair{&p.k, "k"}, {&p.v, "v"}})
    if (t->quantization && (t->quantization->granularity != OCTET_PER_TOKEN || t->quantization->mean))
      invalid(label, ": quantized per ", name(static_cast<octet_granularity>(t->quantization->granularity)),
              t->quantization->mean ? " with a mean" : "",
              "; allowed with block_table: per token without a mean, as pages are of many sequences");
  p.tokens_k = p.k.pages.tokens();
}

}  // namespace octet
