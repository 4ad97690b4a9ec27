// Where the strips of the values of a tile lie, for row_walk.h.
#pragma once

#include "attention/cpu/row_logits.h"
#include "attention/cpu/value_strip.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// For each byte of a strip of SIZE values: the token that the byte belongs to, of TOKENS tokens.
template <typename T, int SIZE, int TOKENS>
struct TokenOfByte {
  int8_t at[SIZE * sizeof(T)];

  constexpr TokenOfByte() : at() {
    for (int i = 0; i < static_cast<int>(sizeof at); ++i) at[i] = i / static_cast<int>(sizeof(T)) % TOKENS;
  }
};
template <typename T, int SIZE, int TOKENS>
constexpr TokenOfByte<T, SIZE, TOKENS> TOKEN_OF_BYTE;

// The strips of a tile at one KV head. Side by side, they hold all tokens of the tile, and the same ELEMENTS elements.
// Below a strip follow the next elements of its tokens.
template <typename T, typename Strip, int ELEMENTS>
class TileStrips {
 public:
  static constexpr int TOKENS = Strip::SIZE / ELEMENTS;  // of a strip
  static constexpr int COUNT = TILE_TOKENS / TOKENS;

  explicit TileStrips(const HeadTile<T>& h)
      : begin(h.tile.begin / TOKENS),
        end((h.tile.end + TOKENS - 1) / TOKENS),
        has_hidden_tokens(h.tile.begin % TOKENS != 0 || h.tile.end % TOKENS != 0) {
    for (int s = 0; s < COUNT; ++s) of[s] = {h.values + h.tile.value_at(s * TOKENS), h.params.block_size};
  }

  // A slot that no row sees has a weight of 0, which does not silence a NaN or an infinity in this slot. This puts
  // zeros in the place of all such values: the strips that have them become copies. The visible tokens of a tile are
  // adjacent, so at most two strips beside each other have hidden tokens.
  __attribute__((noinline)) void hide_tokens(const HeadTile<T>& h) {
    int num_copies = 0;
    for (int s = begin; s < end; ++s) {
      if (h.tile.all_visible(s * TOKENS, TOKENS)) continue;
      T* const copies = copies_[num_copies++];
      copy_visible(of[s], h.params.head_size / ELEMENTS, h.tile.begin - s * TOKENS, h.tile.end - s * TOKENS, copies);
      of[s] = {copies, TOKENS};
    }
    has_hidden_tokens = false;
  }

  // A strip and those below it.
  struct Column {
    const T* first;
    int64_t element_stride;

    // From a strip to the next. If a strip has several elements, they are adjacent, and so are the strips.
    PAGEDATTN_INLINE int64_t stride() const { return ELEMENTS == 1 ? element_stride : Strip::SIZE; }
    PAGEDATTN_INLINE const T* at(int64_t i) const { return first + i * stride(); }
  };
  Column of[COUNT];
  int begin, end;          // the strips that have visible tokens
  bool has_hidden_tokens;  // in some of these strips

 private:
  // Copies `count` strips, with zeros for the tokens outside of [first_token, end_token).
  static void copy_visible(const Column& column, int64_t count, int first_token, int end_token, T* copies) {
    typedef int8_t Bytes __attribute__((vector_size(Strip::SIZE * sizeof(T))));
    const auto token = load_as<Bytes>(TOKEN_OF_BYTE<T, Strip::SIZE, TOKENS>.at);
    const auto first = static_cast<int8_t>(first_token < 0 ? 0 : first_token);
    const auto end = static_cast<int8_t>(end_token > TOKENS ? TOKENS : end_token);
    const Bytes visible = (token >= first) & (token < end);
    for (int64_t i = 0; i < count; ++i) {
      const Bytes bytes = load_as<Bytes>(column.at(i)) & visible;
      __builtin_memcpy(copies + i * Strip::SIZE, &bytes, sizeof bytes);
    }
  }

  alignas(64) T copies_[2][MAX_HEAD_SIZE * TOKENS];
};

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
