// Sequences with few rows (decode) read far more than they compute. An item of decode is one partition with all KV
// heads, so that blocks are read front to back, and long sequences spread over the threads. On one thread, an item of
// decode has all partitions. Sequences with many rows (prefill) compute more than they read. An item of prefill is some
// rows and one KV head with all partitions, so that the state of the rows stays in cache and nothing needs merging.
//
// Decode sequences that begin a partition with the same block (parallel samples, beams, hits of a prefix cache) have
// items in common for this partition. Over a tile of tokens that is the same for all these sequences, the kernel takes
// their rows together. Over any other tile, the kernel takes one sequence after the other. So what is found here
// decides about speed alone. Each partition is searched by itself: where a sequence has a sliding window, the first
// blocks of its table may be anything.
#include "attention/cpu/plan_items.h"

#include <algorithm>
#include <utility>

namespace pagedattn {
namespace {

constexpr int64_t MAX_DECODE_ROWS = 8;
constexpr int64_t SHARED_RESULTS = 64;  // (row, head) pairs of an item whose sequences share blocks

struct PartitionRange {
  int64_t begin, end;
};

// A sequence with few rows.
struct Decode {
  int64_t row_begin, row_end;  // of the plan's rows
  PartitionRange partitions;   // that are not yet in an item
  bool is_partial;             // its partitions are in several items
};

// Sequences that share blocks of these partitions.
struct SharedPart {
  PartitionRange partitions;
  std::vector<size_t> decodes;  // sequences with more blocks in common are neighbours
};

// The blocks of a partition that a sequence sees.
struct VisibleBlocks {
  int64_t first;  // in the sequence's table
  Indices ids;    // [num_blocks]
  int64_t num_blocks;
  size_t decode;
};

bool begin_alike(const VisibleBlocks& a, const VisibleBlocks& b) { return a.first == b.first && a.ids[0] == b.ids[0]; }

bool is_before(const VisibleBlocks& a, const VisibleBlocks& b) {
  if (a.first != b.first) return a.first < b.first;
  const int64_t num_blocks = std::min(a.num_blocks, b.num_blocks);
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (a.ids[i] != b.ids[i]) return a.ids[i] < b.ids[i];
  }
  return a.num_blocks != b.num_blocks ? a.num_blocks < b.num_blocks : a.decode < b.decode;
}

class Planner {
 public:
  Planner(const PagedAttentionParams& params, int64_t num_threads, int64_t prefill_results)
      : p_(params),
        num_threads_(num_threads),
        prefill_results_(prefill_results),
        group_size_(params.num_heads / params.num_kv_heads) {}

  ItemPlan plan() {
    for (int32_t seq = 0; seq < p_.num_seqs; ++seq) {
      const int64_t num_rows = p_.row_end(seq) - p_.row_begin(seq);
      if (num_rows == 0) continue;
      plan_.multiply_adds += 2 * num_rows * p_.num_heads * p_.head_size * p_.seq_len(seq);
      const auto begin = static_cast<int64_t>(plan_.rows.size());
      for (int64_t row = p_.row_begin(seq); row < p_.row_end(seq); ++row) {
        plan_.rows.push_back({seq, row, p_.position(seq, row), -1});
      }
      if (num_rows <= MAX_DECODE_ROWS) {
        decodes_.push_back({begin, begin + num_rows, visible_partitions(begin, begin + num_rows), false});
      } else {
        add_prefill(begin, begin + num_rows);
      }
    }
    add_decodes();
    return std::move(plan_);
  }

 private:
  // The partitions with tokens that any of these rows of a sequence sees; empty if there is none.
  PartitionRange visible_partitions(int64_t row_begin, int64_t row_end) const {
    const AttentionRow& last_row = plan_.rows[row_end - 1];
    const int64_t visible_end = p_.visible_end(last_row.seq, last_row.position);
    if (visible_end <= 0) return {0, 0};
    return {p_.first_visible(plan_.rows[row_begin].position) / PARTITION_TOKENS,
            (visible_end + PARTITION_TOKENS - 1) / PARTITION_TOKENS};
  }

  VisibleBlocks visible_blocks(size_t decode, int64_t partition) const {
    const AttentionRow& first_row = plan_.rows[decodes_[decode].row_begin];
    const AttentionRow& last_row = plan_.rows[decodes_[decode].row_end - 1];
    const int64_t begin = std::max(partition * PARTITION_TOKENS, p_.first_visible(first_row.position));
    const int64_t end = std::min((partition + 1) * PARTITION_TOKENS, p_.visible_end(last_row.seq, last_row.position));
    const int64_t first = begin / p_.block_size;
    return {first, p_.block_table(first_row.seq).from(first), (end + p_.block_size - 1) / p_.block_size - first,
            decode};
  }

  void add_item(int64_t row_begin, int64_t row_end, int64_t head_begin, int64_t head_end, PartitionRange partitions,
                bool is_partial) {
    plan_.items.push_back({row_begin, row_end, head_begin, head_end, partitions.begin, partitions.end, is_partial});
  }

  // Calls function for all partitions at once; or, where several threads could share them, for one at a time.
  template <typename Function>
  void for_each_range(PartitionRange partitions, const Function& function) const {
    if (num_threads_ == 1) return function(partitions);
    for (int64_t i = partitions.begin; i < partitions.end; ++i) function(PartitionRange{i, i + 1});
  }

  void add_prefill(int64_t row_begin, int64_t row_end) {
    const int64_t item_rows = std::max<int64_t>(1, prefill_results_ / group_size_);
    for (int64_t begin = row_begin; begin < row_end; begin += item_rows) {
      const int64_t end = std::min(begin + item_rows, row_end);
      for (int64_t head = 0; head < p_.num_kv_heads; ++head) {
        add_item(begin, end, head, head + 1, visible_partitions(begin, end), false);
      }
    }
  }

  void add_decodes() {
    const std::vector<SharedPart> shared_parts = find_shared_parts();
    for (const SharedPart& part : shared_parts) {
      for (const size_t i : part.decodes) decodes_[i].is_partial = true;
    }
    for (Decode& decode : decodes_) {
      const int64_t num_partitions = decode.partitions.end - decode.partitions.begin;
      decode.is_partial |= num_threads_ > 1 && num_partitions > 1;
      if (!decode.is_partial) continue;
      for (int64_t i = decode.row_begin; i < decode.row_end; ++i) {
        AttentionRow& row = plan_.rows[i];
        row.first_partial = plan_.num_partials - decode.partitions.begin;
        plan_.merges.push_back({row.row, plan_.num_partials, num_partitions});
        plan_.num_partials += num_partitions;
      }
    }
    for (const SharedPart& part : shared_parts) {
      add_shared(part);
      for (const size_t i : part.decodes) {
        add_own(decodes_[i], {decodes_[i].partitions.begin, part.partitions.begin});
        decodes_[i].partitions.begin = part.partitions.end;
      }
    }
    for (const Decode& decode : decodes_) {
      if (decode.is_partial) {
        add_own(decode, decode.partitions);
      } else {
        add_item(decode.row_begin, decode.row_end, 0, p_.num_kv_heads, decode.partitions, false);
      }
    }
  }

  std::vector<SharedPart> find_shared_parts() const {
    std::vector<SharedPart> parts;
    if (decodes_.size() < 2 || !p_.block_tables.is_given()) return parts;
    PartitionRange all{INT64_MAX, 0};
    for (const Decode& decode : decodes_) {
      all = {std::min(all.begin, decode.partitions.begin), std::max(all.end, decode.partitions.end)};
    }
    std::vector<VisibleBlocks> seen;
    std::vector<size_t> last_part(decodes_.size());  // for each sequence, the last part that it comes first in
    for (int64_t partition = all.begin; partition < all.end; ++partition) {
      seen.clear();
      for (size_t i = 0; i < decodes_.size(); ++i) {
        const PartitionRange& partitions = decodes_[i].partitions;
        if (partitions.begin <= partition && partition < partitions.end) seen.push_back(visible_blocks(i, partition));
      }
      std::sort(seen.begin(), seen.end(), is_before);
      for (auto begin = seen.begin(), end = begin; begin != seen.end(); begin = end) {
        end =
            std::find_if(begin, seen.end(), [&](const VisibleBlocks& blocks) { return !begin_alike(*begin, blocks); });
        if (end - begin == 1) continue;
        SharedPart part{{partition, partition + 1}, {}};
        for (auto i = begin; i != end; ++i) part.decodes.push_back(i->decode);
        size_t& last = last_part[part.decodes[0]];
        if (last < parts.size() && parts[last].partitions.end == partition && parts[last].decodes == part.decodes) {
          ++parts[last].partitions.end;
        } else {
          last = parts.size();
          parts.push_back(std::move(part));
        }
      }
    }
    return parts;
  }

  void add_shared(const SharedPart& part) {
    const auto row_begin = static_cast<int64_t>(plan_.rows.size());
    for (const size_t i : part.decodes) {
      for (int64_t row = decodes_[i].row_begin; row < decodes_[i].row_end; ++row) {
        plan_.rows.push_back(AttentionRow(plan_.rows[row]));
      }
    }
    const auto row_end = static_cast<int64_t>(plan_.rows.size());
    const int64_t item_rows = std::max<int64_t>(1, SHARED_RESULTS / group_size_);
    for_each_range(part.partitions, [&](PartitionRange partitions) {
      for (int64_t head = 0; head < p_.num_kv_heads; ++head) {
        for (int64_t begin = row_begin; begin < row_end; begin += item_rows) {
          add_item(begin, std::min(begin + item_rows, row_end), head, head + 1, partitions, true);
        }
      }
    });
  }

  void add_own(const Decode& decode, PartitionRange partitions) {
    if (partitions.begin == partitions.end) return;
    for_each_range(partitions, [&](PartitionRange range) {
      add_item(decode.row_begin, decode.row_end, 0, p_.num_kv_heads, range, true);
    });
  }

  const PagedAttentionParams& p_;
  int64_t num_threads_;
  int64_t prefill_results_;
  int64_t group_size_;
  std::vector<Decode> decodes_;
  ItemPlan plan_;
};

}  // namespace

ItemPlan plan_items(const PagedAttentionParams& params, int64_t num_threads, int64_t prefill_results) {
  return Planner(params, num_threads, prefill_results).plan();
}

}  // namespace pagedattn
