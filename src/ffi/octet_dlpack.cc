// octet as a call on tensors of a framework that has DLPack's exchange API (torch since 2.11): a pass that was
// described before runs again on other tensors of the same kind, without an interpreter between. Compiled against no
// framework and no Python; python/octet/torch/_passes.py opens it.
#include <octet/octet.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "dlpack.h"
#include "python.h"

namespace {

constexpr int64_t kAlignment = 64;  // of a workspace
constexpr std::size_t kKept = 512;
constexpr int kDims = 4, kStates = 2, kMostInputs = 7, kMostOutputs = 3;

// What _passes.py hands over, for as long as the process lives.
struct Framework {
  const DLExchange* api;
  PyObject* tensor;           // the type of plain tensors
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
} framework;

// The passes that can be run again, and the order of their inputs and outputs.
enum Kind : int64_t {
  kForward,   // q k v -> o
  kTraining,  // q k v -> o lse o_residual; the last is an empty tensor where the backward pass reads none
  kBackward,  // do q k v o lse o_residual -> dq dk dv
};
constexpr int kInputs[] = {3, 3, 7}, kOutputs[] = {1, 3, 3};
using Objects = PyObject* const*;

bool is_true(PyObject* function) { return truth(PyObject_CallNoArgs(function)); }
bool is_true(PyObject* function, PyObject* x) { return truth(PyObject_CallFunctionObjArgs(function, x, nullptr)); }

// Returns whether all objects are plain tensors.
bool are_tensors(Objects inputs, int count) {
  for (int i = 0; i < count; ++i)
    if (Reference(PyObject_Type(inputs[i])).object != framework.tensor) return false;
  return true;
}

// Returns whether nobody would notice that no operator runs on these objects.
bool plain(Objects inputs, int count) {
  if (!are_tensors(inputs, count)) return false;
  for (std::ptrdiff_t i = 0, n = PyTuple_Size(framework.listeners); i < n; ++i)
    if (is_true(PyTuple_GetItem(framework.listeners, i))) return false;
  for (int i = 0; i < count; ++i)
    if (is_true(framework.is_neg, inputs[i])) return false;
  return true;
}

// Returns whether autocast would hand tensors of another type to the operator.
bool cast(Objects qkv) {
  return is_true(framework.is_autocast) &&
         truth(PyObject_CallFunctionObjArgs(framework.casts, qkv[0], qkv[1], qkv[2], nullptr));
}

bool wants_gradient(Objects qkv) {
  if (!is_true(framework.is_grad_enabled)) return false;
  for (int i = 0; i < 3; ++i)
    if (truth(PyObject_GetAttr(qkv[i], framework.requires_grad))) return true;
  return false;
}

struct Meta {
  DLDevice device;
  DLDataType dtype;
  int32_t dims;
  int64_t shape[kDims], strides[kDims];
};

bool operator==(const Meta& a, const Meta& b) { return !std::memcmp(&a, &b, sizeof a); }

// All that tells one call from another.
struct Key {
  Kind kind;
  int64_t token;  // of the caller's options
  int64_t states[kStates];
  Meta inputs[kMostInputs];  // the rest is 0
};
static_assert(std::has_unique_object_representations_v<Key>);

bool operator==(const Key& a, const Key& b) { return !std::memcmp(&a, &b, sizeof a); }

struct Hash {
  std::size_t operator()(const Key& key) const {
    const std::size_t used = offsetof(Key, inputs) + kInputs[key.kind] * sizeof(Meta);
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&key), used});
  }
};

// An object's view. False: it is no tensor on a device that octet knows.
bool look(PyObject* object, DLTensor& view, Meta& meta) {
  if (framework.api->view(object, &view)) return PyErr_Clear(), false;
  const auto& [type, index] = view.device;
  if ((type != kDLCpu && type != kDLCuda) || view.dims < 1 || view.dims > kDims || !view.strides) return false;
  meta = {view.device, view.dtype, view.dims, {}, {}};
  for (int i = 0; i < view.dims; ++i) meta.shape[i] = view.shape[i], meta.strides[i] = view.strides[i];
  return true;
}

using Views = std::array<DLTensor, kMostInputs + kMostOutputs>;  // inputs, then outputs

// The views of inputs, and what they share with others of their kind.
bool look(Kind kind, int64_t token, Objects inputs, Views& views, Key& key) {
  std::memset(&key, 0, sizeof key);
  key.kind = kind, key.token = token;
  for (int i = 0; i < kStates; ++i) {
    const Reference found(PyObject_CallNoArgs(PyTuple_GetItem(framework.states, i)));
    if (!found.object) return PyErr_Clear(), false;
    key.states[i] = PyLong_AsLong(found.object);
  }
  for (int i = 0; i < kInputs[kind]; ++i)
    if (!look(inputs[i], views[i], key.inputs[i])) return false;
  return true;
}

// Returns whether o has q's shape and the library takes these tensors as they are.
bool is_like_q(const Views& qkv) {
  const DLTensor &q = qkv[0], &k = qkv[1], &v = qkv[2];
  if (q.dims != kDims || k.dims != kDims || v.dims != kDims) return false;
  return q.shape[kDims - 1] == v.shape[kDims - 1] && q.shape[kDims - 1] % 8 == 0;
}

struct Call {
  octet_attention attention;
  std::string backend;
  octet_arguments arguments;
  std::array<octet_tensor, kMostInputs + kMostOutputs> tensors{};  // of inputs and outputs
  Meta outputs[kMostOutputs];
  PyObject* lse_shape = nullptr;          // in a tuple, and
  PyObject* lse_keywords = nullptr;       // of framework.empty, for lse
  PyObject* residual_keywords = nullptr;  // of framework.empty_like, for o_residual
  PyObject* none = nullptr;               // in the place of o_residual
  std::size_t workspace;

  Call() = default;
  Call(const Call&) = delete;
  ~Call() {
    for (PyObject* object : {lse_shape, lse_keywords, residual_keywords, none})
      if (object) Py_DecRef(object);
  }
};

// A new output, or null.
PyObject* make(const Call& call, Kind kind, int i, Objects inputs) {
  if (kind == kBackward) return PyObject_CallFunctionObjArgs(framework.empty_like, inputs[1 + i], nullptr);
  if (i == 0) return PyObject_CallFunctionObjArgs(framework.empty_like, inputs[0], nullptr);
  if (i == 1) return PyObject_Call(framework.empty, call.lse_shape, call.lse_keywords);
  if (call.none) return Py_IncRef(call.none), call.none;
  const Reference like(PyTuple_Pack(1, inputs[0]));
  return like.object ? PyObject_Call(framework.empty_like, like.object, call.residual_keywords) : nullptr;
}

std::mutex mutex;
using Kept = std::unordered_map<Key, std::shared_ptr<const Call>, Hash>;
Kept& kept = *new Kept;  // calls hold objects of Python, which is gone before static objects are

std::shared_ptr<const Call> find(const Key& key) {
  const std::lock_guard lock(mutex);
  const auto found = kept.find(key);
  return found == kept.end() ? nullptr : found->second;
}

void* data(const DLTensor& t) { return static_cast<char*>(t.data) + t.byte_offset; }

// Memory of the framework, which it gives to later work of the stream.
class Workspace {
 public:
  Workspace(std::size_t size, DLDevice device) {
    if (!size) return;
    int64_t bytes = static_cast<int64_t>(size) + kAlignment, one = 1;
    DLTensor like{nullptr, device, 1, kBytes, &bytes, &one, 0};
    const auto ignore = [](void*, const char*, const char*) {};
    if (framework.api->allocate(&like, &memory_, nullptr, ignore)) {
      PyErr_Clear();
      return;
    }
    std::size_t space = static_cast<std::size_t>(bytes);
    address_ = ::data(memory_->tensor);
    address_ = std::align(kAlignment, size, address_, space);
  }
  Workspace(const Workspace&) = delete;
  ~Workspace() {
    if (memory_) memory_->deleter(memory_);
  }
  void* address() const { return address_; }

 private:
  DLManagedTensor* memory_ = nullptr;
  void* address_ = nullptr;
};

// The tensors of a pass in octet_arguments, in the order of its inputs and outputs.
void place(Kind kind, octet_arguments& a, octet_tensor* t, bool residual) {
  if (kind == kForward) {
    a.q = &t[0], a.k = &t[1], a.v = &t[2], a.o = &t[3];
  } else if (kind == kTraining) {
    a.q = &t[0], a.k = &t[1], a.v = &t[2], a.o = &t[3], a.lse = &t[4], a.o_residual = residual ? &t[5] : nullptr;
  } else {
    a.do_ = &t[0], a.q = &t[1], a.k = &t[2], a.v = &t[3], a.o = &t[4], a.lse = &t[5];
    a.o_residual = residual ? &t[6] : nullptr, a.dq = &t[7], a.dk = &t[8], a.dv = &t[9];
  }
}

// On the framework's stream and in its memory. False: it failed; a call in the ordinary way will tell why.
bool run(const Call& call, Kind kind, const Views& views) {
  octet_attention attention = call.attention;
  attention.backend = call.backend.empty() ? nullptr : call.backend.c_str();
  auto tensors = call.tensors;
  for (int i = 0, n = kInputs[kind] + kOutputs[kind]; i < n; ++i) tensors[i].data = data(views[i]);
  octet_arguments arguments = call.arguments;
  place(kind, arguments, tensors.data(), call.arguments.o_residual);

  void* stream = nullptr;
  const DLDevice device = views[0].device;
  if (device.type == kDLCuda && framework.api->current_stream(device.type, device.index, &stream))
    return PyErr_Clear(), false;
  const Workspace workspace(call.workspace, device);
  void* const thread = PyEval_SaveThread();  // the CPU computes, and a launch waits where the queue of launches is full
  const octet_status status = octet_run(&attention, &arguments, workspace.address(), call.workspace, stream);
  PyEval_RestoreThread(thread);
  return status == OCTET_OK;
}

PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

// Makes the outputs of a kept call and runs it; false: the call has to go the ordinary way.
bool run(const Call& call, Kind kind, Objects inputs, Views& views, PyObject** outputs) {
  int made = 0;
  for (bool good = true; good && made < kOutputs[kind]; ++made) {
    outputs[made] = make(call, kind, made, inputs);
    Meta meta;
    good = outputs[made] && look(outputs[made], views[kInputs[kind] + made], meta) && meta == call.outputs[made];
    if (!good && outputs[made]) Py_DecRef(outputs[made]);
    if (!good) break;
  }
  if (made == kOutputs[kind] && run(call, kind, views)) return true;
  PyErr_Clear();
  while (made-- > 0) Py_DecRef(outputs[made]);
  return false;
}

// (token, q, k, v) -> o, or None: the call has to go the ordinary way, or False: it may be kept when it has gone there,
// or True: `fast_training` runs it, and a gradient may follow.
PyObject* fast_forward(PyObject*, Objects arguments, std::ptrdiff_t count) {
  const Objects inputs = arguments + 1;
  if (count != 4 || !plain(inputs, 3) || cast(inputs)) return none();
  const Kind kind = wants_gradient(inputs) ? kTraining : kForward;
  Views views;
  Key key;
  if (!look(kind, PyLong_AsLong(arguments[0]), inputs, views, key) || !is_like_q(views)) return none();
  const auto call = find(key);
  if (!call || kind == kTraining) return PyBool_FromLong(bool(call));
  PyObject* o;
  return run(*call, kind, inputs, views, &o) ? o : none();
}

// (token, q, k, v) -> (o, lse, o_residual), or None or False as `fast_forward`. Who listens has been looked for or, in
// an operator, has heard of it.
PyObject* fast_training(PyObject*, Objects arguments, std::ptrdiff_t count) {
  const Objects inputs = arguments + 1;
  if (count != 4 || !are_tensors(inputs, 3)) return none();
  Views views;
  Key key;
  if (!look(kTraining, PyLong_AsLong(arguments[0]), inputs, views, key) || !is_like_q(views)) return none();
  const auto call = find(key);
  if (!call) return PyBool_FromLong(0);
  PyObject* made[kMostOutputs];
  if (!run(*call, kTraining, inputs, views, made)) return none();
  const Reference o(made[0]), lse(made[1]), r(made[2]);
  return PyTuple_Pack(3, o.object, lse.object, r.object);
}

// (token, do, q, k, v, o, lse, o_residual) -> (dq, dk, dv, None), or None or False as `fast_forward`. Nobody is looked
// for, as in `fast_training`.
PyObject* fast_gradients(PyObject*, Objects arguments, std::ptrdiff_t count) {
  const Objects inputs = arguments + 1;
  if (count != 8 || !are_tensors(inputs, 7)) return none();
  Views views;
  Key key;
  if (!look(kBackward, PyLong_AsLong(arguments[0]), inputs, views, key)) return none();
  const auto call = find(key);
  if (!call) return PyBool_FromLong(0);
  PyObject* made[kMostOutputs];
  if (!run(*call, kBackward, inputs, views, made)) return none();
  const Reference dq(made[0]), dk(made[1]), dv(made[2]);
  return PyTuple_Pack(4, dq.object, dk.object, dv.object, &_Py_NoneStruct);
}

// The same, or None where somebody listens.
PyObject* fast_backward(PyObject* self, Objects arguments, std::ptrdiff_t count) {
  const Objects inputs = arguments + 1;
  if (count != 8 || !plain(inputs, 7) || is_true(framework.is_grad_enabled) || is_true(framework.is_mapped, inputs[0]))
    return none();
  return fast_gradients(self, arguments, count);
}

PyMethodDef methods[] = {{"fast_forward", fast_forward, kFastCall, nullptr},
                         {"fast_training", fast_training, kFastCall, nullptr},
                         {"fast_gradients", fast_gradients, kFastCall, nullptr},
                         {"fast_backward", fast_backward, kFastCall, nullptr}};

}  // namespace

extern "C" {

// (fast_forward, fast_training, fast_gradients, fast_backward). `exchange`: what __dlpack_c_exchange_api__ holds;
// `objects`: those of Framework, from `tensor` to `empty`. None where the version of the API is unknown.
OCTET_API PyObject* octet_fast_functions(const void* exchange, PyObject* objects) {
  const auto* api = static_cast<const DLExchange*>(exchange);
  if (!api || api->major != 1 || !api->view || PyTuple_Size(objects) != 9) return none();
  const auto object = [&](int i) { return PyTuple_GetItem(objects, i); };
  PyObject* const is_neg = PyObject_GetAttrString(object(0), "is_neg");
  if (!is_neg) return nullptr;
  Py_IncRef(objects);  // and what it holds
  framework = {api,       object(0), object(1), object(2), object(3), object(4),
               object(5), object(6), object(7), object(8), is_neg,    PyUnicode_InternFromString("requires_grad")};
  if (PyTuple_Size(framework.states) != kStates) return none();
  const Reference functions[] = {Reference(PyCFunction_NewEx(&methods[0], nullptr, nullptr)),
                                 Reference(PyCFunction_NewEx(&methods[1], nullptr, nullptr)),
                                 Reference(PyCFunction_NewEx(&methods[2], nullptr, nullptr)),
                                 Reference(PyCFunction_NewEx(&methods[3], nullptr, nullptr))};
  return PyTuple_Pack(4, functions[0].object, functions[1].object, functions[2].object, functions[3].object);
}

// Keeps a pass. `inputs`, `outputs`: tuples of such tensors. `how`: None, or how a training pass makes some: arguments
// and keywords of `empty` for lse, and keywords of `empty_like` for o_residual.
OCTET_API void octet_fast_keep(int64_t kind_number, int64_t token, PyObject* inputs, PyObject* outputs, PyObject* how,
                               const octet_attention* attention, const octet_arguments* arguments,
                               std::size_t workspace) {
  const auto kind = static_cast<Kind>(kind_number);
  const int count = kInputs[kind], more = kOutputs[kind];
  if (PyTuple_Size(inputs) != count || PyTuple_Size(outputs) != more) return;
  PyObject* objects[kMostInputs];
  for (int i = 0; i < count; ++i) objects[i] = PyTuple_GetItem(inputs, i);
  Views views;
  Key key;
  if (!look(kind, token, objects, views, key)) return;
  const auto call = std::make_shared<Call>();
  call->attention = *attention, call->backend = attention->backend ? attention->backend : "";
  call->arguments = *arguments, call->workspace = workspace;
  const octet_arguments& a = *arguments;
  const octet_tensor* const forward[] = {a.q, a.k, a.v, a.o, a.lse, a.o_residual};
  const octet_tensor* const backward[] = {a.do_, a.q, a.k, a.v, a.o, a.lse, a.o_residual, a.dq, a.dk, a.dv};
  for (int i = 0; i < count + more; ++i)
    if (const octet_tensor* t = kind == kBackward ? backward[i] : forward[i]) call->tensors[i] = *t;
  for (int i = 0; i < more; ++i)
    if (DLTensor view; !look(PyTuple_GetItem(outputs, i), view, call->outputs[i])) return;
  if (kind == kTraining) {
    Py_IncRef(call->lse_shape = PyTuple_GetItem(how, 0));
    Py_IncRef(call->lse_keywords = PyTuple_GetItem(how, 1));
    Py_IncRef(call->residual_keywords = PyTuple_GetItem(how, 2));
    if (!a.o_residual) Py_IncRef(call->none = PyTuple_GetItem(outputs, 2));
  }
  Kept all;
  std::shared_ptr<const Call> one = call;  // what is forgotten dies outside of the lock
  const std::lock_guard lock(mutex);
  if (kept.size() >= kKept) kept.swap(all);
  kept[key].swap(one);
}

}  // extern "C"
