// What an op does that rotates new tokens and appends them to a cache before it goes on: parts of ops of other rooms.
// Their errors are in the name of the door's op. A CPU graph keeps the tensors that they make.
#pragma once

#include <optional>
#include <string>

#include "door.h"

namespace pagedattn {

// What an op calls the arguments of `token_positions`.
struct PositionNames {
  const char* tokens;
  const char* first_positions;
  const char* start_loc;
};

// The positions of tokens [num_tokens, heads, head_size] or [num_seqs, tokens_per_seq, heads, head_size]: int64 without
// the last two dimensions. The first token of sequence s stands at first_positions[s], and the others behind it or, if
// they are not one apart, there as well. Without start_loc all sequences have equally many tokens.
Tensor token_positions(const Door& door, const PositionNames& names, const Tensor& tokens,
                       const Tensor& first_positions, const std::optional<Tensor>& start_loc, bool are_one_apart);

// What an op calls the arguments of a rotation.
struct RotaryNames {
  const char* positions;
  const char* query;
  const char* key;
  const char* cos_sin_cache;
  const char* sin_cache;
};

// A contiguous copy of tokens, `query` in the names, rotated as rotary_embedding does.
Tensor rotated_copy(const Door& door, const RotaryNames& names, const Tensor& positions, const Tensor& tokens,
                    const Tensor& cos, const Tensor& sin, bool is_neox);

// Of new tokens, and of their sequences with them.
struct AppendedSlots {
  Tensor slot_mapping;  // int64 [num_tokens], -1 for tokens of no sequence
  Tensor seq_lens;      // int64 [num_seqs]
};

// Checks the arguments `block_tables`, `cached_lens` and `key_start_loc`: all new tokens have room in the blocks of
// their sequence, and these blocks lie in the cache. Without key_start_loc all sequences have equally many tokens.
AppendedSlots append_slots(const Door& door, int64_t num_tokens, const Tensor& block_tables, const Tensor& cached_lens,
                           const std::optional<Tensor>& key_start_loc, int64_t block_size, int64_t num_cache_blocks);

// Which tokens `key` and `value` have beside [num_tokens, num_kv_heads, head_size], num_tokens as in slot_mapping:
// PADDED have more, and the tokens at the end are left out; IN_SEQUENCES may be [num_seqs, tokens_per_seq,
// num_kv_heads, head_size].
enum class TokenShape { PLAIN, PADDED, IN_SEQUENCES };

void write_tokens(const Door& door, const Tensor& key, const Tensor& value, Tensor& key_cache, Tensor& value_cache,
                  const Tensor& slot_mapping, const std::string& kv_cache_dtype, const std::optional<Tensor>& k_scale,
                  const std::optional<Tensor>& v_scale, TokenShape shape);

}  // namespace pagedattn
