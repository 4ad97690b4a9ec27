"""pagedattn_ext.flashinfer.sampling: what each function asks of the ops; seeds and generators; signatures; errors."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from checks import assert_same_bits
from torch import Tensor

from pagedattn_ext import CPUGraph, flashinfer, ops
from pagedattn_ext.flashinfer import sampling

EMPTY = inspect.Parameter.empty
LOGITS = 2 * torch.randn(5, 90, generator=torch.Generator().manual_seed(0))
PROBS = LOGITS.softmax(-1)
INDICES = torch.tensor([4, 0, 0], dtype=torch.int64)
SEED = {"seed": 11, "offset": 3}
TOP_K, TOP_P = torch.tensor([1, 2, 30, 90, 4], dtype=torch.int32), torch.tensor([0.1, 0.5, 0.9, 1.0, 0.3])

# A function, its own arguments, and the filters that the reference gets for row i.
Case = tuple[Callable[..., Any], dict[str, Any], Callable[[int], dict[str, Any]]]
SAMPLERS: dict[str, Case] = {
    "probs": (sampling.sampling_from_probs, {"probs": PROBS}, lambda i: {}),
    "logits": (sampling.sampling_from_logits, {"logits": LOGITS}, lambda i: {}),
    "top_p": (sampling.top_p_sampling_from_probs, {"probs": PROBS, "top_p": 0.7}, lambda i: {"top_p": 0.7}),
    "top_k": (sampling.top_k_sampling_from_probs, {"probs": PROBS, "top_k": 7}, lambda i: {"top_k": 7}),
    "min_p": (sampling.min_p_sampling_from_probs, {"probs": PROBS, "min_p": 0.3}, lambda i: {"min_p": 0.3}),
    "top_p of rows": (
        sampling.top_p_sampling_from_probs,
        {"probs": PROBS, "top_p": TOP_P.double()},
        lambda i: {"top_p": float(TOP_P[i])},
    ),
    "top_k of rows": (
        sampling.top_k_sampling_from_probs,
        {"probs": PROBS, "top_k": TOP_K.to(torch.int16)},
        lambda i: {"top_k": int(TOP_K[i])},
    ),
    "top_k, then top_p": (
        sampling.top_k_top_p_sampling_from_probs,
        {"probs": PROBS, "top_k": TOP_K, "top_p": 0.6},
        lambda i: {"top_k": int(TOP_K[i]), "top_p": 0.6},
    ),
    "top_k and top_p": (
        sampling.top_k_top_p_sampling_from_probs,
        {"probs": PROBS, "top_k": 9, "top_p": 0.6, "filter_apply_order": "joint"},
        lambda i: {"top_k": 9, "top_p": 0.6, "top_k_first": False},
    ),
    "top_k, then top_p of logits": (
        sampling.top_k_top_p_sampling_from_logits,
        {"logits": LOGITS, "top_k": 9, "top_p": TOP_P},
        lambda i: {"top_k": 9, "top_p": float(TOP_P[i])},
    ),
    "top_k and top_p of logits": (
        sampling.top_k_top_p_sampling_from_logits,
        {"logits": LOGITS, "top_k": 9, "top_p": 0.6, "filter_apply_order": "joint"},
        lambda i: {"top_k": 9, "top_p": 0.6, "top_k_first": False},
    ),
}


@pytest.mark.parametrize("case", SAMPLERS)
@pytest.mark.parametrize("indices", [None, INDICES], ids=["each row", "indices"])
def test_sampling(case: str, indices: Tensor | None) -> None:
    function, arguments, filters = SAMPLERS[case]
    expected = [
        reference.token_at(reference.kept_probs(PROBS[row], **filters(row)), reference.uniform_number(11, 3, i))
        for i, row in enumerate(range(5) if indices is None else indices.tolist())
    ]
    samples = function(**arguments, **SEED, indices=indices)
    assert samples.tolist() == expected
    assert samples.dtype == (torch.int32 if indices is None else torch.int64)
    if "return_valid" in inspect.signature(function).parameters:
        again, valid = function(**arguments, **SEED, indices=indices, return_valid=True, check_nan=True)
        assert again.tolist() == expected and valid.tolist() == [True] * len(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_sampled_from(dtype: torch.dtype) -> None:
    probs, logits = PROBS.to(dtype), LOGITS.to(dtype)
    top_p = sampling.top_p_renorm_probs(probs, TOP_P)
    assert_same_bits(top_p, ops.renorm_probs(probs.float(), top_p=TOP_P))
    assert sampling.softmax(logits).dtype == torch.float32
    torch.testing.assert_close(sampling.softmax(logits, 2.0), (logits.float() / 2).softmax(-1))
    if dtype != torch.float64:
        assert_same_bits(sampling.top_k_renorm_probs(probs, TOP_K), ops.renorm_probs(probs, TOP_K))
        assert_same_bits(sampling.top_k_mask_logits(logits, 3), ops.top_k_mask_logits(logits, 3))
    assert sampling.top_p_renorm_prob is sampling.top_p_renorm_probs
    assert sampling.top_k_renorm_prob is sampling.top_k_renorm_probs


def test_chain_speculative_sampling() -> None:
    """Counts are added to those that are given."""
    draft, target = PROBS[:4].view(2, 2, 90), PROBS[[4, 0, 1, 2, 3, 4]].view(2, 3, 90)
    token_ids = torch.tensor([[1, 2], [3, 4]])
    accepted, emitted = torch.full((2,), 5, dtype=torch.int32), torch.full((2,), 7, dtype=torch.int32)
    expected = reference.chain_speculative_sampling(draft, token_ids, target, 11, 3)
    actual = sampling.chain_speculative_sampling(draft, token_ids, target, accepted, emitted, **SEED)
    assert actual[1] is accepted and actual[2] is emitted
    assert (actual[0].tolist(), (accepted - 5).tolist(), (emitted - 7).tolist()) == expected


def test_a_generator_gives_the_seed() -> None:
    """Equal states give equal samples, and a call changes the state; without a generator it is torch's own."""
    generator = torch.Generator().manual_seed(3)
    twin = generator.clone_state()
    draws = [sampling.sampling_from_probs(PROBS, INDICES.repeat(20), generator=generator) for _ in range(2)]
    assert_same_bits(sampling.sampling_from_probs(PROBS, INDICES.repeat(20), generator=twin), draws[0])
    assert not torch.equal(*draws)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        assert_same_bits(sampling.sampling_from_probs(PROBS, INDICES.repeat(20)), draws[0])


def test_seeds_of_any_kind() -> None:
    """ints with a sign and without, tensors of both, of one element or of one for each sample."""
    indices = torch.zeros(40, dtype=torch.int32)
    unsigned = torch.tensor([2**64 - 5], dtype=torch.uint64)
    expected = sampling.sampling_from_probs(PROBS, indices, seed=-5, offset=2)
    for seed, offset in ((2**64 - 5, 2), (unsigned, torch.tensor([2])), (torch.full((40,), -5), torch.tensor([2]))):
        assert_same_bits(sampling.sampling_from_probs(PROBS, indices, seed=seed, offset=offset), expected)
    zero = sampling.sampling_from_probs(PROBS, indices, seed=-5, offset=0)
    assert_same_bits(sampling.sampling_from_probs(PROBS, indices, seed=-5), zero)


def step(logits: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    probs = sampling.softmax(logits, 0.8)
    return sampling.top_k_top_p_sampling_from_probs(probs, 20, 0.9, seed=seed, offset=offset)


def test_compiled_and_captured() -> None:
    """As eager, with a seed and an offset that change."""
    seed, offset = torch.tensor([5]), torch.tensor([0])
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        captured = step(LOGITS, seed, offset)
    for _ in range(3):
        offset += 1
        expected = step(LOGITS, seed, offset)
        graph.replay()
        assert_same_bits(captured, expected)
        assert_same_bits(compiled(LOGITS, seed, offset), expected)


def test_a_replay_draws_a_seed() -> None:
    """A graph without a seed must not sample the same tokens for ever."""
    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        samples = sampling.sampling_from_probs(PROBS.repeat(20, 1))
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(samples.clone())
    assert not torch.equal(*draws)


# ---- signatures, those of FlashInfer 0.7.4 in order ------------------------------------------------------------------

RANDOM = {"deterministic": True, "generator": None, "check_nan": False, "seed": None, "offset": None}
INDEXED = {"indices": None, **RANDOM}
ORDERED = {"indices": None, "filter_apply_order": "top_k_first", **RANDOM}
SIGNATURES: dict[str, dict[str, Any]] = {
    "softmax": {"logits": EMPTY, "temperature": None, "enable_pdl": None},
    "sampling_from_logits": {"logits": EMPTY, **INDEXED},
    "sampling_from_probs": {"probs": EMPTY, **INDEXED, "return_valid": False},
    "top_p_sampling_from_probs": {"probs": EMPTY, "top_p": EMPTY, **INDEXED, "return_valid": False},
    "top_k_sampling_from_probs": {"probs": EMPTY, "top_k": EMPTY, **INDEXED, "return_valid": False},
    "min_p_sampling_from_probs": {"probs": EMPTY, "min_p": EMPTY, **INDEXED, "return_valid": False},
    "top_k_top_p_sampling_from_logits": {
        **{"logits": EMPTY, "top_k": EMPTY, "top_p": EMPTY, **ORDERED, "top_k_max": None}
    },
    "top_k_top_p_sampling_from_probs": {
        **{"probs": EMPTY, "top_k": EMPTY, "top_p": EMPTY, **ORDERED, "return_valid": False, "top_k_max": None}
    },
    "top_p_renorm_probs": {"probs": EMPTY, "top_p": EMPTY, "is_deterministic": False},
    "top_k_renorm_probs": {"probs": EMPTY, "top_k": EMPTY, "is_deterministic": False},
    "top_k_mask_logits": {"logits": EMPTY, "top_k": EMPTY},
    "chain_speculative_sampling": {
        **{"draft_probs": EMPTY, "draft_token_ids": EMPTY, "target_probs": EMPTY},
        **{"maybe_output_accepted_token_num": None, "maybe_output_emitted_draft_token_num": None},
        **{"deterministic": True, "generator": None, "seed": None, "offset": None},
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    """And the name is one of the package and of its module, which programs import by its own name."""
    function = getattr(flashinfer, name)
    assert function is getattr(sys.modules["pagedattn_ext.flashinfer.sampling"], name)
    actual = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    assert list(actual.items()) == list(SIGNATURES[name].items())


# ---- errors: of the function that is called, and of its argument -----------------------------------------------------

COUNTS = torch.zeros(5)
VALID: dict[str, Any] = {
    **{"probs": PROBS, "logits": LOGITS, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    **{"draft_probs": PROBS[:2, None], "draft_token_ids": INDICES[:2, None], "target_probs": PROBS[:4].view(2, 2, 90)},
}
ERRORS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("softmax", {"temperature": -1.0}, ValueError, "temperature: expected 0 or more, finite, got -1"),
    ("softmax", {"temperature": 1e39}, ValueError, r"temperature: expected 0 or more, finite, got 1e\+39"),
    ("softmax", {"temperature": TOP_P.cfloat()}, TypeError, "temperature: expected a real dtype, got complex64"),
    ("softmax", {"temperature": True}, TypeError, "temperature: expected a number or a tensor, got bool"),
    ("sampling_from_logits", {"logits": LOGITS[0]}, ValueError, "logits: expected 2 dimensions, got 1"),
    ("sampling_from_logits", {"logits": LOGITS * torch.nan, "check_nan": True}, ValueError, "logits: expected no NaN"),
    ("sampling_from_probs", {"probs": PROBS.int()}, TypeError, "probs: expected dtype float32"),
    ("sampling_from_probs", {"probs": PROBS * torch.nan, "check_nan": True}, ValueError, "probs: expected no NaN"),
    ("sampling_from_probs", {"indices": torch.tensor([5])}, ValueError, "indices: expected rows of probs, got 5"),
    ("sampling_from_probs", {"indices": [0]}, TypeError, "indices: expected a torch.Tensor, got list"),
    ("sampling_from_probs", {"seed": "x"}, TypeError, "seed: expected an int, got str"),
    ("sampling_from_probs", {"seed": torch.tensor([1, 2])}, ValueError, r"seed: expected shape \[5\] or \[1\]"),
    ("sampling_from_probs", {"seed": 1, "offset": torch.tensor([2])}, ValueError, "offset: expected int"),
    ("sampling_from_probs", {"probs": PROBS.clone().requires_grad_()}, RuntimeError, "probs: requires grad"),
    ("top_p_sampling_from_probs", {"top_p": 1.5}, ValueError, r"top_p: expected 0 to 1, got 1\.5"),
    ("top_p_sampling_from_probs", {"top_p": -1e-60}, ValueError, "top_p: expected 0 to 1, got -1e-60"),
    ("top_p_sampling_from_probs", {"top_p": torch.tensor(0.5)}, ValueError, "top_p: .+ got a 0-dimensional tensor"),
    ("top_k_sampling_from_probs", {"top_k": 0}, ValueError, "top_k: expected 1 or more, got 0"),
    ("top_k_sampling_from_probs", {"top_k": torch.ones(5)}, TypeError, "top_k: expected a tensor of ints"),
    ("top_k_sampling_from_probs", {"top_k": TOP_K[:, None]}, ValueError, "top_k: .+ got a 2D tensor"),
    ("min_p_sampling_from_probs", {"min_p": TOP_P[:1]}, ValueError, "min_p: .+ expected length 5, got 1"),
    ("top_k_top_p_sampling_from_probs", {"filter_apply_order": "x"}, ValueError, "filter_apply_order: expected 'top_k"),
    ("top_k_top_p_sampling_from_logits", {"top_p": -0.1}, ValueError, "top_p: expected 0 to 1"),
    ("top_p_renorm_probs", {"probs": PROBS.cfloat()}, TypeError, "probs: expected a real dtype, got complex64"),
    ("top_p_renorm_probs", {"top_p": 2.0}, ValueError, "top_p: expected 0 to 1, got 2"),
    ("top_k_renorm_probs", {"top_k": -1}, ValueError, "top_k: expected 1 or more, got -1"),
    ("top_k_mask_logits", {"top_k": 1.5}, TypeError, "top_k: expected an int, got float"),
    *(
        (
            "chain_speculative_sampling",
            {name: VALID[name].cfloat()},
            TypeError,
            f"{name}: expected a real dtype, got co",
        )
        for name in ("draft_probs", "target_probs")
    ),
    ("chain_speculative_sampling", {"draft_token_ids": INDICES[:2, None] + 90}, ValueError, "draft_token_ids: "),
    (
        "chain_speculative_sampling",
        {"maybe_output_accepted_token_num": COUNTS},
        TypeError,
        "maybe_output_accepted_token_num: expected dtype int32",
    ),
    (
        "chain_speculative_sampling",
        {"maybe_output_emitted_draft_token_num": COUNTS.int()},
        ValueError,
        r"maybe_output_emitted_draft_token_num: expected shape \[2\]",
    ),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), ERRORS)
def test_errors(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {parameter: VALID[parameter] for parameter in SIGNATURES[name] if parameter in VALID}
    with pytest.raises(error, match=f"^{name}: {message}"):
        getattr(flashinfer, name)(**arguments | change)
