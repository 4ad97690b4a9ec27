"""Plain-torch references of the ops: the formula and nothing else, sharing no code with the package.

A function has its op's name and takes the op's inputs, but never writes to them: it returns what the op writes, in the
dtype of the arithmetic. `dtype` is that dtype: float64 (the default) gives the reference, the tensors' own dtype gives
the form a PyTorch user would write, which is the yardstick of `checks.assert_close_to_reference`.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

# ---- the paged layout ----------------------------------------------------------------------------------------------
# x = 16 / element_size
# key_cache   [num_blocks, num_kv_heads, head_size / x, block_size, x]
# value_cache [num_blocks, num_kv_heads, head_size, block_size]
# or both 4-D [num_blocks, block_size, num_kv_heads, head_size]
# An fp8 cache (x = 16) is a tensor of its torch dtype or of uint8; it stores element / scale and is read as
# stored * scale.
FP8_OF_NAME = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def element_dtype(cache: Tensor, kv_cache_dtype: str) -> torch.dtype:
    """The dtype of what the cache holds, which may be a uint8 tensor."""
    return cache.dtype if kv_cache_dtype == "auto" else FP8_OF_NAME[kv_cache_dtype]


def quantise(tensor: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """tensor / scale in fp32, rounded to the nearest element of the float8 dtype (even on ties), +-max beyond it.

    On the CPU wherever the tensor is: a GPU's arithmetic does not keep the sign of NaN. Nor does torch's conversion of
    fp16 to fp32 on ARM64, but by way of fp64 the sign stays.
    """
    on_cpu = tensor.cpu().double().float()
    divided = on_cpu if scale is None else on_cpu / scale.cpu()
    largest = torch.finfo(dtype).max
    return divided.clamp(-largest, largest).to(dtype).to(tensor.device)


def dequantise(stored: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """stored * scale, exactly, of a tensor of this float8 dtype or of its bytes."""
    stored = stored.view(dtype).double()
    return stored if scale is None else stored * scale.double()


def slots_of(block_table: Tensor, seq_len: int, block_size: int) -> Tensor:
    """The slots (block * block_size + offset) of tokens 0..seq_len-1 of the sequence with this row of block_tables."""
    token = torch.arange(seq_len, device=block_table.device)
    return block_table.long()[token // block_size] * block_size + token % block_size


def block_and_offset(slots: Tensor, key_cache: Tensor) -> tuple[Tensor, Tensor]:
    block_size = key_cache.shape[1 if key_cache.dim() == 4 else 3]
    return slots.long() // block_size, slots.long() % block_size


def gather(key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of reshape_and_cache: the key and value [num_tokens, num_kv_heads, head_size] at these slots."""
    block, offset = block_and_offset(slots, key_cache)
    if key_cache.dim() == 4:
        return key_cache[block, offset], value_cache[block, offset]
    return key_cache[block, :, :, offset].flatten(2), value_cache[block, :, :, offset]


def gather_cached_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """key and value, with what `gather` gives in the rows of the tokens whose slot is not negative."""
    key, value, kept = key.clone(), value.clone(), slot_mapping >= 0
    key[kept], value[kept] = gather(key_cache, value_cache, slot_mapping[kept])
    return key, value


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """key_cache[block, head, d // x, offset, d % x] = key[token, head, d], and
    value_cache[block, head, d, offset] = value[token, head, d], both `quantise`d for an fp8 cache;
    a 4-D cache[block, offset, head, d] takes key or value[token, head, d];
    block, offset = divmod(slot_mapping[token], block_size); tokens with a negative slot are skipped.
    """
    dtype = element_dtype(key_cache, kv_cache_dtype)
    if dtype.itemsize == 1:
        key = quantise(key, dtype, k_scale).view(key_cache.dtype)
        value = quantise(value, dtype, v_scale).view(value_cache.dtype)
    kept = slot_mapping >= 0
    block, offset = block_and_offset(slot_mapping[kept], key_cache)
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    if key_cache.dim() == 4:
        key_cache[block, offset], value_cache[block, offset] = key[kept], value[kept]
    else:
        key_cache[block, :, :, offset] = key[kept].unflatten(2, (-1, key_cache.shape[4]))
        value_cache[block, :, :, offset] = value[kept]
    return key_cache, value_cache


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> Tensor:
    """dst[j] = src[i] for each pair (i, j) of block_mapping."""
    dst = dst.clone()
    for i, j in block_mapping.tolist():
        dst[j] = src[i]
    return dst


def copy_blocks(
    key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """cache[j] = cache[i] for each pair (i, j) of block_mapping, in every cache."""
    return (
        [swap_blocks(cache, cache, block_mapping) for cache in key_caches],
        [swap_blocks(cache, cache, block_mapping) for cache in value_caches],
    )


# ---- attention -----------------------------------------------------------------------------------------------------


def attention(
    query: Tensor,  # [num_rows, num_heads, head_size]
    key: Tensor,  # [seq_len, num_kv_heads, head_size]
    value: Tensor,  # [seq_len, num_kv_heads, head_size]
    *,
    scale: float,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
    right_window: int | None = None,
    attention_chunk: int = 0,
    dtype: torch.dtype = torch.float64,
    probs_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the last num_rows positions of one sequence; returns out and lse [num_rows, num_heads].

    logits[i, j] = cap(scale * q_i . k_j) - slope * |j - p_i|,  p_i = seq_len - num_rows + i,  cap(z) = c * tanh(z / c)
    over max(0, p_i - window + 1) <= j <= p_i, or j <= p_i + right_window if not causal;
    and over floor(j / attention_chunk) = floor(p_i / attention_chunk), if attention_chunk is not 0;
    lse_i = log(sum_j exp(logits[i, j]) + exp(sink));
    out_i = sum_j exp(logits[i, j] - lse_i) * v_j; zeros where row i sees no token.
    The softmax is taken in fp32 at least, as careful PyTorch code does, and rounded to probs_dtype (None: dtype).
    """
    num_rows, num_heads, head_size = query.shape
    seq_len, num_kv_heads, _ = key.shape
    softmax_dtype = torch.promote_types(dtype, torch.float32)
    query = query.to(dtype).reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    key, value = key.to(dtype), value.to(dtype)

    logits = (torch.einsum("qhgd,khd->hgqk", query, key) * scale).to(softmax_dtype).flatten(0, 1)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    position = torch.arange(seq_len - num_rows, seq_len, device=query.device)[:, None]  # [num_rows, 1]
    token = torch.arange(seq_len, device=query.device)[None, :]  # [1, seq_len]
    if alibi_slopes is not None:
        logits = logits - alibi_slopes[:, None, None].to(softmax_dtype) * (token - position).abs()
    visible = token <= position if causal else torch.ones_like(token <= position)
    if right_window is not None:
        visible &= token <= position + right_window
    if sliding_window is not None:
        visible &= token > position - sliding_window
    if attention_chunk:
        visible &= token // attention_chunk == position // attention_chunk
    logits = logits.masked_fill(~visible, -math.inf)

    denominator = logits
    if sinks is not None:
        denominator = torch.cat([logits, sinks.to(softmax_dtype)[:, None, None].expand(-1, num_rows, 1)], dim=2)
    lse = torch.logsumexp(denominator, dim=2, keepdim=True)  # [num_heads, num_rows, 1]
    probs = torch.where(visible, torch.exp(logits - lse), 0).to(probs_dtype or dtype).to(dtype)
    out = torch.einsum("hgqk,khd->qhgd", probs.unflatten(0, (num_kv_heads, -1)), value)
    return out.flatten(1, 2), lse.squeeze(2).T


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options,
) -> tuple[Tensor, Tensor]:
    """`attention` of each sequence s on rows query[query_start_loc[s]:query_start_loc[s + 1]] and its gathered K and V.

    Without query_start_loc each sequence has one row. `options` are those of `attention`.
    """
    cached = element_dtype(key_cache, kv_cache_dtype)
    block_size = key_cache.shape[1 if key_cache.dim() == 4 else 3]
    starts = range(len(seq_lens) + 1) if query_start_loc is None else query_start_loc.tolist()
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse = torch.zeros(query.shape[:2], dtype=torch.promote_types(dtype, torch.float32), device=query.device)
    for (begin, end), block_table, seq_len in zip(pairwise(starts), block_tables, seq_lens.tolist(), strict=True):
        key, value = gather(key_cache, value_cache, slots_of(block_table, seq_len, block_size))
        if cached.itemsize == 1:
            key, value = dequantise(key, cached, k_scale), dequantise(value, cached, v_scale)
        out[begin:end], lse[begin:end] = attention(query[begin:end], key, value, dtype=dtype, **options)
    return out, lse


def paged_attention_v1(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, **options
) -> Tensor:
    """`paged_attention` of one row per sequence, without its lse."""
    return paged_attention(query, key_cache, value_cache, block_tables, seq_lens, **options)[0]


def merge_attn_states(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """lse = log(exp(prefix_lse) + exp(suffix_lse)), and the outputs weighted by exp(their lse - lse); zeros if it is
    -inf.
    """
    lse = torch.stack([prefix_lse, suffix_lse]).to(torch.promote_types(dtype, torch.float32))
    weights = torch.softmax(lse, dim=0).nan_to_num(nan=0.0).to(dtype).unsqueeze(-1)
    outputs = torch.stack([prefix_output, suffix_output]).to(dtype)
    return (weights * outputs).sum(dim=0), torch.logsumexp(lse, dim=0)


# ---- layernorm, pos_encoding, activation ---------------------------------------------------------------------------


def rms_norm(input: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """input / sqrt(mean(input ** 2) + epsilon) * weight, the mean over the last dimension."""
    input = input.to(dtype)
    return input * torch.rsqrt(input.square().mean(-1, keepdim=True) + epsilon) * weight.to(dtype)


def layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor, epsilon: float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """(input - mean) / sqrt(variance + epsilon) * weight + bias, mean and variance over the last dimension."""
    deviation = input.to(dtype) - input.to(dtype).mean(-1, keepdim=True)
    normed = deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + epsilon)
    return normed * weight.to(dtype) + bias.to(dtype)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """input @ weight.T + bias."""
    out = input.to(dtype) @ weight.to(dtype).T
    return out if bias is None else out + bias.to(dtype)


def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """residual = input + residual; input = rms_norm(residual), of the sum before it is rounded."""
    residual = input.to(dtype) + residual.to(dtype)
    return rms_norm(residual, weight, epsilon, dtype), residual


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor | None]:
    """(x, y) -> (x cos - y sin, y cos + x sin) of every head of token t, cos and sin being the halves of
    cos_sin_cache[positions[t]]; x and y are the halves of a head's first rot_dim elements, or, if not is_neox, its even
    and its odd ones.
    """
    cos, sin = cos_sin_cache[positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rot_dim / 2] each
    half = cos.shape[-1]

    def rotate(tensor: Tensor) -> Tensor:
        heads = tensor.to(dtype).flatten(1).unflatten(1, (-1, head_size))
        to_rotate, rest = heads[..., : 2 * half], heads[..., 2 * half :]
        x, y = to_rotate.unflatten(-1, (2, half) if is_neox else (half, 2)).unbind(-2 if is_neox else -1)
        rotated = torch.stack([x * cos - y * sin, y * cos + x * sin], dim=-2 if is_neox else -1).flatten(-2)
        return torch.cat([rotated, rest], dim=-1).reshape(tensor.shape)

    return rotate(query), None if key is None else rotate(key)


def silu_and_mul(input: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """gate * sigmoid(gate) * up of input = (gate, up), halves of the last dimension."""
    gate, up = input.to(dtype).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gelu_new(input: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    x = input.to(dtype)
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mul_and_silu(input: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """up * gate * sigmoid(gate) of input = (up, gate)."""
    up, gate = input.chunk(2, dim=-1)
    return silu_and_mul(torch.cat([gate, up], dim=-1), dtype)


def gelu_and_mul(input: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """gelu(gate) * up of input = (gate, up), with gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))."""
    gate, up = input.to(dtype).chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def gelu_tanh_and_mul(input: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """`gelu_new`(gate) * up of input = (gate, up)."""
    gate, up = input.to(dtype).chunk(2, dim=-1)
    return gelu_new(gate, dtype) * up


def gelu_fast(input: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """0.5 x (1 + tanh(0.7978845608 x (1 + 0.044715 x^2)))."""
    x = input.to(dtype)
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x)))


def gelu_quick(input: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """x sigmoid(1.702 x)."""
    x = input.to(dtype)
    return x * torch.sigmoid(1.702 * x)


# ---- linear --------------------------------------------------------------------------------------------------------


def quantise_to_int8(input: Tensor, times: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """round(x * (127 / max|x|)) in fp32, and max|x| / 127 [..., 1], of each row; zeros if max|x| is below 2^-119.
    With times [..., 1], 127 times so much instead of 127."""
    input = input.float()
    largest = input.abs().amax(-1, keepdim=True)
    largest = torch.where(largest < 2.0**-119, 0, largest)
    max_code = torch.tensor(127.0)  # a plain number is divided by way of a reciprocal, which rounds twice
    if times is not None:
        max_code = max_code * times
    codes = torch.where(largest > 0, input * (max_code / largest), 0).round()
    return codes.long(), largest / max_code


def quantise_row(input: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and the scale of a row of linear_int8. The largest code is a multiple of 127: the largest multiple with
    which 127 is still 3.5 times the root mean square of the codes. It is 127 itself if max|x| is below 2^-112."""
    mean_square = nonzero(quantise_to_int8(input)[0].double().square().mean(-1, keepdim=True))
    times = (127 / (3.5 * mean_square.sqrt())).floor().clamp(min=1)
    times = torch.where(input.float().abs().amax(-1, keepdim=True) < 2.0**-112, 1, times)
    return quantise_to_int8(input, times.float())


def int8_rows(rows: Tensor) -> Tensor:
    """What is left of rows that linear_int8 has quantised."""
    codes, scales = quantise_row(rows)
    return codes * scales


def int4_rows(rows: Tensor, group_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What is left of rows that linear_int4 has quantised: in blocks of up to 128 elements beside one group."""
    blocks = [block for group in rows.split(group_size, -1) for block in group.split(128, -1)]
    quantised = [quantise_to_int8(block) for block in blocks]
    return torch.cat([codes * scales.to(dtype) for codes, scales in quantised], dim=-1)


def quantise_weight_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and the scales of quantize_weight_int8, in fp32."""
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    return (weight / nonzero(scales)[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def quantise_weight_to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, the scales and the zeros of quantize_weight_int4, in fp32. Sums go over a group in its order."""
    groups = weight.float().reshape(-1, 32)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)

    def total(elements: Tensor) -> Tensor:
        return sum((elements[:, i : i + 1] for i in range(32)), torch.zeros(len(elements), 1))

    def levels(span: float) -> tuple[Tensor, ...]:
        scales = nonzero((high - low) * (span / 15))
        zeros = (low / scales * -span).round().clamp(0, 15)
        codes = (groups / scales + zeros).round().clamp(0, 15)
        steps = codes - zeros
        fit = total(groups * steps) / nonzero(total(steps**2))
        return codes, fit, zeros, total((steps * fit - groups) ** 2)

    best = levels(1.0)
    for candidate in map(levels, (1.07, 0.93)):
        is_better = candidate[3] < best[3]
        best = tuple(torch.where(is_better, a, b) for a, b in zip(candidate, best, strict=True))
    codes, scales, zeros, _ = best
    shape = (len(weight), weight.shape[1] // 32)
    return codes.view(weight.shape).to(torch.uint8), scales.view(shape), zeros.view(shape).to(torch.uint8)


def nonzero(divisor: Tensor) -> Tensor:
    """1 in place of 0."""
    return torch.where(divisor == 0, 1.0, divisor)


def linear_int8(input: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """(codes @ weight.T) * (scale of the row) * (scale of the column) + bias, the sums in integers."""
    codes, scales = quantise_row(input)
    out = (codes @ weight.T.long()).double() * scales.double() * weight_scales.double()
    return out if bias is None else out + bias.double()


def linear_int4(
    input: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """int4_rows @ ((codes - zeros) * scales).T + bias."""
    group_size = codes.shape[1] // scales.shape[1]
    rows = int4_rows(input, group_size, dtype)
    differences = codes.to(dtype) - zeros.to(dtype).repeat_interleave(group_size, 1)
    out = rows @ (differences * scales.to(dtype).repeat_interleave(group_size, 1)).T
    return out if bias is None else out + bias.to(dtype)


# ---- sampling ------------------------------------------------------------------------------------------------------


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, indices: Tensor | None = None) -> Tensor:
    """-inf where bit t % 32 of bitmask[i, t // 32] is 0, for token t of row indices[i]; in the dtype of logits, as
    nothing is computed.
    """
    logits, vocab_size = logits.clone(), logits.shape[1]
    is_allowed = (bitmask.unsqueeze(-1) >> torch.arange(32, device=bitmask.device) & 1).bool()
    rows = torch.arange(len(logits), device=logits.device) if indices is None else indices
    logits[rows] = logits[rows].masked_fill(~is_allowed.flatten(1)[:, :vocab_size], -math.inf)
    return logits


def kept_probs(
    probs: Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    top_k_first: bool = True,
) -> Tensor:
    """Of probabilities [vocab_size] those that the filters keep, and 0 in the place of the others; fp64. What is
    divided by the sum is rounded to fp32, as an op rounds it that gives it out."""
    kept = probs.double()
    order = kept.sort(descending=True).values
    if top_k is not None and top_k < len(probs):
        kept = kept.where(kept >= order[top_k - 1], 0)
    if top_p is not None and top_p < 1:
        limited = top_k is not None and top_k_first
        of = (kept / kept.sum().float()).float().double() if limited else probs.double()
        least = of.sort(descending=True).values
        num_kept = int((least.cumsum(0) < torch.tensor(top_p, dtype=torch.float32)).sum()) + 1
        kept = kept.where(of >= least[min(num_kept, len(probs)) - 1], 0)
    if min_p is not None:
        kept = kept.where(probs.float() >= torch.tensor(min_p) * order[0].float(), 0)
    return kept


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 (Salmon et al., 2011)."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ k, second % 2**32, first >> 32 ^ d ^ m, first % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def uniform_number(seed: int, offset: int, subsequence: int) -> float:
    """In [0, 1): the first 52 bits."""
    words = [word for number in (offset, subsequence, seed) for word in (number % 2**32, number // 2**32 % 2**32)]
    high, low, _, _ = philox(words[:4], words[4:])
    return ((high << 32 | low) >> 12) / 2**52


def token_at(weights: Tensor, number: float) -> int:
    """The first token up to which fp64 weights sum to more than this share of all."""
    return int((weights.cumsum(0) <= number * weights.sum()).sum())


def chain_speculative_sampling(
    draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, seed: int, offset: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Tokens, accepted and emitted drafts of each row, row by row and draft by draft."""
    all_tokens, accepted, emitted = [], [], []
    for row, drafts in enumerate(draft_token_ids.tolist()):
        numbers = [uniform_number(seed, offset + i, row) for i in range(len(drafts) + 1)]
        passes = [
            numbers[i] * float(draft_probs[row, i, token]) < float(target_probs[row, i, token])
            for i, token in enumerate(drafts)
        ]
        num_emitted = [*passes, False].index(False)
        weights = target_probs[row, num_emitted].double()
        if num_emitted < len(drafts):
            weights = (target_probs[row, num_emitted] - draft_probs[row, num_emitted]).clamp(min=0).double()
        tokens = [*drafts[:num_emitted], token_at(weights, numbers[-1])]
        all_tokens.append(tokens + [-1] * (len(drafts) + 1 - len(tokens)))
        accepted.append(sum(passes))
        emitted.append(num_emitted)
    return all_tokens, accepted, emitted


# ---- states in slots -----------------------------------------------------------------------------------------------


def _sequences(num_tokens: int, query_start_loc=None, state_indices=None, has_initial_state=None):
    """(rows, slot, whether the slot holds a state) of each sequence that has rows and a slot."""
    starts = range(num_tokens + 1) if query_start_loc is None else query_start_loc.tolist()
    for seq, (start, end) in enumerate(pairwise(starts)):
        slot = seq if state_indices is None else int(state_indices[seq])
        if start < end and slot >= 0:
            yield slice(start, end), slot, has_initial_state is None or bool(has_initial_state[seq])


def causal_conv1d(
    input: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
    *,
    dtype: torch.dtype = torch.float64,
    **sequences: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, conv_states). The states hold rows as they came."""
    out, states = torch.zeros_like(input, dtype=dtype), conv_states.clone()
    for rows, slot, has_state in _sequences(len(input), **sequences):
        old = conv_states[slot].T if has_state else torch.zeros_like(conv_states[slot].T)
        known = torch.cat([old, input[rows]])
        states[slot] = known[len(known) - states.shape[2] :].T
        for i in range(rows.start, rows.stop):
            end = conv_states.shape[2] + i - rows.start + 1
            window = known[end - weight.shape[1] : end].T.to(dtype)
            total = (window * weight.to(dtype)).sum(-1) + (0 if bias is None else bias.to(dtype))
            out[i] = total * total.sigmoid() if silu else total
    return out, states


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    *,
    dtype: torch.dtype = torch.float64,
    **sequences: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, states)"""
    query, key, value, g, beta = (tensor.to(dtype) for tensor in (query, key, value, g, beta))
    if use_qk_l2norm:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    query, key = (x.repeat_interleave(value.shape[1] // x.shape[1], dim=1) for x in (query, key))
    out, after = torch.zeros_like(value), states.to(dtype, copy=True)
    for rows, slot, has_state in _sequences(len(value), **sequences):
        state = after[slot].clone() if has_state else torch.zeros_like(after[slot])  # [num_heads, k_dim, v_dim]
        for i in range(rows.start, rows.stop):
            state = state * g[i].exp()[:, None, None]
            known = (key[i][:, :, None] * state).sum(1)
            state = state + key[i][:, :, None] * (beta[i][:, None] * (value[i] - known))[:, None]
            out[i] = (query[i][:, :, None] * state).sum(1)
        after[slot] = state
    return out, after


def selective_scan(
    input: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    **sequences: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, states)"""
    num_heads = input.shape[1]
    x, dt, A = input.to(dtype), dt.to(dtype), A.to(dtype)
    B, C = (t.to(dtype).repeat_interleave(num_heads // t.shape[1], dim=1) for t in (B, C))
    step = dt if dt_bias is None else dt + dt_bias.to(dtype)
    step = (step.exp().log1p() if dt_softplus else step).clamp(dt_min, dt_max)
    out, after = torch.zeros_like(x), states.to(dtype, copy=True)
    for rows, slot, has_state in _sequences(len(x), **sequences):
        state = after[slot].clone() if has_state else torch.zeros_like(after[slot])  # [heads, head_dim, state_size]
        for i in range(rows.start, rows.stop):
            decay = (step[i].reshape(num_heads, *[1] * (A.dim() - 1)) * A).exp().reshape(num_heads, 1, -1)
            state = state * decay + (step[i][:, None] * x[i])[:, :, None] * B[i][:, None]
            y = (state * C[i][:, None]).sum(-1) + (0 if D is None else D.to(dtype)[:, None] * x[i])
            out[i] = y if z is None else y * z[i].to(dtype) * z[i].to(dtype).sigmoid()
        after[slot] = state
    return out, after
