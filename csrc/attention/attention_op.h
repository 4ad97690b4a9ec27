// What the ops of attention share: checks of their arguments, and the run of a plan on the CPU's threads.
#pragma once

#include <algorithm>
#include <memory>

#include "index_checks.h"
#include "parallel.h"

namespace pagedattn {

// `rows` says what there are `num_rows` of.
inline void check_count(const Door& door, const char* argument, int64_t num_rows, const char* rows,
                        int64_t most = MAX_TOKENS) {
  door.check(num_rows <= most, argument, "expected at most ", most, " ", rows, ", got ", num_rows);
}

// Sets the tables and the rows of the sequences. num_tokens and num_seqs are set. `rows` is the argument that has a row
// for each token.
template <typename Params>
void set_tables_and_rows(const Door& door, const char* rows, const Tensor& block_tables,
                         const std::optional<Tensor>& query_start_loc, Params& params) {
  params.block_tables = check_block_tables(door, block_tables, params.num_seqs);
  params.block_table_stride = block_tables.stride(0);
  if (query_start_loc.has_value()) {
    params.query_start_loc = check_indices(door, "query_start_loc", *query_start_loc, params.num_seqs + 1);
  } else {
    door.check(params.num_tokens == params.num_seqs, rows, "expected one row for each of the ", params.num_seqs,
               " sequences (no query_start_loc is given), got ", params.num_tokens);
  }
}

// What the index tensors of an op over a cache hold.
template <typename Params>
struct BlockCheck {
  Door door;
  HostValues block_tables;
  HostValues values;  // of seq_lens; with these, all others are given
  HostValues query_start_loc;
  Params params;       // its index tensors are those above
  int64_t num_blocks;  // of the cache
  int64_t max_blocks_per_seq;

  // Every length is within the table, and every block that a row sees is within the cache.
  void operator()() const {
    if (query_start_loc.are_given) {
      check_offsets_to(door, "query_start_loc", params.query_start_loc, params.num_seqs, params.num_tokens,
                       "query rows");
    }
    const int64_t num_slots = std::min<int64_t>(max_blocks_per_seq * params.block_size, MAX_TOKENS);
    for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
      const int64_t seq_len = params.seq_lens[seq];
      door.check(seq_len >= 0 && seq_len <= num_slots, "seq_lens", "expected 0 to ", num_slots,
                 " (the slots of a row of block_tables), got ", seq_len, " at sequence ", seq);
      if (params.row_begin(seq) == params.row_end(seq)) continue;
      const Indices table = params.block_table(seq);
      const int64_t end = (seq_len + params.block_size - 1) / params.block_size;
      for (int64_t i = params.first_seen(seq) / params.block_size; i < end; ++i) {
        check_block(door, table[i], num_blocks, seq, i);
      }
    }
  }
};

template <typename Params>
BlockCheck<Params> block_check(const Door& door, const Params& params, const Tensor& block_tables,
                               const Tensor& seq_lens, const std::optional<Tensor>& query_start_loc,
                               int64_t num_blocks) {
  BlockCheck<Params> check{door,
                           door.values(block_tables),
                           door.values(seq_lens),
                           query_start_loc.has_value() ? door.values(*query_start_loc) : HostValues{},
                           params,
                           num_blocks,
                           block_tables.size(1)};
  check.params.block_tables.data = check.block_tables.data;
  if (check.block_tables.fetched.has_value()) check.params.block_table_stride = check.block_tables.fetched->stride(0);
  check.params.seq_lens.data = check.values.data;
  check.params.query_start_loc.data = check.query_start_loc.data;
  return check;
}

// A line of the CPU's caches. In memory that is aligned to lines, no vector lies in two lines, and no two threads write
// to the same line.
struct alignas(64) CacheLine {
  float floats[16];
};

// Runs the items of a plan, and then its merges, on the CPU's threads: attend(i, num_workers, scratch, partials) and
// merge(i, scratch, partials). Each worker has `scratch_floats` of its own.
template <typename Plan, typename Attend, typename Merge>
void run_plan(const Plan& plan, int64_t scratch_floats, const Attend& attend, const Merge& merge) {
  const auto num_items = static_cast<int64_t>(plan.items.size());
  if (num_items == 0) return;
  const int64_t num_workers = num_workers_for(plan.multiply_adds, num_items);
  const auto partials = std::make_unique_for_overwrite<float[]>(plan.partial_floats);
  const int64_t scratch_lines = (scratch_floats + 15) / 16;
  const auto scratch = std::make_unique_for_overwrite<CacheLine[]>(num_workers * scratch_lines);
  const auto scratch_of = [&](int64_t worker) { return scratch[worker * scratch_lines].floats; };

  parallel_for_items(num_items, num_workers,
                     [&](int64_t i, int64_t worker) { attend(i, num_workers, scratch_of(worker), partials.get()); });
  const auto num_merges = static_cast<int64_t>(plan.merges.size());
  parallel_for_items(num_merges, std::min(num_merges, num_workers),
                     [&](int64_t i, int64_t worker) { merge(i, scratch_of(worker), partials.get()); });
}

}  // namespace pagedattn
