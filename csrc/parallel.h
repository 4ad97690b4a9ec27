// Threads for CPU kernels, on torch's own pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pagedattn {

// Elements that are worth waking a second thread for: below it, the wake-up costs more than the work (and, on a busy
// machine, milliseconds).
inline constexpr int64_t PARALLEL_GRAIN = 32768;

// Multiply-adds that are, where there are many an element.
inline constexpr int64_t MULTIPLY_ADDS_PER_THREAD = 1 << 18;

// Workers for so many multiply-adds: no more than items and threads, and one where there is little to do.
inline int64_t num_workers_for(int64_t multiply_adds, int64_t num_items) {
  const int64_t most = std::clamp<int64_t>(num_items, 1, torch::stable::get_num_threads());
  return std::clamp<int64_t>(multiply_adds / MULTIPLY_ADDS_PER_THREAD, 1, most);
}

// Calls body(begin, end) over ranges of [0, num_rows), on this thread alone when there is little to do.
template <typename Body>
void parallel_for_rows(int64_t num_rows, int64_t elements_per_row, const Body& body) {
  if (num_rows == 0 || elements_per_row == 0) return;
  const int64_t grain = std::max<int64_t>(1, PARALLEL_GRAIN / elements_per_row);
  torch::stable::parallel_for(0, num_rows, grain, body);
}

// Calls body(item, worker) for every item of [0, num_items): a worker that is done takes the next item, so unequal
// items and slow cores balance. Items with the same worker never overlap.
template <typename Body>
void parallel_for_items(int64_t num_items, int64_t num_workers, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t item = next++; item < num_items; item = next++) body(item, worker);
    }
  };
  if (num_workers <= 1) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, num_workers, 1, work);
  }
}

}  // namespace pagedattn
