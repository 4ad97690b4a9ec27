// An item is a value head of a sequence. Its rows are taken a few at a time: their queries and keys are converted and
// normalised once, and then each block of the state's columns, which stays in the first-level cache, goes through them.
// The columns of a state have nothing to do with each other. A row reads and writes a block once: what its step leaves
// is at the same time multiplied with the row's query and with the next row's key. The sums run over k_dim in one order
// wherever a call begins, so that a prompt in parts has the bits of the whole.
#include "state/gated_delta_rule.h"

#include "cpu_math.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int64_t ROWS_AT_ONCE = 16;
constexpr int VECS_AT_ONCE = 4;  // of columns

// Rows of an item in fp32.
struct Rows {
  int64_t num_rows;
  int64_t first;                                  // of the call's rows
  float queries[ROWS_AT_ONCE * MAX_DELTA_K_DIM];  // [num_rows, k_dim], scaled
  float keys[ROWS_AT_ONCE * MAX_DELTA_K_DIM];     // [num_rows, k_dim]
  float decays[ROWS_AT_ONCE];
  float betas[ROWS_AT_ONCE];
};

// target = source * scale, normalised before if the parameters say so.
template <typename T>
PAGEDATTN_INLINE void load_vector(const GatedDeltaRuleParams& p, const T* source, float scale, float* target) {
  Vec squares{};
  for_each_vector(p.k_dim, [&](int64_t i, auto load, auto store) {
    const Vec x = load(source + i);
    squares = fma(x, x, squares);
    store(target + i, x);
  });
  if (p.use_qk_l2norm) scale *= 1.0f / __builtin_sqrtf(reduce_sum(squares) + DELTA_NORM_EPSILON);
  for_each_vector(p.k_dim, [&](int64_t i, auto load, auto store) { store(target + i, load(target + i) * scale); });
}

// The numbers of a head for the rows.
void load_gate(const HeadNumbers& gate, const Rows& rows, int64_t head, float* target) {
  dispatch_dtype(gate.dtype, [&]<typename G>() {
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      target[row] = load_first(static_cast<const G*>(gate.data) + (rows.first + row) * gate.stride + head, 1)[0];
    }
  });
}

template <typename T>
void load_rows(const GatedDeltaRuleParams& p, int64_t head, Rows& rows) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const int64_t offset = p.k_head(head) * p.k_dim;
    const T* query = static_cast<const T*>(p.query) + (rows.first + row) * p.query_stride + offset;
    const T* key = static_cast<const T*>(p.key) + (rows.first + row) * p.key_stride + offset;
    load_vector(p, query, p.scale, rows.queries + row * p.k_dim);
    load_vector(p, key, 1.0f, rows.keys + row * p.k_dim);
  }
  load_gate(p.g, rows, head, rows.decays);
  load_gate(p.beta, rows, head, rows.betas);
  for_each_vector(rows.num_rows,
                  [&](int64_t i, auto load, auto store) { store(rows.decays + i, exp(load(rows.decays + i))); });
}

// One step of a block of columns, [k_dim, v_dim]: state = decay * state + outer(key, delta). Adds query @ state to
// `outs`, and next_key @ state to `next` if HAS_NEXT.
template <int N, bool HAS_NEXT, typename Load, typename Store>
PAGEDATTN_INLINE void step(const GatedDeltaRuleParams& p, float* state, const float* query, const float* key,
                           const float* next_key, float decay, const Vecs<N>& delta, Vecs<N>& outs, Vecs<N>& next,
                           Load&& load_some, Store&& store_some) {
  for (int64_t k = 0; k < p.k_dim; ++k) {
    float* row = state + k * p.v_dim;
    PAGEDATTN_UNROLL
    for (int n = 0; n < N; ++n) {
      const Vec s = fma(load_some(row + n * VEC_SIZE), broadcast(decay), delta.of[n] * broadcast(key[k]));
      store_some(row + n * VEC_SIZE, s);
      outs.of[n] = fma(s, broadcast(query[k]), outs.of[n]);
      if constexpr (HAS_NEXT) next.of[n] = fma(s, broadcast(next_key[k]), next.of[n]);
    }
  }
}

// The rows through N vectors of columns, the first of which is `column`. `load` and `store` are as in for_each_vector.
template <int N, typename T, typename Load, typename Store>
PAGEDATTN_INLINE void run_columns(const GatedDeltaRuleParams& p, const Rows& rows, int64_t head, float* states,
                                  int64_t column, Load&& load_some, Store&& store_some) {
  float* state = states + column;
  const T* value = static_cast<const T*>(p.value) + rows.first * p.value_stride + head * p.v_dim + column;
  T* out = static_cast<T*>(p.out) + rows.first * p.out_stride + head * p.v_dim + column;
  Vecs<N> remembered{};  // key @ state, of the row's key and the state before the row
  for (int64_t k = 0; k < p.k_dim; ++k) {
    PAGEDATTN_UNROLL
    for (int n = 0; n < N; ++n) {
      remembered.of[n] = fma(load_some(state + k * p.v_dim + n * VEC_SIZE), broadcast(rows.keys[k]), remembered.of[n]);
    }
  }
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const float decay = rows.decays[row];
    const float* query = rows.queries + row * p.k_dim;
    const float* key = rows.keys + row * p.k_dim;
    Vecs<N> delta, outs{}, next{};
    PAGEDATTN_UNROLL
    for (int n = 0; n < N; ++n) {
      const Vec v = load_some(value + row * p.value_stride + n * VEC_SIZE);
      delta.of[n] = fma(remembered.of[n], broadcast(-decay), v) * rows.betas[row];
    }
    if (row + 1 < rows.num_rows) {
      step<N, true>(p, state, query, key, key + p.k_dim, decay, delta, outs, next, load_some, store_some);
    } else {
      step<N, false>(p, state, query, key, nullptr, decay, delta, outs, next, load_some, store_some);
    }
    remembered = next;
    PAGEDATTN_UNROLL
    for (int n = 0; n < N; ++n) store_some(out + row * p.out_stride + n * VEC_SIZE, outs.of[n]);
  }
}

template <typename T>
void run_rows(const GatedDeltaRuleParams& p, const Rows& rows, int64_t head, float* states) {
  const auto load_whole = [](const auto* source) { return load(source); };
  const auto store_whole = [](auto* target, Vec value) { store(target, value); };
  int64_t column = 0;
  for (; column + VECS_AT_ONCE * VEC_SIZE <= p.v_dim; column += VECS_AT_ONCE * VEC_SIZE) {
    run_columns<VECS_AT_ONCE, T>(p, rows, head, states, column, load_whole, store_whole);
  }
  for (; column + VEC_SIZE <= p.v_dim; column += VEC_SIZE) {
    run_columns<1, T>(p, rows, head, states, column, load_whole, store_whole);
  }
  if (const int64_t rest = p.v_dim - column; rest > 0) {
    run_columns<1, T>(
        p, rows, head, states, column, [rest](const auto* source) { return load_first(source, rest); },
        [rest](auto* target, Vec value) { store_first(target, value, rest); });
  }
}

template <typename T>
void run_head(const GatedDeltaRuleParams& p, int64_t seq, int64_t head) {
  const int64_t first = p.sequences.first_row(seq);
  const int64_t end = p.sequences.first_row(seq + 1);
  const int64_t slot = p.sequences.slot(seq);
  if (slot < 0) {
    T* out = static_cast<T*>(p.out) + head * p.v_dim;
    for (int64_t row = first; row < end; ++row) __builtin_memset(out + row * p.out_stride, 0, p.v_dim * sizeof(T));
  }
  if (slot < 0 || first == end) return;
  float* states = p.states + slot * p.state_stride + head * p.k_dim * p.v_dim;
  if (p.sequences.begins(seq)) __builtin_memset(states, 0, p.k_dim * p.v_dim * sizeof(float));
  Rows rows;
  for (int64_t row = first; row < end; row += ROWS_AT_ONCE) {
    rows.first = row;
    rows.num_rows = row + ROWS_AT_ONCE < end ? ROWS_AT_ONCE : end - row;
    load_rows<T>(p, head, rows);
    run_rows<T>(p, rows, head, states);
  }
}

}  // namespace

void gated_delta_rule(const GatedDeltaRuleParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t item = begin; item < end; ++item) {
      run_head<T>(params, item / params.num_v_heads, item % params.num_v_heads);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
