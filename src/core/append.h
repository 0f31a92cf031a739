// octet_append: new keys and values of sequences, and the KV cache that they go to.
#pragma once
#include "core/quantization.h"

namespace octet {

void append(const octet_append_arguments* arguments, void* stream);

// Its arguments after they have been validated. Absent tensors are not present().
struct Append {
  struct Part {
    View from, to;
    View scale;  // of a cache in 8 bits
  };
  Part k, v, q;  // k.to and v.to: the cache
  View seqused_k;
  int64_t capacity;   // tokens of a sequence in the cache
  Rope rope;          // of k and q
  View cosine, sine;  // [1 1 positions pairs], in the place of the rope's base
  int64_t sequences() const { return k.from.shape[0]; }
};

// The work, as that of the quantizers.
namespace cpu {
void append(const Append& a);
}
namespace cuda {
void append(const Append& a, const Place& place);
}

}  // namespace octet
