// One pass over each row in fp32, rounded once at the store.
#include "activation/activation.h"

#include "cpu_math.h"
#include "cpu_memory.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

PAGEDATTN_INLINE Vec silu(Vec x) { return times_sigmoid(x, x); }

PAGEDATTN_INLINE Vec gelu(Vec x) {
  constexpr float SQRT_HALF = 0.7071067811865476f;
  // The normal distribution's tail, exact on the side where it is small.
  const Vec tail = 0.5f * erfc(max(x, -x) * SQRT_HALF);
  return x * select(x < 0.0f, tail, 1.0f - tail);
}

PAGEDATTN_INLINE Vec gelu_by_tanh(Vec x) {
  // 0.5 x (1 + tanh(u)) is x sigmoid(2u), which loses no digits where tanh is close to -1.
  constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
  const Vec u = SQRT_2_OVER_PI * x * fma(x * x, broadcast(0.044715f), broadcast(1.0f));
  return times_sigmoid(x, 2.0f * u);
}

// out[i] = value(input, i, load) in rows [begin, end), where `input` is a row and `load` as in for_each_vector.
template <typename T, typename Value>
PAGEDATTN_INLINE void write_rows(const ActivationParams& p, int64_t begin, int64_t end, Value&& value) {
  T* first_out = static_cast<T*>(p.out);
  choose_stream(MIN_STREAMED_BYTES, p.input, first_out, p.out_stride, p.num_rows, p.width, [&]<bool STREAM>() {
    for (int64_t row = begin; row < end; ++row) {
      const T* input = static_cast<const T*>(p.input) + row * p.input_stride;
      T* out = first_out + row * p.out_stride;
      write_vectors<STREAM>(p.width, {out}, [&](int64_t i, auto load) { return Vecs<1>{{value(input, i, load)}}; });
    }
  });
}

// out = activation(input).
template <typename Activation>
void activate(const ActivationParams& p, int64_t begin, int64_t end, Activation activation) {
  dispatch_dtype(p.dtype, [&]<typename T>() {
    write_rows<T>(p, begin, end, [&](const T* input, int64_t i, auto load) { return activation(load(input + i)); });
  });
}

// out = activation(one half of input) * the other half.
template <typename Activation>
void activate_and_multiply(const ActivationParams& p, int64_t begin, int64_t end, bool first_half,
                           Activation activation) {
  const int64_t gate = first_half ? 0 : p.width;
  const int64_t factor = p.width - gate;
  dispatch_dtype(p.dtype, [&]<typename T>() {
    write_rows<T>(p, begin, end, [&](const T* input, int64_t i, auto load) {
      return activation(load(input + gate + i)) * load(input + factor + i);
    });
  });
}

}  // namespace

void silu_and_mul(const ActivationParams& params, int64_t begin, int64_t end) {
  activate_and_multiply(params, begin, end, true, [](Vec x) { return silu(x); });
}

void mul_and_silu(const ActivationParams& params, int64_t begin, int64_t end) {
  activate_and_multiply(params, begin, end, false, [](Vec x) { return silu(x); });
}

void gelu_and_mul(const ActivationParams& params, int64_t begin, int64_t end) {
  activate_and_multiply(params, begin, end, true, [](Vec x) { return gelu(x); });
}

void gelu_tanh_and_mul(const ActivationParams& params, int64_t begin, int64_t end) {
  activate_and_multiply(params, begin, end, true, [](Vec x) { return gelu_by_tanh(x); });
}

void gelu_tanh(const ActivationParams& params, int64_t begin, int64_t end) {
  activate(params, begin, end, [](Vec x) { return gelu_by_tanh(x); });
}

void gelu_quick(const ActivationParams& params, int64_t begin, int64_t end) {
  activate(params, begin, end, [](Vec x) { return times_sigmoid(x, 1.702f * x); });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
