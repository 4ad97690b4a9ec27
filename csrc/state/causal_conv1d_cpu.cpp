// An item is a tile of the channels of all sequences. The tile's weights are laid out row by row, and of each sequence
// the rows before its first row. Then a vector of channels goes through a block of the sequence's rows, with the window
// in registers: each element is read and converted once, and a block's rows are in the first-level cache.
#include "state/causal_conv1d.h"

#include "cpu_math.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int64_t ROWS_AT_ONCE = 16;

// The channels of an item, and the rows of one of its sequences.
template <typename T>
struct Tile {
  int64_t first_channel;
  int64_t num_channels;
  float weights[MAX_CONV_WIDTH][CONV_TILE];
  float bias[CONV_TILE];
  int64_t first_row;
  int64_t num_rows;
  T* states;                                 // of the slot, from the first channel on
  T history[MAX_CONV_STATE_LEN][CONV_TILE];  // the state_len rows before the first row
};

PAGEDATTN_INLINE Vec silu(Vec x) { return times_sigmoid(x, x); }

template <typename T>
void load_weights(const CausalConv1dParams& p, Tile<T>& tile) {
  float by_channel[CONV_TILE * MAX_CONV_WIDTH];
  const auto load_floats = [&](float* target, const void* source, int64_t first, int64_t count) {
    dispatch_dtype(p.weight_dtype, [&]<typename W>() {
      for_each_vector(count, [&](int64_t i, auto load, auto store) {
        store(target + i, load(static_cast<const W*>(source) + first + i));
      });
    });
  };
  load_floats(by_channel, p.weight, tile.first_channel * p.width, tile.num_channels * p.width);
  for (int64_t j = 0; j < p.width; ++j) {
    for (int64_t c = 0; c < tile.num_channels; ++c) tile.weights[j][c] = by_channel[c * p.width + j];
  }
  if (p.bias != nullptr) {
    load_floats(tile.bias, p.bias, tile.first_channel, tile.num_channels);
  } else {
    __builtin_memset(tile.bias, 0, sizeof tile.bias);
  }
}

// Calls body(row, channel, element) for the elements of a tile's state. LEN rows of a channel are adjacent, and
// channels follow each other: of a constant length, compilers make vector code of a transposition. LEN is 0 for any
// strides.
template <int LEN, typename T, typename Body>
PAGEDATTN_INLINE void for_each_state_of_length(const CausalConv1dParams& p, const Tile<T>& tile, const Body& body) {
  const int64_t len = LEN > 0 ? LEN : p.state_len;
  const int64_t channel_stride = LEN > 0 ? LEN : p.state_strides[1];
  const int64_t row_stride = LEN > 0 ? 1 : p.state_strides[2];
  for (int64_t c = 0; c < tile.num_channels; ++c) {
    PAGEDATTN_UNROLL
    for (int64_t i = 0; i < len; ++i) body(i, c, tile.states[c * channel_stride + i * row_stride]);
  }
}

template <typename T, typename Body>
PAGEDATTN_INLINE void for_each_state(const CausalConv1dParams& p, const Tile<T>& tile, const Body& body) {
  const bool are_adjacent = p.state_strides[2] == 1 && p.state_strides[1] == p.state_len;
  if (are_adjacent && p.state_len == 4) return for_each_state_of_length<4>(p, tile, body);
  if (are_adjacent && p.state_len == 3) return for_each_state_of_length<3>(p, tile, body);
  for_each_state_of_length<0>(p, tile, body);
}

template <typename T>
void load_history(const CausalConv1dParams& p, bool is_zero, Tile<T>& tile) {
  if (is_zero) {
    __builtin_memset(tile.history, 0, p.state_len * sizeof tile.history[0]);
  } else if (p.state_strides[1] == 1) {
    for (int64_t i = 0; i < p.state_len; ++i) {
      __builtin_memcpy(tile.history[i], tile.states + i * p.state_strides[2], tile.num_channels * sizeof(T));
    }
  } else {
    for_each_state(p, tile, [&](int64_t i, int64_t c, const T& state) { tile.history[i][c] = state; });
  }
}

// The rows before the next call's: the last state_len of the history and of the sequence's rows.
template <typename T>
void store_state(const CausalConv1dParams& p, const Tile<T>& tile) {
  const T* input = static_cast<const T*>(p.input) + tile.first_row * p.input_stride + tile.first_channel;
  const T* sources[MAX_CONV_STATE_LEN];
  for (int64_t i = 0; i < p.state_len; ++i) {
    const int64_t row = tile.num_rows - p.state_len + i;
    sources[i] = row >= 0 ? input + row * p.input_stride : tile.history[p.state_len + row];
  }
  if (p.state_strides[1] == 1) {
    for (int64_t i = 0; i < p.state_len; ++i) {
      __builtin_memcpy(tile.states + i * p.state_strides[2], sources[i], tile.num_channels * sizeof(T));
    }
  } else {
    for_each_state(p, tile, [&](int64_t i, int64_t c, T& state) { state = sources[i][c]; });
  }
}

// Rows [begin, end) of the sequence at the vector of channels that begins at `c`. `load` and `store` are as in
// for_each_vector.
template <int WIDTH, typename T, typename Load, typename Store>
PAGEDATTN_INLINE void convolve(const CausalConv1dParams& p, const Tile<T>& tile, int64_t begin, int64_t end, int64_t c,
                               Load&& load_some, Store&& store_some) {
  const T* input = static_cast<const T*>(p.input) + tile.first_row * p.input_stride + tile.first_channel + c;
  T* out = static_cast<T*>(p.out) + tile.first_row * p.out_stride + tile.first_channel + c;
  Vec weights[WIDTH], window[WIDTH];
  PAGEDATTN_UNROLL
  for (int j = 0; j < WIDTH; ++j) weights[j] = load(tile.weights[j] + c);
  const Vec bias = load(tile.bias + c);
  PAGEDATTN_UNROLL
  for (int j = 0; j < WIDTH - 1; ++j) {
    const int64_t row = begin - (WIDTH - 1) + j;
    window[j + 1] = load_some(row >= 0 ? input + row * p.input_stride : tile.history[p.state_len + row] + c);
  }
  for (int64_t row = begin; row < end; ++row) {
    PAGEDATTN_UNROLL
    for (int j = 0; j < WIDTH - 1; ++j) window[j] = window[j + 1];
    window[WIDTH - 1] = load_some(input + row * p.input_stride);
    Vec sum = bias;
    PAGEDATTN_UNROLL
    for (int j = 0; j < WIDTH; ++j) sum = fma(weights[j], window[j], sum);
    store_some(out + row * p.out_stride, p.silu ? silu(sum) : sum);
  }
}

template <int WIDTH, typename T>
void convolve_tile(const CausalConv1dParams& p, const Tile<T>& tile) {
  for (int64_t begin = 0; begin < tile.num_rows; begin += ROWS_AT_ONCE) {
    const int64_t end = begin + ROWS_AT_ONCE < tile.num_rows ? begin + ROWS_AT_ONCE : tile.num_rows;
    int64_t c = 0;
    for (; c + VEC_SIZE <= tile.num_channels; c += VEC_SIZE) {
      convolve<WIDTH>(
          p, tile, begin, end, c, [](const T* source) { return load(source); },
          [](T* target, Vec value) { store(target, value); });
    }
    if (const int64_t rest = tile.num_channels - c; rest > 0) {
      convolve<WIDTH>(
          p, tile, begin, end, c, [rest](const T* source) { return load_first(source, rest); },
          [rest](T* target, Vec value) { store_first(target, value, rest); });
    }
  }
}

template <typename T, int... I>
void convolve_any_width(const CausalConv1dParams& p, const Tile<T>& tile, std::integer_sequence<int, I...>) {
  ((p.width == I + 1 ? convolve_tile<I + 1>(p, tile) : void()), ...);
}

template <typename T>
void run_sequence(const CausalConv1dParams& p, int64_t seq, Tile<T>& tile) {
  const int64_t slot = p.sequences.slot(seq);
  tile.first_row = p.sequences.first_row(seq);
  tile.num_rows = p.sequences.first_row(seq + 1) - tile.first_row;
  if (tile.num_rows == 0) return;
  if (slot < 0) {
    T* out = static_cast<T*>(p.out) + tile.first_row * p.out_stride + tile.first_channel;
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      __builtin_memset(out + row * p.out_stride, 0, tile.num_channels * sizeof(T));
    }
    return;
  }
  if (p.state_len > 0) {
    tile.states = static_cast<T*>(p.conv_states) + slot * p.state_strides[0] + tile.first_channel * p.state_strides[1];
  }
  const bool begins = p.sequences.begins(seq);
  load_history(p, begins, tile);
  convolve_any_width(p, tile, std::make_integer_sequence<int, MAX_CONV_WIDTH>{});
  store_state(p, tile);
}

template <typename T>
void run_tile(const CausalConv1dParams& p, int64_t index) {
  Tile<T> tile;
  tile.first_channel = index * CONV_TILE;
  tile.num_channels = p.dim - tile.first_channel < CONV_TILE ? p.dim - tile.first_channel : CONV_TILE;
  load_weights(p, tile);
  for (int64_t seq = 0; seq < p.sequences.num_seqs; ++seq) run_sequence(p, seq, tile);
}

}  // namespace

void causal_conv1d(const CausalConv1dParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t tile = begin; tile < end; ++tile) run_tile<T>(params, tile);
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
