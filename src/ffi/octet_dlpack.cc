// octet as a call on tensors of a framework that has DLPack's exchange API (torch since 2.11): a forward pass that was
// described before runs again on other tensors of the same kind, without an interpreter between. Compiled against no
// framework and no Python; python/octet/torch/_again.py opens it.
#include <octet/octet.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

extern "C" {
// Python's stable ABI, in the process that loads this.
struct PyObject;
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, std::ptrdiff_t count);
  int flags;
  const char* doc;
};
extern PyObject _Py_NoneStruct;
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
PyObject* PyObject_Call(PyObject*, PyObject* arguments, PyObject* keywords);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PyObject* PyObject_CallNoArgs(PyObject*);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
PyObject* PyObject_Type(PyObject*);
PyObject* PyUnicode_InternFromString(const char*);
PyObject* PyTuple_GetItem(PyObject*, std::ptrdiff_t);
PyObject* PyTuple_Pack(std::ptrdiff_t, ...);
PyObject* PyBool_FromLong(long);
std::ptrdiff_t PyTuple_Size(PyObject*);
long PyLong_AsLong(PyObject*);
int PyObject_IsTrue(PyObject*);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
void PyErr_Clear(void);
}

namespace {

constexpr int kFastCall = 0x80;  // METH_FASTCALL

// DLPack 1.x, https://dmlc.github.io/dlpack: what is used of it.
struct DLDevice {
  int32_t type, index;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t dims;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DLManagedTensor*);
  uint64_t flags;
  DLTensor tensor;
};
struct DLExchange {
  uint32_t major, minor;
  const DLExchange* previous;
  int (*allocate)(DLTensor* like, DLManagedTensor** out, void* context, void (*fail)(void*, const char*, const char*));
  int (*own)(void* object, DLManagedTensor** out);
  int (*give)(DLManagedTensor* tensor, void** object);
  int (*view)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};
constexpr int32_t kDLCpu = 1, kDLCuda = 2;
constexpr DLDataType kBytes = {1, 8, 1};
constexpr int64_t kAlignment = 64;  // of a workspace
constexpr std::size_t kKept = 512;
constexpr int kDims = 4, kStates = 2;

// What _again.py hands over, for as long as the process lives.
struct Framework {
  const DLExchange* api;
  PyObject* tensor;           // the type of plain tensors
  PyObject* listeners;        // functions; one that gives true listens to operators
  PyObject* states;           // functions that give numbers on which a call depends
  PyObject* is_grad_enabled;  // functions
  PyObject* empty_like;
  PyObject* is_neg;
  PyObject* contiguous;     // keywords of empty_like
  PyObject* requires_grad;  // the attribute's name
} framework;

// A reference that goes out of scope with its owner.
struct Reference {
  PyObject* object;
  explicit Reference(PyObject* owned) : object(owned) {}
  Reference(const Reference&) = delete;
  ~Reference() {
    if (object) Py_DecRef(object);
  }
};

// The truth of what a function gave; an exception is none of ours, and counts as true.
bool truth(PyObject* owned) {
  const Reference result(owned);
  const int found = result.object ? PyObject_IsTrue(result.object) : -1;
  if (found < 0) PyErr_Clear();
  return found != 0;
}

constexpr int kInputs = 3;  // q k v
using Inputs = PyObject* const[kInputs];

// Whether nobody would notice that no operator runs on these objects and no derivative is kept.
bool plain(const Inputs& inputs) {
  for (PyObject* x : inputs)
    if (Reference(PyObject_Type(x)).object != framework.tensor) return false;
  for (std::ptrdiff_t i = 0, n = PyTuple_Size(framework.listeners); i < n; ++i)
    if (truth(PyObject_CallNoArgs(PyTuple_GetItem(framework.listeners, i)))) return false;
  for (PyObject* x : inputs)
    if (truth(PyObject_CallFunctionObjArgs(framework.is_neg, x, nullptr))) return false;
  if (!truth(PyObject_CallNoArgs(framework.is_grad_enabled))) return true;
  for (PyObject* x : inputs)
    if (truth(PyObject_GetAttr(x, framework.requires_grad))) return false;
  return true;
}

struct Meta {
  DLDevice device;
  DLDataType dtype;
  int32_t reserved;
  int64_t shape[kDims], strides[kDims];
};

// All that tells one call from another.
struct Key {
  int64_t token;  // of the caller's options
  int64_t states[kStates];
  Meta inputs[kInputs];
};
static_assert(std::has_unique_object_representations_v<Key>);

bool operator==(const Key& a, const Key& b) { return !std::memcmp(&a, &b, sizeof a); }

struct Hash {
  std::size_t operator()(const Key& key) const {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&key), sizeof key});
  }
};

using Views = std::array<DLTensor, kInputs>;

// The views of inputs whose output is like q, and what they share with others of their kind.
bool look(int64_t token, const Inputs& inputs, Views& views, Key& key) {
  std::memset(&key, 0, sizeof key);
  key.token = token;
  for (int i = 0; i < kStates; ++i) {
    const Reference found(PyObject_CallNoArgs(PyTuple_GetItem(framework.states, i)));
    if (!found.object) return PyErr_Clear(), false;
    key.states[i] = PyLong_AsLong(found.object);
  }
  for (int i = 0; i < kInputs; ++i) {
    DLTensor& t = views[i];
    if (framework.api->view(inputs[i], &t)) return PyErr_Clear(), false;
    if ((t.device.type != kDLCpu && t.device.type != kDLCuda) || t.dims != kDims || !t.strides) return false;
    key.inputs[i].device = t.device, key.inputs[i].dtype = t.dtype;
    std::memcpy(key.inputs[i].shape, t.shape, sizeof key.inputs[i].shape);
    std::memcpy(key.inputs[i].strides, t.strides, sizeof key.inputs[i].strides);
  }
  return views[0].shape[kDims - 1] == views[2].shape[kDims - 1];
}

bool contiguous(const DLTensor& t) {
  int64_t stride = 1;
  for (int i = kDims; i-- > 0; stride *= t.shape[i])
    if (t.shape[i] != 1 && t.strides[i] != stride) return false;
  return true;
}

// A new contiguous tensor of q's shape.
PyObject* empty_like(PyObject* q, const DLTensor& view) {
  if (contiguous(view)) return PyObject_CallFunctionObjArgs(framework.empty_like, q, nullptr);
  const Reference arguments(PyTuple_Pack(1, q));
  return PyObject_Call(framework.empty_like, arguments.object, framework.contiguous);
}

struct Call {
  octet_attention attention;
  std::string backend;
  octet_arguments arguments;
  std::array<octet_tensor, kInputs + 1> tensors;  // and o
  std::size_t workspace;
};

std::mutex mutex;
std::unordered_map<Key, std::shared_ptr<const Call>, Hash> kept;

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

// On the framework's stream and in its memory. False: it failed; a call in the ordinary way will tell why.
bool run(const Call& call, const Views& inputs, const DLTensor& o) {
  octet_attention attention = call.attention;
  attention.backend = call.backend.empty() ? nullptr : call.backend.c_str();
  auto tensors = call.tensors;
  for (int i = 0; i < kInputs; ++i) tensors[i].data = data(inputs[i]);
  tensors[kInputs].data = data(o);
  octet_arguments arguments = call.arguments;
  arguments.q = &tensors[0], arguments.k = &tensors[1], arguments.v = &tensors[2], arguments.o = &tensors[3];

  void* stream = nullptr;
  const DLDevice device = inputs[0].device;
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

// (token, q, k, v) -> o, or None: the call has to go the ordinary way, or False: it may be kept when it has gone there.
PyObject* again(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  if (count != 1 + kInputs) return none();
  const int64_t token = PyLong_AsLong(arguments[0]);
  const Inputs inputs = {arguments[1], arguments[2], arguments[3]};
  Views views;
  Key key;
  if (!plain(inputs) || !look(token, inputs, views, key)) return none();
  const auto call = find(key);
  if (!call) return PyBool_FromLong(0);
  PyObject* const made = empty_like(inputs[0], views[0]);
  DLTensor o;
  if (made && !framework.api->view(made, &o) && run(*call, views, o)) return made;
  PyErr_Clear();
  if (made) Py_DecRef(made);
  return none();
}

PyMethodDef method = {"again", again, kFastCall, nullptr};

}  // namespace

extern "C" {

// The function `again`. `exchange`: what __dlpack_c_exchange_api__ holds; the objects as in Framework. None where the
// version of the API is unknown.
OCTET_API PyObject* octet_again_open(const void* exchange, PyObject* tensor, PyObject* listeners, PyObject* states,
                                     PyObject* is_grad_enabled, PyObject* empty_like, PyObject* contiguous) {
  const auto* api = static_cast<const DLExchange*>(exchange);
  if (!api || api->major != 1 || !api->view || PyTuple_Size(states) != kStates) return none();
  PyObject* const is_neg = PyObject_GetAttrString(tensor, "is_neg");
  if (!is_neg) return nullptr;
  for (PyObject* object : {tensor, listeners, states, is_grad_enabled, empty_like, contiguous}) Py_IncRef(object);
  PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  framework = {api, tensor, listeners, states, is_grad_enabled, empty_like, is_neg, contiguous, requires_grad};
  return PyCFunction_NewEx(&method, nullptr, nullptr);
}

// Keeps a forward pass for `again`; `workspace` bytes are what it needs.
OCTET_API void octet_again_keep(int64_t token, PyObject* q, PyObject* k, PyObject* v, const octet_attention* attention,
                                const octet_arguments* arguments, std::size_t workspace) {
  Views views;
  Key key;
  if (!look(token, {q, k, v}, views, key)) return;
  const octet_arguments& a = *arguments;
  auto call = std::make_shared<Call>(
      Call{*attention, attention->backend ? attention->backend : "", a, {*a.q, *a.k, *a.v, *a.o}, workspace});
  const std::lock_guard lock(mutex);
  if (kept.size() >= kKept) kept.clear();
  kept[key] = std::move(call);
}

}  // extern "C"
