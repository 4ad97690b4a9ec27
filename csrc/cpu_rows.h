// Loops over the vectors of rows of fp32, fp16 and bf16, for the CPU kernels.
#pragma once

#include "cpu_memory.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// An ordinary store first reads the lines that it overwrites, a third of the traffic of out = f(input). From this size
// on, an output would hardly stay in the caches until the next op reads it.
constexpr int64_t MIN_STREAMED_BYTES = 8 << 20;

// Calls body.operator()<STREAM>() for a kernel that writes rows of `out`. STREAM is true if the rows are to be written
// past the caches: rows of `min_bytes` or more. Rows that replace `input` go through the caches, as they have just been
// read.
template <typename T, typename Body>
PAGEDATTN_INLINE void choose_stream(int64_t min_bytes, const void* input, const T* out, int64_t out_stride,
                                    int64_t num_rows, int64_t width, Body&& body) {
  constexpr uintptr_t LINE_BYTES = 64;
  const bool is_aligned = (reinterpret_cast<uintptr_t>(out) | out_stride * sizeof(T)) % LINE_BYTES == 0;
  const bool is_large = num_rows * width * static_cast<int64_t>(sizeof(T)) >= min_bytes;
  if (out != input && is_aligned && is_large) {
    body.template operator()<true>();
    finish_streams();
  } else {
    body.template operator()<false>();
  }
}

// Calls body(i, load, store) over [0, size) in steps of VEC_SIZE: `load(pointer)` and `store(pointer, vector)` touch a
// whole vector, or, in the last step, only what is left of the row.
template <typename Body>
PAGEDATTN_INLINE void for_each_vector(int64_t size, Body&& body) {
  int64_t i = 0;
  for (; i + VEC_SIZE <= size; i += VEC_SIZE) {
    body(i, [](const auto* source) { return load(source); }, [](auto* target, Vec value) { store(target, value); });
  }
  if (const int64_t rest = size - i; rest > 0) {
    body(
        i, [rest](const auto* source) { return load_first(source, rest); },
        [rest](auto* target, Vec value) { store_first(target, value, rest); });
  }
}

// Calls body(which, position, load) for the first and the second of two vectors of T that begin at `i`.
template <typename T, typename Body>
PAGEDATTN_INLINE void for_two_vectors(int64_t i, Body&& body) {
  if constexpr (EVEN_AND_ODD<T>) {
    body(0, i, [](const T* source) { return load_two(source).of[0]; });
    body(1, i, [](const T* source) { return load_two(source).of[1]; });
  } else {
    const auto load_whole = [](const T* source) { return load(source); };
    body(0, i, load_whole);
    body(1, i + VEC_SIZE, load_whole);
  }
}

// Over [0, size) in steps of VEC_SIZE: stores the vectors that values(i, load) returns at outs[0] + i, outs[1] + i, ...
// `load` is as in for_each_vector. An output may be an input of the same step. With STREAM the stores go past the
// caches. Four steps are computed before any is stored: a load waits for a store under way if both addresses end in the
// same 12 bits, and an unlucky distance of input and output would make this happen in every step.
template <bool STREAM, typename T, int N, typename Values>
PAGEDATTN_INLINE void write_vectors(int64_t size, T* const (&outs)[N], Values&& values) {
  constexpr int AT_ONCE = 4;
  int64_t i = 0;
  for (; i + AT_ONCE * VEC_SIZE <= size; i += AT_ONCE * VEC_SIZE) {
    Vecs<N> v[AT_ONCE];
    PAGEDATTN_UNROLL
    for (int j = 0; j < AT_ONCE; j += 2) {
      for_two_vectors<T>(i + j * VEC_SIZE, [&](int which, int64_t position, auto load)
                                               PAGEDATTN_ALWAYS_INLINE { v[j + which] = values(position, load); });
    }
    PAGEDATTN_UNROLL
    for (int j = 0; j < AT_ONCE; j += 2) {
      PAGEDATTN_UNROLL
      for (int k = 0; k < N; ++k) store_two<STREAM>(outs[k] + i + j * VEC_SIZE, v[j].of[k], v[j + 1].of[k]);
    }
  }
  for_each_vector(size - i, [&](int64_t j, auto load, auto store) {
    const Vecs<N> last = values(i + j, load);
    PAGEDATTN_UNROLL
    for (int k = 0; k < N; ++k) store(outs[k] + i + j, last.of[k]);
  });
}

// Folds [0, size) of T with sum = add(sum, i, load); `load` is as in for_each_vector. Four sums hide the latency of the
// additions. A step over all four sums keeps them in registers.
template <typename T, typename Add>
PAGEDATTN_INLINE Vec sum_vectors(int64_t size, Add&& add) {
  constexpr int NUM_SUMS = 4;
  Vec sums[NUM_SUMS] = {};
  int64_t i = 0;
  for (; i + NUM_SUMS * VEC_SIZE <= size; i += NUM_SUMS * VEC_SIZE) {
    PAGEDATTN_UNROLL
    for (int j = 0; j < NUM_SUMS; j += 2) {
      for_two_vectors<T>(i + j * VEC_SIZE, [&](int which, int64_t position, auto load) PAGEDATTN_ALWAYS_INLINE {
        sums[j + which] = add(sums[j + which], position, load);
      });
    }
  }
  PAGEDATTN_UNROLL
  for (int j = 0; j < NUM_SUMS; ++j) {
    const int64_t rest = size - i - j * VEC_SIZE;
    if (rest >= VEC_SIZE) {
      sums[j] = add(sums[j], i + j * VEC_SIZE, [](const T* source) { return load(source); });
    } else if (rest > 0) {
      sums[j] = add(sums[j], i + j * VEC_SIZE, [rest](const T* source) { return load_first(source, rest); });
    }
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
