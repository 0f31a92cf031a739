// The host functions that both forward launches share, beside those of sm90/launch.h.
#pragma once
#include <cuda_runtime_api.h>

#include "core/backend.h"
#include "cuda/operands/masks.h"
#include "cuda/sm90/fwd/choose.h"
#include "cuda/sm90/launch.h"

namespace octet::cuda::sm90 {

// The plans of the two kinds of forward kernels.
Plan forward_16bit(const Problem& p, const ForwardChoice& choice, void* workspace);
Plan forward_8bit(const Problem& p, const ForwardChoice& choice, void* workspace);

// Returns the width of the boxes of 8-bit numbers that TMA reads: the panels of SharedTile8Bit.
constexpr int panel_bytes(int64_t columns) { return columns % 128 == 0 ? 128 : columns % 64 == 0 ? 64 : 32; }

// Makes the last tiles of each head shorter (tail tiles) where the last wave of tiles would leave multiprocessors idle.
// Only for kernels whose warpgroups skip rows beyond the end of a tail tile.
void shorten_tail(const Problem& p, TileScheduler& scheduler);

}  // namespace octet::cuda::sm90
