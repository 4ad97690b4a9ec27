// A block has some columns of the state of one value head of one sequence, in shared memory, and goes through the
// sequence's rows. A thread has one column and every NUM_PARTS-th row of the state; the parts of a column are added
// through shared memory.
#include "cuda_vec.cuh"
#include "state/gated_delta_rule.h"
#include "state/head_numbers.cuh"

namespace pagedattn::cuda {
namespace {

constexpr int NUM_COLUMNS = 32;
constexpr int NUM_PARTS = 8;
constexpr int DELTA_RULE_THREADS = NUM_COLUMNS * NUM_PARTS;

// What a block keeps in shared memory.
struct Shared {
  float* state;    // [k_dim, NUM_COLUMNS]
  float* query;    // [k_dim]
  float* key;      // [k_dim]
  float* parts;    // [NUM_PARTS, NUM_COLUMNS]
  float* squares;  // [2, NUM_PARTS]: the sums of each warp

  static size_t bytes(int64_t k_dim) {
    return (k_dim * (NUM_COLUMNS + 2) + DELTA_RULE_THREADS + 2 * NUM_PARTS) * sizeof(float);
  }
  __device__ explicit Shared(int64_t k_dim)
      : state(reinterpret_cast<float*>(shared_memory)),
        query(state + k_dim * NUM_COLUMNS),
        key(query + k_dim),
        parts(key + k_dim),
        squares(parts + DELTA_RULE_THREADS) {}
};

// The row's query and key, scaled and normalised. All threads of the block come here.
template <typename T>
__device__ void load_query_and_key(const GatedDeltaRuleParams& p, int64_t row, int64_t head, const Shared& shared) {
  const int64_t offset = p.k_head(head) * p.k_dim;
  const T* query = static_cast<const T*>(p.query) + row * p.query_stride + offset;
  const T* key = static_cast<const T*>(p.key) + row * p.key_stride + offset;
  float query_squares = 0.0f, key_squares = 0.0f;
  for (int64_t k = threadIdx.x; k < p.k_dim; k += DELTA_RULE_THREADS) {
    shared.query[k] = to_float(query[k]);
    shared.key[k] = to_float(key[k]);
    query_squares = fmaf(shared.query[k], shared.query[k], query_squares);
    key_squares = fmaf(shared.key[k], shared.key[k], key_squares);
  }
  float query_factor = p.scale, key_factor = 1.0f;
  if (p.use_qk_l2norm) {
    static_assert(DELTA_RULE_THREADS == NUM_PARTS * WARP_SIZE);
    query_squares = warp_sum(query_squares);
    key_squares = warp_sum(key_squares);
    if (threadIdx.x % WARP_SIZE == 0) {
      shared.squares[threadIdx.x / WARP_SIZE] = query_squares;
      shared.squares[NUM_PARTS + threadIdx.x / WARP_SIZE] = key_squares;
    }
    __syncthreads();
    float of_query = DELTA_NORM_EPSILON, of_key = DELTA_NORM_EPSILON;
    for (int part = 0; part < NUM_PARTS; ++part) {
      of_query += shared.squares[part];
      of_key += shared.squares[NUM_PARTS + part];
    }
    query_factor *= 1.0f / sqrtf(of_query);
    key_factor = 1.0f / sqrtf(of_key);
  }
  for (int64_t k = threadIdx.x; k < p.k_dim; k += DELTA_RULE_THREADS) {
    shared.query[k] *= query_factor;
    shared.key[k] *= key_factor;
  }
  __syncthreads();
}

// The sum of `part` over the threads of a column, for each of these threads.
__device__ float column_sum(float part, const Shared& shared) {
  const int column = static_cast<int>(threadIdx.x) % NUM_COLUMNS;
  shared.parts[threadIdx.x] = part;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < NUM_PARTS; ++i) sum += shared.parts[i * NUM_COLUMNS + column];
  __syncthreads();
  return sum;
}

// Grid: sequences x tiles of columns, those of a sequence side by side; value heads.
template <typename T>
__global__ void __launch_bounds__(DELTA_RULE_THREADS) gated_delta_rule_kernel(GatedDeltaRuleParams p) {
  const Shared shared(p.k_dim);
  const int64_t head = blockIdx.y;
  const int column_of_tile = static_cast<int>(threadIdx.x) % NUM_COLUMNS;
  const int part = static_cast<int>(threadIdx.x) / NUM_COLUMNS;
  const unsigned num_tiles = gridDim.x / static_cast<unsigned>(p.sequences.num_seqs);
  const int64_t seq = blockIdx.x / num_tiles;
  const int64_t column = static_cast<int64_t>(blockIdx.x % num_tiles) * NUM_COLUMNS + column_of_tile;
  const bool has_column = column < p.v_dim;
  const T* value = static_cast<const T*>(p.value) + head * p.v_dim + column;
  T* out = static_cast<T*>(p.out) + head * p.v_dim + column;
  const int64_t first = p.sequences.first_row(seq);
  const int64_t end = p.sequences.first_row(seq + 1);
  const int64_t slot = p.sequences.slot(seq);
  if (slot < 0 && part == 0 && has_column) {
    for (int64_t row = first; row < end; ++row) out[row * p.out_stride] = from_float<T>(0.0f);
  }
  if (slot < 0 || first >= end) return;

  float* states = p.states + slot * p.state_stride + head * p.k_dim * p.v_dim + column;
  float* state = shared.state + column_of_tile;
  const bool begins = p.sequences.begins(seq);
  for (int64_t k = part; k < p.k_dim; k += NUM_PARTS) {
    state[k * NUM_COLUMNS] = begins || !has_column ? 0.0f : states[k * p.v_dim];
  }
  for (int64_t row = first; row < end; ++row) {
    load_query_and_key<T>(p, row, head, shared);
    const float decay = expf(number_at<T>(p.g, row, head));
    float remembered = 0.0f;
    for (int64_t k = part; k < p.k_dim; k += NUM_PARTS) {
      remembered = fmaf(state[k * NUM_COLUMNS], shared.key[k], remembered);
    }
    remembered = column_sum(remembered, shared);
    const float v = has_column ? to_float(value[row * p.value_stride]) : 0.0f;
    const float delta = fmaf(remembered, -decay, v) * number_at<T>(p.beta, row, head);
    float result = 0.0f;
    for (int64_t k = part; k < p.k_dim; k += NUM_PARTS) {
      state[k * NUM_COLUMNS] = fmaf(state[k * NUM_COLUMNS], decay, delta * shared.key[k]);
      result = fmaf(state[k * NUM_COLUMNS], shared.query[k], result);
    }
    result = column_sum(result, shared);
    if (part == 0 && has_column) out[row * p.out_stride] = from_float<T>(result);
  }
  for (int64_t k = part; k < p.k_dim && has_column; k += NUM_PARTS) states[k * p.v_dim] = state[k * NUM_COLUMNS];
}

}  // namespace

void gated_delta_rule(const GatedDeltaRuleParams& params, cudaStream_t stream) {
  const dim3 grid(grid_size(params.sequences.num_seqs * ceil_div<int64_t>(params.v_dim, NUM_COLUMNS)),
                  grid_height(params.num_v_heads));
  dispatch_dtype(params.dtype, [&]<typename T>() {
    launch(gated_delta_rule_kernel<T>, grid, dim3(DELTA_RULE_THREADS), Shared::bytes(params.k_dim), stream, params);
  });
}

}  // namespace pagedattn::cuda
