// Takes a mask word by word. Where all tokens of a word are allowed, its logits are not touched. Where no token is
// allowed, the logits are written without being read. Otherwise the logits are read, and are written back with -inf
// where a token is not allowed.
#include "sampling/apply_token_bitmask.h"

#include <type_traits>

#include "cpu_memory.h"
#include "dispatch.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

static_assert(TOKENS_PER_WORD % VEC_SIZE == 0);

// VEC_SIZE logits as integers: a logit stays or is replaced, and nothing is computed.
template <typename T>
using BitsVec = std::conditional_t<sizeof(T) == 4, UintVec, ShortVec>;

template <typename T>
PAGEDATTN_INLINE BitsVec<T> one_bit_a_lane() {
  const UintVec bits = (UintVec{} + 1) << (UintVec)iota();
  if constexpr (sizeof(T) == 4) {
    return bits;
  } else {
    return narrow(bits);
  }
}

// `logits` are the TOKENS_PER_WORD logits of the word.
template <typename T>
PAGEDATTN_INLINE void apply_word(uint32_t word, T* logits) {
  if (word == ~0u) return;
  const auto not_allowed = (BitsVec<T>)to_stored(broadcast(-__builtin_inff()), T{});
  PAGEDATTN_UNROLL
  for (int i = 0; i < TOKENS_PER_WORD; i += VEC_SIZE) {
    BitsVec<T> bits = not_allowed;
    if (word != 0) {
      // A variable, as GCC with sanitizers takes the cast alone for an int, and refuses to add an int to 16-bit lanes.
      const auto bits_of_lanes = static_cast<uint16_t>(word >> i);
      const BitsVec<T> allowed = (BitsVec<T>{} + bits_of_lanes) & one_bit_a_lane<T>();
      bits = allowed == 0 ? not_allowed : load_as<BitsVec<T>>(logits + i);
    }
    __builtin_memcpy(logits + i, &bits, sizeof bits);
  }
}

template <typename T>
void apply_mask(const int32_t* mask, T* logits, int64_t vocab_size) {
  int64_t token = 0;
  for (; token + TOKENS_PER_WORD <= vocab_size; token += TOKENS_PER_WORD) {
    apply_word(static_cast<uint32_t>(*mask++), logits + token);
  }
  if (const int64_t rest = vocab_size - token; rest > 0) {
    T last[TOKENS_PER_WORD] = {};
    __builtin_memcpy(last, logits + token, rest * sizeof(T));
    apply_word(static_cast<uint32_t>(*mask), last);
    __builtin_memcpy(logits + token, last, rest * sizeof(T));
  }
}

}  // namespace

void apply_token_bitmask(const ApplyTokenBitmaskParams& params, int64_t begin, int64_t end) {
  dispatch_dtype(params.dtype, [&]<typename T>() {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = params.indices == nullptr ? i : params.indices[i];
      apply_mask(params.bitmask + i * params.bitmask_stride,
                 static_cast<T*>(params.logits) + row * params.logits_stride, params.vocab_size);
    }
  });
}

}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
