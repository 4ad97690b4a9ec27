"""The functions of other libraries in a CPUGraph and under torch.compile(fullgraph=True): a step that appends and
attends gives what it gives without, at each replay, and refuses values that leave a sequence's own memory."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedattn_ext import CPUGraph, flashinfer
from pagedattn_ext.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from pagedattn_ext.ops._call import tensors_in

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE, NUM_PAGES = 4, 2, 16, 4, 8
INDEX = torch.int32
Arguments = dict[str, Any]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def indices(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=INDEX)


def paged(new: int = 1) -> Arguments:
    """flash-attn's step over pages: two sequences of 4 and 2 tokens, and `new` tokens of each."""
    return {
        "q": normal(2, new, HEADS, HEAD_SIZE),
        "k_cache": normal(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_SIZE),
        "v_cache": normal(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_SIZE),
        "k": normal(2, new, KV_HEADS, HEAD_SIZE),
        "v": normal(2, new, KV_HEADS, HEAD_SIZE),
        "cache_seqlens": indices(4, 2),
        "block_table": indices([3, 1], [0, 5]),
    }


def rotary() -> Arguments:
    angles = torch.outer(torch.arange(16), torch.tensor([1.0, 0.5, 0.2, 0.1]))
    return paged(2) | {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}


def ragged() -> Arguments:
    """Three new tokens of the first sequence and one of the second."""
    starts = indices(0, 3, 4)
    rows = {name: rotary()[name].flatten(0, 1) for name in "qkv"}
    return rotary() | rows | {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts}


def padded() -> Arguments:
    """A cache without pages, of four sequences."""
    arguments = paged(2)
    del arguments["block_table"]
    caches = {name: arguments[name].view(4, 2 * PAGE_SIZE, KV_HEADS, HEAD_SIZE) for name in ("k_cache", "v_cache")}
    return arguments | caches | {"cache_batch_idx": indices(2, 0), "cache_leftpad": indices(1, 0)}


def padded_pages() -> Arguments:
    """Pages of keys between pages of values."""
    caches = normal(NUM_PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_SIZE).unbind(1)
    return paged(2) | dict(zip(("k_cache", "v_cache"), caches, strict=True)) | {"cache_leftpad": indices(1, 0)}


def other_heads() -> Arguments:
    """Heads that the ops do not take as they are, and ALiBi slopes of each sequence."""
    arguments = {name: t[..., :13] if t.dim() == 4 else t for name, t in paged().items()}
    return arguments | {"alibi_slopes": normal(2, HEADS)}


def scaled() -> Arguments:
    """Of an fp8 cache, with scales by head."""
    caches = {name: ragged()[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    return ragged() | caches | {name: normal(2, KV_HEADS).exp() for name in ("k_descale", "v_descale")}


def with_kvcache(arguments: Arguments) -> Any:
    return flash_attn_with_kvcache(**arguments, causal=True, return_softmax_lse=True)


def used() -> Arguments:
    return {
        "q": normal(3, HEADS, HEAD_SIZE),
        "k": normal(10, KV_HEADS, HEAD_SIZE),
        "v": normal(10, KV_HEADS, HEAD_SIZE),
        "cu_seqlens_q": indices(0, 1, 3),
        "cu_seqlens_k": indices(0, 3, 10),
        "seqused_k": indices(2, 5),
    }


def varlen(arguments: Arguments) -> Any:
    return flash_attn_varlen_func(**arguments, causal=True, return_attn_probs=True)


def lists() -> Arguments:
    """FlashInfer's step: two sequences of 6 and 4 tokens, the last of which are new."""
    return {
        "q": normal(2, HEADS, HEAD_SIZE),
        "key": normal(2, KV_HEADS, HEAD_SIZE),
        "value": normal(2, KV_HEADS, HEAD_SIZE),
        "cache": normal(NUM_PAGES, 2, PAGE_SIZE, KV_HEADS, HEAD_SIZE),
        "append_indptr": indices(0, 1, 2),
        "seq_lens": indices(6, 4),
        "indices": indices(3, 1, 0),
        "indptr": indices(0, 2, 3),
        "last_page_len": indices(2, 4),
    }


DECODE = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
PLANNED = [lists()[name] for name in ("indptr", "indices", "last_page_len")]
DECODE.plan(*PLANNED, HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE)


def append_and_run(arguments: Arguments) -> Any:
    where = flashinfer.get_batch_indices_positions(arguments["append_indptr"], arguments["seq_lens"], 2)
    pages = [arguments[name] for name in ("indices", "indptr", "last_page_len")]
    flashinfer.append_paged_kv_cache(arguments["key"], arguments["value"], *where, arguments["cache"], *pages)
    return DECODE.run(arguments["q"], arguments["cache"], return_lse=True)


STEPS: dict[str, tuple[Callable[[], Arguments], Callable[[Arguments], Any]]] = {
    "paged": (paged, with_kvcache),
    "rotary": (rotary, with_kvcache),
    "ragged": (ragged, with_kvcache),
    "other heads": (other_heads, with_kvcache),
    "scaled": (scaled, with_kvcache),
    "padded": (padded, with_kvcache),
    "padded pages": (padded_pages, with_kvcache),
    "used": (used, varlen),
    "lists": (lists, append_and_run),
}


def all_tensors(*values: object) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors_in(values)]


def assert_all_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for tensor, wanted in zip(actual, expected, strict=True):
        assert_same_bits(tensor, wanted)


@pytest.mark.parametrize("name", STEPS)
def test_graph(name: str) -> None:
    """Captured once, and replayed with other lengths and other new tokens."""
    make, step = STEPS[name]
    arguments = make()
    with torch.inference_mode():
        graph = CPUGraph()
        with graph.capture():
            results = step(arguments)
        for turn in range(2):
            mine = copy.deepcopy(arguments)
            graph.replay()
            assert_all_same(all_tensors(results, arguments), all_tensors(step(mine), mine))
            arguments["k" if "k" in arguments else "key"].add_(1)
            for lengths in ("cache_seqlens", "seqused_k"):
                if lengths in arguments and turn == 0:
                    arguments[lengths].add_(1)


@pytest.mark.parametrize("name", ["ragged", "other heads", "scaled", "padded pages", "used", "lists"])
def test_compiled(name: str) -> None:
    """Of flash-attn's steps those with the most ops."""
    make, step = STEPS[name]
    arguments, mine = make(), make()
    torch.compiler.reset()
    with torch.inference_mode():
        results = torch.compile(step, fullgraph=True, backend="aot_eager")(arguments)
        assert_all_same(all_tensors(results, arguments), all_tensors(step(mine), mine))


FIRST_CALLS: dict[str, Callable[[], Any]] = {
    "fake tensors": FakeTensorMode,
    "graph": lambda: CPUGraph().capture(),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("where", FIRST_CALLS)
def test_what_is_kept_is_good_for_later_calls(where: str) -> None:
    """Tensors that follow from shapes and numbers are made once, but not where a call is recorded."""
    batch = 40 + [*FIRST_CALLS].index(where)  # sizes that no other test has

    def step() -> tuple[Tensor, ...]:
        q, k, v = torch.ones(batch, 2, HEADS, HEAD_SIZE), *torch.ones(2, batch, 3, KV_HEADS, HEAD_SIZE)
        rotated = flashinfer.apply_rope_pos_ids(q[:, 0], k[:, 0], torch.arange(batch), rope_theta=float(batch))
        return flash_attn_func(q, k, v), *rotated

    with torch.no_grad(), FIRST_CALLS[where]():
        step()
    with torch.no_grad():
        out, rotated, _ = step()
        torch.testing.assert_close(out, torch.ones_like(out))
        first = torch.arange(batch, dtype=torch.float32)
        torch.testing.assert_close(rotated[:, 0, 0], first.cos() - first.sin())
        assert_all_same([*step()], [*step()])


# A value that reaches other memory, and what the error names.
LEAVING: list[tuple[str, str, Tensor, str]] = [
    ("paged", "cache_seqlens", indices(5, 12), "cached_lens"),
    ("paged", "cache_seqlens", indices(-1, 2), "cached_lens"),
    ("paged", "block_table", indices([3, 8], [0, 5]), "block_tables"),
    ("paged", "block_table", indices([99, 1], [0, 5]), "block_tables"),  # which attention alone would read
    ("rotary", "cache_seqlens", indices(5, 11), "cached_lens"),
    ("ragged", "cu_seqlens_k_new", indices(0, 3, 5), "key_start_loc"),
    ("ragged", "cu_seqlens_q", indices(0, 3, 3), "query_start_loc"),
    ("scaled", "cache_seqlens", indices(5, 12), "cached_lens"),
    ("scaled", "cu_seqlens_q", indices(0, 3, 3), "query_start_loc"),
    ("padded", "cache_leftpad", indices(8, 0), "left_padding"),
    ("padded", "cache_leftpad", indices(-1, 0), "left_padding"),
    ("padded", "cache_batch_idx", indices(4, 0), "block_tables"),
    ("padded pages", "cache_leftpad", indices(8, 0), "left_padding"),
    ("padded pages", "block_table", indices([3, 8], [0, 5]), "block_tables"),
    ("other heads", "block_table", indices([3, 8], [0, 5]), "block_tables"),
    ("other heads", "cache_seqlens", indices(5, 12), "cached_lens"),
    ("used", "seqused_k", indices(4, 5), "seq_lens"),
    ("used", "cu_seqlens_k", indices(0, 3, 11), "end_blocks"),
    ("lists", "seq_lens", indices(9, 4), "positions"),
    ("lists", "indptr", indices(0, 3, 3), "positions"),
    ("lists", "indices", indices(3, 8, 0), "block_tables"),
    ("lists", "last_page_len", indices(2, 5), "last_block_lens"),
]


@pytest.mark.parametrize(("name", "argument", "value", "named"), LEAVING, ids=str)
def test_values_at_replay(name: str, argument: str, value: Tensor, named: str) -> None:
    """Nothing is written before the error, and the graph goes on with right values."""
    make, step = STEPS[name]
    arguments = make()
    with torch.inference_mode():
        graph = CPUGraph()
        with graph.capture():
            results = step(arguments)
        right = arguments[argument].clone()
        arguments[argument].copy_(value)
        memory = [tensor for name, tensor in arguments.items() if name != argument]
        kept = all_tensors(memory)
        with pytest.raises(ValueError, match=rf"^\w+: {named}: expected "):
            graph.replay()
        assert_all_same(all_tensors(memory), kept)
        with pytest.raises(ValueError, match=r": expected "):
            step(arguments)
        assert_all_same(all_tensors(memory), kept)
        arguments[argument].copy_(right)
        mine = copy.deepcopy(arguments)
        graph.replay()
        assert_all_same(all_tensors(results, arguments), all_tensors(step(mine), mine))


def test_values_of_a_compiled_step() -> None:
    """Attention's arguments are checked before the append here, too: a compiler keeps the check, and its place."""
    arguments = paged() | {"block_table": indices([99, 1], [0, 5])}
    kept = all_tensors(arguments)
    torch.compiler.reset()
    with torch.inference_mode():
        compiled = torch.compile(with_kvcache, fullgraph=True, backend="aot_eager")
        with pytest.raises(RuntimeError, match="block_tables: expected blocks of 0 to 7, got 99 at sequence 0"):
            compiled(arguments)
    assert_all_same(all_tensors(arguments), kept)
