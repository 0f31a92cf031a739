// The kernel of a forward pass, chosen from its recipe, and how its tiles are laid out.
#pragma once
#include <string>
#include <vector>

#include "cuda/fwd/choose.h"
#include "cuda/sm80/fwd/kernels.h"

namespace octet::cuda::sm80 {

struct ForwardChoice {
  ForwardKernel kernel;
  ForwardNumerics numerics;
  bool general;                 // logits are more than scale q.k, or the maximum is shifted
  bool f32;                     // operands are f16 halves
  bool int8_qk;                 // q and k become int8
  bool int8_v;                  // so does v, with a scale for each token
  bool blocks;                  // blocks of tokens share the scales of int8
  bool k_groups;                // thread groups of int8 keys share a scale
  bool codes;                   // q and k came as codes that stay as they are
  bool v_codes;                 // so did v
  bool training;                // q and k become int8 as the backward pass has them, and v f16 that comes from int8
  bool e4m3_qk;                 // q and k become e4m3
  bool e4m3_v;                  // so does v
  bool e4m3_scales;             // with a scale for each token and for each channel of v
  bool e4m3_products;           // they are multiplied as they are, not as f16
  bool scales_v;                // v becomes f16, divided by a power of two for each head
  bool f16_sums;                // P v of a tile of keys is summed in f16
  bool pages_of_codes = false;  // k and v are read as codes in pages
  bool few = false;             // the kernel is one for few queries
  int tile_heads = 1, tile_queries, splits = 1;
  int64_t tiles;  // for packed sequences, whose lengths lie on the device, at least as many as there are
};
ForwardChoice choose_forward(const Problem& p, const ForwardNumerics& numerics);

// Names the tiles of the kernels that it chooses from, the default first.
std::vector<std::string> forward_tiles(const Problem& p, const ForwardNumerics& numerics);

}  // namespace octet::cuda::sm80
