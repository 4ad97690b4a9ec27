#include "pos_encoding/rotary_embedding.h"

#include "ops.h"
#include "run.h"

namespace pagedattn {
namespace {

// [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size]; returns num_heads.
int64_t check_heads(const Door& door, const char* argument, const Tensor& tensor, ScalarType dtype, int64_t num_tokens,
                    int64_t head_size) {
  door.dtype(argument, tensor, dtype);
  if (tensor.dim() == 3) {
    door.shape(argument, tensor, {num_tokens, ANY, head_size});
  } else {
    door.shape(argument, tensor, {num_tokens, ANY});
    door.check(tensor.size(1) % head_size == 0, argument, "expected a last dimension that is a multiple of head_size ",
               head_size, ", got shape ", tensor.sizes());
  }
  door.written_from_1(argument, tensor);
  return tensor.dim() == 3 ? tensor.size(1) : tensor.size(1) / head_size;
}

void check_positions(const Door& door, const int64_t* positions, int64_t num_tokens, int64_t max_position) {
  for (int64_t token = 0; token < num_tokens; ++token) {
    door.check(positions[token] >= 0 && positions[token] < max_position, "positions", "expected 0 to ",
               max_position - 1, " (the rows of cos_sin_cache), got ", positions[token], " at token ", token);
  }
}

void rotate(const Door& door, const Tensor& positions, Tensor& query, const std::optional<Tensor>& key,
            int64_t head_size, const Tensor& cos_sin_cache, bool is_neox) {
  RotaryEmbeddingParams params{};
  params.dtype = door.float_dtype("query", query);
  door.check(head_size > 0, "head_size", "expected a positive number, got ", head_size);
  door.rank("positions", positions, 1);
  door.dtype("positions", positions, ScalarType::Long);
  door.contiguous("positions", positions);
  params.num_tokens = positions.size(0);
  params.head_size = head_size;
  params.num_heads = check_heads(door, "query", query, query.scalar_type(), params.num_tokens, head_size);
  if (key.has_value()) {
    params.num_kv_heads = check_heads(door, "key", *key, query.scalar_type(), params.num_tokens, head_size);
    params.key = key->mutable_data_ptr();
    params.key_stride = key->stride(0);
  }

  door.dtype("cos_sin_cache", cos_sin_cache, query.scalar_type());
  door.rank("cos_sin_cache", cos_sin_cache, 2);
  door.contiguous("cos_sin_cache", cos_sin_cache);
  params.rot_dim = cos_sin_cache.size(1);
  door.check(params.rot_dim % 2 == 0 && params.rot_dim <= head_size, "cos_sin_cache",
             "expected shape [max_position, rot_dim] with an even rot_dim of at most head_size ", head_size, ", got ",
             cos_sin_cache.sizes());

  params.positions = positions.const_data_ptr<int64_t>();
  if (door.checks_values()) {
    check_positions(door, on_host(positions).const_data_ptr<int64_t>(), params.num_tokens, cos_sin_cache.size(0));
  }

  params.query = query.mutable_data_ptr();
  params.query_stride = query.stride(0);
  params.is_neox = is_neox;
  params.cos_sin_cache = cos_sin_cache.const_data_ptr();
  run_rows(door, PAGEDATTN_ROW_KERNELS(rotary_embedding), params, params.num_tokens,
           (params.num_heads + params.num_kv_heads) * params.rot_dim);
}

}  // namespace

void rotary_embedding(const Tensor& positions, Tensor& query, const std::optional<Tensor>& key, int64_t head_size,
                      const Tensor& cos_sin_cache, bool is_neox) {
  rotate(Door("rotary_embedding", query), positions, query, key, head_size, cos_sin_cache, is_neox);
}

void rotary_embedding_neox(const Tensor& positions, Tensor& query, Tensor& key, int64_t head_size,
                           const Tensor& cos_sin_cache) {
  rotate(Door("rotary_embedding_neox", query), positions, query, key, head_size, cos_sin_cache, true);
}

}  // namespace pagedattn
