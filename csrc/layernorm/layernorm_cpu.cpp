// One pass sums the squares of a row (and of the residual, if there is one), a second scales it. A row stays in the
// nearest cache between the two, so memory is read and written once.
#include "layernorm/layernorm.h"

#include "cpu_vec.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <typename T, bool HAS_RESIDUAL>
void rms_norm_row(const RmsNormParams& p, int64_t row) {
  const T* input = static_cast<const T*>(p.input) + row * p.input_stride;
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  T* residual = HAS_RESIDUAL ? static_cast<T*>(p.residual) + row * p.residual_stride : nullptr;

  // Four sums hide the latency of the additions.
  Vec sums[4] = {};
  int64_t step = 0;
  for_each_vector(p.hidden_size, [&](int64_t i, auto load, auto) {
    Vec x = load(input + i);
    if constexpr (HAS_RESIDUAL) x = x + load(residual + i);
    sums[step % 4] = fma(x, x, sums[step % 4]);
    ++step;
  });
  const float sum = reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const float mean = sum / static_cast<float>(p.hidden_size);
  const Vec inverse_rms = broadcast(1.0f / __builtin_sqrtf(mean + p.epsilon));

  // The residual is added again, in fp32, rather than read back rounded.
  for_each_vector(p.hidden_size, [&](int64_t i, auto load, auto store) {
    Vec x = load(input + i);
    if constexpr (HAS_RESIDUAL) {
      x = x + load(residual + i);
      store(residual + i, x);
    }
    store(out + i, x * inverse_rms * load(weight + i));
  });
}

}  // namespace

void rms_norm(const RmsNormParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t row = begin; row < end; ++row) {
      if (params.residual != nullptr) {
        rms_norm_row<T, true>(params, row);
      } else {
        rms_norm_row<T, false>(params, row);
      }
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
