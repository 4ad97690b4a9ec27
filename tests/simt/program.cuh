// What the programs of test_simt.py share: memory of host and device, a launch to its end, and how a program says what
// came out. The same on the simt device and on a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "cuda_utils.cuh"

namespace pagedattn::cuda {

inline constexpr int RIGHT = 0, WRONG = 1, ERROR = 2;  // exit status

// Memory of the device, and as much memory of the host. Not managed memory, which some virtual machines do not have.
class AnyBuffer {
 public:
  AnyBuffer(void* on_host, size_t bytes) : on_host_(on_host), bytes_(bytes) {
    PAGEDATTN_CUDA_CHECK(cudaMalloc(&on_device_, bytes));
    all().push_back(this);
  }
  ~AnyBuffer() {
    std::erase(all(), this);
    cudaFree(on_device_);
  }
  AnyBuffer(const AnyBuffer&) = delete;

  static std::vector<AnyBuffer*>& all() {
    static std::vector<AnyBuffer*> buffers;
    return buffers;
  }
  void to_device() const { PAGEDATTN_CUDA_CHECK(cudaMemcpy(on_device_, on_host_, bytes_, cudaMemcpyHostToDevice)); }
  void to_host() const { PAGEDATTN_CUDA_CHECK(cudaMemcpy(on_host_, on_device_, bytes_, cudaMemcpyDeviceToHost)); }

 protected:
  void* on_device_ = nullptr;

 private:
  void* on_host_;
  size_t bytes_;
};

// The host reads and writes elements, kernels have data().
template <typename T>
class Buffer : private std::unique_ptr<T[]>, public AnyBuffer {
  using Host = std::unique_ptr<T[]>;

 public:
  explicit Buffer(size_t size)
      : Host(std::make_unique<T[]>(size)), AnyBuffer(Host::get(), size * sizeof(T)), size_(size) {}

  T* data() { return static_cast<T*>(on_device_); }
  T* host() { return Host::get(); }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return host()[i]; }

 private:
  size_t size_;
};

// Runs the kernels that start() launches to their end. All buffers go to the device before, and come back after.
template <typename Start>
void run_to_end(const Start& start) {
  for (const AnyBuffer* buffer : AnyBuffer::all()) buffer->to_device();
  start();
  PAGEDATTN_CUDA_CHECK(cudaDeviceSynchronize());
  for (const AnyBuffer* buffer : AnyBuffer::all()) buffer->to_host();
}

// One launch.
template <typename Kernel, typename... Args>
void run_kernel(Kernel kernel, dim3 grid, dim3 block, size_t shared_bytes, const Args&... args) {
  run_to_end([&] { launch(kernel, grid, block, shared_bytes, nullptr, args...); });
}

}  // namespace pagedattn::cuda
