// rms_norm: a first pass adds the residual to a row, if there is one, and sums the squares; a second pass scales the
// row. The row stays in the nearest cache between the two passes, so memory is read and written once. layer_norm takes
// one pass more, for the mean.
#include "layernorm/layernorm.h"

#include "cpu_memory.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Whether rows of T are fetched before they are read. With AVX512, fetching gains more than it costs; where there is
// AVX512-BF16, this holds for fp32 alone. Elsewhere fetching costs a quarter of the time if the rows are in the caches,
// and the op before has left them there if they fit (docs/cpu-kernels-lab-book.md).
template <typename T>
bool fetches_rows([[maybe_unused]] const RmsNormParams& p) {
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
  return true;
#elif defined(__AVX512F__)
  return sizeof(T) == 4;
#else
  return sizeof(T) == 4 && p.num_rows * p.hidden_size * static_cast<int64_t>(sizeof(T)) >= MIN_STREAMED_BYTES;
#endif
}

template <typename T, bool HAS_RESIDUAL, bool ADDS_ONE, bool STREAM, bool FETCHES>
void rms_norm_row(const RmsNormParams& p, int64_t row) {
  const T* input = static_cast<const T*>(p.input) + p.input_rows[row];
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + p.out_rows[row];
  T* residual = HAS_RESIDUAL ? static_cast<T*>(p.residual) + p.residual_rows[row] : nullptr;

  const auto sum_at = [&](int64_t i, auto load) {
    Vec x = load(input + i);
    if constexpr (HAS_RESIDUAL) x = x + load(residual + i);
    return x;
  };
  // The hardware fetches ahead only within a page of 4 KiB. The second pass reads nothing new, so it fetches the next
  // row. The first pass fetches the lines that the second pass will write. Of 16 bits, one try is enough, as a line has
  // two vectors.
  constexpr int TRIES = sizeof(T) == 4 ? 3 : 1;
  const Vec sums = sum_vectors<T>(p.hidden_size, [&](Vec squares, int64_t i, auto load) {
    if constexpr (FETCHES && !HAS_RESIDUAL && !STREAM) prefetch_line(out + i);
    const Vec x = sum_at(i, load);
    return fma(x, x, squares);
  });
  const float sum = reduce_sum(sums);
  const float mean = sum / static_cast<float>(p.hidden_size);
  const Vec inverse_rms = broadcast(1.0f / __builtin_sqrtf(mean + p.epsilon));

  // The residual is added again in fp32, because the sum in memory would be rounded.
  const auto norm = [&](Vec x, int64_t i, auto load) {
    if constexpr (FETCHES) prefetch_line<TRIES>(input + p.input_rows.stride + i);
    if constexpr (FETCHES && HAS_RESIDUAL) prefetch_line<TRIES>(residual + p.residual_rows.stride + i);
    const Vec w = load(weight + i);
    return x * inverse_rms * (ADDS_ONE ? w + broadcast(1.0f) : w);
  };
  if constexpr (HAS_RESIDUAL) {
    write_vectors<STREAM>(p.hidden_size, {residual, out}, [&](int64_t i, auto load) {
      const Vec x = sum_at(i, load);
      return Vecs<2>{{x, norm(x, i, load)}};
    });
  } else {
    write_vectors<STREAM>(p.hidden_size, {out},
                          [&](int64_t i, auto load) { return Vecs<1>{{norm(sum_at(i, load), i, load)}}; });
  }
}

template <typename T, bool ADDS_ONE, bool FETCHES>
void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  if (p.residual != nullptr) {
    for (int64_t row = begin; row < end; ++row) rms_norm_row<T, true, ADDS_ONE, false, FETCHES>(p, row);
    return;
  }
  // The places of all rows are multiples of what divides both strides.
  choose_stream(MIN_STREAMED_BYTES, p.input, static_cast<const T*>(p.out), p.out_rows.stride | p.out_rows.group_stride,
                p.num_rows, p.hidden_size, [&]<bool STREAM>() {
                  for (int64_t row = begin; row < end; ++row) rms_norm_row<T, false, ADDS_ONE, STREAM, FETCHES>(p, row);
                });
}

template <typename T, bool ADDS_ONE>
void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  fetches_rows<T>(p) ? rms_norm_rows<T, ADDS_ONE, true>(p, begin, end)
                     : rms_norm_rows<T, ADDS_ONE, false>(p, begin, end);
}

template <typename T, typename W>
void layer_norm_row(const LayerNormParams& p, int64_t row) {
  const T* input = static_cast<const T*>(p.input) + p.input_rows[row];
  const W* weight = static_cast<const W*>(p.weight);
  const W* bias = static_cast<const W*>(p.bias);
  T* out = static_cast<T*>(p.out) + p.out_rows[row];

  const float size = static_cast<float>(p.hidden_size);
  const Vec sums = sum_vectors<T>(p.hidden_size, [&](Vec sum, int64_t i, auto load) { return sum + load(input + i); });
  const float mean = reduce_sum(sums) / size;

  const int64_t rest = p.hidden_size % VEC_SIZE;
  const int64_t whole = p.hidden_size - rest;
  Vec squares = sum_vectors<T>(whole, [&](Vec sum, int64_t i, auto load) {
    const Vec deviation = load(input + i) - broadcast(mean);
    return fma(deviation, deviation, sum);
  });
  if (rest > 0) {
    float means[VEC_SIZE];
    store(means, broadcast(mean));
    const Vec deviation = load_first(input + whole, rest) - load_first(means, rest);  // 0 behind the end of the row
    squares = fma(deviation, deviation, squares);
  }
  const Vec inverse_deviation = broadcast(1.0f / __builtin_sqrtf(reduce_sum(squares) / size + p.epsilon));

  const auto norm = [&](int64_t i, auto load) {
    return fma((load(input + i) - broadcast(mean)) * inverse_deviation, load(weight + i), load(bias + i));
  };
  if constexpr (std::is_same_v<T, W>) {
    write_vectors<false>(p.hidden_size, {out}, [&](int64_t i, auto load) { return Vecs<1>{{norm(i, load)}}; });
  } else {
    for_each_vector(p.hidden_size, [&](int64_t i, auto load, auto store) { store(out + i, norm(i, load)); });
  }
}

}  // namespace

void rms_norm(const RmsNormParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    params.adds_one ? rms_norm_rows<T, true>(params, begin, end) : rms_norm_rows<T, false>(params, begin, end);
  });
}

void layer_norm(const LayerNormParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    const bool is_like_input = params.weight_dtype == params.dtype;
    for (int64_t row = begin; row < end; ++row) {
      is_like_input ? layer_norm_row<T, T>(params, row) : layer_norm_row<T, float>(params, row);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
