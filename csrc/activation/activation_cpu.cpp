// One pass over each row in fp32, rounded once at the store.
#include "activation/activation.h"

#include "cpu_vec.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Calls row(input, out) for the rows [begin, end).
template <typename Row>
void for_each_row(const ActivationParams& p, int64_t begin, int64_t end, Row&& row) {
  dispatch_dtype(p.dtype, [&]<typename T>() {
    for (int64_t i = begin; i < end; ++i) {
      row(static_cast<const T*>(p.input) + i * p.input_stride, static_cast<T*>(p.out) + i * p.out_stride);
    }
  });
}

}  // namespace

void silu_and_mul(const ActivationParams& params, int64_t begin, int64_t end) {
  for_each_row(params, begin, end, [&](const auto* input, auto* out) {
    const auto* factor = input + params.width;
    for_each_vector(params.width, [&](int64_t i, auto load, auto store) {
      const Vec x = load(input + i);
      store(out + i, x * sigmoid(x) * load(factor + i));
    });
  });
}

void gelu_new(const ActivationParams& params, int64_t begin, int64_t end) {
  // 0.5 x (1 + tanh(u)) is x sigmoid(2u), which loses no digits where tanh is close to -1.
  constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
  for_each_row(params, begin, end, [&](const auto* input, auto* out) {
    for_each_vector(params.width, [&](int64_t i, auto load, auto store) {
      const Vec x = load(input + i);
      const Vec u = SQRT_2_OVER_PI * (x + 0.044715f * x * x * x);
      store(out + i, x * sigmoid(2.0f * u));
    });
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
