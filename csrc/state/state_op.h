// What the state ops share: checks of the sequences and of their slots, and the run over items of work.
#pragma once

#include "index_checks.h"
#include "run.h"
#include "state/sequences.h"

namespace pagedattn {

// Rows [num_tokens, ...] of the dtype of `like`, contiguous from dimension 1 on.
inline void check_rows(const Door& door, const char* argument, const Tensor& tensor, const Tensor& like,
                       IntHeaderOnlyArrayRef sizes) {
  door.dtype(argument, tensor, dtype_of(like));
  door.shape(argument, tensor, sizes);
  door.contiguous_from(argument, tensor, 1);
}

// A number for each row and head of `rows`, [num_tokens, num_heads, ...].
inline HeadNumbers check_head_numbers(const Door& door, const char* argument, const Tensor& numbers,
                                      const Tensor& rows) {
  const DType dtype = door.float_dtype(argument, numbers);
  door.check_type(dtype_of(numbers) == dtype_of(rows) || dtype_of(numbers) == ScalarType::Float, argument,
                  "expected dtype ", dtype_of(rows), " or float32, got ", dtype_of(numbers));
  door.shape(argument, numbers, {rows.size(0), rows.size(1)});
  door.contiguous_from(argument, numbers, 1);
  return {numbers.const_data_ptr(), numbers.stride(0), dtype};
}

// The arguments that say which rows and which slot a sequence has.
struct SequenceArguments {
  const std::optional<Tensor>& query_start_loc;
  const std::optional<Tensor>& state_indices;
  const std::optional<Tensor>& has_initial_state;
};

inline StateSequences check_sequences(const Door& door, int64_t num_tokens, int64_t num_slots,
                                      const SequenceArguments& arguments) {
  StateSequences sequences{};
  sequences.num_tokens = num_tokens;
  sequences.num_seqs = num_tokens;
  if (arguments.query_start_loc.has_value()) {
    const Tensor& starts = *arguments.query_start_loc;
    sequences.query_start_loc = check_indices(door, "query_start_loc", starts, ANY);
    door.check(starts.size(0) >= 1, "query_start_loc", "expected at least 1 element, got 0");
    sequences.num_seqs = starts.size(0) - 1;
  }
  const int64_t num_seqs = sequences.num_seqs;
  if (arguments.state_indices.has_value()) {
    sequences.state_indices = check_indices(door, "state_indices", *arguments.state_indices, num_seqs);
  } else {
    door.check(num_seqs <= num_slots, "state_indices", "expected slots for ", num_seqs, " sequences of ", num_slots,
               " slots, got None");
  }
  if (arguments.has_initial_state.has_value()) {
    const Tensor& has_initial_state = *arguments.has_initial_state;
    door.dtype("has_initial_state", has_initial_state, ScalarType::Bool);
    door.shape("has_initial_state", has_initial_state, {num_seqs});
    door.contiguous("has_initial_state", has_initial_state);
    sequences.has_initial_state = has_initial_state.const_data_ptr<bool>();
  }
  return sequences;
}

// Rows that are those of the sequences, and a slot of its own for each sequence.
struct SequenceCheck {
  Door door;
  StateSequences sequences;
  int64_t num_slots;
  HostValues query_start_loc;
  HostValues state_indices;
  HostValues values;  // of one of the two, if one is given

  void operator()() const {
    if (query_start_loc.are_given) check_starts();
    if (state_indices.are_given) check_slots();
  }
  void check_starts() const {
    const Indices starts{query_start_loc.data, sequences.query_start_loc.are_int64};
    check_offsets_to(door, "query_start_loc", starts, sequences.num_seqs, sequences.num_tokens, "rows");
  }
  void check_slots() const {
    const Indices slots{state_indices.data, sequences.state_indices.are_int64};
    std::vector<bool> is_taken(num_slots);
    for (int64_t seq = 0; seq < sequences.num_seqs; ++seq) {
      const int64_t slot = slots[seq];
      door.check(slot >= -1 && slot < num_slots, "state_indices", "expected -1 (padding) to ", num_slots - 1, ", got ",
                 slot, " at sequence ", seq);
      if (slot < 0) continue;
      door.check(!is_taken[slot], "state_indices", "expected every slot once, got ", slot, " again at sequence ", seq);
      is_taken[slot] = true;
    }
  }
};

inline SequenceCheck sequence_check(const Door& door, const StateSequences& sequences, int64_t num_slots,
                                    const SequenceArguments& arguments) {
  const auto values_of = [&](const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? door.values(*tensor) : HostValues{};
  };
  const HostValues starts = values_of(arguments.query_start_loc);
  const HostValues slots = values_of(arguments.state_indices);
  return {door, sequences, num_slots, starts, slots, starts.are_given ? starts : slots};
}

// Work for a CPU kernel, in items that are alike.
template <typename Params>
struct ItemLoop {
  void (*kernel)(const Params& params, int64_t begin, int64_t end);
  Params params;
  int64_t num_items;
  int64_t multiply_adds;
};

template <typename Params>
void run_item_loop(const ItemLoop<Params>& loop) {
  parallel_for_items(loop.num_items, num_workers_for(loop.multiply_adds, loop.num_items),
                     [&](int64_t item, int64_t) { loop.kernel(loop.params, item, item + 1); });
}

template <typename Params>
void run_items(const Door& door, const SequenceCheck& check, const RowKernels<Params>& kernels, const Params& params,
               int64_t num_items, int64_t multiply_adds) {
  run_on<run_item_loop<Params>>(door, check, ItemLoop<Params>{kernels.cpu, params, num_items, multiply_adds},
                                [&](cudaStream_t stream) {
                                  if (num_items > 0 && params.sequences.num_tokens > 0) kernels.cuda(params, stream);
                                });
}

}  // namespace pagedattn
