// The sequences of a call of a state op: which rows each has, and in which slot its state lies. And numbers that each
// row has for each head.
#pragma once

#include "types.h"

namespace pagedattn {

struct StateSequences {
  int64_t num_seqs;
  int64_t num_tokens;
  Indices query_start_loc;        // [num_seqs + 1]; not given: one row a sequence
  Indices state_indices;          // [num_seqs], -1 is padding; not given: sequence s has slot s
  const bool* has_initial_state;  // [num_seqs]; nullptr: all have

  // Sequence `seq` has rows [first_row(seq), first_row(seq + 1)).
  constexpr int64_t first_row(int64_t seq) const { return query_start_loc.is_given() ? query_start_loc[seq] : seq; }
  constexpr int64_t slot(int64_t seq) const { return state_indices.is_given() ? state_indices[seq] : seq; }
  // Whether the state before the sequence's rows is zeros.
  constexpr bool begins(int64_t seq) const { return has_initial_state != nullptr && !has_initial_state[seq]; }
};

struct HeadNumbers {
  const void* data;  // [num_tokens, num_heads], of fp32 or of the rows' dtype
  int64_t stride;    // elements between rows
  DType dtype;
};

}  // namespace pagedattn
