// Elements of a storage type as floats, 16 bytes at a time, for kernels that stream rows through registers. A kernel
// takes N, the elements of an access: as many as 16 bytes hold, or 1 where rows are not aligned to 16 bytes.
#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "cuda_utils.cuh"
#include "dispatch.h"

namespace pagedattn::cuda {

// N elements as they lie in memory: 4, 8 or 16 bytes, or one element.
template <typename T, int N>
struct Packed {
  static constexpr int NUM_WORDS = N * sizeof(T) / 4;
  static_assert(NUM_WORDS == 1 || NUM_WORDS == 2 || NUM_WORDS == 4);
  uint32_t words[NUM_WORDS];
};
template <typename T>
struct Packed<T, 1> {
  T element;
};

template <int N>
struct Floats {
  float elements[N];

  __device__ float& operator[](int i) { return elements[i]; }
  __device__ float operator[](int i) const { return elements[i]; }
};

// One access. A thread waits for a load where it first uses the elements. So a kernel that wants several loads under
// way starts all of them before it calls to_floats for one.
template <int N, typename T>
__device__ inline Packed<T, N> load(const T* source) {
  if constexpr (N == 1) {
    return {*source};
  } else if constexpr (Packed<T, N>::NUM_WORDS == 1) {
    return {{*reinterpret_cast<const uint32_t*>(source)}};
  } else if constexpr (Packed<T, N>::NUM_WORDS == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(source);
    return {{v.x, v.y}};
  } else {
    static_assert(Packed<T, N>::NUM_WORDS == 4);
    const uint4 v = *reinterpret_cast<const uint4*>(source);
    return {{v.x, v.y, v.z, v.w}};
  }
}

// One access, to global memory. The compiler may take an assignment of 16 bytes apart into four stores. The intrinsic
// stays one store.
template <typename T, int N>
__device__ inline void store(T* target, const Packed<T, N>& packed) {
  if constexpr (N == 1) {
    *target = packed.element;
  } else {
    const auto& w = packed.words;
    if constexpr (Packed<T, N>::NUM_WORDS == 4) {
      __stwb(reinterpret_cast<uint4*>(target), make_uint4(w[0], w[1], w[2], w[3]));
    } else if constexpr (Packed<T, N>::NUM_WORDS == 2) {
      __stwb(reinterpret_cast<uint2*>(target), make_uint2(w[0], w[1]));
    } else {
      __stwb(reinterpret_cast<uint32_t*>(target), w[0]);
    }
  }
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(float16 x) { return ptx::to_float(x); }
__device__ inline float to_float(bfloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// To the nearest, ties to even.
template <typename T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, float16>) {
    return ptx::to_float16(x);
  } else {
    return ptx::to_bfloat16(x);
  }
}

template <typename T, int N>
__device__ inline Floats<N> to_floats(const Packed<T, N>& packed) {
  Floats<N> result;
  if constexpr (N == 1) {
    result[0] = to_float(packed.element);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (sizeof(T) == 4) {
        result[i] = std::bit_cast<float>(packed.words[i]);
      } else {
        result[i] = to_float(T{static_cast<uint16_t>(packed.words[i / 2] >> (i % 2 * 16))});
      }
    }
  }
  return result;
}

// N elements of a type that may be wider than the one that N is chosen for.
template <int N, typename C>
__device__ Floats<N> load_floats(const C* source) {
  constexpr int PER_LOAD = N < ELEMENTS_PER_CHUNK<C> ? N : ELEMENTS_PER_CHUNK<C>;
  Packed<C, PER_LOAD> packed[N / PER_LOAD];
#pragma unroll
  for (int i = 0; i < N / PER_LOAD; ++i) packed[i] = load<PER_LOAD>(source + i * PER_LOAD);
  Floats<N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = to_floats(packed[i / PER_LOAD])[i % PER_LOAD];
  return result;
}

template <typename T, int N>
__device__ inline void store(T* target, const Floats<N>& values) {
  Packed<T, N> packed;
  if constexpr (N == 1) {
    packed.element = from_float<T>(values[0]);
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, N>::NUM_WORDS; ++i) {
      if constexpr (sizeof(T) == 4) {
        packed.words[i] = std::bit_cast<uint32_t>(values[i]);
      } else {
        packed.words[i] = ptx::pack<T>(values[2 * i], values[2 * i + 1]);
      }
    }
  }
  store(target, packed);
}

// Whether accesses of 16 bytes are possible at these addresses, and at these distances in bytes from one access to the
// next.
inline bool is_aligned_16(std::initializer_list<const void*> addresses, std::initializer_list<int64_t> distances) {
  uintptr_t bits = 0;
  for (const void* address : addresses) bits |= reinterpret_cast<uintptr_t>(address);
  for (const int64_t distance : distances) bits |= static_cast<uintptr_t>(distance);
  return bits % 16 == 0;
}

// Calls function.operator()<T, N>() with the storage type of `dtype` and the elements of an access.
template <typename Function>
inline void dispatch_access(DType dtype, bool is_aligned, const Function& function) {
  dispatch_dtype(dtype, [&]<typename T>() {
    if (is_aligned) {
      function.template operator()<T, ELEMENTS_PER_CHUNK<T>>();
    } else {
      function.template operator()<T, 1>();
    }
  });
}

// ---- grids over [num_rows, num_columns], for kernels whose threads work alone. A column is N elements wide

// A thread block covers blockDim.x columns of num_rows_per_thread * blockDim.y rows. Thread blocks of the same rows
// follow each other.
struct RowGrid {
  static constexpr int NUM_THREADS = 256;
  dim3 grid;
  dim3 block;
  unsigned num_column_blocks;
  int num_rows_per_thread;
};

// A thread has several rows, so that several loads are under way. It has one row where there is so little to do that
// more threads help more.
inline RowGrid make_row_grid(int64_t num_rows, int64_t num_columns, int max_rows_per_thread) {
  constexpr int64_t ENOUGH_BLOCKS_OF_MULTIPROCESSOR = 8;
  RowGrid row_grid{};
  row_grid.grid.x = 0;
  if (num_rows == 0 || num_columns == 0) return row_grid;
  row_grid.block.x = num_columns < WARP_SIZE ? std::bit_ceil(static_cast<unsigned>(num_columns)) : RowGrid::NUM_THREADS;
  // As wide as leaves few threads past the last column.
  const auto num_idle_columns = [&] {
    return ceil_div<int64_t>(num_columns, row_grid.block.x) * row_grid.block.x - num_columns;
  };
  while (row_grid.block.x > WARP_SIZE && num_idle_columns() > num_columns / 16) row_grid.block.x /= 2;
  row_grid.block.y = RowGrid::NUM_THREADS / row_grid.block.x;
  row_grid.num_column_blocks = static_cast<unsigned>(ceil_div<int64_t>(num_columns, row_grid.block.x));
  const auto num_blocks = [&](int num_rows_per_thread) {
    return row_grid.num_column_blocks * ceil_div<int64_t>(num_rows, int64_t{row_grid.block.y} * num_rows_per_thread);
  };
  const int64_t enough_blocks = ENOUGH_BLOCKS_OF_MULTIPROCESSOR * num_multiprocessors();
  row_grid.num_rows_per_thread = num_blocks(max_rows_per_thread) < enough_blocks ? 1 : max_rows_per_thread;
  row_grid.grid.x = grid_size(num_blocks(row_grid.num_rows_per_thread));
  return row_grid;
}

// The rows of a thread in a RowGrid: row(i) for i < num_rows, at one column.
struct ThreadRows {
  int64_t first_row;
  int num_rows;  // none for a column past the last
  int64_t column;

  __device__ int64_t row(int i) const { return first_row + static_cast<int64_t>(i) * blockDim.y; }
};

__device__ inline ThreadRows thread_rows(const RowGrid& row_grid, int64_t num_rows, int64_t num_columns) {
  ThreadRows rows;
  rows.column = static_cast<int64_t>(blockIdx.x % row_grid.num_column_blocks) * blockDim.x + threadIdx.x;
  const int64_t row_block = blockIdx.x / row_grid.num_column_blocks;
  rows.first_row = row_block * row_grid.num_rows_per_thread * blockDim.y + threadIdx.y;
  rows.num_rows = 0;
  if (rows.column < num_columns) {
    for (int i = 0; i < row_grid.num_rows_per_thread; ++i) rows.num_rows += rows.row(i) < num_rows ? 1 : 0;
  }
  return rows;
}

}  // namespace pagedattn::cuda
