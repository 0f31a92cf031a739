// The host's part of the backward pass that all architectures share: sizes, workspace and parameters of a problem.
#pragma once
#include "core/problem.h"
#include "cuda/bwd/params.h"
#include "cuda/bwd/preprocess.h"
#include "cuda/host/workspace.h"

namespace octet::cuda {

// Returns the dim of the tiles: 64, 128 or 256.
int backward_dim(const Problem& p);

// Returns true where the operands are f16: at precision f16, and at bf16 with bias correction f16.
bool f16_compute(const Problem& p);

// Returns true where the logits of a row may have a large number in common, from a mask tensor or ALiBi.
bool has_gauge(const Problem& p);

// Returns blocks of `rows` of `tokens` tokens, with what packed sequences need of the workspace.
Blocks blocks_of(int rows, int64_t tokens, const View& cu_seqlens, WorkspaceAllocator& allocator);

// Counts the blocks of packed sequences, before a kernel reads them.
void count_blocks(const Blocks& q, const Blocks& k, cudaStream_t stream);

Sums sums_of(const Problem& p);

// Returns the parameters of preprocessing, with what they need of the workspace. With `query_tiles`, q and do are
// written as tiles, with `key_tiles`, k and v; else the kernel reads the caller's rows. All sums of dq are set to 0
// beforehand.
PreprocessParams preprocess_params(const Problem& p, bool query_tiles, bool key_tiles, WorkspaceAllocator& allocator);

// Returns the parameters of the kernel but for the maps of the caller's rows. `in_flight`: the blocks of keys that are
// computed at a time.
BackwardParams backward_params(const Problem& p, const PreprocessParams& params, int in_flight, const Output& dk,
                               const Output& dv);

}  // namespace octet::cuda
