#include "core/arguments.h"

#include <iterator>
#include <string>

#include "core/error.h"
#include "core/names.h"

namespace octet {
namespace {

void expect_plain(const View& view, const char* label) {
  if (view.quantization)
    invalid(label, ": has a quantization, but its elements are read and written as plain numbers; leave it NULL");
}

}  // namespace

View view_of(const octet_tensor* t, const char* label, bool output) {
  if (!t) invalid(label, ": NULL");
  const View view = validate_tensor(t, label);
  if (output) expect_distinct_elements(view, label);
  return view;
}

View plain(const octet_tensor* t, const char* label, bool output) {
  const View view = view_of(t, label, output);
  expect_plain(view, label);
  return view;
}

std::string device_of(const octet_tensor& t) {
  return text(name(static_cast<octet_device>(t.device)), ':', t.device_index);
}

void expect_beside(const octet_tensor& t, const char* label, const octet_tensor& other, const char* others) {
  if (t.device != other.device || t.device_index != other.device_index)
    invalid(label, ": on ", device_of(t), ", but ", others, " on ", device_of(other));
}

View part_of(const octet_tensor& codes, const octet_tensor* t, const char* label, bool output) {
  if (!t) invalid(label, ": NULL");
  const View view = validate_tensor(t, label);
  if (output) expect_distinct_elements(view, label);
  expect_plain(view, label);
  expect_beside(*t, label, codes, "its codes are");
  return view;
}

std::optional<cuda::Place> place_of(const octet_tensor& t, [[maybe_unused]] const char* label, void* stream) {
  if (t.device == OCTET_CPU) {
    if (stream) invalid("stream: given with CPU tensors; pass NULL");
    return {};
  }
#ifdef OCTET_CUDA_QUANTIZERS
  return cuda::Place{t.device_index, stream};
#else
  unsupported(label, ": on cuda:", t.device_index, ", but there is no CUDA quantizer in this build");
#endif
}

void expect_memory_of_their_own(std::initializer_list<Labelled> outputs, std::initializer_list<Labelled> inputs) {
  for (auto out = outputs.begin(); out != outputs.end(); ++out) {
    for (auto other = std::next(out); other != outputs.end(); ++other)
      expect_no_overlap(*out->first, out->second, *other->first, other->second);
    for (const auto& [in, label] : inputs) expect_no_overlap(*out->first, out->second, *in, label);
  }
}

}  // namespace octet
