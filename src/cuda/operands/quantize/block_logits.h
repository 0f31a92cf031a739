// The products that are added to the logits of queries from which the mean of their block was subtracted (smooth_q).
#pragma once

namespace octet::cuda {

constexpr int kSmoothedQueries = 128;  // that share a mean

// The products of the mean of each block of queries and each key of its sequence: [batch, head, block, key]. Blocks of
// packed sequences are numbered as tiles of keys are (quantize.h).
struct BlockLogits {
  float* data;       // null: queries are not centred
  int blocks, keys;  // of a head; the most that a sequence has
};

}  // namespace octet::cuda
