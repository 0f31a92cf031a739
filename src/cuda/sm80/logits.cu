#include "cuda/host/launch.h"
#include "cuda/operands/masks.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {
namespace {

constexpr int kThreads = 256, kRows = kThreads / 32;

// Calls f(key, number) for the keys of a row of the mask tensor, those of this lane of a warp: chunks of 16 bytes where
// rows start at multiples of them.
template <class F>
__device__ void each_number(const LogitTerms& t, int64_t start, const Interval& keys, const F& f) {
  const int lane = threadIdx.x % 32;
  with_mask_type(t.element, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    constexpr int kNumbers = kMaskChunkBytes / sizeof(T);
    const T* const row = static_cast<const T*>(t.mask) + start;
    const auto number = [](const T* x) { return MaskNumbers<T>::one(x, 0); };
    const int first = t.mask_chunks ? (keys.first + kNumbers - 1) / kNumbers * kNumbers : keys.last;
    const int chunks_end = first + max(keys.last - first, 0) / kNumbers * kNumbers;
#pragma unroll 4
    for (int key = first + lane * kNumbers; key < chunks_end; key += 32 * kNumbers) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(row + key);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) f(key + i, number(reinterpret_cast<const T*>(&chunk) + i));
    }
    const auto one_by_one = [&](int key, int last) {
      for (key += lane; key < last; key += 32) f(key, number(row + key * t.mask_stride[3]));
    };
    one_by_one(keys.first, min(first, keys.last)), one_by_one(max(chunks_end, keys.first), keys.last);
  });
}

// One warp computes the bias of a row.
__global__ void __launch_bounds__(kThreads)
    row_bias_kernel(const __grid_constant__ LogitTerms t, const Mask mask, int n, int m) {
  const int64_t rows = t.row_bias_shape[0] * t.row_bias_shape[1] * t.row_bias_shape[2];
  const int lane = threadIdx.x % 32;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / 32; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kRows) {
    const int i = static_cast<int>(row % t.row_bias_shape[2]);
    const int head = static_cast<int>(row / t.row_bias_shape[2] % t.row_bias_shape[1]);
    const int batch = static_cast<int>(row / t.row_bias_shape[2] / t.row_bias_shape[1]);
    const Interval seen = mask.keys_of(i, n, m);
    LogitTerms without = t;
    without.row_bias = nullptr;
    const RowTerms terms = row_terms(without, batch, batch, head, i, n, m, seen);
    float most = -INFINITY;
    each_number(t, terms.mask_start, seen,
                [&](int key, float number) { most = fmaxf(most, added_by_mask(t, terms, key, number)); });
    for (int offset = 16; offset; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    if (lane == 0) t.row_bias[row] = isfinite(most) ? most : 0.f;
  }
}

}  // namespace

Logits logits_of(const Problem& p) {
  if (p.dropout) return Logits::general;
  if (p.plain_logits()) return Logits::plain;
  return mask_tensor(p).chunks && !p.softcap && !p.alibi_slopes.present() ? Logits::masked : Logits::general;
}

LogitTerms logit_terms(const Problem& p, WorkspaceAllocator& workspace) {
  LogitTerms t{.scale = p.scale, .softcap = p.softcap, .inverse_softcap = p.softcap ? 1.f / p.softcap : 0.f};
  const bool slopes = p.alibi_slopes.present();
  if (slopes) {
    t.slopes = static_cast<const float*>(p.alibi_slopes.data);
    std::copy_n(p.alibi_slopes.stride, 2, t.slope_stride);
  }
  const MaskTensor mask = mask_tensor(p);
  t.mask = mask.data, t.element = mask.element, t.mask_bytes = mask.bytes, t.mask_chunks = mask.chunks;
  std::copy_n(mask.stride, 4, t.mask_stride);
  if (!t.mask_bytes || (p.mask.dtype == OCTET_BOOL && !slopes)) return t;
  const int64_t full[3] = {p.batch, p.heads, p.tokens_q};
  const bool varies[3] = {slopes && t.slope_stride[0], slopes, slopes || p.windowed};
  int64_t count = 1;
  for (int i = 2; i >= 0; --i) {
    t.row_bias_shape[i] = varies[i] || t.mask_stride[i] ? full[i] : 1;
    t.row_bias_stride[i] = t.row_bias_shape[i] > 1 ? count : 0;
    count *= t.row_bias_shape[i];
  }
  t.row_bias = workspace.take<float>(static_cast<std::size_t>(count));
  return t;
}

void compute_row_biases(const Problem& p, const LogitTerms& t, cudaStream_t stream) {
  if (!t.row_bias) return;
  const int64_t rows = t.row_bias_shape[0] * t.row_bias_shape[1] * t.row_bias_shape[2];
  row_bias_kernel<<<blocks_for(rows, kRows), kThreads, 0, stream>>>(t, mask_of(p), static_cast<int>(p.tokens_q),
                                                                    static_cast<int>(p.tokens_k));
  check(cudaGetLastError(), "row_bias_kernel");
}

}  // namespace octet::cuda::sm80
