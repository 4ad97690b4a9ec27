#include "attention/paged_attention.h"

#include <utility>

#include "append.h"
#include "attention/attention_op.h"
#include "attention/paged_attention_plan.h"
#include "ops.h"
#include "paged_cache.h"
#include "run.h"

namespace pagedattn {
namespace {

// Where max_seq_len is not given, only a row of block_tables bounds the length of a sequence.
constexpr int64_t NO_MAX_SEQ_LEN = INT64_MAX;

// num_seqs and num_heads are set.
void set_alibi_slopes(const Door& door, const std::optional<Tensor>& slopes, PagedAttentionParams& params) {
  const bool by_sequence = slopes.has_value() && slopes->dim() == 2;
  if (!by_sequence) {
    params.alibi_slopes = door.per_head("alibi_slopes", slopes, params.num_heads);
    return;
  }
  door.dtype("alibi_slopes", *slopes, ScalarType::Float);
  door.shape("alibi_slopes", *slopes, {params.num_seqs, params.num_heads});
  door.contiguous("alibi_slopes", *slopes);
  params.alibi_slopes = slopes->const_data_ptr<float>();
  params.alibi_stride = params.num_heads;
}

// As in PagedAttentionParams.
struct Windows {
  int64_t sliding = NO_SLIDING_WINDOW;
  int64_t right = 0;
  int64_t chunk = 0;
};

Windows check_windows(const Door& door, std::optional<int64_t> sliding_window, bool causal,
                      std::optional<int64_t> right_window, int64_t attention_chunk) {
  Windows windows{sliding_window.value_or(NO_SLIDING_WINDOW), causal ? 0 : NO_RIGHT_WINDOW,
                  std::min(attention_chunk, MAX_TOKENS)};
  door.check(attention_chunk >= 0, "attention_chunk", "expected 0 (no chunks) or a number of tokens, got ",
             attention_chunk);
  door.check(windows.sliding > 0, "sliding_window", "expected a positive number of tokens, got ", windows.sliding);
  if (!right_window.has_value()) return windows;
  door.check(*right_window == 0 || !causal, "right_window", "expected None or 0 (causal is true), got ", *right_window);
  door.check(*right_window >= 0, "right_window", "expected a number of tokens that is not negative, got ",
             *right_window);
  windows.right = std::min(*right_window, NO_RIGHT_WINDOW);
  return windows;
}

// Of a subnormal number CPU kernels would make 0, and CUDA kernels the inverse infinity.
float check_softcap(const Door& door, double softcap) {
  const float result = door.finite("softcap", softcap);
  door.check(result >= std::numeric_limits<float>::min() || softcap == 0, "softcap",
             "expected 0 or a positive normal number of float32, got ", softcap);
  return result;
}

void check_max_seq_len(const Door& door, const PagedAttentionParams& p, int64_t max_seq_len) {
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    door.check(p.seq_len(seq) <= max_seq_len, "max_seq_len", "expected at least ", p.seq_len(seq),
               " (the length of sequence ", seq, "), got ", max_seq_len);
  }
}

// Of attention over a cache.
struct PagedCheck : BlockCheck<PagedAttentionParams> {
  ScaleCheck scales;
  int64_t max_seq_len;

  void operator()() const {
    BlockCheck::operator()();
    check_max_seq_len(door, params, max_seq_len);
  }
};

// Of attention over keys and values that lie one after the other.
struct VarlenCheck {
  Door door;
  HostValues query_start_loc;
  HostValues values;            // of key_start_loc; with these, the others are given
  PagedAttentionParams params;  // its index tensors are those above
  int64_t num_keys;
  int64_t max_seq_len;

  void operator()() const {
    check_offsets_to(door, "query_start_loc", params.query_start_loc, params.num_seqs, params.num_tokens, "query rows");
    check_offsets_to(door, "key_start_loc", params.key_start_loc, params.num_seqs, num_keys, "keys");
    check_max_seq_len(door, params, max_seq_len);
  }
};

// What an op passes from its door to its run.
template <typename Check>
struct Checked {
  PagedAttentionParams params;
  Check check;
};

// Sets what query says. dtype, head_size and num_kv_heads are set. With `in_sequences` query may be [num_seqs,
// rows_per_seq, num_heads, head_size].
void set_query(const Door& door, const Tensor& query, PagedAttentionParams& params, bool in_sequences) {
  const bool has_sequences = in_sequences && query.dim() == 4;
  if (has_sequences) {
    door.shape("query", query, {ANY, ANY, ANY, params.head_size});
  } else {
    door.shape("query", query, {ANY, ANY, params.head_size});
  }
  const int64_t heads_dim = has_sequences ? 2 : 1;
  door.contiguous_from("query", query, heads_dim);
  params.num_heads = query.size(heads_dim);
  door.check(params.num_heads > 0 && params.num_heads % params.num_kv_heads == 0, "query",
             "expected a number of heads that is a multiple of the ", params.num_kv_heads, " KV heads, got ",
             params.num_heads);
  const RowView rows = door.rows_before("query", query, heads_dim, params.num_heads * params.head_size);
  params.num_tokens = rows.num_rows;
  // Kernels number the rows of the heads that share a KV head.
  check_count(door, "query", params.num_tokens, "rows", MAX_TOKENS / (params.num_heads / params.num_kv_heads));
  params.query = query.const_data_ptr();
  params.query_stride = rows.stride;
}

// Checks the arguments that all ops over a cache have. The op itself sets `out`, `lse` and the parameters that only
// some ops have.
Checked<PagedCheck> check_attention(const Door& door, const Tensor& query, const Tensor& key_cache,
                                    const Tensor& value_cache, double scale, const Tensor& block_tables,
                                    const Tensor& seq_lens, const std::optional<Tensor>& query_start_loc,
                                    int64_t max_seq_len, const std::optional<Tensor>& alibi_slopes,
                                    const Windows& windows, const std::string& kv_cache_dtype,
                                    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                                    bool in_sequences = false) {
  door.check(max_seq_len >= 0, "max_seq_len", "expected a number that is not negative, got ", max_seq_len);
  const PagedCache cache = check_paged_cache(door, key_cache, value_cache, kv_cache_dtype, k_scale, v_scale);
  PagedAttentionParams params{};
  params.cache_dtype = cache.dtype;
  params.num_kv_heads = cache.num_kv_heads;
  params.head_size = cache.head_size;
  params.block_size = cache.block_size;
  door.check(cache.dtype != DType::INT8 || cache.block_size >= CHUNKED_TOKENS, "key_cache",
             "expected a block size of at least ", CHUNKED_TOKENS, " for dtype int8, got ", cache.block_size);
  // In a block of one token, the elements of a token are adjacent.
  params.layout = cache.block_size == 1 ? CacheLayout::NHD : cache.layout;
  params.key_cache = key_cache.const_data_ptr();
  params.key_strides = cache.key_strides;
  params.value_cache = value_cache.const_data_ptr();
  params.value_strides = cache.value_strides;

  params.dtype = check_meets_cache(door, "query", query, cache, key_cache);
  set_query(door, query, params, in_sequences);
  params.logit_scale = door.finite("scale", scale) * cache.key_scale.on_host;
  params.value_scale = cache.value_scale.on_host;
  params.key_scale_on_device = cache.key_scale.on_device;
  params.value_scale_on_device = cache.value_scale.on_device;
  params.sliding_window = windows.sliding;
  params.right_window = windows.right;
  params.attention_chunk = windows.chunk;

  params.seq_lens = check_indices(door, "seq_lens", seq_lens, ANY);
  params.num_seqs = seq_lens.size(0);
  set_alibi_slopes(door, alibi_slopes, params);
  set_tables_and_rows(door, "query", block_tables, query_start_loc, params);
  params.max_seq_len = std::min(max_seq_len, block_tables.size(1) * params.block_size);
  return {params,
          {block_check(door, params, block_tables, seq_lens, query_start_loc, cache.num_blocks),
           {door, cache.key_scale, cache.value_scale},
           max_seq_len}};
}

void attend_on_cpu(const PagedAttentionParams& params) {
  const AttentionPlan plan = plan_attention(params, torch::stable::get_num_threads());
  const auto num_items = static_cast<int64_t>(plan.items.size());
  run_plan(
      plan, plan.scratch_floats,
      [&](int64_t i, int64_t num_workers, float* scratch, float* partials) {
        // As a rule, the workers take turns, and this is the worker's next item.
        const AttentionItem* next_item = i + num_workers < num_items ? &plan.items[i + num_workers] : nullptr;
        plan.attend(params, plan.rows.data(), plan.items[i], next_item, scratch, partials);
      },
      [&](int64_t i, float* scratch, const float* partials) { plan.merge(params, plan.merges[i], partials, scratch); });
}

template <typename Check>
void run(const Door& door, const Tensor& query, const Checked<Check>& checked) {
  const PagedAttentionParams& params = checked.params;
  run_on<attend_on_cpu>(door, checked.check, params, [&](cudaStream_t stream) {
    if (params.num_tokens == 0) return;
    const int64_t scratch_bytes = cuda::paged_attention_scratch_bytes(params);
    const Tensor scratch = torch::stable::new_empty(query, {&scratch_bytes, 1}, ScalarType::Byte);
    cuda::paged_attention(params, scratch.mutable_data_ptr(), stream);
  });
}

template <typename Check>
std::tuple<Tensor, Tensor> run_into_new(const Door& door, const Tensor& query, Checked<Check> checked) {
  PagedAttentionParams& params = checked.params;
  const auto sizes = query.sizes();
  Tensor out = torch::stable::new_empty(query, sizes);
  Tensor lse = torch::stable::new_empty(query, sizes.slice(0, sizes.size() - 1), ScalarType::Float);
  params.out = out.mutable_data_ptr();
  params.out_stride = params.num_heads * params.head_size;
  params.lse = lse.mutable_data_ptr<float>();
  run(door, query, checked);
  return {out, lse};
}

// Sets what key and value say, which are not in blocks: a single block that is as large as it may be.
void set_keys_and_values(const Door& door, const Tensor& key, const Tensor& value, ScalarType dtype,
                         PagedAttentionParams& params) {
  door.dtype("key", key, dtype);
  door.shape("key", key, {ANY, ANY, ANY});
  door.contiguous_from("key", key, 2);
  check_count(door, "key", key.size(0), "keys");
  door.dtype("value", value, dtype);
  door.shape("value", value, key.sizes());
  door.contiguous_from("value", value, 2);
  params.num_kv_heads = key.size(1);
  door.check(params.num_kv_heads > 0, "key", "expected at least 1 KV head, got shape ", key.sizes());
  params.head_size = key.size(2);
  check_head_size(door, "key", key, params.head_size, params.dtype);
  params.layout = CacheLayout::NHD;
  params.block_size = INT32_MAX;
  params.key_cache = key.const_data_ptr();
  params.key_strides = {0, key.stride(0), key.stride(1)};
  params.value_cache = value.const_data_ptr();
  params.value_strides = {0, value.stride(0), value.stride(1)};
}

// Checks the arguments of v1 and v2: one row for each sequence, which goes into `out`.
Checked<PagedCheck> check_decode(const Door& door, Tensor& out, const Tensor& query, const Tensor& key_cache,
                                 const Tensor& value_cache, int64_t num_kv_heads, double scale,
                                 const Tensor& block_tables, const Tensor& seq_lens, int64_t block_size,
                                 int64_t max_seq_len, const std::optional<Tensor>& alibi_slopes,
                                 const std::string& kv_cache_dtype, const std::optional<Tensor>& k_scale,
                                 const std::optional<Tensor>& v_scale) {
  Checked<PagedCheck> checked =
      check_attention(door, query, key_cache, value_cache, scale, block_tables, seq_lens, std::nullopt, max_seq_len,
                      alibi_slopes, Windows{}, kv_cache_dtype, k_scale, v_scale);
  PagedAttentionParams& params = checked.params;
  door.check(num_kv_heads == params.num_kv_heads, "num_kv_heads", "expected ", params.num_kv_heads,
             " (as in key_cache), got ", num_kv_heads);
  door.check(block_size == params.block_size, "block_size", "expected ", params.block_size, " (as in key_cache), got ",
             block_size);
  door.dtype("out", out, dtype_of(query));
  door.shape("out", out, query.sizes());
  door.written_from_1("out", out);
  params.out = out.mutable_data_ptr();
  params.out_stride = out.stride(0);
  return checked;
}

// The arguments of paged_attention.
Checked<PagedCheck> check_ragged(const Door& door, const Tensor& query, const Tensor& key_cache,
                                 const Tensor& value_cache, const Tensor& block_tables, const Tensor& seq_lens,
                                 const std::optional<Tensor>& query_start_loc, double scale,
                                 std::optional<int64_t> max_seq_len, const std::optional<Tensor>& alibi_slopes,
                                 std::optional<int64_t> sliding_window, double softcap,
                                 const std::optional<Tensor>& sinks, const std::string& kv_cache_dtype,
                                 const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                                 bool causal, std::optional<int64_t> right_window, int64_t attention_chunk) {
  const Windows windows = check_windows(door, sliding_window, causal, right_window, attention_chunk);
  const float float_softcap = check_softcap(door, softcap);
  Checked<PagedCheck> checked =
      check_attention(door, query, key_cache, value_cache, scale, block_tables, seq_lens, query_start_loc,
                      max_seq_len.value_or(NO_MAX_SEQ_LEN), alibi_slopes, windows, kv_cache_dtype, k_scale, v_scale,
                      /*in_sequences=*/true);
  checked.params.softcap = float_softcap;
  checked.params.sinks = door.per_head("sinks", sinks, checked.params.num_heads);
  return checked;
}

// What there is to run of a check.
struct Nothing {};

void run_nothing(const Nothing&) {}

}  // namespace

void paged_attention_v1(Tensor& out, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                        int64_t num_kv_heads, double scale, const Tensor& block_tables, const Tensor& seq_lens,
                        int64_t block_size, int64_t max_seq_len, const std::optional<Tensor>& alibi_slopes,
                        StringHandle kv_cache_dtype, const std::optional<Tensor>& k_scale,
                        const std::optional<Tensor>& v_scale) {
  const std::string cache_dtype = take_string(kv_cache_dtype);
  const Door door("paged_attention_v1", query);
  run(door, query,
      check_decode(door, out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size,
                   max_seq_len, alibi_slopes, cache_dtype, k_scale, v_scale));
}

// exp_sums, max_logits and tmp_out are checked and left alone: the kernels take scratch of their own, as they need it.
void paged_attention_v2(Tensor& out, Tensor& exp_sums, Tensor& max_logits, Tensor& tmp_out, const Tensor& query,
                        const Tensor& key_cache, const Tensor& value_cache, int64_t num_kv_heads, double scale,
                        const Tensor& block_tables, const Tensor& seq_lens, int64_t block_size, int64_t max_seq_len,
                        const std::optional<Tensor>& alibi_slopes, StringHandle kv_cache_dtype,
                        const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale) {
  const std::string cache_dtype = take_string(kv_cache_dtype);
  const Door door("paged_attention_v2", query);
  const Checked<PagedCheck> checked =
      check_decode(door, out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size,
                   max_seq_len, alibi_slopes, cache_dtype, k_scale, v_scale);
  const PagedAttentionParams& params = checked.params;
  door.dtype("exp_sums", exp_sums, ScalarType::Float);
  door.shape("exp_sums", exp_sums, {params.num_seqs, params.num_heads, ANY});
  const int64_t num_partitions = exp_sums.size(2);
  const int64_t needed = max_seq_len / PARTITION_TOKENS + (max_seq_len % PARTITION_TOKENS != 0 ? 1 : 0);
  door.check(num_partitions >= needed, "exp_sums", "expected at least ", needed, " partitions of ", PARTITION_TOKENS,
             " tokens, got shape ", exp_sums.sizes());
  door.dtype("max_logits", max_logits, ScalarType::Float);
  door.shape("max_logits", max_logits, exp_sums.sizes());
  door.dtype("tmp_out", tmp_out, dtype_of(query));
  door.shape("tmp_out", tmp_out, {params.num_seqs, params.num_heads, num_partitions, params.head_size});
  run(door, query, checked);
}

std::tuple<Tensor, Tensor> paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                                           const Tensor& block_tables, const Tensor& seq_lens,
                                           const std::optional<Tensor>& query_start_loc, double scale,
                                           std::optional<int64_t> max_seq_len,
                                           const std::optional<Tensor>& alibi_slopes,
                                           std::optional<int64_t> sliding_window, double softcap,
                                           const std::optional<Tensor>& sinks, StringHandle kv_cache_dtype,
                                           const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                                           bool causal, std::optional<int64_t> right_window, int64_t attention_chunk) {
  const std::string cache_dtype = take_string(kv_cache_dtype);
  const Door door("paged_attention", query);
  return run_into_new(door, query,
                      check_ragged(door, query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, scale,
                                   max_seq_len, alibi_slopes, sliding_window, softcap, sinks, cache_dtype, k_scale,
                                   v_scale, causal, right_window, attention_chunk));
}

std::tuple<Tensor, Tensor> append_and_attend(
    const Tensor& query, const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
    const Tensor& block_tables, const Tensor& cached_lens, const std::optional<Tensor>& query_start_loc,
    const std::optional<Tensor>& key_start_loc, double scale, const std::optional<Tensor>& alibi_slopes,
    std::optional<int64_t> sliding_window, double softcap, const std::optional<Tensor>& sinks,
    StringHandle kv_cache_dtype, const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
    bool causal, std::optional<int64_t> right_window, int64_t attention_chunk, const std::optional<Tensor>& rotary_cos,
    const std::optional<Tensor>& rotary_sin, bool rotary_is_neox, const std::optional<Tensor>& rotary_lens) {
  const std::string cache_dtype = take_string(kv_cache_dtype);
  const Door door("append_and_attend", query);
  const PagedCache cache = check_paged_cache(door, key_cache, value_cache, cache_dtype, k_scale, v_scale);
  for (const auto& [argument, tokens] : {std::pair{"query", &query}, std::pair{"key", &key}}) {
    door.defined(argument, *tokens);
    door.check(tokens->dim() == 3 || tokens->dim() == 4, argument, "expected 3 or 4 dimensions, got shape ",
               tokens->sizes());
  }
  const int64_t num_tokens = key.size(0) * (key.dim() == 4 ? key.size(1) : 1);
  const AppendedSlots slots =
      append_slots(door, num_tokens, block_tables, cached_lens, key_start_loc, cache.block_size, cache.num_blocks);
  const int64_t num_seqs = slots.seq_lens.size(0);
  door.check(key.dim() == 3 || key.size(0) == num_seqs, "key", "expected ", num_seqs, " sequences, got ", key.size(0));

  Tensor used_query = query, used_key = key;
  if (rotary_cos.has_value()) {
    door.check_type(rotary_sin.has_value(), "rotary_sin", "expected a tensor beside rotary_cos, got None");
    const char* lens = rotary_lens.has_value() ? "rotary_lens" : "cached_lens";
    const Tensor& first = rotary_lens.value_or(cached_lens);
    door.defined(lens, first);
    door.shape(lens, first, {num_seqs});
    const auto rotated = [&](const char* argument, const Tensor& tokens, const char* start_loc_argument,
                             const std::optional<Tensor>& start_loc, bool are_one_apart) {
      const Tensor positions =
          token_positions(door, {argument, lens, start_loc_argument}, tokens, first, start_loc, are_one_apart);
      return rotated_copy(door, {lens, argument, "", "rotary_cos", "rotary_sin"}, positions, tokens, *rotary_cos,
                          *rotary_sin, rotary_is_neox);
    };
    const bool rows_are_in_order =
        causal || sliding_window.has_value() || right_window.has_value() || attention_chunk != 0;
    used_query = rotated("query", query, "query_start_loc", query_start_loc, rows_are_in_order);
    used_key = rotated("key", key, "key_start_loc", key_start_loc, true);
  } else {
    door.check(!rotary_sin.has_value(), "rotary_sin", "expected None without rotary_cos, got a tensor");
    door.check(!rotary_lens.has_value(), "rotary_lens", "expected None without rotary_cos, got a tensor");
  }

  const Checked<PagedCheck> checked =
      check_ragged(door, used_query, key_cache, value_cache, block_tables, slots.seq_lens, query_start_loc, scale,
                   std::nullopt, alibi_slopes, sliding_window, softcap, sinks, cache_dtype, k_scale, v_scale, causal,
                   right_window, attention_chunk);
  run_on<run_nothing>(door, checked.check, Nothing{}, [](cudaStream_t) {});  // before anything is written
  write_tokens(door, used_key, value, key_cache, value_cache, slots.slot_mapping, cache_dtype, k_scale, v_scale,
               TokenShape::IN_SEQUENCES);
  return run_into_new(door, used_query, checked);
}

std::tuple<Tensor, Tensor> varlen_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Tensor& query_start_loc, const Tensor& key_start_loc, double scale,
                                            std::optional<int64_t> max_seq_len,
                                            const std::optional<Tensor>& alibi_slopes,
                                            std::optional<int64_t> sliding_window, double softcap,
                                            const std::optional<Tensor>& sinks, bool causal,
                                            std::optional<int64_t> right_window, int64_t attention_chunk) {
  const Door door("varlen_attention", query);
  const Windows windows = check_windows(door, sliding_window, causal, right_window, attention_chunk);
  PagedAttentionParams params{};
  params.sliding_window = windows.sliding;
  params.right_window = windows.right;
  params.attention_chunk = windows.chunk;
  params.softcap = check_softcap(door, softcap);
  params.logit_scale = door.finite("scale", scale);
  params.value_scale = 1.0f;
  params.dtype = params.cache_dtype = door.float_dtype("query", query);
  set_keys_and_values(door, key, value, dtype_of(query), params);
  set_query(door, query, params, /*in_sequences=*/false);
  params.sinks = door.per_head("sinks", sinks, params.num_heads);

  params.query_start_loc = check_indices(door, "query_start_loc", query_start_loc, ANY);
  params.num_seqs = query_start_loc.size(0) - 1;
  door.check(params.num_seqs >= 0, "query_start_loc", "expected at least 1 element, got 0");
  set_alibi_slopes(door, alibi_slopes, params);
  params.key_start_loc = check_indices(door, "key_start_loc", key_start_loc, params.num_seqs + 1);
  const int64_t bound = max_seq_len.value_or(NO_MAX_SEQ_LEN);
  door.check(bound >= 0, "max_seq_len", "expected a number that is not negative, got ", bound);
  params.max_seq_len = std::min(bound, key.size(0));

  VarlenCheck check{door, door.values(query_start_loc), door.values(key_start_loc), params, key.size(0), bound};
  check.params.query_start_loc.data = check.query_start_loc.data;
  check.params.key_start_loc.data = check.values.data;
  return run_into_new(door, query, Checked<VarlenCheck>{params, std::move(check)});
}

}  // namespace pagedattn
