// What surrounds the backward kernel: operands into tiles, delta, dq out of its sums. See sm90/backward_arguments.h.
#pragma once
#include <cuda_runtime_api.h>
#include <octet/octet.h>

#include "cuda/attn/views.h"
#include "cuda/sm90/backward_arguments.h"

namespace octet::cuda::sm90 {

constexpr int kChunks = 32;  // parts in which a head is surveyed

struct Preparation {
  Strided q, k, v, do_, o, o_residual, lse;         // o_residual: may be absent
  int tile_dim;                                     // of q, k, v and do in tiles
  octet_dtype type;                                 // of tiles: f16 or bf16
  octet_dtype round_do, round_q, round_k, round_v;  // first
  bool scaled;                                      // by powers of two
  bool smooth;                                      // subtract the mean of k for dq
  Blocks q_blocks, k_blocks;
  int group;
  int weight_exponent, product_exponent;

  unsigned* largest;     // [4][batch, kv_head]
  float* sums;           // [batch, kv_head][kChunks][dim]: of k
  Exponents* exponents;  // [batch, kv_head]
  float* mean;           // [batch, kv_head][dim]: of k
  unsigned char *q_tiles, *k_tiles, *k_smooth_tiles, *v_tiles, *do_tiles;
  float* rows;
};

void prepare(const Preparation& p, cudaStream_t stream);

// dq = scale times the sums.
void gather_dq(const BackwardArguments& a, int tile_dim, const Strided& dq, cudaStream_t stream);

}  // namespace octet::cuda::sm90
