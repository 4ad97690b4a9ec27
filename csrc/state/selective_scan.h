// selective_scan: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "state/sequences.h"

namespace pagedattn {

constexpr int64_t MAX_STATE_SIZE = 256;
constexpr int64_t SCAN_CHANNELS = 32;  // of an item on the CPU

// A channel is one of the num_heads * head_dim channels of a row; its state is state_size numbers.
struct SelectiveScanParams {
  DType dtype;
  StateSequences sequences;
  int64_t num_heads;
  int64_t head_dim;
  int64_t num_groups;  // of heads that share B and C
  int64_t state_size;
  const void* input;  // [num_tokens, num_heads, head_dim]
  int64_t input_stride;
  HeadNumbers dt;
  const float* a;      // [num_heads], or [num_heads, state_size]
  bool a_is_by_state;  // the second
  const void* b;       // [num_tokens, num_groups, state_size]
  int64_t b_stride;
  const void* c;  // [num_tokens, num_groups, state_size]
  int64_t c_stride;
  float* states;  // [num_slots, num_heads, head_dim, state_size]
  int64_t state_stride;
  const float* d;        // [num_heads]; nullptr: zeros
  const float* dt_bias;  // [num_heads]; nullptr: zeros
  bool dt_softplus;
  float least_step;
  float greatest_step;
  const void* z;  // [num_tokens, num_heads, head_dim]; nullptr: no gate
  int64_t z_stride;
  void* out;  // [num_tokens, num_heads, head_dim]
  int64_t out_stride;

  constexpr int64_t channels_per_group() const { return num_heads / num_groups * head_dim; }
  constexpr int64_t tiles_per_group() const { return (channels_per_group() + SCAN_CHANNELS - 1) / SCAN_CHANNELS; }
};

// Items [begin, end). Item i is tile i % tiles of the channels of sequence i / tiles, with tiles_per_group() tiles for
// each group.
PAGEDATTN_DECLARE_CPU_KERNEL(selective_scan, const SelectiveScanParams& params, int64_t begin, int64_t end)

namespace cuda {
void selective_scan(const SelectiveScanParams& params, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
