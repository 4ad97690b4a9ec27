// The Python module pagedattn_ext._C: functions and constants without tensors. Importing the module loads the ops
// (torch_bindings.cpp).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "collectives/shared_group.h"
#include "cpu_dispatch.h"
#include "cpu_graph.h"
#include "linear/linear_quantized.h"
#include "paged_cache.h"

namespace {

// As torch.cuda.get_arch_list() has them: sm_* for machine code, compute_* for PTX.
std::vector<std::string> cuda_arches() {
#if defined(PAGEDATTN_WITH_CUDA)
  return {PAGEDATTN_CUDA_ARCHES};
#else
  return {};
#endif
}

void raise_os_error(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::system_error& error) {
    const pybind11::object arguments = pybind11::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("cpu_capability", [] { return pagedattn::cpu_capability_name(pagedattn::cpu_capability()); });
  m.def("set_cpu_capability", &pagedattn::set_cpu_capability);
  m.def("available_cpu_capabilities", &pagedattn::available_cpu_capabilities);
  m.def("cuda_arches", &cuda_arches);
  pybind11::class_<pagedattn::CpuGraph>(m, "CpuGraph")
      .def(pybind11::init())
      .def("begin_capture", &pagedattn::CpuGraph::begin_capture)
      .def("end_capture", &pagedattn::CpuGraph::end_capture)
      .def_static("is_capturing", &pagedattn::CpuGraph::is_capturing)
      .def("replay", &pagedattn::CpuGraph::replay, pybind11::call_guard<pybind11::gil_scoped_release>());
  pybind11::register_local_exception_translator(&raise_os_error);
  pybind11::class_<pagedattn::SharedGroup, std::shared_ptr<pagedattn::SharedGroup>>(m, "SharedGroup")
      .def(pybind11::init(&pagedattn::SharedGroup::join))
      .def_static("create", &pagedattn::SharedGroup::create)
      .def("close", &pagedattn::SharedGroup::close)
      .def("abort", &pagedattn::SharedGroup::abort)
      .def("broken", &pagedattn::SharedGroup::broken)
      .def_property_readonly("handle", &pagedattn::SharedGroup::handle)
      .def_property_readonly("world_size", &pagedattn::SharedGroup::world_size);
  m.attr("torch_target") = PAGEDATTN_TORCH_TARGET;
  // Limits and layouts that Python code checks and packs by.
  m.attr("MAX_HEAD_SIZE") = pagedattn::MAX_HEAD_SIZE;
  m.attr("MAX_BLOCK_SIZE") = pagedattn::MAX_BLOCK_SIZE;
  m.attr("INT8_SCALE_ROWS") = pagedattn::INT8_SCALE_ROWS;
  m.attr("LINEAR_PANEL") = pagedattn::LINEAR_PANEL;
  m.attr("LINEAR_QUAD") = pagedattn::QUAD;
  m.attr("INT4_BLOCK") = pagedattn::INT4_BLOCK;
}
