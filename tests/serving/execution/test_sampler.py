"""The sampler: which tokens can come, how often they do, and on what a draw depends."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagedattn_ext import ops
from pagedattn_serve.execution import sampler as sampler_module
from pagedattn_serve.execution.logits_processors import process_logits
from pagedattn_serve.execution.sampler import Sampler, SamplerOutput
from pagedattn_serve.outputs import Logprob
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams, TokenRules

PROBABILITIES = torch.tensor([0.05, 0.3, 0.15, 0.4, 0.02, 0.08])  # in order of size: 3, 1, 2, 5, 0, 4
LOGITS = PROBABILITIES.log() + 3
NUM_DRAWS = 20000


GREEDY = SamplingParams(temperature=0)

# With ties and impossible tokens.
ANY_LOGITS = st.lists(
    st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 1.0, 2.0, 2.25, 7.0]), min_size=1, max_size=14
).filter(lambda logits: max(logits) > -math.inf)
ANY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
    top_k=st.integers(-1, 16),
    seed=st.none() | st.integers(0, 9),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
    logprobs=st.none() | st.integers(0, 20),
)


def row_of(params: SamplingParams, position: int = 0, **kwargs: Any) -> SamplingState:
    """One after `position` output tokens."""
    return SamplingState(params, [1], [0] * position, **kwargs)


def sample(logits: Tensor, rows: list[SamplingState], seed: int = 0) -> list[int]:
    return Sampler(seed).sample(logits, rows).token_ids


def draw(logits: Tensor, params: SamplingParams, count: int = NUM_DRAWS) -> Tensor:
    """`count` rows of the same logits in one batch: int64 [count]."""
    return torch.tensor(sample(logits.repeat(count, 1), [row_of(params)] * count))


def draw_seeded(logits: Tensor, seeds_and_positions: list[tuple[int, int]]) -> Tensor:
    rows = [row_of(SamplingParams(seed=seed), position) for seed, position in seeds_and_positions]
    return torch.tensor(sample(logits.repeat(len(rows), 1), rows))


def report(logits: list[float], params: SamplingParams) -> tuple[int, dict[int, Logprob]]:
    """The token of one row, and what is reported at its place."""
    output = Sampler(0).sample(torch.tensor([logits]), [row_of(params)])
    entries = output.top_logprobs[0]
    assert entries is not None and entries[output.token_ids[0]].logprob == output.logprobs[0]
    return output.token_ids[0], entries


def expect_distribution(tokens: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square, at a bound that a right sampler passes in all but one of 100,000 seeds."""
    counts = tokens.bincount(minlength=len(probabilities)).double()
    expected = probabilities.double() / probabilities.double().sum() * len(tokens)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    bound_of_degrees = {1: 19.5, 2: 23.0, 3: 25.9, 4: 28.5, 5: 30.9}
    assert chi_square < bound_of_degrees[int(possible.sum()) - 1], f"{counts.tolist()} where {expected.tolist()}"


def kept(params: SamplingParams, logits: Tensor = LOGITS) -> set[int]:
    """The tokens that come: those that the op draws by NUM_DRAWS numbers, or the only one, if none is drawn."""
    found: set[int] = set()

    def draw_often(probs: Tensor, **asked: Tensor) -> tuple[Tensor, Tensor]:
        numbers = {"indices": torch.zeros(NUM_DRAWS, dtype=torch.int32), "subsequence": torch.arange(NUM_DRAWS)}
        tokens, valid = sample_from_probs(probs, **(asked | numbers))
        found.update(tokens.tolist())
        return tokens[:1], valid[:1]

    sample_from_probs = ops.sample_from_probs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "sample_from_probs", draw_often)
        [token] = sample(logits[None], [row_of(params)])
    return found or {token}


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 32_000), (21, 32_000), (3, 300_000)])
def test_logprobs_with_and_without_a_report(num_rows, vocab_size):
    """Where nothing is reported, only what a row chose is kept: the same bits."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    params = [SamplingParams(temperature=i % 2, seed=i) for i in range(num_rows)]
    plain = Sampler(0).sample(logits, [row_of(each) for each in params])
    reported = Sampler(0).sample(logits, [row_of(dataclasses.replace(each, logprobs=0)) for each in params])
    assert plain.token_ids == reported.token_ids
    assert plain.logprobs == reported.logprobs
    assert plain.logprobs == logits.log_softmax(dim=-1)[range(num_rows), plain.token_ids].tolist()


def expected_kept(logits: list[float], params: SamplingParams) -> set[int]:
    """What min_p, top_k and top_p leave, by their definitions, one token after the other in Python's doubles. Equally
    likely tokens stay together, but for top_k 1, which is greedy.

    Cases that rounding may decide either way are passed over.
    """
    weights = [math.exp(logit - max(logits)) for logit in logits]
    assume(all(weight in (0, 1) or abs(weight - params.min_p) > 1e-6 for weight in weights))
    likely = sorted((i for i in range(len(logits)) if weights[i] > 0), key=lambda i: (-weights[i], i))
    likely = [i for i in likely if weights[i] >= params.min_p]
    if params.top_k == 1:
        return {likely[0]}
    if 0 < params.top_k < len(likely):
        likely = [i for i in likely if weights[i] >= weights[likely[params.top_k - 1]]]
    if params.top_p < 1:
        share = params.top_p * sum(weights[i] for i in likely)
        sums = [sum(weights[i] for i in likely[:count]) for count in range(len(likely))]
        assume(all(abs(total - share) > 1e-5 for total in sums))
        num_kept = sum(total < share for total in sums)
        likely = [i for i in likely if weights[i] >= weights[likely[num_kept - 1]]]
    return set(likely)


def test_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 5.0, 4.9], [-torch.inf, -9.0, -torch.inf, -8.0]])
    greedy = row_of(GREEDY)
    assert sample(logits, [greedy] * 3) == [1, 2, 3]
    # Beside a random row, and whatever else its parameters say, it stays greedy.
    restricted = row_of(SamplingParams(temperature=0, top_k=2, top_p=0.5, min_p=1.0, seed=1))
    for seed in range(20):
        rows = [greedy, row_of(SamplingParams(temperature=9.0, seed=seed)), restricted]
        assert sample(logits, rows)[0::2] == [1, 3]


def test_top_k() -> None:
    by_size = [3, 1, 2, 5, 0, 4]
    for k in range(1, 7):
        assert kept(SamplingParams(top_k=k)) == set(by_size[:k])
    for everything in (-1, 0, 7, 10**9):
        assert kept(SamplingParams(top_k=everything)) == set(range(6))
    # Equally likely tokens stay together, as with transformers and vLLM. top_k 1 keeps the first, as where greedy.
    tied = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0])
    assert kept(SamplingParams(top_k=3), tied) == {1, 2, 3, 4}
    assert kept(SamplingParams(top_k=1), tied) == {1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # Sums of the sorted probabilities: 0.4, 0.7, 0.85, 0.93, 0.98, 1.
    for top_p, expected in [
        (1e-30, {3}),
        (0.39, {3}),
        (0.41, {3, 1}),
        (0.69, {3, 1}),
        (0.71, {3, 1, 2}),
        (0.86, {3, 1, 2, 5}),
        (0.94, {3, 1, 2, 5, 0}),
        (0.99, set(range(6))),
        (1.0, set(range(6))),
    ]:
        assert kept(SamplingParams(top_p=top_p)) == expected


def test_top_p_after_top_k() -> None:
    # Of the two that top_k leaves, the first has 0.4 / 0.7 = 0.571.
    assert kept(SamplingParams(top_k=2, top_p=0.56)) == {3}
    assert kept(SamplingParams(top_k=2, top_p=0.58)) == {3, 1}
    assert kept(SamplingParams(top_k=2, top_p=0.99)) == {3, 1}


def test_min_p_is_a_share_of_the_most_likely_one() -> None:
    # Shares of the largest, 0.4: 0.125, 0.75, 0.375, 1, 0.05, 0.2.
    for min_p, expected in [
        (0.0, set(range(6))),
        (0.04, set(range(6))),
        (0.06, {3, 1, 2, 5, 0}),
        (0.3, {3, 1, 2}),
        (0.8, {3}),
        (1.0, {3}),
    ]:
        assert kept(SamplingParams(min_p=min_p)) == expected
    assert kept(SamplingParams(min_p=1.0), torch.tensor([1.0, 2.0, -torch.inf, 2.0])) == {1, 3}


def test_min_p_before_top_k_and_top_p() -> None:
    # Of 0.4, 0.3 and 0.15, which min_p leaves, the first two are 82%; of all, 70%.
    assert kept(SamplingParams(min_p=0.3, top_p=0.8)) == {3, 1}
    assert kept(SamplingParams(top_p=0.8)) == {3, 1, 2}
    assert kept(SamplingParams(min_p=0.3, top_k=4)) == {3, 1, 2}
    assert kept(SamplingParams(min_p=0.3, top_k=2, top_p=0.56)) == {3}


@given(logits=ANY_LOGITS, params=ANY_PARAMS)
def test_restrictions_are_what_their_definitions_say(logits: list[float], params: SamplingParams) -> None:
    """No other token comes, and of these all that come more often than once in 1,000 times."""
    assume(params.temperature > 0)
    tempered = [logit / params.temperature for logit in logits]
    expected = expected_kept(tempered, params)
    total = sum(math.exp(tempered[i]) for i in expected)
    assert (
        {i for i in expected if math.exp(tempered[i]) > total / 1000} <= kept(params, torch.tensor(logits)) <= expected
    )


def test_each_row_has_its_own_restriction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row draws what it draws alone, also where some rows at a time are drawn."""
    logits = (
        torch.randn(9, 600, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.1, 3, 9]).repeat(3)[:, None]
    )
    several = [
        *({"top_k": 1}, {}, {"top_p": 0.5}, {"top_p": 0.99}, {"min_p": 0.1}, {"top_k": 2, "top_p": 0.5}),
        *({"top_k": 400}, {"top_k": 300, "top_p": 0.97, "min_p": 0.01, "temperature": 3.0}, {"top_p": 0.8}),
    ]
    for num_rows in (9, 4, 1):
        monkeypatch.setattr(sampler_module, "_CACHED_BYTES", num_rows * 600 * 4)
        for seed in range(20):
            rows = [row_of(SamplingParams(seed=seed, **each), index=i) for i, each in enumerate(several)]
            alone = [sample(each[None], [row])[0] for each, row in zip(logits, rows, strict=True)]
            assert sample(logits, rows) == alone


def test_drawn_tokens_are_distributed_as_softmax_says() -> None:
    expect_distribution(draw(LOGITS, SamplingParams()), PROBABILITIES)
    expect_distribution(draw(LOGITS, SamplingParams(temperature=0.5)), PROBABILITIES**2)
    expect_distribution(draw(LOGITS, SamplingParams(temperature=2.0)), PROBABILITIES**0.5)
    top_k = PROBABILITIES * torch.tensor([0, 1, 1, 1, 0, 0])
    expect_distribution(draw(LOGITS, SamplingParams(top_k=3)), top_k)
    expect_distribution(draw(LOGITS, SamplingParams(top_p=0.8)), top_k)
    # The temperature comes first: it decides what top_p keeps. 0.16, 0.09, 0.0225... of 0.2818: 57%, 89%, 97%.
    expect_distribution(
        draw(LOGITS, SamplingParams(temperature=0.5, top_p=0.8)), (PROBABILITIES > 0.2) * PROBABILITIES**2
    )


def test_draws_under_min_p() -> None:
    expect_distribution(draw(LOGITS, SamplingParams(min_p=0.1)), PROBABILITIES * (PROBABILITIES > 0.04))
    expect_distribution(draw(LOGITS, SamplingParams(min_p=0.3, top_p=0.8)), PROBABILITIES * (PROBABILITIES > 0.2))
    # After the temperature, which makes the shares 0.35, 0.87, 0.61, 1, 0.22 and 0.45, or 0.02, 0.56, 0.14, 1, 0, 0.04.
    expect_distribution(
        draw(LOGITS, SamplingParams(temperature=2.0, min_p=0.3)), PROBABILITIES**0.5 * (PROBABILITIES > 0.04)
    )
    expect_distribution(
        draw(LOGITS, SamplingParams(temperature=0.5, min_p=0.3)), PROBABILITIES**2 * (PROBABILITIES > 0.2)
    )


def test_seeds_and_positions_are_as_good_as_chance() -> None:
    expect_distribution(draw_seeded(LOGITS, [(seed, 0) for seed in range(4000)]), PROBABILITIES)
    expect_distribution(draw_seeded(LOGITS, [(7, position) for position in range(4000)]), PROBABILITIES)
    # Neighbours in either are independent: pairs of draws are distributed as pairs.
    for seeds_and_positions in ([(seed, 3) for seed in range(8000)], [(-5, position) for position in range(8000)]):
        tokens = draw_seeded(torch.tensor([0.0, 0.0]), seeds_and_positions)
        expect_distribution(tokens[0::2] + 2 * tokens[1::2], torch.full((4,), 0.25))


def test_a_seed_fixes_a_draw_whatever_the_company() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    others = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    seeded = [row_of(SamplingParams(seed=seed, temperature=3.0), 4) for seed in range(20)]
    alone = [sample(logits[None], [row])[0] for row in seeded]
    assert len(set(alone)) > 5
    company = [
        row_of(SamplingParams()),
        row_of(GREEDY),
        row_of(SamplingParams(seed=3, logprobs=2), 4),
        row_of(SamplingParams(top_k=3, top_p=0.5, min_p=0.1), 9),
        row_of(SamplingParams(seed=3), 4),
    ]
    for place in (0, 2, 5):
        rows = torch.cat((others[:place], logits[None], others[place:]))
        together = [sample(rows, [*company[:place], row, *company[place:]], seed=99)[place] for row in seeded]
        assert together == alone


@given(
    params=st.lists(ANY_PARAMS, min_size=1, max_size=6),
    vocab_size=st.sampled_from([1, 7, 64, 301]),
    scale=st.sampled_from([0.01, 1.0, 6.0]),
    position=st.integers(0, 50),
)
def test_all_of_a_row_s_output_is_its_own(
    params: list[SamplingParams], vocab_size: int, scale: float, position: int
) -> None:
    """Token, logprob and report of each row that does not draw from the engine's generator, to the last bit."""
    logits = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(position)) * scale
    rows = [row_of(param, position) for param in params]
    together = Sampler(0).sample(logits, rows)
    for i, row in enumerate(rows):
        if row.sampling_params.greedy or row.sampling_params.seed is not None:
            alone = Sampler(1).sample(logits[i : i + 1], [row])
            assert alone == SamplerOutput(
                together.token_ids[i : i + 1], together.logprobs[i : i + 1], together.top_logprobs[i : i + 1], [None]
            )


def test_a_share_that_is_reached_to_the_bit_does_not_depend_on_other_rows() -> None:
    """The kept tokens sum to top_p, or to the bit beside it, whatever else the other rows restrict."""
    row = row_of(SamplingParams(top_p=0.41, seed=1))
    others = [GREEDY, SamplingParams(top_k=3), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1, top_k=5)]
    for weights in ([22, 19, 18, 15, 7, 6, 5, 4, 2, 2], [23, 18, 17, 14, 8, 7, 5, 4, 2, 2], [41, 20, 19, 10, 5, 5]):
        logits = torch.tensor(weights).log()
        for position in range(100):
            row = row_of(SamplingParams(top_p=0.41, seed=1), position)
            [alone] = sample(logits[None], [row])
            for other in others:
                assert sample(logits.repeat(2, 1), [row_of(other), row])[1] == alone


def test_positions_differ_and_repeat() -> None:
    logits = torch.zeros(1000)
    tokens = draw_seeded(logits, [(5, position) for position in range(100)])
    assert len(tokens.unique()) > 85  # of 100 draws from 1000, about 95 are different
    assert torch.equal(tokens, draw_seeded(logits, [(5, position) for position in range(100)]))
    assert not torch.equal(tokens, draw_seeded(logits, [(6, position) for position in range(100)]))


def test_unseeded_draws_follow_the_engine_s_seed() -> None:
    logits = torch.zeros(8, 1000)
    rows = [row_of(SamplingParams())] * 8

    def two_steps(seed: int) -> list[int]:
        sampler = Sampler(seed)
        return sampler.sample(logits, rows).token_ids + sampler.sample(logits, rows).token_ids

    assert two_steps(1) == two_steps(1) != two_steps(2)
    assert len(set(two_steps(1))) > 8  # neither the rows nor the steps are alike


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=4), SamplingParams(min_p=1e-30)],
)
def test_impossible_tokens_never_come(params: SamplingParams) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf, -torch.inf])
    expect_distribution(draw(logits, params), torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0, 0.0]))
    only = torch.full((6,), -torch.inf).index_fill(0, torch.tensor([4]), -100.0)
    assert draw(only, params, 1000).unique().tolist() == [4]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e-38),  # the quotient is beyond fp32
        SamplingParams(temperature=1e-60),  # the temperature itself is
        SamplingParams(top_p=1e-60),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
    ],
)
def test_the_narrowest_parameters_give_the_most_likely_token(params: SamplingParams) -> None:
    logits = torch.tensor([1.0, 3.0, 50.0, 49.0])
    assert draw(logits, params, 100).unique().tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    logits = LOGITS.to(dtype)
    expect_distribution(draw(logits, SamplingParams()), logits.float().softmax(dim=-1))
    assert kept(SamplingParams(top_k=2), logits) == {3, 1}
    assert kept(SamplingParams(min_p=0.3), logits) == {3, 1, 2}
    assert kept(SamplingParams(top_p=0.8), logits) == {3, 1, 2}
    # Logprobs have more digits than the logits.
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    output = Sampler(0).sample(logits, [row_of(SamplingParams(temperature=0, logprobs=20))])
    expected = logits[0].double().log_softmax(dim=-1)
    entries = output.top_logprobs[0]
    assert entries is not None and len(entries) >= 20
    for token_id, entry in entries.items():
        assert entry.logprob == pytest.approx(expected[token_id].item(), rel=1e-5)
        assert entry.rank == 1 + (logits[0] > logits[0, token_id]).sum()


def test_logprobs_of_named_tokens() -> None:
    """First the sampled token, then these in their order, with their ranks among all; whatever other rows ask for."""
    logits = torch.stack([LOGITS, LOGITS.flip(0), LOGITS])
    rows = [
        row_of(SamplingParams(temperature=0, logprob_token_ids=[4, 3, 0, 4], logprobs=2)),
        row_of(SamplingParams(temperature=0, logprobs=2)),
        row_of(SamplingParams(temperature=0, logprob_token_ids=[2])),
    ]
    first, second, third = Sampler(0).sample(logits, rows).top_logprobs
    assert first is not None and second is not None and third is not None
    expected = LOGITS.log_softmax(dim=-1).tolist()
    assert list(first.items()) == [(i, Logprob(expected[i], rank)) for i, rank in ((3, 1), (4, 6), (0, 5))]
    assert list(third.items()) == [(i, Logprob(expected[i], rank)) for i, rank in ((3, 1), (2, 3))]
    assert list(second) == [2, 4]
    for row, together in zip(rows, (first, second, third), strict=True):
        [alone] = Sampler(0).sample(logits[1:2] if row is rows[1] else LOGITS[None].clone(), [row]).top_logprobs
        assert alone == together


def test_logprobs_are_the_model_s() -> None:
    """Before temperature and restrictions, for drawn and for most likely tokens, asked for or not."""
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(),
        GREEDY,
        SamplingParams(temperature=3.0, top_k=9),
        SamplingParams(temperature=0.2, top_p=0.3, min_p=0.1, logprobs=3),
    ] * 10
    output = Sampler(0).sample(logits, [row_of(param) for param in params])
    expected = logits.double().log_softmax(dim=-1)[torch.arange(40), output.token_ids]
    assert output.logprobs == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)
    assert [entries is None for entries in output.top_logprobs] == [True, True, True, False] * 10


@given(
    logits=ANY_LOGITS,
    temperature=st.sampled_from([0.0, 50.0]),  # at 50, nearly any of the tokens
    seed=st.integers(0, 99),
    count=st.integers(0, 20),
)
def test_reported_are_the_most_likely_tokens_and_the_sampled_one(
    logits: list[float], temperature: float, seed: int, count: int
) -> None:
    token_id, entries = report(logits, SamplingParams(temperature=temperature, seed=seed, logprobs=count))
    most_likely = sorted((logit for logit in logits if logit > -math.inf), reverse=True)[:count]
    own, *others = (logits[i] for i in entries)
    assert next(iter(entries)) == token_id, "as with vLLM"
    assert sorted([own, *others], reverse=True)[: len(most_likely)] == most_likely
    assert others == sorted(others, reverse=True) and len(entries) <= len(most_likely) + 1
    log_sum = max(logits) + math.log(sum(math.exp(logit - max(logits)) for logit in logits))
    for i, entry in entries.items():
        assert entry.logprob == pytest.approx(logits[i] - log_sum, rel=1e-5, abs=1e-6)
        assert entry.rank == 1 + sum(logit > logits[i] for logit in logits)
        assert entry.decoded_token is None


def test_a_report_by_hand() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.2, 0.1)]
    token_id, entries = report(logits, SamplingParams(temperature=0, logprobs=2))
    assert token_id == 1 and list(entries) in ([1, 2], [1, 3])
    assert [(entry.rank, round(math.exp(entry.logprob), 5)) for entry in entries.values()] == [(1, 0.4), (2, 0.2)]
    assert report(logits, SamplingParams(temperature=0, logprobs=0))[1].keys() == {1}
    # Of five, the two least likely share the fourth rank.
    for seed in range(100):
        token_id, entries = report(logits, SamplingParams(temperature=1e9, seed=seed, logprobs=1))
        assert list(entries) == ([1] if token_id == 1 else [token_id, 1])
        assert entries[token_id].rank == [4, 1, 2, 2, 4][token_id]


def test_reports_of_rows_that_ask_for_different_numbers() -> None:
    logits = torch.arange(12.0).repeat(4, 1)
    output = Sampler(0).sample(
        logits, [row_of(SamplingParams(temperature=0, logprobs=count)) for count in (3, None, 0, 20)]
    )
    assert [entries and list(entries) for entries in output.top_logprobs] == [
        [11, 10, 9],
        None,
        [11],
        list(range(11, -1, -1)),
    ]


def test_reports_of_equally_likely_tokens_do_not_depend_on_what_others_ask_for() -> None:
    """As logits in half precision often are. A search for more tokens finds others of those that share the last
    place."""
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(0)).mul_(4).round_().float()
    for count in (1, 2, 5):
        asks = row_of(SamplingParams(temperature=0, logprobs=count))
        asks_for_more = row_of(SamplingParams(temperature=0, logprobs=20))
        for row in logits:
            [alone] = Sampler(0).sample(row[None].clone(), [asks]).top_logprobs
            together = Sampler(0).sample(row.repeat(2, 1), [asks_for_more, asks]).top_logprobs
            assert together[1] == alone


def test_logits_that_are_not_numbers_spoil_one_row_only() -> None:
    logits = torch.stack((LOGITS, torch.full_like(LOGITS, torch.nan), LOGITS))
    for params in (
        GREEDY,
        SamplingParams(),
        SamplingParams(top_k=2, top_p=0.5, min_p=0.1),
        SamplingParams(temperature=0, logprobs=2),
    ):
        greedy = row_of(GREEDY)
        output = Sampler(0).sample(logits, [greedy, row_of(params), greedy])
        assert output.token_ids[0::2] == [3, 3] and output.token_ids[1] in range(6)


def test_no_rows() -> None:
    assert Sampler(0).sample(torch.empty(0, 5), []) == SamplerOutput()


class Operations(TorchDispatchMode):
    """Collects the names of the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Sizes(TorchDispatchMode):
    """Collects the sizes of tensors that operations under it make, but for parts of `logits`."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._logits = logits
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != self._logits.data_ptr():
            self.found.append(result.numel())
        return result


def test_nothing_is_computed_that_no_row_asks_for() -> None:
    def operations(*params: SamplingParams) -> set[str]:
        with Operations() as recorded:
            sample(LOGITS.repeat(len(params), 1), [row_of(param) for param in params])
        return recorded.names

    drawing = {"random_", "softmax", "sample_from_probs"}
    assert not operations(GREEDY, SamplingParams(top_k=1)) & {*drawing, "topk"}
    assert drawing <= operations(GREEDY, SamplingParams(top_p=0.5))
    assert "masked_fill" not in operations(SamplingParams()) and "masked_fill" in operations(SamplingParams(min_p=0.1))
    assert "topk" in operations(SamplingParams(temperature=0, logprobs=1))
    # Nothing waits for the device before the end.
    asking = SamplingParams(top_k=3, top_p=0.9, min_p=0.1, logprobs=2)
    assert not operations(asking, GREEDY) & {"nonzero", "_local_scalar_dense"}


def test_logprobs_of_all_tokens_are_kept_of_rows_that_need_them_alone() -> None:
    """A row with a penalty and a report leaves the others' logprobs where they are computed a few rows at a time."""
    logits = torch.randn(40, 50_000)
    asking = row_of(SamplingParams(temperature=0, presence_penalty=0.5, logprobs=1))
    with Sizes(logits) as sizes:
        Sampler(0).sample(logits, [asking, *[row_of(GREEDY)] * 39])
    assert sizes.found and max(sizes.found) <= sampler_module._CACHED_BYTES // 4


def test_all_tensors_are_made_on_the_device_of_the_logits() -> None:
    params = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(top_k=2, top_p=0.9, min_p=0.1, logprobs=3),
        SamplingParams(logprobs=0),
    ]
    rows = [row_of(param) for param in params]
    logits = LOGITS.repeat(4, 1)
    with torch.device("meta"):  # whatever is made on the default device holds no numbers
        output = Sampler(0).sample(logits, rows)
    assert output == Sampler(0).sample(logits, rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda() -> None:
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(0))
    greedy = [row_of(SamplingParams(temperature=0, logprobs=5))] * 4
    on_cpu, on_cuda = Sampler(0).sample(logits, greedy), Sampler(0, "cuda").sample(logits.cuda(), greedy)
    assert on_cpu.token_ids == on_cuda.token_ids
    assert on_cpu.logprobs == pytest.approx(on_cuda.logprobs, rel=1e-5, abs=1e-6)
    for params in (SamplingParams(), SamplingParams(seed=1, top_k=300), SamplingParams(top_p=0.9, min_p=0.01)):
        rows = [row_of(params, i) for i in range(4)]
        assert Sampler(0, "cuda").sample(logits.cuda(), rows) == Sampler(0, "cuda").sample(logits.cuda(), rows)
    rows = [row_of(SamplingParams(min_p=0.1))] * NUM_DRAWS
    tokens = torch.tensor(Sampler(0, "cuda").sample(LOGITS.cuda().repeat(NUM_DRAWS, 1), rows).token_ids)
    expect_distribution(tokens, PROBABILITIES * (PROBABILITIES > 0.04))


@pytest.mark.parametrize("vocab_size", [5, 1000, 40_000])
@pytest.mark.parametrize("params", [dict(temperature=0), dict(), dict(top_p=0.9), dict(top_k=3, min_p=0.1, logprobs=4)])
def test_the_logprob_of_broken_logits_is_nan(vocab_size: int, params: dict[str, Any]) -> None:
    """A NaN or +inf anywhere in the row, or nothing but -inf; the other rows do not notice, and -inf alone is legal."""
    good = torch.linspace(-1, 1, vocab_size)
    masked = good.clone()
    masked[::2] = -torch.inf
    broken = [good.clone() for _ in range(4)]
    broken[0][vocab_size // 2] = torch.nan
    broken[1][-1] = torch.inf
    broken[2][:] = -torch.inf
    broken[3][:] = torch.nan
    rows = [row_of(SamplingParams(seed=i, **params)) for i in range(6)]
    output = Sampler(0).sample(torch.stack([good, masked, *broken]), rows)
    assert [math.isnan(logprob) for logprob in output.logprobs] == [False, False, True, True, True, True]
    alone = Sampler(0).sample(torch.stack([good, masked]), rows[:2])
    assert (output.token_ids[:2], output.logprobs[:2]) == (alone.token_ids, alone.logprobs)


CHANGES: list[dict[str, Any]] = [
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"repetition_penalty": 2.0},
    {"logit_bias": {3: -9.0}},
    {"allowed_token_ids": [0, 1]},
    {"logits_processors": [lambda output_token_ids, logits: -logits]},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_tokens_are_chosen_by_the_logits_as_changed(changes: dict[str, Any], temperature: float) -> None:
    """And logprobs are reported of those before."""
    logits = torch.tensor([0.1, 1.0, -1.0, 1.5])
    row = SamplingState(SamplingParams(temperature=temperature, logprobs=1, seed=0, **changes), [3], [3, 3])
    plain = SamplingState(SamplingParams(temperature=temperature, logprobs=1, seed=0), [3], [3, 3])
    output = Sampler(0).sample(logits.repeat(3, 1), [plain, row, plain])
    token_id = 2 if "logits_processors" in changes else 1
    assert output.token_ids == [3, token_id, 3]
    expected = logits.double().log_softmax(dim=-1).tolist()
    assert output.logprobs == pytest.approx([expected[3], expected[token_id], expected[3]], rel=1e-5)
    entries = output.top_logprobs[1]
    assert entries is not None and list(entries) == [token_id, 3]
    assert [entry.rank for entry in entries.values()] == [4 if token_id == 2 else 2, 1]
    assert output.errors == {}


def test_masks_and_draws() -> None:
    params = SamplingParams(allowed_token_ids=[1, 3, 5], logit_bias={3: -math.log(2)}, top_k=2)
    probabilities = torch.tensor([0.0, 0.3, 0.0, 0.2, 0.0, 0.0])
    expect_distribution(draw(LOGITS, params), probabilities)


def test_masks_that_leave_no_token() -> None:
    """An error of that row, with its reason; rows without a number among their logits have theirs."""
    logits = LOGITS.repeat(5, 1)
    logits[3] = torch.nan
    params = [
        SamplingParams(allowed_token_ids=[2], min_tokens=1, seed=0),
        SamplingParams(allowed_token_ids=[2], min_tokens=1, temperature=0),
        SamplingParams(allowed_token_ids=[2], temperature=0),
        SamplingParams(allowed_token_ids=[2], temperature=0),
        SamplingParams(logits_processors=[lambda output_token_ids, logits: logits - math.inf]),
    ]
    output = Sampler(0).sample(logits, [row_of(param, token_rules=TokenRules(end_token_ids=(2,))) for param in params])
    assert [math.isnan(logprob) for logprob in output.logprobs] == [True, True, False, True, True]
    assert list(output.errors) == [0, 1, 4] and output.token_ids[2] == 2
    causes = ["masks", "masks", "logits_processors or masks"]
    expected = [f"sampling_params: expected a token to choose, got {each} that leave none" for each in causes]
    assert list(map(str, output.errors.values())) == expected


@pytest.mark.parametrize("more", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("others", [0.0, -math.inf])
def test_logits_of_infinity_leave_no_other_token(more: dict[str, Any], others: float) -> None:
    """Arithmetic with infinity would make the row NaN, and its token the first one."""

    def force(output_token_ids: list[int], logits: Tensor) -> Tensor:
        logits += others
        logits[[2, 3]] = math.inf
        return logits

    rows = [row_of(SamplingParams(seed=seed, logits_processors=[force], **more)) for seed in range(64)]
    output = Sampler(0).sample(LOGITS.repeat(64, 1), rows)
    assert set(output.token_ids) == ({2} if "temperature" in more else {2, 3}) and output.errors == {}


def test_a_callable_that_fails_ends_one_row() -> None:
    def fail(output_token_ids: list[int], logits: Tensor) -> Tensor:
        raise KeyError("gone")

    row = row_of(SamplingParams(temperature=0, logits_processors=[fail]))
    beams = SamplingParams(temperature=0, n=2, use_beam_search=True, logits_processors=[fail])
    for failing in (row, row_of(beams, num_candidates=3)):
        output = Sampler(0).sample(LOGITS.repeat(2, 1), [row_of(GREEDY), failing])
        assert list(output.errors) == [1]
        assert (output.errors[1].argument, output.errors[1].got) == ("logits_processors", "KeyError: 'gone'")
        assert [math.isnan(logprob) for logprob in output.logprobs] == [False, True]


ANY_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.just(0.7),
        "frequency_penalty": st.just(-0.3),
        "repetition_penalty": st.just(1.3),
        "logit_bias": st.just({0: 2.0, 5: -1.0}),
        "allowed_token_ids": st.just([0, 2, 3, 5, 6]),
        "min_tokens": st.just(9),
    },
)


@given(
    changes=st.lists(ANY_CHANGES, min_size=1, max_size=5),
    num_candidates=st.lists(st.sampled_from([0, 0, 2, 5, 9]), min_size=5, max_size=5),
    temperature=st.sampled_from([0.0, 1.0]),
    num_output_tokens=st.integers(0, 20),
)
def test_rows_that_change_logits_are_as_alone_too(
    changes: list[dict[str, Any]], num_candidates: list[int], temperature: float, num_output_tokens: int
) -> None:
    """Token, logprob, report and candidates, to the last bit."""
    logits = torch.randn(len(changes), 7, generator=torch.Generator().manual_seed(num_output_tokens))
    rows = []
    for i, each in enumerate(changes):
        params = SamplingParams(temperature=temperature, seed=i, logprobs=2 * (i % 2), **each)
        output_token_ids = [(j * j + i) % 7 for j in range(num_output_tokens)]
        rules = TokenRules(end_token_ids=(3,), bad_words=((1, 2), (4,)) if i == 2 else ())
        rows.append(SamplingState(params, [i, 6], output_token_ids, i, rules, num_candidates[i]))
    together = Sampler(0).sample(logits.clone(), rows)
    for i, row in enumerate(rows):
        alone = Sampler(1).sample(logits[i : i + 1].clone(), [row])
        for field in dataclasses.fields(alone):
            if field.name not in ("errors", "prompt_logprobs", "pooled"):
                assert getattr(alone, field.name) == getattr(together, field.name)[i : i + 1]
        assert alone.errors == together.errors == {}


def test_sequences_of_one_seeded_request_differ_and_repeat() -> None:
    logits = torch.zeros(400, 1000)
    params = SamplingParams(seed=5)

    def tokens(num_output_tokens: int) -> list[int]:
        return sample(logits, [row_of(params, num_output_tokens, index=index) for index in range(400)])

    first = tokens(0)
    assert len(set(first)) > 300  # of 400 draws from 1000, about 330 are different
    assert first == tokens(0)
    assert sum(a == b for a, b in zip(first, tokens(1), strict=True)) < 6
    # Neither is a sequence another one that is a few tokens behind.
    ahead = [tokens(position)[:50] for position in range(6)]
    assert sum(a[i] == b[j] for a in ahead for b in ahead for i in range(50) for j in range(i)) < 150  # 1 of 1000
    pairs = draw_seeded_pairs(torch.tensor([0.0, 0.0]))
    expect_distribution(pairs, torch.full((4,), 0.25))


def draw_seeded_pairs(logits: Tensor) -> Tensor:
    """Draws of neighbouring sequences, of 4,000 requests, as pairs."""
    rows = [row_of(SamplingParams(seed=seed), 3, index=index) for seed in range(4000) for index in (0, 1)]
    tokens = torch.tensor(sample(logits.repeat(len(rows), 1), rows))
    return tokens[0::2] + 2 * tokens[1::2]


def test_the_first_sequence_has_the_numbers_of_the_seed_alone() -> None:
    """Pinned, so that a seed gives the same tokens from one version to the next."""
    logits = torch.zeros(4, 1000)
    rows = [row_of(SamplingParams(seed=seed), position) for seed, position in [(0, 0), (5, 0), (5, 7), (-1, 2)]]
    assert sample(logits, rows) == [399, 765, 637, 91]


def candidates(logits: Tensor, rows: list[SamplingState]) -> list[Any]:
    output = Sampler(0).sample(logits, rows)
    return output.candidates


def test_candidates_of_beam_search() -> None:
    params = SamplingParams(temperature=0, n=2, use_beam_search=True)
    logits = torch.stack((LOGITS, LOGITS.flip(0), LOGITS, LOGITS))
    rows = [row_of(params, num_candidates=count) for count in (4, 2, 0, 10)]
    found = candidates(logits, rows)
    expected = PROBABILITIES.log().tolist()
    assert [each and [token_id for token_id, _ in each] for each in found] == [
        [3, 1, 2, 5],
        [2, 4],
        None,
        [3, 1, 2, 5, 0, 4],
    ]
    for token_id, logprob in found[0] + found[3]:
        assert logprob == pytest.approx(expected[token_id], rel=1e-5)


def test_candidates_are_of_logprobs_changed_as_transformers_does() -> None:
    """log_softmax first, then the processors."""
    params = SamplingParams(temperature=0, n=2, use_beam_search=True, repetition_penalty=1.7, logit_bias={0: 1.0})
    row = SamplingState(params, [1, 2], [3], token_rules=TokenRules(bad_words=((5,),)), num_candidates=6)
    logits = LOGITS.repeat(2, 1)
    plain = row_of(SamplingParams(temperature=0, n=2, use_beam_search=True), num_candidates=6)
    [changed, unchanged] = candidates(logits, [row, plain])
    scores = LOGITS[None].log_softmax(dim=-1)
    tokens = torch.tensor([[1, 2, 3]])
    scores = transformers.SequenceBiasLogitsProcessor([[[0], 1.0]])(tokens, scores)
    scores = transformers.NoBadWordsLogitsProcessor([[5]])(tokens, scores)
    scores = transformers.RepetitionPenaltyLogitsProcessor(1.7)(tokens, scores)
    top = scores[0].topk(5)
    assert changed == list(zip(top.indices.tolist(), top.values.tolist(), strict=True))  # not the one kept out
    assert [token_id for token_id, _ in unchanged] == [3, 1, 2, 5, 0, 4]


def test_reports_beside_candidates() -> None:
    """All candidates are among them, with their ranks."""
    params = dict(temperature=0, n=2, use_beam_search=True)
    rows = [
        row_of(SamplingParams(**params, logprobs=1, logit_bias={4: 90.0}), num_candidates=2),
        row_of(SamplingParams(**params), num_candidates=2),
        row_of(SamplingParams(**params, logprobs=5), num_candidates=2),
    ]
    output = Sampler(0).sample(LOGITS.repeat(3, 1), rows)
    reports = [entries and {i: entry.rank for i, entry in entries.items()} for entries in output.top_logprobs]
    assert reports == [{3: 1, 4: 6}, None, {3: 1, 1: 2, 2: 3, 5: 4, 0: 5}]
    assert output.candidates[0] is not None and [i for i, _ in output.candidates[0]] == [4, 3]


def test_logits_that_are_not_numbers_have_no_candidates() -> None:
    logits = torch.stack((LOGITS, torch.full_like(LOGITS, torch.nan)))
    row = row_of(SamplingParams(temperature=0, n=2, use_beam_search=True), num_candidates=3)
    output = Sampler(0).sample(logits, [row, row])
    assert output.candidates[1] == [] and math.isnan(output.logprobs[1]) and not math.isnan(output.logprobs[0])


@pytest.mark.parametrize("num_top", [0, 2, 20])
def test_prompt_logprobs(num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tokens that are sampled there, however many rows are looked at at a time."""
    logits = torch.randn(23, 12, generator=torch.Generator().manual_seed(0)) * 2
    token_ids = [(7 * i) % 12 for i in range(23)]
    entries = Sampler(0).prompt_logprobs(logits, token_ids, num_top)
    expected = logits.double().log_softmax(dim=-1)
    for i, (token_id, each) in enumerate(zip(token_ids, entries, strict=True)):
        assert each is not None and token_id in each
        most_likely = logits[i].argsort(descending=True)[:num_top].tolist()
        assert list(each) == [token_id, *(other for other in most_likely if other != token_id)]
        for other, entry in each.items():
            assert entry.logprob == pytest.approx(expected[i, other].item(), rel=1e-5, abs=1e-6)
            assert entry.rank == 1 + (logits[i] > logits[i, other]).sum()
    monkeypatch.setattr(sampler_module, "_PROMPT_BYTES", 4 * 12 * 5)
    assert Sampler(0).prompt_logprobs(logits, token_ids, num_top) == entries
    assert Sampler(0).prompt_logprobs(logits[:0], [], num_top) == []


def test_rows_that_do_not_ask_are_not_touched_by_those_that_do() -> None:
    """Their logits are neither copied nor written, and nothing of the vocabulary's size is made for the others."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    asking = SamplingParams(
        temperature=0, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.5, logit_bias={7: 3.0}
    )
    row = SamplingState(asking, [1, 2], [3, 4], token_rules=TokenRules(bad_words=((8,),)))
    with Sizes(logits) as sizes:
        process_logits(logits, [row_of(GREEDY), row, row_of(GREEDY)], [1])
    assert sizes.found and max(sizes.found) < 10
    assert torch.equal(logits[0::2], before[0::2])
    assert set((logits[1] != before[1]).nonzero()[:, 0].tolist()) == {1, 2, 3, 4, 7, 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_any_layout(dtype: torch.dtype) -> None:
    """Rows that are one in memory, a part of wider ones, or columns."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = [row_of(SamplingParams(temperature=0, logit_bias={i: 3.0}, logprobs=2)) for i in range(4)]
    same = logits[:1].repeat(4, 1)
    assert Sampler(0).sample(logits[:1].expand(4, 9), rows) == Sampler(0).sample(same, rows)
    wider = torch.cat((logits, logits), dim=1)
    expected = Sampler(0).sample(logits.clone(), rows)
    for strided in (wider[:, :9], logits.t().contiguous().t()):
        assert Sampler(0).sample(strided, rows) == expected
