// Where an op runs past its door: on the CPU's threads, or on torch's current CUDA stream.
//
// PAGEDATTN_WITH_CUDA is defined in a build with CUDA kernels. PAGEDATTN_SIMT is defined for the simt device
// (tests/simt), which runs the CUDA kernels on CPU tensors, and has no CPU kernels.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include "cpu_dispatch.h"
#include "cpu_graph.h"
#include "cuda_stream.h"
#include "door.h"
#include "parallel.h"

namespace pagedattn {

// On the CPU: calls check_values(check), then ON_CPU(params), now and again whenever a CPU graph is replayed. On a GPU:
// calls check_values(check), then on_cuda(stream), with the door's device as the current device. ON_CPU is
// void (*)(const Params& params), because a plain function has nothing but its parameters.
template <auto ON_CPU, AtCapture AT_CAPTURE = AtCapture::KEPT, ValueCheck Check, KeptByValue Params, typename OnCuda>
void run_on([[maybe_unused]] const Door& door, const Check& check, [[maybe_unused]] const Params& params,
            [[maybe_unused]] const OnCuda& on_cuda) {
#if defined(PAGEDATTN_SIMT)
  check_values(check);
  on_cuda(nullptr);
#else
#if defined(PAGEDATTN_WITH_CUDA)
  if (door.runs_on_cuda()) {
    check_values(check);
    const torch::stable::accelerator::DeviceGuard guard(door.device().index());
    on_cuda(current_cuda_stream(door.device().index()));
    return;
  }
#endif
  CpuGraph::run_or_capture<AT_CAPTURE>(check, ON_CPU, params);
#endif
}

// The kernels of an op that works row by row. A kernel that the build does not have is nullptr.
template <typename Params>
struct RowKernels {
  void (*cpu)(const Params& params, int64_t begin, int64_t end);
  void (*cuda)(const Params& params, cudaStream_t stream);
};

// A kernel of the CPU, and the rows that it is called for.
template <typename Params>
struct RowLoop {
  void (*kernel)(const Params& params, int64_t begin, int64_t end);
  Params params;
  int64_t num_rows;
  int64_t elements_per_row;
};

template <typename Params>
void run_loop(const RowLoop<Params>& loop) {
  parallel_for_rows(loop.num_rows, loop.elements_per_row,
                    [&](int64_t begin, int64_t end) { loop.kernel(loop.params, begin, end); });
}

template <AtCapture AT_CAPTURE = AtCapture::KEPT, ValueCheck Check, typename Params>
void run_rows(const Door& door, const Check& check, const RowKernels<Params>& kernels, const Params& params,
              int64_t num_rows, int64_t elements_per_row) {
  run_on<run_loop<Params>, AT_CAPTURE>(door, check, RowLoop<Params>{kernels.cpu, params, num_rows, elements_per_row},
                                       [&](cudaStream_t stream) {
                                         if (num_rows > 0 && elements_per_row > 0) kernels.cuda(params, stream);
                                       });
}

}  // namespace pagedattn

#if defined(PAGEDATTN_SIMT)
#define PAGEDATTN_ROW_KERNELS(name) \
  RowKernels { static_cast<decltype(&cpu_default::name)>(nullptr), &cuda::name }
#elif defined(PAGEDATTN_WITH_CUDA)
#define PAGEDATTN_ROW_KERNELS(name) \
  RowKernels { PAGEDATTN_CPU_KERNEL(name), &cuda::name }
#else
#define PAGEDATTN_ROW_KERNELS(name) \
  RowKernels { PAGEDATTN_CPU_KERNEL(name), static_cast<decltype(&cuda::name)>(nullptr) }
#endif
