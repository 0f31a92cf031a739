// The host's part of the backward pass that all architectures share: sizes, workspace and parameters of a problem.
#pragma once
#include "core/problem.h"
#include "cuda/bwd/choose.h"
#include "cuda/bwd/params.h"
#include "cuda/bwd/preprocess.h"
#include "cuda/host/workspace.h"

namespace octet::cuda {

// Returns blocks of `rows` of `tokens` tokens, with what packed sequences need of the workspace.
Blocks blocks_of(int rows, int64_t tokens, const View& cu_seqlens, WorkspaceAllocator& allocator);

// Counts the blocks of packed sequences, before a kernel reads them.
void count_blocks(const Blocks& q, const Blocks& k, cudaStream_t stream);

// Returns the parameters of preprocessing, with what they need of the workspace. With `query_tiles`, q and do are
// written as tiles, with `key_tiles`, k and v; else the kernel reads the caller's rows. All sums of dq are set to 0
// beforehand.
PreprocessParams preprocess_params(const Problem& p, const BackwardChoice& choice, bool query_tiles, bool key_tiles,
                                   WorkspaceAllocator& allocator);

// Returns the parameters of the kernel but for the maps of the caller's rows. `in_flight`: the blocks of keys that are
// computed at a time.
BackwardParams backward_params(const Problem& p, const PreprocessParams& params, int in_flight, const Output& dk,
                               const Output& dv);

}  // namespace octet::cuda
