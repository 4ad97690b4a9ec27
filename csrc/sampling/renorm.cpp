#include "ops.h"
#include "sampling/sampling_op.h"

namespace pagedattn {
namespace {

constexpr int64_t ANY_LARGE = std::numeric_limits<int64_t>::max();

struct FilterCheck {
  Door door;
  RowValues top_k;
  RowValues top_p;
  HostValues values;

  void operator()() const {
    top_k.expect_ints(door, "top_k", 1, ANY_LARGE, "1 or more");
    top_p.expect_floats(door, "top_p", 0.0f, 1.0f, "0 to 1");
  }
};

struct TemperatureCheck {
  Door door;
  RowValues temperature;
  HostValues values;

  void operator()() const {
    temperature.expect_floats(door, "temperature", 0.0f, std::numeric_limits<float>::max(), "0 or more, finite");
  }
};

FilterRowsParams check_filter_rows(const Door& door, Tensor& out, const char* argument, const Tensor& input,
                                   const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p) {
  FilterRowsParams params{};
  params.dtype = check_rows_of_tokens(door, argument, input);
  params.num_rows = input.size(0);
  params.vocab_size = input.size(1);
  params.filters.top_k = check_ints(door, "top_k", top_k, params.num_rows);
  params.filters.top_p = check_floats(door, "top_p", top_p, params.num_rows);
  params.filters.top_k_first = true;
  door.dtype("out", out, dtype_of(input));
  door.shape("out", out, input.sizes());
  door.written_from_1("out", out);
  params.out = out.mutable_data_ptr();
  params.out_stride = out.stride(0);
  params.input = input.const_data_ptr();
  params.input_stride = input.stride(0);
  return params;
}

}  // namespace

void softmax(Tensor& out, const Tensor& logits, const std::optional<Tensor>& temperature) {
  const Door door("softmax", logits);
  SoftmaxParams params{};
  params.dtype = check_rows_of_tokens(door, "logits", logits);
  params.num_rows = logits.size(0);
  params.vocab_size = logits.size(1);
  params.temperature = check_floats(door, "temperature", temperature, params.num_rows);
  door.dtype("out", out, ScalarType::Float);
  door.shape("out", out, logits.sizes());
  door.written_from_1("out", out);
  params.out = out.mutable_data_ptr<float>();
  params.out_stride = out.stride(0);
  params.logits = logits.const_data_ptr();
  params.logits_stride = logits.stride(0);
  const RowValues values(door, temperature);
  run_rows(door, TemperatureCheck{door, values, values.values}, PAGEDATTN_ROW_KERNELS(softmax), params, params.num_rows,
           params.vocab_size);
}

void renorm_probs(Tensor& out, const Tensor& probs, const std::optional<Tensor>& top_k,
                  const std::optional<Tensor>& top_p) {
  const Door door("renorm_probs", probs);
  const FilterRowsParams params = check_filter_rows(door, out, "probs", probs, top_k, top_p);
  const RowValues of_top_k(door, top_k), of_top_p(door, top_p);
  const HostValues& values = of_top_k.values.are_given ? of_top_k.values : of_top_p.values;
  run_rows_with_scratch(door, FilterCheck{door, of_top_k, of_top_p, values}, PAGEDATTN_ROW_KERNELS(renorm_probs),
                        params, params.vocab_size, row_scratch_bytes(params.vocab_size));
}

void top_k_mask_logits(Tensor& out, const Tensor& logits, const Tensor& top_k) {
  const Door door("top_k_mask_logits", logits);
  const FilterRowsParams params = check_filter_rows(door, out, "logits", logits, top_k, std::nullopt);
  const RowValues of_top_k(door, top_k);
  run_rows_with_scratch(door, FilterCheck{door, of_top_k, {}, of_top_k.values},
                        PAGEDATTN_ROW_KERNELS(top_k_mask_logits), params, params.vocab_size,
                        row_scratch_bytes(params.vocab_size));
}

}  // namespace pagedattn
