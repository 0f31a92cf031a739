// Python's stable ABI, as far as octet calls it, in the process that has loaded octet; and who owns an object.
#pragma once

#include <cstddef>

extern "C" {
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

constexpr int kFastCall = 0x80;  // METH_FASTCALL

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
inline bool truth(PyObject* owned) {
  const Reference result(owned);
  const int found = result.object ? PyObject_IsTrue(result.object) : -1;
  if (found < 0) PyErr_Clear();
  return found != 0;
}
