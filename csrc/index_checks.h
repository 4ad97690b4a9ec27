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

// The same of offsets whose last is `total`, the number of `rows`.
inline void check_offsets_to(const Door& door, const char* argument, const Indices& starts, int64_t num_seqs,
                             int64_t total, const char* rows, const char* of = "sequence") {
  check_offsets(door, argument, starts, num_seqs, of);
  door.check(starts[num_seqs] == total, argument, "expected the number of ", rows, ", ", total, ", last, got ",
             starts[num_seqs]);
}

// A row for each of num_seqs sequences, any number of elements apart.
inline Indices check_block_tables(const Door& door, const Tensor& block_tables, int64_t num_seqs) {
  const Indices indices = door.indices("block_tables", block_tables);
  door.present("block_tables", block_tables);
  door.shape("block_tables", block_tables, {num_seqs, ANY});
  door.contiguous_from("block_tables", block_tables, 1);
  return indices;
}

// Values: a block that is used is in the cache.
inline void check_block(const Door& door, int64_t block, int64_t num_blocks, int64_t seq, int64_t entry) {
  door.check(num_blocks > 0, "block_tables", "expected no blocks, as the cache has none, got ", block, " at sequence ",
             seq, ", entry ", entry);
  door.check(block >= 0 && block < num_blocks, "block_tables", "expected blocks of 0 to ", num_blocks - 1, ", got ",
             block, " at sequence ", seq, ", entry ", entry);
}

// Of a cache. Kernels have a block's index in int32 (Indices::low), and a block times a block size is a slot of int64.
inline void check_num_blocks(const Door& door, const char* argument, int64_t num_blocks) {
  door.check(num_blocks >= 0 && num_blocks <= INT32_MAX, argument, "expected 0 to ", INT32_MAX, " blocks, got ",
             num_blocks);
}

}  // namespace pagedattn
