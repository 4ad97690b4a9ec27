// In place, token by token: the token's row of cosines and sines stays in cache over all its heads.
#include "pos_encoding/rotary_embedding.h"

#include "cpu_memory.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

struct Pair {
  Vec x, y;
};

PAGEDATTN_INLINE Pair rotate(Pair p, Vec cos, Vec sin) {
  return {fma(p.x, cos, -(p.y * sin)), fma(p.y, cos, p.x * sin)};
}

// Pairs lie half a head apart.
template <typename T, typename C>
void rotate_neox(T* head, const C* cos, const C* sin, int64_t half) {
  T* second = head + half;
  if constexpr (std::is_same_v<T, C>) {
    write_vectors<false>(half, {head, second}, [&](int64_t i, auto load) {
      const Pair rotated = rotate({load(head + i), load(second + i)}, load(cos + i), load(sin + i));
      return Vecs<2>{{rotated.x, rotated.y}};
    });
  } else {
    for_each_vector(half, [&](int64_t i, auto load, auto store) {
      const Pair rotated = rotate({load(head + i), load(second + i)}, load(cos + i), load(sin + i));
      store(head + i, rotated.x);
      store(second + i, rotated.y);
    });
  }
}

// Two vectors of cosines or sines, for the elements that load_two takes from a head of T.
template <typename T, typename C>
PAGEDATTN_INLINE Vecs<2> load_two_for(const C* source) {
  if constexpr (EVEN_AND_ODD<T> && !EVEN_AND_ODD<C>) {
    const Vec a = load(source), b = load(source + VEC_SIZE);
    return {{shuffle(a, b, [](int e) { return 2 * e; }), shuffle(a, b, [](int e) { return 2 * e + 1; })}};
  } else {
    return load_two(source);
  }
}

// The same for all heads of a token, with halves of HALF elements: cos and sin are converted once, and stay in
// registers if there are enough registers.
template <int HALF, typename T, typename C>
void rotate_neox_heads(T* heads, int64_t num_heads, int64_t head_stride, const C* cos_row, const C* sin_row) {
  constexpr int NUM_STEPS = HALF / (2 * VEC_SIZE);
  Vecs<2> cos[NUM_STEPS], sin[NUM_STEPS];
  PAGEDATTN_UNROLL
  for (int k = 0; k < NUM_STEPS; ++k) {
    cos[k] = load_two_for<T>(cos_row + k * 2 * VEC_SIZE);
    sin[k] = load_two_for<T>(sin_row + k * 2 * VEC_SIZE);
  }
  for (int64_t head = 0; head < num_heads; ++head) {
    PAGEDATTN_UNROLL
    for (int k = 0; k < NUM_STEPS; ++k) {
      T* first = heads + head * head_stride + k * 2 * VEC_SIZE;
      T* second = first + HALF;
      const Vecs<2> x = load_two(first), y = load_two(second);
      const Pair a = rotate({x.of[0], y.of[0]}, cos[k].of[0], sin[k].of[0]);
      const Pair b = rotate({x.of[1], y.of[1]}, cos[k].of[1], sin[k].of[1]);
      store_two<false>(first, a.x, b.x);
      store_two<false>(second, a.y, b.y);
    }
  }
}

// Pairs are neighbours: two vectors are taken apart into their even and odd elements, and put together again.
template <typename T, typename C>
void rotate_neighbours(T* head, const C* cos, const C* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += VEC_SIZE) {
    const int64_t num_pairs = half - i < VEC_SIZE ? half - i : VEC_SIZE;
    const int64_t num_low = 2 * num_pairs < VEC_SIZE ? 2 * num_pairs : VEC_SIZE;
    const int64_t num_high = 2 * num_pairs - num_low;
    T* low = head + 2 * i;
    T* high = low + VEC_SIZE;
    const Vec a = load_first(low, num_low);
    const Vec b = num_high > 0 ? load_first(high, num_high) : Vec{};
    const Pair pair{shuffle(a, b, [](int e) { return 2 * e; }), shuffle(a, b, [](int e) { return 2 * e + 1; })};
    const Pair rotated = rotate(pair, load_first(cos + i, num_pairs), load_first(sin + i, num_pairs));
    const auto from_low = [](int e) { return e / 2 + e % 2 * VEC_SIZE; };
    const auto from_high = [](int e) { return e / 2 + e % 2 * VEC_SIZE + VEC_SIZE / 2; };
    store_first(low, shuffle(rotated.x, rotated.y, from_low), num_low);
    if (num_high > 0) store_first(high, shuffle(rotated.x, rotated.y, from_high), num_high);
  }
}

template <typename T, typename C>
void rotate_heads(const RotaryEmbeddingParams& p, T* heads, int64_t num_heads, int64_t head_stride, const C* cos,
                  const C* sin) {
  const int64_t half = p.rot_dim / 2;
  if (p.is_neox && half == 64) return rotate_neox_heads<64>(heads, num_heads, head_stride, cos, sin);
  if (p.is_neox && half == 32) return rotate_neox_heads<32>(heads, num_heads, head_stride, cos, sin);
  for (int64_t head = 0; head < num_heads; ++head) {
    if (p.is_neox) {
      rotate_neox(heads + head * head_stride, cos, sin, half);
    } else {
      rotate_neighbours(heads + head * head_stride, cos, sin, half);
    }
  }
}

template <typename T, typename C>
void rotate_tokens(const RotaryEmbeddingParams& p, int64_t begin, int64_t end) {
  T* query = static_cast<T*>(p.query);
  T* key = static_cast<T*>(p.key);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = p.positions[token] * p.cos_sin_stride;
    const C* cos = static_cast<const C*>(p.cos) + row;
    const C* sin = static_cast<const C*>(p.sin) + row;
    rotate_heads(p, query + token * p.query_stride, p.num_heads, p.query_head_stride, cos, sin);
    if (key == nullptr) continue;
    rotate_heads(p, key + token * p.key_stride, p.num_kv_heads, p.key_head_stride, cos, sin);
  }
}

}  // namespace

void rotary_embedding(const RotaryEmbeddingParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    if (params.cos_sin_dtype == params.dtype) {
      rotate_tokens<T, T>(params, begin, end);
    } else {
      rotate_tokens<T, float>(params, begin, end);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
