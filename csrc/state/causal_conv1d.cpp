#include "state/causal_conv1d.h"

#include "ops.h"
#include "state/state_op.h"

namespace pagedattn {

void causal_conv1d(Tensor& out, const Tensor& input, Tensor& conv_states, const Tensor& weight,
                   const std::optional<Tensor>& bias, bool silu, const std::optional<Tensor>& query_start_loc,
                   const std::optional<Tensor>& state_indices, const std::optional<Tensor>& has_initial_state) {
  const Door door("causal_conv1d", input);
  CausalConv1dParams params{};
  params.dtype = door.float_dtype("input", input);
  door.rank("input", input, 2);
  door.contiguous_from("input", input, 1);
  params.dim = input.size(1);
  params.input = input.const_data_ptr();
  params.input_stride = input.stride(0);
  door.dtype("out", out, dtype_of(input));
  door.shape("out", out, input.sizes());
  door.written_from_1("out", out);
  door.other_memory("out", out, "input", input);
  params.out = out.mutable_data_ptr();
  params.out_stride = out.stride(0);

  params.weight_dtype = door.float_dtype("weight", weight);
  door.check_type(dtype_of(weight) == dtype_of(input) || dtype_of(weight) == ScalarType::Float, "weight",
                  "expected dtype ", dtype_of(input), " or float32, got ", dtype_of(weight));
  door.shape("weight", weight, {params.dim, ANY});
  door.contiguous("weight", weight);
  params.width = weight.size(1);
  door.check(params.width >= 1 && params.width <= MAX_CONV_WIDTH, "weight", "expected a width of 1 to ", MAX_CONV_WIDTH,
             ", got shape ", weight.sizes());
  params.weight = weight.const_data_ptr();
  if (bias.has_value()) {
    door.dtype("bias", *bias, dtype_of(weight));
    door.shape("bias", *bias, {params.dim});
    door.contiguous("bias", *bias);
    params.bias = bias->const_data_ptr();
  }
  params.silu = silu;

  door.dtype("conv_states", conv_states, dtype_of(input));
  door.shape("conv_states", conv_states, {ANY, params.dim, ANY});
  door.written_elements("conv_states", conv_states);
  door.other_memory("conv_states", conv_states, "out", out);
  params.state_len = conv_states.size(2);
  door.check(params.state_len >= params.width - 1 && params.state_len <= MAX_CONV_STATE_LEN, "conv_states",
             "expected the last ", params.width - 1, " (weight has a width of ", params.width, ") to ",
             MAX_CONV_STATE_LEN, " rows, got shape ", conv_states.sizes());
  params.conv_states = conv_states.mutable_data_ptr();
  for (int dim = 0; dim < 3; ++dim) params.state_strides[dim] = conv_states.stride(dim);

  const SequenceArguments arguments{query_start_loc, state_indices, has_initial_state};
  const int64_t num_slots = conv_states.size(0);
  params.sequences = check_sequences(door, input.size(0), num_slots, arguments);
  run_items(door, sequence_check(door, params.sequences, num_slots, arguments), PAGEDATTN_ROW_KERNELS(causal_conv1d),
            params, params.num_tiles(), params.sequences.num_tokens * params.dim * params.width);
}

}  // namespace pagedattn
