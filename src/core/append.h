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
  View cu_seqlens;    // of packed new tokens
  int64_t capacity;   // tokens of a sequence in the cache
  Rope rope;          // of k and q
  View cosine, sine;  // [1 1 positions pairs], in the place of the rope's base
  // The new tokens of a sequence in k, v or q, on the CPU.
  struct Tokens {
    int64_t batch, first, count;
  };
  Tokens new_tokens(const View& x, int64_t sequence) const {
    if (!cu_seqlens.present()) return {sequence, 0, x.shape[2]};
    const auto* const cu = static_cast<const int32_t*>(cu_seqlens.data) + sequence;
    return {0, cu[0], x.present() ? cu[1] - cu[0] : 0};
  }
  int64_t sequences() const { return seqused_k.shape[3]; }
};

// The work, as that of the quantizers.
namespace cpu {
void append(const Append& a);
}
namespace cuda {
void append(const Append& a, const Place& place);
}

}  // namespace octet
