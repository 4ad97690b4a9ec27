// The query rows that share one KV head, over one tile of tokens; for paged_attention_cpu.cpp.
//
// Logits. A vector covers NUM_LANES tokens with four partial sums each (key_dot.h). Four such vectors make VEC_SIZE
// tokens, and one transposing reduction turns their partial sums into VEC_SIZE logits.
//
// Values. The sums of VEC_SIZE strips (value_strip.h) stay in registers over a tile; then their lanes are added.
#pragma once

#include <type_traits>

#include "attention/cpu/key_dot.h"
#include "attention/cpu/tile.h"
#include "attention/cpu/value_strip.h"
#include "attention/paged_attention.h"
#include "cpu_math.h"
#include "cpu_rows.h"
#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Query rows that share the loads of a key or value.
constexpr int MAX_ROWS = VEC_SIZE >= 8 ? 4 : 2;

// Half of the registers hold sums of logits.
constexpr int MAX_SUMS = VEC_SIZE == 16 ? 16 : 8;

// With fewer rows these are of several vectors of tokens side by side. For one row they are so many that they often lie
// in four blocks: the hardware's own prefetchers then follow four streams at once, and the sums of the values are taken
// across the blocks as well.
template <int NUM_ROWS>
constexpr int LOGIT_VECS = 4 * NUM_ROWS < MAX_SUMS ? MAX_SUMS / (4 * NUM_ROWS) : 1;
template <int NUM_ROWS>
constexpr bool ACROSS_BLOCKS = LOGIT_VECS<NUM_ROWS> == 4;

// Where one instruction multiplies pairs of keys, several rows have more to do with the values: for even work, three
// quarters of what is next are then fetched beside the values, instead of half.
template <typename T, int NUM_ROWS>
constexpr bool LIGHT_KEYS = HAS_PAIR_DOT && std::is_same_v<T, bfloat16> && NUM_ROWS > 1;

// Four rows have as many weights as strips, or more: the strips are then held in registers, and every weight is loaded
// once. Of fp8 as floats the registers would not hold them.
template <typename Strip, int NUM_ROWS>
constexpr bool STRIPS_FIRST = NUM_ROWS == 4 && Strip::PARTS <= 2;

// What the rows of one KV head have in common while they go over a tile.
template <typename T>
struct HeadTile {
  const PagedAttentionParams& params;
  const Tile<T>& tile;
  const T* keys;              // key_cache at this KV head
  const T* values;            // value_cache at this KV head
  Prefetcher<T>* prefetcher;  // of what is next; nullptr but for the first rows that go over the tile
};

// One query row of one head.
struct Row {
  int64_t position;
  float alibi_slope;
  const float* query;  // unpacked
  float* max;
  float* sum;
  float* values;  // [head_size]
};

// Of a vector that has in 128-bit lane l, element j: token j * NUM_LANES + l.
PAGEDATTN_INLINE Vec in_token_order(Vec by_lane) {
  return shuffle(by_lane, by_lane, [](int t) { return t % NUM_LANES * 4 + t / NUM_LANES; });
}

// Calls convert_all(convert), which calls convert(source, converted) for all that is to be converted; twice if one of
// the values is NaN.
template <typename Loader, typename T, typename ConvertAll>
PAGEDATTN_INLINE void convert_with_nan_if_any(const ConvertAll& convert_all) {
  typename Loader::Nans nans;
  convert_all([&](const T* source, auto& converted)
                  PAGEDATTN_ALWAYS_INLINE { Loader::template convert<false>(source, converted, nans); });
  if (nans.found()) [[unlikely]] {
    convert_all([&](const T* source, auto& converted)
                    PAGEDATTN_ALWAYS_INLINE { Loader::template convert<true>(source, converted, nans); });
  }
}

// The first step of the conversion of keys: converted[i * COUNT + j] from first[j] + i * step. Not inlined: GCC 12
// would keep its constants in registers that the sums need.
template <typename Dot, int COUNT, typename T>
__attribute__((noinline)) void convert_keys_first(const T* const* first, int64_t step, int64_t num_steps,
                                                  typename Dot::Converted* converted) {
  convert_with_nan_if_any<Dot, T>([&](const auto& convert) PAGEDATTN_ALWAYS_INLINE {
    for (int64_t i = 0; i < num_steps; ++i) {
      PAGEDATTN_UNROLL
      for (int j = 0; j < COUNT; ++j) convert(first[j] + i * step, converted[i * COUNT + j]);
    }
  });
}

// The logits of NUM_VECS * VEC_SIZE tokens, the chunks of all of them side by side.
template <typename T, typename Dot, int NUM_ROWS, int NUM_VECS>
PAGEDATTN_INLINE void compute_logits_at(const HeadTile<T>& h, const Row* rows, int first_token, TileLogits* logits) {
  const int64_t num_chunks = h.params.head_size / ELEMENTS_PER_CHUNK<T>;
  const int64_t chunk_stride = h.params.block_size * ELEMENTS_PER_CHUNK<T>;
  constexpr int RUN = VEC_SIZE < LOCATED_TOKENS ? VEC_SIZE : LOCATED_TOKENS;  // of adjacent tokens
  const T* keys[NUM_VECS * VEC_SIZE / RUN];
  for (int i = 0; i < NUM_VECS * VEC_SIZE / RUN; ++i) keys[i] = h.keys + h.tile.key_at(first_token + i * RUN);
  // A vector has keys of NUM_LANES tokens; vectors next to each other are of different vectors of tokens. In a pass
  // over the chunks are as many as have sums in registers. LOADED_KEYS are loaded before any is multiplied, so that
  // each part of the query is loaded once for them.
  constexpr int NUM_KEYS = 4 * NUM_VECS;
  constexpr int KEY_SUMS = NUM_ROWS * Dot::SUMS;
  constexpr int PASS_KEYS = KEY_SUMS * NUM_KEYS <= MAX_SUMS ? NUM_KEYS : MAX_SUMS / KEY_SUMS;
  constexpr int LOADED_KEYS = PASS_KEYS < 4 ? PASS_KEYS : Dot::PARTS <= 2 ? 4 : 2;
  // Where registers would not hold all parts of several keys beside the sums.
  constexpr bool PART_BY_PART = CONVERTS_FIRST<Dot> && LOADED_KEYS > 1;
  const auto key_at = [&](int64_t chunk, int key) PAGEDATTN_ALWAYS_INLINE {
    const int token = key % NUM_VECS * VEC_SIZE + key / NUM_VECS * NUM_LANES;
    const T* run = keys[token / RUN] + chunk * chunk_stride;
    return run + token % RUN * ELEMENTS_PER_CHUNK<T>;
  };
  [[maybe_unused]] ConvertedFirst<Dot, MAX_HEAD_SIZE / ELEMENTS_PER_CHUNK<T> * NUM_KEYS> converted;
  if constexpr (CONVERTS_FIRST<Dot>) {
    const T* first_chunks[NUM_KEYS];
    for (int key = 0; key < NUM_KEYS; ++key) first_chunks[key] = key_at(0, key);
    convert_keys_first<Dot, NUM_KEYS>(first_chunks, chunk_stride, num_chunks, converted.at);
  }
  const auto load_keys = [&](int64_t chunk, int key) PAGEDATTN_ALWAYS_INLINE {
    if constexpr (CONVERTS_FIRST<Dot>) {
      return Dot::load_converted(converted.at[chunk * NUM_KEYS + key]);
    } else {
      return Dot::load_keys(key_at(chunk, key));
    }
  };
  constexpr int64_t NUM_BYTES = NUM_VECS * VEC_SIZE * ELEMENTS_PER_CHUNK<T> * sizeof(T);  // of a chunk of all tokens
  constexpr int64_t CHUNKS_PER_FETCH = (LIGHT_KEYS<T, NUM_ROWS> ? 2 : 1) * (NUM_KEYS / PASS_KEYS) *
                                       (NUM_BYTES < FETCH_BYTES ? FETCH_BYTES / NUM_BYTES : 1);
  Vec sums[NUM_ROWS][Dot::SUMS][NUM_KEYS] = {};
  PAGEDATTN_UNROLL
  for (int pass = 0; pass < NUM_KEYS; pass += PASS_KEYS) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      PAGEDATTN_UNROLL
      for (int first = pass; first < pass + PASS_KEYS; first += LOADED_KEYS) {
        typename Dot::Keys loaded[LOADED_KEYS];
        if constexpr (!PART_BY_PART) {
          PAGEDATTN_UNROLL
          for (int i = 0; i < LOADED_KEYS; ++i) loaded[i] = load_keys(chunk, first + i);
        }
        if (first == pass && h.prefetcher != nullptr && chunk % CHUNKS_PER_FETCH == 0) {
          for (int64_t i = 0; i < NUM_BYTES; i += FETCH_BYTES) h.prefetcher->fetch();
        }
        // Parts that are multiplied with the same of the query, into different sums, are adjacent.
        PAGEDATTN_UNROLL
        for (int part = 0; part < Dot::PARTS; part += Dot::SUMS) {
          if constexpr (PART_BY_PART) {
            PAGEDATTN_UNROLL
            for (int of = 0; of < Dot::SUMS; ++of) {
              PAGEDATTN_UNROLL
              for (int i = 0; i < LOADED_KEYS; ++i) {
                loaded[i].part[part + of] = Dot::load_part(converted.at[chunk * NUM_KEYS + first + i], part + of);
              }
            }
          }
          PAGEDATTN_UNROLL
          for (int r = 0; r < NUM_ROWS; ++r) {
            auto query = Dot::load_query(rows[r].query, chunk, part);
            if constexpr (Dot::SUMS > 1 && VEC_SIZE == 8) query = in_register(query);
            PAGEDATTN_UNROLL
            for (int of = 0; of < Dot::SUMS; ++of) {
              PAGEDATTN_UNROLL
              for (int i = 0; i < LOADED_KEYS; ++i) {
                Vec& sum = sums[r][of][first + i];
                sum = Dot::multiply_add(sum, loaded[i].part[part + of], query);
              }
            }
          }
        }
      }
    }
  }
  const auto sum_keys = [](const Vec* of_vec) PAGEDATTN_ALWAYS_INLINE {
    return sum_lanes(of_vec[0], of_vec[NUM_VECS], of_vec[2 * NUM_VECS], of_vec[3 * NUM_VECS]);
  };
  for (int r = 0; r < NUM_ROWS; ++r) {
    for (int v = 0; v < NUM_VECS; ++v) {
      Vec by_lane = sum_keys(sums[r][0] + v);
      if constexpr (Dot::SUMS == 2) by_lane = add_neighbour_lanes(by_lane, sum_keys(sums[r][1] + v));
      store(logits[r].at + first_token + v * VEC_SIZE, in_token_order(by_lane) * h.params.logit_scale);
    }
  }
}

// Not inlined: GCC 12 would then load the constants of the keys' conversion again for every chunk.
template <typename T, typename Dot, int NUM_ROWS>
__attribute__((noinline)) void compute_logits(const HeadTile<T>& h, const Row* rows, TileLogits* logits) {
  constexpr int NUM_VECS = LOGIT_VECS<NUM_ROWS>;
  int token = first_vec_token(h.tile);
  for (; token + NUM_VECS * VEC_SIZE <= h.tile.end; token += NUM_VECS * VEC_SIZE) {
    compute_logits_at<T, Dot, NUM_ROWS, NUM_VECS>(h, rows, token, logits);
  }
  for (; token < h.tile.end; token += VEC_SIZE) compute_logits_at<T, Dot, NUM_ROWS, 1>(h, rows, token, logits);
}

// Softcap, ALiBi and the mask, where there are any; returns the greatest logit.
template <typename T>
PAGEDATTN_INLINE float mask_logits(const PagedAttentionParams& p, const Tile<T>& tile, const Row& row, float* logits) {
  // What this row sees of the tile; the other rows of the item may see more.
  const int64_t row_begin = p.first_visible(row.position) - tile.token;
  const int64_t row_end = row.position + 1 - tile.token;
  const auto begin = static_cast<int32_t>(row_begin > tile.begin ? row_begin : tile.begin);
  const auto end = static_cast<int32_t>(row_end < tile.end ? row_end : tile.end);
  const Vec minus_infinity = broadcast(-__builtin_inff());
  Vec max_logits = minus_infinity;
  if (begin == 0 && end == TILE_TOKENS && p.softcap == 0.0f && row.alibi_slope == 0.0f) {
    for (int token = 0; token < TILE_TOKENS; token += VEC_SIZE) max_logits = max(max_logits, load(logits + token));
    return reduce_max(max_logits);
  }
  for (int token = first_vec_token(tile); token < tile.end; token += VEC_SIZE) {
    Vec x = load(logits + token);
    const IntVec token_idx = iota() + token;
    if (p.softcap > 0.0f) x = p.softcap * tanh(x / p.softcap);
    if (row.alibi_slope != 0.0f) {
      const auto distance = static_cast<int32_t>(tile.token - row.position);
      x = fma(broadcast(row.alibi_slope), __builtin_convertvector(token_idx + distance, Vec), x);
    }
    x = select((token_idx >= begin) & (token_idx < end), x, minus_infinity);
    max_logits = max(max_logits, x);
    store(logits + token, x);
  }
  return reduce_max(max_logits);
}

// Turns the rows' logits into exponentials relative to their new maxima, those of tokens that a row does not see into
// 0; the sums so far are rescaled to them. One step for all rows after the other, so that their latencies overlap.
template <typename T, int NUM_ROWS>
void update_softmax(const PagedAttentionParams& p, const Tile<T>& tile, const Row* rows, TileLogits* logits) {
  float tile_max[NUM_ROWS];
  for (int r = 0; r < NUM_ROWS; ++r) tile_max[r] = mask_logits(p, tile, rows[r], logits[r].at);
  for (int r = 0; r < NUM_ROWS; ++r) {
    const Row& row = rows[r];
    const float old_max = *row.max;
    if (!(tile_max[r] > old_max)) continue;
    const float rescale = exp(old_max - tile_max[r]);
    *row.sum *= rescale;
    for_each_vector(p.head_size,
                    [&](int64_t d, auto load, auto store) { store(row.values + d, load(row.values + d) * rescale); });
    *row.max = tile_max[r];
  }
  Vec sums[NUM_ROWS];
  for (int r = 0; r < NUM_ROWS; ++r) {
    const float base = softmax_base(*rows[r].max);
    sums[r] = Vec{};
    for (int token = first_vec_token(tile); token < tile.end; token += VEC_SIZE) {
      const Vec weight = exp(load(logits[r].at + token) - base);
      store(logits[r].at + token, weight);
      sums[r] = sums[r] + weight;
    }
  }
  for (int r = 0; r < NUM_ROWS; ++r) *rows[r].sum += reduce_sum(sums[r]);
}

// How many times as many sums of values as registers hold are reduced together. Without AVX512 it pays: reductions for
// each few elements would hold up the multiplications that follow.
template <int NUM_ROWS>
constexpr int SUM_PASSES = VEC_SIZE == 16 ? 1 : NUM_ROWS;

// The sums of NUM_STRIPS strips of NUM_ROWS rows, one below the other; values[s] is strip s of the first element.
// WHOLE: the head does not end within them, else after num_strips. Sum i of row r goes to sums[r * row_stride + i].
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
PAGEDATTN_INLINE void sum_strips(const HeadTile<T>& h, const float* weights, const T* const* values,
                                 int64_t first_offset, int num_strips, Vec* to, int row_stride) {
  constexpr int PARTS = Strip::PARTS;
  constexpr int TOKENS = Strip::SIZE / ELEMENTS;   // of a strip
  constexpr int NUM_STRIPS = VEC_SIZE / NUM_ROWS;  // one below the other
  constexpr int STEP = NUM_STRIPS * ELEMENTS;
  const int64_t strip_stride = ELEMENTS == 1 ? h.params.block_size : Strip::SIZE;
  constexpr int TILE_STRIPS = TILE_TOKENS / TOKENS;
  Vec sums[VEC_SIZE] = {};  // [NUM_ROWS][NUM_STRIPS]
  const auto strip_at = [&](int s, int i) PAGEDATTN_ALWAYS_INLINE {
    // Past the end of the head, its last strip is read again; that sum is dropped.
    const int64_t below = (WHOLE || i < num_strips ? i : num_strips - 1) * strip_stride;
    return values[s] + first_offset + below;
  };
  [[maybe_unused]] ConvertedFirst<Strip, TILE_STRIPS * NUM_STRIPS> converted;
  if constexpr (CONVERTS_FIRST<Strip>) {
    convert_with_nan_if_any<Strip, T>([&](const auto& convert) PAGEDATTN_ALWAYS_INLINE {
      for (int s = h.tile.begin / TOKENS; s * TOKENS < h.tile.end; ++s) {
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_STRIPS; ++i) convert(strip_at(s, i), converted.at[s * NUM_STRIPS + i]);
      }
    });
  }
  const auto load_strip = [&](int s, int i) PAGEDATTN_ALWAYS_INLINE {
    if constexpr (CONVERTS_FIRST<Strip>) {
      return Strip::load_converted(converted.at[s * NUM_STRIPS + i]);
    } else {
      return Strip::template load_from<ELEMENTS>(strip_at(s, i));
    }
  };
  const auto load_weight = [&](int s, int part, int r) PAGEDATTN_ALWAYS_INLINE {
    return load(weights + r * TILE_TOKENS * ELEMENTS + (s * PARTS + part) * VEC_SIZE);
  };
  const auto add_strip = [&](int s, int i, auto mask) PAGEDATTN_ALWAYS_INLINE {
    const Strip strip = load_strip(s, i);
    PAGEDATTN_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      const auto value = mask(strip.part[part], part);
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        Vec& sum = sums[r * NUM_STRIPS + i];
        sum = Strip::multiply_add(sum, value, load_weight(s, part, r));
      }
    }
  };
  const auto add_strips = [&](int s) PAGEDATTN_ALWAYS_INLINE {
    Strip strips[NUM_STRIPS];
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) strips[i] = load_strip(s, i);
    PAGEDATTN_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) {
        const Vec weight = in_register(load_weight(s, part, r));
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_STRIPS; ++i) {
          Vec& sum = sums[r * NUM_STRIPS + i];
          sum = Strip::multiply_add(sum, strips[i].part[part], weight);
        }
      }
    }
  };
  constexpr int64_t NUM_BYTES = STEP * TILE_TOKENS * sizeof(T);
  constexpr int64_t NUM_FETCHES = NUM_BYTES / FETCH_BYTES * (LIGHT_KEYS<T, NUM_ROWS> ? 3 : 2) / 2;
  const auto prefetch = [&](int64_t i, int64_t n) PAGEDATTN_ALWAYS_INLINE {  // part i of n
    if (h.prefetcher == nullptr) return;
    for (int64_t fetch = i * NUM_FETCHES / n; fetch < (i + 1) * NUM_FETCHES / n; ++fetch) h.prefetcher->fetch();
  };
  const auto whole = [](auto value, int) { return value; };
  if (!h.tile.all_visible(0, TILE_TOKENS)) {
    for (int s = h.tile.begin / TOKENS; s * TOKENS < h.tile.end; ++s) {
      prefetch(s, TILE_STRIPS);
      if (h.tile.all_visible(s * TOKENS, TOKENS)) {
        PAGEDATTN_UNROLL
        for (int i = 0; i < NUM_STRIPS; ++i) add_strip(s, i, whole);
        continue;
      }
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_STRIPS; ++i) {
        // A slot that no row sees may hold NaN, which a weight of 0 would not silence.
        add_strip(s, i, [&h, s](auto value, int part) {
          return Strip::template mask<ELEMENTS>(value, s, part, h.tile.begin, h.tile.end);
        });
      }
    }
  } else if constexpr (ACROSS_BLOCKS<NUM_ROWS>) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) {
      prefetch(i, NUM_STRIPS);
      PAGEDATTN_UNROLL_BY_2
      for (int s = 0; s < TILE_STRIPS; ++s) add_strip(s, i, whole);
    }
  } else {
    constexpr int STRIPS_PER_FETCH = NUM_FETCHES <= TILE_STRIPS / 4 ? 4 : 1;
    for (int first = 0; first < TILE_STRIPS; first += STRIPS_PER_FETCH) {
      prefetch(first / STRIPS_PER_FETCH, TILE_STRIPS / STRIPS_PER_FETCH);
      for (int s = first; s < first + STRIPS_PER_FETCH; ++s) {
        if constexpr (STRIPS_FIRST<Strip, NUM_ROWS>) {
          add_strips(s);
        } else {
          PAGEDATTN_UNROLL
          for (int i = 0; i < NUM_STRIPS; ++i) add_strip(s, i, whole);
        }
      }
    }
  }
  PAGEDATTN_UNROLL
  for (int r = 0; r < NUM_ROWS; ++r) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < NUM_STRIPS; ++i) to[r * row_stride + i] = sums[r * NUM_STRIPS + i];
  }
}

// Elements of the values of NUM_ROWS rows, from `d` on: SUM_PASSES * VEC_SIZE / NUM_ROWS strips of ELEMENTS elements.
template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS, bool WHOLE>
PAGEDATTN_INLINE void accumulate_elements(const HeadTile<T>& h, const Row* rows, const float* weights,
                                          const T* const* values, int64_t d) {
  constexpr int NUM_PASSES = SUM_PASSES<NUM_ROWS>;
  constexpr int NUM_STRIPS = VEC_SIZE / NUM_ROWS;  // in a pass
  constexpr int ROW_STRIPS = NUM_PASSES * NUM_STRIPS;
  constexpr int STEP = ROW_STRIPS * ELEMENTS;
  const int num_strips = WHOLE ? ROW_STRIPS : static_cast<int>(h.params.head_size - d) / ELEMENTS;
  Vec sums[NUM_PASSES][VEC_SIZE];  // of [NUM_ROWS][ROW_STRIPS]
  for (int first = 0; first < num_strips; first += NUM_STRIPS) {
    const int64_t offset = (d + first * ELEMENTS) * h.params.block_size;
    sum_strips<T, Strip, NUM_ROWS, ELEMENTS, WHOLE>(h, weights, values, offset, num_strips - first, sums[0] + first,
                                                    ROW_STRIPS);
  }
  float totals[NUM_PASSES * VEC_SIZE * ELEMENTS];
  for (int i = 0; i < NUM_PASSES; ++i) sum_runs<ELEMENTS>(sums[i], totals + i * VEC_SIZE * ELEMENTS);
  for (int r = 0; r < NUM_ROWS; ++r) {
    float* row = rows[r].values + d;
    const float* row_totals = totals + r * STEP;
    if constexpr (WHOLE) {
      constexpr int SIZE = STEP < VEC_SIZE ? STEP : VEC_SIZE;
      typedef float Some __attribute__((vector_size(SIZE * sizeof(float))));
      for (int i = 0; i < STEP; i += SIZE) {
        Some sum;
        Some addition;
        __builtin_memcpy(&sum, row + i, sizeof sum);
        __builtin_memcpy(&addition, row_totals + i, sizeof addition);
        sum += addition;
        __builtin_memcpy(row + i, &sum, sizeof sum);
      }
    } else {
      for (int i = 0; i < num_strips * ELEMENTS; ++i) row[i] += row_totals[i];
    }
  }
}

template <typename T, typename Strip, int NUM_ROWS, int ELEMENTS>
void accumulate_values(const HeadTile<T>& h, const Row* rows, const TileLogits* weights) {
  constexpr int STEP = SUM_PASSES<NUM_ROWS> * VEC_SIZE / NUM_ROWS * ELEMENTS;
  alignas(64) float arranged[NUM_ROWS][TILE_TOKENS * ELEMENTS];
  for (int r = 0; r < NUM_ROWS; ++r) {
    Strip::template arrange_weights<ELEMENTS>(weights[r].at, arranged[r]);
  }
  constexpr int TOKENS = Strip::SIZE / ELEMENTS;
  const T* values[TILE_TOKENS / TOKENS];
  for (int64_t s = 0; s < TILE_TOKENS / TOKENS; ++s) {
    values[s] = h.values + h.tile.value_at(static_cast<int>(s) * TOKENS);
  }
  int64_t d = 0;
  for (; d + STEP <= h.params.head_size; d += STEP) {
    accumulate_elements<T, Strip, NUM_ROWS, ELEMENTS, true>(h, rows, arranged[0], values, d);
  }
  if (d < h.params.head_size) {
    accumulate_elements<T, Strip, NUM_ROWS, ELEMENTS, false>(h, rows, arranged[0], values, d);
  }
}

template <typename T, typename Arithmetic, int NUM_ROWS>
void attend_rows(const HeadTile<T>& h, const Row* rows) {
  TileLogits logits[NUM_ROWS];
  if (!h.tile.all_visible(0, TILE_TOKENS)) __builtin_memset(logits, 0, sizeof logits);
  compute_logits<T, typename Arithmetic::Dot, NUM_ROWS>(h, rows, logits);
  update_softmax<T, NUM_ROWS>(h.params, h.tile, rows, logits);
  using Strip = typename Arithmetic::Strip;
  dispatch_strip_elements<Strip>(
      h.params.block_size, [&]<int ELEMENTS>() { accumulate_values<T, Strip, NUM_ROWS, ELEMENTS>(h, rows, logits); });
}

// How the rows are multiplied with keys and values.
template <typename T>
struct FloatArithmetic {
#if defined(__AVX2__) && !defined(__AVX512F__)
  using Dot = std::conditional_t<sizeof(T) == 1, Float8KeyDot<T>, KeyDot<T>>;
#else
  using Dot = KeyDot<T>;
#endif
  using Strip = ValueStrip<T>;
};
#if defined(__AVX512BF16__)
// For queries in bfloat16. The weights are rounded to it only where the cache is in 8 bits.
template <typename T>
struct PairArithmetic {
  using Dot = PairDot<T>;
  using Strip = std::conditional_t<sizeof(T) == 1, PairStrip<T>, ValueStrip<T>>;
};
#endif

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
