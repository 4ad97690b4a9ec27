#include "cache/slot_mapping.h"

#include <algorithm>

#include "append.h"
#include "index_checks.h"
#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

Indices check_given(const Door& door, const char* argument, const std::optional<Tensor>& tensor, int64_t size) {
  return tensor.has_value() ? check_indices(door, argument, *tensor, size) : Indices{};
}

HostValues values_of(const Door& door, const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? door.values(*tensor) : HostValues{};
}

// The same indices in memory that the CPU can read.
Indices on_host(const Indices& indices, const HostValues& values) { return {values.data, indices.are_int64}; }

void check_not_negative(const Door& door, const char* argument, int64_t value) {
  door.check(value >= 0, argument, "expected a number that is not negative, got ", value);
}

// Offsets from 0 to at most `largest`, which `text` explains.
void check_offsets_up_to(const Door& door, const char* argument, const Indices& starts, int64_t num_seqs,
                         int64_t largest, const char* text) {
  check_offsets(door, argument, starts, num_seqs);
  door.check(starts[num_seqs] <= largest, argument, "expected at most ", largest, " (", text, ") last, got ",
             starts[num_seqs]);
}

struct BatchPositionsCheck {
  Door door;
  const char* start_loc_argument;
  const char* first_argument;
  HostValues start_loc;
  HostValues values;            // of first_positions; with these, the others are given
  BatchPositionsParams params;  // its index tensors are those above

  void operator()() const {
    if (start_loc.are_given) {
      check_offsets_up_to(door, start_loc_argument, params.start_loc, params.num_seqs, params.num_tokens, "num_tokens");
    }
    for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
      const int64_t first = params.first_positions[seq];
      door.check(first >= 0, first_argument, "expected 0 tokens or more before those of sequence ", seq, ", got ",
                 first);
      const int64_t largest = INT32_MAX - (params.start(seq + 1) - params.start(seq));
      door.check(first <= largest, first_argument, "expected at most ", largest, ", got ", first, " at sequence ", seq);
    }
  }
};

struct SlotMappingCheck {
  Door door;
  HostValues batch_indices;
  HostValues block_tables;
  HostValues block_start_loc;
  HostValues last_block_lens;
  HostValues values;         // of positions; with these, the others are given
  SlotMappingParams params;  // its index tensors are those above
  Indices last_lens;         // likewise
  int64_t num_seqs;
  int64_t num_listed_blocks;  // of block_tables, with block_start_loc
  int64_t num_cache_blocks;

  void operator()() const {
    if (block_start_loc.are_given) {
      check_offsets_up_to(door, "block_start_loc", params.block_start_loc, num_seqs, num_listed_blocks,
                          "the size of block_tables");
    }
    if (last_block_lens.are_given) check_last_blocks();
    for (int64_t token = 0; token < params.num_tokens; ++token) {
      const int64_t seq = params.sequence(token);
      if (seq < 0) continue;
      door.check(seq < num_seqs, "batch_indices", "expected sequences below ", num_seqs, ", got ", seq, " at token ",
                 token);
      check_position(token, seq);
    }
  }
  void check_position(int64_t token, int64_t seq) const {
    const int64_t position = params.positions[token];
    const int64_t num_slots = params.num_blocks(seq) * params.block_size;
    if (position < 0 || position >= num_slots) {
      const auto [first, last] = positions_of(seq);
      door.check(false, "positions", "expected 0 or more, and room for the new tokens, got new tokens from ", first,
                 " to ", last, " in caches for ", num_slots, " tokens at sequence ", seq);
    }
    const int64_t i = position / params.block_size;
    check_block(door, params.block(seq, i), num_cache_blocks, seq, i);
  }
  void check_last_blocks() const {
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
      const bool is_within = last_lens[seq] >= 1 && last_lens[seq] <= params.block_size;
      door.check(is_within || params.num_blocks(seq) == 0, "last_block_lens", "expected 1 to ", params.block_size,
                 " (block_size), got ", last_lens[seq], " at sequence ", seq);
    }
  }
  // The first and the last position of a sequence's tokens.
  std::pair<int64_t, int64_t> positions_of(int64_t seq) const {
    int64_t first = INT64_MAX, last = INT64_MIN;
    for (int64_t token = 0; token < params.num_tokens; ++token) {
      if (params.sequence(token) != seq) continue;
      first = std::min(first, params.positions[token]);
      last = std::max(last, params.positions[token]);
    }
    return {first, last};
  }
};

struct AppendedSlotsCheck {
  Door door;
  HostValues start_loc;
  HostValues block_tables;
  HostValues values;           // of cached_lens; with these, the others are given
  AppendedSlotsParams params;  // its index tensors are those above
  int64_t num_cache_blocks;

  void operator()() const {
    if (start_loc.are_given) {
      check_offsets_up_to(door, "key_start_loc", params.start_loc, params.num_seqs, params.num_tokens,
                          "num_new_tokens");
    }
    for (int64_t seq = 0; seq < params.num_seqs; ++seq) check_sequence(seq);
  }
  void check_sequence(int64_t seq) const {
    const int64_t first = params.cached_lens[seq], num_new = params.end(seq) - params.start(seq);
    const int64_t num_slots = std::min<int64_t>(params.max_num_blocks_per_seq * params.block_size, MAX_TOKENS);
    door.check(first >= 0 && first <= num_slots - num_new, "cached_lens",
               "expected 0 or more, and room for the new tokens, got ", num_new, " new tokens from ", first,
               " on in caches for ", num_slots, " tokens at sequence ", seq);
    const int64_t end = (first + num_new + params.block_size - 1) / params.block_size;
    for (int64_t i = first / params.block_size; num_new > 0 && i < end; ++i) {
      check_block(door, params.block(seq, i), num_cache_blocks, seq, i);
    }
  }
};

struct ConsecutiveBlockTablesCheck {
  Door door;
  HostValues first_blocks;
  HostValues end_blocks;
  HostValues left_padding;
  HostValues values;                    // of seq_lens; with these, the others are given
  ConsecutiveBlockTablesParams params;  // its index tensors are those above
  Indices ends;                         // likewise
  Indices seq_lens;
  int64_t num_blocks;

  void operator()() const {
    for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
      const int64_t first = params.first_blocks[seq], end = ends[seq], length = seq_lens[seq];
      const int64_t padding = params.padding(seq);
      door.check(first >= 0, "first_blocks", "expected 0 or more, got ", first, " at sequence ", seq);
      door.check(end >= first && end <= num_blocks, "end_blocks", "expected ", first, " (the first block) to ",
                 num_blocks, ", got ", end, " at sequence ", seq);
      door.check(length >= 0 && length <= end - first, "seq_lens", "expected 0 to ", end - first,
                 " (the sequence's own tokens), got ", length, " at sequence ", seq);
      door.check(padding >= 0 && padding <= length, "left_padding", "expected 0 to ", length,
                 " (the length of the sequence), got ", padding, " at sequence ", seq);
      door.check(length - padding <= params.max_num_blocks_per_seq, "max_num_blocks_per_seq", "expected at least ",
                 length - padding, " (the tokens of sequence ", seq, "), got ", params.max_num_blocks_per_seq);
    }
  }
};

// num_tokens and where the tokens of each of num_seqs sequences begin.
NewTokens new_tokens(const Door& door, const PositionNames& names, int64_t num_tokens, int64_t num_seqs,
                     const std::optional<Tensor>& start_loc) {
  check_not_negative(door, names.tokens, num_tokens);
  NewTokens tokens{num_tokens, num_seqs, 0, check_given(door, names.start_loc, start_loc, num_seqs + 1)};
  if (!start_loc.has_value()) {
    tokens.tokens_per_seq = num_tokens / std::max<int64_t>(num_seqs, 1);
    door.check(tokens.tokens_per_seq * num_seqs == num_tokens, names.tokens, "expected a multiple of the ", num_seqs,
               " sequences (no ", names.start_loc, " is given), got ", num_tokens);
  }
  return tokens;
}

// Without results.
BatchPositionsParams positions_params(const Door& door, const PositionNames& names, int64_t num_tokens,
                                      const Tensor& first_positions, const std::optional<Tensor>& start_loc,
                                      int64_t step) {
  const Indices first = check_indices(door, names.first_positions, first_positions, ANY);
  return {new_tokens(door, names, num_tokens, first_positions.size(0), start_loc), first, step, nullptr, nullptr};
}

void write_positions(const Door& door, const PositionNames& names, const BatchPositionsParams& params,
                     const Tensor& first_positions, const std::optional<Tensor>& start_loc) {
  BatchPositionsCheck check{
      door, names.start_loc, names.first_positions, values_of(door, start_loc), door.values(first_positions), params};
  check.params.start_loc = on_host(params.start_loc, check.start_loc);
  check.params.first_positions = on_host(params.first_positions, check.values);
  run_rows<AtCapture::KEPT_AND_RUN>(door, check, PAGEDATTN_ROW_KERNELS(batch_positions), params, params.num_rows(),
                                    (params.num_tokens + params.num_seqs) / params.num_rows());
}

}  // namespace

std::tuple<Tensor, Tensor> batch_positions(const std::optional<Tensor>& start_loc, const Tensor& first_positions,
                                           int64_t num_tokens) {
  const Door door("batch_positions", first_positions);
  constexpr PositionNames names{"num_tokens", "first_positions", "start_loc"};
  BatchPositionsParams params = positions_params(door, names, num_tokens, first_positions, start_loc, 1);
  const Tensor batch_indices = torch::stable::new_empty(first_positions, {&num_tokens, 1}, ScalarType::Long);
  const Tensor positions = torch::stable::new_empty(first_positions, {&num_tokens, 1}, ScalarType::Long);
  params.batch_indices = batch_indices.mutable_data_ptr<int64_t>();
  params.positions = positions.mutable_data_ptr<int64_t>();
  write_positions(door, names, params, first_positions, start_loc);
  return {batch_indices, positions};
}

Tensor token_positions(const Door& door, const PositionNames& names, const Tensor& tokens,
                       const Tensor& first_positions, const std::optional<Tensor>& start_loc, bool are_one_apart) {
  const auto sizes = tokens.sizes().slice(0, tokens.dim() - 2);
  int64_t num_tokens = 1;
  for (int64_t size : sizes) num_tokens *= size;
  BatchPositionsParams params =
      positions_params(door, names, num_tokens, first_positions, start_loc, are_one_apart ? 1 : 0);
  const Tensor positions = torch::stable::new_empty(first_positions, sizes, ScalarType::Long);
  CpuGraph::keep(positions);
  params.positions = positions.mutable_data_ptr<int64_t>();
  write_positions(door, names, params, first_positions, start_loc);
  return positions;
}

Tensor compute_slot_mapping(const Tensor& positions, const Tensor& block_tables, int64_t block_size, int64_t num_blocks,
                            const std::optional<Tensor>& batch_indices, const std::optional<Tensor>& block_start_loc,
                            const std::optional<Tensor>& last_block_lens) {
  const Door door("compute_slot_mapping", positions);
  SlotMappingParams params{};
  params.positions = check_indices(door, "positions", positions, ANY);
  params.num_tokens = positions.size(0);
  door.check(block_size > 0 && block_size <= INT32_MAX, "block_size", "expected 1 to ", INT32_MAX, ", got ",
             block_size);
  params.block_size = block_size;
  check_num_blocks(door, "num_blocks", num_blocks);
  params.batch_indices = check_given(door, "batch_indices", batch_indices, params.num_tokens);

  door.present("block_tables", block_tables);
  params.block_tables = door.indices("block_tables", block_tables);
  int64_t num_seqs = 0;
  if (block_start_loc.has_value()) {
    params.block_start_loc = check_indices(door, "block_start_loc", *block_start_loc, ANY);
    num_seqs = block_start_loc->size(0) - 1;
    door.check(num_seqs >= 0, "block_start_loc", "expected at least 1 element, got 0");
    door.rank("block_tables", block_tables, 1);
    door.contiguous("block_tables", block_tables);
  } else {
    door.rank("block_tables", block_tables, 2);
    door.contiguous_from("block_tables", block_tables, 1);
    num_seqs = block_tables.size(0);
    params.block_table_stride = block_tables.stride(0);
    params.max_num_blocks_per_seq = block_tables.size(1);
  }
  door.check(batch_indices.has_value() || params.num_tokens == num_seqs, "positions",
             "expected one token for each of the ", num_seqs, " sequences (no batch_indices are given), got ",
             params.num_tokens);
  const Indices last_lens = check_given(door, "last_block_lens", last_block_lens, num_seqs);

  const Tensor slot_mapping = torch::stable::new_empty(positions, {&params.num_tokens, 1}, ScalarType::Long);
  params.slot_mapping = slot_mapping.mutable_data_ptr<int64_t>();
  SlotMappingCheck check{door,
                         values_of(door, batch_indices),
                         door.values(block_tables),
                         values_of(door, block_start_loc),
                         values_of(door, last_block_lens),
                         door.values(positions),
                         params,
                         last_lens,
                         num_seqs,
                         block_tables.size(0),
                         num_blocks};
  check.params.batch_indices = on_host(params.batch_indices, check.batch_indices);
  check.params.positions = on_host(params.positions, check.values);
  check.params.block_tables = on_host(params.block_tables, check.block_tables);
  if (check.block_tables.fetched.has_value()) check.params.block_table_stride = check.block_tables.fetched->stride(0);
  check.params.block_start_loc = on_host(params.block_start_loc, check.block_start_loc);
  check.last_lens = on_host(last_lens, check.last_block_lens);
  run_rows<AtCapture::KEPT_AND_RUN>(door, check, PAGEDATTN_ROW_KERNELS(compute_slot_mapping), params, params.num_tokens,
                                    1);
  return slot_mapping;
}

AppendedSlots append_slots(const Door& door, int64_t num_tokens, const Tensor& block_tables, const Tensor& cached_lens,
                           const std::optional<Tensor>& key_start_loc, int64_t block_size, int64_t num_cache_blocks) {
  const Indices lens = check_indices(door, "cached_lens", cached_lens, ANY);
  AppendedSlotsParams params{};
  static_cast<NewTokens&>(params) =
      new_tokens(door, {"key", "cached_lens", "key_start_loc"}, num_tokens, cached_lens.size(0), key_start_loc);
  params.block_size = block_size;
  params.cached_lens = lens;
  params.block_tables = check_block_tables(door, block_tables, params.num_seqs);
  params.block_table_stride = block_tables.stride(0);
  params.max_num_blocks_per_seq = block_tables.size(1);

  const AppendedSlots slots{torch::stable::new_empty(cached_lens, {&num_tokens, 1}, ScalarType::Long),
                            torch::stable::new_empty(cached_lens, {&params.num_seqs, 1}, ScalarType::Long)};
  CpuGraph::keep(slots);
  params.slot_mapping = slots.slot_mapping.mutable_data_ptr<int64_t>();
  params.seq_lens = slots.seq_lens.mutable_data_ptr<int64_t>();
  AppendedSlotsCheck check{door,
                           values_of(door, key_start_loc),
                           door.values(block_tables),
                           door.values(cached_lens),
                           params,
                           num_cache_blocks};
  check.params.start_loc = on_host(params.start_loc, check.start_loc);
  check.params.block_tables = on_host(params.block_tables, check.block_tables);
  if (check.block_tables.fetched.has_value()) check.params.block_table_stride = check.block_tables.fetched->stride(0);
  check.params.cached_lens = on_host(params.cached_lens, check.values);
  run_rows<AtCapture::KEPT_AND_RUN>(door, check, PAGEDATTN_ROW_KERNELS(appended_slots), params, params.num_rows(),
                                    (num_tokens + params.num_seqs) / params.num_rows() + 1);
  return slots;
}

Tensor consecutive_block_tables(const Tensor& first_blocks, const Tensor& end_blocks, const Tensor& seq_lens,
                                int64_t max_num_blocks_per_seq, int64_t num_blocks,
                                const std::optional<Tensor>& left_padding) {
  const Door door("consecutive_block_tables", seq_lens);
  ConsecutiveBlockTablesParams params{};
  const Indices lengths = check_indices(door, "seq_lens", seq_lens, ANY);
  params.num_seqs = seq_lens.size(0);
  params.first_blocks = check_indices(door, "first_blocks", first_blocks, params.num_seqs);
  const Indices ends = check_indices(door, "end_blocks", end_blocks, params.num_seqs);
  params.left_padding = check_given(door, "left_padding", left_padding, params.num_seqs);
  check_not_negative(door, "max_num_blocks_per_seq", max_num_blocks_per_seq);
  params.max_num_blocks_per_seq = max_num_blocks_per_seq;
  check_num_blocks(door, "num_blocks", num_blocks);
  const int64_t sizes[] = {params.num_seqs, max_num_blocks_per_seq};
  const Tensor block_tables = torch::stable::new_empty(seq_lens, {sizes, 2}, ScalarType::Int);
  params.block_tables = block_tables.mutable_data_ptr<int32_t>();

  ConsecutiveBlockTablesCheck check{door,
                                    door.values(first_blocks),
                                    door.values(end_blocks),
                                    values_of(door, left_padding),
                                    door.values(seq_lens),
                                    params,
                                    ends,
                                    lengths,
                                    num_blocks};
  check.params.first_blocks = on_host(params.first_blocks, check.first_blocks);
  check.params.left_padding = on_host(params.left_padding, check.left_padding);
  check.ends = on_host(ends, check.end_blocks);
  check.seq_lens = on_host(lengths, check.values);
  run_rows<AtCapture::KEPT_AND_RUN>(door, check, PAGEDATTN_ROW_KERNELS(consecutive_block_tables), params,
                                    params.num_seqs, max_num_blocks_per_seq);
  return block_tables;
}

}  // namespace pagedattn
