#include "attention/mla_attention.h"

#include <memory>
#include <utility>

#include "attention/attention_op.h"
#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

struct MlaCheck {
  Door door;
  HostValues block_tables;
  HostValues values;  // of seq_lens; with these, all others are given
  HostValues query_start_loc;
  MlaAttentionParams params;  // its index tensors are those above
  int64_t num_blocks;         // of the cache
  int64_t max_blocks_per_seq;

  void operator()() const {
    if (query_start_loc.are_given) {
      check_start_loc(door, "query_start_loc", params.query_start_loc, params.num_seqs, params.num_tokens,
                      "query rows");
    }
    const int64_t num_slots = std::min<int64_t>(max_blocks_per_seq * params.block_size, INT32_MAX);
    for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
      const int64_t seq_len = params.seq_lens[seq];
      door.check(seq_len >= 0 && seq_len <= num_slots, "seq_lens", "expected 0 to ", num_slots,
                 " (the slots of a row of block_tables), got ", seq_len, " at sequence ", seq);
      if (params.row_begin(seq) == params.row_end(seq)) continue;
      const Indices table = params.block_tables.from(seq * params.block_table_stride);
      for (int64_t i = 0; i * params.block_size < seq_len; ++i) {
        door.check(table[i] >= 0 && table[i] < num_blocks, "block_tables", "expected blocks of 0 to ", num_blocks - 1,
                   ", got ", table[i], " at sequence ", seq, ", entry ", i);
      }
    }
  }
};

MlaQueryStrides query_strides(const Door& door, const char* argument, const Tensor& query) {
  door.contiguous_from(argument, query, 2);
  return {query.stride(0), query.stride(1)};
}

MlaCacheStrides cache_strides(const Door& door, const char* argument, const Tensor& cache) {
  door.contiguous_from(argument, cache, 2);
  return {cache.stride(0), cache.stride(1)};
}

// Sets what the queries and the caches say.
void set_queries_and_caches(const Door& door, const Tensor& q_nope, const Tensor& q_pe, const Tensor& kv_c_cache,
                            const Tensor& k_pe_cache, MlaAttentionParams& params) {
  params.dtype = door.float_dtype("q_nope", q_nope);
  door.rank("q_nope", q_nope, 3);
  params.num_tokens = q_nope.size(0);
  params.num_heads = q_nope.size(1);
  params.latent_size = q_nope.size(2);
  check_count(door, "q_nope", params.num_tokens, "rows");
  door.check(params.num_heads > 0, "q_nope", "expected at least 1 head, got shape ", q_nope.sizes());
  door.check(params.latent_size > 0 && params.latent_size <= MAX_HEAD_SIZE, "q_nope", "expected a latent of 1 to ",
             MAX_HEAD_SIZE, " numbers, got ", params.latent_size, " (shape ", q_nope.sizes(), ")");
  const auto check_tensor = [&](const char* argument, const Tensor& tensor, std::initializer_list<int64_t> shape) {
    door.dtype(argument, tensor, q_nope.scalar_type());
    door.shape(argument, tensor, shape);
  };
  check_tensor("q_pe", q_pe, {params.num_tokens, params.num_heads, ANY});
  params.rope_size = q_pe.size(2);
  door.check(params.rope_size <= MAX_HEAD_SIZE, "q_pe", "expected a rotary part of at most ", MAX_HEAD_SIZE,
             " numbers, got ", params.rope_size, " (shape ", q_pe.sizes(), ")");
  check_tensor("kv_c_cache", kv_c_cache, {ANY, ANY, params.latent_size});
  params.block_size = kv_c_cache.size(1);
  door.check(params.block_size > 0, "kv_c_cache", "expected a block size of at least 1, got shape ",
             kv_c_cache.sizes());
  check_tensor("k_pe_cache", k_pe_cache, {kv_c_cache.size(0), params.block_size, params.rope_size});
  params.q_nope = q_nope.const_data_ptr();
  params.q_nope_strides = query_strides(door, "q_nope", q_nope);
  params.q_pe = q_pe.const_data_ptr();
  params.q_pe_strides = query_strides(door, "q_pe", q_pe);
  params.kv_c_cache = kv_c_cache.const_data_ptr();
  params.kv_c_strides = cache_strides(door, "kv_c_cache", kv_c_cache);
  params.k_pe_cache = k_pe_cache.const_data_ptr();
  params.k_pe_strides = cache_strides(door, "k_pe_cache", k_pe_cache);
}

// Items, and what is merged after all items.
struct MlaPlan {
  std::vector<MlaItem> items;
  std::vector<MlaMerge> merges;
  int64_t partial_floats = 0;
  int64_t multiply_adds = 0;
};

int64_t num_partitions(const MlaAttentionParams& params, const MlaItem& item) {
  const int64_t end = params.visible_end(item.seq, (item.query_end - 1) / params.num_heads);
  return (std::max<int64_t>(end, 0) + MLA_PARTITION_TOKENS - 1) / MLA_PARTITION_TOKENS;
}

// Groups of queries, each over all of its partitions. If a group has more than its share for a thread, its partitions
// are divided among several items.
MlaPlan plan_mla(const MlaAttentionParams& params, int64_t num_threads) {
  constexpr int64_t ITEMS_PER_THREAD = 4;  // unequal items balance
  std::vector<MlaItem> groups;
  int64_t all_partitions = 0;
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    const int64_t end = params.row_end(seq) * params.num_heads;
    for (int64_t begin = params.row_begin(seq) * params.num_heads; begin < end; begin += MLA_ITEM_QUERIES) {
      MlaItem group{seq, begin, std::min(begin + MLA_ITEM_QUERIES, end), 0, 0, -1};
      group.partition_end = num_partitions(params, group);
      all_partitions += group.partition_end;
      groups.push_back(group);
    }
  }
  MlaPlan plan;
  const int64_t share = std::max<int64_t>(all_partitions / (num_threads * ITEMS_PER_THREAD), 1);
  for (const MlaItem& group : groups) {
    const int64_t num_queries = group.query_end - group.query_begin;
    plan.multiply_adds +=
        group.partition_end * MLA_PARTITION_TOKENS * num_queries * (2 * params.latent_size + params.rope_size);
    if (num_threads == 1 || group.partition_end <= share) {
      plan.items.push_back(group);
      continue;
    }
    plan.merges.push_back({group.query_begin, group.query_end, group.partition_end, plan.partial_floats});
    for (int64_t begin = 0; begin < group.partition_end; begin += share) {
      MlaItem item = group;
      item.partition_begin = begin;
      item.partition_end = std::min(begin + share, group.partition_end);
      item.partial = plan.partial_floats;
      plan.partial_floats += (item.partition_end - begin) * mla_partial_floats(params, num_queries);
      plan.items.push_back(item);
    }
  }
  return plan;
}

void attend_on_cpu(const MlaAttentionParams& params) {
  const MlaPlan plan = plan_mla(params, torch::stable::get_num_threads());
  const auto num_items = static_cast<int64_t>(plan.items.size());
  if (num_items == 0) return;
  const int64_t num_workers = num_workers_for(plan.multiply_adds, num_items);
  const auto partials = std::make_unique_for_overwrite<float[]>(plan.partial_floats);
  const int64_t scratch_lines = (MlaScratch(params).size + 15) / 16;
  const auto scratch = std::make_unique_for_overwrite<CacheLine[]>(num_workers * scratch_lines);
  const auto scratch_of = [&](int64_t worker) { return scratch[worker * scratch_lines].floats; };

  const auto attend = PAGEDATTN_CPU_KERNEL(mla_attend);
  parallel_for_items(num_items, num_workers, [&](int64_t i, int64_t worker) {
    attend(params, plan.items[i], scratch_of(worker), partials.get());
  });
  const auto merge = PAGEDATTN_CPU_KERNEL(mla_merge);
  const auto num_merges = static_cast<int64_t>(plan.merges.size());
  parallel_for_items(num_merges, std::min(num_merges, num_workers), [&](int64_t i, int64_t worker) {
    merge(params, plan.merges[i], partials.get(), scratch_of(worker));
  });
}

}  // namespace

std::tuple<Tensor, Tensor> mla_attention(const Tensor& q_nope, const Tensor& q_pe, const Tensor& kv_c_cache,
                                         const Tensor& k_pe_cache, const Tensor& block_tables, const Tensor& seq_lens,
                                         const std::optional<Tensor>& query_start_loc, double scale, bool causal) {
  const Door door("mla_attention", q_nope);
  MlaAttentionParams params{};
  set_queries_and_caches(door, q_nope, q_pe, kv_c_cache, k_pe_cache, params);
  params.scale = door.finite("scale", scale);
  params.is_causal = causal;
  params.seq_lens = check_indices(door, "seq_lens", seq_lens, ANY);
  params.num_seqs = seq_lens.size(0);
  params.block_tables = door.indices("block_tables", block_tables);
  door.present("block_tables", block_tables);
  door.shape("block_tables", block_tables, {params.num_seqs, ANY});
  door.contiguous_from("block_tables", block_tables, 1);
  params.block_table_stride = block_tables.stride(0);
  if (query_start_loc.has_value()) {
    params.query_start_loc = check_indices(door, "query_start_loc", *query_start_loc, params.num_seqs + 1);
  } else {
    door.check(params.num_tokens == params.num_seqs, "q_nope", "expected one row for each of the ", params.num_seqs,
               " sequences (no query_start_loc is given), got ", params.num_tokens);
  }
  MlaCheck check{door,
                 door.values(block_tables),
                 door.values(seq_lens),
                 query_start_loc.has_value() ? door.values(*query_start_loc) : HostValues{},
                 params,
                 kv_c_cache.size(0),
                 block_tables.size(1)};
  check.params.block_tables.data = check.block_tables.data;
  if (check.block_tables.fetched.has_value()) check.params.block_table_stride = check.block_tables.fetched->stride(0);
  check.params.seq_lens.data = check.values.data;
  check.params.query_start_loc.data = check.query_start_loc.data;

  const int64_t sizes[] = {params.num_tokens, params.num_heads, params.latent_size};
  Tensor out = torch::stable::new_empty(q_nope, {sizes, 3});
  Tensor lse = torch::stable::new_empty(q_nope, {sizes, 2}, ScalarType::Float);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr<float>();
  run_on<attend_on_cpu>(door, check, params, [&](cudaStream_t stream) {
    if (params.num_tokens > 0) cuda::mla_attention(params, stream);
  });
  return {out, lse};
}

}  // namespace pagedattn
