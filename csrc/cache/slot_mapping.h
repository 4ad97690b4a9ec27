// Where the new tokens of a batch go: the sequence and the position of each token, its slot in the cache, the lengths
// of the sequences with them, and block tables of sequences that lie one after the other. Parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

// The tokens of a batch, sequence by sequence.
struct NewTokens {
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t tokens_per_seq;  // where start_loc is not given
  Indices start_loc;       // [num_seqs + 1], from 0 to at most num_tokens

  constexpr int64_t start(int64_t seq) const { return start_loc.is_given() ? start_loc[seq] : seq * tokens_per_seq; }
  // Behind the tokens of all sequences there may be padding, which is the last row.
  constexpr int64_t num_rows() const { return num_seqs + 1; }
  constexpr int64_t end(int64_t row) const { return row == num_seqs ? num_tokens : start(row + 1); }
};

struct BatchPositionsParams : NewTokens {
  Indices first_positions;  // [num_seqs]
  int64_t step;             // from a token to the next of its sequence
  int64_t* batch_indices;   // [num_tokens]; may be nullptr
  int64_t* positions;       // [num_tokens]

  constexpr void write(int64_t row, int64_t token) const {
    const bool is_padding = row == num_seqs;
    if (batch_indices != nullptr) batch_indices[token] = is_padding ? -1 : row;
    positions[token] = is_padding ? 0 : first_positions[row] + step * (token - start(row));
  }
};

struct SlotMappingParams {
  int64_t num_tokens;
  int64_t block_size;
  Indices batch_indices;       // [num_tokens], negative: skipped; not given: token i is of sequence i
  Indices positions;           // [num_tokens]
  Indices block_tables;        // [num_seqs, max_num_blocks_per_seq]; with block_start_loc the blocks of all sequences
  int64_t block_table_stride;  // elements between sequences
  int64_t max_num_blocks_per_seq;  // where block_start_loc is not given
  Indices block_start_loc;         // [num_seqs + 1]
  int64_t* slot_mapping;           // [num_tokens]

  constexpr int64_t sequence(int64_t token) const { return batch_indices.is_given() ? batch_indices[token] : token; }
  constexpr int64_t num_blocks(int64_t seq) const {
    return block_start_loc.is_given() ? block_start_loc[seq + 1] - block_start_loc[seq] : max_num_blocks_per_seq;
  }
  constexpr int64_t block(int64_t seq, int64_t i) const {
    return block_tables[(block_start_loc.is_given() ? block_start_loc[seq] : seq * block_table_stride) + i];
  }
  constexpr void write(int64_t token) const {
    const int64_t seq = sequence(token);
    const int64_t position = positions[token];
    slot_mapping[token] = seq < 0 ? -1 : block(seq, position / block_size) * block_size + position % block_size;
  }
};

struct AppendedSlotsParams : NewTokens {
  int64_t block_size;
  Indices cached_lens;         // [num_seqs], without the new tokens
  Indices block_tables;        // [num_seqs, max_num_blocks_per_seq]
  int64_t block_table_stride;  // elements between sequences
  int64_t max_num_blocks_per_seq;
  int64_t* slot_mapping;  // [num_tokens]
  int64_t* seq_lens;      // [num_seqs], with the new tokens

  constexpr int64_t seq_len(int64_t seq) const { return cached_lens[seq] + end(seq) - start(seq); }
  constexpr int64_t block(int64_t seq, int64_t i) const { return block_tables[seq * block_table_stride + i]; }
  constexpr void write(int64_t row, int64_t token) const {
    if (row == num_seqs) {
      slot_mapping[token] = -1;
    } else {
      const int64_t position = cached_lens[row] + token - start(row);
      slot_mapping[token] = block(row, position / block_size) * block_size + position % block_size;
    }
  }
};

struct ConsecutiveBlockTablesParams {
  int64_t num_seqs;
  int64_t max_num_blocks_per_seq;
  Indices first_blocks;   // [num_seqs]
  Indices left_padding;   // [num_seqs], blocks to skip; not given: none
  int32_t* block_tables;  // [num_seqs, max_num_blocks_per_seq]

  constexpr int64_t padding(int64_t seq) const { return left_padding.is_given() ? left_padding[seq] : 0; }
  constexpr void write(int64_t seq, int64_t i) const {
    block_tables[seq * max_num_blocks_per_seq + i] = static_cast<int32_t>(first_blocks[seq] + padding(seq) + i);
  }
};

// Rows, tokens and sequences [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(batch_positions, const BatchPositionsParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(compute_slot_mapping, const SlotMappingParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(appended_slots, const AppendedSlotsParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(consecutive_block_tables, const ConsecutiveBlockTablesParams& params, int64_t begin,
                             int64_t end)

namespace cuda {
void batch_positions(const BatchPositionsParams& params, cudaStream_t stream);
void compute_slot_mapping(const SlotMappingParams& params, cudaStream_t stream);
void appended_slots(const AppendedSlotsParams& params, cudaStream_t stream);
void consecutive_block_tables(const ConsecutiveBlockTablesParams& params, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
