// A token is drawn by one number of [0, 1): the sums of a row's blocks say in which block it falls, and the elements of
// this block, one after the other, say on which token. Results in a row that are of the same distribution share what is
// known of it.
#include "dispatch.h"
#include "sampling/filter_rows_cpu.h"
#include "sampling/philox.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// The first kept token up to which the kept probabilities sum to more than `share` of the sum of all, share below 1.
template <typename T>
int64_t token_at(const Row<T>& row, const Kept& kept, double share) {
  const double target = share * kept.sum;
  int64_t block = 0;
  for (int64_t num_left = row.num_blocks(); num_left > 0;) {
    const int64_t half = num_left / 2;
    if (row.block_end[block + half] > target) {
      num_left = half;
    } else {
      block += half + 1;
      num_left -= half + 1;
    }
  }

  float x[ROW_BLOCK];
  for_vectors_of_block(row, block,
                       [&](int i, Vec v) PAGEDATTN_ALWAYS_INLINE { __builtin_memcpy(x + i * VEC_SIZE, &v, sizeof v); });
  double sum = block == 0 ? 0.0 : row.block_end[block - 1];
  int64_t token = 0;  // the last one that may be drawn, as the block's own sum may be rounded up
  for (int64_t i = 0; i < ROW_BLOCK; ++i) {
    if (!(x[i] >= kept.threshold && x[i] > 0.0f)) continue;
    token = block * ROW_BLOCK + i;
    sum += x[i];
    if (sum > target) break;
  }
  return token;
}

PAGEDATTN_INLINE double number_of(const Seeds& seeds, int64_t row, int64_t draw = 0) {
  const int64_t subsequence = seeds.subsequence.are_given ? seeds.subsequence[row] : row;
  return uniform_number(seeds.seed[row], static_cast<uint64_t>(seeds.offset[row]) + draw, subsequence);
}

template <typename T>
void sample_rows(const SampleFromProbsParams& p, int64_t begin, int64_t end) {
  const auto distribution_of = [&](int64_t row) { return p.indices.is_given() ? p.indices[row] : row; };
  bool is_valid = false;
  Kept kept{};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t distribution = distribution_of(i);
    const Row<T> row(static_cast<const T*>(p.probs) + distribution * p.probs_stride, p.vocab_size, T{}, p.scratch);
    if (i == begin || distribution != distribution_of(i - 1)) {
      const RowFacts facts = summarise(row);
      is_valid = is_distribution(facts);
      if (is_valid) kept = keep(row, facts, p.filters, distribution);
    }
    const int64_t token = is_valid ? token_at(row, kept, number_of(p.seeds, i)) : 0;
    if (p.out_is_int64) {
      static_cast<int64_t*>(p.out)[i] = token;
    } else {
      static_cast<int32_t*>(p.out)[i] = static_cast<int32_t>(token);
    }
    p.valid[i] = is_valid;
  }
}

// A token of what `target` has more than `draft`; of `target` itself if there is nothing more, or no draft (nullptr).
template <typename T>
int64_t token_of_rest(const T* target, const T* draft, int64_t vocab_size, void* scratch, double share) {
  if (draft != nullptr) {
    // The differences lie behind the scratch of a row.
    auto* rest = reinterpret_cast<float*>(static_cast<char*>(scratch) + row_scratch_bytes(vocab_size));
    for (int64_t i = 0; i + VEC_SIZE <= vocab_size; i += VEC_SIZE) {
      store(rest + i, max(load(target + i) - load(draft + i), Vec{}));
    }
    const int64_t whole = vocab_size / VEC_SIZE * VEC_SIZE;
    const int64_t num_last = vocab_size - whole;
    store_first(rest + whole, max(load_first(target + whole, num_last) - load_first(draft + whole, num_last), Vec{}),
                num_last);
    const Row<float> row(rest, vocab_size, 0.0f, scratch);
    const RowFacts facts = summarise(row);
    if (is_distribution(facts)) return token_at(row, {-INFINITE, facts.sum}, share);
  }
  const Row<T> row(target, vocab_size, T{}, scratch);
  const RowFacts facts = summarise(row);
  return is_distribution(facts) ? token_at(row, {-INFINITE, facts.sum}, share) : 0;
}

template <typename T>
void verify_rows(const ChainSpeculativeSamplingParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.num_draft_tokens;
  for (int64_t row = begin; row < end; ++row) {
    const T* draft_probs = static_cast<const T*>(p.draft_probs) + row * n * p.vocab_size;
    const T* target_probs = static_cast<const T*>(p.target_probs) + row * (n + 1) * p.vocab_size;
    int32_t* out = p.out + row * (n + 1);

    int64_t num_accepted = 0;
    int64_t num_emitted = n;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = p.draft_token_ids[row * n + i];
      const float draft = load_first(draft_probs + i * p.vocab_size + token, 1)[0];
      const float target = load_first(target_probs + i * p.vocab_size + token, 1)[0];
      if (number_of(p.seeds, row, i) * draft < target) {
        ++num_accepted;
        if (i < num_emitted) out[i] = static_cast<int32_t>(token);
      } else if (num_emitted == n) {
        num_emitted = i;
      }
    }
    const T* draft_of_rest = num_emitted < n ? draft_probs + num_emitted * p.vocab_size : nullptr;
    out[num_emitted] = static_cast<int32_t>(token_of_rest(target_probs + num_emitted * p.vocab_size, draft_of_rest,
                                                          p.vocab_size, p.scratch, number_of(p.seeds, row, n)));
    for (int64_t i = num_emitted + 1; i <= n; ++i) out[i] = -1;
    p.count(row, num_accepted, num_emitted);
  }
}

}  // namespace

void sample_from_probs(const SampleFromProbsParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() { sample_rows<T>(params, begin, end); });
}

void chain_speculative_sampling(const ChainSpeculativeSamplingParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() { verify_rows<T>(params, begin, end); });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
