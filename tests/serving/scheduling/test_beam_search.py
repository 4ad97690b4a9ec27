"""BeamSearch: its rules on numbers chosen by hand, and equal to Hugging Face `generate` on random models."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from checkpoints import make_model
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from pagedattn_serve.scheduling.beam_search import BeamSearch, BeamStep, Continuation, as_fp32

# By hand


def never(beam: int, token_id: int) -> bool:
    return False


def token_9(beam: int, token_id: int) -> bool:
    return token_id == 9


def ended_step(*scores: float, num_tokens: int = 1, running: float | None = -0.5) -> BeamStep:
    """A step that ended beams with these scores; the best that runs on has `running`."""
    rest = () if running is None else (Continuation(0, 1, running),)
    return BeamStep(rest, tuple(Continuation(0, 9, score) for score in scores), num_tokens)


def scores_of(search: BeamSearch[Any]) -> list[float]:
    return [hypothesis.score for hypothesis in search.pool]


def items_of(search: BeamSearch[Any]) -> list[Any]:
    return [hypothesis.item for hypothesis in search.pool]


@pytest.mark.parametrize(("num_end_tokens", "expected"), [(0, 6), (1, 6), (2, 9), (5, 18)])
def test_num_candidates(num_end_tokens: int, expected: int) -> None:
    assert BeamSearch[None](3, 8, num_end_tokens=num_end_tokens).num_candidates == expected


def test_the_prompt_gives_the_first_beams() -> None:
    search = BeamSearch[None](2, 8)
    step = search.select([0.0], 0, [[(5, -0.5), (9, -0.75), (7, -1.0), (8, -2.0)]], token_9)
    assert step == BeamStep((Continuation(0, 5, -0.5), Continuation(0, 7, -1.0)), (Continuation(0, 9, -0.75),), 1)
    assert (search.pool, search.done) == ((), False)  # nothing before `update`


def test_beams_compete_and_one_parent_may_have_all() -> None:
    search = BeamSearch[None](2, 8)
    candidates = [[(1, -0.5), (2, -1.0), (3, -3.0), (4, -4.0)], [(1, -0.5), (2, -0.75), (3, -3.0), (4, -4.0)]]
    step = search.select([-1.0, -4.0], 3, candidates, never)
    assert step == BeamStep((Continuation(0, 1, -1.5), Continuation(0, 2, -2.0)), (), 4)
    step = search.select([-1.0, -1.25], 3, candidates, never)
    assert step.running == (Continuation(0, 1, -1.5), Continuation(1, 1, -1.75))


def test_equal_scores_keep_the_order_given() -> None:
    search = BeamSearch[None](2, 8)
    step = search.select([-1.0, -1.0], 3, [[(4, -1.0), (2, -1.0)], [(1, -1.0), (3, -1.0)]], never)
    assert step.running == (Continuation(0, 4, -2.0), Continuation(0, 2, -2.0))


def test_only_the_first_beam_width_may_end() -> None:
    search = BeamSearch[None](2, 8)
    candidates = [[(1, -0.5), (9, -5.0)], [(9, -0.5), (2, -1.0)], [(3, -1.0), (9, -0.5)]]
    step = search.select([-1.0, -2.0, -3.0], 3, candidates, token_9)
    assert step.running == (Continuation(0, 1, -1.5), Continuation(1, 2, -3.0))
    assert step.ended == (Continuation(1, 9, -2.5),)
    step = search.select([-3.0, -1.5, -1.0], 3, candidates, token_9)
    assert step.ended == (Continuation(2, 9, -1.5), Continuation(1, 9, -2.0))
    step = search.select([-1.5, -2.5, -1.0], 3, candidates, token_9)  # 9 after 2 is best, 9 after 1 is fourth
    assert step.ended == (Continuation(2, 9, -1.5),)
    assert step.running == (Continuation(0, 1, -2.0), Continuation(2, 3, -2.0))


def test_no_more_than_num_candidates_are_looked_at() -> None:
    search = BeamSearch[None](1, 8, num_end_tokens=0)
    asked = []

    def ends(beam: int, token_id: int) -> bool:
        asked.append(token_id)
        return token_id < 3

    step = search.select([0.0], 0, [[(1, -1.0), (2, -2.0), (3, -3.0)]], ends)
    assert step == BeamStep((), (Continuation(0, 1, -1.0),), 1)  # as a stop string may leave none
    assert asked == [1, 2]
    search.select([0.0], 0, [[(5, -1.0), (2, -2.0), (3, -3.0)]], ends)
    assert asked == [1, 2, 5]  # enough run on


def test_impossible_tokens_are_never_taken() -> None:
    search = BeamSearch[None](3, 8)
    step = search.select([0.0], 0, [[(4, -0.5), (9, -math.inf), (1, -math.inf)]], token_9)
    assert step == BeamStep((Continuation(0, 4, -0.5),), (), 1)
    dead_end = search.select([-0.5], 1, [[(9, -math.inf), (1, -math.inf)]], token_9)
    assert dead_end == BeamStep((), (), 2)
    assert search.update(dead_end, []) == []
    assert search.done


def test_with_the_last_token_the_best_of_all_end() -> None:
    search = BeamSearch[str](2, 4, length_penalty=1.0)
    search.update(ended_step(-1.0, -3.0, num_tokens=2), ["old best", "old worst"])
    assert scores_of(search) == [-0.5, -1.5]
    step = search.select([-1.0, -2.0], 3, [[(1, -0.5), (9, -2.0)], [(9, -1.0), (2, -2.0)]], token_9)
    assert step == BeamStep((), (Continuation(0, 1, -1.5), Continuation(0, 9, -3.0)), 4)
    assert search.update(step, ["running", "ended"]) == ["ended", "old worst"]
    assert search.done
    assert items_of(search) == ["running", "old best"]
    assert scores_of(search) == [-0.375, -0.5]


def test_the_pool_keeps_the_best_and_returns_the_rest() -> None:
    search = BeamSearch[str](2, 100, length_penalty=1.0, early_stopping="never")
    assert search.update(ended_step(-4.0, num_tokens=2), ["a"]) == []
    assert not search.done
    assert search.update(ended_step(-3.0, num_tokens=3), ["b"]) == []
    assert items_of(search) == ["b", "a"]
    assert scores_of(search) == [-1.0, -2.0]
    assert search.update(ended_step(-6.0, -4.0, num_tokens=4), ["c", "d"]) == ["c", "a"]
    assert items_of(search) == ["b", "d"]  # as good as b, but younger
    assert search.update(ended_step(-50.0, num_tokens=5), ["e"]) == ["e"]
    assert search.update(ended_step(num_tokens=6), []) == []


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "running", "done"),
    [
        (True, 1.0, -0.1, True),
        (False, 1.0, -3.99, False),  # -3.99 / 4 against -1
        (False, 1.0, -4.0, True),
        ("never", 1.0, -7.99, False),  # max_tokens is 8
        ("never", 1.0, -8.0, True),
        (False, 2.0, -63.0, True),
        ("never", 2.0, -63.0, True),  # -4 / 16 in the pool
        ("never", 2.0, -15.99, False),
        ("never", 0.0, -3.99, False),
        ("never", 0.0, -4.0, True),
        ("never", -1.0, -3.99, False),  # a longer one is no better: present length
        ("never", -1.0, -4.0, True),
    ],
)
def test_when_a_full_pool_ends_the_search(
    early_stopping: bool | Literal["never"], length_penalty: float, running: float, done: bool
) -> None:
    search = BeamSearch[str](2, 8, length_penalty, early_stopping)
    search.update(ended_step(-4.0, num_tokens=4, running=running), ["a"])
    assert not search.done  # one more has room
    search.update(ended_step(-4.0, num_tokens=4, running=running), ["b"])
    assert search.done is done


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_without_running_beams_the_search_ends(early_stopping: bool | Literal["never"]) -> None:
    search = BeamSearch[str](2, 8, early_stopping=early_stopping)
    search.update(ended_step(-4.0, running=None), ["a"])
    assert search.done
    assert items_of(search) == ["a"]


def test_a_saved_state_undoes_a_step() -> None:
    search = BeamSearch[str](1, 8, early_stopping=True)
    search.update(ended_step(num_tokens=1), [])
    saved = search.pool, search.done
    for _ in range(2):
        search.update(ended_step(-4.0, num_tokens=2), ["a"])
        assert (items_of(search), search.done) == (["a"], True)
        search.pool, search.done = saved
    assert (search.pool, search.done) == ((), False)


def test_scores_are_fp32() -> None:
    assert as_fp32([0.1, -1e9 - 1, -math.inf]) == torch.tensor([0.1, -1e9 - 1, -math.inf]).tolist()
    draw = random.Random(0)
    for _ in range(100):
        score, logprob = torch.tensor([draw.uniform(-90, 0), draw.uniform(-20, 0)])
        length, penalty = draw.randrange(1, 400), draw.uniform(-3, 3)
        search = BeamSearch[None](1, 400, penalty)
        step = search.select([score.item()], length - 1, [[(9, logprob.item())]], token_9)
        search.update(step, [None])
        total = score + logprob
        assert [step.ended[0].score] == [total.item()]
        assert scores_of(search) == [(total / length**penalty).item()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "beam_width: expected at least 1, got 0"),
        ((2, 0), "max_tokens: expected at least 1, got 0"),
        ((2, 8, 1.0, False, -1), "num_end_tokens: expected at least 0, got -1"),
        ((2, 8, 40.0), "length_penalty: expected 8 .* got 40.0"),
        ((2, 8, -40.0), "length_penalty: expected 8 .* got -40.0"),
        ((2, 8, math.nan), "length_penalty: expected 8 .* got nan"),
        ((2, 8, 1.0, 1), 'early_stopping: expected True, False or "never", got 1'),
        ((2, 8, 1.0, "always"), "early_stopping: .* got 'always'"),
    ],
)
def test_errors(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearch[None](*arguments)


def test_errors_of_a_step() -> None:
    search = BeamSearch[str](2, 8)
    with pytest.raises(ValueError, match="candidates: expected those of 2 beams, got 1"):
        search.select([-1.0, -2.0], 1, [[(1, -1.0)]], never)
    for num_tokens in (-1, 8):
        with pytest.raises(ValueError, match=f"num_tokens: expected 0 to 7, got {num_tokens}"):
            search.select([-1.0], num_tokens, [[(1, -1.0)]], never)
    with pytest.raises(ValueError, match="items: expected 1, one for each ended continuation, got 2"):
        search.update(ended_step(-1.0), ["a", "b"])


# Against Hugging Face

MAX_TOKENS = 14
VOCAB_SIZE = 31  # small, so that the end tokens are often among the best
LENGTH_PENALTIES = (0.0, 1.0, 2.0, -1.0)
EARLY_STOPPING = (True, False, "never")
END_TOKENS = {"llama": [11, 20], "gpt2": [13, 30]}  # often said, so that beams end early, late and never


MODELS = ["llama-gqa", "gpt2"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param, vocab_size=VOCAB_SIZE)


def make_prompts(num_prompts: int) -> list[list[int]]:
    draw = random.Random(num_prompts)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 30)[:num_prompts]]


@dataclass
class Outcome:
    """Of a finished search: (score, tokens) of its pool, best first, and what happened on the way."""

    hypotheses: list[tuple[float, list[int]]]
    num_steps: int
    num_dropped: int
    fewest_running: int


@torch.inference_mode()
def search_beams(
    model: PreTrainedModel, prompt: list[int], search: BeamSearch[list[int]], is_end: Callable[[list[int]], bool]
) -> Outcome:
    """Beam search with a full forward a step. is_end: whether an output is complete.

    The prompt is run beam_width times, as `generate` does: the shape of a batch decides the last bits.
    """
    beams: list[list[int]] = [[]] * search.beam_width
    scores = [0.0]
    num_steps = num_dropped = 0
    fewest_running = search.beam_width

    def ends(beam: int, token_id: int) -> bool:
        return is_end([*beams[beam], token_id])

    while not search.done:
        fewest_running = min(fewest_running, len(beams))
        token_ids = torch.tensor([prompt + beam for beam in beams])
        mask = torch.ones_like(token_ids)
        logits = model(token_ids, attention_mask=mask, use_cache=False, logits_to_keep=1).logits[:, -1]
        best = torch.log_softmax(logits, -1).topk(search.num_candidates)
        rows = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        step = search.select(scores, num_steps, rows[: len(scores)], ends)
        num_dropped += len(search.update(step, [[*beams[c.beam], c.token_id] for c in step.ended]))
        beams = [[*beams[c.beam], c.token_id] for c in step.running]
        scores = [c.score for c in step.running]
        num_steps += 1
    hypotheses = [(hypothesis.score, hypothesis.item) for hypothesis in search.pool]
    return Outcome(hypotheses, num_steps, num_dropped, fewest_running)


def generate(
    model: PreTrainedModel, prompt: list[int], search: BeamSearch[Any], n: int, **options: Any
) -> tuple[list[tuple[float, list[int]]], int]:
    """(score, tokens) of the n best of Hugging Face, and the number of its steps."""
    token_ids = torch.tensor([prompt])
    output = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=search.max_tokens,
        do_sample=False,
        num_beams=search.beam_width,
        num_return_sequences=n,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        pad_token_id=VOCAB_SIZE,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = output.sequences[:, len(prompt) :].tolist()
    tokens = [[token_id for token_id in row if 0 <= token_id < VOCAB_SIZE] for row in rows]  # -1 pads, if nothing ends
    return list(zip(output.sequences_scores.tolist(), tokens, strict=True)), len(output.scores)


@pytest.mark.parametrize(
    ("model", "beam_width"),
    [
        pytest.param(model, width, marks=[pytest.mark.long] if (model == "gpt2") != (width == 4) else [])
        for model in MODELS
        for width in (2, 4, 6)
    ],
    indirect=["model"],
)
def test_equal_to_hugging_face(model: PreTrainedModel, beam_width: int) -> None:
    """Each prompt in turn, and the same ones for all of EARLY_STOPPING."""
    lengths = set()
    total_steps: dict[bool | str, int] = dict.fromkeys(EARLY_STOPPING, 0)
    num_searches = num_unfinished = num_dropped = 0
    rules = itertools.product((1, 2), LENGTH_PENALTIES)
    for (num_end_tokens, length_penalty), prompt in zip(rules, itertools.cycle(make_prompts(3))):
        for early_stopping in EARLY_STOPPING:
            end_tokens = END_TOKENS[model.config.model_type][:num_end_tokens]
            search = BeamSearch[list[int]](beam_width, MAX_TOKENS, length_penalty, early_stopping, num_end_tokens)
            found = search_beams(model, prompt, search, lambda output, end=end_tokens: output[-1] in end)
            expected, num_steps = generate(model, prompt, search, beam_width, eos_token_id=end_tokens)
            assert found.hypotheses == expected
            assert found.num_steps == num_steps
            lengths |= {len(tokens) for _, tokens in found.hypotheses}
            total_steps[early_stopping] += num_steps
            num_searches += 1
            num_unfinished += sum(tokens[-1] not in end_tokens for _, tokens in found.hypotheses)
            num_dropped += found.num_dropped
    assert num_searches == 24
    assert len(lengths) > 4
    assert 0 < num_unfinished < num_searches * beam_width // 2
    assert num_dropped > 0
    assert total_steps[True] < total_steps[False] <= total_steps["never"] < 8 * MAX_TOKENS


def test_fewer_returned_are_the_first_of_the_pool(model: PreTrainedModel) -> None:
    end_token = END_TOKENS[model.config.model_type][0]
    searches = itertools.product((1.0, -1.0), EARLY_STOPPING, make_prompts(2))
    for n, (length_penalty, early_stopping, prompt) in zip(itertools.cycle((1, 3, 3, 1)), searches):
        search = BeamSearch[list[int]](4, MAX_TOKENS, length_penalty, early_stopping)
        found = search_beams(model, prompt, search, lambda output, end=end_token: output[-1] == end)
        expected, _ = generate(model, prompt, search, n, eos_token_id=end_token)
        assert found.hypotheses[:n] == expected


def is_uneven(output: list[int]) -> bool:
    """An end that, as a stop string, hangs on the whole output and may leave fewer than beam_width running, or none."""
    return len(output) > 2 and sum(output) % 3 > 0


class Uneven(StoppingCriteria):
    """The same for Hugging Face."""

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **options: Any) -> torch.BoolTensor:
        return torch.tensor([is_uneven(row[self.prompt_length :]) for row in input_ids.tolist()])


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_ends_that_hang_on_more_than_the_last_token(
    model: PreTrainedModel, early_stopping: bool | Literal["never"]
) -> None:
    fewest_running = set()
    for length_penalty, prompt in itertools.product((1.0, -1.0), make_prompts(3)):
        search = BeamSearch[list[int]](4, MAX_TOKENS, length_penalty, early_stopping, num_end_tokens=0)
        found = search_beams(model, prompt, search, is_uneven)
        expected, num_steps = generate(
            model, prompt, search, 4, stopping_criteria=StoppingCriteriaList([Uneven(len(prompt))])
        )
        assert [tokens for _, tokens in found.hypotheses] == [tokens for _, tokens in expected]
        # With fewer beams the batch has another shape, and the logits other last bits.
        assert [score for score, _ in found.hypotheses] == pytest.approx([score for score, _ in expected], rel=1e-5)
        assert found.num_steps == num_steps
        fewest_running.add(found.fewest_running)
    assert min(fewest_running) < 4
