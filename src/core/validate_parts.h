// Parts of validate.cc that have files of their own.
#pragma once
#include <octet/octet.h>

#include "core/problem.h"

namespace octet {

// Reject cu_seqlens of a wrong shape or type, and, in memory of the CPU, those that do not ascend from 0 to `tokens`,
// the number of tokens of `of`.
void expect_cu_seqlens(const View& cu_seqlens, const char* label);
void expect_ascending(const View& cu_seqlens, const char* label, int64_t tokens, const char* of);

// The lengths of keys in a cache, and its pages: k is the cache, `of_sequences` tells whose the sequences are.
void expect_lengths(const View& seqused_k, int64_t sequences, const char* of_sequences);
Pages validate_pages(const View& block_table, const View& k, int64_t sequences, const char* of_sequences);
// Returns the keys of a sequence in a cache. Throws Failure unless these and `more` lie in it; `where` names its
// tokens.
int64_t expect_in_cache(const View& seqused_k, int64_t sequence, const View& k, int64_t most, int64_t more,
                        const char* where);

// The lengths of keys in a cache and its block table; k and v lie in its pages then.
void validate_cache(Problem& p);

// The options of the recipe.
void validate_recipe(const octet_attention& a, Problem& p);

}  // namespace octet
