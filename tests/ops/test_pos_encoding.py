"""rotary_embedding and rotary_embedding_neox against the reference, in place on strided rows; what is not rotated keeps
its bits.
"""

import pytest
import reference
import torch
import torch.nn.functional as F
from checks import (
    DTYPES,
    assert_close_to_reference,
    assert_raises_and_writes_nothing,
    assert_rejected,
    assert_row_gap_untouched,
    assert_same_bits,
    with_row_gap,
)
from hypothesis import given
from hypothesis import strategies as st
from op_table import OPS

from pagedattn_ext import ops


def make_arguments(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    positions: tuple[int, ...] = (0, 5, 5, 49),
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 64,
    rot_dim: int = 64,
    gaps: tuple[int, int] = (0, 0),
    flat: bool = False,
    is_neox: bool = True,
    seed: int = 0,
    cos_sin_dtype: torch.dtype | None = None,
) -> dict:
    """The arguments of rotary_embedding; `gaps` follow the rows of query and key, and `flat` makes them
    [num_tokens, num_heads * head_size].
    """
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(len(positions), num_heads, head_size, generator=generator).to(dtype)
    key = torch.randn(len(positions), num_kv_heads, head_size, generator=generator).to(dtype)
    frequency = 100.0 ** -(torch.arange(0, rot_dim, 2) / max(rot_dim, 1))
    angle = torch.arange(50)[:, None] * frequency
    query, key = (
        with_row_gap((x.flatten(1) if flat else x).to(device), gap) for x, gap in zip((query, key), gaps, strict=True)
    )
    return {
        "positions": torch.tensor(positions, dtype=torch.int64, device=device),
        "query": query,
        "key": key,
        "head_size": head_size,
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], dim=1).to(cos_sin_dtype or dtype).to(device),
        "is_neox": is_neox,
    }


def without(arguments: dict, *names: str) -> dict:
    return {name: value for name, value in arguments.items() if name not in names}


def assert_rotary(arguments: dict) -> None:
    head_size, rot_dim = arguments["head_size"], arguments["cos_sin_cache"].shape[1]
    expected = reference.rotary_embedding(**arguments)
    eager = reference.rotary_embedding(**arguments, dtype=arguments["query"].dtype)
    before = [None if arguments[name] is None else arguments[name].clone() for name in ("query", "key")]
    OPS.rotary_embedding(**arguments)
    for i, name in enumerate(("query", "key")):
        rotated = arguments[name]
        if rotated is None:
            continue
        assert_close_to_reference(rotated, expected[i], eager[i])
        assert_close_to_reference(rotated, expected[i])  # rounded once, which eager is not
        kept, same = (x.flatten(1).unflatten(1, (-1, head_size)) for x in (rotated, before[i]))
        assert_same_bits(kept[:, :, rot_dim:], same[:, :, rot_dim:])
        assert_row_gap_untouched(rotated)


@given(st.data())
def test_rotary_embedding(device, data):
    draw = data.draw
    head_size = draw(st.sampled_from([64, 80, 96, 128, 256]) | st.integers(1, 40).map(lambda half: 2 * half))
    arguments = make_arguments(
        device,
        draw(st.sampled_from(DTYPES)),
        tuple(draw(st.lists(st.integers(0, 49), max_size=7))),
        num_heads=draw(st.integers(1, 5)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_size=head_size,
        rot_dim=draw(st.just(head_size) | st.integers(1, head_size // 2).map(lambda half: 2 * half)),
        gaps=draw(st.sampled_from([(0, 0), (1, 8), (64, 33)])),
        flat=draw(st.booleans()),
        is_neox=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        cos_sin_dtype=draw(st.sampled_from([None, torch.float32])),
    )
    if draw(st.sampled_from([False, False, True])):
        arguments["key"] = None
    assert_rotary(arguments)


def as_batch(arguments: dict, batch: int, seq_len: int) -> dict:
    """The same tokens, memory and all, as a batch of sequences."""
    tokens = ("positions", "query", "key")
    return arguments | {
        name: arguments[name].unflatten(0, (batch, seq_len)) for name in tokens if arguments[name] is not None
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rot_dim", [64, 128, 20])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("gaps", [(0, 0), (1, 0), (0, 1)], ids=str)
def test_sines_of_their_own(device, gaps, is_neox, rot_dim, dtype):
    """Cosines and sines in two tensors, each aligned or not, rotate as one cache of both does."""
    arguments, same = (
        make_arguments(device, dtype, head_size=128, rot_dim=rot_dim, is_neox=is_neox, cos_sin_dtype=cos_sin_dtype)
        for cos_sin_dtype in (torch.float32, torch.float32)
    )
    cos, sin = (
        torch.cat([half.new_empty(gap), half.flatten()])[gap:].view(half.shape)
        for half, gap in zip(arguments["cos_sin_cache"].chunk(2, dim=1), gaps, strict=True)
    )
    OPS.rotary_embedding(**arguments | {"cos_sin_cache": cos}, sin_cache=sin)
    OPS.rotary_embedding(**same)
    for name in ("query", "key"):
        assert_same_bits(arguments[name], same[name])


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("gaps", [(0, 0), (8, 1)])
@pytest.mark.parametrize(("batch", "seq_len"), [(2, 3), (1, 6), (6, 1), (1, 1), (3, 0), (0, 3)])
def test_batch(device, batch, seq_len, gaps, flat, is_neox, has_key):
    """positions [batch, seq_len], and query and key with these dimensions: the tokens one after the other."""
    positions = tuple(range(40, 40 + batch * seq_len))
    arguments, same = (
        make_arguments(device, torch.bfloat16, positions, gaps=gaps, flat=flat, is_neox=is_neox)
        | ({} if has_key else {"key": None})
        for _ in range(2)
    )
    batched = as_batch(same, batch, seq_len)
    OPS.rotary_embedding(**arguments)
    OPS.rotary_embedding(**batched)
    assert batched["query"].dim() == (3 if flat else 4)
    for name in ("query", "key") if has_key else ("query",):
        assert_same_bits(batched[name].flatten(0, 1), arguments[name])
        assert_row_gap_untouched(same[name])


def test_batch_of_neox_and_wrappers(device):
    arguments, same, third = (make_arguments(device) for _ in range(3))
    OPS.rotary_embedding(**arguments)
    for query, key in (
        ops.rotary_embedding(**as_batch(same, 2, 2)),
        ops.rotary_embedding_neox(**without(as_batch(third, 2, 2), "is_neox")),
    ):
        assert query.shape == (2, 2, 4, 64) and key.shape == (2, 2, 2, 64)
        assert_same_bits(query.flatten(0, 1), arguments["query"])
        assert_same_bits(key.flatten(0, 1), arguments["key"])


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_size", "rot_dim", "gap"), [(128, 128, 64), (64, 64, 8), (80, 32, 64), (62, 62, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_with_gaps(device, dtype, head_size, rot_dim, gap, is_neox, is_batch):
    """A slice of wider heads: the same bits as of heads without gaps, and what lies between them stays as it is."""
    arguments, same = (
        make_arguments(device, dtype, head_size=head_size, rot_dim=rot_dim, is_neox=is_neox) for _ in range(2)
    )
    wide = {name: F.pad(same[name], (0, gap), value=torch.nan) for name in ("query", "key")}
    same |= {name: heads[..., :head_size] for name, heads in wide.items()}
    OPS.rotary_embedding(**arguments)
    OPS.rotary_embedding(**as_batch(same, 2, 2) if is_batch else same)
    for name, heads in wide.items():
        assert_same_bits(heads[..., :head_size].contiguous(), arguments[name])
        assert heads[..., head_size:].isnan().all()


def test_first_tokens_of_longer_sequences(device):
    """Sequences that do not follow each other: walked where there is one token each, else refused."""
    arguments = make_arguments(device, positions=tuple(range(8)))
    expected = arguments["query"].clone()
    OPS.rotary_embedding(**arguments | {"key": None})
    expected[::4] = arguments["query"][::4]
    arguments = as_batch(make_arguments(device, positions=tuple(range(8))) | {"key": None}, 2, 4)
    one = {"positions": arguments["positions"][:, :1].contiguous(), "query": arguments["query"][:, :1]}
    OPS.rotary_embedding(**arguments | one)
    assert_same_bits(arguments["query"].flatten(0, 1), expected)
    three = {"positions": arguments["positions"][:, :3].contiguous(), "query": arguments["query"][:, :3]}
    match = "^rotary_embedding: query: expected evenly spaced rows .* got shape"
    assert_raises_and_writes_nothing(OPS.rotary_embedding, arguments | three, RuntimeError, match)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_neox(device, dtype):
    """rotary_embedding with is_neox, bit for bit."""
    arguments, same = (make_arguments(device, dtype, rot_dim=32) for _ in range(2))
    OPS.rotary_embedding(**arguments)
    OPS.rotary_embedding_neox(**without(same, "is_neox"))
    assert_same_bits(same["query"], arguments["query"])
    assert_same_bits(same["key"], arguments["key"])


def test_pairs_written_out(device):
    """The pairs of both styles on one head; this also checks the reference."""
    for is_neox, pairs in [(True, [(0, 2), (1, 3)]), (False, [(0, 1), (2, 3)])]:
        arguments = make_arguments(device, positions=(7,), head_size=6, rot_dim=4, is_neox=is_neox)
        head, (cos, sin) = arguments["query"][0, 0].clone(), arguments["cos_sin_cache"][7].view(2, 2)
        expected = head.clone()
        for i, (x, y) in enumerate(pairs):
            expected[x] = head[x] * cos[i] - head[y] * sin[i]
            expected[y] = head[y] * cos[i] + head[x] * sin[i]
        torch.testing.assert_close(reference.rotary_embedding(**arguments)[0][0, 0].float(), expected)
        OPS.rotary_embedding(**arguments)
        assert_close_to_reference(arguments["query"][0, 0], expected)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rot_dim", [2, 6, 14, 32, 62, 64])
def test_partial_rotary(device, dtype, rot_dim, is_neox):
    assert_rotary(make_arguments(device, dtype, rot_dim=rot_dim, gaps=(8, 1), is_neox=is_neox))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_size", "gaps"), [(70, 256, (0, 0)), (20, 256, (1, 1)), (5, 1040, (0, 1))])
def test_many_and_large_heads(device, dtype, num_heads, head_size, gaps, is_neox):
    """More than a thread block rotates at a time."""
    arguments = make_arguments(
        device, dtype, (3,), num_heads, head_size=head_size, rot_dim=head_size, gaps=gaps, is_neox=is_neox
    )
    assert_rotary(arguments)


def test_slices_of_a_fused_qkv(device):
    """query and key are neighbours in one buffer; rotating them leaves value alone."""
    qkv = torch.randn(4, (4 + 2 + 2) * 64, generator=torch.Generator().manual_seed(0)).to(device)
    before = qkv.clone()
    arguments = make_arguments(device) | {"query": qkv[:, :256], "key": qkv[:, 256:384]}
    expected = reference.rotary_embedding(**arguments)
    OPS.rotary_embedding(**arguments)
    assert_close_to_reference(qkv[:, :384], torch.cat(expected, dim=1))
    assert_same_bits(qkv[:, 384:], before[:, 384:])


@pytest.mark.parametrize("is_neox", [True, False])
def test_heads_that_are_slices_of_wider_ones(device, is_neox):
    """Those of query and key each of a width of its own; what lies between the heads stays as it is."""
    arguments = make_arguments(device, is_neox=is_neox)
    expected = reference.rotary_embedding(**arguments)
    wide = {}
    for name, width in (("query", 72), ("key", 100)):
        wide[name] = torch.full((*arguments[name].shape[:2], width), torch.nan, device=device)
        arguments[name] = wide[name][:, :, :64].copy_(arguments[name])
    OPS.rotary_embedding(**arguments)
    for name, rotated in zip(wide, expected, strict=True):
        assert_close_to_reference(arguments[name], rotated)
        assert wide[name][:, :, 64:].isnan().all()


@pytest.mark.parametrize("is_neox", [True, False])
def test_tokens_of_a_head_side_by_side(device, is_neox):
    """[num_heads, num_tokens, head_size], transposed: the same bits as of heads that lie side by side."""
    arguments, same = (make_arguments(device, torch.bfloat16, rot_dim=62, is_neox=is_neox) for _ in range(2))
    for name in ("query", "key"):
        same[name] = same[name].transpose(0, 1).contiguous().transpose(0, 1)
    OPS.rotary_embedding(**arguments)
    OPS.rotary_embedding(**same)
    for name in ("query", "key"):
        assert_same_bits(same[name].contiguous(), arguments[name])


def test_no_tokens(device):
    assert_rotary(make_arguments(device, positions=()))


def test_position_zero_changes_nothing(device):
    arguments = make_arguments(device, positions=(0, 0))
    before = arguments["query"].clone()
    OPS.rotary_embedding(**arguments)
    assert_same_bits(arguments["query"], before)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens(device, several_threads, dtype, is_neox):
    """Large enough to run in parallel."""
    positions = tuple(token % 50 for token in range(400))
    assert_rotary(make_arguments(device, dtype, positions, num_heads=16, head_size=128, is_neox=is_neox))


@pytest.mark.parametrize("style", [{}, {"is_neox": True}, {"is_neox": False}], ids=str)
def test_wrapper(device, style):
    """is_neox is the default."""
    arguments = without(make_arguments(device), "is_neox")
    expected = reference.rotary_embedding(**arguments, is_neox=style.get("is_neox", True))
    query, key = ops.rotary_embedding(**arguments, **style)
    assert query is arguments["query"] and key is arguments["key"]
    assert_close_to_reference(query, expected[0])
    assert_close_to_reference(key, expected[1])


def test_wrapper_without_key(device):
    arguments = make_arguments(device) | {"key": None}
    expected, _ = reference.rotary_embedding(**arguments)
    query, key = ops.rotary_embedding(**arguments)
    assert query is arguments["query"] and key is None
    assert_close_to_reference(query, expected)


def test_wrapper_of_neox(device):
    arguments = make_arguments(device)
    expected = reference.rotary_embedding(**arguments)
    query, key = ops.rotary_embedding_neox(**without(arguments, "is_neox"))
    assert query is arguments["query"] and key is arguments["key"]
    assert_close_to_reference(query, expected[0])
    assert_close_to_reference(key, expected[1])


def as_positions(positions: list[list[int]]) -> dict:
    return {"positions": torch.tensor(positions)}


# what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)
ERRORS = {
    "positions dtype": ("positions", TypeError, lambda a: {"positions": a["positions"].int()}),
    "positions rank": ("positions", ValueError, lambda a: {"positions": a["positions"][None, None]}),
    "position too large": ("positions", ValueError, lambda a: {"positions": torch.tensor([0, 1, 2, 50])}),
    "position negative": ("positions", ValueError, lambda a: {"positions": torch.tensor([0, 1, 2, -1])}),
    "query rank": ("query", ValueError, lambda a: {"query": a["query"][None]}),
    "query rows": ("(query|positions)", ValueError, lambda a: {"query": a["query"][:3]}),
    "query head size": ("query", ValueError, lambda a: {"query": a["query"][:, :, :60].contiguous()}),
    "query not heads of head_size": ("query", ValueError, lambda a: {"query": a["query"].flatten(1)[:, :100]}),
    "query dtype": ("query", TypeError, lambda a: {"query": a["query"].double()}),
    "query not dense in a row": ("query", ValueError, lambda a: {"query": a["query"].mT.contiguous().mT}),
    "query is key": ("key", ValueError, lambda a: {"key": a["query"]}),
    "heads overlap": ("query", ValueError, lambda a: {"query": a["query"].as_strided((4, 4, 64), (256, 32, 1))}),
    "tokens overlap": ("query", ValueError, lambda a: {"query": a["query"][:1].expand_as(a["query"])}),
    "its tokens overlap": ("query", ValueError, lambda a: {"query": a["query"].as_strided((4, 4, 64), (32, 256, 1))}),
    "batch, query without it": ("query", ValueError, lambda a: as_batch(a, 2, 2) | {"query": a["query"]}),
    "batch, key without it": ("key", ValueError, lambda a: as_batch(a, 2, 2) | {"key": a["key"]}),
    "batch, positions without it": (
        "(query|positions)",
        ValueError,
        lambda a: as_batch(a, 2, 2) | {"positions": a["positions"]},
    ),
    "batch of other positions": ("query", ValueError, lambda a: as_batch(a, 2, 2) | as_positions([[0, 1, 2, 3]])),
    "batch, head size": (
        "query",
        ValueError,
        lambda a: as_batch(a | {"query": a["query"][..., :60].contiguous()}, 2, 2),
    ),
    "batch, not heads of head_size": (
        "query",
        ValueError,
        lambda a: as_batch(a | {"query": a["query"].flatten(1)[:, :100]}, 2, 2),
    ),
    "batch, positions strided": (
        "positions",
        ValueError,
        lambda a: as_batch(a, 2, 2) | {"positions": as_batch(a, 2, 2)["positions"].T},
    ),
    "batch, position too large": (
        "positions",
        ValueError,
        lambda a: as_batch(a, 2, 2) | as_positions([[0, 1], [2, 50]]),
    ),
    "key rows": ("key", ValueError, lambda a: {"key": a["key"][:3]}),
    "key dtype": ("key", TypeError, lambda a: {"key": a["key"].half()}),
    "key not dense in a row": ("key", ValueError, lambda a: {"key": a["key"].mT.contiguous().mT}),
    "head_size": ("(head_size|query|cos_sin_cache)", ValueError, lambda a: {"head_size": 0}),
    "cos_sin_cache rank": ("cos_sin_cache", ValueError, lambda a: {"cos_sin_cache": a["cos_sin_cache"][0]}),
    "cos_sin_cache odd": ("cos_sin_cache", ValueError, lambda a: {"cos_sin_cache": torch.ones(50, 31)}),
    "cos_sin_cache wider than a head": ("cos_sin_cache", ValueError, lambda a: {"cos_sin_cache": torch.ones(50, 66)}),
    "cos_sin_cache dtype": ("cos_sin_cache", TypeError, lambda a: {"cos_sin_cache": a["cos_sin_cache"].long()}),
    "cos_sin_cache strided": ("cos_sin_cache", ValueError, lambda a: {"cos_sin_cache": torch.ones(50, 128)[:, ::2]}),
}


# The same where the cosines are in cos_sin_cache, and the sines in sin_cache.
ERRORS_OF_SINES = {
    "cosines wider than a head": (
        "cos_sin_cache",
        ValueError,
        {"cos_sin_cache": torch.ones(50, 33), "sin_cache": torch.ones(50, 33)},
    ),
    "shape": ("sin_cache", ValueError, {"sin_cache": torch.ones(49, 32)}),
    "dtype": ("sin_cache", TypeError, {"sin_cache": torch.ones(50, 32).half()}),
    "strided": ("sin_cache", ValueError, {"sin_cache": torch.ones(50, 64)[:, ::2]}),
}


@pytest.mark.parametrize("what", ERRORS_OF_SINES)
def test_sines_are_checked(device, what):
    argument, error, changes = ERRORS_OF_SINES[what]
    arguments = make_arguments(device) | {"cos_sin_cache": torch.ones(50, 32), "sin_cache": torch.ones(50, 32)}
    changed = {name: tensor.to(device) for name, tensor in changes.items()}
    assert_rejected("rotary_embedding", arguments | changed, argument, error)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("what", ERRORS)
def test_rotary_embedding_rejects(device, what, is_neox):
    argument, error, change = ERRORS[what]
    arguments = make_arguments(device, is_neox=is_neox)
    assert_rejected("rotary_embedding", arguments | change(arguments), argument, error)


@pytest.mark.parametrize("what", ERRORS)
def test_rotary_embedding_neox_rejects(device, what):
    argument, error, change = ERRORS[what]
    arguments = without(make_arguments(device), "is_neox")
    assert_rejected("rotary_embedding_neox", arguments | change(arguments), argument, error)


@pytest.mark.parametrize("position", [-1, 50, 2**40])
def test_bad_position_names_its_token(device, position):
    arguments = make_arguments(device, positions=(0, 1, position, 2))
    match = f"positions: expected .*, got {position} at token 2"
    assert_raises_and_writes_nothing(OPS.rotary_embedding, arguments, RuntimeError, match)
