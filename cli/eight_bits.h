// Where 8 bits pay: how many times as fast as bf16 their forward passes were measured or are predicted to be.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "passes.h"

namespace octet::cli {

// What is known for a card, by a part of its name, and a backend of it, "": octet's own choice: {card, measured (a
// date, null: predicted), dim, tokens, causal, times_as_fast_as_bf16: {precision: number}} of the shape nearest to this
// one. null: nothing is.
nlohmann::ordered_json eight_bits(const std::string& card, const std::string& backend, const ProblemShape& shape,
                                  bool causal);

// The same as a line, which says so where nothing is known.
std::string describe_eight_bits(const std::string& card, const nlohmann::ordered_json& found);

// Rejects a name of no card.
void expect_known_card(const std::string& card);

}  // namespace octet::cli
