// Parts of validate.cc that have files of their own.
#pragma once
#include <octet/octet.h>

#include "core/problem.h"

namespace octet {

// The lengths of keys in a cache and its block table; k and v lie in its pages then.
void validate_cache(Problem& p);

// The options of the recipe.
void validate_recipe(const octet_attention& a, Problem& p);

}  // namespace octet
