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
  // Its tensor cores multiply e4m3 by mma.sync: those of compute capability 8.9 and 12. Others convert it to f16.
  bool has_e4m3_products;
  bool has_e4m3;  // it has instructions for e4m3, since compute capability 8.9
};
// Returns those of a device, or of the current one. They are asked for once.
const Card& card(int device);
const Card& current_card();

}  // namespace octet::cuda
