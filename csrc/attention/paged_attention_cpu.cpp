// The walk. An item's tokens are taken in tiles of 64, and for each tile its KV heads one after the other: the pieces
// of one head in a physical block are contiguous, and the next head's follow them, so every block is read front to
// back, once for all query heads that share a KV head.
//
// T is the type of the cache; queries and outputs are read and written once, by their own.
//
// Logits. A vector covers NUM_LANES tokens with four partial sums each (key_dot_cpu.h). Four such vectors make VEC_SIZE
// tokens, and one transposing reduction turns their partial sums into VEC_SIZE logits.
//
// Values. A row of the value cache holds one element of consecutive tokens: VEC_SIZE sums of (row, element) pairs stay
// in registers over a tile, and one transposing reduction a tile turns them into VEC_SIZE elements.
#include "attention/paged_attention.h"

#include "attention/key_dot_cpu.h"
#include "cpu_vec.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// Query rows that share the loads of a key or value: as many as the registers hold.
template <typename T>
constexpr int MAX_ROWS = (VEC_SIZE == 16 ? 4 : 2) / (KeyDot<T>::PARTS == 4 ? 2 : 1);
constexpr int TILE_VECS = TILE_TOKENS / VEC_SIZE;
constexpr int TILE_LANE_VECS = TILE_TOKENS / NUM_LANES;

// VEC_SIZE consecutive tokens of a row of values: in one block, or, where blocks are smaller than a vector, half in one
// and half in the next.
template <bool TWO_BLOCKS, typename T>
PAGEDATTN_INLINE Vec load_values(const T* first, const T* second) {
  if constexpr (TWO_BLOCKS) {
    T tokens[VEC_SIZE];
    __builtin_memcpy(tokens, first, sizeof tokens / 2);
    __builtin_memcpy(tokens + VEC_SIZE / 2, second, sizeof tokens / 2);
    return load(tokens);
  } else {
    return load(first);
  }
}

// ---- a tile of tokens

// Where the visible tokens of a tile lie, in elements from the start of a cache, for KV head 0. Tokens that no row sees
// are masked, and may lie in slots with NaN or in blocks that do not exist: vectors without a visible token are
// skipped.
struct Tile {
  int64_t token;       // the tile's first token in its sequence
  int32_t begin, end;  // the visible tokens, counted from there
  int64_t key_offset[TILE_LANE_VECS];
  int64_t value_offset[2 * TILE_VECS];  // of both halves of every vector; of the whole vector in the first if it is one

  int first_vec() const { return begin / VEC_SIZE; }
  int last_vec() const { return (end - 1) / VEC_SIZE; }
  bool all_visible() const { return begin == 0 && end == TILE_TOKENS; }
  bool all_visible(int vec) const { return begin <= vec * VEC_SIZE && (vec + 1) * VEC_SIZE <= end; }
  IntVec visible(int vec) const {
    const IntVec token_idx = iota() + vec * VEC_SIZE;
    return (token_idx >= begin) & (token_idx < end);
  }
};

// The tile at `token`, of which the tokens [visible_begin, visible_end) of the sequence are visible.
template <typename T>
Tile locate_tile(const PagedAttentionParams& p, const int32_t* block_table, int64_t token, int64_t visible_begin,
                 int64_t visible_end) {
  Tile tile;
  tile.token = token;
  tile.begin = static_cast<int32_t>(visible_begin > token ? visible_begin - token : 0);
  tile.end = static_cast<int32_t>(visible_end - token < TILE_TOKENS ? visible_end - token : TILE_TOKENS);
  // A group of tokens that are loaded together, but of which none is visible, is replaced by the nearest that has one.
  const auto locate = [&](int64_t index, int64_t group, int64_t block_stride, int64_t token_stride) {
    const int64_t first = tile.begin / group * group;
    const int64_t last = (tile.end - 1) / group * group;
    const int64_t t = token + (index < first ? first : index > last ? last : index);
    return block_table[t / p.block_size] * block_stride + t % p.block_size * token_stride;
  };
  for (int i = 0; i < TILE_LANE_VECS; ++i) {
    tile.key_offset[i] = locate(i * NUM_LANES, NUM_LANES, p.key_block_stride, ELEMENTS_PER_CHUNK<T>);
  }
  const int64_t value_group = p.block_size < VEC_SIZE ? VEC_SIZE / 2 : VEC_SIZE;
  for (int i = 0; i < 2 * TILE_VECS; ++i) {
    tile.value_offset[i] = locate(i * VEC_SIZE / 2 / value_group * value_group, value_group, p.value_block_stride, 1);
  }
  return tile;
}

// What the rows of one KV head have in common while they go over a tile.
template <typename T>
struct HeadTile {
  const PagedAttentionParams& params;
  const Tile& tile;
  const T* keys;          // key_cache at this KV head
  const T* values;        // value_cache at this KV head
  const Tile& next_tile;  // where the walk goes from here: the next head, or the first one in the next tile
  const T* next_keys;     // key_cache at that KV head
  bool prefetch;          // for the first rows that go over the tile
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

// Prefetch is crossed, so that memory is always at work: values come while their keys are multiplied, and the keys that
// are next while values are summed. The hardware does not foresee the jumps from block to block: without this, a decode
// step over a large cache takes 1.5 to 1.9 times as long.
template <typename T>
PAGEDATTN_INLINE void prefetch_values(const HeadTile<T>& h, int vec, int64_t chunk, int64_t chunk_stride) {
  const T* values = h.values + h.tile.value_offset[2 * vec] + chunk * chunk_stride;
  for (int j = 0; j < 4; ++j) __builtin_prefetch(values + j * chunk_stride / 4, 0, 2);
}

// As many bytes of the next keys as elements [d, d + STEP) of VEC_SIZE values take.
template <int STEP, typename T>
PAGEDATTN_INLINE void prefetch_next_keys(const HeadTile<T>& h, int vec, int64_t d) {
  constexpr int X = ELEMENTS_PER_CHUNK<T>;
  for (int64_t i = d * 4 / X; i < (d + STEP) * 4 / X; ++i) {
    const T* keys = h.next_keys + h.next_tile.key_offset[4 * vec + i % 4];
    __builtin_prefetch(keys + i / 4 * h.params.block_size * X, 0, 2);
  }
}

template <typename T, int NUM_ROWS>
void compute_logits(const HeadTile<T>& h, const Row* rows, float (*logits)[TILE_TOKENS]) {
  using Dot = KeyDot<T>;
  const int64_t num_chunks = h.params.head_size / ELEMENTS_PER_CHUNK<T>;
  const int64_t chunk_stride = h.params.block_size * ELEMENTS_PER_CHUNK<T>;
  for (int vec = h.tile.first_vec(); vec <= h.tile.last_vec(); ++vec) {
    const T* keys[4];
    for (int j = 0; j < 4; ++j) keys[j] = h.keys + h.tile.key_offset[4 * vec + j];
    Vec sums[NUM_ROWS][4] = {};
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      typename Dot::Chunk query[NUM_ROWS];
      for (int r = 0; r < NUM_ROWS; ++r) query[r] = Dot::load_query(rows[r].query, chunk);
      if (h.prefetch) prefetch_values(h, vec, chunk, chunk_stride);
      for (int j = 0; j < 4; ++j) {
        const typename Dot::Chunk key = Dot::load_keys(keys[j] + chunk * chunk_stride);
        for (int r = 0; r < NUM_ROWS; ++r) sums[r][j] = Dot::multiply_add(sums[r][j], key, query[r]);
      }
    }
    for (int r = 0; r < NUM_ROWS; ++r) {
      // In 128-bit lane l, element j: token j * NUM_LANES + l.
      const Vec by_lane = sum_lanes(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
      const Vec by_token = shuffle(by_lane, by_lane, [](int t) { return t % NUM_LANES * 4 + t / NUM_LANES; });
      store(logits[r] + vec * VEC_SIZE, by_token * h.params.logit_scale);
    }
  }
}

// Turns a row's logits into exponentials relative to its new maximum; the sums so far are rescaled to it.
void update_softmax(const PagedAttentionParams& p, const Tile& tile, const Row& row, float* logits) {
  // What this row sees of the tile; the other rows of the item may see more.
  const int64_t row_begin = p.first_visible(row.position) - tile.token;
  const int64_t row_end = row.position + 1 - tile.token;
  const auto begin = static_cast<int32_t>(row_begin > tile.begin ? row_begin : tile.begin);
  const auto end = static_cast<int32_t>(row_end < tile.end ? row_end : tile.end);
  const Vec minus_infinity = broadcast(-__builtin_inff());
  Vec max_logits = minus_infinity;
  for (int vec = tile.first_vec(); vec <= tile.last_vec(); ++vec) {
    Vec x = load(logits + vec * VEC_SIZE);
    const IntVec token_idx = iota() + vec * VEC_SIZE;
    if (p.softcap > 0.0f) x = p.softcap * tanh(x / p.softcap);
    if (row.alibi_slope != 0.0f) {
      const auto distance = static_cast<int32_t>(tile.token - row.position);
      x = fma(broadcast(row.alibi_slope), __builtin_convertvector(token_idx + distance, Vec), x);
    }
    x = select((token_idx >= begin) & (token_idx < end), x, minus_infinity);
    max_logits = max(max_logits, x);
    store(logits + vec * VEC_SIZE, x);
  }

  const float old_max = *row.max;
  const float tile_max = reduce_max(max_logits);
  const float new_max = tile_max > old_max ? tile_max : old_max;
  // Nothing visible yet: relative to 0, every exponential is 0.
  const float base = new_max == -__builtin_inff() ? 0.0f : new_max;
  Vec sum{};
  for (int vec = tile.first_vec(); vec <= tile.last_vec(); ++vec) {
    const Vec weight = exp(load(logits + vec * VEC_SIZE) - base);
    store(logits + vec * VEC_SIZE, weight);
    sum = sum + weight;
  }
  if (new_max > old_max) {
    const float rescale = exp(old_max - new_max);
    *row.sum *= rescale;
    for_each_vector(p.head_size,
                    [&](int64_t d, auto load, auto store) { store(row.values + d, load(row.values + d) * rescale); });
    *row.max = new_max;
  }
  *row.sum += reduce_sum(sum);
}

// Elements [d, d + STEP) of the values of NUM_ROWS rows. WHOLE: the head does not end within them.
template <typename T, int NUM_ROWS, bool TWO_BLOCKS, bool WHOLE>
PAGEDATTN_INLINE void accumulate_elements(const HeadTile<T>& h, const Row* rows, const float (*weights)[TILE_TOKENS],
                                          int64_t d) {
  constexpr int STEP = VEC_SIZE / NUM_ROWS;
  const int64_t block_size = h.params.block_size;
  const int num_elements = WHOLE ? STEP : static_cast<int>(h.params.head_size - d);
  Vec sums[VEC_SIZE] = {};  // [NUM_ROWS][STEP]
  const auto add_tokens = [&](int vec, auto mask) PAGEDATTN_ALWAYS_INLINE {
    const T* first = h.values + h.tile.value_offset[2 * vec] + d * block_size;
    const T* second = h.values + h.tile.value_offset[2 * vec + 1] + d * block_size;
    if (WHOLE && h.prefetch) prefetch_next_keys<STEP>(h, vec, d);
    Vec weight[NUM_ROWS];
    for (int r = 0; r < NUM_ROWS; ++r) weight[r] = load(weights[r] + vec * VEC_SIZE);
    PAGEDATTN_UNROLL
    for (int i = 0; i < STEP; ++i) {
      // Past the end of the head, its last element is read again; that sum is dropped.
      const int64_t offset = (WHOLE || i < num_elements ? i : num_elements - 1) * block_size;
      const Vec value = mask(load_values<TWO_BLOCKS>(first + offset, second + offset));
      PAGEDATTN_UNROLL
      for (int r = 0; r < NUM_ROWS; ++r) sums[r * STEP + i] = fma(value, weight[r], sums[r * STEP + i]);
    }
  };
  if (!h.prefetch && h.tile.all_visible()) {
    // Unrolled, for rows that find the tile in the caches. Those that fetch it wait for memory: they gain nothing, and
    // lose by having their prefetches closer together.
    PAGEDATTN_UNROLL
    for (int vec = 0; vec < TILE_VECS; ++vec) add_tokens(vec, [](Vec value) { return value; });
  } else {
    for (int vec = h.tile.first_vec(); vec <= h.tile.last_vec(); ++vec) {
      if (h.tile.all_visible(vec)) {
        add_tokens(vec, [](Vec value) { return value; });
      } else {
        // A slot that no row sees may hold NaN, which a weight of 0 would not silence.
        const IntVec visible = h.tile.visible(vec);
        add_tokens(vec, [visible](Vec value) { return select(visible, value, Vec{}); });
      }
    }
  }
  float totals[VEC_SIZE];
  store(totals, sum_each(sums));
  for (int r = 0; r < NUM_ROWS; ++r) {
    float* values = rows[r].values + d;
    if constexpr (WHOLE) {
      typedef float Part __attribute__((vector_size(STEP * sizeof(float))));
      Part sum;
      Part addition;
      __builtin_memcpy(&sum, values, sizeof sum);
      __builtin_memcpy(&addition, totals + r * STEP, sizeof addition);
      sum += addition;
      __builtin_memcpy(values, &sum, sizeof sum);
    } else {
      for (int i = 0; i < num_elements; ++i) values[i] += totals[r * STEP + i];
    }
  }
}

template <typename T, int NUM_ROWS, bool TWO_BLOCKS>
void accumulate_values(const HeadTile<T>& h, const Row* rows, const float (*weights)[TILE_TOKENS]) {
  constexpr int STEP = VEC_SIZE / NUM_ROWS;
  int64_t d = 0;
  for (; d + STEP <= h.params.head_size; d += STEP) {
    accumulate_elements<T, NUM_ROWS, TWO_BLOCKS, true>(h, rows, weights, d);
  }
  if (d < h.params.head_size) accumulate_elements<T, NUM_ROWS, TWO_BLOCKS, false>(h, rows, weights, d);
}

template <typename T, int NUM_ROWS>
void attend_rows(const HeadTile<T>& h, const Row* rows) {
  alignas(64) float logits[NUM_ROWS][TILE_TOKENS];
  compute_logits<T, NUM_ROWS>(h, rows, logits);
  for (int r = 0; r < NUM_ROWS; ++r) update_softmax(h.params, h.tile, rows[r], logits[r]);
  if (h.params.block_size < VEC_SIZE) {
    accumulate_values<T, NUM_ROWS, true>(h, rows, logits);
  } else {
    accumulate_values<T, NUM_ROWS, false>(h, rows, logits);
  }
}

// ---- results: partial, merged, final

// One result for each (row, head) of an item, in memory that the caller owns.
struct Results {
  float* max;     // [num_results]
  float* sum;     // [num_results]
  float* values;  // [num_results, head_size]

  Results(float* memory, int64_t num_results)
      : max(memory), sum(memory + num_results), values(memory + 2 * num_results) {}
};

void clear(const Results& results, int64_t num_results, int64_t head_size) {
  for (int64_t i = 0; i < num_results; ++i) results.max[i] = -__builtin_inff();
  __builtin_memset(results.sum, 0, num_results * sizeof(float));
  __builtin_memset(results.values, 0, num_results * head_size * sizeof(float));
}

// Merges result `from_index` of `from` into result `index`.
void merge(const Results& results, int64_t index, const Results& from, int64_t from_index, int64_t head_size) {
  const float old_max = results.max[index];
  const float from_max = from.max[from_index];
  const float new_max = from_max > old_max ? from_max : old_max;
  const float base = new_max == -__builtin_inff() ? 0.0f : new_max;
  const float weight = exp(old_max - base);
  const float from_weight = exp(from_max - base);
  results.max[index] = new_max;
  results.sum[index] = results.sum[index] * weight + from.sum[from_index] * from_weight;
  float* values = results.values + index * head_size;
  const float* from_values = from.values + from_index * head_size;
  for_each_vector(head_size, [&](int64_t d, auto load, auto store) {
    store(values + d, fma(load(values + d), broadcast(weight), load(from_values + d) * from_weight));
  });
}

// Rounds one result to `out`; a row that sees nothing gives zeros. A sum of NaN is not nothing: it goes on.
template <typename T>
void write_out(const PagedAttentionParams& p, int64_t row, int64_t head, const Results& results, int64_t index) {
  const float max = results.max[index];
  float base = max;
  float sum = results.sum[index];
  float weight = 1.0f;  // of the values, which are relative to `max`
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head];
    base = sink > max ? sink : max;
    weight = exp(max - base);
    sum = sum * weight + exp(sink - base);
  }
  const float scale = sum == 0.0f ? 0.0f : weight / sum * p.value_scale;
  const float* values = results.values + index * p.head_size;
  T* out = static_cast<T*>(p.out) + row * p.out_stride + head * p.head_size;
  for_each_vector(p.head_size, [&](int64_t d, auto load, auto store) { store(out + d, load(values + d) * scale); });
  if (p.lse != nullptr) {
    p.lse[row * p.num_heads + head] = sum == 0.0f ? -__builtin_inff() : base + __builtin_logf(sum);
  }
}

// ---- items

// One item at work. Its results are ordered by head, then by row, so those of one KV head are adjacent.
template <typename T>
class ItemWalk {
 public:
  ItemWalk(const PagedAttentionParams& params, const AttentionItem& item, float* queries)
      : p_(params),
        item_(item),
        queries_(queries),
        block_table_(params.block_tables + item.seq * params.block_table_stride),
        group_size_(params.num_heads / params.num_kv_heads),
        num_rows_(item.row_end - item.row_begin),
        visible_begin_(params.first_visible(params.position(item.seq, item.row_begin))),
        visible_end_(params.position(item.seq, item.row_end - 1) + 1) {
    dispatch_dtype(p_.dtype, [&]<typename QueryT>() {
      const QueryT* rows = static_cast<const QueryT*>(p_.query);
      for (int64_t i = 0; i < num_results(); ++i) {
        const QueryT* query = rows + row_of(i) * p_.query_stride + head_of(i) * p_.head_size;
        KeyDot<T>::unpack_query(query, p_.head_size, queries_ + i * p_.head_size);
      }
    });
  }

  int64_t num_results() const { return (item_.head_end - item_.head_begin) * group_size_ * num_rows_; }
  int64_t row_of(int64_t i) const { return item_.row_begin + i % num_rows_; }
  int64_t head_of(int64_t i) const { return item_.head_begin * group_size_ + i / num_rows_; }

  void attend_partition(int64_t partition, const Results& results) const {
    clear(results, num_results(), p_.head_size);
    const int64_t begin = partition * PARTITION_TOKENS;
    const int64_t end = begin + PARTITION_TOKENS < visible_end_ ? begin + PARTITION_TOKENS : visible_end_;
    int64_t tile_begin = begin;
    while (tile_begin + TILE_TOKENS <= visible_begin_) tile_begin += TILE_TOKENS;
    if (tile_begin >= end) return;
    Tile tile = locate_tile<T>(p_, block_table_, tile_begin, visible_begin_, end);
    while (tile_begin < end) {
      tile_begin += TILE_TOKENS;
      const Tile next = tile_begin < end ? locate_tile<T>(p_, block_table_, tile_begin, visible_begin_, end) : tile;
      for (int64_t head = item_.head_begin; head < item_.head_end; ++head) attend_head(tile, next, head, results);
      tile = next;
    }
  }

 private:
  void attend_head(const Tile& tile, const Tile& next, int64_t kv_head, const Results& results) const {
    const int64_t head_stride = p_.head_size * p_.block_size;
    const T* key_cache = static_cast<const T*>(p_.key_cache);
    const T* value_cache = static_cast<const T*>(p_.value_cache);
    const bool last = kv_head + 1 == item_.head_end;
    HeadTile<T> head_tile{p_,
                          tile,
                          key_cache + kv_head * head_stride,
                          value_cache + kv_head * head_stride,
                          last ? next : tile,
                          key_cache + (last ? item_.head_begin : kv_head + 1) * head_stride,
                          true};
    int64_t i = (kv_head - item_.head_begin) * group_size_ * num_rows_;
    const int64_t end = i + group_size_ * num_rows_;
    for (; i + MAX_ROWS<T> <= end; i += MAX_ROWS<T>) {
      attend_results<MAX_ROWS<T>>(head_tile, i, results);
      head_tile.prefetch = false;
    }
    if constexpr (MAX_ROWS<T> > 2) {
      for (; i + 2 <= end; i += 2) {
        attend_results<2>(head_tile, i, results);
        head_tile.prefetch = false;
      }
    }
    if (i < end) attend_results<1>(head_tile, i, results);
  }

  template <int NUM_ROWS>
  void attend_results(const HeadTile<T>& head_tile, int64_t first, const Results& results) const {
    Row rows[NUM_ROWS];
    for (int r = 0; r < NUM_ROWS; ++r) {
      const int64_t i = first + r;
      rows[r].position = p_.position(item_.seq, row_of(i));
      rows[r].alibi_slope = p_.alibi_slopes == nullptr ? 0.0f : p_.alibi_slopes[head_of(i)];
      rows[r].query = queries_ + i * p_.head_size;
      rows[r].max = results.max + i;
      rows[r].sum = results.sum + i;
      rows[r].values = results.values + i * p_.head_size;
    }
    attend_rows<T, NUM_ROWS>(head_tile, rows);
  }

  const PagedAttentionParams& p_;
  const AttentionItem& item_;
  float* queries_;  // [num_results, head_size], unpacked
  const int32_t* block_table_;
  int64_t group_size_;
  int64_t num_rows_;
  int64_t visible_begin_;  // first token that any row sees
  int64_t visible_end_;    // past the last one
};

template <typename T>
void attend_item(const PagedAttentionParams& p, const AttentionItem& item, float* scratch, float* partials,
                 int64_t partial_stride) {
  const ItemWalk<T> walk(p, item, scratch);
  const int64_t num_results = walk.num_results();
  if (item.partial >= 0) {
    walk.attend_partition(item.partition_begin, Results(partials + item.partial * partial_stride, num_results));
    return;
  }
  const int64_t result_floats = partial_floats(num_results, p.head_size);
  const Results partition_results(scratch + result_floats, num_results);
  const Results results(scratch + 2 * result_floats, num_results);
  clear(results, num_results, p.head_size);
  for (int64_t partition = item.partition_begin; partition < item.partition_end; ++partition) {
    walk.attend_partition(partition, partition_results);
    for (int64_t i = 0; i < num_results; ++i) merge(results, i, partition_results, i, p.head_size);
  }
  dispatch_dtype(p.dtype, [&]<typename OutT>() {
    for (int64_t i = 0; i < num_results; ++i) write_out<OutT>(p, walk.row_of(i), walk.head_of(i), results, i);
  });
}

}  // namespace

void attend(const PagedAttentionParams& params, const AttentionItem& item, float* scratch, float* partials,
            int64_t partial_stride) {
  dispatch_cache_dtype(params.cache_dtype,
                       [&]<typename T>() { attend_item<T>(params, item, scratch, partials, partial_stride); });
}

void merge_partials(const PagedAttentionParams& params, const MergeItem& item, const float* partials,
                    int64_t partial_stride, float* scratch) {
  const int64_t num_rows = item.row_end - item.row_begin;
  const int64_t num_results = num_rows * params.num_heads;
  const Results results(scratch, num_results);
  clear(results, num_results, params.head_size);
  for (int64_t partial = item.first_partial; partial < item.first_partial + item.num_partials; ++partial) {
    const Results from(const_cast<float*>(partials) + partial * partial_stride, num_results);
    for (int64_t i = 0; i < num_results; ++i) merge(results, i, from, i, params.head_size);
  }
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t i = 0; i < num_results; ++i) {
      write_out<T>(params, item.row_begin + i % num_rows, i / num_rows, results, i);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
