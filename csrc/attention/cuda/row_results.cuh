// The end of a work. Warps have summed over different tokens. Their sums are merged, and go to out, or to the scratch
// as a partial result.
#pragma once

#include "attention/cuda/paged_attention.cuh"
#include "cuda_vec.cuh"

namespace pagedattn::cuda {

constexpr int LANE_ELEMENTS = 4;  // moved by a lane at a time, where lanes lie along a head: 16 bytes of float

__device__ inline float value_scale(const AttentionArguments& a) {
  return a.p.value_scale_on_device == nullptr ? a.p.value_scale : *a.p.value_scale_on_device;
}

// The end of a row's softmax: adds the sink, writes lse, and returns the factor of the weighted values.
__device__ inline float finish_row(const AttentionArguments& a, int64_t row, int head, float max, float sum,
                                   bool write_lse) {
  float base = max;
  float total = sum;
  if (a.p.sinks != nullptr) {
    const float sink = a.p.sinks[head];
    base = fmaxf(max, sink);
    total = sum * exp_below(max, base) + exp_below(sink, base);
  }
  if (write_lse && a.p.lse != nullptr) {
    a.p.lse[row * a.p.num_heads + head] = total == 0.0f ? -INFINITY : base + logf(total);
  }
  // A row that sees nothing is zero. NaN stays NaN.
  return sum == 0.0f ? 0.0f : exp_below(max, base) / total * value_scale(a);
}

// Stores N neighbouring elements of out. `index` is of the first element, and a multiple of N. N * sizeof(Out) is at
// most 16.
template <typename Out, int N>
__device__ inline void store_out(const AttentionArguments& a, int64_t index, const Floats<N>& values) {
  Out* target = static_cast<Out*>(a.p.out) + index;
  if (a.out_aligned) {
    store(target, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) target[i] = from_float<Out>(values[i]);
  }
}

// Where the weighted values of a packed row go: to out, multiplied with `factor`, or unchanged to the partial results.
struct RowTarget {
  int64_t index;  // of the row's first element
  float factor;

  template <typename Out, int N>
  __device__ void store(const AttentionArguments& a, const Work& work, int d, Floats<N> values) const {
    if (work.partition >= 0) return cuda::store(split_of(a, work).values + index + d, values);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] *= factor;
    store_out<Out>(a, index + d, values);
  }

  // The target of another lane.
  __device__ RowTarget of_lane(int lane) const {
    return {__shfl_sync(ALL_LANES, index, lane), __shfl_sync(ALL_LANES, factor, lane)};
  }
};

// The target of results that stay in shared memory, where each lane knows their place.
struct NoTarget {
  __device__ NoTarget of_lane(int) const { return {}; }
};

// Writes what precedes a row's values: lse, or the softmax of a partial result. Of the threads that share a row, the
// one with `is_first` writes it.
__device__ inline RowTarget begin_row(const AttentionArguments& a, const Work& work, int packed, float max, float sum,
                                      bool is_first) {
  const int head = head_of(a, work, packed);
  if (work.partition < 0) {
    const int64_t row = row_of(a, work, packed);
    return {row * a.p.out_stride + head * a.p.head_size, finish_row(a, row, head, max, sum, is_first)};
  }
  const int64_t partial = partial_index(a, work, packed / a.group_size, head) + work.partition;
  if (is_first) split_of(a, work).softmax[partial] = make_float2(max, sum);
  return {partial * a.p.head_size, 1.0f};
}

// The results of a block in shared memory. A row has NUM_RESULTS, each over different tokens.
template <int NUM_RESULTS, int TILE_ROWS, int HEAD_SIZE>
struct alignas(16) BlockResults {
  // Rows of values begin 8 banks apart, so that the lanes of a warp, 8 rows with 4 pairs each, write without conflicts.
  static constexpr int ROW_FLOATS = HEAD_SIZE + 8;
  float2 softmax[NUM_RESULTS][TILE_ROWS];
  float values[NUM_RESULTS][TILE_ROWS][ROW_FLOATS];

  // Called after a barrier. Merges the results, and writes the rows of the tile to an out of type Out, or as partial
  // results.
  template <typename Out, int NUM_WARPS>
  __device__ void store(const AttentionArguments& a, const Work& work) const {
    merge<NUM_WARPS, RowTarget>(
        a, work,
        [&](int row, float max, float sum) { return begin_row(a, work, work.tile_begin + row, max, sum, true); },
        [&](const RowTarget& target, int, int d, const Floats<LANE_ELEMENTS>& merged) {
          target.template store<Out>(a, work, d, merged);
        });
  }

  // Called after a barrier. Merges the results into the place of the first results.
  template <int NUM_WARPS>
  __device__ void merge_in_place(const AttentionArguments& a, const Work& work) {
    merge<NUM_WARPS, NoTarget>(
        a, work,
        [&](int row, float max, float sum) {
          softmax[0][row] = make_float2(max, sum);
          return NoTarget{};
        },
        [&](NoTarget, int row, int d, const Floats<LANE_ELEMENTS>& merged) {
          *reinterpret_cast<float4*>(&values[0][row][d]) = make_float4(merged[0], merged[1], merged[2], merged[3]);
        });
  }

 private:
  // begin(row, max, sum) gives a row's Target, and store(target, row, d, merged) takes LANE_ELEMENTS of its values.
  // Each of NUM_WARPS warps has every NUM_WARPS-th row. At first each row has a lane. Then lanes lie along the head of
  // one row after the other.
  template <int NUM_WARPS, typename Target, typename Begin, typename Store>
  __device__ void merge(const AttentionArguments& a, const Work& work, const Begin& begin, const Store& store) const {
    constexpr int ROWS_OF_WARP = TILE_ROWS / NUM_WARPS;
    const int warp = threadIdx.x / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;
    const int num_rows = work.tile_end - work.tile_begin;
    float weights[NUM_RESULTS] = {};
    Target target{};
    if (const int row = warp + lane * NUM_WARPS; lane < ROWS_OF_WARP && row < num_rows) {
      const float2 merged = merge_softmax(row, weights);
      target = begin(row, merged.x, merged.y);
    }
#pragma unroll 1
    for (int i = 0; i < ROWS_OF_WARP; ++i) {
      const int row = warp + i * NUM_WARPS;
      if (row >= num_rows) break;
      float row_weights[NUM_RESULTS];
#pragma unroll
      for (int r = 0; r < NUM_RESULTS; ++r) row_weights[r] = __shfl_sync(ALL_LANES, weights[r], i);
      const Target row_target = target.of_lane(i);
      merge_values(a, row, row_weights, [&](int d, const auto& merged) { store(row_target, row, d, merged); });
    }
  }

  // Returns a row's maximum and sum, and sets the weights of its results.
  __device__ float2 merge_softmax(int row, float (&weights)[NUM_RESULTS]) const {
    float max = softmax[0][row].x;
#pragma unroll
    for (int r = 1; r < NUM_RESULTS; ++r) max = fmaxf(max, softmax[r][row].x);
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < NUM_RESULTS; ++r) {
      weights[r] = exp_below(softmax[r][row].x, max);
      sum = fmaf(softmax[r][row].y, weights[r], sum);
    }
    return make_float2(max, sum);
  }

  template <typename Store>
  __device__ void merge_values(const AttentionArguments& a, int row, const float (&weights)[NUM_RESULTS],
                               const Store& store) const {
    constexpr int WARP_ELEMENTS = WARP_SIZE * LANE_ELEMENTS;
#pragma unroll
    for (int begin = 0; begin < HEAD_SIZE; begin += WARP_ELEMENTS) {
      const int d = begin + static_cast<int>(threadIdx.x) % WARP_SIZE * LANE_ELEMENTS;
      if (d >= a.p.head_size) break;
      Floats<LANE_ELEMENTS> merged{};
#pragma unroll
      for (int r = 0; r < NUM_RESULTS; ++r) {
        const auto result = to_floats(load<LANE_ELEMENTS>(&values[r][row][d]));
#pragma unroll
        for (int i = 0; i < LANE_ELEMENTS; ++i) merged[i] = fmaf(result[i], weights[r], merged[i]);
      }
      store(d, merged);
    }
  }
};

}  // namespace pagedattn::cuda
