// Attention of a ragged batch of query rows over a paged cache, or over keys and values that lie one after the other.
// The ops paged_attention_v1, paged_attention_v2, paged_attention and varlen_attention fill the same parameters and run
// the same kernels. What a CPU's threads do is in paged_attention_plan.h.
#pragma once

#include <cstdint>

#include "types.h"

namespace pagedattn {

constexpr int64_t NO_SLIDING_WINDOW = INT64_MAX;
constexpr int64_t NO_RIGHT_WINDOW = INT32_MAX;  // no sequence is longer

struct PagedAttentionParams {
  DType dtype;  // of query and out
  DType cache_dtype;
  int64_t num_seqs;
  int64_t num_tokens;  // query rows
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t block_size;
  float logit_scale;                 // times query . key as stored
  float value_scale;                 // times a value as stored
  const float* key_scale_on_device;  // a factor of logit_scale that kernels read when they run; nullptr: 1
  const float* value_scale_on_device;
  float softcap;            // logits = softcap * tanh(logits / softcap); 0: none
  int64_t sliding_window;   // a row sees this many tokens up to its own, which counts
  int64_t right_window;     // and this many after its own, at most NO_RIGHT_WINDOW; 0: causal
  int64_t attention_chunk;  // and no token of another chunk of so many tokens, at most MAX_TOKENS; 0: no chunks
  void* out;                // [num_tokens, num_heads, head_size]
  int64_t out_stride;       // elements between tokens
  float* lse;               // [num_tokens, num_heads], log of the sum of exponentials; may be nullptr
  const void* query;        // [num_tokens, num_heads, head_size]
  int64_t query_stride;
  CacheLayout layout;
  const void* key_cache;
  CacheStrides key_strides;
  const void* value_cache;
  CacheStrides value_strides;
  Indices block_tables;        // [num_seqs, max_num_blocks_per_seq]; not given: key_start_loc
  int64_t block_table_stride;  // elements between sequences
  Indices key_start_loc;       // [num_seqs + 1], in the NHD layout: a sequence's first key and value in block 0
  int64_t max_seq_len;         // no sequence is longer; at most the slots of a row of block_tables
  Indices seq_lens;            // [num_seqs], tokens in cache, including the tokens of this batch; or key_start_loc
  Indices query_start_loc;     // [num_seqs + 1]; not given: one row a sequence
  const float* alibi_slopes;   // [num_seqs, num_heads]; may be nullptr
  int64_t alibi_stride;        // elements between sequences; 0: the same slopes for all
  const float* sinks;          // [num_heads], a logit without a value; may be nullptr

  constexpr int64_t row_begin(int64_t seq) const { return query_start_loc.is_given() ? query_start_loc.low(seq) : seq; }
  constexpr int64_t row_end(int64_t seq) const { return row_begin(seq + 1); }
  constexpr int64_t seq_len(int64_t seq) const {
    return key_start_loc.is_given() ? key_start_loc.low(seq + 1) - key_start_loc.low(seq) : seq_lens.low(seq);
  }
  constexpr float alibi_slope(int64_t seq, int64_t head) const {
    return alibi_slopes == nullptr ? 0.0f : alibi_slopes[seq * alibi_stride + head];
  }
  constexpr Indices block_table(int64_t seq) const { return block_tables.from(seq * block_table_stride); }
  // The position of a row's token. The rows are the last tokens of their sequence. If there are more rows than tokens,
  // the first positions are negative.
  constexpr int64_t position(int64_t seq, int64_t row) const { return seq_len(seq) - row_end(seq) + row; }
  // The first token of the row's chunk. A row before the first token is in no chunk, and sees nothing.
  constexpr int64_t first_of_chunk(int64_t position) const {
    return attention_chunk == 0 || position < 0 ? 0 : position / attention_chunk * attention_chunk;
  }
  constexpr int64_t first_visible(int64_t position) const {
    const int64_t of_window = position >= sliding_window ? position - sliding_window + 1 : 0;
    const int64_t of_chunk = first_of_chunk(position);
    return of_window > of_chunk ? of_window : of_chunk;
  }
  // The first token that some row of the sequence sees.
  constexpr int64_t first_seen(int64_t seq) const { return first_visible(position(seq, row_begin(seq))); }
  // The end of the tokens that the window and the chunk of a row leave. The sequence may end before.
  constexpr int64_t end_of_window(int64_t position) const {
    const int64_t of_window = position + 1 + right_window;
    if (attention_chunk == 0) return of_window;
    const int64_t of_chunk = position < 0 ? 0 : first_of_chunk(position) + attention_chunk;
    return of_window < of_chunk ? of_window : of_chunk;
  }
  // The end of the tokens that a row sees; not above 0 if the row sees nothing.
  constexpr int64_t visible_end(int64_t seq, int64_t position) const {
    const int64_t end = end_of_window(position);
    return end < seq_len(seq) ? end : seq_len(seq);
  }
};

// A softmax over part of the tokens is kept as (maximum, sum of exponentials, weighted sum of values), and is merged
// with the softmax over the other tokens: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. A
// row's tokens are always split at the same places, multiples of PARTITION_TOKENS and TILE_TOKENS, whatever else is in
// the batch and however many threads run. So a row's result depends on its own sequence alone, to the last bit.
constexpr int64_t PARTITION_TOKENS = 512;
constexpr int64_t TILE_TOKENS = 128;

// The kernels for CHUNKED caches read so many adjacent tokens at once.
constexpr int64_t CHUNKED_TOKENS = 8;

// Whether blocks have fewer tokens. On the CPU, tiles are then copied before they are read (cpu/small_blocks.h). On
// CUDA, they are loaded by the kernels for the NHD layout (cuda/nhd_slice.cuh).
constexpr bool has_small_blocks(const PagedAttentionParams& params) {
  return params.layout == CacheLayout::CHUNKED && params.block_size < CHUNKED_TOKENS;
}

namespace cuda {
// Bytes of scratch that paged_attention needs on the current device: a function of shapes alone.
int64_t paged_attention_scratch_bytes(const PagedAttentionParams& params);
void paged_attention(const PagedAttentionParams& params, void* scratch, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
