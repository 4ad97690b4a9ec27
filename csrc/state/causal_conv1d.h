// causal_conv1d: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "state/sequences.h"

namespace pagedattn {

constexpr int MAX_CONV_WIDTH = 8;
constexpr int MAX_CONV_STATE_LEN = 32;
constexpr int64_t CONV_TILE = 256;  // channels of an item on the CPU

struct CausalConv1dParams {
  DType dtype;
  DType weight_dtype;
  StateSequences sequences;
  int64_t dim;
  int64_t width;
  int64_t state_len;  // width - 1 or more
  const void* input;  // [num_tokens, dim]
  int64_t input_stride;
  void* out;  // [num_tokens, dim]
  int64_t out_stride;
  void* conv_states;         // [num_slots, dim, state_len], the latest row last
  int64_t state_strides[3];  // elements
  const void* weight;        // [dim, width]
  const void* bias;          // [dim]; nullptr: none
  bool silu;

  constexpr int64_t num_tiles() const { return (dim + CONV_TILE - 1) / CONV_TILE; }
};

// Tiles [begin, end) of the channels, of all sequences.
PAGEDATTN_DECLARE_CPU_KERNEL(causal_conv1d, const CausalConv1dParams& params, int64_t begin, int64_t end)

namespace cuda {
void causal_conv1d(const CausalConv1dParams& params, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
