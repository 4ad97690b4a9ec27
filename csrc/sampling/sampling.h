// softmax, renorm_probs, top_k_mask_logits, sample_from_probs, chain_speculative_sampling: parameters and kernels.
#pragma once

#include "cpu_dispatch.h"
#include "types.h"

namespace pagedattn {

// A number for each row, or one for all rows.
template <typename Numbers>
struct OfRows {
  Numbers numbers;  // [num_rows], or [1]
  int64_t step;     // 1, or 0
  bool are_given;

  constexpr auto operator[](int64_t row) const { return numbers[row * step]; }
};

// A token is kept if it passes all filters that are given.
struct Filters {
  OfRows<Indices> top_k;  // at least 1; ties of the k-th probability are kept
  OfRows<const float*> top_p;
  OfRows<const float*> min_p;
  bool top_k_first;  // top_p is of what top_k keeps, renormalised
};

struct Seeds {
  OfRows<const int64_t*> seed;
  OfRows<const int64_t*> offset;
  OfRows<const int64_t*> subsequence{};  // not given: a row has its index
};

// Memory of a thread of the CPU for what it knows of a row, as 64-byte lines.
constexpr int64_t ROW_BLOCK = 64;  // elements
constexpr int64_t num_row_blocks(int64_t vocab_size) { return (vocab_size + ROW_BLOCK - 1) / ROW_BLOCK; }
constexpr int64_t row_scratch_bytes(int64_t vocab_size) {
  constexpr int64_t BLOCK_BYTES = sizeof(double) + sizeof(float) + ROW_BLOCK * sizeof(float);
  return (num_row_blocks(vocab_size) * BLOCK_BYTES + 63) / 64 * 64;
}

struct SoftmaxParams {
  DType dtype;
  int64_t num_rows;
  int64_t vocab_size;
  float* out;  // [num_rows, vocab_size]
  int64_t out_stride;
  const void* logits;  // [num_rows, vocab_size]
  int64_t logits_stride;
  OfRows<const float*> temperature;
};

// renorm_probs and top_k_mask_logits.
struct FilterRowsParams {
  DType dtype;
  int64_t num_rows;
  int64_t vocab_size;
  void* out;  // [num_rows, vocab_size]; may be the input
  int64_t out_stride;
  const void* input;  // [num_rows, vocab_size]
  int64_t input_stride;
  Filters filters;
  void* scratch;
};

struct SampleFromProbsParams {
  DType dtype;
  int64_t num_rows;  // of the results
  int64_t vocab_size;
  void* out;  // [num_rows], int64 or int32
  bool out_is_int64;
  bool* valid;        // [num_rows]
  const void* probs;  // [num_distributions, vocab_size]
  int64_t probs_stride;
  Indices indices;  // [num_rows], the distribution of each row; not given: row i has distribution i
  Filters filters;  // of the distributions
  Seeds seeds;
  void* scratch;
};

struct ChainSpeculativeSamplingParams {
  DType dtype;
  int64_t num_rows;
  int64_t num_draft_tokens;
  int64_t vocab_size;
  int32_t* out;              // [num_rows, num_draft_tokens + 1]
  int32_t* num_accepted;     // [num_rows]; grows
  int32_t* num_emitted;      // [num_rows]; grows
  const void* draft_probs;   // [num_rows, num_draft_tokens, vocab_size]
  Indices draft_token_ids;   // [num_rows, num_draft_tokens]
  const void* target_probs;  // [num_rows, num_draft_tokens + 1, vocab_size]
  Seeds seeds;
  void* scratch;

  // A count behind the greatest int32 goes on at the least.
  constexpr void count(int64_t row, int64_t accepted, int64_t emitted) const {
    num_accepted[row] = static_cast<int32_t>(num_accepted[row] + accepted);
    num_emitted[row] = static_cast<int32_t>(num_emitted[row] + emitted);
  }
};

// What logits are multiplied with. At a temperature of 0 all tokens that are not at -infinity get the same probability,
// as in FlashInfer.
constexpr float inverse_temperature(float temperature) {
  constexpr float LEAST_WITH_FINITE_INVERSE = 0x1p-127f;
  if (temperature == 0.0f) return 0.0f;
  return 1.0f / (temperature < LEAST_WITH_FINITE_INVERSE ? LEAST_WITH_FINITE_INVERSE : temperature);
}

// Rows [begin, end).
PAGEDATTN_DECLARE_CPU_KERNEL(softmax, const SoftmaxParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(renorm_probs, const FilterRowsParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(top_k_mask_logits, const FilterRowsParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(sample_from_probs, const SampleFromProbsParams& params, int64_t begin, int64_t end)
PAGEDATTN_DECLARE_CPU_KERNEL(chain_speculative_sampling, const ChainSpeculativeSamplingParams& params, int64_t begin,
                             int64_t end)

namespace cuda {
void softmax(const SoftmaxParams& params, cudaStream_t stream);
void renorm_probs(const FilterRowsParams& params, cudaStream_t stream);
void top_k_mask_logits(const FilterRowsParams& params, cudaStream_t stream);
void sample_from_probs(const SampleFromProbsParams& params, cudaStream_t stream);
void chain_speculative_sampling(const ChainSpeculativeSamplingParams& params, cudaStream_t stream);
}  // namespace cuda

}  // namespace pagedattn
