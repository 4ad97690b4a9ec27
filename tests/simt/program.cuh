// What the programs of test_simt.py share: memory that host and kernels see, and how a program says what came out.
// The same on the simt device and on a GPU.
#pragma once

#include <cstddef>

#include "cuda_utils.cuh"

namespace pagedattn::cuda {

inline constexpr int RIGHT = 0, WRONG = 1, ERROR = 2;  // exit status

template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t size) : size_(size) {
    void* memory = nullptr;
    PAGEDATTN_CUDA_CHECK(cudaMallocManaged(&memory, size * sizeof(T)));
    data_ = static_cast<T*>(memory);
    for (size_t i = 0; i < size; ++i) data_[i] = T{};
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;

  T* data() { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  T* data_;
  size_t size_;
};

// One launch, to its end.
template <typename Kernel, typename... Args>
void run_kernel(Kernel kernel, dim3 grid, dim3 block, size_t shared_bytes, const Args&... args) {
  launch(kernel, grid, block, shared_bytes, nullptr, args...);
  PAGEDATTN_CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace pagedattn::cuda
