// Threads for CPU kernels, on torch's own pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#ifdef __SANITIZE_THREAD__
#include <thread>
#include <vector>
#endif

#include "flushed_floats.h"

namespace pagedattn {

#ifndef __SANITIZE_THREAD__

// Elements that are worth waking another thread for. With fewer, the wake-up costs more than the work, and on a busy
// machine milliseconds.
inline constexpr int64_t PARALLEL_GRAIN = 32768;

// Multiply-adds that are worth another thread, in work with many of them for each element.
inline constexpr int64_t MULTIPLY_ADDS_PER_THREAD = 1 << 18;

// Calls body(begin, end) over ranges of [0, size), each but the last of `grain` at least.
template <typename Body>
void parallel_for(int64_t size, int64_t grain, const Body& body) {
  torch::stable::parallel_for(0, size, grain, body);
}

#else

// The same for ThreadSanitizer. It does not see how the threads of torch's pool wait for each other, so these threads
// begin and end here. Tests are small, so little work is worth a thread.
inline constexpr int64_t PARALLEL_GRAIN = 32;
inline constexpr int64_t MULTIPLY_ADDS_PER_THREAD = 64;

template <typename Body>
void parallel_for(int64_t size, int64_t grain, const Body& body) {
  const int64_t num_threads = torch::stable::get_num_threads();
  const int64_t length = std::max(grain, (size + num_threads - 1) / num_threads);
  std::vector<std::jthread> threads;
  for (int64_t begin = 0; begin < size; begin += length) {
    threads.emplace_back([&body, begin, end = std::min(begin + length, size)] { body(begin, end); });
  }
}

#endif

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
  parallel_for(num_rows, grain, body);
}

// Calls body(item, worker) for every item of [0, num_items). A worker that is done with an item takes the next item, so
// that unequal items and slow cores balance. Items of the same worker never run at the same time. Items multiply and
// add much: subnormal numbers count as zeros in them.
template <typename Body>
void parallel_for_items(int64_t num_items, int64_t num_workers, const Body& body) {
  std::atomic<int64_t> next{0};  // orders nothing else: items share nothing, and threads meet at the end
  const auto work = [&](int64_t begin, int64_t end) {
    const FlushedFloats flushed;
    for (int64_t worker = begin; worker < end; ++worker) {
      int64_t item;
      while ((item = next.fetch_add(1, std::memory_order_relaxed)) < num_items) body(item, worker);
    }
  };
  if (num_workers <= 1) {
    work(0, 1);
  } else {
    parallel_for(num_workers, 1, work);
  }
}

}  // namespace pagedattn
