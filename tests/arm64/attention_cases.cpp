// Attention over caches of all types in both layouts, beside fp64, and latent attention.
#include <algorithm>

#include "attention/merge_attn_states.h"
#include "attention/mla_attention.h"
#include "attention/paged_attention.h"
#include "attention/paged_attention_plan.h"
#include "cases.h"

using namespace pagedattn;

namespace cases {
namespace {

struct Shape {
  const char* name;
  int64_t num_heads, num_kv_heads, head_size, block_size;
  std::vector<int32_t> seq_lens, num_rows;
  bool extras;                 // a window, softcap, ALiBi and sinks
  bool largest_codes = false;  // of keys and of values, of one sign in a token's key
};

struct Cache {
  Tensor keys, values;
  int64_t x;  // elements of a token that are adjacent
};

int64_t key_place(const PagedAttentionParams& p, const Cache& cache, int64_t block, int64_t slot, int64_t head,
                  int64_t d) {
  const int64_t first = block * p.key_strides.block + head * p.key_strides.kv_head + slot * p.key_strides.token;
  return p.layout == CacheLayout::NHD ? first + d : first + d / cache.x * p.block_size * cache.x + d % cache.x;
}
int64_t value_place(const PagedAttentionParams& p, int64_t block, int64_t slot, int64_t head, int64_t d) {
  const int64_t first = block * p.value_strides.block + head * p.value_strides.kv_head + slot * p.value_strides.token;
  return first + (p.layout == CacheLayout::NHD ? d : d * p.block_size);
}

// Of an int8 cache: the scale of a token's key (which = 0) or value (1), behind the values of its KV head.
float* int8_scale(const PagedAttentionParams& p, Cache& cache, int64_t block, int64_t slot, int64_t head, int which) {
  const int64_t first = block * p.value_strides.block + head * p.value_strides.kv_head;
  const int64_t row = p.head_size + which * INT8_SCALE_ROWS / 2;
  return reinterpret_cast<float*>(cache.values.data<char>() + first + row * p.block_size) + slot;
}

std::vector<double> expected_attention(const PagedAttentionParams& p, Tensor& query, Cache& cache) {
  std::vector<double> out(static_cast<size_t>(p.num_tokens * p.num_heads * p.head_size));
  for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
    for (int64_t row = p.row_begin(seq); row < p.row_end(seq); ++row) {
      const int64_t position = p.position(seq, row);
      for (int64_t head = 0; head < p.num_heads; ++head) {
        const int64_t kv_head = head / (p.num_heads / p.num_kv_heads);
        double* const to = &out[static_cast<size_t>((row * p.num_heads + head) * p.head_size)];
        std::vector<double> logits;
        double greatest = p.sinks == nullptr ? -INFINITY : p.sinks[head];
        const int64_t first = p.first_visible(position), end = p.visible_end(seq, position);
        const auto block_of = [&](int64_t t) { return p.block_table(seq)[t / p.block_size]; };
        for (int64_t t = first; t < end; ++t) {
          const int64_t block = block_of(t), slot = t % p.block_size;
          double dot = 0.0;
          for (int64_t d = 0; d < p.head_size; ++d) {
            dot += query[row * p.query_stride + head * p.head_size + d] *
                   cache.keys[key_place(p, cache, block, slot, kv_head, d)];
          }
          if (p.cache_dtype == DType::INT8) dot *= *int8_scale(p, cache, block, slot, kv_head, 0);
          double logit = dot * p.logit_scale;
          if (p.softcap > 0.0f) logit = p.softcap * std::tanh(logit / p.softcap);
          logit -= p.alibi_slope(seq, head) * static_cast<double>(position - t);
          logits.push_back(logit);
          greatest = std::max(greatest, logit);
        }
        double sum = p.sinks == nullptr ? 0.0 : std::exp(p.sinks[head] - greatest);
        for (const double logit : logits) sum += std::exp(logit - greatest);
        for (int64_t t = first; t < end; ++t) {
          const int64_t block = block_of(t), slot = t % p.block_size;
          double weight = std::exp(logits[static_cast<size_t>(t - first)] - greatest) / sum * p.value_scale;
          if (p.cache_dtype == DType::INT8) weight *= *int8_scale(p, cache, block, slot, kv_head, 1);
          for (int64_t d = 0; d < p.head_size; ++d) {
            to[d] += weight * cache.values[value_place(p, block, slot, kv_head, d)];
          }
        }
      }
    }
  }
  return out;
}

void run(const PagedAttentionParams& p) {
  const AttentionPlan plan = plan_attention(p, 1);
  Tensor scratch(DType::FLOAT32, plan.scratch_floats), partials(DType::FLOAT32, plan.partial_floats + 1);
  for (size_t i = 0; i < plan.items.size(); ++i) {
    plan.attend(p, plan.rows.data(), plan.items[i], i + 1 < plan.items.size() ? &plan.items[i + 1] : nullptr,
                scratch.data<float>(), partials.data<float>());
  }
  for (const MergeItem& item : plan.merges) plan.merge(p, item, partials.data<float>(), scratch.data<float>());
}

PagedAttentionParams params_of(const Shape& shape, DType dtype, DType cache_dtype, CacheLayout layout) {
  PagedAttentionParams p{};
  p.dtype = dtype;
  p.cache_dtype = cache_dtype;
  p.num_seqs = static_cast<int64_t>(shape.seq_lens.size());
  for (const int32_t rows : shape.num_rows) p.num_tokens += rows;
  p.num_heads = shape.num_heads;
  p.num_kv_heads = shape.num_kv_heads;
  p.head_size = shape.head_size;
  p.block_size = shape.block_size;
  p.logit_scale = 0.25f;
  p.value_scale = 1.0f;
  p.sliding_window = shape.extras ? 100 : NO_SLIDING_WINDOW;
  p.softcap = shape.extras ? 5.0f : 0.0f;
  p.out_stride = p.query_stride = shape.num_heads * shape.head_size;
  p.layout = layout;
  const int64_t rows = shape.head_size + (cache_dtype == DType::INT8 ? INT8_SCALE_ROWS : 0);
  if (layout == CacheLayout::NHD) {
    const int64_t of_token = shape.num_kv_heads * shape.head_size;
    p.key_strides = p.value_strides = {shape.block_size * of_token, of_token, shape.head_size};
  } else {
    p.key_strides = {shape.num_kv_heads * shape.head_size * shape.block_size, 16 / element_size(cache_dtype),
                     shape.head_size * shape.block_size};
    p.value_strides = {shape.num_kv_heads * rows * shape.block_size, 1, rows * shape.block_size};
  }
  p.max_seq_len = *std::max_element(shape.seq_lens.begin(), shape.seq_lens.end());
  p.block_table_stride = (p.max_seq_len + shape.block_size - 1) / shape.block_size;
  p.seq_lens = {shape.seq_lens.data(), false};
  return p;
}

void attention(Judge& judge, const Shape& shape, DType dtype, DType cache_dtype, CacheLayout layout) {
  PagedAttentionParams p = params_of(shape, dtype, cache_dtype, layout);
  const int64_t num_blocks = p.num_seqs * p.block_table_stride + 3;
  Tensor query(dtype, p.num_tokens * p.query_stride, 1.0), out(dtype, p.num_tokens * p.out_stride);
  Cache cache{Tensor(cache_dtype, num_blocks * p.key_strides.block, 1.0),
              Tensor(cache_dtype, num_blocks * p.value_strides.block, 1.0), 16 / element_size(cache_dtype)};
  if (shape.largest_codes) {
    for (int64_t i = 0; i < query.size; ++i) query.set(i, 0x1p-6);
    for (int64_t i = 0; i < cache.keys.size; ++i) {
      cache.keys.data<int8_t>()[i] = i / cache.x % p.block_size % 3 == 0 ? -127 : 127;
    }
    for (int64_t i = 0; i < cache.values.size; ++i) {
      cache.values.data<int8_t>()[i] = i / p.block_size % 2 == 0 ? -127 : 127;
    }
  }
  if (cache_dtype == DType::INT8) {
    for (int64_t i = 0; i < num_blocks * p.num_kv_heads * p.block_size * 2; ++i) {
      const int64_t of_head = i / 2 / p.block_size;
      *int8_scale(p, cache, of_head / p.num_kv_heads, i / 2 % p.block_size, of_head % p.num_kv_heads, i % 2) =
          static_cast<float>((1.5 + uniform()) / 127);
    }
  }
  std::vector<int32_t> tables(static_cast<size_t>(p.num_seqs * p.block_table_stride)), starts{0};
  for (int32_t& block : tables) block = static_cast<int32_t>(below(num_blocks));
  for (const int32_t rows : shape.num_rows) starts.push_back(starts.back() + rows);
  Tensor alibi(DType::FLOAT32, p.num_heads, 0.1), sinks(DType::FLOAT32, p.num_heads, 1.0);
  p.query = query.data();
  p.out = out.data();
  p.key_cache = cache.keys.data();
  p.value_cache = cache.values.data();
  p.block_tables = {tables.data(), false};
  p.query_start_loc = {starts.data(), false};
  if (shape.extras) {
    p.alibi_slopes = alibi.data<float>();
    p.sinks = sinks.data<float>();
  }
  run(p);
  const std::string name = std::string(shape.name) + " of " + name_of(dtype) + " on " + name_of(cache_dtype) +
                           (layout == CacheLayout::NHD ? " NHD" : "");
  // Queries and weights are rounded to 16 bits where the cache is of int8.
  const double tolerance = cache_dtype == DType::INT8 ? 2e-4 : 2e-6;
  judge.near(name, out, expected_attention(p, query, cache), tolerance);
  judge(name, out, 1.0, 2.0 * tolerance);
}

// A sequence of one token: the output is its value, and so each of 256 codes of a float8 is converted.
void all_codes(Judge& judge, DType cache_dtype, CacheLayout layout) {
  const Shape shape{"all codes", 1, 1, 256, 16, {1}, {1}, false};
  PagedAttentionParams p = params_of(shape, DType::FLOAT32, cache_dtype, layout);
  Tensor query(DType::FLOAT32, 256), out(DType::FLOAT32, 256), keys(cache_dtype, 256 * 16),
      values(cache_dtype, 256 * 16);
  const int32_t block = 0;
  std::vector<double> expected(256);
  for (int64_t i = 0; i < 256; ++i) {
    const int64_t place = value_place(p, 0, 0, 0, i);
    values.data<uint8_t>()[place] = static_cast<uint8_t>(i);
    expected[static_cast<size_t>(i)] = values[place];
  }
  p.query = query.data();
  p.out = out.data();
  p.key_cache = keys.data();
  p.value_cache = values.data();
  p.block_tables = {&block, false};
  run(p);
  const std::string name =
      std::string("all codes of ") + name_of(cache_dtype) + (layout == CacheLayout::NHD ? " NHD" : "");
  judge.near(name, out, expected, 0.0);
  judge(name, out, 0.0);
}

void latent_attention(Judge& judge, DType dtype) {
  const int32_t seq_lens[] = {5, 150}, starts[] = {0, 1, 14},
                blocks[] = {4, 1, 8, 7, 3, 2, 5, 9, 0, 6, 4, 1, 8, 7, 3, 2, 5, 9, 0, 6};
  const int64_t heads = 3, latent = 80, rope = 24, tokens = 14;
  Tensor q_nope(dtype, tokens * heads * latent, 1.0), q_pe(dtype, tokens * heads * rope, 1.0);
  Tensor kv_c(dtype, 10 * 16 * latent, 1.0), k_pe(dtype, 10 * 16 * rope, 1.0), out(dtype, tokens * heads * latent);
  Tensor lse(DType::FLOAT32, tokens * heads);
  MlaAttentionParams p{};
  p.dtype = dtype;
  p.num_seqs = 2;
  p.num_tokens = tokens;
  p.num_heads = heads;
  p.latent_size = latent;
  p.rope_size = rope;
  p.block_size = 16;
  p.scale = 0.3f;
  p.is_causal = true;
  p.out = out.data();
  p.lse = lse.data<float>();
  p.q_nope = q_nope.data();
  p.q_nope_strides = {heads * latent, latent};
  p.q_pe = q_pe.data();
  p.q_pe_strides = {heads * rope, rope};
  p.kv_c_cache = kv_c.data();
  p.kv_c_strides = {16 * latent, latent};
  p.k_pe_cache = k_pe.data();
  p.k_pe_strides = {16 * rope, rope};
  p.block_tables = {blocks, false};
  p.block_table_stride = 10;
  p.seq_lens = {seq_lens, false};
  p.query_start_loc = {starts, false};
  Tensor scratch(DType::FLOAT32, MlaScratch(p).size);
  for (int64_t seq = 0; seq < 2; ++seq) {
    const MlaItem item{seq, starts[seq] * heads, starts[seq + 1] * heads, 0, 1, -1};
    PAGEDATTN_CPU_KERNEL(mla_attend)(p, item, scratch.data<float>(), nullptr);
  }
  std::vector<double> expected(static_cast<size_t>(tokens * heads * latent));
  for (int64_t seq = 0; seq < 2; ++seq) {
    for (int64_t row = p.row_begin(seq); row < p.row_end(seq); ++row) {
      for (int64_t head = 0; head < heads; ++head) {
        std::vector<double> weights;
        double sum = 0.0;
        const auto slot_of = [&](int64_t t) { return p.block_table(seq)[t / 16] * 16 + t % 16; };
        for (int64_t t = 0; t < p.visible_end(seq, row); ++t) {
          double dot = 0.0;
          for (int64_t d = 0; d < latent; ++d)
            dot += q_nope[(row * heads + head) * latent + d] * kv_c[slot_of(t) * latent + d];
          for (int64_t d = 0; d < rope; ++d) dot += q_pe[(row * heads + head) * rope + d] * k_pe[slot_of(t) * rope + d];
          weights.push_back(std::exp(dot * p.scale));
          sum += weights.back();
        }
        for (size_t t = 0; t < weights.size(); ++t) {
          for (int64_t d = 0; d < latent; ++d) {
            expected[static_cast<size_t>((row * heads + head) * latent + d)] +=
                weights[t] / sum * kv_c[slot_of(static_cast<int64_t>(t)) * latent + d];
          }
        }
      }
    }
  }
  const std::string name = std::string("latent attention of ") + name_of(dtype);
  // Where pairs of bf16 are multiplied, weights are rounded to bf16.
  const double tolerance = dtype == DType::BFLOAT16 ? 2e-3 : 2e-6;
  judge.near(name, out, expected, tolerance);
  judge(name, out, 1.0, 2.0 * tolerance);
  judge(name + ", lse", lse, 4.0);
}

void merged_states(Judge& judge, DType dtype) {
  Tensor output(dtype, 6 * 70), prefix(dtype, 6 * 70, 1.0), suffix(dtype, 6 * 70, 1.0);
  Tensor lse(DType::FLOAT32, 6), prefix_lse(DType::FLOAT32, 6, 3.0), suffix_lse(DType::FLOAT32, 6, 3.0);
  MergeAttnStatesParams p{};
  p.dtype = dtype;
  p.num_tokens = 3;
  p.num_heads = 2;
  p.head_size = 70;
  p.output = output.data();
  p.output_lse = lse.data<float>();
  p.prefix_output = prefix.data();
  p.prefix_lse = prefix_lse.data<float>();
  p.suffix_output = suffix.data();
  p.suffix_lse = suffix_lse.data<float>();
  p.ln_base = 1.0f;
  PAGEDATTN_CPU_KERNEL(merge_attn_states)(p, 0, 6);
  judge(std::string("merge_attn_states of ") + name_of(dtype), output);
  judge(std::string("merge_attn_states of ") + name_of(dtype) + ", lse", lse);
}

}  // namespace

void attention_cases(Judge& judge) {
  const Shape shapes[] = {
      {"decode", 8, 2, 64, 16, {5, 700, 133}, {1, 1, 1}, false},
      {"decode of 3 heads", 6, 2, 80, 8, {31, 270}, {1, 1}, true},
      {"decode of 1 head", 2, 2, 96, 32, {300}, {1}, false},
      {"prefill", 4, 2, 64, 16, {150}, {45}, true},
      {"small blocks", 2, 1, 48, 4, {70}, {3}, false},
  };
  for (const CacheLayout layout : {CacheLayout::CHUNKED, CacheLayout::NHD}) {
    for (const Shape& shape : shapes) {
      for (const DType dtype : FLOATS) attention(judge, shape, dtype, dtype, layout);
      for (const DType cache : {DType::FLOAT8_E4M3, DType::FLOAT8_E5M2, DType::INT8}) {
        if (cache == DType::INT8 && (layout == CacheLayout::NHD || shape.block_size < 8)) continue;
        attention(judge, shape, DType::FLOAT32, cache, layout);
        attention(judge, shape, DType::BFLOAT16, cache, layout);
      }
    }
    all_codes(judge, DType::FLOAT8_E4M3, layout);
    all_codes(judge, DType::FLOAT8_E5M2, layout);
  }
  const Shape largest{"the largest codes", 7, 1, MAX_HEAD_SIZE, 16, {300}, {1}, false, true};
  attention(judge, largest, DType::FLOAT32, DType::INT8, CacheLayout::CHUNKED);
  for (const DType dtype : FLOATS) {
    latent_attention(judge, dtype);
    merged_states(judge, dtype);
  }
}

}  // namespace cases
