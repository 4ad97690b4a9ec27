// An item is a tile of the channels of a sequence, whose states stay in the first-level cache while the sequence's rows
// go through them. Of a few rows at a time B and C are converted once. What a channel's state times C adds up to is
// summed for a vector of channels at once. The sums have one order, wherever a call begins, so that a prompt in parts
// has the bits of the whole.
#include "state/selective_scan.h"

#include "cpu_math.h"
#include "cpu_rows.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

constexpr int64_t ROWS_AT_ONCE = 16;

// The channels of an item: all of one group.
struct Channels {
  int64_t first;
  int64_t num;
  int64_t group;
  float* states;  // [num, state_size]
  int64_t heads[SCAN_CHANNELS];
  float a[SCAN_CHANNELS];  // if A is a number a head
  float d[SCAN_CHANNELS];
  float dt_bias[SCAN_CHANNELS];
  // Of a row:
  float inputs[SCAN_CHANNELS];
  float steps[SCAN_CHANNELS];
  float decays[SCAN_CHANNELS];   // if A is a number a head
  float weights[SCAN_CHANNELS];  // of B in the state: step * input
};

// B and C of some rows, [num_rows, state_size].
struct Rows {
  int64_t first;
  int64_t num_rows;
  float b[ROWS_AT_ONCE * MAX_STATE_SIZE];
  float c[ROWS_AT_ONCE * MAX_STATE_SIZE];
};

// log(1 + e^x) = max(x, 0) + log1p(e) with e = e^-|x|, and log1p(e) = 2 artanh(e / (2 + e)), whose series needs 8 terms
// for e <= 1.
PAGEDATTN_INLINE Vec softplus(Vec x) {
  const Vec e = exp(min(x, -x));
  const Vec s = e / (2.0f + e);
  const Vec series = polynomial(s * s, {2.0f, 2.0f / 3, 2.0f / 5, 2.0f / 7, 2.0f / 9, 2.0f / 11, 2.0f / 13, 2.0f / 15});
  return fma(s, series, max(x, Vec{}));
}

// The sum of each of VEC_SIZE vectors.
PAGEDATTN_INLINE Vec sums_of(const Vec* v) {
  if constexpr (VEC_SIZE == 4) {
    return sum_lanes(v[0], v[1], v[2], v[3]);
  } else if constexpr (VEC_SIZE == 8) {
    return add_neighbour_lanes(sum_lanes(v[0], v[1], v[2], v[3]), sum_lanes(v[4], v[5], v[6], v[7]));
  } else {
    const Vec first = add_neighbour_lanes(sum_lanes(v[0], v[1], v[2], v[3]), sum_lanes(v[4], v[5], v[6], v[7]));
    const Vec second = add_neighbour_lanes(sum_lanes(v[8], v[9], v[10], v[11]), sum_lanes(v[12], v[13], v[14], v[15]));
    return add_neighbour_lanes(first, second);
  }
}

template <typename T>
void load_rows(const SelectiveScanParams& p, int64_t group, Rows& rows) {
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const T* b = static_cast<const T*>(p.b) + (rows.first + row) * p.b_stride + group * p.state_size;
    const T* c = static_cast<const T*>(p.c) + (rows.first + row) * p.c_stride + group * p.state_size;
    for_each_vector(p.state_size, [&](int64_t i, auto load, auto store) {
      store(rows.b + row * p.state_size + i, load(b + i));
      store(rows.c + row * p.state_size + i, load(c + i));
    });
  }
}

// The step of each channel at a row, and what follows from it.
template <typename T>
void load_steps(const SelectiveScanParams& p, int64_t row, Channels& channels) {
  dispatch_dtype(p.dt.dtype, [&]<typename DT>() {
    const DT* dt = static_cast<const DT*>(p.dt.data) + row * p.dt.stride;
    int64_t head = -1;
    float of_head = 0.0f;
    for (int64_t i = 0; i < channels.num; ++i) {
      if (channels.heads[i] != head) {
        head = channels.heads[i];
        of_head = load_first(dt + head, 1)[0];
      }
      channels.steps[i] = of_head;
    }
  });
  const T* input = static_cast<const T*>(p.input) + row * p.input_stride + channels.first;
  for_each_vector(channels.num, [&](int64_t i, auto load, auto store) {
    Vec step = load(channels.steps + i) + load(channels.dt_bias + i);
    if (p.dt_softplus) step = softplus(step);
    step = min(broadcast(p.greatest_step), max(broadcast(p.least_step), step));  // in this order, NaN stays NaN
    const Vec x = load(input + i);
    store(channels.inputs + i, x);
    store(channels.steps + i, step);
    store(channels.weights + i, step * x);
    if (!p.a_is_by_state) store(channels.decays + i, exp(step * load(channels.a + i)));
  });
}

// One row for one channel: its state, and the products that sum up to the result.
template <bool BY_STATE>
PAGEDATTN_INLINE Vec update_channel(const SelectiveScanParams& p, const Channels& channels, int64_t channel,
                                    const float* b, const float* c) {
  float* state = channels.states + channel * p.state_size;
  const Vec weight = broadcast(channels.weights[channel]);
  const Vec step = broadcast(channels.steps[channel]);
  const Vec decay_of_all = BY_STATE ? Vec{} : broadcast(channels.decays[channel]);
  Vec sum{};
  for_each_vector(p.state_size, [&](int64_t i, auto load, auto store) {
    const Vec decay = BY_STATE ? exp(step * load(p.a + channels.heads[channel] * p.state_size + i)) : decay_of_all;
    const Vec s = fma(load(state + i), decay, load(b + i) * weight);
    store(state + i, s);
    sum = fma(s, load(c + i), sum);
  });
  return sum;
}

template <bool BY_STATE, typename T>
void run_row(const SelectiveScanParams& p, int64_t row, const Channels& channels, const float* b, const float* c) {
  T* out = static_cast<T*>(p.out) + row * p.out_stride + channels.first;
  for_each_vector(channels.num, [&](int64_t first, auto load, auto store) {
    Vec sums[VEC_SIZE] = {};
    const int64_t rest = channels.num - first;
    for (int64_t i = 0; i < VEC_SIZE && i < rest; ++i) sums[i] = update_channel<BY_STATE>(p, channels, first + i, b, c);
    Vec y = fma(load(channels.d + first), load(channels.inputs + first), sums_of(sums));
    if (p.z != nullptr) {
      const Vec gate = load(static_cast<const T*>(p.z) + row * p.z_stride + channels.first + first);
      y = y * times_sigmoid(gate, gate);
    }
    store(out + first, y);
  });
}

void set_channels(const SelectiveScanParams& p, Channels& channels) {
  for (int64_t i = 0; i < channels.num; ++i) {
    const int64_t head = (channels.first + i) / p.head_dim;
    channels.heads[i] = head;
    channels.a[i] = p.a_is_by_state ? 0.0f : p.a[head];
    channels.d[i] = p.d == nullptr ? 0.0f : p.d[head];
    channels.dt_bias[i] = p.dt_bias == nullptr ? 0.0f : p.dt_bias[head];
  }
}

template <typename T>
void run_item(const SelectiveScanParams& p, int64_t item) {
  const int64_t num_tiles = p.num_groups * p.tiles_per_group();
  const int64_t seq = item / num_tiles;
  const int64_t first = p.sequences.first_row(seq);
  const int64_t end = p.sequences.first_row(seq + 1);
  const int64_t slot = p.sequences.slot(seq);
  if (first == end) return;
  Channels channels;
  channels.group = item % num_tiles / p.tiles_per_group();
  const int64_t begin_in_group = item % p.tiles_per_group() * SCAN_CHANNELS;
  const int64_t rest = p.channels_per_group() - begin_in_group;
  channels.first = channels.group * p.channels_per_group() + begin_in_group;
  channels.num = rest < SCAN_CHANNELS ? rest : SCAN_CHANNELS;
  if (slot < 0) {
    T* out = static_cast<T*>(p.out) + channels.first;
    for (int64_t row = first; row < end; ++row) __builtin_memset(out + row * p.out_stride, 0, channels.num * sizeof(T));
    return;
  }
  channels.states = p.states + slot * p.state_stride + channels.first * p.state_size;
  if (p.sequences.begins(seq)) __builtin_memset(channels.states, 0, channels.num * p.state_size * sizeof(float));
  set_channels(p, channels);
  Rows rows;
  for (rows.first = first; rows.first < end; rows.first += ROWS_AT_ONCE) {
    rows.num_rows = end - rows.first < ROWS_AT_ONCE ? end - rows.first : ROWS_AT_ONCE;
    load_rows<T>(p, channels.group, rows);
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      load_steps<T>(p, rows.first + row, channels);
      const float* b = rows.b + row * p.state_size;
      const float* c = rows.c + row * p.state_size;
      if (p.a_is_by_state) {
        run_row<true, T>(p, rows.first + row, channels, b, c);
      } else {
        run_row<false, T>(p, rows.first + row, channels, b, c);
      }
    }
  }
}

}  // namespace

void selective_scan(const SelectiveScanParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t item = begin; item < end; ++item) run_item<T>(params, item);
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
