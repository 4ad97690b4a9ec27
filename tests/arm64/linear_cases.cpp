// The linear ops: weights are packed or quantized by the kernels, and products are compared with fp64.
#include "cases.h"
#include "linear/linear_packed.h"
#include "linear/linear_quantized.h"
#include "linear/pack_weight.h"
#include "linear/quantize_weight.h"

using namespace pagedattn;

namespace cases {
namespace {

constexpr int64_t OUT_FEATURES = 70;
constexpr int64_t NUM_PANELS = (OUT_FEATURES + LINEAR_PANEL - 1) / LINEAR_PANEL;

// rows times weight [OUT_FEATURES, in_features], plus the bias.
template <typename Weight>
std::vector<double> expected_linear(Tensor& rows, int64_t num_rows, int64_t in_features, Tensor& bias,
                                    const Weight& weight) {
  std::vector<double> out(static_cast<size_t>(num_rows * OUT_FEATURES));
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t feature = 0; feature < OUT_FEATURES; ++feature) {
      double sum = bias[feature];
      for (int64_t i = 0; i < in_features; ++i) sum += rows[row * in_features + i] * weight(feature, i);
      out[static_cast<size_t>(row * OUT_FEATURES + feature)] = sum;
    }
  }
  return out;
}

void set_common(LinearParams& p, Tensor& rows, int64_t num_rows, int64_t in_features, Tensor& bias, Tensor& out) {
  p.dtype = rows.dtype;
  p.num_rows = num_rows;
  p.in_features = in_features;
  p.out_features = OUT_FEATURES;
  p.input = rows.data();
  p.input_stride = in_features;
  p.bias = bias.data<float>();
  p.out = out.data();
}

void packed(Judge& judge, DType dtype, DType weight_dtype, int64_t in_features,
            const std::vector<int64_t>& row_counts) {
  Tensor weight(weight_dtype, OUT_FEATURES * in_features, 1.0), bias(DType::FLOAT32, OUT_FEATURES, 1.0);
  Tensor panels(weight_dtype, NUM_PANELS * in_features * LINEAR_PANEL);
  PAGEDATTN_CPU_KERNEL(pack_linear_weight)
  (PackLinearWeightParams{weight_dtype, OUT_FEATURES, in_features, weight.data(), in_features, panels.data()}, 0,
   NUM_PANELS);
  const std::string name = std::string("linear_packed of ") + name_of(dtype) + " by " + name_of(weight_dtype);
  judge(name + ", panels", panels, 0.0);
  for (const int64_t num_rows : row_counts) {
    Tensor rows(dtype, num_rows * in_features, 1.0), out(dtype, num_rows * OUT_FEATURES);
    Tensor scratch(DType::FLOAT32, num_rows * (in_features + MAX_PACKED_BLOCK));
    LinearPackedParams p{};
    set_common(p, rows, num_rows, in_features, bias, out);
    p.weight_dtype = weight_dtype;
    p.packed_weight = panels.data();
    p.rows = scratch.data();
    PAGEDATTN_CPU_KERNEL(convert_rows)(p, 0, num_rows);
    PAGEDATTN_CPU_KERNEL(linear_packed)(p, 0, NUM_PANELS);
    const std::string of_rows = name + ", " + std::to_string(num_rows) + " rows";
    const auto weight_at = [&](int64_t f, int64_t i) { return weight[f * in_features + i]; };
    judge.near(of_rows, out, expected_linear(rows, num_rows, in_features, bias, weight_at), 2e-6);
    judge(of_rows, out, 1.0, 4e-6);
  }
}

void by_int8(Judge& judge, DType dtype, int64_t in_features, const std::vector<int64_t>& row_counts) {
  const int64_t num_quads = (in_features + QUAD - 1) / QUAD;
  Tensor weight(dtype, OUT_FEATURES * in_features, 1.0), bias(DType::FLOAT32, OUT_FEATURES, 1.0);
  Tensor codes(DType::INT8, OUT_FEATURES * in_features), scales(DType::FLOAT32, OUT_FEATURES);
  Tensor refused(DType::FLOAT32, OUT_FEATURES), panels(DType::INT8, NUM_PANELS * num_quads * LINEAR_PANEL * QUAD);
  QuantizeWeightInt8Params quantize{};
  quantize.dtype = dtype;
  quantize.out_features = OUT_FEATURES;
  quantize.in_features = quantize.weight_stride = in_features;
  quantize.weight = weight.data();
  quantize.refused = refused.data<float>();
  quantize.codes = codes.data<int8_t>();
  quantize.scales = scales.data<float>();
  PAGEDATTN_CPU_KERNEL(quantize_weight_int8)(quantize, 0, OUT_FEATURES);
  PAGEDATTN_CPU_KERNEL(pack_linear_weight_int8)
  (PackLinearWeightInt8Params{OUT_FEATURES, in_features, codes.data<int8_t>(), in_features, panels.data<uint8_t>()}, 0,
   NUM_PANELS);
  const std::string name = std::string("linear_int8 of ") + name_of(dtype);
  judge(name + ", panels", panels, 0.0);
  for (const int64_t num_rows : row_counts) {
    const int64_t stride = (in_features + CODE_MULTIPLE - 1) / CODE_MULTIPLE * CODE_MULTIPLE;
    Tensor rows(dtype, num_rows * in_features, 1.0), out(dtype, num_rows * OUT_FEATURES);
    Tensor row_codes(DType::INT8, num_rows * stride), row_scales(DType::FLOAT32, num_rows);
    // Every third row has large codes.
    for (int64_t row = 0; row < num_rows; row += 3) {
      rows.set(row * in_features + below(in_features), row % 2 == 0 ? -12 : 12);
    }
    std::vector<int32_t> sums(static_cast<size_t>(num_rows)), num_high(sums), num_excesses(sums);
    std::vector<ExtraQuad> high_codes(static_cast<size_t>(num_rows * num_quads)), excess(high_codes);
    LinearInt8Params p{};
    set_common(p, rows, num_rows, in_features, bias, out);
    p.weight = panels.data<uint8_t>();
    p.weight_scales = scales.data<float>();
    p.codes = row_codes.data<int8_t>();
    p.code_stride = stride;
    p.row_scales = row_scales.data<float>();
    p.code_sums = sums.data();
    p.high_codes = high_codes.data();
    p.num_high = num_high.data();
    p.excess = excess.data();
    p.num_excesses = num_excesses.data();
    PAGEDATTN_CPU_KERNEL(quantize_rows_int8)(p, 0, num_rows);
    PAGEDATTN_CPU_KERNEL(linear_int8)(p, 0, NUM_PANELS);
    const std::string of_rows = name + ", " + std::to_string(num_rows) + " rows";
    const auto weight_at = [&](int64_t f, int64_t i) { return codes[f * in_features + i] * scales[f]; };
    judge.near(of_rows, out, expected_linear(rows, num_rows, in_features, bias, weight_at), 0.03);
    judge(of_rows, out);
  }
}

void by_int4(Judge& judge, DType dtype, DType scale_dtype, const std::vector<int64_t>& row_counts) {
  constexpr int64_t IN_FEATURES = 320, GROUP = 160, NUM_GROUPS = IN_FEATURES / GROUP;
  Tensor bias(DType::FLOAT32, OUT_FEATURES, 1.0), scales(scale_dtype, OUT_FEATURES * NUM_GROUPS, 0.1);
  std::vector<uint8_t> codes(OUT_FEATURES * IN_FEATURES), zeros(OUT_FEATURES * NUM_GROUPS);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(below(16));
  for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(below(16));
  const int64_t group_bytes = LINEAR_PANEL * (GROUP / 2 + element_size(scale_dtype) + 1);
  Tensor panels(DType::INT8, NUM_PANELS * NUM_GROUPS * group_bytes);
  PackLinearWeightInt4Params pack{};
  pack.out_features = OUT_FEATURES;
  pack.in_features = pack.codes_stride = IN_FEATURES;
  pack.num_groups = pack.scales_stride = pack.zeros_stride = NUM_GROUPS;
  pack.scale_dtype = scale_dtype;
  pack.codes = codes.data();
  pack.scales = scales.data();
  pack.zeros = zeros.data();
  pack.out = panels.data<uint8_t>();
  PAGEDATTN_CPU_KERNEL(pack_linear_weight_int4)(pack, 0, NUM_PANELS);
  const std::string name = std::string("linear_int4 of ") + name_of(dtype) + ", scales of " + name_of(scale_dtype);
  judge(name + ", panels", panels, 0.0);
  for (const int64_t num_rows : row_counts) {
    Tensor rows(dtype, num_rows * IN_FEATURES, 1.0), out(dtype, num_rows * OUT_FEATURES);
    Tensor row_codes(DType::INT8, num_rows * IN_FEATURES);
    LinearInt4Params p{};
    set_common(p, rows, num_rows, IN_FEATURES, bias, out);
    p.weight = panels.data<uint8_t>();
    p.num_groups = NUM_GROUPS;
    p.group_size = GROUP;
    p.scale_dtype = scale_dtype;
    p.codes = row_codes.data<int8_t>();
    p.code_stride = IN_FEATURES;
    Tensor block_scales(DType::FLOAT32, num_rows * p.num_blocks());
    p.block_scales = block_scales.data<float>();
    std::vector<CodeSums> code_sums(static_cast<size_t>(num_rows * p.num_steps()));
    p.code_sums = code_sums.data();
    PAGEDATTN_CPU_KERNEL(quantize_rows_int4)(p, 0, num_rows);
    PAGEDATTN_CPU_KERNEL(linear_int4)(p, 0, NUM_PANELS);
    const std::string of_rows = name + ", " + std::to_string(num_rows) + " rows";
    const auto weight_at = [&](int64_t f, int64_t i) {
      const auto place = static_cast<size_t>(f * NUM_GROUPS + i / GROUP);
      return (codes[static_cast<size_t>(f * IN_FEATURES + i)] - zeros[place]) * scales[static_cast<int64_t>(place)];
    };
    judge.near(of_rows, out, expected_linear(rows, num_rows, IN_FEATURES, bias, weight_at), 0.02);
    judge(of_rows, out, 1.0, 4e-6);
  }
}

void quantized_to_int4(Judge& judge, DType dtype) {
  Tensor weight(dtype, 20 * 128, 1.0), scales(DType::FLOAT32, 20 * 4), refused(DType::FLOAT32, 20);
  Tensor codes(DType::INT8, 20 * 128), zeros(DType::INT8, 20 * 4);
  QuantizeWeightInt4Params p{};
  p.dtype = dtype;
  p.out_features = 20;
  p.in_features = p.weight_stride = 128;
  p.weight = weight.data();
  p.refused = refused.data<float>();
  p.codes = codes.data<uint8_t>();
  p.scales = scales.data<float>();
  p.zeros = zeros.data<uint8_t>();
  PAGEDATTN_CPU_KERNEL(quantize_weight_int4)(p, 0, 20);
  const std::string name = std::string("quantize_weight_int4 of ") + name_of(dtype);
  judge(name, codes, 1.0, 0.1);  // of 15: a code near a half may differ by 1
  judge(name + ", scales", scales);
  judge(name + ", zeros", zeros, 1.0, 0.1);
}

}  // namespace

void linear_cases(Judge& judge) {
  for (const DType dtype : FLOATS) {
    for (const DType weight_dtype : FLOATS) packed(judge, dtype, weight_dtype, 300, {1, 2, 3, 5, 6, 13, 30});
    by_int8(judge, dtype, 330, {1, 2, 3, 4, 5, 6, 7, 17});
    by_int4(judge, dtype, DType::FLOAT16, {1, 3, 6, 17});
    by_int4(judge, dtype, DType::FLOAT32, {2, 4, 5, 13});
    quantized_to_int4(judge, dtype);
  }
  packed(judge, DType::BFLOAT16, DType::BFLOAT16, 33, {1, 8});  // an odd number of elements has no pairs
}

}  // namespace cases
