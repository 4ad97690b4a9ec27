// Multi-head latent attention with absorbed weights: parameters, the work of a CPU's threads, and kernels. All heads
// share one key for each token, the latent and then the rotary part, and the latent is the value as well. Source:
// DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
#pragma once

#include <cstdint>

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

// Elements between tokens, and between the heads of a token.
struct MlaQueryStrides {
  int64_t token;
  int64_t head;
};

// Elements between blocks, and between the tokens of a block.
struct MlaCacheStrides {
  int64_t block;
  int64_t token;
};

struct MlaAttentionParams {
  DType dtype;  // of queries, caches and out
  int64_t num_seqs;
  int64_t num_tokens;  // query rows
  int64_t num_heads;
  int64_t latent_size;
  int64_t rope_size;
  int64_t block_size;
  float scale;
  bool is_causal;
  void* out;           // [num_tokens, num_heads, latent_size]
  float* lse;          // [num_tokens, num_heads], log of the sum of exponentials
  const void* q_nope;  // [num_tokens, num_heads, latent_size]
  MlaQueryStrides q_nope_strides;
  const void* q_pe;  // [num_tokens, num_heads, rope_size]
  MlaQueryStrides q_pe_strides;
  const void* kv_c_cache;  // [num_blocks, block_size, latent_size]
  MlaCacheStrides kv_c_strides;
  const void* k_pe_cache;  // [num_blocks, block_size, rope_size]
  MlaCacheStrides k_pe_strides;
  Indices block_tables;        // [num_seqs, max_num_blocks_per_seq]
  int64_t block_table_stride;  // elements between sequences
  Indices seq_lens;            // [num_seqs], tokens in cache, including the tokens of this batch
  Indices query_start_loc;     // [num_seqs + 1]; not given: one row a sequence

  constexpr int64_t row_begin(int64_t seq) const { return query_start_loc.is_given() ? query_start_loc.low(seq) : seq; }
  constexpr int64_t row_end(int64_t seq) const { return row_begin(seq + 1); }
  constexpr int64_t seq_len(int64_t seq) const { return seq_lens.low(seq); }
  constexpr Indices block_table(int64_t seq) const { return block_tables.from(seq * block_table_stride); }
  // The first token that some row of the sequence sees.
  constexpr int64_t first_seen(int64_t) const { return 0; }
  // The end of the tokens that a row sees; not above 0 if the row sees nothing. The rows are the last tokens of their
  // sequence.
  constexpr int64_t visible_end(int64_t seq, int64_t row) const {
    return is_causal ? seq_len(seq) - row_end(seq) + row + 1 : seq_len(seq);
  }
};

// ---- on the CPU

// A query is a row at a head: query i is of row i / num_heads. A query's tokens are always split at the same places,
// multiples of MLA_PARTITION_TOKENS and MLA_TILE_TOKENS, whatever else is in the batch and however many threads run. So
// a query's result depends on its own sequence alone, to the last bit.
constexpr int64_t MLA_PARTITION_TOKENS = 512;
constexpr int64_t MLA_TILE_TOKENS = 64;

// So many queries of a sequence, at most, share the conversion of a tile.
constexpr int64_t MLA_ITEM_QUERIES = 64;

// Some queries of a sequence over some of its partitions.
struct MlaItem {
  int64_t seq;
  int64_t query_begin, query_end;
  int64_t partition_begin, partition_end;
  int64_t partial;  // where in `partials` the results of partition_begin go; -1: the results go to `out`
};

// Some queries whose partitions were computed one by one: the results of all partitions, one after the other.
struct MlaMerge {
  int64_t query_begin, query_end;
  int64_t num_partitions;
  int64_t partial;
};

// Sizes as kernels pad them.
constexpr int64_t mla_padded(int64_t size) { return (size + 63) / 64 * 64; }

// In `partials`, the results of a partition: maxima, sums, weighted latents.
constexpr int64_t mla_partial_floats(const MlaAttentionParams& params, int64_t num_queries) {
  return num_queries * (mla_padded(params.latent_size) + 2);
}

// Tokens whose keys are converted at a time, at most.
constexpr int64_t MLA_PANEL = 32;

// What an item has in scratch, in words of 4 bytes. A step of a query is one word or two numbers in bf16.
struct MlaScratch {
  int64_t queries = 0;  // [head_steps / 64, MLA_ITEM_QUERIES, 64]
  int64_t keys;         // [head_steps, columns], of up to MLA_PANEL tokens
  int64_t values;       // [latent_size / columns, MLA_TILE_TOKENS, columns]
  int64_t weights;      // [MLA_ITEM_QUERIES, MLA_TILE_TOKENS]
  int64_t partition;    // results
  int64_t total;        // results
  int64_t size;

  constexpr explicit MlaScratch(const MlaAttentionParams& params)
      : keys(queries + MLA_ITEM_QUERIES * mla_padded(params.latent_size + params.rope_size)),
        values(keys + MLA_PANEL * mla_padded(params.latent_size + params.rope_size)),
        weights(values + MLA_TILE_TOKENS * mla_padded(params.latent_size)),
        partition(weights + MLA_ITEM_QUERIES * MLA_TILE_TOKENS),
        total(partition + mla_partial_floats(params, MLA_ITEM_QUERIES)),
        size(total + mla_partial_floats(params, MLA_ITEM_QUERIES)) {}
};

// `scratch` has MlaScratch::size floats, aligned to 64 bytes.
PAGEDATTN_DECLARE_CPU_KERNEL(mla_attend, const MlaAttentionParams& params, const MlaItem& item, float* scratch,
                             float* partials)
PAGEDATTN_DECLARE_CPU_KERNEL(mla_merge, const MlaAttentionParams& params, const MlaMerge& merge, const float* partials,
                             float* scratch)

namespace cuda {
void mla_attention(const MlaAttentionParams& params, cudaStream_t stream);
}

}  // namespace pagedattn
