#include "pos_encoding/rotary_embedding.h"

#include <cstring>
#include <vector>

#include "append.h"
#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

struct Heads {
  int64_t num_heads;
  int64_t token_stride;
  int64_t head_stride;
};

// Expects the sizes of positions, [num_tokens] or [batch, seq_len], then [num_heads * head_size] or [num_heads,
// head_size].
Heads check_heads(const Door& door, const char* argument, const Tensor& tensor, const Tensor& positions,
                  ScalarType dtype, int64_t head_size) {
  door.dtype(argument, tensor, dtype);
  const int64_t heads_dim = positions.dim();
  const bool has_head_dim = tensor.dim() == heads_dim + 2;
  std::vector<int64_t> sizes(positions.sizes().begin(), positions.sizes().end());
  sizes.push_back(ANY);
  if (has_head_dim) sizes.push_back(head_size);
  door.shape(argument, tensor, sizes);
  const int64_t num_heads = tensor.size(heads_dim) / (has_head_dim ? 1 : head_size);
  door.check(has_head_dim || num_heads * head_size == tensor.size(heads_dim), argument,
             "expected a last dimension that is a multiple of head_size ", head_size, ", got shape ", tensor.sizes());
  door.contiguous_from(argument, tensor, has_head_dim ? heads_dim + 1 : heads_dim);
  const bool is_strided = has_head_dim && num_heads > 1 && tensor.numel() > 0;
  const int64_t head_stride = is_strided ? tensor.stride(heads_dim) : head_size;
  const int64_t width = num_heads > 0 ? (num_heads - 1) * head_stride + head_size : 0;
  const int64_t token_stride = door.rows_before(argument, tensor, heads_dim, width).stride;
  const bool is_token_by_token = head_stride >= head_size && token_stride >= width;
  if (!is_token_by_token) door.written_elements(argument, tensor);
  return {num_heads, token_stride, head_stride};
}

struct PositionCheck {
  Door door;
  RotaryNames names;
  HostValues values;  // of positions
  int64_t num_tokens;
  int64_t max_position;

  void operator()() const {
    const auto* positions = static_cast<const int64_t*>(values.data);
    for (int64_t token = 0; token < num_tokens; ++token) {
      door.check(positions[token] >= 0 && positions[token] < max_position, names.positions, "expected 0 to ",
                 max_position - 1, " (the rows of ", names.cos_sin_cache, "), got ", positions[token], " at token ",
                 token);
    }
  }
};

constexpr RotaryNames NAMES{"positions", "query", "key", "cos_sin_cache", "sin_cache"};

void rotate(const Door& door, const RotaryNames& names, const Tensor& positions, Tensor& query,
            const std::optional<Tensor>& key, int64_t head_size, const Tensor& cos_sin_cache, bool is_neox,
            const std::optional<Tensor>& sin_cache) {
  RotaryEmbeddingParams params{};
  params.dtype = door.float_dtype(names.query, query);
  door.check(head_size > 0, "head_size", "expected a positive number, got ", head_size);
  door.dtype(names.positions, positions, ScalarType::Long);
  door.check(positions.dim() == 1 || positions.dim() == 2, names.positions,
             "expected [num_tokens] or [batch, seq_len], got shape ", positions.sizes());
  door.contiguous(names.positions, positions);
  params.num_tokens = positions.numel();
  const Heads query_heads = check_heads(door, names.query, query, positions, dtype_of(query), head_size);
  params.num_heads = query_heads.num_heads;
  params.query_stride = query_heads.token_stride;
  params.query_head_stride = query_heads.head_stride;
  if (key.has_value()) {
    const Heads key_heads = check_heads(door, names.key, *key, positions, dtype_of(query), head_size);
    door.other_memory(names.key, *key, names.query, query);
    params.num_kv_heads = key_heads.num_heads;
    params.key_stride = key_heads.token_stride;
    params.key_head_stride = key_heads.head_stride;
    params.key = key->mutable_data_ptr();
  }

  door.present(names.cos_sin_cache, cos_sin_cache);
  const ScalarType cos_sin_dtype = dtype_of(cos_sin_cache);
  door.check_type(cos_sin_dtype == dtype_of(query) || cos_sin_dtype == ScalarType::Float, names.cos_sin_cache,
                  "expected dtype ", dtype_of(query), params.dtype == DType::FLOAT32 ? "" : " or float32", ", got ",
                  cos_sin_dtype);
  params.cos_sin_dtype = cos_sin_dtype == dtype_of(query) ? params.dtype : DType::FLOAT32;
  door.rank(names.cos_sin_cache, cos_sin_cache, 2);
  door.contiguous(names.cos_sin_cache, cos_sin_cache);
  params.cos_sin_stride = cos_sin_cache.size(1);
  params.cos = cos_sin_cache.const_data_ptr();
  if (sin_cache.has_value()) {
    door.dtype(names.sin_cache, *sin_cache, cos_sin_dtype);
    door.shape(names.sin_cache, *sin_cache, cos_sin_cache.sizes());
    door.contiguous(names.sin_cache, *sin_cache);
    params.rot_dim = 2 * params.cos_sin_stride;
    params.sin = sin_cache->const_data_ptr();
    door.check(params.rot_dim <= head_size, names.cos_sin_cache,
               "expected shape [max_position, rot_dim / 2] with a rot_dim of at most head_size ", head_size, ", got ",
               cos_sin_cache.sizes());
  } else {
    params.rot_dim = params.cos_sin_stride;
    params.sin = static_cast<const char*>(params.cos) + params.rot_dim / 2 * element_size(params.cos_sin_dtype);
    door.check(params.rot_dim % 2 == 0 && params.rot_dim <= head_size, names.cos_sin_cache,
               "expected shape [max_position, rot_dim] with an even rot_dim of at most head_size ", head_size, ", got ",
               cos_sin_cache.sizes());
  }

  params.positions = positions.const_data_ptr<int64_t>();
  params.query = query.mutable_data_ptr();
  params.is_neox = is_neox;
  const PositionCheck check{door, names, door.values(positions), params.num_tokens, cos_sin_cache.size(0)};
  run_rows(door, check, PAGEDATTN_ROW_KERNELS(rotary_embedding), params, params.num_tokens,
           (params.num_heads + params.num_kv_heads) * params.rot_dim);
}

struct CopyParams {
  const char* source;
  int64_t source_stride;  // bytes between rows
  char* target;
  int64_t num_rows;
  int64_t row_bytes;
};

void copy_on_cpu(const CopyParams& params) {
  parallel_for_rows(params.num_rows, params.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(params.target + row * params.row_bytes, params.source + row * params.source_stride, params.row_bytes);
    }
  });
}

}  // namespace

Tensor rotated_copy(const Door& door, const RotaryNames& names, const Tensor& positions, const Tensor& tokens,
                    const Tensor& cos, const Tensor& sin, bool is_neox) {
  const int64_t heads_dim = tokens.dim() - 2, element_bytes = element_size(door.float_dtype(names.query, tokens));
  door.contiguous_from(names.query, tokens, heads_dim);
  const int64_t width = tokens.size(heads_dim) * tokens.size(heads_dim + 1);
  const RowView rows = door.rows_before(names.query, tokens, heads_dim, width);
  Tensor copy = torch::stable::new_empty(tokens, tokens.sizes());
  CpuGraph::keep(copy);
  const CopyParams params{static_cast<const char*>(tokens.const_data_ptr()), rows.stride * element_bytes,
                          static_cast<char*>(copy.mutable_data_ptr()), rows.num_rows, width * element_bytes};
  run_on<copy_on_cpu>(door, AnyValues{}, params, [&](cudaStream_t) { torch::stable::copy_(copy, tokens); });
  rotate(door, names, positions, copy, std::nullopt, tokens.size(heads_dim + 1), cos, is_neox, sin);
  return copy;
}

void rotary_embedding(const Tensor& positions, Tensor& query, const std::optional<Tensor>& key, int64_t head_size,
                      const Tensor& cos_sin_cache, bool is_neox, const std::optional<Tensor>& sin_cache) {
  rotate(Door("rotary_embedding", query), NAMES, positions, query, key, head_size, cos_sin_cache, is_neox, sin_cache);
}

void rotary_embedding_neox(const Tensor& positions, Tensor& query, Tensor& key, int64_t head_size,
                           const Tensor& cos_sin_cache) {
  rotate(Door("rotary_embedding_neox", query), NAMES, positions, query, key, head_size, cos_sin_cache, true,
         std::nullopt);
}

}  // namespace pagedattn
