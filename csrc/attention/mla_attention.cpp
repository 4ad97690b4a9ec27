#include "attention/mla_attention.h"

#include "attention/attention_op.h"
#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

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
    door.dtype(argument, tensor, dtype_of(q_nope));
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

void attend_to_latents_on_cpu(const MlaAttentionParams& params) {
  const MlaPlan plan = plan_mla(params, torch::stable::get_num_threads());
  const auto attend = PAGEDATTN_CPU_KERNEL(mla_attend);
  const auto merge = PAGEDATTN_CPU_KERNEL(mla_merge);
  run_plan(
      plan, MlaScratch(params).size,
      [&](int64_t i, int64_t, float* scratch, float* partials) { attend(params, plan.items[i], scratch, partials); },
      [&](int64_t i, float* scratch, const float* partials) { merge(params, plan.merges[i], partials, scratch); });
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
  set_tables_and_rows(door, "q_nope", block_tables, query_start_loc, params);
  const auto check = block_check(door, params, block_tables, seq_lens, query_start_loc, kv_c_cache.size(0));

  const int64_t sizes[] = {params.num_tokens, params.num_heads, params.latent_size};
  Tensor out = torch::stable::new_empty(q_nope, {sizes, 3});
  Tensor lse = torch::stable::new_empty(q_nope, {sizes, 2}, ScalarType::Float);
  params.out = out.mutable_data_ptr();
  params.lse = lse.mutable_data_ptr<float>();
  run_on<attend_to_latents_on_cpu>(door, check, params, [&](cudaStream_t stream) {
    if (params.num_tokens > 0) cuda::mla_attention(params, stream);
  });
  return {out, lse};
}

}  // namespace pagedattn
