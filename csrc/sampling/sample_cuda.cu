// A token is drawn by one number of [0, 1). Each warp of a thread block has a part of the row, one after the other. The
// sums of the parts say in which part the number falls, and the warp of this part finds the token, 32 at a time.
#include "sampling/filter_rows.cuh"
#include "sampling/philox.h"

namespace pagedattn::cuda {
namespace {

__device__ inline double number_of(const Seeds& seeds, int64_t row, int64_t draw = 0) {
  const int64_t subsequence = seeds.subsequence.are_given ? seeds.subsequence[row] : row;
  return uniform_number(seeds.seed[row], static_cast<uint64_t>(seeds.offset[row]) + draw, subsequence);
}

// The first of the tokens up to which weight(token) sums to more than `share` of the sum of all, share below 1. Some
// weight is not 0. For all threads.
template <typename Weight>
__device__ int64_t token_at(int64_t vocab_size, double share, const Weight& weight) {
  auto* sums = reinterpret_cast<double*>(shared_memory);  // [ROW_WARPS]
  const int lane = static_cast<int>(threadIdx.x) % WARP_SIZE;
  const int warp = static_cast<int>(threadIdx.x) / WARP_SIZE;
  const int64_t part = ceil_div<int64_t>(vocab_size, ROW_WARPS);
  const auto end_of = [&](int of_warp) { return min((of_warp + 1) * part, vocab_size); };
  double sum = 0.0;
  for (int64_t i = warp * part + lane; i < end_of(warp); i += WARP_SIZE) sum += weight(i);
  for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
  __syncthreads();  // all have read what was there before
  if (lane == 0) sums[warp] = sum;
  __syncthreads();

  double total = 0.0;
  for (int i = 0; i < ROW_WARPS; ++i) total += sums[i];
  const double target = share * total;
  int chosen = 0;  // the part up to which the sum is more than the target, or the last with any weight
  double before = 0.0;
  double end = 0.0;
  for (int i = 0; i < ROW_WARPS && end <= target; ++i) {
    if (sums[i] > 0.0) {
      chosen = i;
      before = end;
    }
    end += sums[i];
  }

  // Every warp walks the chosen part, so that every thread knows the token.
  int64_t token = 0;
  for (int64_t first = chosen * part; first < end_of(chosen); first += WARP_SIZE) {
    const int64_t mine = first + lane;
    const double own = mine < end_of(chosen) ? weight(mine) : 0.0;
    double up_to = own;
    for (int lanes = 1; lanes < WARP_SIZE; lanes *= 2) {
      const double other = __shfl_up_sync(ALL_LANES, up_to, lanes);
      if (lane >= lanes) up_to += other;
    }
    const unsigned weighty = __ballot_sync(ALL_LANES, own > 0.0);
    const unsigned reaching = __ballot_sync(ALL_LANES, own > 0.0 && before + up_to > target);
    if (reaching != 0) return first + __ffs(static_cast<int>(reaching)) - 1;
    if (weighty != 0) token = first + WARP_SIZE - 1 - __clz(static_cast<int>(weighty));
    before += __shfl_sync(ALL_LANES, up_to, WARP_SIZE - 1);
  }
  return token;
}

// Grid: rows of the results.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS) sample_from_probs_kernel(SampleFromProbsParams p) {
  const int64_t row = blockIdx.x;
  const int64_t distribution = p.indices.is_given() ? p.indices[row] : row;
  const T* probs = static_cast<const T*>(p.probs) + distribution * p.probs_stride;
  const auto element = [&](int64_t i) { return to_float(probs[i]); };
  const RowFacts facts = summarise(p.vocab_size, element);
  const bool is_valid = is_distribution(facts);
  int64_t token = 0;
  if (is_valid) {
    const Kept kept = keep(p.vocab_size, element, facts, p.filters, distribution);
    token = token_at(p.vocab_size, number_of(p.seeds, row), [&](int64_t i) {
      const float x = element(i);
      return x >= kept.threshold ? static_cast<double>(x) : 0.0;
    });
  }
  if (threadIdx.x != 0) return;
  p.valid[row] = is_valid;
  if (p.out_is_int64) {
    static_cast<int64_t*>(p.out)[row] = token;
  } else {
    static_cast<int32_t*>(p.out)[row] = static_cast<int32_t>(token);
  }
}

// Grid: rows.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS) chain_speculative_sampling_kernel(ChainSpeculativeSamplingParams p) {
  const int64_t row = blockIdx.x;
  const int64_t n = p.num_draft_tokens;
  const T* draft_probs = static_cast<const T*>(p.draft_probs) + row * n * p.vocab_size;
  const T* target_probs = static_cast<const T*>(p.target_probs) + row * (n + 1) * p.vocab_size;
  int32_t* out = p.out + row * (n + 1);

  int64_t num_accepted = 0;
  int64_t num_emitted = n;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t token = p.draft_token_ids[row * n + i];
    const float draft = to_float(draft_probs[i * p.vocab_size + token]);
    const float target = to_float(target_probs[i * p.vocab_size + token]);
    if (number_of(p.seeds, row, i) * draft < target) {
      ++num_accepted;
      if (i < num_emitted && threadIdx.x == 0) out[i] = static_cast<int32_t>(token);
    } else if (num_emitted == n) {
      num_emitted = i;
    }
  }

  // A token of what the target has more than the draft; of the target itself if there is nothing more, or no draft.
  const T* target = target_probs + num_emitted * p.vocab_size;
  const T* draft = draft_probs + num_emitted * p.vocab_size;
  const auto target_at = [&](int64_t i) { return to_float(target[i]); };
  const auto rest_at = [&](int64_t i) { return fmaxf(target_at(i) - to_float(draft[i]), 0.0f); };
  const double share = number_of(p.seeds, row, n);
  int64_t token = 0;
  if (num_emitted < n && is_distribution(summarise(p.vocab_size, rest_at))) {
    token = token_at(p.vocab_size, share, [&](int64_t i) { return static_cast<double>(rest_at(i)); });
  } else if (is_distribution(summarise(p.vocab_size, target_at))) {
    token = token_at(p.vocab_size, share, [&](int64_t i) { return static_cast<double>(target_at(i)); });
  }
  if (threadIdx.x != 0) return;
  out[num_emitted] = static_cast<int32_t>(token);
  for (int64_t i = num_emitted + 1; i <= n; ++i) out[i] = -1;
  p.count(row, num_accepted, num_emitted);
}

}  // namespace

void sample_from_probs(const SampleFromProbsParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    launch(sample_from_probs_kernel<T>, dim3(grid_size(params.num_rows)), dim3(ROW_THREADS), ROW_SHARED_BYTES, stream,
           params);
  });
}

void chain_speculative_sampling(const ChainSpeculativeSamplingParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    launch(chain_speculative_sampling_kernel<T>, dim3(grid_size(params.num_rows)), dim3(ROW_THREADS), ROW_SHARED_BYTES,
           stream, params);
  });
}

}  // namespace pagedattn::cuda
