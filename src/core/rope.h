// The angles of a rotary position embedding.
#pragma once
#include <cstdint>
#include <vector>

#include "core/quant/rope.h"
#include "core/quantization.h"

namespace octet {

// The fraction of a full turn that an angle is, which is finite and not negative.
Turn turn_of(double angle);

// Returns how far each pair turns from a position to the next; `inverse`: the opposite way.
std::vector<Turn> rope_turns(const Rope& rope, bool inverse);

}  // namespace octet
