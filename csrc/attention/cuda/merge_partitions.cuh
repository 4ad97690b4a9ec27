// The end of a row whose tokens were split: the results of its partitions are merged. They are in the scratch, for
// merge_kernel, or in the shared memory of a cluster's blocks. Both ways compute the same, to the last bit.
#pragma once

#include "attention/cuda/row_results.cuh"

namespace pagedattn::cuda {

// A row's partial results in the scratch.
struct ScratchPartials {
  const float2* softmax_of;  // [num_partitions]
  const float* values_of;    // [num_partitions, head_size]
  int head_size;

  __device__ float2 softmax(int partition) const { return softmax_of[partition]; }
  __device__ Packed<float, LANE_ELEMENTS> values(int partition, int d) const {
    return load<LANE_ELEMENTS>(values_of + partition * head_size + d);
  }
};

// A row's partial results in the blocks of a cluster. A block has one partition, and its result is in the place of the
// block's first results.
template <typename Results>
struct ClusterPartials {
  const Results& results;
  int row;

  __device__ float2 softmax(int partition) const {
    uint32_t words[2];
    ptx::load_cluster(words, ptx::map_shared(&results.softmax[0][row], partition));
    return make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
  }
  __device__ Packed<float, LANE_ELEMENTS> values(int partition, int d) const {
    Packed<float, LANE_ELEMENTS> packed;
    ptx::load_cluster(packed.words, ptx::map_shared(&results.values[0][row][d], partition));
    return packed;
  }
};

// The values of 8 partitions. A lane has 4 elements of each partition, 16 bytes. All 8 loads are under way together.
class PartitionValues {
 public:
  static constexpr int COUNT = 8;

  // Loads elements [d, d + 4) of up to COUNT partitions, from `partition` on.
  template <typename Partials>
  __device__ void load(const Partials& partials, int d, int partition, int num_partitions) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (partition + i < num_partitions) values_[i] = partials.values(partition + i, d);
    }
  }

  // sum += values * weights; lane i of the warp has the weight of partition i.
  __device__ void add(Floats<LANE_ELEMENTS>& sum, float weight_of_lane, int partition, int num_partitions) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (partition + i >= num_partitions) break;
      const float weight = __shfl_sync(ALL_LANES, weight_of_lane, partition + i);
      const auto values = to_floats(values_[i]);
#pragma unroll
      for (int e = 0; e < LANE_ELEMENTS; ++e) sum[e] = fmaf(values[e], weight, sum[e]);
    }
  }

 private:
  Packed<float, LANE_ELEMENTS> values_[COUNT];
};

// A warp merges the partitions of a row of out, which is of type Out. At first each lane has the maximum and sum of a
// partition. Then lanes lie along the head.
template <typename Out, typename Partials>
__device__ void merge_partitions(const AttentionArguments& a, const Partials& partials, int num_partitions, int64_t row,
                                 int head) {
  const auto lane = static_cast<int>(threadIdx.x % WARP_SIZE);
  const auto head_size = static_cast<int>(a.p.head_size);
  const auto column = [&](int begin) { return min(begin + lane * LANE_ELEMENTS, head_size - LANE_ELEMENTS); };
  PartitionValues batch;
  batch.load(partials, column(0), 0, num_partitions);  // under way while the weights are computed

  const float2 softmax = lane < num_partitions ? partials.softmax(lane) : make_float2(-INFINITY, 0.0f);
  const float max = warp_max(softmax.x);
  const float weight = exp_below(softmax.x, max);
  const float sum = warp_sum(softmax.y * weight);
  const float factor = finish_row(a, row, head, max, sum, lane == 0);

  for (int begin = 0; begin < head_size; begin += WARP_SIZE * LANE_ELEMENTS) {
    Floats<LANE_ELEMENTS> merged{};
    for (int partition = 0; partition < num_partitions; partition += PartitionValues::COUNT) {
      if (begin + partition > 0) batch.load(partials, column(begin), partition, num_partitions);
      batch.add(merged, weight, partition, num_partitions);
    }
#pragma unroll
    for (int e = 0; e < LANE_ELEMENTS; ++e) merged[e] *= factor;
    const int d = begin + lane * LANE_ELEMENTS;
    if (d < head_size) store_out<Out>(a, row * a.p.out_stride + head * a.p.head_size + d, merged);
  }
}

// Merges the rows of a tile in a cluster along y, between the cluster's barriers. The warps of all blocks that have a
// partition take the rows in turns.
template <typename Out, int NUM_WARPS, typename Results>
__device__ void merge_cluster(const AttentionArguments& a, const Work& work, const Results& results) {
  const int num_rows = work.tile_end - work.tile_begin;
  const int first = static_cast<int>(blockIdx.y + threadIdx.x / WARP_SIZE * work.num_partitions);
  for (int row = first; row < num_rows; row += NUM_WARPS * work.num_partitions) {
    const int packed = work.tile_begin + row;
    merge_partitions<Out>(a, ClusterPartials<Results>{results, row}, work.num_partitions, row_of(a, work, packed),
                          head_of(a, work, packed));
  }
}

}  // namespace pagedattn::cuda
