// octet as a call on tensors of a framework that has DLPack's exchange API (torch since 2.11): a pass that was
// described before runs again on other tensors of the same kind, without an interpreter between. Compiled against no
// framework and no Python; python/octet/torch/_passes.py opens it.
#include <octet/octet.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "calls.h"

namespace {

using namespace octet::ffi;

constexpr int64_t kAlignment = 64;  // of a workspace
constexpr std::size_t kKept = 512;

struct Call {
  octet_attention attention;
  std::string backend, tile;
  octet_arguments arguments;
  std::array<octet_tensor, kMostInputs + kMostOutputs> tensors{};  // of inputs and outputs
  int inputs, outputs, sinks = 0;                                  // how many there are; which input sinks are, 0: none
  More more[kMore];
  Meta made[kMostOutputs];
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
  if (kind == kBackward)
    return PyObject_CallFunctionObjArgs(framework.empty_like, inputs[i < 3 ? 1 + i : call.sinks], nullptr);
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
void place(const Call& call, Kind kind, octet_arguments& a, octet_tensor* t) {
  const bool residual = a.o_residual;
  octet_tensor* const made = t + call.inputs;
  for (int i = kInputs[kind]; i < call.inputs; ++i) a.*kPlaces[call.more[i - kInputs[kind]]] = &t[i];
  if (kind == kForward) {
    a.q = &t[0], a.k = &t[1], a.v = &t[2], a.o = &made[0];
  } else if (kind == kTraining) {
    a.q = &t[0], a.k = &t[1], a.v = &t[2], a.o = &made[0], a.lse = &made[1];
    a.o_residual = residual ? &made[2] : nullptr;
  } else {
    a.do_ = &t[0], a.q = &t[1], a.k = &t[2], a.v = &t[3], a.o = &t[4], a.lse = &t[5];
    a.o_residual = residual ? &t[6] : nullptr, a.dq = &made[0], a.dk = &made[1], a.dv = &made[2];
    if (call.sinks) a.dsinks = &made[3];
  }
}

// On the framework's stream and in its memory. False: it failed; a call in the ordinary way will tell why.
bool run(const Call& call, Kind kind, const Views& views) {
  octet_attention attention = call.attention;
  attention.backend = call.backend.empty() ? nullptr : call.backend.c_str();
  attention.tile = call.tile.empty() ? nullptr : call.tile.c_str();
  auto tensors = call.tensors;
  for (int i = 0, n = call.inputs + call.outputs; i < n; ++i) tensors[i].data = data(views[i]);
  octet_arguments arguments = call.arguments;
  place(call, kind, arguments, tensors.data());

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
  for (bool good = true; good && made < call.outputs; ++made) {
    outputs[made] = make(call, kind, made, inputs);
    Meta meta;
    good = outputs[made] && look(outputs[made], views[call.inputs + made], meta) && meta == call.made[made];
    if (!good && outputs[made]) Py_DecRef(outputs[made]);
    if (!good) break;
  }
  if (made == call.outputs && run(call, kind, views)) return true;
  PyErr_Clear();
  while (made-- > 0) Py_DecRef(outputs[made]);
  return false;
}

// How many inputs a function got behind its token, 0: too few or too many.
int count_of(Kind kind, std::ptrdiff_t arguments) {
  const auto count = static_cast<int>(arguments) - 1;
  return count >= kInputs[kind] && count <= kInputs[kind] + kMore ? count : 0;
}

// Returns whether an input but q, k, v and sinks requires a gradient.
bool others_require_grad(const Call& call, Objects inputs) {
  for (int i = kInputs[kTraining]; i < call.inputs; ++i)
    if (i != call.sinks && requires_grad(inputs[i])) return true;
  return false;
}

// (token, q, k, v, others...) -> o, or None: the call has to go the ordinary way, or False: it may be kept when it has
// gone there, or True: `fast_training` runs it, and a gradient may follow.
PyObject* fast_forward(PyObject*, Objects arguments, std::ptrdiff_t given) {
  const Objects inputs = arguments + 1;
  const int count = count_of(kForward, given);
  if (!count || !plain(inputs, count, kInputs[kForward]) || cast(inputs)) return none();
  const Kind kind = wants_gradient(inputs, count) ? kTraining : kForward;
  Views views;
  Key key;
  if (!look(kind, arguments[0], inputs, count, views, key) || !is_like_q(views)) return none();
  const auto call = find(key);
  if (call && kind == kTraining && others_require_grad(*call, inputs)) return none();
  if (!call || kind == kTraining) return PyBool_FromLong(bool(call));
  PyObject* o;
  return run(*call, kind, inputs, views, &o) ? o : none();
}

// (token, q, k, v, others...) -> (o, lse, o_residual), or None or False as `fast_forward`. Who listens has been looked
// for or, in an operator, has heard of it.
PyObject* fast_training(PyObject*, Objects arguments, std::ptrdiff_t given) {
  const Objects inputs = arguments + 1;
  const int count = count_of(kTraining, given);
  if (!count || !are_tensors(inputs, count, kInputs[kTraining])) return none();
  Views views;
  Key key;
  if (!look(kTraining, arguments[0], inputs, count, views, key) || !is_like_q(views)) return none();
  const auto call = find(key);
  if (!call) return PyBool_FromLong(0);
  PyObject* made[kMostOutputs];
  if (!run(*call, kTraining, inputs, views, made)) return none();
  const Reference o(made[0]), lse(made[1]), r(made[2]);
  return PyTuple_Pack(3, o.object, lse.object, r.object);
}

// (token, do, q, k, v, o, lse, o_residual, others...) -> (dq, dk, dv, None, and of each other dsinks or None), or None
// or False as `fast_forward`. Nobody is looked for, as in `fast_training`.
PyObject* fast_gradients(PyObject*, Objects arguments, std::ptrdiff_t given) {
  const Objects inputs = arguments + 1;
  const int count = count_of(kBackward, given);
  if (!count || !are_tensors(inputs, count, kInputs[kBackward])) return none();
  Views views;
  Key key;
  if (!look(kBackward, arguments[0], inputs, count, views, key)) return none();
  const auto call = find(key);
  if (!call) return PyBool_FromLong(0);
  PyObject* made[kMostOutputs];
  if (!run(*call, kBackward, inputs, views, made)) return none();
  const Reference dq(made[0]), dk(made[1]), dv(made[2]), dsinks(call->sinks ? made[3] : nullptr);
  PyObject* more[kMore];
  for (int i = 0; i < kMore; ++i)
    more[i] = call->sinks && i == call->sinks - kInputs[kBackward] ? dsinks.object : &_Py_NoneStruct;
  static_assert(kMore == 4);
  return PyTuple_Pack(4 + count - kInputs[kBackward], dq.object, dk.object, dv.object, &_Py_NoneStruct, more[0],
                      more[1], more[2], more[3]);
}

// The same, or None where somebody listens.
PyObject* fast_backward(PyObject* self, Objects arguments, std::ptrdiff_t given) {
  const Objects inputs = arguments + 1;
  const int count = count_of(kBackward, given);
  if (!count || !plain(inputs, count, kInputs[kBackward]) || is_true(framework.is_grad_enabled) ||
      is_true(framework.is_mapped, inputs[0]))
    return none();
  return fast_gradients(self, arguments, given);
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
  if (!api || api->major != 1 || !api->view || PyTuple_Size(objects) != 10) return none();
  const auto object = [&](int i) { return PyTuple_GetItem(objects, i); };
  PyObject* const is_neg = PyObject_GetAttrString(object(0), "is_neg");
  if (!is_neg) return nullptr;
  Py_IncRef(objects);  // and what it holds
  framework = {api,
               object(0),
               object(1),
               object(2),
               object(3),
               object(4),
               object(5),
               object(6),
               object(7),
               object(8),
               object(9),
               is_neg,
               PyUnicode_InternFromString("requires_grad")};
  if (PyTuple_Size(framework.states) != kStates) return none();
  const Reference functions[] = {Reference(PyCFunction_NewEx(&methods[0], nullptr, nullptr)),
                                 Reference(PyCFunction_NewEx(&methods[1], nullptr, nullptr)),
                                 Reference(PyCFunction_NewEx(&methods[2], nullptr, nullptr)),
                                 Reference(PyCFunction_NewEx(&methods[3], nullptr, nullptr))};
  return PyTuple_Pack(4, functions[0].object, functions[1].object, functions[2].object, functions[3].object);
}

// Keeps a pass. `inputs`, `outputs`: tuples of such tensors. `how`: None, or how a training pass makes some: arguments
// and keywords of `empty` for lse, and keywords of `empty_like` for o_residual. `more`: numbers of More, a tuple, what
// the inputs behind those of all passes of the kind are.
OCTET_API void octet_fast_keep(int64_t kind_number, PyObject* token, PyObject* inputs, PyObject* outputs, PyObject* how,
                               PyObject* more, const octet_attention* attention, const octet_arguments* arguments,
                               std::size_t workspace) {
  const auto kind = static_cast<Kind>(kind_number);
  const auto others = static_cast<int>(PyTuple_Size(more));
  const auto call = std::make_shared<Call>();
  call->inputs = static_cast<int>(PyTuple_Size(inputs)), call->outputs = static_cast<int>(PyTuple_Size(outputs));
  if (others > kMore || call->inputs != kInputs[kind] + others) return;
  for (int i = 0; i < others; ++i) {
    call->more[i] = static_cast<More>(PyLong_AsLong(PyTuple_GetItem(more, i)));
    if (call->more[i] == kSinks) call->sinks = kInputs[kind] + i;
  }
  if (call->outputs != kOutputs[kind] + (kind == kBackward && call->sinks)) return;
  PyObject* objects[kMostInputs];
  for (int i = 0; i < call->inputs; ++i) objects[i] = PyTuple_GetItem(inputs, i);
  Views views;
  Key key;
  if (!look(kind, token, objects, call->inputs, views, key)) return;
  call->attention = *attention, call->backend = attention->backend ? attention->backend : "";
  call->tile = attention->tile ? attention->tile : "";
  call->arguments = *arguments, call->workspace = workspace;
  const octet_arguments& a = *arguments;
  const octet_tensor* const forward[] = {a.q, a.k, a.v, a.o, a.lse, a.o_residual};
  const octet_tensor* const backward[] = {a.do_, a.q, a.k, a.v, a.o, a.lse, a.o_residual, a.dq, a.dk, a.dv, a.dsinks};
  const octet_tensor* const* const tensors = kind == kBackward ? backward : forward;
  for (int i = 0; i < call->inputs + call->outputs; ++i) {
    const int first_more = kInputs[kind];
    const octet_tensor* const t = i < first_more     ? tensors[i]
                                  : i < call->inputs ? a.*kPlaces[call->more[i - first_more]]
                                                     : tensors[i - others];
    if (t) call->tensors[i] = *t;
  }
  for (int i = 0; i < call->outputs; ++i)
    if (DLTensor view; !look(PyTuple_GetItem(outputs, i), view, call->made[i])) return;
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
