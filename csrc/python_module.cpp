// The Python module pagedattn_ext._C: what knows no tensors. Importing it loads the ops (torch_bindings.cpp).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cpu_dispatch.h"

namespace {

// Asks for huge pages in the whole pages of a range; returns whether the system has them. A page that was touched
// before stays as it is.
bool advise_huge_pages(uintptr_t address, size_t num_bytes) {
  const auto page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (address + page_size - 1) / page_size * page_size;
  const uintptr_t end = (address + num_bytes) / page_size * page_size;
  return begin >= end || madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
}

// As torch.cuda.get_arch_list() has them: sm_* for machine code, compute_* for PTX.
std::vector<std::string> cuda_arches() {
#if defined(PAGEDATTN_WITH_CUDA)
  return {PAGEDATTN_CUDA_ARCHES};
#else
  return {};
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("advise_huge_pages", &advise_huge_pages);
  m.def("cpu_capability", [] { return pagedattn::cpu_capability_name(pagedattn::cpu_capability()); });
  m.def("available_cpu_capabilities", &pagedattn::available_cpu_capabilities);
  m.def("cuda_arches", &cuda_arches);
  m.attr("torch_target") = PAGEDATTN_TORCH_TARGET;
}
