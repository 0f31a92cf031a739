// What `octet tune` finds out: which of the kernels that can run a call is fastest on a card. All calls of a cell share
// what was found for one of them.
#pragma once
#include <cstdint>
#include <string>

#include "core/problem.h"

namespace octet {

// The calls of a pass, precision, head dims, logits and masks whose sizes lie between the same powers of two.
struct Cell {
  uint64_t bits;
  std::string name() const;  // 16 hexadecimal digits
};
Cell cell_of(const Problem& p);
// Describes the calls of a cell: "forward bf16, head dims 128 and 128, plain logits, causal, ...".
std::string describe_cell(const Problem& p);

// Sets the tile that octet tune found for a problem of a GPU, unless the caller names one. The file that has it is read
// once, at the first such problem.
void find_tile(Problem& p);

// The file of octet tune as a JSON object {path, cells, reason}: how many cells it has of this machine's cards, and why
// it is not read, or null.
std::string tuning_json();
// The GPU of a problem as files of octet tune name it, as a JSON string, or null where there is none.
std::string card_json(const Problem& p);
// "measured" where the default kernels of calls like this were compared with all others on the GPU of a problem
// (docs/tuning.md), else "predicted", as a JSON string, or null where there is no GPU.
std::string default_json(const Problem& p);
// Returns whether calls of this kind were timed on the card whose measurements chose the defaults.
bool has_measured_kind(const Problem& p);

}  // namespace octet
