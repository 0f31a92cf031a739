#include <algorithm>

#include "core/error.h"
#include "core/names.h"
#include "cuda/fragment/precision.h"
#include "cuda/operands/key_mask.h"
#include "cuda/operands/mask_rows.h"
#include "cuda/sm90/fwd/choose.h"
#include "cuda/sm90/passes.h"

namespace octet::cuda::sm90 {
namespace {

constexpr int kMax8BitDim = 128;

struct Row {
  ForwardFormats formats;
  bool beta, k_as_it_came;
  Extra extra;
  Kernel (*kernel)(int64_t dim, int64_t dim_v);
  Kernel (*with_few_keys)(int64_t dim, int64_t dim_v) = nullptr;
};
constexpr Row kRows[] = {
    {kF16, false, false, Extra::none, forward_kernel<PrecisionF16>, forward_kernel<WithFewKeys<PrecisionF16>>},
    {kF16, false, false, Extra::alibi, forward_kernel<WithAlibi<PrecisionF16>>},
    {kF16, false, false, Extra::dropout, forward_kernel<WithDropout<PrecisionF16>>},
    {kF16, false, false, Extra::mask, forward_kernel<WithMask<PrecisionF16>>},
    {kF16, true, false, Extra::none, forward_kernel<WithBeta<PrecisionF16>>},
    {kBf16, false, false, Extra::none, forward_kernel<PrecisionBf16>, forward_kernel<WithFewKeys<PrecisionBf16>>},
    {kBf16, false, false, Extra::alibi, forward_kernel<WithAlibi<PrecisionBf16>>},
    {kBf16, false, false, Extra::dropout, forward_kernel<WithDropout<PrecisionBf16>>},
    {kBf16, false, false, Extra::mask, forward_kernel<WithMask<PrecisionBf16>>},
    {kBf16, true, false, Extra::none, forward_kernel<WithBeta<PrecisionBf16>>},
    {kBf16F16Compute, false, false, Extra::none, forward_kernel<PrecisionBf16F16Compute>},
    {kBf16F16Compute, false, false, Extra::alibi, forward_kernel<WithAlibi<PrecisionBf16F16Compute>>},
    {kBf16F16Compute, false, false, Extra::dropout, forward_kernel<WithDropout<PrecisionBf16F16Compute>>},
    {kBf16F16Compute, false, false, Extra::mask, forward_kernel<WithMask<PrecisionBf16F16Compute>>},
    {kInt8F16, false, false, Extra::none, forward_kernel<PrecisionInt8F16>},
    {kInt8, false, false, Extra::none, forward_8bit_kernel<PrecisionInt8>},
    {kInt8Fp8, false, false, Extra::none, forward_8bit_kernel<PrecisionInt8Fp8>},
    {kFp8, false, false, Extra::none, forward_8bit_kernel<PrecisionFp8>},
    {kFp8, false, true, Extra::none, forward_8bit_kernel<PrecisionFp8Prequantized>},
    {kFp8Raw, false, true, Extra::none, forward_8bit_kernel<PrecisionFp8Unscaled>},
};

// An e4m3 input is not quantized again where q and k become e4m3. Unscaled fp8 casts its inputs without quantization.
bool as_it_came(const ForwardFormats& formats, const View& x) {
  return formats.qk == OCTET_E4M3 && (formats.k_scale == Group::cast || x.dtype == OCTET_E4M3);
}

Kernel kernel_for(const Row& row, const Problem& p) {
  if (row.with_few_keys && p.tokens_k <= kFewKeys && !p.packed())
    if (const Kernel kernel = row.with_few_keys(p.dim, p.dim_v); kernel.function) return kernel;
  return row.kernel(p.dim, p.dim_v);
}

bool p_8bit(const ForwardFormats& formats) { return bytes_of(formats.p) == 1; }

}  // namespace

ForwardChoice choose_forward(const Problem& p, const ForwardNumerics& numerics) {
  const ForwardFormats& formats = numerics.formats;
  const bool q_came = as_it_came(formats, p.q), k_came = as_it_came(formats, p.k);
  const auto* const row = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& x) {
    return x.formats == formats && x.beta == (numerics.beta != 0.f) && x.k_as_it_came == k_came &&
           x.extra == extra_of(p);
  });
  const QuantizedFormat qk = formats.qk == OCTET_I8 ? QuantizedFormat::s8 : QuantizedFormat::e4m3;
  return {.kernel = kernel_for(*row, p),
          .numerics = numerics,
          .p_8bit = p_8bit(formats),
          .quantizes_qk = formats == kInt8F16,
          .scales_v = numerics.scales_v(p.v.dtype),
          .q = q_came ? QuantizedFormat::none : qk,
          .k = k_came ? QuantizedFormat::none : qk,
          .v = formats.v == OCTET_I8 ? QuantizedFormat::s8 : QuantizedFormat::e4m3,
          .k_groups = formats.k_scale == Group::thread_k,
          .v_by_tokens = formats.v_scale == Group::token,
          .v_by_channel = formats.v_scale == Group::channel};
}

Extra extra_of(const Problem& p) {
  return p.alibi_slopes.present() ? Extra::alibi
         : p.dropout              ? Extra::dropout
         : p.mask.present()       ? Extra::mask
                                  : Extra::none;
}

bool has_kernels(const ForwardFormats& formats) {
  return std::any_of(std::begin(kRows), std::end(kRows), [&](const Row& row) { return row.formats == formats; });
}

std::optional<std::string> extra_unsupported_reason(const Problem& p, const ForwardNumerics& numerics) {
  const Extra extra = extra_of(p);
  if (extra == Extra::none) return {};
  if (p.mask.present() && extra != Extra::mask)
    return text("it takes no mask tensor",
                extra == Extra::alibi ? " together with alibi_slopes" : "s but key masks together with dropout");
  const std::string without = extra == Extra::alibi     ? "it has no alibi_slopes"
                              : extra == Extra::dropout ? "it has no dropout"
                                                        : "it has no mask tensors but key masks";
  if (p.dropout && p.alibi_slopes.present()) return "it has no dropout together with alibi_slopes";
  if (std::none_of(std::begin(kRows), std::end(kRows),
                   [&](const Row& row) { return row.formats == numerics.formats && row.extra == extra; })) {
    if (extra == Extra::mask) return no_key_mask_reason(p);
    return text(without, " in ", name(p.precision));
  }
  const int most = extra == Extra::mask && p.pass == OCTET_BACKWARD ? kMaxBackwardMaskDim : kMaxExtraDim;
  if (const int64_t dim = std::max(p.dim, p.dim_v); dim > most)
    return text(without, " for head dim ", dim, "; it has: up to ", most);
  if (p.pass == OCTET_FORWARD && numerics.beta) return text(without, " with bias_correction beta");
  if (p.pass == OCTET_BACKWARD && p.deterministic) return text(without, " in a deterministic backward pass");
  if (extra == Extra::mask) {
    const bool f16 = p.pass == OCTET_FORWARD ? numerics.type() == OCTET_F16 : p.mask.dtype == OCTET_F16;
    return MaskTiles::unsupported_reason(p, f16 ? OCTET_F16 : OCTET_BF16);
  }
  return {};
}

std::optional<std::string> quantized_unsupported_reason(const Problem& p, const ForwardFormats& formats) {
  if (p_8bit(formats) && std::max(p.dim, p.dim_v) > kMax8BitDim)
    return text("it has no ", name(p.precision), " for head dim ", std::max(p.dim, p.dim_v), "; it has: up to ",
                kMax8BitDim);
  if (auto reason = smooth_q_unsupported_reason(p)) return reason;
  if (auto reason = input_unsupported_reason(p, formats)) return reason;
  const bool q_came = as_it_came(formats, p.q), k_came = as_it_came(formats, p.k);
  // The mean of k has a product with each query, which is computed where queries are quantized.
  if (q_came && !k_came) return text("q is e4m3 and k is ", name(p.k.dtype), "; it takes such a q with a k of e4m3");
  const bool one_quantized = p.q.quantization || p.k.quantization;
  if (one_quantized && !(q_came && k_came))
    return "only one of q and k is e4m3, and quantized; it takes both so, or none quantized";
  return {};
}

}  // namespace octet::cuda::sm90
