#include "ops.h"
#include "sampling/sampling_op.h"

namespace pagedattn {
namespace {

struct SampleCheck {
  Door door;
  RowValues top_k;
  RowValues top_p;
  RowValues min_p;
  RowValues indices;
  int64_t num_distributions;
  struct {
    bool are_given;
  } values;

  void operator()() const {
    top_k.expect_ints(door, "top_k", 1, std::numeric_limits<int64_t>::max(), "1 or more");
    top_p.expect_floats(door, "top_p", 0.0f, 1.0f, "0 to 1");
    min_p.expect_floats(door, "min_p", 0.0f, 1.0f, "0 to 1");
    indices.expect_ints(door, "indices", 0, num_distributions - 1, "rows of probs");
  }
};

struct DraftCheck {
  Door door;
  RowValues draft_token_ids;
  int64_t vocab_size;
  HostValues values;

  void operator()() const {
    draft_token_ids.expect_ints(door, "draft_token_ids", 0, vocab_size - 1, "tokens of the vocabulary");
  }
};

int32_t* check_counts(const Door& door, const char* argument, Tensor& tensor, int64_t num_rows) {
  door.dtype(argument, tensor, ScalarType::Int);
  door.shape(argument, tensor, {num_rows});
  door.contiguous(argument, tensor);
  return tensor.mutable_data_ptr<int32_t>();
}

}  // namespace

void sample_from_probs(Tensor& out, Tensor& valid, const Tensor& probs, const std::optional<Tensor>& indices,
                       const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                       const std::optional<Tensor>& min_p, const Tensor& seed, const Tensor& offset, bool top_k_first,
                       const std::optional<Tensor>& subsequence) {
  const Door door("sample_from_probs", probs);
  SampleFromProbsParams params{};
  params.dtype = check_rows_of_tokens(door, "probs", probs);
  params.num_rows = probs.size(0);
  params.vocab_size = probs.size(1);
  if (indices.has_value()) {
    door.present("indices", *indices);
    params.indices = door.indices("indices", *indices);
    door.rank("indices", *indices, 1);
    door.contiguous("indices", *indices);
    params.num_rows = indices->size(0);
  }
  params.filters = {check_ints(door, "top_k", top_k, probs.size(0)), check_floats(door, "top_p", top_p, probs.size(0)),
                    check_floats(door, "min_p", min_p, probs.size(0)), top_k_first};
  params.seeds = {check_seeds(door, "seed", seed, params.num_rows),
                  check_seeds(door, "offset", offset, params.num_rows)};
  if (subsequence.has_value()) {
    params.seeds.subsequence = check_seeds(door, "subsequence", *subsequence, params.num_rows);
  }
  door.present("out", out);
  params.out_is_int64 = door.indices("out", out).are_int64;
  door.shape("out", out, {params.num_rows});
  door.contiguous("out", out);
  door.dtype("valid", valid, ScalarType::Bool);
  door.shape("valid", valid, {params.num_rows});
  door.contiguous("valid", valid);
  door.other_memory("valid", valid, "out", out);
  params.out = out.mutable_data_ptr();
  params.valid = valid.mutable_data_ptr<bool>();
  params.probs = probs.const_data_ptr();
  params.probs_stride = probs.stride(0);

  const auto values = [&](const std::optional<Tensor>& tensor) { return RowValues(door, tensor); };
  SampleCheck check{door, values(top_k), values(top_p), values(min_p), values(indices), probs.size(0), {}};
  check.values.are_given = check.top_k.size + check.top_p.size + check.min_p.size + check.indices.size > 0;
  run_rows_with_scratch(door, check, PAGEDATTN_ROW_KERNELS(sample_from_probs), params, params.vocab_size,
                        row_scratch_bytes(params.vocab_size));
}

void chain_speculative_sampling(Tensor& out, Tensor& num_accepted, Tensor& num_emitted, const Tensor& draft_probs,
                                const Tensor& draft_token_ids, const Tensor& target_probs, const Tensor& seed,
                                const Tensor& offset) {
  const Door door("chain_speculative_sampling", draft_probs);
  ChainSpeculativeSamplingParams params{};
  params.dtype = door.float_dtype("draft_probs", draft_probs);
  door.rank("draft_probs", draft_probs, 3);
  door.contiguous("draft_probs", draft_probs);
  params.num_rows = draft_probs.size(0);
  params.num_draft_tokens = draft_probs.size(1);
  params.vocab_size = draft_probs.size(2);
  check_vocab_size(door, "draft_probs", draft_probs, params.vocab_size);
  door.present("draft_token_ids", draft_token_ids);
  params.draft_token_ids = door.indices("draft_token_ids", draft_token_ids);
  door.shape("draft_token_ids", draft_token_ids, {params.num_rows, params.num_draft_tokens});
  door.contiguous("draft_token_ids", draft_token_ids);
  door.dtype("target_probs", target_probs, dtype_of(draft_probs));
  door.shape("target_probs", target_probs, {params.num_rows, params.num_draft_tokens + 1, params.vocab_size});
  door.contiguous("target_probs", target_probs);
  params.seeds = {check_seeds(door, "seed", seed, params.num_rows),
                  check_seeds(door, "offset", offset, params.num_rows)};
  door.dtype("out", out, ScalarType::Int);
  door.shape("out", out, {params.num_rows, params.num_draft_tokens + 1});
  door.contiguous("out", out);
  params.num_accepted = check_counts(door, "num_accepted", num_accepted, params.num_rows);
  params.num_emitted = check_counts(door, "num_emitted", num_emitted, params.num_rows);
  door.other_memory("num_accepted", num_accepted, "out", out);
  door.other_memory("num_emitted", num_emitted, "out", out);
  door.other_memory("num_emitted", num_emitted, "num_accepted", num_accepted);
  params.out = out.mutable_data_ptr<int32_t>();
  params.draft_probs = draft_probs.const_data_ptr();
  params.target_probs = target_probs.const_data_ptr();

  const RowValues tokens(door, draft_token_ids);
  // Behind what a thread knows of a row lies what the target has more than the draft, as fp32.
  const int64_t rest_bytes = num_row_blocks(params.vocab_size) * ROW_BLOCK * static_cast<int64_t>(sizeof(float));
  run_rows_with_scratch(door, DraftCheck{door, tokens, params.vocab_size, tokens.values},
                        PAGEDATTN_ROW_KERNELS(chain_speculative_sampling), params,
                        params.vocab_size * (params.num_draft_tokens + 1),
                        row_scratch_bytes(params.vocab_size) + rest_bytes);
}

}  // namespace pagedattn
