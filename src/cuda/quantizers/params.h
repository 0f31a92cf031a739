// The parameters of the kernels of the quantizers.
#pragma once
#include "core/quant/affine.h"
#include "core/quant/hadamard.h"
#include "core/quant/norm.h"
#include "core/quant/rope.h"
#include "core/quant/sums.h"
#include "core/quantization.h"

namespace octet::cuda::quantizers {

constexpr int kBlocks = 2;      // the least thread blocks of a multiprocessor, which leave registers enough
constexpr int kMaxDim = 1024;   // rows lie in shared memory
constexpr int kMaxPairs = 128;  // that RoPE turns: the parameters of a kernel have room for them

struct RopeParams {
  octet_rope_style style;
  int pairs;
  int64_t offset;
  Turn turns[kMaxPairs];  // from a position to the next
};

struct NormParams {
  bool present;
  float eps;
  View weight;  // of every (batch, head); null data: 1
};

// Before rows of x are rounded, they are normalised, RoPE turns them, the mean is subtracted and a rotation follows.
struct RowParams {
  View x;
  NormParams rms;
  RopeParams rope;
  View mean;      // null data: nothing is subtracted
  uint64_t seed;  // of the signs of the rotation; 0: none
  int block;      // of the rotation
  float norm;

  // Returns the number of turns that a warp keeps, an even one.
  __host__ __device__ int turn_stride() const { return (rope.pairs + 1) / 2 * 2; }
};

// Rows of x, normalised and turned, go to y.
struct TurnParams {
  View x, y;
  NormParams rms;
  RopeParams rope;
};

struct QuantizeParams {
  RowParams rows;
  View codes, statistics;
  Quantization how;
  Range range;

  __device__ bool symmetric() const { return how.zero_point_kind == OCTET_SYMMETRIC; }
  __device__ int dim() const { return static_cast<int>(codes.shape[3]); }
  __device__ int tokens() const { return static_cast<int>(codes.shape[2]); }
};

// The groups of a call.
struct Groups {
  int count;  // of a (batch, head)
  int rows;   // of a group, at most
  int run;    // (batch, head)s of which a team takes one group after the other

  // The token of a row of a group, perhaps one after the last.
  __device__ int token_of(const Quantization& how, int group, int row) const {
    switch (how.granularity) {
      case OCTET_PER_TOKEN:
        return group;
      case OCTET_PER_BLOCK:
        return group * static_cast<int>(how.block) + row;
      default:
        return static_cast<int>(how.operand == OCTET_OPERAND_Q ? token_of_group_q(group, row)
                                                               : token_of_group_k(group, row));
    }
  }
};

// Indices are of 32 bits, whose divisions take few registers; the host has made sure that they fit.
struct BatchHead {
  int batch, head;
  __device__ BatchHead(const View& t, unsigned index)
      : batch(static_cast<int>(index / static_cast<unsigned>(t.shape[1]))),
        head(static_cast<int>(index % static_cast<unsigned>(t.shape[1]))) {}
};
__device__ inline int heads_of(const View& t) { return static_cast<int>(t.shape[0] * t.shape[1]); }

template <class T>
__device__ T* at(const View& t, const BatchHead& i, int64_t token, int64_t channel = 0) {
  return static_cast<T*>(t.data) +
         (i.batch * t.stride[0] + i.head * t.stride[1] + token * t.stride[2] + channel * t.stride[3]);
}

}  // namespace octet::cuda::quantizers
