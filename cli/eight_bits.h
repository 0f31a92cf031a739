// Where 8 bits pay: how many times as fast as bf16 their forward passes were measured or are predicted to be.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "passes.h"

namespace octet::cli {

// Returns the speeds of the known shape that is nearest to this one, on a card and by a backend: {card, measured (the
// date, or null where they are predicted), backend, dim, tokens, causal, times_as_fast_as_bf16: {precision: number}}.
// It returns null where no speed is known. `card` may be a part of the name; an empty `backend` stands for the one that
// octet chooses.
nlohmann::ordered_json eight_bits(const std::string& card, const std::string& backend, const ProblemShape& shape,
                                  bool causal);

// The same as a line, which says so where nothing is known.
std::string describe_eight_bits(const std::string& card, const nlohmann::ordered_json& found);

// Rejects a name of no card.
void expect_known_card(const std::string& card);

}  // namespace octet::cli
