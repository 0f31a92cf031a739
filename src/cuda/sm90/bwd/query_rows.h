// The backward pass where the kernel reads the caller's q and do, which are bf16 operands without any scale.
#pragma once
#include "cuda/bwd/preprocess.h"
#include "cuda/fragment/alibi.h"
#include "cuda/fragment/dropout.h"
#include "cuda/operands/token_flags.h"

namespace octet::cuda::sm90 {

// Returns whether the kernel of a head dim can do so. At 80, where ptxas would order the mainloop otherwise, too, it is
// slower; at 160 the thread blocks of a cluster would not share half of a panel.
constexpr bool may_read_rows(int dim) { return dim != 80 && dim != 160; }

// Where `q` and `do_` are null, the kernel reads the caller's rows; that of a 2-CTA cluster then reads those of k and v
// as they are, too. Where `sends_keys` is true, TMA writes dk and dv. The maps are [dim, token, head, batch], in boxes
// of 64 channels: of a tile of queries, of a thread block's keys, and of the keys of a warp.
struct BackwardRowsParams : BackwardParams {
  CUtensorMap q_rows, do_rows, dk_rows, dv_rows;
  bool sends_keys;
  AlibiSlopes slopes;
  Dropout dropout;
  // A mask tensor as TMA reads it; {query, head, batch}: 0 where it is the same for all, else 1.
  CUtensorMap mask_tiles;
  int mask_broadcast[3];
  TokenFlags seen_keys;  // of k and v that are converted here
};
constexpr int kSentRows = 16;  // of a warp

// The preprocessing for it: writes QueryRows of all queries, each of which sees a key, and exponents of 0. q, k, v, do,
// o and its residual are bf16 tensors that TMA can read. Where sums of dq are integers, there is no gradient of lse.
void preprocess_rows(PreprocessParams p, Sums sums, cudaStream_t stream);

}  // namespace octet::cuda::sm90
