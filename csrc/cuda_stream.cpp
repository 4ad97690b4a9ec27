#include "cuda_stream.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>
#include <string>

namespace pagedattn {
namespace {

using GetCurrentStream = AOTITorchError(int32_t device_index, void** stream);

// A reference to the function would not resolve: torch loads libtorch_cuda privately, and a torch without CUDA has no
// such library.
GetCurrentStream* find_get_current_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  void* function = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
  if (function == nullptr) throw std::runtime_error("pagedattn_ext: this torch has no CUDA streams");
  return reinterpret_cast<GetCurrentStream*>(function);
}

}  // namespace

cudaStream_t current_cuda_stream(int32_t device_index) {
  static GetCurrentStream* const get_current_stream = find_get_current_stream();
  void* stream = nullptr;
  if (get_current_stream(device_index, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("pagedattn_ext: torch has no current stream on cuda:" + std::to_string(device_index));
  }
  return static_cast<cudaStream_t>(stream);
}

}  // namespace pagedattn
