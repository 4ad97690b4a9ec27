// The Python module pagedattn_ext._C: functions and constants without tensors. Importing the module registers the ops
// (torch_bindings.cpp). Of Python's C API it takes what is limited (PEP 384), so one binary serves each Python from the
// release in Py_LIMITED_API on.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "collectives/shared_group.h"
#include "cpu_dispatch.h"
#include "cpu_graph.h"
#include "linear/linear_quantized.h"
#include "ops.h"
#include "paged_cache.h"

namespace pagedattn {
namespace {

// ---- calls from Python

// What `function` returns, a new reference. What it throws is raised, and null returned.
template <typename Function>
PyObject* call(Function function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::system_error& error) {
    if (PyObject* arguments = Py_BuildValue("(is)", error.code().value(), error.what())) {
      PyErr_SetObject(PyExc_OSError, arguments);
      Py_DECREF(arguments);
    }
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* none() { return Py_BuildValue(""); }

PyObject* list_of(const std::vector<std::string>& texts) {
  PyObject* list = PyList_New(0);
  for (const std::string& text : texts) {
    PyObject* item = list == nullptr ? nullptr : PyUnicode_FromString(text.c_str());
    const bool is_appended = item != nullptr && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    if (!is_appended) {
      Py_XDECREF(list);
      return nullptr;
    }
  }
  return list;
}

// Other threads of Python run while it lives.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// An object of a Python class, which has a T.
template <typename T>
struct Object {
  PyObject_HEAD T* value;
};

template <typename T>
T& value_of(PyObject* self) {
  return *reinterpret_cast<Object<T>*>(self)->value;
}

// A new object of `type` with what `make` makes.
template <typename T, typename Make>
PyObject* new_object(PyTypeObject* type, Make make) {
  return call([&]() -> PyObject* {
    std::unique_ptr<T> value = make();
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    PyObject* self = allocate(type, 0);
    if (self != nullptr) reinterpret_cast<Object<T>*>(self)->value = value.release();
    return self;
  });
}

template <typename T>
void delete_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object<T>*>(self)->value;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// ---- CpuGraph

PyObject* make_graph(PyTypeObject* type, PyObject* args, PyObject*) {
  if (!PyArg_ParseTuple(args, ":CpuGraph")) return nullptr;
  return new_object<CpuGraph>(type, [] { return std::make_unique<CpuGraph>(); });
}

PyObject* begin_capture(PyObject* self, PyObject*) {
  return call([&] { return value_of<CpuGraph>(self).begin_capture(), none(); });
}

PyObject* end_capture(PyObject* self, PyObject*) {
  return call([&] { return value_of<CpuGraph>(self).end_capture(), none(); });
}

PyObject* is_capturing(PyObject*, PyObject*) { return PyBool_FromLong(CpuGraph::is_capturing()); }

PyObject* replay(PyObject* self, PyObject*) {
  return call([&] {
    {
      const WithoutGil without_gil;
      value_of<CpuGraph>(self).replay();
    }
    return none();
  });
}

PyMethodDef graph_methods[] = {{"begin_capture", begin_capture, METH_NOARGS, nullptr},
                               {"end_capture", end_capture, METH_NOARGS, nullptr},
                               {"is_capturing", is_capturing, METH_NOARGS | METH_STATIC, nullptr},
                               {"replay", replay, METH_NOARGS, nullptr},
                               {}};

// ---- SharedGroup

using Group = std::shared_ptr<SharedGroup>;

PyObject* join_group(PyTypeObject* type, PyObject* args, PyObject*) {
  int descriptor = 0;
  long long rank = 0;
  if (!PyArg_ParseTuple(args, "iL:SharedGroup", &descriptor, &rank)) return nullptr;
  return new_object<Group>(type, [&] {
    const WithoutGil without_gil;  // as the rank's part of the memory is made
    return std::make_unique<Group>(SharedGroup::join(descriptor, rank));
  });
}

PyObject* create_group(PyObject*, PyObject* args) {
  long long world_size = 0, max_bytes = 0;
  double timeout_seconds = 0;
  if (!PyArg_ParseTuple(args, "LLd:create", &world_size, &max_bytes, &timeout_seconds)) return nullptr;
  return call([&] { return PyLong_FromLong(SharedGroup::create(world_size, max_bytes, timeout_seconds)); });
}

PyObject* close_group(PyObject* self, PyObject*) {
  return call([&] { return value_of<Group>(self)->close(), none(); });
}

PyObject* abort_group(PyObject* self, PyObject* args) {
  const char* reason = nullptr;
  if (!PyArg_ParseTuple(args, "s:abort", &reason)) return nullptr;
  return call([&] { return value_of<Group>(self)->abort(reason), none(); });
}

PyObject* why_broken(PyObject* self, PyObject*) {
  return call([&] {
    const Group group = value_of<Group>(self);
    std::string why;
    {
      const WithoutGil without_gil;  // as the group may wait a moment before it says so
      why = group->broken();
    }
    return PyUnicode_FromString(why.c_str());
  });
}

PyObject* handle(PyObject* self, void*) { return PyLong_FromLongLong(value_of<Group>(self)->handle()); }

PyObject* world_size(PyObject* self, void*) { return PyLong_FromLongLong(value_of<Group>(self)->world_size()); }

PyMethodDef group_methods[] = {{"create", create_group, METH_VARARGS | METH_STATIC, nullptr},
                               {"close", close_group, METH_NOARGS, nullptr},
                               {"abort", abort_group, METH_VARARGS, nullptr},
                               {"broken", why_broken, METH_NOARGS, nullptr},
                               {}};

PyGetSetDef group_properties[] = {
    {"handle", handle, nullptr, nullptr, nullptr}, {"world_size", world_size, nullptr, nullptr, nullptr}, {}};

// ---- the module

PyObject* get_cpu_capability(PyObject*, PyObject*) {
  return call([] { return PyUnicode_FromString(cpu_capability_name(cpu_capability())); });
}

PyObject* set_capability(PyObject*, PyObject* args) {
  const char* name = nullptr;
  if (!PyArg_ParseTuple(args, "s:set_cpu_capability", &name)) return nullptr;
  return call([&] { return set_cpu_capability(name), none(); });
}

PyObject* list_cpu_capabilities(PyObject*, PyObject*) {
  return call([] { return list_of(available_cpu_capabilities()); });
}

// As torch.cuda.get_arch_list() has them: sm_* for machine code, compute_* for PTX.
PyObject* list_cuda_arches(PyObject*, PyObject*) {
#if defined(PAGEDATTN_WITH_CUDA)
  return list_of({PAGEDATTN_CUDA_ARCHES});
#else
  return list_of({});
#endif
}

PyMethodDef module_functions[] = {{"cpu_capability", get_cpu_capability, METH_NOARGS, nullptr},
                                  {"set_cpu_capability", set_capability, METH_VARARGS, nullptr},
                                  {"available_cpu_capabilities", list_cpu_capabilities, METH_NOARGS, nullptr},
                                  {"cuda_arches", list_cuda_arches, METH_NOARGS, nullptr},
                                  {}};

// Adds a class to the module; returns whether it could.
template <typename T>
bool add_class(PyObject* module, const char* name, newfunc make, PyMethodDef* methods, PyGetSetDef* properties) {
  std::array<PyType_Slot, 5> slots{{{Py_tp_new, reinterpret_cast<void*>(make)},
                                    {Py_tp_dealloc, reinterpret_cast<void*>(&delete_object<T>)},
                                    {Py_tp_methods, methods},
                                    {Py_tp_getset, properties},
                                    {0, nullptr}}};
  PyType_Spec spec{name, sizeof(Object<T>), 0, Py_TPFLAGS_DEFAULT, slots.data()};
  PyObject* type = PyType_FromSpec(&spec);
  const bool is_added = type != nullptr && PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) == 0;
  Py_XDECREF(type);
  return is_added;
}

PyGetSetDef no_properties[] = {{}};

// Registers the ops in a namespace with the name of the package: pagedattn_ext._C as torch.ops.pagedattn_ext. A copy of
// the package in another one has another name, so several copies can be in one process.
bool register_ops_of(PyObject* module) {
  PyObject* registered = call([&]() -> PyObject* {
    PyObject* name = PyModule_GetNameObject(module);
    const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, nullptr);
    std::string op_namespace = text == nullptr ? "" : text;
    Py_XDECREF(name);
    if (text == nullptr) return nullptr;
    op_namespace.resize(std::min(op_namespace.size(), op_namespace.rfind('.')));
    for (char& letter : op_namespace) {
      if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
    }
    register_all(op_namespace);
    const bool is_added = PyModule_AddStringConstant(module, "op_namespace", op_namespace.c_str()) == 0;
    return is_added ? none() : nullptr;
  });
  Py_XDECREF(registered);
  return registered != nullptr;
}

int fill_module(PyObject* module) {
  const bool has_classes =
      add_class<CpuGraph>(module, "pagedattn_ext._C.CpuGraph", make_graph, graph_methods, no_properties) &&
      add_class<Group>(module, "pagedattn_ext._C.SharedGroup", join_group, group_methods, group_properties);
  // Limits and layouts that Python code checks and packs by.
  const bool has_constants = PyModule_AddStringConstant(module, "torch_target", PAGEDATTN_TORCH_TARGET) == 0 &&
                             PyModule_AddIntConstant(module, "MAX_HEAD_SIZE", MAX_HEAD_SIZE) == 0 &&
                             PyModule_AddIntConstant(module, "MAX_BLOCK_SIZE", MAX_BLOCK_SIZE) == 0 &&
                             PyModule_AddIntConstant(module, "INT8_SCALE_ROWS", INT8_SCALE_ROWS) == 0 &&
                             PyModule_AddIntConstant(module, "LINEAR_PANEL", LINEAR_PANEL) == 0 &&
                             PyModule_AddIntConstant(module, "LINEAR_QUAD", QUAD) == 0 &&
                             PyModule_AddIntConstant(module, "INT4_STEP", INT4_STEP) == 0;
  return has_classes && has_constants && register_ops_of(module) ? 0 : -1;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(&fill_module)}, {0, nullptr}};

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_C",    nullptr, 0,      module_functions,
                                 module_slots,          nullptr, nullptr, nullptr};

}  // namespace
}  // namespace pagedattn

PyMODINIT_FUNC PyInit__C() { return PyModuleDef_Init(&pagedattn::module_definition); }
