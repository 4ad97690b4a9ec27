"""The sampler: which tokens can come, how often they do, and on what a draw depends."""

import pytest
import torch
from torch import Tensor

from pagedattn_serve.sampler import Sampler, SamplingRow, restrict
from pagedattn_serve.sampling_params import SamplingParams

PROBABILITIES = torch.tensor([0.05, 0.3, 0.15, 0.4, 0.02, 0.08])  # in order of size: 3, 1, 2, 5, 0, 4
LOGITS = PROBABILITIES.log() + 3
NUM_DRAWS = 20000


def draw(logits: Tensor, params: SamplingParams, count: int = NUM_DRAWS) -> Tensor:
    """`count` rows of the same logits in one batch: int64 [count]."""
    rows = [SamplingRow(params, 0)] * count
    return torch.tensor(Sampler(0).sample(logits.repeat(count, 1), rows))


def draw_seeded(logits: Tensor, seeds_and_positions: list[tuple[int, int]]) -> Tensor:
    rows = [SamplingRow(SamplingParams(seed=seed), position) for seed, position in seeds_and_positions]
    return torch.tensor(Sampler(0).sample(logits.repeat(len(rows), 1), rows))


def expect_distribution(tokens: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square, at a bound that a right sampler passes in all but one of 100,000 seeds."""
    counts = tokens.bincount(minlength=len(probabilities)).double()
    expected = probabilities.double() / probabilities.double().sum() * len(tokens)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    bound_of_degrees = {1: 19.5, 2: 23.0, 3: 25.9, 5: 30.9}
    assert chi_square < bound_of_degrees[int(possible.sum()) - 1], f"{counts.tolist()} where {expected.tolist()}"


def kept(params: SamplingParams, logits: Tensor = LOGITS) -> set[int]:
    return set(restrict(logits[None], [params])[0].isfinite().nonzero().flatten().tolist())


def test_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 5.0, 4.9], [-torch.inf, -9.0, -torch.inf, -8.0]])
    greedy = SamplingRow(SamplingParams(temperature=0), 0)
    assert Sampler(0).sample(logits, [greedy] * 3) == [1, 2, 3]
    # Beside a random row, and whatever else its parameters say, it stays greedy.
    restricted = SamplingRow(SamplingParams(temperature=0, top_k=2, top_p=0.5, seed=1), 0)
    for seed in range(20):
        rows = [greedy, SamplingRow(SamplingParams(temperature=9.0, seed=seed), 0), restricted]
        assert Sampler(0).sample(logits, rows)[0::2] == [1, 3]


def test_top_k() -> None:
    by_size = [3, 1, 2, 5, 0, 4]
    for k in range(1, 7):
        assert kept(SamplingParams(top_k=k)) == set(by_size[:k])
    for everything in (-1, 0, 7, 10**9):
        assert kept(SamplingParams(top_k=everything)) == set(range(6))
    assert len(kept(SamplingParams(top_k=3), torch.zeros(6))) == 3  # not more, where all are equal


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


def test_each_row_has_its_own_restriction() -> None:
    params = [SamplingParams(top_k=1), SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=2, top_p=0.5)]
    together = restrict(LOGITS.repeat(4, 1), params)
    for row, param in zip(together, params, strict=True):
        assert torch.equal(row, restrict(LOGITS[None], [param])[0])
    assert torch.equal(together[1], LOGITS)


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
    seeded = [SamplingRow(SamplingParams(seed=seed, temperature=3.0), 4) for seed in range(20)]
    alone = [Sampler(0).sample(logits[None], [row])[0] for row in seeded]
    assert len(set(alone)) > 5
    company = [
        SamplingRow(SamplingParams(), 0),
        SamplingRow(SamplingParams(temperature=0), 0),
        SamplingRow(SamplingParams(seed=3), 4),
        SamplingRow(SamplingParams(top_k=3, top_p=0.5), 9),
        SamplingRow(SamplingParams(seed=3), 4),
    ]
    sampler = Sampler(99)
    for place in (0, 2, 5):
        rows = torch.cat((others[:place], logits[None], others[place:]))
        together = [sampler.sample(rows, [*company[:place], row, *company[place:]])[place] for row in seeded]
        assert together == alone


def test_positions_differ_and_repeat() -> None:
    logits = torch.zeros(1000)
    tokens = draw_seeded(logits, [(5, position) for position in range(100)])
    assert len(tokens.unique()) > 85  # of 100 draws from 1000, about 95 are different
    assert torch.equal(tokens, draw_seeded(logits, [(5, position) for position in range(100)]))
    assert not torch.equal(tokens, draw_seeded(logits, [(6, position) for position in range(100)]))


def test_unseeded_draws_follow_the_engine_s_seed() -> None:
    logits = torch.zeros(8, 1000)
    rows = [SamplingRow(SamplingParams(), 0)] * 8

    def two_steps(seed: int) -> list[int]:
        sampler = Sampler(seed)
        return sampler.sample(logits, rows) + sampler.sample(logits, rows)

    assert two_steps(1) == two_steps(1) != two_steps(2)
    assert len(set(two_steps(1))) > 8  # neither the rows nor the steps are alike


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=4)])
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
