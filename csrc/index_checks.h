// Checks of index tensors, for ops of several families.
#pragma once

#include "door.h"

namespace pagedattn {

// The elements of a contiguous tensor of int32 or int64 [size] on the op's device.
inline Indices check_indices(const Door& door, const char* argument, const Tensor& tensor, int64_t size) {
  const Indices indices = door.indices(argument, tensor);
  door.present(argument, tensor);
  door.shape(argument, tensor, {size});
  door.contiguous(argument, tensor);
  return indices;
}

// Values: where each sequence (or what `of` says) begins, and the last one ends. Offsets begin at 0 and do not
// decrease.
inline void check_offsets(const Door& door, const char* argument, const Indices& starts, int64_t num_seqs,
                          const char* of = "sequence") {
  door.check(starts[0] == 0, argument, "expected 0 first, got ", starts[0]);
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    door.check(starts[seq] <= starts[seq + 1], argument, "expected offsets that do not decrease, got ", starts[seq],
               " and then ", starts[seq + 1], " at ", of, " ", seq);
  }
}

// Of a cache. Kernels have a block's index in int32 (Indices::low), and a block times a block size is a slot of int64.
inline void check_num_blocks(const Door& door, const char* argument, int64_t num_blocks) {
  door.check(num_blocks >= 0 && num_blocks <= INT32_MAX, argument, "expected 0 to ", INT32_MAX, " blocks, got ",
             num_blocks);
}

}  // namespace pagedattn
