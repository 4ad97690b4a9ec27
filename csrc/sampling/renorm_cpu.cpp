// softmax, and rows of which a part is kept: renormalised probabilities, masked logits.
#include "cpu_math.h"
#include "cpu_rows.h"
#include "dispatch.h"
#include "sampling/filter_rows_cpu.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <typename T>
void softmax_row(const T* logits, float* out, int64_t size, float temperature) {
  const Vec not_visible = broadcast(-INFINITE);
  Vec maximum = not_visible;
  for_each_vector(size / VEC_SIZE * VEC_SIZE, [&](int64_t i, auto load, auto) PAGEDATTN_ALWAYS_INLINE {
    maximum = max(load(logits + i), maximum);
  });
  float greatest = reduce_max(maximum);
  for (int64_t i = size / VEC_SIZE * VEC_SIZE; i < size; ++i) {
    const float x = load_first(logits + i, 1)[0];
    greatest = x > greatest ? x : greatest;
  }

  const Vec factor = broadcast(inverse_temperature(temperature));
  for_each_vector(size, [&](int64_t i, auto load, auto store) PAGEDATTN_ALWAYS_INLINE {
    const Vec x = load(logits + i);
    store(out + i, select(x == not_visible, Vec{}, exp((x - greatest) * factor)));
  });
  const Vec sums = sum_vectors<float>(size, [&](Vec sum, int64_t i, auto load) { return sum + load(out + i); });
  const Vec inverse = broadcast(1.0f / reduce_sum(sums));
  for_each_vector(size, [&](int64_t i, auto load, auto store) { store(out + i, load(out + i) * inverse); });
}

template <typename T>
void renorm_row(const FilterRowsParams& p, const T* probs, T* out, int64_t i) {
  const Row<T> row(probs, p.vocab_size, T{}, p.scratch);
  const RowFacts facts = summarise(row);
  Kept kept{-INFINITE, __builtin_nan("")};  // no distribution: NaN
  if (facts.max == 0.0f && facts.sum == 0.0) {
    kept.sum = 1.0;  // all zeros, which stay
  } else if (is_distribution(facts)) {
    kept = keep(row, facts, p.filters, i);
  }
  const Vec threshold = broadcast(kept.threshold);
  const Vec sum = broadcast(static_cast<float>(kept.sum));
  for_each_vector(p.vocab_size, [&](int64_t j, auto load, auto store) PAGEDATTN_ALWAYS_INLINE {
    const Vec x = load(probs + j);
    store(out + j, select(x < threshold, Vec{}, x / sum));
  });
}

// Logits that are NaN stay.
template <typename T>
void mask_row(const FilterRowsParams& p, const T* logits, T* out, int64_t i) {
  const int64_t k = p.filters.top_k[i];
  Vec threshold = broadcast(-INFINITE);
  if (k < p.vocab_size) {
    const Row<T> row(logits, p.vocab_size, logits[p.vocab_size - 1], p.scratch);
    summarise(row);
    threshold = broadcast(kth_greatest(row, k));
  }
  for_each_vector(p.vocab_size, [&](int64_t j, auto load, auto store) PAGEDATTN_ALWAYS_INLINE {
    const Vec x = load(logits + j);
    store(out + j, select(x < threshold, broadcast(-INFINITE), x));
  });
}

// row_function<T>(params, input row, out row, row)
template <typename Function>
void filter_rows(const FilterRowsParams& params, int64_t begin, int64_t end, const Function& row_function) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      row_function(params, static_cast<const T*>(params.input) + row * params.input_stride,
                   static_cast<T*>(params.out) + row * params.out_stride, row);
    }
  });
}

}  // namespace

void softmax(const SoftmaxParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      softmax_row(static_cast<const T*>(params.logits) + row * params.logits_stride,
                  params.out + row * params.out_stride, params.vocab_size,
                  params.temperature.are_given ? params.temperature[row] : 1.0f);
    }
  });
}

void renorm_probs(const FilterRowsParams& params, int64_t begin, int64_t end) {
  filter_rows(params, begin, end,
              [](const auto& p, const auto* probs, auto* out, int64_t row) { renorm_row(p, probs, out, row); });
}

void top_k_mask_logits(const FilterRowsParams& params, int64_t begin, int64_t end) {
  filter_rows(params, begin, end,
              [](const auto& p, const auto* logits, auto* out, int64_t row) { mask_row(p, logits, out, row); });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
