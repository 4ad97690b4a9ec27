#include "state/selective_scan.h"

#include "ops.h"
#include "state/state_op.h"

namespace pagedattn {
namespace {

void set_parameters(const Door& door, const Tensor& a, const std::optional<Tensor>& d,
                    const std::optional<Tensor>& dt_bias, double dt_min, std::optional<double> dt_max,
                    SelectiveScanParams& params) {
  door.dtype("A", a, ScalarType::Float);
  params.a_is_by_state = a.dim() == 2;
  if (params.a_is_by_state) {
    door.shape("A", a, {params.num_heads, params.state_size});
  } else {
    door.shape("A", a, {params.num_heads});
  }
  door.contiguous("A", a);
  params.a = a.const_data_ptr<float>();
  params.d = door.per_head("D", d, params.num_heads);
  params.dt_bias = door.per_head("dt_bias", dt_bias, params.num_heads);
  params.least_step = door.finite("dt_min", dt_min);
  params.greatest_step = static_cast<float>(dt_max.value_or(std::numeric_limits<double>::infinity()));
  door.check(params.least_step <= params.greatest_step, "dt_max", "expected dt_min (", dt_min, ") or more, got ",
             params.greatest_step);
}

}  // namespace

void selective_scan(Tensor& out, const Tensor& input, const Tensor& dt, const Tensor& a, const Tensor& b,
                    const Tensor& c, Tensor& states, const std::optional<Tensor>& d, const std::optional<Tensor>& z,
                    const std::optional<Tensor>& dt_bias, bool dt_softplus, double dt_min, std::optional<double> dt_max,
                    const std::optional<Tensor>& query_start_loc, const std::optional<Tensor>& state_indices,
                    const std::optional<Tensor>& has_initial_state) {
  const Door door("selective_scan", input);
  SelectiveScanParams params{};
  params.dtype = door.float_dtype("input", input);
  door.rank("input", input, 3);
  door.contiguous_from("input", input, 1);
  const int64_t num_tokens = input.size(0);
  params.num_heads = input.size(1);
  params.head_dim = input.size(2);
  params.input = input.const_data_ptr();
  params.input_stride = input.stride(0);

  params.dt = check_head_numbers(door, "dt", dt, input);
  check_rows(door, "B", b, input, std::initializer_list<int64_t>{num_tokens, ANY, ANY});
  params.num_groups = b.size(1);
  params.state_size = b.size(2);
  door.check(params.num_groups > 0 && params.num_heads > 0 && params.num_heads % params.num_groups == 0, "B",
             "expected a number of groups that divides the ", params.num_heads, " heads, got shape ", b.sizes());
  door.check(params.state_size >= 1 && params.state_size <= MAX_STATE_SIZE, "B", "expected a state size of 1 to ",
             MAX_STATE_SIZE, ", got shape ", b.sizes());
  params.b = b.const_data_ptr();
  params.b_stride = b.stride(0);
  check_rows(door, "C", c, input, b.sizes());
  params.c = c.const_data_ptr();
  params.c_stride = c.stride(0);
  set_parameters(door, a, d, dt_bias, dt_min, dt_max, params);
  params.dt_softplus = dt_softplus;
  if (z.has_value()) {
    check_rows(door, "z", *z, input, input.sizes());
    params.z = z->const_data_ptr();
    params.z_stride = z->stride(0);
  }

  check_rows(door, "out", out, input, input.sizes());
  door.written_from_1("out", out);
  params.out = out.mutable_data_ptr();
  params.out_stride = out.stride(0);
  door.dtype("states", states, ScalarType::Float);
  door.shape("states", states, {ANY, params.num_heads, params.head_dim, params.state_size});
  door.written_from_1("states", states);
  door.other_memory("states", states, "out", out);
  params.states = states.mutable_data_ptr<float>();
  params.state_stride = states.stride(0);

  const SequenceArguments arguments{query_start_loc, state_indices, has_initial_state};
  const int64_t num_slots = states.size(0);
  params.sequences = check_sequences(door, num_tokens, num_slots, arguments);
  const int64_t num_items = params.sequences.num_seqs * params.num_groups * params.tiles_per_group();
  const int64_t multiply_adds = num_tokens * params.num_heads * params.head_dim * params.state_size * 2;
  run_items(door, sequence_check(door, params.sequences, num_slots, arguments), PAGEDATTN_ROW_KERNELS(selective_scan),
            params, num_items, multiply_adds);
}

}  // namespace pagedattn
