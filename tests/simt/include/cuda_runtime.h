// What our kernels and launchers use of the CUDA toolkit's <cuda_runtime.h>, for the simt device (simt.h). It is found
// instead of the toolkit's where this directory comes first. Every pointer is a host pointer, a launch runs at once,
// streams are ignored.
#pragma once

#include <math.h>
#include <stdlib.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "../simt.h"

namespace simt = pagedattn::simt;

#define __global__
#define __device__
#define __host__
#define __shared__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// ---- vector types, aligned as in CUDA

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

constexpr int2 make_int2(int x, int y) { return {x, y}; }
constexpr uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
constexpr float2 make_float2(float x, float y) { return {x, y}; }
constexpr uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
constexpr int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
constexpr uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
constexpr float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx;  // of the running thread
extern dim3 blockDim, gridDim;

// ---- barriers

inline void __syncthreads(simt::Site site = simt::Site::current()) {
  simt::block_barrier("__syncthreads", false, site);
}
inline int __syncthreads_count(int predicate, simt::Site site = simt::Site::current()) {
  return simt::block_barrier("__syncthreads_count", predicate != 0, site).num_true;
}
inline int __syncthreads_or(int predicate, simt::Site site = simt::Site::current()) {
  return simt::block_barrier("__syncthreads_or", predicate != 0, site).num_true > 0;
}
inline int __syncthreads_and(int predicate, simt::Site site = simt::Site::current()) {
  const auto result = simt::block_barrier("__syncthreads_and", predicate != 0, site);
  return result.num_true == result.num_threads;
}

inline void __threadfence() { simt::maybe_yield(); }
inline void __threadfence_block() { simt::maybe_yield(); }

// ---- warp operations

namespace pagedattn::simt {

struct NoOperands {};
inline void do_nothing(NoOperands* const*, unsigned, Site) {}

template <typename T>
struct ShuffleLane {
  T value, result;
  unsigned source;
};

template <typename T>
void shuffle_warp(ShuffleLane<T>* const* lanes, unsigned mask, Site site) {
  for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const unsigned source = lanes[lane]->source;
    if (!(mask >> source & 1)) {
      fail("shuffle: lane " + std::to_string(lane) + " reads lane " + std::to_string(source) +
               ", which is not in the mask",
           site);
    }
    lanes[lane]->result = lanes[source]->value;
  }
}

template <typename T>
T shuffle(const char* name, unsigned mask, T value, unsigned source, Site site) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4);
  ShuffleLane<T> mine{value, value, source};
  warp_operation<shuffle_warp<T>>(name, mask, mine, site);
  return mine.result;
}

struct BallotLane {
  bool predicate;
  unsigned result;
};

inline void ballot_warp(BallotLane* const* lanes, unsigned mask, Site) {
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
    if (mask >> lane & 1) ballot |= static_cast<unsigned>(lanes[lane]->predicate) << lane;
  }
  for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
    if (mask >> lane & 1) lanes[lane]->result = ballot;
  }
}

inline unsigned ballot(const char* name, unsigned mask, int predicate, Site site) {
  BallotLane mine{predicate != 0, 0};
  warp_operation<ballot_warp>(name, mask, mine, site);
  return mine.result;
}

}  // namespace pagedattn::simt

inline void __syncwarp(unsigned mask = ~0u, simt::Site site = simt::Site::current()) {
  simt::NoOperands none;
  simt::warp_operation<simt::do_nothing>("__syncwarp", mask, none, site);
}

// Lanes count within segments of `width` lanes; past the end of its segment, a lane gets its own value.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, simt::Site site = simt::Site::current()) {
  const unsigned lane = simt::lane_idx();
  return simt::shuffle("__shfl_sync", mask, value, (lane & -width) + (source & (width - 1)), site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, simt::Site site = simt::Site::current()) {
  const unsigned lane = simt::lane_idx(), source = lane ^ lanes;
  const bool inside = source < (lane & -width) + width;  // earlier segments can be read
  return simt::shuffle("__shfl_xor_sync", mask, value, inside ? source : lane, site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, simt::Site site = simt::Site::current()) {
  const unsigned lane = simt::lane_idx(), source = lane + lanes;
  const bool inside = source < (lane & -width) + width;
  return simt::shuffle("__shfl_down_sync", mask, value, inside ? source : lane, site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, simt::Site site = simt::Site::current()) {
  const unsigned lane = simt::lane_idx();
  const bool inside = (lane & (width - 1)) >= lanes;
  return simt::shuffle("__shfl_up_sync", mask, value, inside ? lane - lanes : lane, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Site site = simt::Site::current()) {
  return simt::ballot("__ballot_sync", mask, predicate, site);
}
inline int __any_sync(unsigned mask, int predicate, simt::Site site = simt::Site::current()) {
  return simt::ballot("__any_sync", mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simt::Site site = simt::Site::current()) {
  return simt::ballot("__all_sync", mask, predicate, site) == mask;
}

// ---- memory

// Threads switch only where they wait, so a plain access is atomic.
template <typename T, typename Change>
T simt_atomic(T* address, Change change) {
  simt::maybe_yield();
  const T old = *address;
  *address = change(old);
  return old;
}
template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return simt_atomic(address, [=](T old) { return old + value; });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return simt_atomic(address, [=](T old) { return old > value ? old : value; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return simt_atomic(address, [=](T old) { return old < value ? old : value; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return simt_atomic(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return simt_atomic(address, [=](T old) { return old == expected ? value : old; });
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}

template <typename T>
void __stwb(T* address, std::type_identity_t<T> value) {
  *address = value;
}

// ---- numbers

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }

// Which NaN a GPU computes in float is unspecified; here it is this one. The host's operators keep the sign and the
// payload of an operand.
inline float simt_canonical(float x) { return x == x ? x : std::bit_cast<float>(0x7fffffffu); }

inline float __expf(float x) { return simt_canonical(expf(x)); }
inline float __fdiv_rn(float a, float b) { return simt_canonical(a / b); }
inline float __fdividef(float a, float b) { return simt_canonical(a / b); }
inline float __frcp_rn(float x) { return simt_canonical(1.0f / x); }
inline float rsqrtf(float x) { return simt_canonical(1.0f / sqrtf(x)); }

// Of two floats, the one that is not NaN.
template <typename A, typename B>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(fmin(a, b));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
  }
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(fmax(a, b));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
  }
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }

// Byte i of the result is the byte of {y, x} (x is the low half) that nibble i of `selector` names; with bit 3 of the
// nibble set, that byte's sign in all eight bits.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i;
    const unsigned byte = bytes >> 8 * (nibble & 7) & 0xff;
    result |= (nibble & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return result;
}

// ---- the runtime API. Errors of a launch are thrown (simt.h)

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "out of memory"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute, int value) {
  ++simt::uses.questions;
  simt::allow_shared_bytes(function, value);
  return cudaSuccess;
}

struct cudaFuncAttributes {
  int ptxVersion;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  ++simt::uses.questions;
  attributes->ptxVersion = simt::gpu(simt::current_gpu()).architecture;
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  const auto thread = [&] { kernel(args...); };
  const auto run_thread = [](const void* arguments) { (*static_cast<decltype(thread)*>(arguments))(); };
  bool is_dependent = false;
  dim3 cluster;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const auto& value = config->attrs[i].val;
    switch (config->attrs[i].id) {
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        is_dependent = value.programmaticStreamSerializationAllowed != 0;
        break;
      case cudaLaunchAttributeClusterDimension:
        cluster = {value.clusterDim.x, value.clusterDim.y, value.clusterDim.z};
        break;
    }
  }
  simt::run({__PRETTY_FUNCTION__, reinterpret_cast<const void*>(kernel), config->gridDim, cluster, config->blockDim,
             config->dynamicSmemBytes, is_dependent, run_thread, &thread});
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = malloc(bytes);
  return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* pointer) {
  free(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
inline cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}

enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void *devicePointer, *hostPointer;
};
// All memory is pinned; with PAGEDATTN_SIMT_PAGEABLE in the environment, none is.
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  void* same = const_cast<void*>(pointer);
  if (getenv("PAGEDATTN_SIMT_PAGEABLE") == nullptr) {
    *attributes = {cudaMemoryTypeHost, 0, same, same};
  } else {
    *attributes = {cudaMemoryTypeUnregistered, 0, nullptr, same};
  }
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = simt::current_gpu();
  return cudaSuccess;
}

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++simt::uses.questions;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = simt::gpu(device).num_multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = simt::MAX_SHARED_BYTES;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = simt::gpu(device).architecture / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = simt::gpu(device).architecture % 10;
      break;
  }
  return cudaSuccess;
}
