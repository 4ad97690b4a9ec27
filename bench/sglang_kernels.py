"""SGLang's kernels for CPUs as peers, out of vLLM's wheel, where vllm_kernels.py has loaded a library that has them
(that for AVX512-BF16): attention over tokens in any order, and products with packed weights in bf16, 8 bits and 4 bits.
All take rows of bf16; attention takes fp16 too.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from vllm_kernels import in_words

AWQ = 0  # how codes of 4 bits are packed, beside GPTQ
AWQ_ORDER = 0, 2, 4, 6, 1, 3, 5, 7
NUM_KV_SPLITS = 8  # of a sequence, in decode


def are_loaded() -> bool:
    return hasattr(torch.ops._C, "int4_scaled_mm_cpu")


def has_attention(dtype: torch.dtype, head_size: int) -> bool:
    return are_loaded() and dtype != torch.float32 and head_size % 32 == 0


class TokenKv:
    """Keys and values of tokens in random order, a place for each token."""

    def __init__(self, key: Tensor, value: Tensor, seq_lens: list[int]) -> None:
        """key, value: [num_seqs, num_kv_heads, tokens, head_size]."""
        num_seqs, _, num_tokens, _ = key.shape
        self.places = torch.randperm(num_seqs * num_tokens, dtype=torch.int32).view(num_seqs, num_tokens)
        self.seq_lens = torch.tensor(seq_lens)
        self.key, self.value = (self.in_places(tensor) for tensor in (key, value))

    def in_places(self, tensor: Tensor) -> Tensor:
        tokens = tensor.transpose(1, 2).flatten(0, 1)
        placed = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        placed[self.places.flatten().long()] = tokens
        return placed

    def attention(self, query: Tensor, query_start_loc: Tensor) -> Callable[[], Tensor]:
        """A call of decode for one row a sequence, else of prompts, whose last tokens are the rows.

        query: [num_tokens, num_heads, head_size]; query_start_loc: [num_seqs + 1] int32."""
        num_seqs, (_, num_heads, head_size) = len(self.places), query.shape
        numbers, scale = torch.arange(num_seqs), head_size**-0.5
        if len(query) == num_seqs:
            partials = torch.empty(num_seqs, num_heads, NUM_KV_SPLITS, head_size + 1)

            def decode() -> Tensor:
                out = torch.empty_like(query)
                torch.ops._C.decode_attention_cpu(
                    query, self.key, self.value, out, None, None, None, partials, self.places, numbers, self.seq_lens,
                    scale, 0.0, False, -1, None, None,
                )  # fmt: skip
                return out

            return decode
        lens = query_start_loc.diff()
        new = [
            place
            for row, seq_len, count in zip(self.places, self.seq_lens.tolist(), lens.tolist(), strict=True)
            for place in row[seq_len - count : seq_len].tolist()
        ]
        new_key, new_value, starts, most = self.key[new], self.value[new], query_start_loc[:-1], int(lens.max())

        def extend() -> Tensor:
            out = torch.empty_like(query)
            torch.ops._C.extend_attention_cpu(
                query, new_key, new_value, out, self.key, self.value, self.places, numbers, self.seq_lens, lens,
                starts, most, scale, 0.0, False, -1, None, None,
            )  # fmt: skip
            return out

        return extend


def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The product of rows with a bf16 weight, [out_features, in_features], which is packed here."""
    packed = torch.ops._C.convert_weight_packed(weight)

    def multiply(rows: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), len(weight))
        torch.ops._C.weight_packed_linear(out, rows, packed, None, True)
        return out

    return multiply


def linear_int8(weight: Tensor, scales: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    """The same with an int8 weight, a scale for each output feature, and rows quantized to int8 with a scale each."""
    packed = torch.ops._C.convert_weight_packed(weight)
    return lambda rows: torch.ops._C.int8_scaled_mm_with_quant(rows, packed, scales, bias, rows.dtype, True)


def linear_int4(codes: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    """The same with codes of 4 bits, [out_features, in_features], less 8; scales [out_features, groups]."""
    weight = in_words(codes.t().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)).contiguous()
    zeros = in_words(torch.full_like(scales.t(), 8, dtype=torch.int32))
    packed = torch.ops._C.convert_weight_packed_scale_zp(weight, zeros, scales.t().bfloat16().contiguous(), AWQ)
    return lambda rows: torch.ops._C.int4_scaled_mm_cpu(rows, *packed, None)
