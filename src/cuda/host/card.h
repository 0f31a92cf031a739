// The properties of a GPU that launches depend on.
#pragma once
#include <cstdint>

namespace octet::cuda {

struct Card {
  int multiprocessors;
  int64_t l2_bytes;
  int shared_bytes;  // the most that a thread block can have
};
// Returns those of a device, or of the current one. They are asked for once.
const Card& card(int device);
const Card& current_card();

}  // namespace octet::cuda
