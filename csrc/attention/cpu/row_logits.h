// The logits of the query rows that share one KV head, over one tile of tokens, and their softmax.
//
// A vector covers NUM_LANES tokens with four partial sums each (key_dot.h). Four such vectors make VEC_SIZE tokens, and
// one transposing reduction turns their partial sums into VEC_SIZE logits.
#pragma once

#include "attention/cpu/key_dot.h"
#include "attention/cpu/prefetcher.h"
#include "attention/paged_attention.h"
#include "cpu_math.h"
#include "cpu_memory.h"
#include "cpu_rows.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Query rows that share the loads of a key or value.
constexpr int MAX_ROWS = VEC_SIZE >= 8 || NUM_REGISTERS == 32 ? 4 : 2;

// Half of the registers hold sums.
constexpr int MAX_SUMS = NUM_REGISTERS / 2;

// With fewer rows, the sums are of several vectors of tokens side by side. With one row, the vectors are so many that
// they often lie in four blocks. The hardware's own prefetchers then follow four streams at once, and the sums of the
// values are taken across the blocks as well.
template <int NUM_ROWS>
constexpr int LOGIT_VECS = 4 * NUM_ROWS < MAX_SUMS ? MAX_SUMS / (4 * NUM_ROWS) : 1;
template <int NUM_ROWS>
constexpr bool ACROSS_BLOCKS = VEC_SIZE == 16 && LOGIT_VECS<NUM_ROWS> == 4;

// What the rows of one KV head have in common while they go over a tile.
template <typename T, CacheLayout LAYOUT = CacheLayout::CHUNKED>
struct HeadTile {
  const PagedAttentionParams& params;
  const Tile<T, LAYOUT>& tile;
  const T* keys;                      // key_cache at this KV head
  const T* values;                    // value_cache at this KV head
  Prefetcher<T, LAYOUT>* prefetcher;  // of the next part; nullptr for all but the first rows that go over the tile

  // From a chunk of a token's key to the next.
  PAGEDATTN_INLINE int64_t chunk_stride() const {
    return LAYOUT == CacheLayout::NHD ? ELEMENTS_PER_CHUNK<T> : params.block_size * ELEMENTS_PER_CHUNK<T>;
  }
  // A chunk of the keys of NUM_LANES tokens.
  PAGEDATTN_INLINE Chunks<T, LAYOUT> key_chunks(int token) const {
    if constexpr (LAYOUT == CacheLayout::NHD) {
      Chunks<T, LAYOUT> chunks;
      for (int i = 0; i < NUM_LANES; ++i) chunks.of[i] = keys + tile.key_at(token + i);
      return chunks;
    } else {
      return keys + tile.key_at(token);
    }
  }
  // Of an int8 cache: the fp32 scales of VEC_SIZE tokens, which begin at row `row` of the values.
  PAGEDATTN_INLINE Vec load_scales(int token, int64_t row) const {
    const auto scales_at = [&](int t) {
      const int64_t slot = (tile.token + t) & (params.block_size - 1);
      return values + tile.value_at(t) + row * params.block_size + slot * (sizeof(float) - 1);
    };
#if defined(__AVX512F__)
    const __m512 first = _mm512_castps256_ps512(load_as<__m256>(scales_at(token)));
    return (Vec)_mm512_maskz_insertf32x8(0xffff, first, load_as<__m256>(scales_at(token + 8)), 1);
#else
    return load_as<Vec>(scales_at(token));
#endif
  }
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

// Puts a vector into the order of tokens. Its 128-bit lane l has token j * NUM_LANES + l as element j.
template <typename V>
PAGEDATTN_INLINE V in_token_order(V by_lane) {
  return shuffle(by_lane, by_lane, [](int t) { return t % NUM_LANES * 4 + t / NUM_LANES; });
}

// Calls convert_all(convert), which calls convert(source, converted) for all that is to be converted. If a value is
// NaN, calls it once more, with what NaN needs.
template <typename Loader, typename ConvertAll>
PAGEDATTN_INLINE void convert_with_nan_if_any(const ConvertAll& convert_all) {
  typename Loader::Nans nans;
  convert_all([&](const auto& source, auto& converted)
                  PAGEDATTN_ALWAYS_INLINE { Loader::template convert<false>(source, converted, nans); });
  if (nans.found()) [[unlikely]] {
    convert_all([&](const auto& source, auto& converted)
                    PAGEDATTN_ALWAYS_INLINE { Loader::template convert<true>(source, converted, nans); });
  }
}

// The first step of the conversion of keys: converted[i * COUNT + j] from first[j] + i * step. Not inlined: GCC 12
// would keep the constants of the conversion in registers that the sums need.
template <typename Dot, int COUNT, typename Chunks>
__attribute__((noinline)) void convert_keys_first(const Chunks* first, int64_t step, int64_t num_steps,
                                                  typename Dot::Converted* converted) {
  convert_with_nan_if_any<Dot>([&](const auto& convert) PAGEDATTN_ALWAYS_INLINE {
    for (int64_t i = 0; i < num_steps; ++i) {
      PAGEDATTN_UNROLL
      for (int j = 0; j < COUNT; ++j) convert(first[j] + i * step, converted[i * COUNT + j]);
    }
  });
}

// The logits of VEC_SIZE tokens, from `token` of the tile on: a row's products with their keys.
template <typename Dot, typename T, CacheLayout LAYOUT>
PAGEDATTN_INLINE Vec logits_from(const HeadTile<T, LAYOUT>& h, const Row& row, int token, SumVec<Dot> products) {
  if constexpr (INTEGER_SUMS<Dot>) {
    const float row_scale = Dot::row_scale(row.query, h.params.head_size) * h.params.logit_scale;
    return __builtin_convertvector(products, Vec) * row_scale * h.load_scales(token, h.params.head_size);
  } else {
    return products * h.params.logit_scale;
  }
}

// The logits of NUM_VECS * VEC_SIZE tokens, with the chunks of all of them side by side. In this struct, a key is a
// vector: one chunk of the keys of NUM_LANES tokens. Adjacent keys are of different vectors of tokens.
template <typename T, CacheLayout LAYOUT, typename Dot, int NUM_ROWS, int NUM_VECS>
struct KeyPasses {
  static constexpr int NUM_KEYS = 4 * NUM_VECS;

  // A pass over the chunks takes as many keys as have sums in registers. LOADED_KEYS keys are loaded before any of them
  // is multiplied, so that each part of the query is loaded once for all of them. Four keys are loaded where their
  // parts fit beside the sums, which have half of the registers. Otherwise GCC 12 would keep some sums in memory.
  static constexpr int KEY_SUMS = NUM_ROWS * Dot::SUMS;
  static constexpr int PASS_KEYS = KEY_SUMS * NUM_KEYS <= MAX_SUMS ? NUM_KEYS : MAX_SUMS / KEY_SUMS;
  static constexpr int LOADED_KEYS = PASS_KEYS < 4 ? PASS_KEYS : 4 * Dot::PARTS < MAX_SUMS ? 4 : 2;

  // Loads one part at a time, where registers would not hold all parts of several keys beside the sums.
  static constexpr bool PART_BY_PART = CONVERTS_FIRST<Dot> && LOADED_KEYS > 1;

  static constexpr int64_t NUM_BYTES = NUM_VECS * VEC_SIZE * ELEMENTS_PER_CHUNK<T> * sizeof(T);  // a chunk of all keys
  static constexpr int64_t CHUNKS_PER_FETCH = NUM_KEYS / PASS_KEYS * Pace<T, NUM_ROWS>::chunks_per_fetch(NUM_BYTES);

  static constexpr int LOCATED = Tile<T, LAYOUT>::LOCATED;
  static constexpr int RUN = VEC_SIZE < LOCATED ? VEC_SIZE : LOCATED;  // of adjacent tokens
  static constexpr int NUM_RUNS = NUM_VECS * VEC_SIZE / RUN;

  using Converted = ConvertedFirst<Dot, MAX_HEAD_SIZE / ELEMENTS_PER_CHUNK<T> * NUM_KEYS>;
  using Loaded = typename Dot::Keys[LOADED_KEYS];
  using Sums = Vec[NUM_ROWS][Dot::SUMS][NUM_KEYS];

  const T* runs[NUM_RUNS];
  int64_t chunk_stride;
  int64_t num_chunks;

  PAGEDATTN_INLINE void locate(const HeadTile<T, LAYOUT>& h, int first_token) {
    num_chunks = h.params.head_size / ELEMENTS_PER_CHUNK<T>;
    chunk_stride = h.chunk_stride();
    for (int i = 0; i < NUM_RUNS; ++i) runs[i] = h.keys + h.tile.key_at(first_token + i * RUN);
  }

  PAGEDATTN_INLINE Chunks<T, LAYOUT> key_at(int64_t chunk, int key) const {
    const int token = key % NUM_VECS * VEC_SIZE + key / NUM_VECS * NUM_LANES;
    if constexpr (LAYOUT == CacheLayout::NHD) {
      Chunks<T, LAYOUT> chunks;
      PAGEDATTN_UNROLL
      for (int i = 0; i < NUM_LANES; ++i) chunks.of[i] = runs[token + i] + chunk * ELEMENTS_PER_CHUNK<T>;
      return chunks;
    } else {
      const T* run = runs[token / RUN] + chunk * chunk_stride;
      return run + token % RUN * ELEMENTS_PER_CHUNK<T>;
    }
  }

  PAGEDATTN_INLINE void convert_first([[maybe_unused]] Converted& converted) const {
    if constexpr (CONVERTS_FIRST<Dot>) {
      Chunks<T, LAYOUT> first_chunks[NUM_KEYS];
      for (int key = 0; key < NUM_KEYS; ++key) first_chunks[key] = key_at(0, key);
      convert_keys_first<Dot, NUM_KEYS>(first_chunks, chunk_stride, num_chunks, converted.at);
    }
  }

  PAGEDATTN_INLINE void load_keys(int64_t chunk, int first, [[maybe_unused]] const Converted& converted,
                                  Loaded& loaded) const {
    PAGEDATTN_UNROLL
    for (int i = 0; i < LOADED_KEYS; ++i) {
      if constexpr (CONVERTS_FIRST<Dot>) {
        loaded[i] = Dot::load_converted(converted.at[chunk * NUM_KEYS + first + i]);
      } else {
        loaded[i] = Dot::load_keys(key_at(chunk, first + i));
      }
    }
  }

  static PAGEDATTN_INLINE void load_part(int64_t chunk, int first, int part, const Converted& converted,
                                         Loaded& loaded) {
    PAGEDATTN_UNROLL
    for (int i = 0; i < LOADED_KEYS; ++i) {
      loaded[i].part[part] = Dot::load_part(converted.at[chunk * NUM_KEYS + first + i], part);
    }
  }

  // Multiplies parts [part, part + Dot::SUMS) with the same part of a query, or with one digit each of the same codes,
  // into different sums.
  static PAGEDATTN_INLINE void multiply_parts(const Row* rows, int64_t chunk, int first, int part, const Loaded& loaded,
                                              Sums& sums) {
    PAGEDATTN_UNROLL
    for (int r = 0; r < NUM_ROWS; ++r) {
      auto query = Dot::load_query(rows[r].query, chunk, part);
      if constexpr (Dot::SUMS > 1 && VEC_SIZE == 8) query = in_register(query);
      PAGEDATTN_UNROLL
      for (int of = 0; of < Dot::SUMS; ++of) {
        if constexpr (INTEGER_SUMS<Dot> && BY_DIGITS) query = Dot::load_query(rows[r].query, chunk, part + of);
        PAGEDATTN_UNROLL
        for (int i = 0; i < LOADED_KEYS; ++i) {
          Vec& sum = sums[r][of][first + i];
          sum = Dot::multiply_add(sum, loaded[i].part[part + of], query);
        }
      }
    }
  }

  // Multiplies all parts of keys [first, first + LOADED_KEYS).
  static PAGEDATTN_INLINE void multiply_keys(const Row* rows, int64_t chunk, int first,
                                             [[maybe_unused]] const Converted& converted, Loaded& loaded, Sums& sums) {
    PAGEDATTN_UNROLL
    for (int part = 0; part < Dot::PARTS; part += Dot::SUMS) {
      if constexpr (PART_BY_PART) {
        PAGEDATTN_UNROLL
        for (int of = 0; of < Dot::SUMS; ++of) load_part(chunk, first, part + of, converted, loaded);
      }
      multiply_parts(rows, chunk, first, part, loaded, sums);
    }
  }

  static PAGEDATTN_INLINE void fetch_beside(Prefetcher<T, LAYOUT>& prefetcher) {
    for (int64_t i = 0; i < NUM_BYTES; i += FETCH_BYTES) prefetcher.fetch();
  }

  static PAGEDATTN_INLINE SumVec<Dot> sum_keys(const Vec* of_vec) {
    using V = SumVec<Dot>;
    return sum_lanes((V)of_vec[0], (V)of_vec[NUM_VECS], (V)of_vec[2 * NUM_VECS], (V)of_vec[3 * NUM_VECS]);
  }

  // The logits of vector `v` of the tokens, which begins at `token` of the tile.
  static PAGEDATTN_INLINE Vec logits_of(const HeadTile<T, LAYOUT>& h, const Row& row,
                                        const Vec (&sums)[Dot::SUMS][NUM_KEYS], int v, int token) {
    SumVec<Dot> by_lane = sum_keys(sums[0] + v);
    if constexpr (Dot::SUMS == 2) {
      if constexpr (INTEGER_SUMS<Dot>) {
        by_lane = by_lane * 256 + sum_keys(sums[1] + v);
      } else {
        by_lane = add_neighbour_lanes(by_lane, sum_keys(sums[1] + v));
      }
    }
    return logits_from<Dot>(h, row, token, in_token_order(by_lane));
  }

  static PAGEDATTN_INLINE void store_logits(const HeadTile<T, LAYOUT>& h, const Row* rows, const Sums& sums,
                                            int first_token, TileLogits* logits) {
    for (int r = 0; r < NUM_ROWS; ++r) {
      for (int v = 0; v < NUM_VECS; ++v) {
        const int token = first_token + v * VEC_SIZE;
        store(logits[r].at + token, logits_of(h, rows[r], sums[r], v, token));
      }
    }
  }
};

template <typename Dot, int NUM_ROWS, int NUM_VECS, typename T, CacheLayout LAYOUT>
PAGEDATTN_INLINE void compute_logits_at(const HeadTile<T, LAYOUT>& h, const Row* rows, int first_token,
                                        TileLogits* logits) {
  using Passes = KeyPasses<T, LAYOUT, Dot, NUM_ROWS, NUM_VECS>;
  Passes keys;
  keys.locate(h, first_token);
  typename Passes::Converted converted;
  keys.convert_first(converted);
  typename Passes::Sums sums = {};
  PAGEDATTN_UNROLL
  for (int pass = 0; pass < Passes::NUM_KEYS; pass += Passes::PASS_KEYS) {
    for (int64_t chunk = 0; chunk < keys.num_chunks; ++chunk) {
      PAGEDATTN_UNROLL
      for (int first = pass; first < pass + Passes::PASS_KEYS; first += Passes::LOADED_KEYS) {
        typename Passes::Loaded loaded;
        if constexpr (!Passes::PART_BY_PART) keys.load_keys(chunk, first, converted, loaded);
        if (first == pass && h.prefetcher != nullptr && chunk % Passes::CHUNKS_PER_FETCH == 0) {
          Passes::fetch_beside(*h.prefetcher);
        }
        Passes::multiply_keys(rows, chunk, first, converted, loaded, sums);
      }
    }
  }
  Passes::store_logits(h, rows, sums, first_token, logits);
}

// Not inlined, or GCC 12 would load the constants of the keys' conversion again for every chunk.
template <typename Dot, int NUM_ROWS, typename T, CacheLayout LAYOUT>
__attribute__((noinline)) void compute_logits(const HeadTile<T, LAYOUT>& h, TileTokens tokens, const Row* rows,
                                              TileLogits* logits) {
  constexpr int NUM_VECS = LAYOUT == CacheLayout::NHD ? 1 : LOGIT_VECS<NUM_ROWS>;
  int token = tokens.begin / VEC_SIZE * VEC_SIZE;
  for (; token + NUM_VECS * VEC_SIZE <= tokens.end; token += NUM_VECS * VEC_SIZE) {
    compute_logits_at<Dot, NUM_ROWS, NUM_VECS>(h, rows, token, logits);
  }
  for (; token < tokens.end; token += VEC_SIZE) compute_logits_at<Dot, NUM_ROWS, 1>(h, rows, token, logits);
}

// Applies softcap, ALiBi and the mask, where there are any. Returns the greatest logit.
template <typename T, CacheLayout LAYOUT>
PAGEDATTN_INLINE float mask_logits(const PagedAttentionParams& p, const Tile<T, LAYOUT>& tile, const Row& row,
                                   float* logits) {
  // What this row sees of the tile; the other rows of the item may see more.
  const int64_t row_begin = p.first_visible(row.position) - tile.token;
  const int64_t row_end = p.end_of_window(row.position) - tile.token;
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
      const IntVec distance = token_idx + static_cast<int32_t>(tile.token - row.position);
      x = fma(broadcast(row.alibi_slope), __builtin_convertvector(distance > 0 ? -distance : distance, Vec), x);
    }
    x = select((token_idx >= begin) & (token_idx < end), x, minus_infinity);
    max_logits = max(max_logits, x);
    store(logits + token, x);
  }
  return reduce_max(max_logits);
}

// Turns the rows' logits into exponentials relative to the rows' new maxima, and into 0 for tokens that a row does not
// see. The sums so far are rescaled to the new maxima. Each step is taken for all rows before the next step, so that
// the latencies of the rows overlap.
template <int NUM_ROWS, typename T, CacheLayout LAYOUT>
void update_softmax(const PagedAttentionParams& p, const Tile<T, LAYOUT>& tile, const Row* rows, TileLogits* logits) {
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

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
