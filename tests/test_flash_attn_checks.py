"""What flash-attn's functions refuse: lengths, offsets and paddings that leave a sequence's own keys, and whatever
attention would refuse behind an append. Nothing is written before the error, which names the caller's argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from torch import Tensor

from pagedattn_ext.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16
Arguments = dict[str, Any]
Wrong = tuple[Arguments, str]  # what is changed in right arguments, and the error


def indices(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ids(wrong: list[Wrong]) -> list[str]:
    return [f"{' and '.join(changes)}: {message}" for changes, message in wrong]


# ---- over keys that lie one after the other, and in pages ------------------------------------------------------------


def varlen() -> Arguments:
    """Sequences of 3 and 7 keys."""
    starts = {"cu_seqlens_q": indices(0, 1, 3), "cu_seqlens_k": indices(0, 3, 10), "max_seqlen_q": 2, "max_seqlen_k": 7}
    return {"q": torch.randn(3, HEADS, HEAD_SIZE), **dict.fromkeys("kv", torch.randn(10, KV_HEADS, HEAD_SIZE))} | starts


PAGES = torch.zeros(5, 2, KV_HEADS, HEAD_SIZE)
PAGED = {"k": PAGES, "v": PAGES, "block_table": indices([0, 3], [1, 2])}
OF_VARLEN: list[Wrong] = [
    ({"seqused_k": indices(5, 7)}, r"seqused_k: expected 0 to 3 \(the sequence's own tokens\), got 5 at sequence 0$"),
    ({"seqused_k": indices(3, -1)}, "seqused_k: expected 0 to 7 .*, got -1 at sequence 1$"),
    ({"seqused_k": indices(3)}, "seqused_k: expected 2 elements, got 1$"),
    ({"seqused_k": torch.ones(2)}, "seqused_k: expected dtype int32 or int64, got float32$"),
    (
        {"seqused_k": indices(3, 7), "max_seqlen_k": 4},
        r"max_seqlen_k: expected at least 7 \(the tokens of sequence 1\)",
    ),
    ({"seqused_k": indices(3, 7), "max_seqlen_k": "x"}, "max_seqlen_k: expected an int, got str$"),
    ({"seqused_k": indices(3, 7), "cu_seqlens_k": indices(0, 3, 11)}, "cu_seqlens_k: expected 3 .* to 10, got 11 at "),
    ({"seqused_k": indices(3, 3), "cu_seqlens_k": indices(0, 8, 6)}, "cu_seqlens_k: expected 8 .* to 10, got 6 at "),
    ({"seqused_k": indices(3, 3), "cu_seqlens_k": indices(-1, 3, 10)}, "cu_seqlens_k: expected 0 or more, got -1 at "),
    ({"cu_seqlens_k": indices(0, 3, 11)}, "cu_seqlens_k: expected the number of keys, 10, last, got 11$"),
    ({"cu_seqlens_k": indices(0, 11, 10)}, "cu_seqlens_k: expected offsets that do not decrease, got 11 and then 10"),
    ({"cu_seqlens_k": indices(1, 3, 10)}, "cu_seqlens_k: expected 0 first, got 1$"),
    ({"cu_seqlens_k": indices(0, 10)}, "cu_seqlens_k: expected 3 elements, got 2$"),
    ({"cu_seqlens_k": indices(0, 10), "seqused_k": indices(3, 3)}, "cu_seqlens_k: expected 3 elements, got 2$"),
    ({"cu_seqlens_q": indices(0, 1, 4)}, "cu_seqlens_q: expected the number of query rows, 3, last, got 4$"),
    ({"cu_seqlens_q": indices(0, 4, 3)}, "cu_seqlens_q: expected offsets that do not decrease, got 4 and then 3 at "),
    ({"cu_seqlens_q": indices()}, "cu_seqlens_q: expected at least 1 element, got 0$"),
    (
        {**PAGED, "seqused_k": indices(3, 5)},
        r"seqused_k: expected 0 to 4 \(the slots of a row of block_table\), got 5 ",
    ),
    ({**PAGED, "cu_seqlens_k": indices(0, 3, 8)}, "cu_seqlens_k: expected 0 to 4 .*, got 5 at sequence 1$"),
    (
        {**PAGED, "block_table": indices([0, 5], [1, 2]), "seqused_k": indices(3, 3)},
        "block_table: expected .*, got 5 at",
    ),
    (
        {"k": PAGES, "v": PAGES, "page_table": indices([0, -1], [1, 2]), "seqused_k": indices(3, 3)},
        "page_table: .* -1 ",
    ),
    ({"softmax_scale": float("nan")}, "softmax_scale: expected a finite number of float32, got nan$"),
    ({"softmax_scale": "x"}, "softmax_scale: expected a number, got str$"),
    ({"s_aux": torch.ones(HEADS).to(torch.complex64)}, "s_aux: expected a real dtype, got complex64$"),
    ({"v": torch.zeros(9, KV_HEADS, HEAD_SIZE)}, r"v: expected shape \[10, 2, 16\], got \[9, 2, 16\]$"),
    ({"q": torch.zeros(3, 3, HEAD_SIZE)}, "q: expected a number of heads that is a multiple of the 2 KV heads, got 3$"),
]


# What is computed with a batch before an op sees the batch.
NO_HEADS = torch.zeros(5, 2, 0, HEAD_SIZE)
OF_VARLEN += [
    (PAGED | {"seqused_k": indices(3, 3)} | extra | changes, message)
    for extra in ({"seqused_q": indices(1, 1)}, {"k_descale": torch.ones(2, KV_HEADS) / torch.arange(1, 3)})
    for changes, message in (
        ({"block_table": indices(0, 3)}, r"block_table: expected 2 dimensions, got 1 \(shape \[2\]\)$"),
        ({"block_table": [[0, 3], [1, 2]]}, "block_table: expected a torch.Tensor, got list$"),
        ({"k": NO_HEADS, "v": NO_HEADS}, r"k: expected at least 1 KV head, got shape \[5, 2, 0, 16\]$"),
    )
]
OF_VARLEN.append(
    ({"seqused_q": indices(1, 1), "cu_seqlens_q": indices(0, 9, 1, 9, 3)[::2]}, "cu_seqlens_q: .*contiguous")
)
OF_VARLEN.append(({"seqused_q": [1, 1]}, "seqused_q: expected a torch.Tensor, got list$"))


@pytest.mark.parametrize(("changes", "message"), OF_VARLEN, ids=ids(OF_VARLEN))
def test_varlen(changes: Arguments, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^flash_attn_varlen_func: {message}"):
        flash_attn_varlen_func(**varlen() | changes)


def test_dense() -> None:
    q, k = torch.zeros(1, 3, HEADS, HEAD_SIZE), torch.zeros(1, 5, KV_HEADS, HEAD_SIZE)
    with pytest.raises(ValueError, match=r"^flash_attn_func: v: expected shape \[1, 5, 2, 16\], got \[1, 4, 2, 16\]$"):
        flash_attn_func(q, k, k[:, :4])
    with pytest.raises(ValueError, match=r"^flash_attn_func: k: expected 2 sequences, as q has, got 1$"):
        flash_attn_func(q.expand(2, -1, -1, -1), k, k)
    with pytest.raises(ValueError, match=r"^flash_attn_func: alibi_slopes: expected shape \[4\], got \[3\]$"):
        flash_attn_func(q, k, k, alibi_slopes=torch.ones(3))


# ---- over a cache, behind an append ----------------------------------------------------------------------------------


def paged() -> Arguments:
    """Sequences of 4 and 2 tokens, and one new token of each."""
    return {
        "q": torch.randn(2, 1, HEADS, HEAD_SIZE),
        "k_cache": torch.randn(8, 4, KV_HEADS, HEAD_SIZE),
        "v_cache": torch.randn(8, 4, KV_HEADS, HEAD_SIZE),
        "k": torch.randn(2, 1, KV_HEADS, HEAD_SIZE),
        "v": torch.randn(2, 1, KV_HEADS, HEAD_SIZE),
        "cache_seqlens": indices(4, 2),
        "block_table": indices([3, 1], [0, 5]),
    }


def dense() -> Arguments:
    arguments = paged()
    del arguments["block_table"]
    return arguments | {name: arguments[name].view(4, 8, KV_HEADS, HEAD_SIZE) for name in ("k_cache", "v_cache")}


def ragged() -> Arguments:
    """Three new tokens of the first sequence and one of the second."""
    arguments = paged()
    rows = {name: torch.randn(4, arguments[name].shape[2], HEAD_SIZE) for name in "qkv"}
    return arguments | rows | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_new"), indices(0, 3, 4))


COS, SIN = torch.rand(2, 16, 4)
ROTARY = {"rotary_cos": COS, "rotary_sin": SIN}
OF_PAGED: list[Wrong] = [
    ({"rotary_cos": COS}, "rotary_sin: expected a tensor beside rotary_cos, got None$"),
    ({"rotary_sin": SIN}, "rotary_cos: expected a tensor beside rotary_sin, got None$"),
    (
        {"rotary_cos": COS, "rotary_sin": SIN[:8]},
        r"rotary_sin: expected shape \[16, 4\], got \[8, 4",
    ),
    (
        {"rotary_cos": COS, "rotary_sin": SIN.half()},
        "rotary_sin: expected dtype float32, got float16",
    ),
    (
        {"rotary_cos": COS[:4], "rotary_sin": SIN[:4]},
        r"cache_seqlens: expected 0 to 3 \(the rows of rotary_cos\), got 4",
    ),
    ({"rotary_cos": COS[0], "rotary_sin": SIN[0]}, "rotary_cos: expected 2 dimensions, got 1"),
    ({**ROTARY, "rotary_seqlens": indices(16, 0)}, "rotary_seqlens: expected 0 to 15 .*, got 16 at token 0$"),
    ({**ROTARY, "rotary_seqlens": indices(0)}, "rotary_seqlens: expected 2 elements, got 1$"),
    (
        {"cache_seqlens": indices(8, 2)},
        "cache_seqlens: expected 0 or more, and room .*, got 1 new tokens from 8 on in ",
    ),
    (
        {"cache_seqlens": indices(4, -1)},
        "cache_seqlens: expected 0 or more, and room .* from -1 on .* at sequence 1$",
    ),
    ({"cache_seqlens": indices(4, 2**31 - 1)}, "cache_seqlens: expected 0 or more, and room for the new tokens, got "),
    ({"cache_seqlens": indices(4)}, "cache_seqlens: expected 2 elements, got 1$"),
    (
        {"cache_seqlens": 8},
        "cache_seqlens: expected 0 or more, and room for the new tokens, got 1 new tokens from 8 on ",
    ),
    ({"block_table": indices([3, 8], [0, 5])}, "block_table: expected blocks of 0 to 7, got 8 at sequence 0, entry 1$"),
    ({"block_table": indices([8, 1], [0, 5])}, "block_table: expected blocks of 0 to 7, got 8 at sequence 0, entry 0$"),
    ({"block_table": indices([3, 1])}, r"block_table: expected shape \[2, \*\], got \[1, 2\]$"),
    ({"block_table": indices(3, 1)}, r"block_table: expected shape \[2, \*\], got \[2\]$"),
    ({"block_table": [[3, 1], [0, 5]]}, "block_table: expected a torch.Tensor, got list$"),
    ({"k": torch.ones(3, 1, KV_HEADS, HEAD_SIZE)}, "k: expected 2 sequences, as q has, got 3$"),
    ({"k": torch.ones(2, 1, 1, HEAD_SIZE)}, r"k: expected shape \[2, 1, 2, 16\], got \[2, 1, 1, 16\]$"),
    ({"v_cache": torch.ones(8, 4, KV_HEADS, 13)}, "v: expected heads of 13 elements, as in v_cache, got 16$"),
    ({"v": torch.ones(2, 2, KV_HEADS, HEAD_SIZE)}, r"v: expected shape \[2, 1, 2, 16\], got \[2, 2, 2, 16\]$"),
    (
        {"q": torch.ones(2, 1, 3, HEAD_SIZE)},
        "q: expected a number of heads that is a multiple of the 2 KV heads, got 3$",
    ),
    ({"q": torch.ones(2, 1, HEADS, 32)}, r"q: expected shape \[\*, \*, \*, 16\], got \[2, 1, 4, 32\]$"),
    ({"q": torch.ones(2, 1, HEADS, HEAD_SIZE).half()}, "q: expected dtype float32, got float16$"),
    ({"softmax_scale": float("inf")}, "softmax_scale: expected a finite number of float32, got inf$"),
    ({"softcap": -1.0}, "softcap: expected 0 or a positive normal number of float32, got -1$"),
    ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes: expected shape \[4\], got \[3\]$"),
    ({"sinks": torch.ones(3)}, r"sinks: expected shape \[4\], got \[3\]$"),
    ({"window_size": (1.5, 0)}, "window_size: expected an int, got float$"),
    (
        {"block_table": indices([3, 9], [0, 5]), "cache_leftpad": indices(1, 0)},
        "block_table: expected blocks of 0 to 7, got 9 at sequence 0, entry 1$",
    ),
    (
        {"block_table": indices([8], [0]), "cache_seqlens": 2, "cache_leftpad": indices(1, 0)},
        "block_table: expected blocks of 0 to 7, got 8 at sequence 0, entry 0$",
    ),
    (
        {"v_cache": torch.ones(7, 4, KV_HEADS, HEAD_SIZE)},
        r"v_cache: expected shape \[8, 4, 2, 16\], got \[7, 4, 2, 16\]$",
    ),
]
OF_DENSE: list[Wrong] = [
    ({"cache_seqlens": indices(8, 2)}, "cache_seqlens: expected 0 or more, and room .* in caches for 8 tokens at "),
    ({"cache_batch_idx": indices(4, 0)}, "cache_batch_idx: expected blocks of 0 to 3, got 4 at sequence 0"),
    ({"cache_batch_idx": indices(-1, 0)}, "cache_batch_idx: expected blocks of 0 to 3, got -1 at sequence 0"),
    ({"cache_batch_idx": indices(0)}, "cache_batch_idx: expected 2 elements, got 1$"),
    (
        {"cache_batch_idx": indices(1, 0), "cache_seqlens": 9, "k": None, "v": None},
        r"cache_seqlens: expected 0 to 8 \(the slots of a row of cache_batch_idx\), got 9",
    ),
    (
        {"cache_seqlens": 9, "k": None, "v": None},
        r"cache_seqlens: expected 0 to 8 \(the slots of a row of k_cache\), got 9",
    ),
    ({"cache_seqlens": "x"}, "cache_seqlens: expected an int, got str$"),
    ({"cache_seqlens": 2**70}, "cache_seqlens: expected an int of 64 bits, got 1180591620717411303424$"),
    ({"q": torch.ones(5, 1, HEADS, HEAD_SIZE), "cache_seqlens": 1}, "k_cache: expected 5 sequences or more, got 4$"),
    (
        {"cache_batch_idx": indices(4, 0), "cache_leftpad": indices(1, 0)},
        "cache_batch_idx: expected blocks of 0 to 3, got 4 at sequence 0",
    ),
    ({"cache_leftpad": indices(6, 0)}, r"cache_leftpad: expected 0 to 5 \(the length of the sequence\), got 6 at seq"),
    ({"cache_leftpad": indices(0, -1)}, "cache_leftpad: expected 0 to 3 .*, got -1 at sequence 1$"),
    ({"cache_leftpad": indices(0)}, "cache_leftpad: expected 2 elements, got 1$"),
]
OF_RAGGED: list[Wrong] = [
    ({"cu_seqlens_k_new": indices(0, 3, 5)}, r"cu_seqlens_k_new: expected at most 4 \(rows of k\) last, got 5$"),
    (
        {"cu_seqlens_k_new": indices(0, 4, 3)},
        "cu_seqlens_k_new: expected offsets that do not decrease, got 4 and then 3",
    ),
    (
        {
            **dict.fromkeys(("k_cache", "v_cache"), torch.zeros(8, 4, KV_HEADS, HEAD_SIZE).to(torch.float8_e4m3fn)),
            "k_descale": torch.rand(2, KV_HEADS),
            "cu_seqlens_k_new": indices(0, 4, 3),
        },
        "cu_seqlens_k_new: expected offsets that do not decrease, got 4 and then 3",
    ),
    ({"cu_seqlens_k_new": indices(1, 3, 4)}, "cu_seqlens_k_new: expected 0 first, got 1$"),
    ({"cu_seqlens_k_new": indices(0, 4)}, "cu_seqlens_k_new: expected 3 elements, got 2$"),
    ({"cache_seqlens": indices(4, -1)}, "cache_seqlens: expected 0 or more, and room .* from -1 on .* at sequence 1$"),
    ({"cu_seqlens_q": indices(0, 3, 3)}, "cu_seqlens_q: expected the number of query rows, 4, last, got 3$"),
    ({"cu_seqlens_q": indices(0, 5, 4)}, "cu_seqlens_q: expected offsets that do not decrease, got 5 and then 4"),
    ({**ROTARY, "cu_seqlens_q": indices(0, 3, 5)}, r"cu_seqlens_q: expected at most 4 \(rows\) last, got 5$"),
]
OF_CACHES = [
    (make, *wrong)
    for make, all_wrong in ((paged, OF_PAGED), (dense, OF_DENSE), (ragged, OF_RAGGED))
    for wrong in all_wrong
]


@pytest.mark.parametrize(("make", "changes", "message"), OF_CACHES, ids=ids([*OF_PAGED, *OF_DENSE, *OF_RAGGED]))
def test_kvcache(make: Callable[[], Arguments], changes: Arguments, message: str) -> None:
    arguments = make() | changes
    caches = arguments["k_cache"], arguments["v_cache"]
    kept = [cache.clone() for cache in caches]
    with pytest.raises((ValueError, TypeError), match=f"^flash_attn_with_kvcache: {message}"):
        flash_attn_with_kvcache(**arguments)
    for cache, before in zip(caches, kept, strict=True):
        assert_same_bits(cache, before)
