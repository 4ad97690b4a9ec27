"""What bench/attn.py times: the same sequences in a paged cache and as SDPA takes them."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedattn_ext import allocate_kv_cache, ops

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Model:
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Paged:
    """New tokens of some sequences, and a paged cache."""

    query: Tensor  # [num_tokens, num_heads, head_size]
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor

    @classmethod
    def make(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seq_lens: list[int],
        dtype: torch.dtype,
        in_order: bool = False,
        nhd_block_size: int | None = None,
    ) -> "Paged":
        """key, value: [num_seqs, num_kv_heads, tokens, head_size], tokens as many as whole blocks hold.

        in_order: the blocks of a sequence are adjacent. If not, blocks are in random order.
        nhd_block_size: of a cache in the layout NHD."""
        num_seqs, num_heads, num_tokens, head_size = key.shape
        block_size, layout = (BLOCK_SIZE, "chunked") if nhd_block_size is None else (nhd_block_size, "nhd")
        num_blocks = num_seqs * num_tokens // block_size
        blocks = torch.arange(num_blocks) if in_order else torch.randperm(num_blocks)
        ((key_cache, value_cache),) = allocate_kv_cache(
            len(blocks), num_heads, head_size, block_size, dtype, torch.get_default_device(), layout=layout
        )
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
        tokens = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (key, value))
        ops.reshape_and_cache(*tokens, key_cache, value_cache, slots)
        block_tables = blocks.view(num_seqs, -1).int()
        return cls(query, key_cache, value_cache, block_tables, torch.tensor(seq_lens, dtype=torch.int32))

    def decode(self) -> Tensor:
        return ops.paged_attention_v1(self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens)

    def share(self, num_tokens: int) -> "Paged":
        """The same call with the first blocks of the first sequence in every table."""
        block_tables = self.block_tables.clone()
        block_tables[:, : num_tokens // BLOCK_SIZE] = block_tables[0, : num_tokens // BLOCK_SIZE]
        return replace(self, block_tables=block_tables)

    def attend(self, query_start_loc: Tensor) -> Tensor:
        caches = self.key_cache, self.value_cache
        return ops.paged_attention(
            self.query, *caches, self.block_tables, self.seq_lens, query_start_loc=query_start_loc
        )[0]

    def decode_naive(self) -> Tensor:
        """A sequence at a time."""
        out = torch.empty_like(self.query)
        num_kv_heads, head_size, block_size = self.value_cache.shape[1:]
        for seq_idx, seq_len in enumerate(self.seq_lens.tolist()):
            blocks = self.block_tables[seq_idx, : -(-seq_len // block_size)]
            key = self.key_cache[blocks].permute(1, 0, 3, 2, 4).reshape(num_kv_heads, -1, head_size)[:, :seq_len]
            value = self.value_cache[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_size)[:, :seq_len]
            query = self.query[seq_idx].view(num_kv_heads, -1, head_size) * head_size**-0.5
            out[seq_idx] = ((query @ key.mT).softmax(-1) @ value).flatten(0, 1)
        return out


def random_kv(model: Model, seq_lens: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as SDPA takes them, for Paged.make; in memory like that of a cache."""
    shape = len(seq_lens), model.num_kv_heads, -(-max(seq_lens) // BLOCK_SIZE) * BLOCK_SIZE, model.head_size
    num_blocks = shape[0] * shape[2] // BLOCK_SIZE
    ((key, value),) = allocate_kv_cache(
        num_blocks, model.num_kv_heads, model.head_size, BLOCK_SIZE, dtype, torch.get_default_device()
    )
    return key.view(shape).normal_(), value.view(shape).normal_()


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """torch's own attention in its fastest form; [num_seqs, heads, tokens, head_size] each.

    A single row sees all keys, so the query heads of a KV head can be rows of one head: torch then reads its keys and
    values once. With `enable_gqa` torch reads them once for each query head: 1.5 times the time in fp32 and 8 times in
    bf16 (GQA 32/8x128, one thread of a Zen 4). Prompts are as fast with `enable_gqa` as with repeated keys and values.
    """
    if query.shape[2] > 1:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
    rows = query.squeeze(2).unflatten(1, (key.shape[1], -1))
    return scaled_dot_product_attention(rows, key, value).flatten(1, 2).unsqueeze(2)


class Attention:
    """The last num_queries tokens of each sequence over all of its tokens, in our layout and in torch's."""

    def __init__(self, model: Model, seq_lens: list[int], num_queries: int, dtype: torch.dtype) -> None:
        num_seqs = len(seq_lens)
        self.seq_lens, self.num_queries = seq_lens, num_queries
        self.query = torch.randn(num_seqs * num_queries, model.num_heads, model.head_size, dtype=dtype)
        self.query_start_loc = torch.arange(num_seqs + 1, dtype=torch.int32) * num_queries
        self.key, self.value = random_kv(model, seq_lens, dtype)
        self.paged = Paged.make(self.query, self.key, self.value, seq_lens, dtype)

        # SDPA takes the whole batch if lengths agree, and a sequence at a time if they do not.
        self.parts = [(slice(i, i + 1), seq_len) for i, seq_len in enumerate(seq_lens)]
        if len(set(seq_lens)) == 1:
            self.parts = [(slice(None), seq_lens[0])]
        self.is_causal = num_queries == max(seq_lens)
        is_chunk = 1 < num_queries < max(seq_lens)
        seen = torch.ones(num_queries, max(seq_lens), dtype=torch.bool)
        self.mask = seen.tril(max(seq_lens) - num_queries) if is_chunk else None

    def decode(self) -> Tensor:
        return self.paged.decode()

    def prefill(self) -> Tensor:
        return self.paged.attend(self.query_start_loc)

    @cached_property
    def paged_nhd(self) -> Paged:
        return Paged.make(self.query, self.key, self.value, self.seq_lens, self.query.dtype, nhd_block_size=BLOCK_SIZE)

    def prefill_nhd(self) -> Tensor:
        return self.paged_nhd.attend(self.query_start_loc)

    def dense(self) -> Tensor:
        """Of one sequence, over SDPA's keys and values."""
        key, value = (of_heads[0, :, : self.parts[0][1]].transpose(0, 1) for of_heads in (self.key, self.value))
        key_start_loc = torch.tensor([0, len(key)], dtype=torch.int32, device=key.device)
        return ops.varlen_attention(self.query, key, value, self.query_start_loc, key_start_loc)[0]

    def attend(self, key: Tensor, value: Tensor) -> Tensor:
        query = self.query.unflatten(0, (-1, self.num_queries)).transpose(1, 2)
        outs = [
            sdpa(query[part], key[part, :, :seq_len], value[part, :, :seq_len], self.mask, self.is_causal)
            for part, seq_len in self.parts
        ]
        outs = [out.transpose(1, 2).flatten(0, 1) for out in outs]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def sdpa(self) -> Tensor:
        return self.attend(self.key, self.value)

    def gather_sdpa(self) -> Tensor:
        p = self.paged
        key = p.key_cache[p.block_tables].permute(0, 2, 1, 4, 3, 5)  # seq, head, block, token, d / x, x
        value = p.value_cache[p.block_tables].permute(0, 2, 1, 4, 3)
        return self.attend(key.flatten(-2).flatten(2, 3), value.flatten(2, 3))

    def naive(self) -> Tensor:
        return self.paged.decode_naive()


class SharedDecode:
    """Sequences that share their first tokens, and as long sequences that share nothing. 8 bits hold all numbers
    exactly."""

    def __init__(self, model: Model, seq_lens: list[int], num_shared: int, dtype: torch.dtype) -> None:
        of_query = torch.bfloat16 if dtype.itemsize == 1 else dtype
        query = torch.randn(len(seq_lens), model.num_heads, model.head_size, dtype=of_query)
        key, value = (t.to(dtype).to(of_query) for t in random_kv(model, seq_lens, of_query))
        self.unshared = Paged.make(query, key, value, seq_lens, dtype)
        self.shared = self.unshared.share(num_shared)

    def decode(self) -> Tensor:
        return self.shared.decode()

    def decode_unshared(self) -> Tensor:
        return self.unshared.decode()


class NhdDecode:
    """The same tokens in the layout NHD, with blocks of 1, 16 and 256 tokens, and in the chunked layout."""

    def __init__(self, model: Model, seq_lens: list[int], dtype: torch.dtype) -> None:
        query = torch.randn(len(seq_lens), model.num_heads, model.head_size, dtype=dtype)
        key, value = random_kv(model, seq_lens, dtype)
        self.chunked = Paged.make(query, key, value, seq_lens, dtype)
        self.nhd = {n: Paged.make(query, key, value, seq_lens, dtype, nhd_block_size=n) for n in (1, 16, 256)}

    def decode(self, block_size: int) -> Tensor:
        return self.nhd[block_size].decode()

    def decode_chunked(self) -> Tensor:
        return self.chunked.decode()


class Quantized:
    """The last num_queries tokens of each sequence over the same tokens in a cache of 8 bits and in one of bf16. Random
    numbers that both hold exactly; int8 rounds them."""

    def __init__(self, model: Model, seq_lens: list[int], num_queries: int, dtype: torch.dtype) -> None:
        query = torch.randn(len(seq_lens) * num_queries, model.num_heads, model.head_size, dtype=torch.bfloat16)
        key, value = random_kv(model, seq_lens, torch.bfloat16)
        if dtype.is_floating_point:
            key, value = key.to(dtype).bfloat16(), value.to(dtype).bfloat16()
        self.query_start_loc = torch.arange(len(seq_lens) + 1, dtype=torch.int32) * num_queries
        self.quantized = Paged.make(query, key, value, seq_lens, dtype)
        self.bf16 = Paged.make(query, key, value, seq_lens, torch.bfloat16)

    def decode(self) -> Tensor:
        return self.quantized.decode()

    def decode_bf16(self) -> Tensor:
        return self.bf16.decode()

    def prefill(self) -> Tensor:
        return self.quantized.attend(self.query_start_loc)

    def prefill_bf16(self) -> Tensor:
        return self.bf16.attend(self.query_start_loc)


class Mixed:
    """A prompt beside rows of decode, in one batch."""

    def __init__(self, model: Model, num_prompt_tokens: int, decode_lens: list[int], dtype: torch.dtype) -> None:
        self.num_prompt_tokens, self.decode_len = num_prompt_tokens, decode_lens[0]
        assert set(decode_lens) == {self.decode_len}  # sdpa takes them at once
        seq_lens, num_tokens = [num_prompt_tokens, *decode_lens], num_prompt_tokens + len(decode_lens)
        query = torch.randn(num_tokens, model.num_heads, model.head_size, dtype=dtype)
        self.key, self.value = random_kv(model, seq_lens, dtype)
        self.paged = Paged.make(query, self.key, self.value, seq_lens, dtype)
        starts = torch.arange(num_prompt_tokens, num_tokens + 1, dtype=torch.int32)
        self.query_start_loc = torch.cat((torch.zeros(1, dtype=torch.int32), starts))

    def attend(self) -> Tensor:
        return self.paged.attend(self.query_start_loc)

    def sdpa(self) -> Tensor:
        """Two calls."""
        n, rows = self.num_prompt_tokens, slice(None, self.decode_len)
        prompt, decodes = self.paged.query[:n].transpose(0, 1)[None], self.paged.query[n:, :, None]
        prompt_out = sdpa(prompt, self.key[:1, :, :n], self.value[:1, :, :n], is_causal=True)
        decode_out = sdpa(decodes, self.key[1:, :, rows], self.value[1:, :, rows])
        return torch.cat((prompt_out[0].transpose(0, 1), decode_out[:, :, 0]))
