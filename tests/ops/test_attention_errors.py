"""The attention ops called wrongly: each argument in turn, nothing written, a message that says what and why."""

import math

import pytest
import torch
from attention_cases import OPS, Case, assert_attention, make_arguments, make_v1_arguments, make_v2_arguments
from checks import assert_raises_and_writes_nothing, assert_rejected

# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)


def entry(arguments: dict, name: str, index: tuple[int, ...], value: int) -> dict:
    """The change of one entry of one tensor."""
    tensor = arguments[name].clone()
    tensor[index] = value
    return {name: tensor}


def columns_first(arguments: dict, name: str) -> dict:
    """The same elements and shape, but the last two dimensions lie in memory the other way round."""
    return {name: arguments[name].mT.contiguous().mT}


def starts(*query_start_loc: int) -> dict:
    return {"query_start_loc": torch.tensor(query_start_loc, dtype=torch.int32)}


def with_query(arguments: dict, *shape: int) -> dict:
    """The changes that make query, and out where there is one, of this shape."""
    query = arguments["query"].new_ones(shape)
    return {"query": query, "out": query.clone()} if "out" in arguments else {"query": query}


def with_caches(head_size: int, block_size: int) -> dict:
    shapes = {"key_cache": (7, 2, head_size // 4, block_size, 4), "value_cache": (7, 2, head_size, block_size)}
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def fp8_caches(dtype: torch.dtype = torch.float8_e4m3fn, kv_cache_dtype: str = "auto") -> dict:
    """The changes that make the caches of this dtype."""
    key_cache, value_cache = torch.ones(7, 2, 1, 8, 16).to(dtype), torch.ones(7, 2, 16, 8).to(dtype)
    return {"key_cache": key_cache, "value_cache": value_cache, "kv_cache_dtype": kv_cache_dtype}


ERRORS = {
    "query rank": ("query", ValueError, lambda a: {"query": a["query"].flatten(1)}),
    "query dtype": ("query", TypeError, lambda a: {"query": a["query"].double()}),
    "query not dense in a row": ("query", ValueError, lambda a: columns_first(a, "query")),
    "query head size": ("(query|key_cache)", ValueError, lambda a: {"query": a["query"][:, :, :12].contiguous()}),
    "key_cache rank": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"].flatten(2)}),
    "key_cache dtype": (
        "(query|key_cache|value_cache)",
        TypeError,
        lambda a: {"key_cache": a["key_cache"].half().reshape(7, 2, 2, 8, 8)},
    ),
    "scale": ("scale", ValueError, lambda a: {"scale": math.nan}),
    "scale infinite as float32": ("scale", ValueError, lambda a: {"scale": -1e60}),
    "key_cache float64": ("key_cache", TypeError, lambda a: {"key_cache": a["key_cache"].double()}),
    "key_cache uint8 but auto": ("key_cache", TypeError, lambda a: fp8_caches(torch.uint8, "auto")),
    "key_cache fp32 but fp8": ("(key_cache|kv_cache_dtype)", TypeError, lambda a: {"kv_cache_dtype": "fp8"}),
    "key_cache e5m2 but fp8": (
        "(key_cache|kv_cache_dtype)",
        TypeError,
        lambda a: fp8_caches(torch.float8_e5m2, "fp8"),
    ),
    "key_cache e4m3 but fp8_e5m2": (
        "(key_cache|kv_cache_dtype)",
        TypeError,
        lambda a: fp8_caches(torch.float8_e4m3fn, "fp8_e5m2"),
    ),
    "value_cache of the other float8": (
        "value_cache",
        TypeError,
        lambda a: fp8_caches() | {"value_cache": fp8_caches(torch.float8_e5m2)["value_cache"]},
    ),
    "key_cache fp8 with x of 8": (
        "key_cache",
        ValueError,
        lambda a: fp8_caches() | {"key_cache": fp8_caches()["key_cache"].reshape(7, 2, 2, 8, 8)},
    ),
    "query of fp8": ("query", TypeError, lambda a: fp8_caches() | {"query": a["query"].to(torch.float8_e4m3fn)}),
    "fp8 head size": (
        "(query|key_cache)",
        ValueError,
        lambda a: fp8_caches() | with_query(a, 2, 4, 24),
    ),
    "kv_cache_dtype unknown": ("kv_cache_dtype", ValueError, lambda a: {"kv_cache_dtype": "fp4"}),
    "k_scale dtype": ("k_scale", TypeError, lambda a: fp8_caches() | {"k_scale": torch.ones((), dtype=torch.float64)}),
    "v_scale dtype": ("v_scale", TypeError, lambda a: fp8_caches() | {"v_scale": torch.ones((), dtype=torch.float16)}),
    "k_scale shape": ("k_scale", ValueError, lambda a: fp8_caches() | {"k_scale": torch.ones(2)}),
    "v_scale empty": ("v_scale", ValueError, lambda a: fp8_caches() | {"v_scale": torch.ones(0)}),
    "k_scale 0": ("k_scale", ValueError, lambda a: fp8_caches() | {"k_scale": torch.zeros(())}),
    "v_scale NaN": ("v_scale", ValueError, lambda a: fp8_caches() | {"v_scale": torch.tensor(math.nan)}),
    "k_scale of an fp32 cache, dtype": ("k_scale", TypeError, lambda a: {"k_scale": torch.ones(1).half()}),
    "v_scale of an fp32 cache, shape": ("v_scale", ValueError, lambda a: {"v_scale": torch.ones(2)}),
    "key_cache x": ("key_cache", ValueError, lambda a: {"key_cache": a["key_cache"].reshape(-1, 2, 2, 8, 8)}),
    "key_cache not contiguous": ("key_cache", ValueError, lambda a: columns_first(a, "key_cache")),
    "value_cache rank": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"].flatten(2)}),
    "value_cache dtype": ("value_cache", TypeError, lambda a: {"value_cache": a["value_cache"].half()}),
    "value_cache shape": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"][:-1]}),
    "value_cache layout": ("value_cache", ValueError, lambda a: {"value_cache": a["value_cache"].mT.contiguous()}),
    "value_cache not contiguous": ("value_cache", ValueError, lambda a: columns_first(a, "value_cache")),
    "block_tables dtype": ("block_tables", TypeError, lambda a: {"block_tables": a["block_tables"].short()}),
    "block_tables rank": ("block_tables", ValueError, lambda a: {"block_tables": a["block_tables"].flatten()}),
    "block_tables rows": ("block_tables", ValueError, lambda a: {"block_tables": a["block_tables"][:1]}),
    "seq_lens dtype": ("seq_lens", TypeError, lambda a: {"seq_lens": a["seq_lens"].short()}),
    "seq_lens rank": ("seq_lens", ValueError, lambda a: {"seq_lens": a["seq_lens"][:, None]}),
    "seq_lens of 2 ** 32 + 1": (
        "seq_lens",
        ValueError,
        lambda a: {"seq_lens": a["seq_lens"].long() + 2**32},
    ),
    "block id of 2 ** 32": (
        "block_tables",
        ValueError,
        lambda a: {"block_tables": a["block_tables"].long() + 2**32},
    ),
    "seq_lens negative": ("seq_lens", ValueError, lambda a: entry(a, "seq_lens", (1,), -1)),
    "seq_lens past block_tables": ("seq_lens", ValueError, lambda a: entry(a, "seq_lens", (1,), 99)),
    "block id too large": ("block_tables", ValueError, lambda a: entry(a, "block_tables", (1, 1), 7)),
    "block id negative": ("block_tables", ValueError, lambda a: entry(a, "block_tables", (1, 0), -1)),
    "alibi_slopes shape": ("alibi_slopes", ValueError, lambda a: {"alibi_slopes": torch.ones(3)}),
    "alibi_slopes of other sequences": ("alibi_slopes", ValueError, lambda a: {"alibi_slopes": torch.ones(1, 4)}),
    "alibi_slopes dtype": ("alibi_slopes", TypeError, lambda a: {"alibi_slopes": torch.ones(4).half()}),
    "2-D alibi_slopes dtype": ("alibi_slopes", TypeError, lambda a: {"alibi_slopes": torch.ones(2, 4).half()}),
    "2-D alibi_slopes strided": ("alibi_slopes", ValueError, lambda a: {"alibi_slopes": torch.ones(4, 2).T}),
    "heads not a multiple": ("(query|num_kv_heads|key_cache)", ValueError, lambda a: with_query(a, 2, 3, 16)),
    "head size": (
        "(query|key_cache)",
        ValueError,
        lambda a: with_query(a, 2, 4, 516) | with_caches(516, 8),
    ),
    "block size": (
        "(key_cache|value_cache|block_size)",
        ValueError,
        lambda a: with_caches(16, 12) | ({"block_size": 12} if "block_size" in a else {}),
    ),
}
V1_ERRORS = {
    "out dtype": ("out", TypeError, lambda a: {"out": a["out"].half()}),
    "out shape": ("out", ValueError, lambda a: {"out": a["out"][:1]}),
    "out not dense in a row": ("out", ValueError, lambda a: columns_first(a, "out")),
    "num_kv_heads": ("num_kv_heads", ValueError, lambda a: {"num_kv_heads": 1}),
    "block_size": ("block_size", ValueError, lambda a: {"block_size": 16}),
    "max_seq_len": ("max_seq_len", ValueError, lambda a: {"max_seq_len": 11}),
}
V2_ERRORS = {
    "exp_sums dtype": ("exp_sums", TypeError, lambda a: {"exp_sums": a["exp_sums"].double()}),
    "exp_sums shape": ("exp_sums", ValueError, lambda a: {"exp_sums": a["exp_sums"][:, :3].contiguous()}),
    "exp_sums rank": ("exp_sums", ValueError, lambda a: {"exp_sums": a["exp_sums"][:, :, 0]}),
    "max_logits dtype": ("max_logits", TypeError, lambda a: {"max_logits": a["max_logits"].half()}),
    "max_logits shape": ("max_logits", ValueError, lambda a: {"max_logits": a["max_logits"][:1]}),
    "tmp_out dtype": ("tmp_out", TypeError, lambda a: {"tmp_out": a["tmp_out"].half()}),
    "tmp_out shape": ("tmp_out", ValueError, lambda a: {"tmp_out": a["tmp_out"][..., :8].contiguous()}),
    "too few partitions": (
        "(exp_sums|max_logits|tmp_out)",
        ValueError,
        lambda a: {name: a[name][:, :, :0] for name in ("exp_sums", "max_logits", "tmp_out")},
    ),
    "too few partitions for any max_seq_len": ("exp_sums", ValueError, lambda a: {"max_seq_len": 2**63 - 1}),
}
RAGGED_ERRORS = {
    "query_start_loc dtype": (
        "query_start_loc",
        TypeError,
        lambda a: {"query_start_loc": torch.tensor([0, 1, 2]).short()},
    ),
    "query_start_loc shape": ("query_start_loc", ValueError, lambda a: starts(0, 2)),
    "query_start_loc start": ("query_start_loc", ValueError, lambda a: starts(1, 1, 2)),
    "query_start_loc end": ("query_start_loc", ValueError, lambda a: starts(0, 1, 3)),
    "query_start_loc falls": ("query_start_loc", ValueError, lambda a: starts(0, 3, 2)),
    "no query_start_loc, rows": ("query", ValueError, lambda a: with_query(a, 3, 4, 16) | {"query_start_loc": None}),
    "sliding_window": ("sliding_window", ValueError, lambda a: {"sliding_window": 0}),
    "right_window though causal": ("right_window", ValueError, lambda a: {"right_window": 1}),
    "right_window below 0": ("right_window", ValueError, lambda a: {"causal": False, "right_window": -1}),
    "attention_chunk": ("attention_chunk", ValueError, lambda a: {"attention_chunk": -1}),
    "softcap": ("softcap", ValueError, lambda a: {"softcap": -1.0}),
    "softcap NaN": ("softcap", ValueError, lambda a: {"softcap": math.nan}),
    "softcap infinite as float32": ("softcap", ValueError, lambda a: {"softcap": 1e60}),
    "softcap 0 as float32": ("softcap", ValueError, lambda a: {"softcap": 1e-60}),
    "softcap subnormal": ("softcap", ValueError, lambda a: {"softcap": 1e-40}),
    "max_seq_len": ("max_seq_len", ValueError, lambda a: {"max_seq_len": 11}),
    "max_seq_len below 0": ("max_seq_len", ValueError, lambda a: {"max_seq_len": -1}),
    "sinks shape": ("sinks", ValueError, lambda a: {"sinks": torch.ones(2)}),
    "sinks dtype": ("sinks", TypeError, lambda a: {"sinks": torch.ones(4).half()}),
}
SMALL = Case(((1, 9), (1, 12)), head_size=16, block_size=8)  # 7 blocks, 2 of them for each sequence


@pytest.mark.parametrize("what", [*ERRORS, *V1_ERRORS])
def test_paged_attention_v1_rejects(device, what):
    argument, error, change = (ERRORS | V1_ERRORS)[what]
    arguments = make_v1_arguments(SMALL, device)
    assert_rejected("paged_attention_v1", arguments | change(arguments), argument, error)


@pytest.mark.parametrize("what", [*ERRORS, *V1_ERRORS, *V2_ERRORS])
def test_paged_attention_v2_rejects(device, what):
    argument, error, change = (ERRORS | V1_ERRORS | V2_ERRORS)[what]
    arguments = make_v2_arguments(SMALL, device)
    assert_rejected("paged_attention_v2", arguments | change(arguments), argument, error)


@pytest.mark.parametrize("what", [*ERRORS, *RAGGED_ERRORS])
def test_paged_attention_rejects(device, what):
    argument, error, change = (ERRORS | RAGGED_ERRORS)[what]
    arguments = make_arguments(SMALL, device)
    assert_rejected("paged_attention", arguments | change(arguments), argument, error)


def test_more_than_int32_counts(device):
    """Rows, tokens and blocks that kernels could not number. A row over and over takes no memory."""
    arguments = make_arguments(SMALL, device)
    query = arguments["query"][:1].expand(2**31, -1, -1)
    with pytest.raises(RuntimeError, match=r"query: expected at most 536870912 rows, got 2147483648"):  # of 2 heads
        OPS.paged_attention(**arguments | {"query": query})
    keys = query[:, :2]
    starts = torch.tensor([0, 1], dtype=torch.int32, device=query.device)
    with pytest.raises(RuntimeError, match=r"key: expected at most 1073741824 keys, got 2147483648"):
        OPS.varlen_attention(query[:1], keys, keys, starts, starts, scale=1.0)
    cache = torch.zeros(1, 8, 2, 16, device=query.device).expand(2**31, -1, -1, -1)
    with pytest.raises(RuntimeError, match=r"key_cache: expected 0 to 2147483647 blocks, got 2147483648"):
        OPS.paged_attention(**arguments | {"key_cache": cache, "value_cache": cache})


def test_the_longest_sequence(device, monkeypatch):
    """Its last chunk would end beyond int32, were a sequence any longer. No token before the chunk is looked at."""
    monkeypatch.setenv("PAGEDATTN_CHECK", "1")
    arguments = make_arguments(Case(((1, 256),), block_size=256, sliding_window=100), device)
    expected = OPS.paged_attention(**arguments)
    longest, num_blocks = 2**30, 2**30 // 256
    table = torch.full((1, num_blocks), -1, dtype=torch.int32, device=device)
    table[0, -1] = arguments["block_tables"][0, 0]
    arguments |= {"block_tables": table, "sliding_window": None, "attention_chunk": longest - 100}
    arguments |= {"seq_lens": torch.tensor([longest], dtype=torch.int32, device=device), "max_seq_len": longest}
    for result, as_expected in zip(OPS.paged_attention(**arguments), expected, strict=True):
        torch.testing.assert_close(result, as_expected)
    arguments |= {"seq_lens": arguments["seq_lens"] + 1, "block_tables": torch.nn.functional.pad(table, (0, 1))}
    with pytest.raises(RuntimeError, match=r"seq_lens: expected 0 to 1073741824 .*, got 1073741825"):
        OPS.paged_attention(**arguments | {"max_seq_len": longest + 1})


@pytest.mark.parametrize("block_id", [-1, 7, 2**31 - 1])
def test_bad_block_id_names_its_row(device, block_id):
    arguments = make_v1_arguments(SMALL, device)
    arguments["block_tables"][1, 1] = block_id
    match = f"block_tables: expected .*, got {block_id} at sequence 1"
    assert_raises_and_writes_nothing(OPS.paged_attention_v1, arguments, RuntimeError, match)


# ---- PAGEDATTN_CHECK: CUDA kernels' callers must ask for the values of index tensors to be checked -------------------


@pytest.mark.devices("simt", "cuda")
@pytest.mark.parametrize("request_text", [None, "", "0"])
def test_values_on_a_gpu_are_not_checked_unasked(device, monkeypatch, request_text):
    """A length beyond max_seq_len: no error, and nothing is read past it."""
    if request_text is None:
        monkeypatch.delenv("PAGEDATTN_CHECK", raising=False)
    else:
        monkeypatch.setenv("PAGEDATTN_CHECK", request_text)
    OPS.paged_attention_v1(**make_v1_arguments(SMALL, device) | {"max_seq_len": 11})


@pytest.mark.devices("simt", "cuda")
@pytest.mark.parametrize("lens", [((1, 1300), (1, 30)), ((1, 1300), (40, 600))], ids=["decode", "beside prefill"])
def test_lengths_beyond_max_seq_len_on_a_gpu_are_attended_to_all_the_same(device, monkeypatch, lens):
    """The tokens are parted otherwise, and none is left out, as long as they are in the table."""
    monkeypatch.delenv("PAGEDATTN_CHECK", raising=False)
    monkeypatch.setenv("PAGEDATTN_SIMT_MULTIPROCESSORS", "132")
    arguments = make_arguments(Case(lens, torch.float16), device)
    for max_seq_len in (0, 1, 513, 1025):
        assert_attention(arguments, *OPS.paged_attention(**arguments, max_seq_len=max_seq_len))


@pytest.mark.devices("simt", "cuda")
def test_unknown_value_of_the_variable(device, monkeypatch):
    monkeypatch.setenv("PAGEDATTN_CHECK", "yes")
    with pytest.raises(RuntimeError, match="PAGEDATTN_CHECK: expected 0 or 1, got yes"):
        OPS.paged_attention_v1(**make_v1_arguments(SMALL, device))


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("request_text", ["0", "yes"])
def test_values_on_the_cpu_are_always_checked(device, monkeypatch, request_text):
    monkeypatch.setenv("PAGEDATTN_CHECK", request_text)
    with pytest.raises(RuntimeError, match="max_seq_len: expected at least 12"):
        OPS.paged_attention_v1(**make_v1_arguments(SMALL, device) | {"max_seq_len": 11})
