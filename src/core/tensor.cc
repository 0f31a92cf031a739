#include "core/tensor.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/error.h"
#include "core/names.h"
#include "core/structs.h"

namespace octet {
namespace {

// More than any address space of today; small enough that sums and small multiples of sizes fit in 64 bits.
constexpr __int128 kMaxBytes = __int128{1} << 48;

int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

// [first, last) of the addresses that a view touches; not for empty views.
struct Extent {
  uintptr_t first, last;
  bool meets(const Extent& other) const { return first < other.last && other.first < last; }
};

Extent extent(const View& t) {
  int64_t low = 0, high = 0;
  for (int i = 0; i < 4; ++i) {
    const int64_t span = (t.shape[i] - 1) * t.stride[i];
    (span < 0 ? low : high) += span;
  }
  const auto size = static_cast<int64_t>(bytes_of(t.dtype));
  const auto base = reinterpret_cast<uintptr_t>(t.data);
  return {base + static_cast<uintptr_t>(low * size), base + static_cast<uintptr_t>((high + 1) * size)};
}

// Returns whether each dimension steps over all that the dimensions of smaller stride reach, so that no two elements of
// the view are one.
bool strides_nest(const View& t) {
  std::array<int, 4> order{0, 1, 2, 3};
  std::sort(order.begin(), order.end(), [&](int a, int b) { return magnitude(t.stride[a]) < magnitude(t.stride[b]); });
  int64_t span = 0;
  for (const int i : order) {
    if (t.shape[i] == 1) continue;
    const int64_t step = magnitude(t.stride[i]);
    if (step <= span) return false;
    span += (t.shape[i] - 1) * step;
  }
  return true;
}

// One dimension of the differences of two views' indices: step * d with low <= d <= high.
struct Difference {
  int64_t step, low, high;
};

// Returns whether distance = sum over dimensions of step * d for some d within their bounds. Steps descend. Where both
// views nest, the smaller steps reach less than twice the largest, and a few values of d are to be tried; where they
// reach further the answer is a cautious yes.
bool reachable(const Difference* first, const Difference* last, int64_t distance) {
  if (first == last) return distance == 0;
  int64_t low = 0, high = 0;  // of the smaller steps
  for (const Difference* d = first + 1; d != last; ++d) low += d->low * d->step, high += d->high * d->step;
  if (high - low >= 2 * first->step) return true;
  const int64_t nearest = distance / first->step;
  for (int64_t d = std::max(first->low, nearest - 2); d <= std::min(first->high, nearest + 2); ++d) {
    const int64_t rest = distance - d * first->step;
    if (rest >= low && rest <= high && reachable(first + 1, last, rest)) return true;
  }
  return false;
}

// Returns whether two views may share an element: exact if they step alike, else true when their extents meet.
bool share_memory(const View& out, const View& other) {
  const Extent a = extent(out), b = extent(other);
  if (!a.meets(b)) return false;
  const std::size_t size = bytes_of(out.dtype);
  const auto bytes =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(other.data) - reinterpret_cast<uintptr_t>(out.data));
  if (bytes_of(other.dtype) != size || bytes % static_cast<int64_t>(size)) return true;
  std::array<Difference, 4> differences{};
  int64_t count = 0;
  for (int i = 0; i < 4; ++i) {
    const bool out_varies = out.shape[i] > 1, other_varies = other.shape[i] > 1;
    if (out_varies && other_varies && out.stride[i] != other.stride[i]) return true;
    const int64_t step = out_varies ? out.stride[i] : other_varies ? other.stride[i] : 0;
    if (!step) continue;
    // An element of `out` minus one of `other`: bounds for a positive step, mirrored for a negative one.
    const int64_t low = 1 - other.shape[i], high = out.shape[i] - 1;
    differences[count++] = step > 0 ? Difference{step, low, high} : Difference{-step, -high, -low};
  }
  std::sort(differences.begin(), differences.end(),
            [](const Difference& x, const Difference& y) { return x.step > y.step; });
  return reachable(differences.data(), differences.data() + count, bytes / static_cast<int64_t>(size));
}

void validate_memory(const View& t, const char* label) {
  const auto size = static_cast<int64_t>(bytes_of(t.dtype));
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  __int128 low = 0, high = 0;
  for (int i = 0; i < 4; ++i) {
    const __int128 span = static_cast<__int128>(t.shape[i] - 1) * t.stride[i] * size;
    (span < 0 ? low : high) += span;
  }
  if (high - low > kMaxBytes || address + low < 0 || address + high + size > UINTPTR_MAX)
    invalid(label, ": strides ", shape_text(t.stride), " with shape ", shape_text(t.shape),
            " reach beyond the address space");
  if (!address) invalid(label, ": null data, but shape ", shape_text(t.shape), " is not empty");
  if (address % static_cast<uintptr_t>(size))
    invalid(label, ": data is not aligned to its elements of ", size, " bytes (dtype ", name(t.dtype), ")");
}

}  // namespace

View validate_tensor(const octet_tensor* t, const char* label) {
  expect_size(*t, label, ": octet_tensor");
  View view;
  view.dtype = checked(t->dtype, OCTET_F64, OCTET_BOOL, label, ": dtype");
  checked(t->device, OCTET_CPU, OCTET_CUDA, label, ": device");
  view.quantization = t->quantization;
  __int128 bytes = static_cast<__int128>(bytes_of(view.dtype));
  for (int i = 0; i < 4; ++i) {
    if (t->shape[i] < 0) invalid(label, ": shape ", shape_text(t->shape), " has a negative dimension");
    bytes *= std::max<int64_t>(t->shape[i], 1);
    if (bytes > kMaxBytes) invalid(label, ": shape ", shape_text(t->shape), " has more elements than memory can hold");
    view.shape[i] = t->shape[i];
    // Nothing steps over a dimension of one element: its stride may be any number.
    view.stride[i] = t->shape[i] == 1 ? (i == 3 ? 1 : 0) : t->stride[i];
  }
  if (!view.elements()) return view;
  view.data = t->data;
  validate_memory(view, label);
  return view;
}

void expect_dtype(const View& t, const char* label, std::initializer_list<octet_dtype> allowed) {
  if (std::find(allowed.begin(), allowed.end(), t.dtype) != allowed.end()) return;
  std::string choices;
  for (const octet_dtype d : allowed) choices += text(choices.empty() ? "" : ", ", name(d));
  invalid(label, ": dtype ", name(t.dtype), ", allowed: ", choices);
}

void expect_shape(const View& t, const char* label, const int64_t (&want)[4], const char* why) {
  if (!std::equal(t.shape, t.shape + 4, want))
    invalid(label, ": shape ", shape_text(t.shape), ", expected ", shape_text(want), " (", why, ")");
}

void expect_distinct_elements(const View& out, const char* label) {
  if (out.data && !strides_nest(out))
    invalid(label, ": strides ", shape_text(out.stride), " with shape ", shape_text(out.shape),
            " put several elements of an output in one place; only inputs may broadcast");
}

void expect_no_overlap(const View& out, const char* out_label, const View& other, const char* other_label) {
  if (out.data && other.data && share_memory(out, other))
    invalid(out_label, ": its memory overlaps that of ", other_label, "; outputs must have memory of their own");
}

void expect_no_overlap(const void* memory, std::size_t bytes, const char* memory_label, const View& other,
                       const char* other_label) {
  const auto first = reinterpret_cast<uintptr_t>(memory);
  if (memory && bytes && other.data && extent(other).meets({first, first + bytes}))
    invalid(memory_label, ": its memory overlaps that of ", other_label);
}

}  // namespace octet
