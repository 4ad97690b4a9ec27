// All other kernels, beside `default`, whose results the op tests compare with references.
#include "activation/activation.h"
#include "cache/block_transfer.h"
#include "cache/concat_and_cache_mla.h"
#include "cache/reshape_and_cache.h"
#include "cache/slot_mapping.h"
#include "cases.h"
#include "collectives/collectives.h"
#include "flushed_floats.h"
#include "layernorm/layernorm.h"
#include "pos_encoding/rotary_embedding.h"
#include "sampling/apply_token_bitmask.h"
#include "sampling/sampling.h"
#include "state/causal_conv1d.h"
#include "state/gated_delta_rule.h"
#include "state/selective_scan.h"

using namespace pagedattn;

namespace cases {
namespace {

void set_specials(Tensor& tensor) {
  const double specials[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e-40, 3e-5, 6e4, -100.0, 90.0, 1e-6, -3e38};
  int64_t i = 3;
  for (const double special : specials) {
    tensor.set(i, special);
    i += 11;
  }
}

void activations(Judge& judge, DType dtype, bool has_specials) {
  constexpr int64_t ROWS = 3, WIDTH = 133;
  const std::string of_type = std::string(" of ") + name_of(dtype) + (has_specials ? ", special numbers" : "");
  Tensor input(dtype, 2 * ROWS * WIDTH, 20.0);
  if (has_specials) set_specials(input);
  const auto activate = [&](const char* name, auto* kernel, int64_t halves) {
    Tensor out(dtype, ROWS * WIDTH);
    kernel(ActivationParams{dtype, ROWS, WIDTH, input.data(), halves * WIDTH, out.data(), WIDTH}, 0, ROWS);
    judge(name + of_type, out);
  };
  activate("silu_and_mul", PAGEDATTN_CPU_KERNEL(silu_and_mul), 2);
  activate("mul_and_silu", PAGEDATTN_CPU_KERNEL(mul_and_silu), 2);
  activate("gelu_and_mul", PAGEDATTN_CPU_KERNEL(gelu_and_mul), 2);
  activate("gelu_tanh_and_mul", PAGEDATTN_CPU_KERNEL(gelu_tanh_and_mul), 2);
  activate("gelu_tanh", PAGEDATTN_CPU_KERNEL(gelu_tanh), 1);
  activate("gelu_quick", PAGEDATTN_CPU_KERNEL(gelu_quick), 1);
}

void norms(Judge& judge, DType dtype) {
  constexpr int64_t ROWS = 5, SIZE = 201;
  const std::string of_type = std::string(" of ") + name_of(dtype);
  for (const bool has_residual : {false, true}) {
    Tensor input(dtype, ROWS * SIZE, 3.0), weight(dtype, SIZE, 1.0), out(dtype, ROWS * SIZE);
    Tensor residual(dtype, ROWS * SIZE, 3.0);
    RmsNormParams p{};
    static_cast<NormParams&>(p) = {dtype,           ROWS,          SIZE,       1e-6f,          input.data(),
                                   {ROWS, SIZE, 0}, weight.data(), out.data(), {ROWS, SIZE, 0}};
    p.adds_one = has_residual;
    p.residual = has_residual ? residual.data() : nullptr;
    p.residual_rows = {ROWS, SIZE, 0};
    PAGEDATTN_CPU_KERNEL(rms_norm)(p, 0, ROWS);
    judge("rms_norm" + of_type, out);
    judge("the residual of rms_norm" + of_type, residual);
  }
  Tensor input(dtype, ROWS * SIZE, 3.0), weight(dtype, SIZE, 1.0), bias(dtype, SIZE, 1.0), out(dtype, ROWS * SIZE);
  LayerNormParams p{};
  static_cast<NormParams&>(p) = {dtype,           ROWS,          SIZE,       1e-6f,          input.data(),
                                 {ROWS, SIZE, 0}, weight.data(), out.data(), {ROWS, SIZE, 0}};
  p.weight_dtype = dtype;
  p.bias = bias.data();
  PAGEDATTN_CPU_KERNEL(layer_norm)(p, 0, ROWS);
  judge("layer_norm" + of_type, out);
}

void rotary(Judge& judge, DType dtype, bool is_neox) {
  constexpr int64_t TOKENS = 6, HEADS = 4, KV_HEADS = 2, SIZE = 72, ROTATED = 40, POSITIONS = 50;
  Tensor query(dtype, TOKENS * HEADS * SIZE, 1.0), key(dtype, TOKENS * KV_HEADS * SIZE, 1.0);
  Tensor cos(dtype, POSITIONS * ROTATED / 2, 1.0), sin(dtype, POSITIONS * ROTATED / 2, 1.0);
  int64_t positions[TOKENS];
  for (int64_t& position : positions) position = below(POSITIONS);
  const RotaryEmbeddingParams p{dtype,     TOKENS,       HEADS,        KV_HEADS,   ROTATED,    is_neox,
                                positions, query.data(), HEADS * SIZE, SIZE,       key.data(), KV_HEADS * SIZE,
                                SIZE,      dtype,        cos.data(),   sin.data(), ROTATED / 2};
  PAGEDATTN_CPU_KERNEL(rotary_embedding)(p, 0, TOKENS);
  const std::string name = std::string("rotary_embedding of ") + name_of(dtype) + (is_neox ? ", neox" : "");
  judge(name + ", query", query);
  judge(name + ", key", key);
}

void cached(Judge& judge, DType dtype, DType cache_dtype, CacheLayout layout) {
  constexpr int64_t TOKENS = 20, HEADS = 2, SIZE = 64, BLOCK = 16, BLOCKS = 8;
  Tensor key(dtype, TOKENS * HEADS * SIZE, 300.0), value(dtype, TOKENS * HEADS * SIZE, 3.0);
  set_specials(key);
  const int64_t rows = SIZE + (cache_dtype == DType::INT8 ? INT8_SCALE_ROWS : 0);
  Tensor key_cache(cache_dtype, BLOCKS * HEADS * SIZE * BLOCK), value_cache(cache_dtype, BLOCKS * HEADS * rows * BLOCK);
  int64_t slots[TOKENS];
  for (int64_t i = 0; i < TOKENS; ++i) slots[i] = i == 7 ? -1 : i * 6 % (BLOCKS * BLOCK - 1);
  ReshapeAndCacheParams p{};
  p.dtype = dtype;
  p.cache_dtype = cache_dtype;
  p.num_tokens = TOKENS;
  p.num_kv_heads = HEADS;
  p.head_size = SIZE;
  p.block_size = BLOCK;
  p.key = key.data();
  p.value = value.data();
  p.key_stride = p.value_stride = HEADS * SIZE;
  p.layout = layout;
  p.key_cache = key_cache.data();
  p.value_cache = value_cache.data();
  if (layout == CacheLayout::NHD) {
    p.key_strides = p.value_strides = {BLOCK * HEADS * SIZE, HEADS * SIZE, SIZE};
  } else {
    p.key_strides = {HEADS * SIZE * BLOCK, 16 / element_size(cache_dtype), SIZE * BLOCK};
    p.value_strides = {HEADS * rows * BLOCK, 1, rows * BLOCK};
  }
  p.key_scale = 0.7f;
  p.value_scale = 0.01f;
  p.slot_mapping = {slots, true};
  PAGEDATTN_CPU_KERNEL(reshape_and_cache)(p, 0, TOKENS);
  const std::string name = std::string("reshape_and_cache of ") + name_of(dtype) + " into " + name_of(cache_dtype) +
                           (layout == CacheLayout::NHD ? " NHD" : "");
  judge(name + ", keys", key_cache, 0.0);
  judge(name + ", values", value_cache, 0.0);
  if (cache_dtype != dtype) return;
  Tensor key_again(dtype, key.size), value_again(dtype, value.size);
  GatherCachedKvParams g{dtype,
                         TOKENS,
                         HEADS,
                         SIZE,
                         BLOCK,
                         key_again.data(),
                         HEADS * SIZE,
                         value_again.data(),
                         HEADS * SIZE,
                         layout,
                         key_cache.data(),
                         p.key_strides,
                         value_cache.data(),
                         p.value_strides,
                         {slots, true}};
  PAGEDATTN_CPU_KERNEL(gather_cached_kv)(g, 0, TOKENS);
  judge(name + ", gathered keys", key_again, 0.0);
  judge(name + ", gathered values", value_again, 0.0);
}

void slots_and_blocks(Judge& judge) {
  constexpr int64_t TOKENS = 40, BLOCK = 8;
  int32_t tables[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3}, positions[TOKENS];
  int64_t slots[TOKENS];
  for (int32_t& position : positions) position = static_cast<int32_t>(below(10 * BLOCK));
  int32_t sequences[TOKENS] = {};
  SlotMappingParams p{};
  p.num_tokens = TOKENS;
  p.block_size = BLOCK;
  p.batch_indices = {sequences, false};
  p.positions = {positions, false};
  p.block_tables = {tables, false};
  p.block_table_stride = p.max_num_blocks_per_seq = 10;
  p.slot_mapping = slots;
  PAGEDATTN_CPU_KERNEL(compute_slot_mapping)(p, 0, TOKENS);
  Tensor as_floats(DType::FLOAT32, TOKENS);
  for (int64_t i = 0; i < TOKENS; ++i) as_floats.set(i, static_cast<double>(slots[i]));
  judge("compute_slot_mapping", as_floats, 0.0);

  constexpr int64_t BYTES = 1000;
  Tensor pool(DType::INT8, 6 * BYTES, 1.0);
  const int64_t mapping[] = {0, 3, 1, 4, 2, 5};
  const BlockTransferParams transfer{3, BYTES, pool.data<char>(), BYTES, pool.data<char>(), BYTES, mapping};
  PAGEDATTN_CPU_KERNEL(transfer_blocks)(transfer, 0, 3);
  judge("transfer_blocks", pool, 0.0);

  Tensor latent(DType::FLOAT16, 4 * 40, 1.0), rope(DType::FLOAT16, 4 * 12, 1.0), cache(DType::FLOAT16, 16 * 52);
  const int64_t mla_slots[] = {3, 15, -1, 0};
  const ConcatAndCacheMlaParams mla{DType::FLOAT16, 4,  40,           12,     8,  latent.data(),    40,
                                    rope.data(),    12, cache.data(), 8 * 52, 52, {mla_slots, true}};
  PAGEDATTN_CPU_KERNEL(concat_and_cache_mla)(mla, 0, 4);
  judge("concat_and_cache_mla", cache, 0.0);
}

void sums_of_ranks(Judge& judge, DType dtype) {
  Tensor a(dtype, 133, 1.0), b(dtype, 133, 1.0), c(dtype, 133, 1.0), out(dtype, 133);
  RankSumParams p{};
  p.dtype = dtype;
  p.world_size = 3;
  p.of_rank[0] = a.data();
  p.of_rank[1] = b.data();
  p.of_rank[2] = c.data();
  p.out = out.data();
  PAGEDATTN_CPU_KERNEL(sum_ranks)(p, 0, 133);
  judge(std::string("sum_ranks of ") + name_of(dtype), out, 0.0);
}

// A subnormal factor and a subnormal product, while they count as zeros and afterwards.
void subnormals(Judge& judge) {
  volatile float subnormal = 0x1p-130f, least = 0x1p-126f, many = 8.0f, half = 0.5f;
  volatile float products[4];
  {
    const FlushedFloats flushed;
    products[0] = subnormal * many;
    products[1] = least * half;
  }
  products[2] = subnormal * many;
  products[3] = least * half;
  Tensor results(DType::FLOAT32, 4);
  for (int i = 0; i < 4; ++i) results.data<float>()[i] = products[i] * 0x1p126f;
  judge("subnormal numbers", results, 0.0);
}

void sampling(Judge& judge, DType dtype) {
  constexpr int64_t ROWS = 4, VOCAB = 500;
  const std::string of_type = std::string(" of ") + name_of(dtype);
  Tensor logits(dtype, ROWS * VOCAB, 8.0), probs(DType::FLOAT32, ROWS * VOCAB);
  const float temperature = 0.8f, top_p = 0.7f;
  const int32_t top_k = 40;
  PAGEDATTN_CPU_KERNEL(softmax)
  (SoftmaxParams{dtype, ROWS, VOCAB, probs.data<float>(), VOCAB, logits.data(), VOCAB, {&temperature, 0, true}}, 0,
   ROWS);
  judge("softmax" + of_type, probs);
  Tensor scratch(DType::INT8, row_scratch_bytes(VOCAB)), out(dtype, ROWS * VOCAB);
  FilterRowsParams filter{};
  filter.dtype = dtype;
  filter.num_rows = ROWS;
  filter.vocab_size = filter.out_stride = filter.input_stride = VOCAB;
  filter.out = out.data();
  filter.input = logits.data();
  filter.filters.top_k = {{&top_k, false}, 0, true};
  filter.scratch = scratch.data();
  PAGEDATTN_CPU_KERNEL(top_k_mask_logits)(filter, 0, ROWS);
  judge("top_k_mask_logits" + of_type, out);
  std::vector<int32_t> mask(ROWS * 16);
  for (int32_t& word : mask) word = static_cast<int32_t>(next_random());
  PAGEDATTN_CPU_KERNEL(apply_token_bitmask)
  (ApplyTokenBitmaskParams{dtype, ROWS, VOCAB, logits.data(), VOCAB, mask.data(), 16, nullptr}, 0, ROWS);
  judge("apply_token_bitmask" + of_type, logits, 0.0);
  if (dtype != DType::FLOAT32) return;
  filter.out = out.data();
  filter.input = probs.data();
  filter.filters.top_p = {&top_p, 0, true};
  PAGEDATTN_CPU_KERNEL(renorm_probs)(filter, 0, ROWS);
  judge("renorm_probs", out);
}

StateSequences state_sequences(const int32_t (&starts)[3]) {
  StateSequences sequences{};
  sequences.num_seqs = 2;
  sequences.num_tokens = starts[2];
  sequences.query_start_loc = {starts, false};
  return sequences;
}

void states(Judge& judge, DType dtype) {
  constexpr int32_t STARTS[] = {0, 3, 8};
  constexpr int64_t TOKENS = 8, HEADS = 4, DIM = 36;
  const std::string of_type = std::string(" of ") + name_of(dtype);
  {
    constexpr int64_t CHANNELS = 75;
    Tensor input(dtype, TOKENS * CHANNELS, 1.0), out(dtype, TOKENS * CHANNELS), weight(dtype, CHANNELS * 4, 1.0);
    Tensor state(dtype, 2 * CHANNELS * 3, 1.0), bias(dtype, CHANNELS, 1.0);
    const CausalConv1dParams p{dtype,
                               dtype,
                               state_sequences(STARTS),
                               CHANNELS,
                               4,
                               3,
                               input.data(),
                               CHANNELS,
                               out.data(),
                               CHANNELS,
                               state.data(),
                               {CHANNELS * 3, 1, CHANNELS},
                               weight.data(),
                               bias.data(),
                               true};
    PAGEDATTN_CPU_KERNEL(causal_conv1d)(p, 0, p.num_tiles());
    judge("causal_conv1d" + of_type, out);
    judge("the state of causal_conv1d" + of_type, state, 0.0);
  }
  {
    Tensor query(dtype, TOKENS * 2 * DIM, 1.0), key(dtype, TOKENS * 2 * DIM, 1.0),
        value(dtype, TOKENS * HEADS * 20, 1.0);
    Tensor decay(DType::FLOAT32, TOKENS * HEADS, 0.5), beta(DType::FLOAT32, TOKENS * HEADS, 1.0);
    Tensor state(DType::FLOAT32, 2 * HEADS * DIM * 20, 1.0), out(dtype, TOKENS * HEADS * 20);
    GatedDeltaRuleParams p{};
    p.dtype = dtype;
    p.sequences = state_sequences(STARTS);
    p.num_k_heads = 2;
    p.num_v_heads = HEADS;
    p.k_dim = DIM;
    p.v_dim = 20;
    p.query = query.data();
    p.key = key.data();
    p.value = value.data();
    p.query_stride = p.key_stride = 2 * DIM;
    p.value_stride = p.out_stride = HEADS * 20;
    p.g = {decay.data(), HEADS, DType::FLOAT32};
    p.beta = {beta.data(), HEADS, DType::FLOAT32};
    p.states = state.data<float>();
    p.state_stride = HEADS * DIM * 20;
    p.scale = 0.2f;
    p.use_qk_l2norm = true;
    p.out = out.data();
    PAGEDATTN_CPU_KERNEL(gated_delta_rule)(p, 0, 2 * HEADS);
    judge("gated_delta_rule" + of_type, out, 4.0);
    judge("the state of gated_delta_rule" + of_type, state, 4.0);
  }
  for (const bool a_is_by_state : {false, true}) {
    constexpr int64_t STATE = 21;
    Tensor input(dtype, TOKENS * HEADS * DIM, 1.0), z(dtype, TOKENS * HEADS * DIM, 1.0), dt(dtype, TOKENS * HEADS, 1.0);
    Tensor a(DType::FLOAT32, HEADS * STATE, 1.0), b(dtype, TOKENS * 2 * STATE, 1.0), c(dtype, TOKENS * 2 * STATE, 1.0);
    Tensor state(DType::FLOAT32, 2 * HEADS * DIM * STATE, 1.0), out(dtype, TOKENS * HEADS * DIM);
    SelectiveScanParams p{};
    p.dtype = dtype;
    p.sequences = state_sequences(STARTS);
    p.num_heads = HEADS;
    p.head_dim = DIM;
    p.num_groups = 2;
    p.state_size = STATE;
    p.input = input.data();
    p.input_stride = p.z_stride = p.out_stride = HEADS * DIM;
    p.dt = {dt.data(), HEADS, dtype};
    p.a = a.data<float>();
    p.a_is_by_state = a_is_by_state;
    p.b = b.data();
    p.c = c.data();
    p.b_stride = p.c_stride = 2 * STATE;
    p.states = state.data<float>();
    p.state_stride = HEADS * DIM * STATE;
    p.dt_softplus = true;
    p.greatest_step = INFINITY;
    p.z = z.data();
    p.out = out.data();
    PAGEDATTN_CPU_KERNEL(selective_scan)(p, 0, 2 * 2 * p.tiles_per_group());
    judge("selective_scan" + of_type, out, 4.0);
    judge("the state of selective_scan" + of_type, state, 4.0);
  }
}

}  // namespace

void other_cases(Judge& judge) {
  for (const DType dtype : FLOATS) {
    for (const bool has_specials : {false, true}) activations(judge, dtype, has_specials);
    norms(judge, dtype);
    for (const bool is_neox : {false, true}) rotary(judge, dtype, is_neox);
    for (const CacheLayout layout : {CacheLayout::CHUNKED, CacheLayout::NHD}) {
      for (const DType cache_dtype : {dtype, DType::FLOAT8_E4M3, DType::FLOAT8_E5M2}) {
        cached(judge, dtype, cache_dtype, layout);
      }
    }
    cached(judge, dtype, DType::INT8, CacheLayout::CHUNKED);
    sums_of_ranks(judge, dtype);
    sampling(judge, dtype);
    states(judge, dtype);
  }
  slots_and_blocks(judge);
  subnormals(judge);
}

}  // namespace cases
