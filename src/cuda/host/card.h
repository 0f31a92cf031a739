// The properties of a GPU that launches depend on.
#pragma once
#include <cstdint>

namespace octet::cuda {

struct Card {
  int multiprocessors;
  int64_t l2_bytes;
  int shared_bytes;  // the most that a thread block can have
  // It multiplies f16 with sums in f16 twice as fast as with sums in float32. No attribute of a device tells; GeForce
  // cards do.
  bool has_fast_f16_sums;
};
// Returns those of a device, or of the current one. They are asked for once.
const Card& card(int device);
const Card& current_card();

}  // namespace octet::cuda
