// softmax, and rows of which a part is kept: renormalised probabilities, masked logits. A thread block has a row.
#include "sampling/filter_rows.cuh"

namespace pagedattn::cuda {
namespace {

// Grid: rows.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS) softmax_kernel(SoftmaxParams p) {
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + row * p.logits_stride;
  float* out = p.out + row * p.out_stride;
  const float factor = p.temperature.are_given ? inverse_temperature(p.temperature[row]) : 1.0f;
  const float greatest = max_of_row(p.vocab_size, [&](int64_t i) { return to_float(logits[i]); });
  const double sum = sum_of_row(p.vocab_size, [&](int64_t i) {
    const float x = to_float(logits[i]);
    out[i] = x == -INFINITY ? 0.0f : expf((x - greatest) * factor);
    return static_cast<double>(out[i]);
  });
  // A thread reads what it has written itself.
  const float inverse = 1.0f / static_cast<float>(sum);
  for (int64_t i = threadIdx.x; i < p.vocab_size; i += ROW_THREADS) out[i] *= inverse;
}

// Grid: rows.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS) renorm_probs_kernel(FilterRowsParams p) {
  const int64_t row = blockIdx.x;
  const T* probs = static_cast<const T*>(p.input) + row * p.input_stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const auto element = [&](int64_t i) { return to_float(probs[i]); };
  const RowFacts facts = summarise(p.vocab_size, element);
  Kept kept{-INFINITY, NAN};  // no distribution: NaN
  if (facts.max == 0.0f && facts.sum == 0.0) {
    kept.sum = 1.0;  // all zeros, which stay
  } else if (is_distribution(facts)) {
    kept = keep(p.vocab_size, element, facts, p.filters, row);
  }
  const auto sum = static_cast<float>(kept.sum);
  for (int64_t i = threadIdx.x; i < p.vocab_size; i += ROW_THREADS) {
    const float x = element(i);
    out[i] = from_float<T>(x < kept.threshold ? 0.0f : x / sum);
  }
}

// Grid: rows.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS) top_k_mask_logits_kernel(FilterRowsParams p) {
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(p.input) + row * p.input_stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const auto element = [&](int64_t i) { return to_float(logits[i]); };
  const int64_t k = p.filters.top_k[row];
  const float threshold = k < p.vocab_size ? kth_greatest(p.vocab_size, k, element) : -INFINITY;
  for (int64_t i = threadIdx.x; i < p.vocab_size; i += ROW_THREADS) {
    out[i] = element(i) < threshold ? from_float<T>(-INFINITY) : logits[i];
  }
}

}  // namespace

void softmax(const SoftmaxParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    launch(softmax_kernel<T>, dim3(grid_size(params.num_rows)), dim3(ROW_THREADS), ROW_SHARED_BYTES, stream, params);
  });
}

void renorm_probs(const FilterRowsParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    launch(renorm_probs_kernel<T>, dim3(grid_size(params.num_rows)), dim3(ROW_THREADS), ROW_SHARED_BYTES, stream,
           params);
  });
}

void top_k_mask_logits(const FilterRowsParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    launch(top_k_mask_logits_kernel<T>, dim3(grid_size(params.num_rows)), dim3(ROW_THREADS), ROW_SHARED_BYTES, stream,
           params);
  });
}

}  // namespace pagedattn::cuda
