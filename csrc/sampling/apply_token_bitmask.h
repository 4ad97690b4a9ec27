// apply_token_bitmask: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

// How many tokens a word of a mask has bits for. Bit i of word w is set where token 32 w + i is allowed.
constexpr int TOKENS_PER_WORD = 32;

struct ApplyTokenBitmaskParams {
  DType dtype;
  int64_t num_masks;
  int64_t vocab_size;
  void* logits;            // [num_rows, vocab_size]; becomes -inf where a token is not allowed
  int64_t logits_stride;   // elements between rows
  const int32_t* bitmask;  // [num_masks, at least ceil(vocab_size / TOKENS_PER_WORD)]
  int64_t bitmask_stride;
  const int64_t* indices;  // [num_masks], the row of each mask, all different; nullptr: mask i is for row i
};

// Masks [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(apply_token_bitmask, const ApplyTokenBitmaskParams& params, int64_t begin, int64_t end)

namespace cuda {
void apply_token_bitmask(const ApplyTokenBitmaskParams& params, cudaStream_t stream);
}

}  // namespace pagedattn
