// Index arithmetic, token by token.
#include "cache/slot_mapping.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {

void batch_positions(const BatchPositionsParams& params, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t token = params.start(row); token < params.end(row); ++token) params.write(row, token);
  }
}

void compute_slot_mapping(const SlotMappingParams& params, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) params.write(token);
}

void appended_slots(const AppendedSlotsParams& params, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t token = params.start(row); token < params.end(row); ++token) params.write(row, token);
    if (row < params.num_seqs) params.seq_lens[row] = params.seq_len(row);
  }
}

void consecutive_block_tables(const ConsecutiveBlockTablesParams& params, int64_t begin, int64_t end) {
  for (int64_t seq = begin; seq < end; ++seq) {
    for (int64_t i = 0; i < params.max_num_blocks_per_seq; ++i) params.write(seq, i);
  }
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
