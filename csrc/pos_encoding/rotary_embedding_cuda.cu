// In place, a block for each token. A thread keeps one column of pairs over all the heads that it rotates, several
// heads at a time. So it reads the cosines and sines of its pairs once, into registers. Only the rotated part of a head
// is touched.
#include <algorithm>

#include "cuda_vec.cuh"
#include "dispatch.h"
#include "pos_encoding/rotary_embedding.h"

namespace pagedattn::cuda {
namespace {

constexpr int ROTARY_THREADS = 512;
constexpr int HEADS_PER_THREAD = 4;

// PAIRS pairs (x, y) of one head as they lie in memory. For neox, x and y lie half the rotated part apart: x is in
// `first`, y in `second`. Otherwise they lie side by side: both are in `first`, or, where elements are accessed one by
// one, one element is in each.
template <typename T, int PAIRS, bool IS_NEOX>
struct PackedPairs {
  static constexpr bool IS_ONE_ACCESS = !IS_NEOX && PAIRS > 1;
  static constexpr int N = IS_ONE_ACCESS ? 2 * PAIRS : PAIRS;

  Packed<T, N> first, second;

  // `first_pair` is the number of the first pair; half = rot_dim / 2.
  __device__ void load_from(const T* head, int64_t first_pair, int64_t half) {
    if constexpr (IS_ONE_ACCESS) {
      first = load<N>(head + 2 * first_pair);
    } else {
      first = load<N>(head + (IS_NEOX ? first_pair : 2 * first_pair));
      second = load<N>(head + (IS_NEOX ? first_pair + half : 2 * first_pair + 1));
    }
  }

  __device__ void rotate_to(T* head, int64_t first_pair, int64_t half, const Floats<PAIRS>& cos,
                            const Floats<PAIRS>& sin) const {
    if constexpr (IS_ONE_ACCESS) {
      Floats<N> pairs = to_floats(first);
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) rotate(pairs[2 * i], pairs[2 * i + 1], cos[i], sin[i]);
      store(head + 2 * first_pair, pairs);
    } else {
      Floats<PAIRS> x = to_floats(first), y = to_floats(second);
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) rotate(x[i], y[i], cos[i], sin[i]);
      store(head + (IS_NEOX ? first_pair : 2 * first_pair), x);
      store(head + (IS_NEOX ? first_pair + half : 2 * first_pair + 1), y);
    }
  }

  __device__ static void rotate(float& x, float& y, float cos, float sin) {
    const float old_x = x;
    x = fmaf(old_x, cos, -(y * sin));
    y = fmaf(y, cos, old_x * sin);
  }
};

// Grid: num_tokens blocks of num_columns * heads_per_pass threads. A column is PAIRS pairs of a head. The heads of key
// follow the heads of query. At least one block on a multiprocessor: without that number, the compiler spills registers
// to have more blocks there.
template <typename T, typename C, int PAIRS, bool IS_NEOX>
__global__ void __launch_bounds__(ROTARY_THREADS, 1)
    rotary_embedding_kernel(RotaryEmbeddingParams p, int heads_per_pass) {
  const int64_t token = blockIdx.x;
  const int64_t half = p.rot_dim / 2;
  const int num_columns = static_cast<int>(half / PAIRS);
  T* query = static_cast<T*>(p.query) + token * p.query_stride;
  T* key = static_cast<T*>(p.key) + token * p.key_stride;
  const int64_t num_heads = p.num_heads + p.num_kv_heads;
  const auto head_data = [&](int64_t head) {
    return head < p.num_heads ? query + head * p.query_head_stride : key + (head - p.num_heads) * p.key_head_stride;
  };

  const int num_threads_of_head = static_cast<int>(blockDim.x) / heads_per_pass;
  const int head_of_pass = static_cast<int>(threadIdx.x) / num_threads_of_head;
  for (int column = static_cast<int>(threadIdx.x) % num_threads_of_head; column < num_columns;
       column += num_threads_of_head) {
    const int64_t first_pair = static_cast<int64_t>(column) * PAIRS;
    PackedPairs<T, PAIRS, IS_NEOX> pairs[HEADS_PER_THREAD] = {};
    const auto load_pairs = [&](int64_t first_head) {
#pragma unroll
      for (int h = 0; h < HEADS_PER_THREAD; ++h) {
        const int64_t head = first_head + h * heads_per_pass;
        if (head < num_heads) pairs[h].load_from(head_data(head), first_pair, half);
      }
    };
    int64_t first_head = head_of_pass;
    load_pairs(first_head);
    // After the first loads, which need not wait for the position.
    const C* cos_row = static_cast<const C*>(p.cos) + p.positions[token] * p.cos_sin_stride;
    const Floats<PAIRS> cos = load_floats<PAIRS>(cos_row + first_pair);
    const C* sin_row = static_cast<const C*>(p.sin) + p.positions[token] * p.cos_sin_stride;
    const Floats<PAIRS> sin = load_floats<PAIRS>(sin_row + first_pair);
    while (first_head < num_heads) {
#pragma unroll
      for (int h = 0; h < HEADS_PER_THREAD; ++h) {
        const int64_t head = first_head + h * heads_per_pass;
        if (head < num_heads) pairs[h].rotate_to(head_data(head), first_pair, half, cos, sin);
      }
      first_head += heads_per_pass * HEADS_PER_THREAD;
      load_pairs(first_head);
    }
  }
}

template <typename T, typename C, int PAIRS, bool IS_NEOX>
void launch_columns(const RotaryEmbeddingParams& params, cudaStream_t stream) {
  const int64_t num_columns = params.rot_dim / 2 / PAIRS;
  const int64_t num_heads = params.num_heads + params.num_kv_heads;
  const int64_t num_threads_of_head = std::min<int64_t>(num_columns, ROTARY_THREADS);
  const int64_t heads_per_pass =
      std::min<int64_t>(ceil_div<int64_t>(num_heads, HEADS_PER_THREAD), ROTARY_THREADS / num_threads_of_head);
  launch(rotary_embedding_kernel<T, C, PAIRS, IS_NEOX>, dim3(grid_size(params.num_tokens)),
         dim3(static_cast<unsigned>(num_threads_of_head * heads_per_pass)), 0, stream, params,
         static_cast<int>(heads_per_pass));
}

template <typename T, int PAIRS, bool IS_NEOX>
void launch_rotary_embedding(const RotaryEmbeddingParams& params, cudaStream_t stream) {
  if (params.cos_sin_dtype == params.dtype) {
    launch_columns<T, T, PAIRS, IS_NEOX>(params, stream);
  } else {
    launch_columns<T, float, PAIRS, IS_NEOX>(params, stream);
  }
}

}  // namespace

void rotary_embedding(const RotaryEmbeddingParams& params, cudaStream_t stream) {
  if (params.rot_dim == 0 || params.num_heads + params.num_kv_heads == 0) return;
  const int64_t bytes = element_size(params.dtype);
  // If pairs are neighbours, 16 bytes hold half as many pairs, and the cosines of these pairs are 8 bytes. Sines in one
  // row with the cosines are aligned if the rotated part of a head is.
  const void* sines = params.cos_sin_stride == params.rot_dim ? nullptr : params.sin;
  const int64_t rotated_bytes = (params.is_neox ? params.rot_dim / 2 : params.rot_dim) * bytes;
  const bool is_aligned = is_aligned_16({params.query, params.key, params.cos, sines},
                                        {params.query_head_stride * bytes, params.query_stride * bytes,
                                         params.key_head_stride * bytes, params.key_stride * bytes, rotated_bytes});
  dispatch_dtype(params.dtype, [&]<typename T>() {
    constexpr int X = ELEMENTS_PER_CHUNK<T>;
    if (params.is_neox && is_aligned) {
      launch_rotary_embedding<T, X, true>(params, stream);
    } else if (params.is_neox) {
      launch_rotary_embedding<T, 1, true>(params, stream);
    } else if (is_aligned) {
      launch_rotary_embedding<T, X / 2, false>(params, stream);
    } else {
      launch_rotary_embedding<T, 1, false>(params, stream);
    }
  });
}

}  // namespace pagedattn::cuda
