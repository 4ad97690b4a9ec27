#include "sampling/apply_token_bitmask.h"

#include <vector>

#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

// Checks that every index is a row of logits, and that no row is named twice, as two threads would write to it.
struct RowCheck {
  Door door;
  HostValues values;  // of indices
  int64_t num_masks;
  int64_t num_rows;

  void operator()() const {
    const auto* rows = static_cast<const int64_t*>(values.data);
    std::vector<bool> has_mask(num_rows);
    for (int64_t i = 0; i < num_masks; ++i) {
      door.check(rows[i] >= 0 && rows[i] < num_rows, "indices", "expected rows of logits, 0 to ", num_rows - 1,
                 ", got ", rows[i], " at mask ", i);
      door.check(!has_mask[rows[i]], "indices", "expected every row once, got ", rows[i], " again at mask ", i);
      has_mask[rows[i]] = true;
    }
  }
};

}  // namespace

void apply_token_bitmask(Tensor& logits, const Tensor& bitmask, const std::optional<Tensor>& indices) {
  const Door door("apply_token_bitmask", logits);
  ApplyTokenBitmaskParams params{};
  params.dtype = door.float_dtype("logits", logits);
  door.rank("logits", logits, 2);
  door.written_from_1("logits", logits);
  params.num_masks = logits.size(0);
  params.vocab_size = logits.size(1);
  if (indices.has_value()) {
    door.dtype("indices", *indices, ScalarType::Long);
    door.rank("indices", *indices, 1);
    door.contiguous("indices", *indices);
    params.num_masks = indices->size(0);
    params.indices = indices->const_data_ptr<int64_t>();
  }

  door.dtype("bitmask", bitmask, ScalarType::Int);
  door.shape("bitmask", bitmask, {params.num_masks, ANY});
  door.contiguous_from("bitmask", bitmask, 1);
  const int64_t num_words = (params.vocab_size + TOKENS_PER_WORD - 1) / TOKENS_PER_WORD;
  door.check(bitmask.size(1) >= num_words, "bitmask", "expected rows of at least ", num_words, " words (for ",
             params.vocab_size, " tokens), got shape ", bitmask.sizes());

  params.logits = logits.mutable_data_ptr();
  params.logits_stride = logits.stride(0);
  params.bitmask = bitmask.const_data_ptr<int32_t>();
  params.bitmask_stride = bitmask.stride(0);
  const HostValues values = indices.has_value() ? door.values(*indices) : HostValues{};
  run_rows(door, RowCheck{door, values, params.num_masks, logits.size(0)}, PAGEDATTN_ROW_KERNELS(apply_token_bitmask),
           params, params.num_masks, params.vocab_size);
}

}  // namespace pagedattn
