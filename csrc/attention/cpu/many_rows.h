// Attends to a tile of tokens with many (row, head) pairs of one KV head, as columns (columns.h); for row_walk.h.
//
// In attend_rows.h a vector has some tokens' keys, or an element of several tokens' values, and its sums belong to one
// row. Here a vector has columns, and meets one word of the keys or values at a time (chain_sums.h). So the products
// need no reduction, and the softmax takes whole vectors. A column has the bits that its row has in attend_rows.h. Only
// products with a weight of 0 are left out.
#pragma once

#include "attention/cpu/attend_rows.h"
#include "attention/cpu/columns.h"
#include "attention/cpu/tile_words.h"
#include "cpu_quantize.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Applies softcap, ALiBi and the mask to the logits of `tokens`. Returns the columns' greatest logits.
template <int NUM_VECS>
__attribute__((noinline)) Vec change_logits(const PagedAttentionParams& p, TileTokens tokens, Vec slopes,
                                            IntVec distance, VisibleTokens visible, float* logits) {
  const Vec minus_infinity = broadcast(-__builtin_inff());
  Vec max_logits = minus_infinity;
  for (int token = tokens.begin; token < tokens.end; ++token) {
    float* const at = logits + token * NUM_VECS * VEC_SIZE;
    Vec x = load(at);
    if (p.softcap > 0.0f) x = p.softcap * tanh(x / p.softcap);
    if (p.alibi_slopes != nullptr) {
      const IntVec to_token = distance + token;
      x = fma(slopes, __builtin_convertvector(to_token > 0 ? -to_token : to_token, Vec), x);
    }
    x = select((visible.begin <= token) & (visible.end > token), x, minus_infinity);
    max_logits = max(max_logits, x);
    store(at, x);
  }
  return max_logits;
}

// What multiplies weights with values.
template <typename Multiply, CacheLayout LAYOUT>
struct ValueProducts {
  using Type = typename Multiply::Strip;
};
template <typename Multiply>
struct ValueProducts<Multiply, CacheLayout::NHD> {
  using Type = typename Multiply::NhdValues;
};

template <typename Multiply, typename T, CacheLayout LAYOUT>
class ManyRows {
  using Dot = typename Multiply::Dot;
  using Keys = KeyWords<Dot, T, LAYOUT>;
  using Products = typename ValueProducts<Multiply, LAYOUT>::Type;
  using Values = std::conditional_t<LAYOUT == CacheLayout::NHD, NhdWords<Products, T>, StripWords<Products, T>>;
  static constexpr bool INTEGERS = INTEGER_SUMS<Dot>;

 public:
  // `key_words` and `value_words` have room for a tile each.
  ManyRows(const HeadTile<T, LAYOUT>& h, float* key_words, float* value_words)
      : h_(h), keys_(h, key_words), values_(h, value_words) {
    if constexpr (INTEGERS) {
      for (int token = 0; token < TILE_TOKENS; token += VEC_SIZE) {
        store(key_scales_ + token, h.load_scales(token, h.params.head_size));
        store(value_scales_ + token, h.load_scales(token, h.params.head_size + INT8_SCALE_ROWS / 2));
      }
    }
  }

  // Attends with a group. Calls after() after every few products.
  template <int NUM_VECS, typename After>
  void attend(const Group<NUM_VECS>& group, const After& after) const {
    VisibleTokens visible[NUM_VECS];
    TileTokens by_all{h_.tile.begin, h_.tile.end};
    int end = 0;  // of what any column sees
    for (int i = 0; i < NUM_VECS; ++i) {
      visible[i] = visible_to(group, i);
      end = larger(end, reduce_max(visible[i].end));
      by_all.begin = larger(by_all.begin, reduce_max(visible[i].begin));
      by_all.end = -larger(-by_all.end, reduce_max(-visible[i].end));
    }
    if (end <= h_.tile.begin) return;
    const TileTokens tokens{first_vec_token(h_.tile), (end + VEC_SIZE - 1) / VEC_SIZE * VEC_SIZE};
    Logits<NUM_VECS> logits;
    Vec max_logits[NUM_VECS];
    compute_logits(group, tokens, end, logits, max_logits, after);
    const bool all_see_all = by_all.begin <= tokens.begin && by_all.end >= tokens.end;
    if (!all_see_all || h_.params.softcap > 0.0f || h_.params.alibi_slopes != nullptr) {
      for (int i = 0; i < NUM_VECS; ++i) {
        const Vec slopes = load(group.slopes + i * VEC_SIZE);
        const IntVec distance = first_token() - load_as<IntVec>(group.positions + i * VEC_SIZE);
        max_logits[i] =
            change_logits<NUM_VECS>(h_.params, tokens, slopes, distance, visible[i], logits.at + i * VEC_SIZE);
      }
    }
    Vec rescale[NUM_VECS];
    update_softmax(group, tokens, max_logits, logits, rescale);
    add_values(group, tokens, values_.steps_until(end), logits, rescale, after);
  }

 private:
  // The logits of a tile, which become weights.
  template <int NUM_VECS>
  struct alignas(64) Logits {
    float at[TILE_TOKENS * Group<NUM_VECS>::SIZE];

    float* of(int token) { return at + token * Group<NUM_VECS>::SIZE; }
  };

  int32_t first_token() const { return static_cast<int32_t>(h_.tile.token); }

  static int larger(int a, int b) { return a > b ? a : b; }

  template <int NUM_VECS>
  VisibleTokens visible_to(const Group<NUM_VECS>& group, int i) const {
    return {max(load_as<IntVec>(group.begin + i * VEC_SIZE) - first_token(), IntVec{} + h_.tile.begin),
            min(load_as<IntVec>(group.end + i * VEC_SIZE) - first_token(), IntVec{} + h_.tile.end)};
  }

  // The logits of `tokens`, and the greatest of each column. From `end` on nothing is visible. This function and the
  // next two are not inlined, or GCC 12 would keep some of the sums in memory.
  template <int NUM_VECS, typename After>
  __attribute__((noinline)) void compute_logits(const Group<NUM_VECS>& group, TileTokens tokens, int end,
                                                Logits<NUM_VECS>& logits, Vec (&max_logits)[NUM_VECS],
                                                const After& after) const {
    const int64_t step_bytes = keys_.step_bytes();
    for (Vec& max_logit : max_logits) max_logit = broadcast(-__builtin_inff());
    int token = tokens.begin;
    for (; token < end; token += WORDS) {
      Vec sums[WORDS][NUM_VECS];
      const char* const words = keys_.at(token);
      multiply_words<Dot, NUM_VECS, WORDS, Keys::NUM_CHAINS>(
          [&](int64_t step) PAGEDATTN_ALWAYS_INLINE { return words + step * step_bytes; }, {0, keys_.num_steps()},
          group.queries, sums);
      PAGEDATTN_UNROLL
      for (int j = 0; j < WORDS * NUM_VECS; ++j) {
        const int w = j / NUM_VECS, i = j % NUM_VECS;
        const Vec logit = logits_of(group, i, token + w, sums[w][i]);
        max_logits[i] = max(max_logits[i], logit);
        store(logits.of(token + w) + i * VEC_SIZE, logit);
      }
      after();
    }
    for (; token < tokens.end; ++token) {
      for (int i = 0; i < NUM_VECS; ++i) store(logits.of(token) + i * VEC_SIZE, broadcast(-__builtin_inff()));
    }
  }

  template <int NUM_VECS>
  PAGEDATTN_INLINE Vec logits_of(const Group<NUM_VECS>& group, int i, int token, Vec products) const {
    if constexpr (INTEGERS) {
      const Vec scales = load(group.scales + i * VEC_SIZE) * h_.params.logit_scale;
      return __builtin_convertvector((IntVec)products, Vec) * scales * key_scales_[token];
    } else {
      return products * h_.params.logit_scale;
    }
  }

  // As update_softmax of row_logits.h, but leaves the values so far to be multiplied with `rescale`.
  template <int NUM_VECS>
  __attribute__((noinline)) void update_softmax(const Group<NUM_VECS>& group, TileTokens tokens,
                                                const Vec (&max_logits)[NUM_VECS], Logits<NUM_VECS>& logits,
                                                Vec (&rescale)[NUM_VECS]) const {
    for (int i = 0; i < NUM_VECS; ++i) {
      float* const of_max = group.max + i * VEC_SIZE;
      float* const of_sum = group.sum + i * VEC_SIZE;
      Vec max_logit = load(of_max);
      const IntVec grows = max_logits[i] > max_logit;
      rescale[i] = select(grows, exp(max_logit - max_logits[i]), broadcast(1.0f));
      max_logit = select(grows, max_logits[i], max_logit);
      store(of_max, max_logit);
      const Vec base = softmax_base(max_logit);
      Vec sums[VEC_SIZE];
      for (int lane = 0; lane < VEC_SIZE; ++lane) {
        Vec sum{};
        for (int token = tokens.begin + lane; token < tokens.end; token += VEC_SIZE) {
          float* const at = logits.of(token) + i * VEC_SIZE;
          const Vec weight = exp(load(at) - base);
          store(at, weight);
          sum = sum + weight;
        }
        sums[lane] = sum;
      }
      for (int n = VEC_SIZE / 2; n >= 1; n /= 2) {
        for (int lane = 0; lane < n; ++lane) sums[lane] = sums[lane] + sums[lane + n];
      }
      store(of_sum, load(of_sum) * rescale[i] + sums[0]);
    }
  }

  // Adds the values of `steps`, weighted. The weights are those of `tokens`, and 0 elsewhere.
  template <int NUM_VECS, typename After>
  void add_values(const Group<NUM_VECS>& group, TileTokens tokens, Steps steps, Logits<NUM_VECS>& weights,
                  const Vec (&rescale)[NUM_VECS], const After& after) const {
    const TileTokens of_steps = values_.tokens_of(steps);
    const auto clear = [&](int begin, int end) {
      if (begin < end) __builtin_memset(weights.of(begin), 0, (end - begin) * group.SIZE * sizeof(float));
    };
    clear(of_steps.begin, tokens.begin);
    clear(tokens.end, of_steps.end);
    [[maybe_unused]] Vec weight_scales[NUM_VECS];
    if constexpr (INTEGERS) {
      for (int i = 0; i < NUM_VECS; ++i) weight_scales[i] = round_weights(tokens, weights, i);
    }
    const float* of_words = weights.at;
    [[maybe_unused]] Logits<NUM_VECS> arranged;
    if constexpr (!IN_TOKEN_ORDER<Products>) {
      arrange_weights(steps, weights, arranged);
      of_words = arranged.at;
    }
    if constexpr (LAYOUT == CacheLayout::NHD) {
      add_products<1>(group, steps, of_words, weight_scales, rescale, after);
    } else {
      dispatch_strip_elements<Products>(h_.params.block_size, [&]<int ELEMENTS>() {
        add_products<VEC_SIZE / ELEMENTS>(group, steps, of_words, weight_scales, rescale, after);
      });
    }
  }

  // The weights of the words, in the words' order.
  template <int NUM_VECS>
  void arrange_weights(Steps steps, Logits<NUM_VECS>& weights, Logits<NUM_VECS>& arranged) const {
    constexpr int64_t SIZE = Group<NUM_VECS>::SIZE;
    float* to = arranged.of(static_cast<int>(steps.begin) * values_.num_chains());
    for (int64_t step = steps.begin; step < steps.end; ++step) {
      for (int chain = 0; chain < values_.num_chains(); ++chain, to += SIZE) {
        const float* const from = weights.of(values_.token_of(step, chain));
        PAGEDATTN_UNROLL
        for (int i = 0; i < SIZE; i += VEC_SIZE) {
          if constexpr (JOINS_TOKENS<Products>) {
            store(to + i, Products::join(load(from + i), load(from + Products::JOINED * SIZE + i)));
          } else {
            store(to + i, load(from + i));
          }
        }
      }
    }
  }

  template <int NUM_CHAINS, int NUM_VECS, typename After>
  __attribute__((noinline)) void add_products(const Group<NUM_VECS>& group, Steps steps, const float* weights,
                                              [[maybe_unused]] const Vec* weight_scales, const Vec (&rescale)[NUM_VECS],
                                              const After& after) const {
    const auto add = [&]<int NUM_WORDS>(int64_t d) PAGEDATTN_ALWAYS_INLINE {
      Vec sums[NUM_WORDS][NUM_VECS];
      multiply_words<Products, NUM_VECS, NUM_WORDS, NUM_CHAINS>(
          [&](int64_t step) PAGEDATTN_ALWAYS_INLINE { return values_.template at<NUM_CHAINS>(step, d); }, steps,
          weights, sums);
      PAGEDATTN_UNROLL
      for (int w = 0; w < NUM_WORDS; ++w) {
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_VECS; ++i) {
          float* const values = group.values + (d + w) * group.SIZE + i * VEC_SIZE;
          Vec sum = sums[w][i];
          if constexpr (INTEGERS) sum = __builtin_convertvector((IntVec)sum, Vec) * weight_scales[i];
          store(values, load(values) * rescale[i] + sum);
        }
      }
      after();
    };
    int64_t d = 0;
    for (; d + Values::AT_ONCE <= h_.params.head_size; d += Values::AT_ONCE)
      add.template operator()<Values::AT_ONCE>(d);
    if (d < h_.params.head_size) add.template operator()<WORDS>(d);
  }

  // Rounds the weights of vector `i` of the columns, times the scales of the values, to 16 bits. Returns the scales of
  // the weights, as quantize of cpu_quantize.h: NaN if the value of a token with a weight is.
  template <int NUM_VECS>
  Vec round_weights(TileTokens tokens, Logits<NUM_VECS>& weights, int i) const {
    constexpr int32_t INFINITE_BITS = 0x7f800000;
    IntVec largest_bits{};
    for (int token = tokens.begin; token < tokens.end; ++token) {
      float* const at = weights.of(token) + i * VEC_SIZE;
      const Vec weight = load(at);
      // The slot of a token that a column does not see may hold anything.
      const Vec scaled = select(weight == 0.0f, Vec{}, weight * value_scales_[token]);
      largest_bits = max(largest_bits, (IntVec)scaled & 0x7fffffff);
      store(at, scaled);
    }
    const auto largest = (Vec)largest_bits;
    const IntVec is_finite = largest_bits < INFINITE_BITS;
    const IntVec is_large = largest >= MIN_LARGEST<MAX_CODE_16>;
    const Vec inverse_scale = select(is_finite & is_large, static_cast<float>(MAX_CODE_16) / largest, Vec{});
    const Vec round_to_int = broadcast(0x1.8p23f);
    for (int token = tokens.begin; token < tokens.end; ++token) {
      float* const at = weights.of(token) + i * VEC_SIZE;
      const Vec rounded = (load(at) * inverse_scale + round_to_int) - round_to_int;
      store(at, (Vec) __builtin_convertvector(rounded, IntVec));
    }
    return select(is_finite, select(is_large, largest / static_cast<float>(MAX_CODE_16), Vec{}),
                  broadcast(__builtin_nanf("")));
  }

  const HeadTile<T, LAYOUT>& h_;
  Keys keys_;
  Values values_;
  float key_scales_[INTEGERS ? TILE_TOKENS : 1];
  float value_scales_[INTEGERS ? TILE_TOKENS : 1];
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
