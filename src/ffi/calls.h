// What tells one call of octet_dlpack.cc from another: its kind, and its tensors' shapes, strides and types.
#pragma once
#include <octet/octet.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "dlpack.h"
#include "python.h"

namespace octet::ffi {

constexpr int kDims = 4, kStates = 2, kMore = 4, kMostInputs = 7 + kMore, kMostOutputs = 4;

// What _passes.py hands over, for as long as the process lives.
struct Framework {
  const DLExchange* api;
  PyObject* tensor;           // the type of plain tensors
  PyObject* parameter;        // that of tensors with a gradient, as sinks are
  PyObject* listeners;        // functions; one that gives true listens to operators
  PyObject* casts;            // function: whether autocast would change the types of tensors
  PyObject* is_autocast;      // functions
  PyObject* states;           // functions that give numbers on which a call depends
  PyObject* is_grad_enabled;  // functions
  PyObject* is_mapped;        // function: whether a tensor is mapped by a vmap that is no listener
  PyObject* empty_like;
  PyObject* empty;
  PyObject* is_neg;
  PyObject* requires_grad;  // the attribute's name
};
inline Framework framework;

// The passes that can be run again, and the order of their inputs, which up to kMore others follow, and outputs.
enum Kind : int64_t {
  kForward,   // q k v -> o
  kTraining,  // q k v -> o lse o_residual; the last is an empty tensor where the backward pass reads none
  kBackward,  // do q k v o lse o_residual -> dq dk dv, and with sinks dsinks
};
constexpr int kInputs[] = {3, 3, 7}, kOutputs[] = {1, 3, 3};
using Objects = PyObject* const*;

// What other inputs are; octet_fast_keep says which a pass has.
enum More : int64_t { kMask, kSinks, kSlopes, kSeed };
using Place = const octet_tensor* octet_arguments::*;
constexpr Place kPlaces[kMore] = {&octet_arguments::mask, &octet_arguments::sinks, &octet_arguments::alibi_slopes,
                                  &octet_arguments::dropout_seed};

inline bool is_true(PyObject* function) { return truth(PyObject_CallNoArgs(function)); }
inline bool is_true(PyObject* function, PyObject* x) {
  return truth(PyObject_CallFunctionObjArgs(function, x, nullptr));
}

// Returns whether all objects are plain tensors; those from `first_more` on may be parameters.
inline bool are_tensors(Objects inputs, int count, int first_more) {
  for (int i = 0; i < count; ++i) {
    const PyObject* const type = Reference(PyObject_Type(inputs[i])).object;  // which its object keeps
    if (type != framework.tensor && (i < first_more || type != framework.parameter)) return false;
  }
  return true;
}

// Returns whether nobody would notice that no operator runs on these objects.
inline bool plain(Objects inputs, int count, int first_more) {
  if (!are_tensors(inputs, count, first_more)) return false;
  for (std::ptrdiff_t i = 0, n = PyTuple_Size(framework.listeners); i < n; ++i)
    if (is_true(PyTuple_GetItem(framework.listeners, i))) return false;
  for (int i = 0; i < count; ++i)
    if (is_true(framework.is_neg, inputs[i])) return false;
  return true;
}

// Returns whether autocast would hand tensors of another type to the operator.
inline bool cast(Objects qkv) {
  return is_true(framework.is_autocast) &&
         truth(PyObject_CallFunctionObjArgs(framework.casts, qkv[0], qkv[1], qkv[2], nullptr));
}

inline bool requires_grad(PyObject* x) { return truth(PyObject_GetAttr(x, framework.requires_grad)); }

inline bool wants_gradient(Objects inputs, int count) {
  if (!is_true(framework.is_grad_enabled)) return false;
  for (int i = 0; i < count; ++i)
    if (requires_grad(inputs[i])) return true;
  return false;
}

struct Meta {
  DLDevice device;
  DLDataType dtype;
  int32_t dims;
  int64_t shape[kDims], strides[kDims];
};

inline bool operator==(const Meta& a, const Meta& b) { return !std::memcmp(&a, &b, sizeof a); }

// All that tells one call from another.
struct Key {
  Kind kind;
  int64_t token;  // of the caller's options, and of which other inputs there are
  int64_t count;  // of inputs
  int64_t states[kStates];
  Meta inputs[kMostInputs];  // the rest is 0
};
static_assert(std::has_unique_object_representations_v<Key>);

inline bool operator==(const Key& a, const Key& b) { return !std::memcmp(&a, &b, sizeof a); }

struct Hash {
  std::size_t operator()(const Key& key) const {
    const std::size_t used = offsetof(Key, inputs) + key.count * sizeof(Meta);
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&key), used});
  }
};

// An object's view. False: it is no tensor on a device that octet knows.
inline bool look(PyObject* object, DLTensor& view, Meta& meta) {
  if (framework.api->view(object, &view)) return PyErr_Clear(), false;
  const auto& [type, index] = view.device;
  if ((type != kDLCpu && type != kDLCuda) || view.dims < 1 || view.dims > kDims || !view.strides) return false;
  meta = {view.device, view.dtype, view.dims, {}, {}};
  for (int i = 0; i < view.dims; ++i) meta.shape[i] = view.shape[i], meta.strides[i] = view.strides[i];
  return true;
}

using Views = std::array<DLTensor, kMostInputs + kMostOutputs>;  // inputs, then outputs

// The views of inputs, and what they share with others of their kind.
inline bool look(Kind kind, PyObject* token, Objects inputs, int count, Views& views, Key& key) {
  std::memset(&key, 0, sizeof key);
  key.kind = kind, key.token = PyLong_AsLong(token), key.count = count;
  for (int i = 0; i < kStates; ++i) {
    const Reference found(PyObject_CallNoArgs(PyTuple_GetItem(framework.states, i)));
    if (!found.object) return PyErr_Clear(), false;
    key.states[i] = PyLong_AsLong(found.object);
  }
  for (int i = 0; i < count; ++i)
    if (!look(inputs[i], views[i], key.inputs[i])) return false;
  return true;
}

// Returns whether o has q's shape and the library takes these tensors as they are.
inline bool is_like_q(const Views& qkv) {
  const DLTensor &q = qkv[0], &k = qkv[1], &v = qkv[2];
  if (q.dims != kDims || k.dims != kDims || v.dims != kDims) return false;
  return q.shape[kDims - 1] == v.shape[kDims - 1] && q.shape[kDims - 1] % 8 == 0;
}

}  // namespace octet::ffi
