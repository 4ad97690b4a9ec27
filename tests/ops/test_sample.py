"""softmax, renorm_probs, top_k_mask_logits, sample_from_probs and chain_speculative_sampling."""

import math
from collections.abc import Callable

import pytest
import reference
import torch
from checks import (
    DTYPES,
    assert_close_to_reference,
    assert_raises_and_writes_nothing,
    assert_rejected,
    assert_same_bits,
)
from op_calls import make_arguments
from op_table import OPS
from torch import Tensor

from pagedattn_ext import _C, CPUGraph, ops

CPU = pytest.mark.devices("cpu")
NAN, INF = math.nan, math.inf
SEED = 2**63 + 12345  # all of its bits count
VOCAB_SIZES = [1, 5, 65, 700]
FILTERS = [
    {},
    {"top_k": 3},
    {"top_k": 70},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.5},
    {"top_k": 40, "top_p": 0.5, "top_k_first": False},
    {"top_k": 2000, "top_p": 1.0, "min_p": 0.0},
]
SPREADS = [0.2, 4.0]  # of logits: flat, and a few tokens that have all


def make_probs(num_rows: int, vocab_size: int, dtype: torch.dtype, spread: float, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = spread * torch.randn(num_rows, vocab_size, generator=generator)
    return logits.softmax(-1).to(dtype).to(device)


def number(value: int) -> Tensor:
    return torch.tensor([value - 2**64 if value >= 2**63 else value])


def sample(probs: Tensor, indices: Tensor | None = None, seed: int = SEED, offset: int = 7, **filters) -> Tensor:
    tokens, valid = ops.sample_from_probs(probs, seed=seed, offset=offset, indices=indices, **filters)
    assert valid.all()
    return tokens


def chi_square_quantile(degrees: int) -> float:
    """What chi-square exceeds once in 1,000 times (Wilson and Hilferty, 1931)."""
    variance = 2 / (9 * degrees)
    return degrees * (1 - variance + 3.09 * math.sqrt(variance)) ** 3


# ---- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox(counter, key, expected):
    """The known answers of Random123, whose authors made the generator."""
    assert reference.philox(counter, key) == expected


def test_random_numbers(device):
    """All bits of seed, offset and row count: a token of many that are alike is the number itself."""
    probs = torch.full((1, 4096), 1.0, device=device)
    for seed in (0, 1, 2**32, SEED, 2**64 - 1):
        for offset in (0, 5, 2**32 + 5, 2**63 + 1):
            indices = torch.zeros(3, dtype=torch.int64, device=device)
            expected = [int(4096 * reference.uniform_number(seed, offset, row)) for row in range(3)]
            assert sample(probs, indices, seed, offset).tolist() == expected


# Where Philox, run backwards, gets these numbers from.
ZERO = {"seed": 1, "offset": 2287084314298830509, "subsequence": -3146776131830481100}
HALF = {"seed": 1, "offset": -8009423185309620987, "subsequence": 2374107272589330152}


@pytest.mark.parametrize("tokens", [[3, 7], [70, 130]], ids=str)
def test_a_number_that_is_the_sum_before_a_token_draws_it(device, tokens):
    """Not the token before, be it of probability 0, in the same block of 64 or not."""
    assert (reference.uniform_number(**ZERO), reference.uniform_number(**HALF)) == (0.0, 0.5)
    probs = torch.zeros(1, 200, device=device)
    probs[0, tokens] = 0.5
    assert [sample(probs, **number).item() for number in (ZERO, HALF)] == tokens


# ---- sample_from_probs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_from_probs(device, dtype, filters):
    """Token for token as the reference: what is kept, and which of it."""
    for vocab_size in VOCAB_SIZES:
        for spread in SPREADS:
            probs = make_probs(3, vocab_size, dtype, spread, device)
            expected = [
                reference.token_at(reference.kept_probs(row, **filters), reference.uniform_number(SEED, 7, i))
                for i, row in enumerate(probs.cpu())
            ]
            assert sample(probs, **filters).tolist() == expected, (vocab_size, spread)


@pytest.mark.parametrize("subsequences", [None, [0, 2**40, -1, 3, 3]])
def test_numbers_of_rows(device, subsequences):
    """Filters belong to distributions, seeds, offsets and subsequences to results."""
    probs = make_probs(3, 100, torch.float32, 2.0, device)
    top_k, top_p, min_p = [1, 50, 9], [0.2, 0.9, 1.0], [0.0, 0.5, 0.01]
    indices, seeds, offsets = [2, 2, 0, 1, 1], [4, 5, 6, 7, 8], [0, 1, 0, 1, 0]
    tokens, valid = ops.sample_from_probs(
        probs,
        indices=torch.tensor(indices, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=device),
        top_p=torch.tensor(top_p, device=device),
        min_p=torch.tensor(min_p, device=device),
        seed=torch.tensor(seeds, device=device),
        offset=torch.tensor(offsets, device=device),
        subsequence=None if subsequences is None else torch.tensor(subsequences, device=device),
    )
    kept = [reference.kept_probs(probs[i].cpu(), top_k[i], top_p[i], min_p[i]) for i in range(3)]
    expected = [
        reference.token_at(kept[row], reference.uniform_number(seeds[i], offsets[i], (subsequences or range(5))[i]))
        for i, row in enumerate(indices)
    ]
    assert tokens.tolist() == expected
    assert tokens.dtype == torch.int64
    assert valid.all()


def test_distributions_in_any_order(device):
    """What is known of a row's distribution is kept for the next row, if it has the same one."""
    probs = make_probs(6, 200, torch.float32, 4.0, device)
    indices = torch.tensor([0, 1, 0, 5, 4, 3, 3, 2, 1, 0] * 4, device=device)
    assert sample(probs, indices, top_p=0.9).tolist() == sample(probs[indices], top_p=0.9).tolist()


@CPU
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_distribution(filters):
    """Pearson's chi-square of 20,000 tokens."""
    probs = make_probs(1, 30, torch.float32, 1.0, torch.device("cpu"))
    tokens = sample(probs, torch.zeros(20_000, dtype=torch.int32), **filters)
    weights = reference.kept_probs(probs[0], **filters)
    expected = 20_000 * weights / weights.sum()
    counts = tokens.bincount(minlength=30)
    assert (counts[expected == 0] == 0).all()
    distance = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    degrees = int((expected > 0).sum()) - 1
    if degrees > 0:
        assert distance <= chi_square_quantile(degrees)


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.8}], ids=str)
def test_a_row_is_the_same_in_any_batch(device, several_threads, filters):
    """With any number of rows behind it and of threads, and whatever row was before it."""
    probs = make_probs(40, 2000, torch.float32, 2.0, device)
    whole = sample(probs, **filters)
    torch.set_num_threads(1)
    assert_same_bits(sample(probs, **filters), whole)
    assert_same_bits(sample(probs[:7], **filters), whole[:7])
    others = probs.flip(0)
    others[5] = probs[5]
    assert sample(others, **filters)[5] == whole[5]


@CPU
def test_every_instruction_set_gives_the_same_tokens():
    probs = make_probs(200, 1000, torch.bfloat16, 2.0, torch.device("cpu"))
    try:
        tokens = []
        for capability in _C.available_cpu_capabilities():
            _C.set_cpu_capability(capability)
            tokens.append(sample(probs, top_k=300, top_p=0.9))
    finally:
        _C.set_cpu_capability("")
    for other in tokens[1:]:
        assert_same_bits(other, tokens[0])


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_that_are_no_distribution(device, filters):
    """Token 0, and the rows beside them are sampled."""
    bad = [[NAN] * 4, [0.5, NAN, 0.5, 0.0], [0.0] * 4, [0.5, INF, 0.0, 0.0], [-0.1, 0.6, 0.5, 0.0]]
    probs = torch.tensor([[0.0, 0.0, 1.0, 0.0], *bad, [0.0, 0.0, 0.0, 3.0]], device=device)
    tokens, valid = ops.sample_from_probs(probs, seed=1, **filters)
    assert tokens.tolist() == [2, 0, 0, 0, 0, 0, 3]
    assert valid.tolist() == [True, False, False, False, False, False, True]


def test_a_graph_reads_seed_offset_and_subsequence():
    probs, seed, offset = make_probs(9, 300, torch.float32, 1.0, torch.device("cpu")), number(1), number(0)
    subsequence = number(0)
    graph = CPUGraph()
    with torch.inference_mode(), graph.capture():
        tokens, _ = ops.sample_from_probs(probs, seed=seed, offset=offset, subsequence=subsequence, top_p=0.9)
    for step in (0, 1):
        offset.fill_(step)
        subsequence.fill_(2 * step)
        graph.replay()
        assert_same_bits(tokens, sample(probs, seed=1, offset=step, subsequence=2 * step, top_p=0.9))


# ---- renorm_probs, top_k_mask_logits, softmax ------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [each for each in FILTERS if {*each} <= {"top_k", "top_p"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_renorm_probs(device, dtype, filters):
    for vocab_size in VOCAB_SIZES:
        for spread in SPREADS:
            probs = make_probs(3, vocab_size, dtype, spread, device)
            kept = torch.stack([reference.kept_probs(row, **filters) for row in probs.cpu()])
            actual = ops.renorm_probs(probs, **filters)
            assert_close_to_reference(actual.cpu(), kept / kept.sum(-1, keepdim=True))
            if dtype == torch.float32:  # others round small probabilities to 0
                assert ((actual > 0).cpu() == (kept > 0)).all()


# As one would write them down: the boundary belongs to what is kept, and so do ties.
@pytest.mark.parametrize(
    ("probs", "filters", "kept"),
    [
        ([0.5, 0.3, 0.2], {"top_p": 0.8}, [0, 1]),
        ([0.5, 0.3, 0.2], {"top_p": 0.81}, [0, 1, 2]),
        ([0.5, 0.3, 0.2], {"top_p": 0.5}, [0]),
        ([0.2, 0.5, 0.3], {"top_p": 0.0}, [1]),
        ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.5}, [0, 1, 2, 3]),
        ([0.2501, 0.25, 0.25, 0.2499], {"top_p": 0.0}, [0]),
        ([0.5, 0.5, 1e-9], {"top_p": 1.0}, [0, 1, 2]),  # all, whatever rounding makes of the sum
        ([1.0, 0.6, 0.4], {"top_p": 0.8}, [0]),  # without top_k, sums are taken as they are
        ([1.0, 0.6, 0.4], {"top_k": 3, "top_p": 0.8}, [0, 1]),
        ([0.4, 0.2, 0.2, 0.2], {"top_k": 2}, [0, 1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.6}, [0, 1]),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 2, "top_p": 0.57}, [0]),
        ([0.0, 0.0, 1.0], {"top_k": 2}, [2]),
        ([0.0, 0.0, 0.0], {"top_k": 2}, []),
    ],
)
def test_what_is_kept(device, probs, filters, kept):
    out = ops.renorm_probs(torch.tensor([probs], device=device), **filters)
    assert out[0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3, 40, 200, 5000])
def test_top_k_mask_logits(device, dtype, k):
    """Logits of both signs; ties of the k-th stay, and so does NaN, which is not among the k."""
    generator = torch.Generator().manual_seed(k)
    for vocab_size in VOCAB_SIZES:
        logits = torch.randn(3, vocab_size, generator=generator).mul(20).round().to(dtype)
        logits[0, vocab_size // 2] = NAN
        logits[1, ::2] = -INF
        ranked = logits.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).sort(-1, descending=True).values
        expected = logits.masked_fill(logits < ranked[:, min(k, vocab_size) - 1 :][:, :1], -INF)
        actual = ops.top_k_mask_logits(logits.to(device), k)
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [None, 1.0, 0.3, 40.0, [0.5, 1.0, 1e-3]])
def test_softmax(device, dtype, temperature):
    for vocab_size in VOCAB_SIZES:
        logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).mul(5).to(dtype)
        logits[1, 1::3] = -INF
        divisor = torch.tensor([temperature or 1.0]).reshape(-1, 1)
        given = torch.tensor(temperature, device=device) if isinstance(temperature, list) else temperature
        actual = ops.softmax(logits.to(device), given)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(
            actual.cpu().double(), (logits.double() / divisor).softmax(-1), rtol=2e-5 / float(divisor.min()), atol=1e-30
        )


def test_softmax_edges(device):
    """At a temperature of 0, what is visible is alike; what torch gives NaN for is NaN."""
    logits = torch.tensor([[3.0, -INF, 5.0, 5.0], [-INF] * 4, [1.0, NAN, 0.0, 0.0]], device=device)
    probs = ops.softmax(logits, 0.0)
    torch.testing.assert_close(probs[0].cpu(), torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]))
    assert probs[1:].isnan().all()
    torch.testing.assert_close(ops.softmax(logits[:1], 1e-45).cpu(), torch.tensor([[0.0, 0.0, 0.5, 0.5]]))


def test_rows_replace_themselves(device):
    probs = make_probs(4, 300, torch.float32, 2.0, device)
    expected = ops.renorm_probs(probs, top_k=9, top_p=0.8)
    assert ops.renorm_probs(probs, top_k=9, top_p=0.8, out=probs) is probs
    assert_same_bits(probs, expected)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(device)
    masked = ops.top_k_mask_logits(logits, 9)
    assert_same_bits(ops.top_k_mask_logits(logits, 9, out=logits), masked)


def test_no_rows(device):
    probs = torch.zeros(0, 9, device=device)
    for out in (ops.softmax(probs), ops.renorm_probs(probs, top_k=2), ops.top_k_mask_logits(probs, 2)):
        assert out.shape == (0, 9)
    assert sample(probs).shape == (0,)


# ---- chain_speculative_sampling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_chain_speculative_sampling(device, dtype, num_draft_tokens):
    """Rows whose draft is another distribution, and ever more like the target. A token behind one that is rejected may
    be accepted; it counts, but is not emitted."""
    num_rows, n = 6, num_draft_tokens
    alike = torch.linspace(0, 0.9, num_rows, device=device)[:, None, None]
    for vocab_size in (1, 5, 70, 200):
        draft = make_probs(num_rows * n, vocab_size, dtype, 0.5, device).view(num_rows, n, vocab_size)
        target = make_probs(num_rows * (n + 1), vocab_size, dtype, 0.5, device).view(num_rows, n + 1, vocab_size)
        target[:, :n] = (1 - alike) * target[:, :n] + alike * draft
        token_ids = torch.randint(vocab_size, (num_rows, n), generator=torch.Generator().manual_seed(n))
        expected = reference.chain_speculative_sampling(
            draft.cpu().float(), token_ids, target.cpu().float(), SEED, offset=3
        )
        _, accepted, emitted = expected
        assert n < 4 or vocab_size == 1 or accepted != emitted
        actual = ops.chain_speculative_sampling(draft, token_ids.to(device), target, seed=SEED, offset=3)
        assert tuple(tensor.tolist() for tensor in actual) == expected
        again = ops.chain_speculative_sampling(
            draft, token_ids.to(device), target, seed=SEED, offset=3, num_accepted=actual[1], num_emitted=actual[2]
        )
        assert [again[1].tolist(), again[2].tolist()] == [[2 * count for count in counts] for counts in expected[1:]]


@CPU
def test_drafts_do_not_change_the_distribution():
    """The first token of 20,000 rows, whatever the draft model thinks."""
    draft, target = make_probs(2, 12, torch.float32, 1.5, torch.device("cpu"))
    num_rows = 20_000
    token_ids = sample(draft[None], torch.zeros(num_rows, dtype=torch.int64), offset=1)
    tokens, _, emitted = ops.chain_speculative_sampling(
        draft.expand(num_rows, 1, -1).contiguous(),
        token_ids[:, None],
        target.expand(num_rows, 2, -1).contiguous(),
        seed=SEED,
        offset=2,
    )
    assert 0.1 < emitted.double().mean() < 0.9
    expected = num_rows * target.double()
    assert ((tokens[:, 0].bincount(minlength=12) - expected) ** 2 / expected).sum() <= chi_square_quantile(11)


def test_a_draft_like_the_target_leaves_no_rest(device):
    """A draft token that neither has is not accepted, and nothing is left of the target without the draft's part."""
    probs = torch.tensor([[[0.0, 0.5, 0.5]]], device=device)
    tokens, accepted, emitted = ops.chain_speculative_sampling(
        probs, torch.tensor([[0]], device=device), probs.expand(1, 2, 3).contiguous(), seed=1
    )
    assert tokens[0, 0] in (1, 2) and tokens[0, 1] == -1
    assert (accepted.item(), emitted.item()) == (0, 0)


# ---- errors ----------------------------------------------------------------------------------------------------------

FILTER_NAMES = ("top_k", "top_p", "min_p")
Change = Callable[[dict], dict]
# of each op: what is wrong: (the argument named, what the wrapper raises, what changes in the valid arguments)
ERRORS: dict[str, list[tuple[str, type[Exception], Change]]] = {
    "softmax": [
        ("logits", TypeError, lambda a: {"logits": a["logits"].double()}),
        ("logits", ValueError, lambda a: {"logits": a["logits"][0]}),
        ("logits", ValueError, lambda a: {"logits": a["logits"][:, :0]}),
        ("logits", ValueError, lambda a: {"logits": a["logits"].T.contiguous().T}),
        ("temperature", TypeError, lambda a: {"temperature": a["temperature"].double()}),
        ("temperature", ValueError, lambda a: {"temperature": torch.ones(2)}),
        ("temperature", ValueError, lambda a: {"temperature": torch.ones(3, 1)}),
        ("temperature", ValueError, lambda a: {"temperature": torch.tensor([1.0, 1.0, -0.1])}),
        ("temperature", ValueError, lambda a: {"temperature": torch.tensor([NAN])}),
        ("temperature", ValueError, lambda a: {"temperature": torch.tensor([INF])}),
        ("out", TypeError, lambda a: {"out": a["out"].half()}),
        ("out", ValueError, lambda a: {"out": a["out"][:2]}),
    ],
    "renorm_probs": [
        ("probs", TypeError, lambda a: {"probs": a["probs"].int()}),
        ("probs", ValueError, lambda a: {"probs": a["probs"][None]}),
        ("top_k", TypeError, lambda a: {"top_k": torch.ones(1)}),
        ("top_k", ValueError, lambda a: {"top_k": torch.tensor([1, 0, 1])}),
        ("top_p", ValueError, lambda a: {"top_p": torch.tensor([0.5, 0.5, 1.5])}),
        ("top_p", ValueError, lambda a: {"top_p": torch.tensor([1.5]), "top_k": None}),
        ("top_p", ValueError, lambda a: {"top_p": torch.tensor([NAN])}),
        ("out", TypeError, lambda a: {"out": a["out"].half()}),
        ("out", ValueError, lambda a: {"out": a["out"][:1].expand(3, -1)}),
    ],
    "top_k_mask_logits": [
        ("logits", TypeError, lambda a: {"logits": a["logits"].long()}),
        ("top_k", ValueError, lambda a: {"top_k": torch.tensor([-1])}),
        ("top_k", ValueError, lambda a: {"top_k": torch.ones(4, dtype=torch.int64)}),
        ("out", ValueError, lambda a: {"out": a["out"][:, :5]}),
    ],
    "sample_from_probs": [
        ("probs", TypeError, lambda a: {"probs": a["probs"].double()}),
        ("probs", ValueError, lambda a: {"probs": a["probs"][0]}),
        ("indices", TypeError, lambda a: {"indices": a["indices"].short()}),
        ("indices", ValueError, lambda a: {"indices": torch.tensor([0, 1, 3], dtype=torch.int32)}),
        ("indices", ValueError, lambda a: {"indices": torch.tensor([0, -1, 2], dtype=torch.int32)}),
        ("indices", ValueError, lambda a: {"indices": torch.tensor([0, 1, 3])} | dict.fromkeys(FILTER_NAMES)),
        ("top_k", ValueError, lambda a: {"top_k": torch.tensor([0])}),
        ("top_p", ValueError, lambda a: {"top_p": torch.tensor([-0.1])}),
        ("top_p", TypeError, lambda a: {"top_p": torch.tensor([0.5], dtype=torch.float64)}),
        ("min_p", ValueError, lambda a: {"min_p": torch.tensor([1.1])}),
        ("min_p", ValueError, lambda a: {"min_p": torch.ones(2)}),
        ("seed", TypeError, lambda a: {"seed": a["seed"].int()}),
        ("seed", ValueError, lambda a: {"seed": a["seed"].expand(2)}),
        ("offset", ValueError, lambda a: {"offset": torch.zeros(2, 1, dtype=torch.int64)}),
        ("subsequence", TypeError, lambda a: {"subsequence": a["subsequence"].int()}),
        ("subsequence", ValueError, lambda a: {"subsequence": a["subsequence"][:2]}),
        ("valid", TypeError, lambda a: {"valid": a["valid"].int()}),
        ("out", ValueError, lambda a: {"out": a["out"][:2]}),
    ],
    "chain_speculative_sampling": [
        ("draft_probs", TypeError, lambda a: {"draft_probs": a["draft_probs"].double()}),
        ("draft_token_ids", ValueError, lambda a: {"draft_token_ids": torch.full((3, 2), 70)}),
        ("draft_token_ids", ValueError, lambda a: {"draft_token_ids": torch.full((3, 2), -1)}),
        ("target_probs", ValueError, lambda a: {"target_probs": a["target_probs"][:, :2]}),
        ("target_probs", TypeError, lambda a: {"target_probs": a["target_probs"].half()}),
        ("num_accepted", TypeError, lambda a: {"num_accepted": a["num_accepted"].long()}),
        ("num_emitted", ValueError, lambda a: {"num_emitted": a["num_emitted"][:2]}),
        ("num_emitted", ValueError, lambda a: {"num_emitted": a["num_accepted"]}),
        ("seed", ValueError, lambda a: {"seed": torch.zeros(2, dtype=torch.int64)}),
    ],
}


@pytest.mark.parametrize(("op", "i"), [(op, i) for op, cases in ERRORS.items() for i in range(len(cases))])
def test_rejects(device, op, i):
    argument, error, change = ERRORS[op][i]
    arguments = make_arguments(op)
    assert_rejected(op, arguments | change(arguments), argument, error)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k: expected 1 or more, got 0"),
        ({"top_k": True}, TypeError, "top_k: expected an int, got bool"),
        ({"top_k": 2.0}, TypeError, "top_k: expected an int, got float"),
        ({"top_p": 1.01}, ValueError, r"top_p: expected 0 to 1, got 1\.01"),
        ({"top_p": "1"}, TypeError, "top_p: expected a number or a tensor, got str"),
        ({"min_p": -0.5}, ValueError, "min_p: expected 0 to 1, got -0.5"),
        ({"subsequence": 1.0}, TypeError, "subsequence: expected an int, got float"),
        ({"seed": 2**64}, ValueError, "seed: expected an int of 64 bits, got 18446744073709551616"),
        ({"top_k_first": None}, TypeError, "top_k_first: expected a bool, got NoneType"),
    ],
)
def test_bad_numbers(device, numbers, error, message):
    arguments = {"probs": torch.ones(2, 3, device=device), "seed": 0} | numbers
    assert_raises_and_writes_nothing(ops.sample_from_probs, arguments, error, f"^sample_from_probs: {message}")


@pytest.mark.parametrize("number", [1e39, -1e39, 10**400, -(10**400), -1e-60, NAN], ids=lambda n: str(n)[:9])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_numbers_are_checked_before_they_are_rounded_to_fp32(device, name, number):
    function, options = (ops.softmax, {}) if name == "temperature" else (ops.sample_from_probs, {"seed": 0})
    expected = "0 or more, finite" if name == "temperature" else "0 to 1"
    message = f"^{function.__name__}: {name}: expected {expected}, got {number}$"
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        function(torch.ones(2, 3, device=device), **options | {name: number})


def test_a_temperature_of_more_than_64_bits(device):
    """As an int it becomes a float, as in all other functions."""
    logits = torch.rand(2, 3, device=device)
    assert_same_bits(ops.softmax(logits, 2**70), ops.softmax(logits, 2.0**70))


def test_out_rows_that_overlap_in_part(device):
    out = torch.zeros(100, device=device).as_strided((2, 8), (7, 1))
    with pytest.raises(RuntimeError, match="do not overlap"):
        OPS.softmax(out, torch.zeros(2, 8, device=device))
