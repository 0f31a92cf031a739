#include <algorithm>
#include <iterator>

#include "cuda/host/tensor_map.h"
#include "cuda/operands/contiguous.h"

namespace octet::cuda {
namespace {

int64_t bytes(octet_dtype type) { return type == OCTET_F32 ? 4 : type == OCTET_E4M3 || type == OCTET_I8 ? 1 : 2; }

Element element(octet_dtype type) {
  switch (type) {
    case OCTET_F32:
      return Element::f32;
    case OCTET_F16:
      return Element::f16;
    case OCTET_E4M3:
      return Element::e4m3;
    case OCTET_I8:
      return Element::i8;
    default:
      return Element::bf16;
  }
}

// The elements to copy: one index of each dimension of stride 0.
Strided distinct(const View& t) {
  Strided s = strided(t);
  for (int i = 0; i < 2; ++i)
    if (t.stride[i] == 0) s.shape[i] = std::min<int64_t>(s.shape[i], 1);
  return s;
}

// Returns true if the rows are whole words: of 8 bytes for elements of one, else of 16.
bool writes_directly(const View& t) {
  const int64_t size = bytes(t.dtype), word = size == 1 ? 8 : 16;
  if (reinterpret_cast<uintptr_t>(t.data) % word || t.stride[3] != 1) return false;
  for (int i = 0; i < 3; ++i)
    if (t.shape[i] > 1 && t.stride[i] * size % word) return false;
  return true;
}

}  // namespace

View contiguous(View t, octet_dtype type, WorkspaceAllocator& workspace, std::initializer_list<int> order) {
  t.dtype = type;
  int64_t stride = 1;
  for (const int i : order) {
    t.stride[i] = stride;
    stride *= i == 3 && bytes(type) == 1 ? (t.shape[i] + 15) / 16 * 16 : t.shape[i];
  }
  t.data = workspace.take(static_cast<std::size_t>(stride * bytes(type)));
  return t;
}

Strided strided(const View& t) {
  Strided s{.data = t.data, .element = element(t.dtype)};
  std::copy(std::begin(t.shape), std::end(t.shape), s.shape);
  std::copy(std::begin(t.stride), std::end(t.stride), s.stride);
  return s;
}

Output output(const View& t) {
  return {t.data, {t.stride[0], t.stride[1], t.stride[2]}, t.present() ? element(t.dtype) : Element::f32};
}

Sinks sinks(const View& t) { return {static_cast<const float*>(t.data), t.stride[0], t.stride[1]}; }

Input::Input(const View& from, octet_dtype type, WorkspaceAllocator& workspace) : from_(from), view_(from) {
  view_.dtype = type;
  if (!from.elements() || (from.dtype == type && reads_directly(from))) return;
  const bool batches = from.stride[0] != 0, heads = from.stride[1] != 0;
  view_ = batches && heads ? contiguous(from, type, workspace)
          : batches        ? contiguous(from, type, workspace, {3, 2, 0})
          : heads          ? contiguous(from, type, workspace, {3, 2, 1})
                           : contiguous(from, type, workspace, {3, 2});
}

void Input::preprocess(cudaStream_t stream) const {
  if (view_.data == from_.data) return;
  cast(distinct(from_), distinct(view_), element(view_.dtype), stream);
}

ScaledInput::ScaledInput(const View& from, octet_dtype through, int mean_columns, WorkspaceAllocator& workspace,
                         const VRange& range)
    : from_(from), view_(contiguous(from, OCTET_F16, workspace)), through_(through), range_(range) {
  const auto heads = static_cast<std::size_t>(from.shape[0] * from.shape[1]);
  scratch_ = workspace.take<float>(from.elements() ? convert_scratch(strided(from)) : 0);
  scale_ = workspace.take<float>(heads);
  mean_ = {mean_columns ? workspace.take<float>(heads * static_cast<std::size_t>(mean_columns)) : nullptr,
           mean_columns};
}

void ScaledInput::preprocess(const SeenKeys& seen, cudaStream_t stream, const TokenFlags& flags) const {
  convert_to_f16(strided(from_), strided(view_), element(through_), mean_, seen, flags, range_, scratch_, scale_,
                 stream);
}

bool ScaledInput::in_slices(const SeenKeys& seen) const {
  return converts_in_slices(strided(from_), element(through_), seen);
}

VSlices ScaledInput::find_v_stats(const SeenKeys& seen, const TokenFlags& flags, unsigned* counter,
                                  cudaStream_t stream) const {
  return cuda::find_v_stats(strided(from_), strided(view_), mean_, seen, flags, scratch_, scale_, counter, stream);
}

Result::Result(const View& to, octet_dtype type, WorkspaceAllocator& workspace) : to_(to), view_(to) {
  if (to.present() && to.elements() && (type != to.dtype || !writes_directly(to)))
    view_ = contiguous(to, type, workspace);
}

void Result::deliver(cudaStream_t stream) const {
  if (view_.data != to_.data) cast(strided(view_), strided(to_), element(to_.dtype), stream);
}

}  // namespace octet::cuda
