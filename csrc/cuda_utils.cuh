// What CUDA kernels share: launches and errors, dynamic shared memory, what the runtime knows of a kernel and of a
// device, warp reductions. No torch. Compiled by nvcc, and as C++ for the simt device (tests/simt), which brings its
// own <cuda_runtime.h>.
//
// Kernels use dynamic shared memory only (`shared_memory`), and PTX only through ptx.cuh.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "ptx.cuh"
#include "types.h"

namespace pagedattn::cuda {

inline constexpr int WARP_SIZE = 32;
inline constexpr unsigned ALL_LANES = 0xffffffffu;

// Throws std::runtime_error for a CUDA error, with the file and line of the call. The runtime forgets the error, which
// would come again from the next caller who asks for the last one.
inline void check(cudaError_t error, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  std::ostringstream message;
  message << file << ":" << line << ": CUDA: " << cudaGetErrorString(error);
  throw std::runtime_error(message.str());
}
#define PAGEDATTN_CUDA_CHECK(call) ::pagedattn::cuda::check((call), __FILE__, __LINE__)

// The dynamic shared memory of the block, `shared_bytes` of its launch.
extern __shared__ __align__(128) unsigned char shared_memory[];

namespace detail {

inline int current_device() {
  int device = 0;
  PAGEDATTN_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

// What the runtime was asked or told about a kernel on a device. It is asked and told once, as each call takes a
// microsecond.
struct KnownKernel {
  size_t allowed_shared_bytes = 0;
  int ptx_version = 0;  // 0: not asked yet
};

struct KnownKernels {
  std::mutex mutex;
  std::map<std::pair<int, const void*>, KnownKernel> of_device;
};

// use(known) for a kernel on the current device, for one thread at a time.
template <typename Use>
auto use_known(const void* kernel, const Use& use) {
  static auto& all = *new KnownKernels;  // never destroyed: threads may launch kernels to the end of the process
  const int device = current_device();
  const std::lock_guard lock(all.mutex);
  return use(all.of_device[{device, kernel}]);
}

inline void allow_shared_bytes(const void* kernel, size_t bytes) {
  use_known(kernel, [&](KnownKernel& known) {
    if (known.allowed_shared_bytes >= bytes) return;
    PAGEDATTN_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    known.allowed_shared_bytes = bytes;
  });
}

template <typename... Params, typename... Args>
void launch(cudaLaunchAttribute* attributes, unsigned num_attributes, void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  constexpr size_t SHARED_BYTES_WITHOUT_ASKING = 48 * 1024;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > SHARED_BYTES_WITHOUT_ASKING) {
    allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  PAGEDATTN_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace detail

// Runs `kernel` on `grid` blocks of `block` threads. Nothing to do (an empty grid) is no error.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            const Args&... args) {
  detail::launch(nullptr, 0, kernel, grid, block, shared_bytes, stream, args...);
}

// Whether the current device runs code of sm_90 or later. The device may be newer than all code of the kernel.
template <typename... Params>
bool runs_code_of_sm90(void (*kernel)(Params...)) {
  constexpr int SM_90 = 90;
  const auto* function = reinterpret_cast<const void*>(kernel);
  return detail::use_known(function, [&](detail::KnownKernel& known) {
    if (known.ptx_version == 0) {
      cudaFuncAttributes code{};
      PAGEDATTN_CUDA_CHECK(cudaFuncGetAttributes(&code, function));
      known.ptx_version = code.ptxVersion;
    }
    return known.ptx_version >= SM_90;
  });
}

struct Memory {
  void* begin;
  size_t bytes;
};

// The same for a kernel that may begin early. Since sm_90 its blocks may begin once all blocks of the previous kernel
// in the stream have called griddepcontrol_launch_dependents or ended. So every thread must call
// ptx::griddepcontrol_wait before it ends, and before it looks at what the previous kernel writes. A graph captures
// such a launch like any other. `awaited` is the memory that the kernel waits for: the simt device hides this memory
// until the wait.
template <typename... Params, typename... Args>
void launch_dependent(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                      [[maybe_unused]] const Memory& awaited, const Args&... args) {
#if defined(PAGEDATTN_SIMT)
  simt::hide_until_wait(awaited.begin, awaited.bytes);
#endif
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  const bool waits = runs_code_of_sm90(kernel);  // in older code the wait is nothing
  detail::launch(&attribute, waits ? 1 : 0, kernel, grid, block, shared_bytes, stream, args...);
}

constexpr int MAX_CLUSTER_BLOCKS = 8;  // on every GPU that has clusters

// The same in clusters of `cluster` blocks. The grid is a multiple of `cluster`. Only for a kernel that
// runs_code_of_sm90.
template <typename... Params, typename... Args>
void launch_in_clusters(void (*kernel)(Params...), dim3 grid, dim3 cluster, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster.x;
  attribute.val.clusterDim.y = cluster.y;
  attribute.val.clusterDim.z = cluster.z;
  detail::launch(&attribute, 1, kernel, grid, block, shared_bytes, stream, args...);
}

// An attribute of the current device. The runtime is asked once for each device.
template <cudaDeviceAttr ATTRIBUTE>
int device_attribute() {
  constexpr int MAX_DEVICES = 64;                      // any further one is asked each time
  static std::atomic<int> one_more_than[MAX_DEVICES];  // 0: not asked yet
  const int device = detail::current_device();
  if (device < MAX_DEVICES) {
    if (const int known = one_more_than[device].load(std::memory_order_relaxed)) return known - 1;
  }
  int value = 0;
  PAGEDATTN_CUDA_CHECK(cudaDeviceGetAttribute(&value, ATTRIBUTE, device));
  if (device < MAX_DEVICES) one_more_than[device].store(value + 1, std::memory_order_relaxed);
  return value;
}

inline int num_multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

// 80 for 8.0.
inline int compute_capability() {
  return 10 * device_attribute<cudaDevAttrComputeCapabilityMajor>() +
         device_attribute<cudaDevAttrComputeCapabilityMinor>();
}

template <typename Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// Blocks along x. Throws std::runtime_error for more than a grid takes.
inline unsigned grid_size(int64_t num_blocks, int64_t most = INT32_MAX) {
  if (num_blocks > most) {
    throw std::runtime_error("too much work for one CUDA grid: expected at most " + std::to_string(most) +
                             " blocks, got " + std::to_string(num_blocks));
  }
  return static_cast<unsigned>(num_blocks);
}

// Blocks along y or z.
inline unsigned grid_height(int64_t num_blocks) { return grid_size(num_blocks, 65535); }

__device__ inline float warp_sum(float value) {
  for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(ALL_LANES, value, lanes);
  return value;
}

// The NaN of a lane is left out, unless all lanes have NaN.
__device__ inline float warp_max(float value) {
  for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, lanes));
  return value;
}

}  // namespace pagedattn::cuda
