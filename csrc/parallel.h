// Threads for CPU kernels, on torch's own pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "flushed_floats.h"

namespace pagedattn {

// Elements that are worth waking another thread for. With fewer, the wake-up costs more than the work, and on a busy
// machine milliseconds.
inline constexpr int64_t PARALLEL_GRAIN = 32768;

// Multiply-adds that are worth another thread, in work with many of them for each element.
inline constexpr int64_t MULTIPLY_ADDS_PER_THREAD = 1 << 18;

// How many workers share so many multiply-adds: no more than there are items and threads, and one if there is little to
// do.
inline int64_t num_workers_for(int64_t multiply_adds, int64_t num_items) {
  const int64_t most = std::clamp<int64_t>(num_items, 1, torch::stable::get_num_threads());
  return std::clamp<int64_t>(multiply_adds / MULTIPLY_ADDS_PER_THREAD, 1, most);
}

// Calls body(begin, end) over ranges of [0, num_rows), on this thread alone when there is little to do.
template <typename Body>
void parallel_for_rows(int64_t num_rows, int64_t elements_per_row, const Body& body) {
  if (num_rows == 0 || elements_per_row == 0) return;
  const int64_t grain = std::max<int64_t>(1, PARALLEL_GRAIN / elements_per_row);
  if (num_rows <= grain) return body(0, num_rows);
  torch::stable::parallel_for(0, num_rows, grain, body);
}

// Calls body(item, worker) for every item of [0, num_items). A worker that is done with an item takes the next item, so
// that unequal items and slow cores balance. Items of the same worker never run at the same time. Items multiply and
// add much: subnormal numbers count as zeros in them.
template <typename Body>
void parallel_for_items(int64_t num_items, int64_t num_workers, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t begin, int64_t end) {
    const FlushedFloats flushed;
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
