#include <algorithm>

#include "core/names.h"
#include "cuda/host/launch.h"
#include "cuda/operands/masks.h"
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
      k_groups_(choice.k_groups),
      pages_of_codes_(choice.pages_of_codes),
      seen_(p, (choice.int8_qk && !choice.codes) || choice.e4m3_qk ? ReadsK::seen : ReadsK::as_it_is, workspace),
      q_(choice.f32 || choice.int8_qk || choice.e4m3_qk ? View{} : p.q, choice.numerics.type(), workspace),
      k_(choice.f32 || choice.int8_qk || choice.e4m3_qk || choice.pages_of_codes ? View{} : p.k, choice.numerics.type(),
         workspace),
      v_(choice.f32 || choice.scales_v || choice.int8_v || choice.training || choice.e4m3_v || choice.pages_of_codes
             ? View{}
             : seen_.v(),
         choice.numerics.type(), workspace),
      // Numbers are those of the recipe's type of v first: of bf16, or of any type where q and k are quantized.
      v_scaled_(choice.scales_v ? seen_.v() : View{}, choice.int8_qk ? p.v.dtype : choice.numerics.type(),
                choice.numerics.f16_p_and_v() && !p.dropout ? dim_v_ : 0, workspace,
                choice.f16_sums ? kRangeOfF16Sums : VRange{}),
      q_halves_(choice.f32 ? p.q : View{}, dim_, NonFinite::kept, workspace),
      k_halves_(choice.f32 ? p.k : View{}, dim_, NonFinite::kept, workspace) {
  for (int64_t first = 0; choice.f32 && first < p.dim_v; first += dim_v_)
    v_halves_.emplace_back(columns_of(seen_.v(), first, dim_v_), dim_v_, NonFinite::kept, workspace);
  if (choice.training) {
    const TrainingOperands::From from{
        .q = strided(p.q), .k = strided(seen_.k()), .v = strided(seen_.v()), .do_ = {}, .seen = seen_.seen()};
    training_.emplace(p, from, dim_, workspace);
    const auto rows = static_cast<std::size_t>(p.batch * p.heads * p.tokens_q);
    const auto key_heads = static_cast<std::size_t>(p.batch * p.kv_heads);
    q_f16_ = {workspace.take<F16>(rows * dim_), workspace.take<float>(rows)};
    v_f16_ = workspace.take<F16>(key_heads * training_->keys() * dim_);
    v_scale_ = workspace.take<float>(key_heads);
    key_factors_ = workspace.take<KeyPairFactors>(key_heads * training_->keys() / 2);
    return;
  }
  if (choice.numerics.f16_p_and_v() && p.dropout)
    zero_v_mean_ = workspace.take<float>(static_cast<std::size_t>(p.batch * p.kv_heads * dim_v_));
  const KeySide key_side{.k = seen_.k(),
                         .v = seen_.v(),
                         .seen = seen_.seen(),
                         .quantizes_v = choice.int8_v,
                         .k_groups = choice.k_groups,
                         .blocks = choice.blocks,
                         .finds_v_channels = choice.e4m3_v,
                         .qk_came = choice.codes,
                         .v_came = choice.v_codes};
  const E4m3Form form = choice.e4m3_products ? E4m3Form::bytes : E4m3Form::f16;
  if (choice.int8_qk) int8_.emplace(p, key_side, dim_, choice.e4m3_v ? kBlockKeys : choice.kernel.keys, workspace);
  if (choice.e4m3_qk) e4m3_.emplace(p, form, key_side, choice.e4m3_scales, dim_, workspace);
  if (choice.int8_qk && choice.e4m3_v)
    e4m3_values_ = e4m3_values(seen_.v(), form, int8_->key_tiles(), int8_->channels(), dim_, workspace);
  if (!choice.int8_qk && !choice.e4m3_scales) return;
  with_8bit_logits([&](const auto& logits) {
    key_factors_ = workspace.take<KeyPairFactors>(static_cast<std::size_t>(p.batch * p.kv_heads * logits.keys() / 2));
  });
}

void ForwardInputs::preprocess(const Problem& p, cudaStream_t stream) const {
  seen_.preprocess(stream);
  if (halves_) {
    q_halves_.preprocess(stream), k_halves_.preprocess(stream);
    for (const F16HalvesInput& input : v_halves_) input.preprocess(stream);
    return;
  }
  if (training_) return preprocess_training(p, stream);
  if (zero_v_mean_) {
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(p.batch * p.kv_heads * dim_v_);
    check(cudaMemsetAsync(zero_v_mean_, 0, bytes, stream), "cudaMemsetAsync");
  }
  scales_v_ ? v_scaled_.preprocess(seen_keys(p), stream) : v_.preprocess(stream);
  q_.preprocess(stream), k_.preprocess(stream);
  with_8bit_logits([&](const auto& logits) {
    logits.quantize(stream);
    if (!logits.k_scale()) return;
    const bool begins = logits.k().dtype == OCTET_I8 && !(int8_ && int8_->k_zero_point());
    const ScalesOfKeys scales{.data = logits.k_scale(), .groups = k_groups_, .sums_begin = begins ? kSumsBegin : 0.f};
    compute_key_factors(scales, p.batch * p.kv_heads * logits.keys(), key_factors_, stream);
  });
  if (e4m3_values_) quantize_to_e4m3(*e4m3_values_, stream);
}

void ForwardInputs::preprocess_training(const Problem& p, cudaStream_t stream) const {
  training_->quantize(stream);
  const int64_t heads = p.batch * p.kv_heads;
  compute_key_factors({training_->k().scale}, heads * training_->keys(), key_factors_, stream);
  scale_rows_to_f16(strided(p.q), dim_, q_f16_, stream);
  values_to_f16(training_->v(), heads, training_->keys(), dim_, v_f16_, v_scale_, stream);
}

void ForwardInputs::set_training(const Problem& p, ForwardParams& a) const {
  const int heads = static_cast<int>(p.heads), kv_heads = static_cast<int>(p.kv_heads),
            tokens = static_cast<int>(p.tokens_q), keys = training_->keys();
  const auto rows = [&](const void* data, Element element, int64_t of_heads, int64_t count) {
    return Output{const_cast<void*>(data), {of_heads * count * dim_, count * dim_, dim_}, element};
  };
  a.q = rows(training_->q().data, Element::i8, heads, tokens),
  a.k = rows(training_->k().data, Element::i8, kv_heads, keys);
  a.v = rows(v_f16_, Element::f16, kv_heads, keys);
  a.q_factors = {training_->q().scale, heads, tokens};
  a.k_pair_factors = {key_factors_, kv_heads, keys};
  const BlockMeans& means = training_->block_means();
  a.mean_factors = {q_f16_.data, q_f16_.factor, means.mean, means.factor, keys / kBlockKeys};
  a.v_scale = v_scale_, a.v_mean = training_->v_mean();
}

void ForwardInputs::set(const Problem& p, ForwardParams& a) const {
  a.dim = static_cast<int>(halves_ || int8_ || training_ || e4m3_ ? dim_ : p.dim);
  a.whole_columns = halves_ || (a.dim == dim_ && p.dim_v == dim_v_);
  a.v_scale = scales_v_ ? v_scaled_.scale() : nullptr, a.v_mean = zero_v_mean_ ? zero_v_mean_ : v_scaled_.v_mean();
  if (training_) return set_training(p, a);
  if (halves_) {
    a.q = q_halves_.view().tensor, a.q_factors = q_halves_.view().factors;
    a.k = k_halves_.view().tensor, a.k_factors = k_halves_.view().factors;
    return;
  }
  if (!int8_v_) a.v = output(scales_v_ ? v_scaled_.view() : v_.view());
  a.q = output(q_.view()), a.k = output(k_.view());
  if (pages_of_codes_) {
    a.k = output(p.k), a.v = output(p.v);
    a.k_scales = output(quantization_of(p.k).scale), a.v_scales = output(quantization_of(p.v).scale);
  }
  const int heads = static_cast<int>(p.heads), tokens = static_cast<int>(p.tokens_q);
  with_8bit_logits([&](const auto& logits) {
    a.q = output(logits.q()), a.k = output(logits.k());
    a.q_factors = {logits.q_scale(), heads, tokens};
    a.k_pair_factors = {key_factors_, static_cast<int>(p.kv_heads), logits.keys()};
    a.mean_logit = {logits.mean_logit(), heads, tokens};
  });
  if (e4m3_) a.v = output(e4m3_->v()), a.v_channel_scale = e4m3_->v_scale();
  if (e4m3_values_) a.v = output(e4m3_values_->view()), a.v_channel_scale = int8_->channels().v_scale;
  if (int8_v_) a.v_factors_by_tiles = int8_->v_scale(), a.v_zero_points = int8_->v_zero_point();
  if (int8_) a.q_zero_points = int8_->q_zero_point(), a.k_zero_points = int8_->k_zero_point();
  if (int8_) a.block_logits = int8_->block_logits();
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
