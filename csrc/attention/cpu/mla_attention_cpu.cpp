// A tile of tokens is converted once for all queries of an item: keys with the words of VEC_SIZE tokens side by side,
// so that a vector has a number of each key, and latents as they lie, as the values. What is left is two products of
// matrices, queries with keys and weights with values. In both, the sums of a few queries by a panel of columns stay in
// registers.
//
// Queries, keys and values are multiplied in fp32, or in bf16 where they are bf16 and the CPU has an instruction for
// their products; weights are then rounded to bf16. The products of a query are one chain of additions, whatever the
// queries beside it.
#include "attention/cpu/attention_results.h"
#include "attention/mla_attention.h"
#include "cpu_math.h"
#include "cpu_memory.h"
#include "cpu_rows.h"
#include "cpu_transpose.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// So many queries by so many columns, at most, are summed at once: the sums leave registers for the operands.
constexpr int PRODUCT_QUERIES = NUM_REGISTERS == 32 ? 8 : VEC_SIZE == 8 ? 6 : 4;
constexpr int PANEL_VECS = 2;
constexpr int PANEL = PANEL_VECS * VEC_SIZE;

// Steps of a query, or of its weights, that are adjacent.
constexpr int QUERY_STEPS = 64;

// The form in which queries and columns are multiplied, step by step, in words of 4 bytes.

// A step is one number, in fp32.
template <typename T>
struct Floats {
  static constexpr int STEP = 1;

  static PAGEDATTN_INLINE Vec load_step(const T* source) { return load(source); }
  static PAGEDATTN_INLINE Vec load_first_step(const T* source, int64_t count) { return load_first(source, count); }
  static PAGEDATTN_INLINE Vec add_product(Vec x, Vec column, Vec sum) { return fma(x, column, sum); }
};

#if defined(PAGEDATTN_BFLOAT16_DOTS)
// A step is two numbers, in bf16. One instruction adds both products to a sum in fp32.
struct Bfloat16Pairs {
  static constexpr int STEP = 2;

  static PAGEDATTN_INLINE Vec load_step(const bfloat16* source) { return load_as<Vec>(source); }
  static PAGEDATTN_INLINE Vec load_first_step(const bfloat16* source, int64_t count) {
    Vec result{};
    __builtin_memcpy(&result, source, count * sizeof(bfloat16));
    return result;
  }
  static PAGEDATTN_INLINE Vec add_product(Vec x, Vec column, Vec sum) { return add_pair_products(sum, x, column); }
};
#endif

// Calls body(i, load_words) over [0, size) in steps of a vector's numbers: load_words(source) is a vector of elements
// that begins at source + i, with zeros after the last number.
template <typename Operands, typename Body>
PAGEDATTN_INLINE void for_each_word_vector(int64_t size, Body&& body) {
  constexpr int NUMBERS = VEC_SIZE * Operands::STEP;
  int64_t i = 0;
  for (; i + NUMBERS <= size; i += NUMBERS) {
    body(i, [i](const auto* source) { return Operands::load_step(source + i); });
  }
  if (const int64_t rest = size - i; rest > 0) {
    body(i, [i, rest](const auto* source) { return Operands::load_first_step(source + i, rest); });
  }
}

template <typename Operands>
constexpr int64_t steps_of(int64_t size) {
  return (size + Operands::STEP - 1) / Operands::STEP;
}

// A tile of tokens, of which the first `count` are visible to some query. Of the other tokens, the last visible token
// takes the place.
template <typename T>
struct MlaTile {
  int64_t token;
  int64_t count;
  const T* latent[MLA_TILE_TOKENS];
  const T* rope[MLA_TILE_TOKENS];

  // The tile at `first_token` of a sequence whose tokens before `end` are visible. There may be none.
  void locate(const MlaAttentionParams& p, int64_t seq, int64_t first_token, int64_t end) {
    token = first_token;
    count = end - token < MLA_TILE_TOKENS ? end - token : MLA_TILE_TOKENS;
    if (count <= 0) return;
    const Indices table = p.block_table(seq);
    int64_t t = 0;
    for (; t < count; ++t) {
      const int64_t block = table[(token + t) / p.block_size], slot = (token + t) % p.block_size;
      latent[t] = static_cast<const T*>(p.kv_c_cache) + block * p.kv_c_strides.block + slot * p.kv_c_strides.token;
      rope[t] = static_cast<const T*>(p.k_pe_cache) + block * p.k_pe_strides.block + slot * p.k_pe_strides.token;
    }
    for (; t < MLA_TILE_TOKENS; ++t) {
      latent[t] = latent[count - 1];
      rope[t] = rope[count - 1];
    }
  }
};

// Fetches a tile in `num_parts` parts, while the tile before is multiplied.
template <typename T>
struct MlaTileFetch {
  const MlaAttentionParams& p;
  const MlaTile<T>& tile;
  int64_t num_parts;
  int64_t part = 0;

  void fetch_part() {
    if (tile.count <= 0) return;
    const int64_t begin = part * tile.count / num_parts, end = (part + 1) * tile.count / num_parts;
    for (int64_t t = begin; t < end; ++t) {
      fetch(tile.latent[t], p.latent_size);
      fetch(tile.rope[t], p.rope_size);
    }
    ++part;
  }
  static void fetch(const T* numbers, int64_t size) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t d = 0; d < size; d += LINE) prefetch_line(numbers + d);
  }
};

// Converts a part of the keys of a panel of tokens: [size in steps, PANEL] elements at `target`.
template <typename Operands, typename T>
__attribute__((noinline)) void convert_keys(const T* const* tokens, int64_t size, float* target) {
  for (int v = 0; v < PANEL_VECS; ++v) {
    for_each_word_vector<Operands>(size, [&](int64_t i, auto load_words) PAGEDATTN_ALWAYS_INLINE {
      Vec words[VEC_SIZE];
      PAGEDATTN_UNROLL
      for (int t = 0; t < VEC_SIZE; ++t) words[t] = load_words(tokens[v * VEC_SIZE + t]);
      transpose(words);
      float* step = target + i / Operands::STEP * PANEL + v * VEC_SIZE;
      const int64_t num_steps = steps_of<Operands>(size - i);
      if (num_steps >= VEC_SIZE) {
        PAGEDATTN_UNROLL
        for (int s = 0; s < VEC_SIZE; ++s) store(step + s * PANEL, words[s]);
      } else {
        for (int s = 0; s < num_steps; ++s) store(step + s * PANEL, words[s]);
      }
    });
  }
}

// Converts a panel of the latents: [steps of tokens, PANEL] elements at `target`. `load_at(latent)` loads a vector.
template <typename Operands, typename T, typename LoadAt>
PAGEDATTN_INLINE void convert_column(const MlaTile<T>& tile, const LoadAt& load_at, float* target) {
  if constexpr (Operands::STEP == 1) {
    for (int64_t t = 0; t < tile.count; ++t) store(target + t * PANEL, load_at(tile.latent[t]));
  } else {
    for (int64_t t = 0; t < tile.count; t += 2, target += PANEL) {
      // Numbers in bf16 are the upper halves of numbers in fp32.
      const UintVec first = (UintVec)load_at(tile.latent[t]) >> 16;
      const UintVec second = t + 1 < tile.count ? (UintVec)load_at(tile.latent[t + 1]) : UintVec{};
      store(target, (Vec)(first | second));
    }
  }
}

template <typename Operands, typename T>
__attribute__((noinline)) void convert_values(const MlaTile<T>& tile, int64_t latent_size, float* values) {
  for_each_vector(latent_size, [&](int64_t d, auto load, auto) {
    float* target = values + d / PANEL * PANEL * MLA_TILE_TOKENS + d % PANEL;
    convert_column<Operands>(tile, [&](const T* latent) PAGEDATTN_ALWAYS_INLINE { return load(latent + d); }, target);
  });
  // What is multiplied behind the last vector of the latents, and left out of the results.
  for (int64_t d = (latent_size + VEC_SIZE - 1) / VEC_SIZE * VEC_SIZE; d % PANEL != 0; d += VEC_SIZE) {
    convert_column<Operands>(
        tile, [](const T*) PAGEDATTN_ALWAYS_INLINE { return Vec{}; },
        values + d / PANEL * PANEL * MLA_TILE_TOKENS + d % PANEL);
  }
}

// The queries of an item: query i of a step at `of` + (step / QUERY_STEPS * num_queries + i) * QUERY_STEPS.
template <typename Operands, typename T>
void convert_queries(const MlaAttentionParams& p, const MlaItem& item, float* queries) {
  const int64_t num_queries = item.query_end - item.query_begin;
  for (int64_t i = 0; i < num_queries; ++i) {
    const int64_t row = (item.query_begin + i) / p.num_heads, head = (item.query_begin + i) % p.num_heads;
    const auto convert = [&](const void* source, const MlaQueryStrides& strides, int64_t size, int64_t first_step) {
      const T* query = static_cast<const T*>(source) + row * strides.token + head * strides.head;
      for_each_word_vector<Operands>(size, [&](int64_t d, auto load_words) {
        const Vec words = load_words(query);
        const int64_t num_steps = steps_of<Operands>(size - d);
        for (int64_t s = 0; s < VEC_SIZE && s < num_steps; ++s) {
          const int64_t step = first_step + d / Operands::STEP + s;
          queries[(step / QUERY_STEPS * num_queries + i) * QUERY_STEPS + step % QUERY_STEPS] = words[s];
        }
      });
    };
    convert(p.q_nope, p.q_nope_strides, p.latent_size, 0);
    convert(p.q_pe, p.q_pe_strides, p.rope_size, steps_of<Operands>(p.latent_size));
  }
}

template <int QUERIES>
struct Sums {
  Vec of[QUERIES][PANEL_VECS];
};

// Adds `num_steps` products of QUERIES queries, QUERY_STEPS elements apart, with a panel.
template <int QUERIES, typename Operands>
PAGEDATTN_INLINE void add_products(const float* queries, const float* columns, int64_t num_steps, Sums<QUERIES>& sums) {
  for (int64_t step = 0; step < num_steps; ++step) {
    Vec column[PANEL_VECS];
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANEL_VECS; ++v) column[v] = in_register(load(columns + step * PANEL + v * VEC_SIZE));
    PAGEDATTN_UNROLL
    for (int q = 0; q < QUERIES; ++q) {
      const Vec x = load_repeated<1>(queries + q * QUERY_STEPS + step);
      PAGEDATTN_UNROLL
      for (int v = 0; v < PANEL_VECS; ++v) sums.of[q][v] = Operands::add_product(x, column[v], sums.of[q][v]);
    }
  }
}

// The logits of QUERIES queries for the tokens of a panel. Not inlined, or GCC 12 keeps the sums in memory.
template <int QUERIES, typename Operands>
__attribute__((noinline)) void compute_logits(const float* queries, int64_t block_stride, const float* keys,
                                              int64_t num_steps, float scale, float* logits) {
  Sums<QUERIES> sums{};
  for (; num_steps > QUERY_STEPS; num_steps -= QUERY_STEPS) {
    add_products<QUERIES, Operands>(queries, keys, QUERY_STEPS, sums);
    queries += block_stride;
    keys += QUERY_STEPS * PANEL;
  }
  add_products<QUERIES, Operands>(queries, keys, num_steps, sums);
  PAGEDATTN_UNROLL
  for (int q = 0; q < QUERIES; ++q) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANEL_VECS; ++v) store(logits + q * MLA_TILE_TOKENS + v * VEC_SIZE, sums.of[q][v] * scale);
  }
}

// Adds the weighted values of `num_tokens` tokens to a panel of QUERIES results, `stride` floats apart, which are first
// multiplied with `factors`.
template <int QUERIES, typename Operands>
__attribute__((noinline)) void add_values(const float* weights, const float* values, int64_t num_tokens,
                                          const float* factors, float* results, int64_t stride) {
  Sums<QUERIES> sums{};
  add_products<QUERIES, Operands>(weights, values, num_tokens / Operands::STEP, sums);
  if constexpr (Operands::STEP == 2) {
    if (num_tokens % 2 == 1) {
      // The second token of the last pair is not visible to these queries: its weight is 0, its value may be NaN.
      Vec last[PANEL_VECS];
      for (int v = 0; v < PANEL_VECS; ++v) {
        last[v] = (Vec)(load_as<UintVec>(values + num_tokens / 2 * PANEL + v * VEC_SIZE) & 0xffff);
      }
      add_products<QUERIES, Operands>(weights + num_tokens / 2, reinterpret_cast<const float*>(last), 1, sums);
    }
  }
  PAGEDATTN_UNROLL
  for (int q = 0; q < QUERIES; ++q) {
    PAGEDATTN_UNROLL
    for (int v = 0; v < PANEL_VECS; ++v) {
      float* result = results + q * stride + v * VEC_SIZE;
      store(result, fma(load(result), broadcast(factors[q]), sums.of[q][v]));
    }
  }
}

// Adjacent queries that see the same tokens of a tile.
struct QueryBlock {
  int begin;
  int size;  // PRODUCT_QUERIES or a power of two below
  int num_tokens;
};

struct QueryBlocks {
  QueryBlock at[MLA_ITEM_QUERIES];
  int size = 0;
};

template <typename T>
int tokens_seen(const MlaAttentionParams& p, const MlaItem& item, const MlaTile<T>& tile, int64_t query) {
  const int64_t seen = p.visible_end(item.seq, (item.query_begin + query) / p.num_heads) - tile.token;
  return static_cast<int>(seen < 0 ? 0 : seen < tile.count ? seen : tile.count);
}

// Queries that see no token of the tile are left out.
template <typename T>
void find_blocks(const MlaAttentionParams& p, const MlaItem& item, const MlaTile<T>& tile, QueryBlocks& blocks) {
  const auto num_queries = static_cast<int>(item.query_end - item.query_begin);
  for (int begin = 0; begin < num_queries;) {
    const int num_tokens = tokens_seen(p, item, tile, begin);
    int end = begin + 1;
    while (end < num_queries && tokens_seen(p, item, tile, end) == num_tokens) ++end;
    while (begin < end) {
      int size = PRODUCT_QUERIES;
      for (const int smaller : {4, 2, 1}) {
        if (size > end - begin) size = smaller;
      }
      if (num_tokens > 0) blocks.at[blocks.size++] = {begin, size, num_tokens};
      begin += size;
    }
  }
}

// Calls function.operator()<QUERIES>() for the size of a block.
template <typename Function>
PAGEDATTN_INLINE void dispatch_queries(int size, const Function& function) {
  switch (size) {
    case 1:
      return function.template operator()<1>();
    case 2:
      return function.template operator()<2>();
    case 4:
      return function.template operator()<4>();
    default:
      return function.template operator()<PRODUCT_QUERIES>();
  }
}

// Turns the logits of a query into weights. Returns what the results of the tokens before are multiplied with.
template <typename Operands>
float update_softmax(int num_tokens, float* logits, float& greatest_logit, float& sum) {
  constexpr int NUM_VECS = MLA_TILE_TOKENS / VEC_SIZE;
  Vec at[NUM_VECS];
  Vec greatest = broadcast(greatest_logit);
  for (int i = 0; i < NUM_VECS; ++i) {
    at[i] = select(iota() + i * VEC_SIZE < num_tokens, load(logits + i * VEC_SIZE), broadcast(-__builtin_inff()));
    greatest = max(at[i], greatest);
  }
  const float before = greatest_logit;
  greatest_logit = reduce_max(greatest);
  const float base = softmax_base(greatest_logit);
  Vec total{};
  for (int i = 0; i < NUM_VECS; ++i) {
    at[i] = exp(at[i] - base);
    total = total + at[i];
  }
  if constexpr (Operands::STEP == 1) {
    for (int i = 0; i < NUM_VECS; ++i) store(logits + i * VEC_SIZE, at[i]);
#if defined(PAGEDATTN_BFLOAT16_DOTS)
  } else {
    for (int i = 0; i < NUM_VECS; i += 2) store(logits + i / 2 * VEC_SIZE, (Vec)float_to_bfloat16(at[i], at[i + 1]));
#endif
  }
  const float factor = exp(before - base);
  sum = sum * factor + reduce_sum(total);
  return factor;
}

template <typename Operands, typename T>
void attend_tile(const MlaAttentionParams& p, const MlaItem& item, const MlaTile<T>& tile, const MlaTile<T>& next_tile,
                 const MlaScratch& at, float* scratch, const Results& results) {
  QueryBlocks blocks;
  find_blocks(p, item, tile, blocks);
  const int64_t latent_steps = steps_of<Operands>(p.latent_size);
  const int64_t num_steps = latent_steps + steps_of<Operands>(p.rope_size);
  const int64_t block_stride = (item.query_end - item.query_begin) * QUERY_STEPS;
  float* const keys = scratch + at.keys;
  float* const values = scratch + at.values;
  float* const weights = scratch + at.weights;
  for (int64_t token = 0; token < tile.count; token += PANEL) {
    convert_keys<Operands>(tile.latent + token, p.latent_size, keys);
    convert_keys<Operands>(tile.rope + token, p.rope_size, keys + latent_steps * PANEL);
    for (int b = 0; b < blocks.size; ++b) {
      const QueryBlock& block = blocks.at[b];
      if (block.num_tokens <= token) continue;
      dispatch_queries(block.size, [&]<int QUERIES>() PAGEDATTN_ALWAYS_INLINE {
        compute_logits<QUERIES, Operands>(scratch + at.queries + block.begin * QUERY_STEPS, block_stride, keys,
                                          num_steps, p.scale, weights + block.begin * MLA_TILE_TOKENS + token);
      });
    }
  }

  float factors[MLA_ITEM_QUERIES];
  for (int b = 0; b < blocks.size; ++b) {
    const QueryBlock& block = blocks.at[b];
    for (int q = block.begin; q < block.begin + block.size; ++q) {
      factors[q] =
          update_softmax<Operands>(block.num_tokens, weights + q * MLA_TILE_TOKENS, results.max[q], results.sum[q]);
    }
  }

  convert_values<Operands>(tile, p.latent_size, values);
  const int64_t stride = mla_padded(p.latent_size);
  MlaTileFetch<T> next{p, next_tile, (p.latent_size + PANEL - 1) / PANEL * blocks.size};
  for (int64_t d = 0; d < p.latent_size; d += PANEL) {
    for (int b = 0; b < blocks.size; ++b) {
      const QueryBlock& block = blocks.at[b];
      dispatch_queries(block.size, [&]<int QUERIES>() PAGEDATTN_ALWAYS_INLINE {
        add_values<QUERIES, Operands>(weights + block.begin * MLA_TILE_TOKENS, values + d * MLA_TILE_TOKENS,
                                      block.num_tokens, factors + block.begin,
                                      results.values + block.begin * stride + d, stride);
      });
      next.fetch_part();
    }
  }
}

// Rounds the results of `num_queries` queries from `query_begin` on to `out`. A query that sees nothing gives zeros.
template <typename T>
void write_queries(const MlaAttentionParams& p, int64_t query_begin, int64_t num_queries, const Results& results) {
  for (int64_t q = 0; q < num_queries; ++q) {
    const float sum = results.sum[q];
    const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
    const float* values = results.values + q * mla_padded(p.latent_size);
    T* out = static_cast<T*>(p.out) + (query_begin + q) * p.latent_size;
    for_each_vector(p.latent_size, [&](int64_t d, auto load, auto store) { store(out + d, load(values + d) * scale); });
    p.lse[query_begin + q] = sum == 0.0f ? -__builtin_inff() : softmax_base(results.max[q]) + __builtin_logf(sum);
  }
}

template <typename Operands, typename T>
void attend_item(const MlaAttentionParams& p, const MlaItem& item, float* scratch, float* partials) {
  const MlaScratch at(p);
  const int64_t num_queries = item.query_end - item.query_begin;
  const int64_t size = mla_padded(p.latent_size);
  const Results partition_results(scratch + at.partition, MLA_ITEM_QUERIES);
  const Results total(scratch + at.total, MLA_ITEM_QUERIES);
  convert_queries<Operands, T>(p, item, scratch + at.queries);
  clear(total, num_queries, size);
  const int64_t visible_end = p.visible_end(item.seq, (item.query_end - 1) / p.num_heads);
  MlaTile<T> tiles[2];
  tiles[0].locate(p, item.seq, item.partition_begin * MLA_PARTITION_TOKENS, visible_end);
  int current = 0;
  for (int64_t partition = item.partition_begin; partition < item.partition_end; ++partition) {
    clear(partition_results, num_queries, size);
    const int64_t partition_end = (partition + 1) * MLA_PARTITION_TOKENS;
    while (tiles[current].count > 0 && tiles[current].token < partition_end) {
      tiles[1 - current].locate(p, item.seq, tiles[current].token + MLA_TILE_TOKENS, visible_end);
      attend_tile<Operands>(p, item, tiles[current], tiles[1 - current], at, scratch, partition_results);
      current = 1 - current;
    }
    if (item.partial < 0) {
      for (int64_t q = 0; q < num_queries; ++q) merge(total, q, partition_results, q, size);
    } else {
      float* partial =
          partials + item.partial + (partition - item.partition_begin) * mla_partial_floats(p, num_queries);
      const Results target(partial, num_queries);
      for (int64_t q = 0; q < num_queries; ++q) copy(target, q, partition_results, q, size);
    }
  }
  if (item.partial < 0) write_queries<T>(p, item.query_begin, num_queries, total);
}

}  // namespace

void mla_attend(const MlaAttentionParams& params, const MlaItem& item, float* scratch, float* partials) {
#if defined(PAGEDATTN_BFLOAT16_DOTS)
  if (params.dtype == DType::BFLOAT16) return attend_item<Bfloat16Pairs, bfloat16>(params, item, scratch, partials);
#endif
  dispatch_dtype(params.dtype, [&]<typename T>() { attend_item<Floats<T>, T>(params, item, scratch, partials); });
}

void mla_merge(const MlaAttentionParams& params, const MlaMerge& item, const float* partials, float* scratch) {
  const int64_t num_queries = item.query_end - item.query_begin;
  const int64_t size = mla_padded(params.latent_size);
  const Results total(scratch, MLA_ITEM_QUERIES);
  clear(total, num_queries, size);
  for (int64_t i = 0; i < item.num_partitions; ++i) {
    const float* partial = partials + item.partial + i * mla_partial_floats(params, num_queries);
    const Results from(const_cast<float*>(partial), num_queries);
    for (int64_t q = 0; q < num_queries; ++q) merge(total, q, from, q, size);
  }
  dispatch_dtype(params.dtype, [&]<typename T>() { write_queries<T>(params, item.query_begin, num_queries, total); });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
