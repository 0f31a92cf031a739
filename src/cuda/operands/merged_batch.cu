#include "core/names.h"
#include "cuda/host/launch.h"
#include "cuda/host/status.h"
#include "cuda/operands/cast.h"
#include "cuda/operands/contiguous.h"
#include "cuda/operands/merged_batch.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// Copies a tensor of floats with one number for a token.
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const Strided from, const Strided to) {
  const int64_t all = from.shape[0] * from.shape[1] * from.shape[2];
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const Index4 at{i / from.shape[2] / from.shape[1], i / from.shape[2] % from.shape[1], i % from.shape[2], 0};
    static_cast<float*>(to.data)[at.offset(to)] = static_cast<const float*>(from.data)[at.offset(from)];
  }
}

void copy(const View& from, const View& to, cudaStream_t stream) {
  if (!from.elements()) return;
  const Strided source = strided(from), target = strided(to);
  if (from.shape[3] % kVec8 == 0) return cast(source, target, target.element, stream);
  copy_rows_kernel<<<blocks_for(from.elements(), kThreads), kThreads, 0, stream>>>(source, target);
  check(cudaGetLastError(), "copy_rows_kernel");
}

}  // namespace

View merged(View t) {
  if (t.shape[2] == 1) t.stride[2] = t.stride[0];
  t.stride[0] *= t.shape[0], t.shape[2] *= t.shape[0], t.shape[0] = 1;
  return t;
}

bool can_merge(const View& t) {
  return !t.elements() || t.shape[0] == 1 || t.shape[2] == 1 || t.stride[0] == t.shape[2] * t.stride[2];
}

View packed_tokens(const View& t, int64_t tokens, WorkspaceAllocator& workspace) {
  if (!t.present()) return t;
  const View all{.dtype = t.dtype, .shape = {1, t.shape[1], tokens, t.shape[3]}};
  return all.elements() ? contiguous(all, t.dtype, workspace) : all;
}

View cu_seqlens(int* data, int64_t sequences) {
  return {OCTET_I32, data, {1, 1, 1, sequences + 1}, {sequences + 1, sequences + 1, sequences + 1, 1}};
}

Strided of_words(const View& t, int64_t bytes) {
  Strided s = strided(t);
  const auto size = static_cast<int64_t>(bytes_of(t.dtype));
  for (int i = 0; i < 3; ++i) s.stride[i] = s.stride[i] * size / bytes;
  s.shape[3] = s.shape[3] * size / bytes;
  return s;
}

MergedBatch::MergedBatch(const View& t, WorkspaceAllocator& workspace) : tensor_(t), copy_(t) {
  if (t.present() && !can_merge(t)) copy_ = contiguous(t, t.dtype, workspace, {3, 1, 2, 0});
  view_ = t.present() ? merged(copy_) : t;
}

void MergedBatch::copy_in(cudaStream_t stream) const {
  if (copies()) copy(tensor_, copy_, stream);
}

void MergedBatch::copy_out(cudaStream_t stream) const {
  if (copies()) copy(copy_, tensor_, stream);
}

}  // namespace octet::cuda
