// In place, token by token: the token's row of cosines and sines stays in cache over all its heads.
#include "pos_encoding/rotary_embedding.h"

#include "cpu_vec.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

template <typename T>
void rotate_heads(T* heads, int64_t num_heads, int64_t head_size, const T* cos, int64_t half) {
  const T* sin = cos + half;
  for (int64_t head = 0; head < num_heads; ++head) {
    T* first = heads + head * head_size;
    T* second = first + half;
    for_each_vector(half, [&](int64_t i, auto load, auto store) {
      const Vec x = load(first + i);
      const Vec y = load(second + i);
      const Vec c = load(cos + i);
      const Vec s = load(sin + i);
      store(first + i, fma(x, c, -(y * s)));
      store(second + i, fma(y, c, x * s));
    });
  }
}

}  // namespace

void rotary_embedding_neox(const RotaryEmbeddingParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    const int64_t half = params.rot_dim / 2;
    for (int64_t token = begin; token < end; ++token) {
      const T* cos = static_cast<const T*>(params.cos_sin_cache) + params.positions[token] * params.rot_dim;
      rotate_heads(static_cast<T*>(params.query) + token * params.query_stride, params.num_heads, params.head_size, cos,
                   half);
      rotate_heads(static_cast<T*>(params.key) + token * params.key_stride, params.num_kv_heads, params.head_size, cos,
                   half);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
