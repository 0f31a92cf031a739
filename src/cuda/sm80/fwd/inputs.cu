#include <algorithm>

#include "core/names.h"
#include "cuda/operands/masks.h"
#include "cuda/sm80/fwd/config.h"
#include "cuda/sm80/fwd/inputs.h"

namespace octet::cuda::sm80 {

View columns_of(View t, int64_t first, int64_t count) {
  if (t.data)
    t.data = static_cast<unsigned char*>(t.data) + first * t.stride[3] * static_cast<int64_t>(bytes_of(t.dtype));
  t.shape[3] = std::min(t.shape[3] - first, count);
  return t;
}

ForwardInputs::ForwardInputs(const Problem& p, const ForwardChoice& choice, WorkspaceAllocator& workspace)
    : dim_(choice.kernel.dim),
      dim_v_(choice.kernel.dim_v),
      halves_(choice.f32),
      scales_v_(choice.scales_v),
      int8_v_(choice.int8_v),
      seen_(p, choice.int8_qk ? ReadsK::seen : ReadsK::as_it_is, workspace),
      q_(choice.f32 || choice.int8_qk ? View{} : p.q, choice.numerics.type(), workspace),
      k_(choice.f32 || choice.int8_qk ? View{} : p.k, choice.numerics.type(), workspace),
      v_(choice.f32 || choice.scales_v || choice.int8_v ? View{} : seen_.v(), choice.numerics.type(), workspace),
      // Numbers are those of the recipe's type of v first: of bf16, or of any type where q and k are quantized.
      v_scaled_(choice.scales_v ? seen_.v() : View{}, choice.int8_qk ? p.v.dtype : choice.numerics.type(),
                choice.numerics.f16_p_and_v() ? dim_v_ : 0, workspace),
      q_halves_(choice.f32 ? p.q : View{}, dim_, NonFinite::kept, workspace),
      k_halves_(choice.f32 ? p.k : View{}, dim_, NonFinite::kept, workspace) {
  for (int64_t first = 0; choice.f32 && first < p.dim_v; first += dim_v_)
    v_halves_.emplace_back(columns_of(seen_.v(), first, dim_v_), dim_v_, NonFinite::kept, workspace);
  if (!choice.int8_qk) return;
  const KeySide key_side{seen_.k(), seen_.v(), seen_.counts(), choice.int8_v};
  int8_.emplace(p, key_side, dim_, kLaidOutKeys, workspace);
  key_factors_ = workspace.take<KeyPairFactors>(static_cast<std::size_t>(p.batch * p.kv_heads * int8_->keys() / 2));
}

void ForwardInputs::preprocess(const Problem& p, cudaStream_t stream) const {
  seen_.preprocess(stream);
  if (halves_) {
    q_halves_.preprocess(stream), k_halves_.preprocess(stream);
    for (const F16HalvesInput& input : v_halves_) input.preprocess(stream);
    return;
  }
  scales_v_ ? v_scaled_.preprocess(seen_keys(p), stream) : v_.preprocess(stream);
  if (!int8_) return q_.preprocess(stream), k_.preprocess(stream);
  int8_->quantize(stream);
  compute_key_factors(int8_->k_scale(), p.batch * p.kv_heads * int8_->keys(), key_factors_, stream);
}

void ForwardInputs::set(const Problem& p, ForwardParams& a) const {
  a.dim = static_cast<int>(halves_ || int8_ ? dim_ : p.dim);
  a.whole_columns = halves_ || (a.dim == dim_ && p.dim_v == dim_v_);
  a.v_scale = scales_v_ ? v_scaled_.scale() : nullptr, a.v_mean = v_scaled_.v_mean();
  if (halves_) {
    a.q = q_halves_.view().tensor, a.q_factors = q_halves_.view().factors;
    a.k = k_halves_.view().tensor, a.k_factors = k_halves_.view().factors;
    return;
  }
  if (!int8_v_) a.v = output(scales_v_ ? v_scaled_.view() : v_.view());
  if (!int8_) {
    a.q = output(q_.view()), a.k = output(k_.view());
    return;
  }
  const int heads = static_cast<int>(p.heads), tokens = static_cast<int>(p.tokens_q);
  a.q = output(int8_->q()), a.k = output(int8_->k());
  a.q_factors = {int8_->q_scale(), heads, tokens};
  a.k_pair_factors = {key_factors_, static_cast<int>(p.kv_heads), int8_->keys()};
  a.mean_logit = {int8_->mean_logit(), heads, tokens};
  if (int8_v_) a.v_factors_by_tiles = int8_->v_scale();
}

void ForwardInputs::set_v(int64_t first, ForwardParams& a) const {
  if (int8_v_) {
    a.v = output(int8_->v());
    a.v.data = static_cast<S8*>(a.v.data) + first * a.v.stride[2];
    a.v_mean = int8_->v_mean() + first;
  }
  if (!halves_) return;
  const F16HalvesView v = v_halves_[static_cast<std::size_t>(first / dim_v_)].view();
  a.v = v.tensor, a.v_factors = v.factors;
}

}  // namespace octet::cuda::sm80
