#include <cmath>

#include "core/quant/hadamard.h"
#include "cuda/host/launch.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/masks.h"
#include "cuda/operands/quantize/int8_logits.h"
#include "cuda/operands/quantize/smooth_q.h"
#include "cuda/operands/seen.h"

namespace octet::cuda {

Rotation rotation_of(int64_t dim) {
  Rotation r{.block = static_cast<int>(hadamard_block(dim))};
  r.norm = 1.f / std::sqrt(static_cast<float>(r.block));
  for (int64_t c = 0; c < dim; ++c)
    if (hadamard_sign(kHadamardSeed, c) < 0.f) r.negative[c / 32] |= 1u << c % 32;
  return r;
}

bool wants_mean_logit(const Problem& p) { return p.lse.present() || p.sinks.present() || p.softcap != 0.f; }

HeadScale head_scale(const View& t) {
  if (!t.quantization) return {};
  const octet_tensor& scale = *t.quantization->scale;
  return {static_cast<const float*>(scale.data), scale.stride[0], scale.stride[1]};
}

View view_8bit(void* data, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  return {OCTET_I8, data, {batch, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}, nullptr};
}

QuantizeParams quantize_params(const Problem& p, const KeySide& key_side, int64_t dim, int tile) {
  QuantizeParams params{
      .q = strided(p.q),
      .k = strided(key_side.k),
      .v = strided(key_side.v),
      .v_input_scale = head_scale(p.v),
      .dim = dim <= 64    ? 64
             : dim <= 128 ? 128
                          : 256,
      .heads = static_cast<int>(p.heads),
      .kv_heads = static_cast<int>(p.kv_heads),
      .keys = {static_cast<const int*>(p.cu_seqlens_k.data), sequences_of(p), static_cast<int>(p.tokens_k), tile,
               mask_of(p), static_cast<int>(p.tokens_q), static_cast<const int*>(p.cu_seqlens_q.data)},
      .cu_seqlens_q = static_cast<const int*>(p.cu_seqlens_q.data),
      .seen = key_side.seen};
  if (p.hadamard) params.rotation = rotation_of(p.dim);
  return params;
}

Int8Logits::Int8Logits(const Problem& p, const KeySide& key_side, int64_t dim, int tile, WorkspaceAllocator& workspace)
    : params_(quantize_params(p, key_side, dim, tile)),
      batch_(p.batch),
      dim_(dim),
      queries_(p.tokens_q),
      keys_(static_cast<int64_t>(params_.keys.count()) * tile) {
  const bool qk_came = key_side.qk_came, v_came = key_side.v_came, blocks = key_side.blocks;
  if (!qk_came && !blocks) params_.q_type = params_.k_type = QuantizedFormat::s8;
  const bool by_tokens = key_side.quantizes_v && !v_came && !blocks;
  if (by_tokens) params_.v_type = QuantizedFormat::s8;
  params_.k_groups = key_side.k_groups;
  const int64_t rows = p.batch * p.heads * queries_, key_rows = p.batch * p.kv_heads * keys_;
  const int64_t sequences = p.packed() ? sequences_of(p) : p.batch;
  const auto channels = [&] { return workspace.take<float>(sequences * p.kv_heads * params_.dim); };
  if (!qk_came) params_.channels.k_mean = channels();
  if (by_tokens) params_.channels.v_mean = channels();
  if (key_side.finds_v_channels) params_.channels.v_scale = channels(), params_.channels.v_inverse = channels();
  scratch_ = workspace.take(quantize_scratch_bytes(params_));
  params_.q_quantized = workspace.take(rows * params_.dim);
  params_.k_quantized = workspace.take(key_rows * params_.dim);
  params_.q_scale = workspace.take<float>(rows);
  params_.k_scale = workspace.take<float>(key_rows);
  if (key_side.quantizes_v) {
    params_.v_quantized = workspace.take(key_rows * params_.dim);
    params_.v_scale = workspace.take<float>(2 * key_rows);
  }
  if (wants_mean_logit(p) && (!qk_came || p.k.quantization->mean)) params_.mean_logit = workspace.take<float>(rows);
  if (p.smooth_q && !qk_came) {
    smoothed_q_ = std::make_shared<SmoothedQueries>(p, params_.k, params_.keys, params_.dim, workspace);
    params_.q = strided(smoothed_q_->q());
  }
  copy_as_they_came(p, qk_came, v_came, workspace);
  if (blocks) quantize_by_blocks(p, !qk_came, key_side.quantizes_v && !v_came, workspace);
}

PrequantizedMeans Int8Logits::means_of(const View& from, uint64_t seed, int64_t sequences, bool packed,
                                       WorkspaceAllocator& workspace) const {
  return {.from = from,
          .seed = seed,
          .sequences = static_cast<int>(sequences),
          .heads = params_.kv_heads,
          .packed = packed,
          .dim = params_.dim,
          .to = workspace.take<float>(static_cast<std::size_t>(sequences * params_.kv_heads * params_.dim))};
}

// Lays out what is copied instead of quantized. The quantizer reads none of it.
void Int8Logits::copy_as_they_came(const Problem& p, bool q_and_k, bool v, WorkspaceAllocator& workspace) {
  if (q_and_k) {
    const bool zero_points = has_zero_points(p.q) || has_zero_points(p.k);
    const auto rows = [&](const View& from, void* to, int64_t count, float* scale) {
      PrequantizedRows x{
          .from = from, .how = quantization_of(from).in_32_bits(from.shape[2]), .to = static_cast<signed char*>(to)};
      x.rows = static_cast<int>(count), x.dim = params_.dim, x.scale = scale, x.kv_heads = params_.kv_heads;
      if (zero_points) x.zero_point = workspace.take<ZeroPoint>(p.batch * from.shape[1] * count);
      return x;
    };
    q_came_ = rows(p.q, params_.q_quantized, queries_, params_.q_scale);
    k_came_ = rows(p.k, params_.k_quantized, keys_, params_.k_scale);
    k_came_->keys = params_.keys;
    if (p.k.quantization->mean && wants_mean_logit(p)) {
      k_mean_ = means_of(k_came_->how.mean, k_came_->how.hadamard_seed, p.batch, false, workspace);
      q_came_->key_mean = k_mean_->to, q_came_->mean_logit = params_.mean_logit;
    }
  }
  if (v) {
    v_came_ = {.from = p.v,
               .how = quantization_of(p.v).in_32_bits(p.tokens_k),
               .to = static_cast<signed char*>(params_.v_quantized),
               .dim = params_.dim,
               .keys = params_.keys,
               .scale = params_.v_scale};
    if (has_zero_points(p.v)) v_came_->zero_point = workspace.take<signed char>(p.batch * p.kv_heads * keys_);
    v_mean_ = means_of(v_came_->how.mean, 0, p.packed() ? sequences_of(p) : p.batch, p.packed(), workspace);
  }
  // Operands are read together with those that are quantized, by one loader.
  if (q_and_k) params_.q = params_.k = params_.v;
  if (v) params_.v = params_.k;
}

// Lays out what is quantized with a scale for each block. The quantizer finds the means of k alone.
void Int8Logits::quantize_by_blocks(const Problem& p, bool q_and_k, bool v, WorkspaceAllocator& workspace) {
  const KeyTiles& keys = params_.keys;
  BlockScaledRows rows{.keys = keys, .dim = params_.dim, .kv_heads = params_.kv_heads};
  if (q_and_k) {
    seen_queries_ = std::make_shared<SeenQueries>(p, workspace);
    q_rows_ = k_rows_ = rows;
    q_rows_->from = params_.q, q_rows_->to = static_cast<signed char*>(params_.q_quantized);
    q_rows_->scale = params_.q_scale, q_rows_->of_queries = true, q_rows_->seen = seen_queries_->flags();
    q_rows_->blocks = query_blocks(keys, kScaledQueries);
    q_rows_->key_mean = params_.channels.k_mean, q_rows_->mean_logit = params_.mean_logit;
    k_rows_->from = params_.k, k_rows_->to = static_cast<signed char*>(params_.k_quantized);
    k_rows_->scale = params_.k_scale, k_rows_->blocks = keys, k_rows_->in_tiles = true;
    k_rows_->mean = params_.channels.k_mean, k_rows_->seen = params_.seen.keys;
    for (auto* x : {&q_rows_, &k_rows_}) (*x)->block_scale = workspace.take<float>((*x)->block_count());
  }
  if (v) {
    // With keys along rows they are copied as codes that came.
    v_rows_ = rows;
    v_rows_->from = params_.v, v_rows_->blocks = keys;
    v_rows_->to = workspace.take<signed char>(v_rows_->count() * params_.dim);
    v_rows_->scale = workspace.take<float>(v_rows_->count());
    const int64_t heads = params_.kv_heads, tokens = p.tokens_k;
    const View codes = view_8bit(v_rows_->to, batch_, heads, tokens, params_.dim);
    v_came_ = {.from = codes,
               .how = {.granularity = OCTET_PER_TOKEN},
               .to = static_cast<signed char*>(params_.v_quantized),
               .dim = params_.dim,
               .keys = keys,
               .scale = params_.v_scale};
    v_came_->how.scale = {
        OCTET_F32, v_rows_->scale, {batch_, heads, tokens, 1}, {heads * tokens, tokens, 1, 1}, nullptr};
    v_mean_ = means_of({}, 0, p.packed() ? sequences_of(p) : p.batch, p.packed(), workspace);
  }
}

BlockLogits Int8Logits::block_logits() const { return smoothed_q_ ? smoothed_q_->logits() : BlockLogits{}; }

void Int8Logits::quantize(cudaStream_t stream) const {
  if (k_mean_) copy_means(*k_mean_, stream);
  if (v_mean_) copy_means(*v_mean_, stream);
  if (q_came_) copy_rows(*q_came_, stream);
  if (k_came_) copy_rows(*k_came_, stream);
  const bool all_came = q_came_ && params_.v_type == QuantizedFormat::none && !params_.channels.v_scale;
  if (smoothed_q_) smoothed_q_->centre(stream);
  keys_ && !all_came ? cuda::quantize(params_, scratch_, stream) : clear(counter(), stream);
  if (k_rows_ && !keys_) {  // a mean of no keys
    const int64_t sequences = params_.keys.cu_seqlens ? params_.keys.sequences : batch_;
    const auto bytes = static_cast<std::size_t>(sequences * params_.kv_heads * params_.dim) * sizeof(float);
    check(cudaMemsetAsync(params_.channels.k_mean, 0, bytes, stream), "cudaMemsetAsync");
  }
  if (seen_queries_) seen_queries_->preprocess(stream);
  for (const auto* rows : {&q_rows_, &k_rows_, &v_rows_})
    if (*rows) quantize_blocks(**rows, stream);
  if (v_came_) copy_values(*v_came_, stream);
  if (smoothed_q_) smoothed_q_->multiply(params_.channels.k_mean, params_.mean_logit, stream);
}

// Returns a view of the channels that the kernel reads; the rows in memory may be longer.
View Int8Logits::view(void* data, int64_t heads, int64_t rows) const {
  View v = view_8bit(data, batch_, heads, rows, params_.dim);
  v.shape[3] = dim_;
  return v;
}

}  // namespace octet::cuda
