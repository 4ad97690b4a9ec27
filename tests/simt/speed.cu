// What the simt device costs: nanoseconds a thread for each operation (docs/simt.md).
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "simt/program.cuh"

namespace pagedattn::cuda {
namespace {

enum class Operation { NOTHING, BARRIER, SHUFFLE, LDMATRIX, MMA };

template <Operation OPERATION>
__global__ void repeat_kernel(int num_times, float* out) {
  float value = 0.0f, d[4] = {};
  uint32_t matrices[4] = {};
  for (int i = 0; i < num_times; ++i) {
    if constexpr (OPERATION == Operation::BARRIER) __syncthreads();
    if constexpr (OPERATION == Operation::SHUFFLE) value += __shfl_xor_sync(ALL_LANES, value, 1);
    if constexpr (OPERATION == Operation::LDMATRIX) ptx::ldmatrix_x4(matrices, shared_memory + threadIdx.x % 32 * 16);
    if constexpr (OPERATION == Operation::MMA) ptx::mma_m16n8k16<bfloat16>(d, matrices, 0, 0);
  }
  out[threadIdx.x] = value + d[0] + __uint_as_float(matrices[0]);
}

// The best of several launches of a few blocks.
template <Operation OPERATION>
double nanoseconds_per_thread(int num_threads, int num_times) {
  constexpr int NUM_LAUNCHES = 5, NUM_BLOCKS = 4;
  Buffer<float> out(1024);
  double best = 1e30;
  for (int i = 0; i < NUM_LAUNCHES; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    run_kernel(repeat_kernel<OPERATION>, dim3(NUM_BLOCKS), dim3(num_threads), 512, num_times, out.data());
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    best = std::min(best, time.count() / NUM_BLOCKS / num_threads);
  }
  return best;
}

}  // namespace
}  // namespace pagedattn::cuda

int main() {
  using namespace pagedattn::cuda;
  constexpr int NUM_TIMES = 100;
  std::printf("threads   start  __syncthreads  shuffle  ldmatrix    mma   (ns a thread)\n");
  for (const int num_threads : {32, 128, 256, 1024}) {
    const double start = nanoseconds_per_thread<Operation::NOTHING>(num_threads, 0);
    const auto one = [&](double all) { return (all - start) / NUM_TIMES; };
    std::printf("%7d  %6.0f  %13.1f  %7.1f  %8.1f  %5.1f\n", num_threads, start,
                one(nanoseconds_per_thread<Operation::BARRIER>(num_threads, NUM_TIMES)),
                one(nanoseconds_per_thread<Operation::SHUFFLE>(num_threads, NUM_TIMES)),
                one(nanoseconds_per_thread<Operation::LDMATRIX>(num_threads, NUM_TIMES)),
                one(nanoseconds_per_thread<Operation::MMA>(num_threads, NUM_TIMES)));
  }
}
