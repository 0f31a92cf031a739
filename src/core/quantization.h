// The quantizers behind octet.h: validate the arguments, then hand them to the CPU or the GPU. Each throws Failure, and
// has written nothing if it does.
#pragma once
#include <octet/octet.h>

#include "core/problem.h"
#include "core/quant/thread_groups.h"

namespace octet {

void quantize(const octet_tensor* x, const octet_rope* rope, octet_tensor* codes, octet_tensor* statistics,
              void* stream);
void dequantize(const octet_tensor* codes, octet_tensor* x, void* stream);
void apply_rope(const octet_rope* rope, const octet_tensor* x, uint32_t inverse, octet_tensor* y, void* stream);
int64_t scale_groups(uint32_t operand, uint32_t granularity, int64_t block, int64_t tokens);
void logit_error(const octet_tensor* q_statistics, const octet_tensor* k_statistics, float scale, octet_tensor* error,
                 void* stream);

// octet_quantization after it has been validated. Absent tensors are not present().
struct Quantization {
  octet_operand operand;
  octet_granularity granularity;
  octet_zero_point zero_point_kind;
  int64_t block;           // tokens per group, per block only
  uint64_t hadamard_seed;  // 0: not rotated
  View scale, zero_point, mean;

  constexpr bool per_channel() const { return granularity == OCTET_PER_CHANNEL; }

  // Row of `scale` that holds the scale of a token.
  constexpr int64_t group_of(int64_t token) const {
    switch (granularity) {
      case OCTET_PER_TOKEN:
        return token;
      case OCTET_PER_BLOCK:
        return token / block;
      case OCTET_PER_THREAD:
        return operand == OCTET_OPERAND_Q ? thread_group_q(token) : thread_group_k(token);
      default:
        return 0;
    }
  }
  // The same for a block of 32 bits, without a division of 64 bits, for which GPUs have no instruction.
  constexpr int group_in_32_bits(int token) const {
    if (granularity == OCTET_PER_BLOCK)
      return static_cast<int>(static_cast<unsigned>(token) / static_cast<unsigned>(block));
    return static_cast<int>(group_of(token));
  }
  // Returns the same quantization of so many tokens with such a block: one of more than all tokens is one of them.
  constexpr Quantization in_32_bits(int64_t tokens) const {
    Quantization how = *this;
    if (how.block > tokens) how.block = tokens > 1 ? tokens : 1;
    return how;
  }
};

// Validates codes->quantization; `output`: its scale, zero_point and mean are to be filled.
Quantization validate_quantization(const octet_tensor& codes, const char* label, bool output);

// octet_rope after it has been validated.
struct Rope {
  octet_rope_style style = OCTET_ROPE_NONE;
  int64_t dim = 0;  // channels rotated, even
  int64_t offset = 0;
  double base = 0;
  octet_norm norm = OCTET_NORM_NONE;
  float norm_eps = 0;
  View norm_weight;  // of every (batch, head) of x, if present()

  constexpr bool present() const { return style != OCTET_ROPE_NONE || norm != OCTET_NORM_NONE; }
};

// `view`: of x.
Rope validate_rope(const octet_rope& rope, const octet_tensor& x, const View& view);

// The work, on validated arguments in host memory; src/cpu/quantize. `statistics` may be absent.
namespace cpu {
void quantize(const View& x, const Rope& rope, const View& codes, const Quantization& how, const View& statistics);
void dequantize(const View& codes, const Quantization& how, const View& x);
void apply_rope(const Rope& rope, bool inverse, const View& x, const View& y);
void logit_error(const View& q_statistics, const View& k_statistics, float scale, const View& error);
}  // namespace cpu

// The same in the memory of a GPU, in a stream; src/cuda/quantizers. These throw Failure where they cannot.
namespace cuda {
struct Place {
  int device;
  void* stream;
};
void quantize(const View& x, const Rope& rope, const View& codes, const Quantization& how, const View& statistics,
              const Place& place);
void dequantize(const View& codes, const Quantization& how, const View& x, const Place& place);
void apply_rope(const Rope& rope, bool inverse, const View& x, const View& y, const Place& place);
}  // namespace cuda

}  // namespace octet
