"""Speculation by prompt lookup: the tokens are those without it, whatever the cache, the budget and the company; each
test sees that drafts were accepted, and rejected."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, MAX_LEN, Checkpoint, greedy_reference, make_speaking_model
from engine_runs import completions, finish_all, run, token_ids

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.sampling_params import SamplingParams, TokenRules

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SMALL: dict[str, Any] = dict(num_blocks=10, block_size=8)
ENGINES: dict[str, dict[str, Any]] = {
    "large cache": dict(),
    "one draft": dict(num_speculative_tokens=1),
    "drafts over several blocks": dict(num_speculative_tokens=20, block_size=8, num_blocks=60),
    "small budget": dict(max_num_batched_tokens=11),
    "small cache": SMALL,
    "small cache, swap": dict(preemption_mode="swap", **SMALL),
    "small cache, no prefixes": dict(enable_prefix_caching=False, **SMALL),
    "small cache and budget, long drafts": dict(num_speculative_tokens=12, max_num_batched_tokens=17, **SMALL),
}
PERIOD = " the cat sat on the mat;"


def speculating(path: str, **options: Any) -> LLMEngine:
    return LLMEngine(path, speculation="ngram", **options)


def expect_both_outcomes(engine: LLMEngine) -> None:
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_proposed_tokens


@pytest.fixture(scope="module")
def period_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that says PERIOD again and again after any number of tokens of it."""
    directory = tmp_path_factory.mktemp("period")
    make_speaking_model(directory, PERIOD * 11)
    return str(directory)


# ---- the same tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in FAMILIES for name in ENGINES if family == "llama-gqa" or name == "small cache"],
)
def test_greedy_equals_hugging_face(get_repeater: Callable[[str], Checkpoint], family: str, name: str) -> None:
    repeater = get_repeater(family)
    engine = speculating(repeater.path, **ENGINES[name])
    assert token_ids(run(engine, repeater.prompts, GREEDY)) == repeater.expected
    expect_both_outcomes(engine)
    stats = engine.stats()
    assert stats.num_output_tokens == 24 * len(repeater.prompts)
    assert (stats.num_preemptions > 0) == ("small cache" in name)
    assert (stats.num_swaps > 0) == ("swap" in name)


def test_no_speculation_by_default(repeater: Checkpoint) -> None:
    engine = LLMEngine(repeater.path)
    assert token_ids(run(engine, repeater.prompts, GREEDY)) == repeater.expected
    assert (engine.stats().num_proposed_tokens, engine.stats().num_accepted_tokens) == (0, 0)


@pytest.mark.parametrize("options", [dict(), SMALL], ids=["large", "small"])
def test_seeded_requests_get_the_same_tokens(repeater: Checkpoint, options: dict[str, Any]) -> None:
    """Also where they depend on the history, of which the drafts before a token are a part."""
    kinds = [
        SamplingParams(temperature=0.5, seed=1, max_tokens=30, logprobs=2),
        SamplingParams(temperature=0.8, seed=2, max_tokens=30, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(temperature=0.5, seed=3, max_tokens=30, repetition_penalty=1.1, top_k=3),
        SamplingParams(temperature=0.7, seed=4, max_tokens=30, top_p=0.8, logit_bias={2: 1.0}),
        SamplingParams(temperature=0, max_tokens=30, min_tokens=12, stop_token_ids=[1], logprobs=0),
        SamplingParams(temperature=0.6, seed=5, max_tokens=30, allowed_token_ids=[0, 2, 3]),
    ]
    prompts = repeater.prompts * 2
    params = [kinds[i % len(kinds)] for i in range(len(prompts))]
    expected = run(LLMEngine(repeater.path), prompts, params)
    engine = speculating(repeater.path, **options)
    actual = run(engine, prompts, params)
    assert completions(actual) == completions(expected)
    expect_both_outcomes(engine)
    for one, other in zip(actual, expected, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
        logprobs = [
            [(i, e.rank, pytest.approx(e.logprob, abs=1e-4)) for i, e in entries.items()]
            for entries in other.outputs[0].logprobs or []
        ]
        assert [[(i, e.rank, e.logprob) for i, e in of.items()] for of in one.outputs[0].logprobs or []] == logprobs


def test_beside_requests_of_several_sequences(repeater: Checkpoint) -> None:
    kinds = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0.7, n=3, seed=1, max_tokens=20),
        SamplingParams(temperature=0, use_beam_search=True, n=2, best_of=3, max_tokens=12),
        SamplingParams(temperature=0.5, seed=2, max_tokens=20),
    ]
    params = [kinds[i % len(kinds)] for i in range(len(repeater.prompts))]
    options = dict(num_blocks=20, block_size=8)
    results: list[dict[str, list[list[int]]]] = []
    for engine in (LLMEngine(repeater.path, **options), speculating(repeater.path, **options)):
        for i, (prompt, param) in enumerate(zip(repeater.prompts, params, strict=True)):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, param)
        results.append({})
        while engine.has_unfinished_requests():
            for output in engine.step():  # those of a beam search may still change
                results[-1][output.request_id] = [each.token_ids for each in output.outputs]
            engine.scheduler.block_manager.check_integrity()
        assert engine.stats().num_preemptions > 0 and engine.stats().num_used_blocks == 0
    assert results[0] == results[1]
    expect_both_outcomes(engine)


def test_prefixes_that_drafts_completed_are_found(get_repeater: Callable[[str], Checkpoint]) -> None:
    """A second turn: the first one's output is in the cache, up to its last full block, and it is right."""
    repeater = get_repeater("qwen3")
    prompt = repeater.prompts[-1]
    output = greedy_reference(repeater.model, prompt, 40)
    engine = speculating(repeater.path, block_size=8)
    assert token_ids(run(engine, [prompt], SamplingParams(temperature=0, max_tokens=40))) == [output]
    assert engine.stats().num_accepted_tokens > 16
    second = [*prompt, *output, 1]
    assert token_ids(run(engine, [second], GREEDY)) == [greedy_reference(repeater.model, second, 24)]
    assert engine.stats().num_found_tokens == (len(prompt) + len(output) - 1) // 8 * 8


# ---- the same distribution ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeded", [False, True])
def test_the_distribution_is_the_model_s(get_repeater: Callable[[str], Checkpoint], seeded: bool) -> None:
    """Of all 5 ** 3 outputs of three tokens: chi-square against the probabilities from Hugging Face's logits."""
    repeater = get_repeater("qwen3")
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 5, (100,), generator=generator).tolist()
    temperature, count = 2.5, 6000
    outcomes = list(itertools.product(range(5), repeat=3))
    with torch.inference_mode():
        logits = repeater.model(torch.tensor([prompt + list(outcome) for outcome in outcomes])).logits[:, -4:-1]
    each = (logits.double() / temperature).softmax(dim=-1).gather(2, torch.tensor(outcomes)[:, :, None])[:, :, 0]
    expected = each.prod(dim=1) * count
    engine = speculating(repeater.path)
    params = [
        SamplingParams(temperature=temperature, max_tokens=3, seed=i if seeded else None, ignore_eos=True)
        for i in range(count)
    ]
    index_of = {outcome: i for i, outcome in enumerate(outcomes)}
    observed = torch.zeros(len(outcomes), dtype=torch.float64)
    for tokens in token_ids(run(engine, [prompt] * count, params)):
        observed[index_of[tuple(tokens)]] += 1
    expect_both_outcomes(engine)
    assert engine.stats().num_accepted_tokens > count / 20
    often = expected >= 5
    observed = torch.cat((observed[often], observed[~often].sum()[None]))
    expected = torch.cat((expected[often], expected[~often].sum()[None]))
    assert len(expected) > 40
    degrees = len(expected) - 1  # the mean; the variance is twice that
    assert float(((observed - expected) ** 2 / expected).sum()) < degrees + 4 * (2 * degrees) ** 0.5


# ---- how many steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_steps_that_are_saved(period_path: str, count: int) -> None:
    """Where the text recurs, a step gives all drafts and one token more."""
    engine = speculating(period_path, num_speculative_tokens=count)
    engine.add_request("a", PERIOD * 2, SamplingParams(temperature=0, max_tokens=41))
    outputs = finish_all(engine)["a"]
    sizes = [len(output.outputs[0].token_ids) for output in outputs]
    assert sizes == [*range(1, 41, count + 1), 41]
    stats = engine.stats()
    assert stats.num_output_tokens == 41 == len(outputs) + stats.num_accepted_tokens
    assert stats.num_proposed_tokens == stats.num_accepted_tokens
    assert (PERIOD * 9).startswith(outputs[-1].outputs[0].text)


def test_outputs_and_accepted_tokens_add_up(repeater: Checkpoint) -> None:
    engine = speculating(repeater.path)
    for prompt, expected in zip(repeater.prompts, repeater.expected, strict=True):
        before = engine.stats().num_accepted_tokens
        engine.add_request("a", sampling_params=GREEDY, prompt_token_ids=prompt)
        outputs = finish_all(engine)["a"]
        assert outputs[-1].outputs[0].token_ids == expected
        assert len(outputs) + engine.stats().num_accepted_tokens - before == 24


# ---- what ends an output --------------------------------------------------------------------------------------------


def last_steps(engine: LLMEngine, prompt: str | list[int], params: list[SamplingParams]) -> tuple[list[Any], set[int]]:
    """What came out, and by how many tokens the last steps made the outputs longer."""
    for i, each in enumerate(params):
        engine.add_request(str(i), {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}, each)
    outputs = finish_all(engine)
    finished = [outputs[str(i)] for i in range(len(params))]
    gains = set()
    for steps in finished:
        sizes = [0, *(len(step.outputs[0].token_ids) for step in steps)]
        gains.add(sizes[-1] - sizes[-2])
    ends = [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for steps in finished for c in steps[-1].outputs]
    return ends, gains


@pytest.mark.parametrize(
    "options",
    [
        *(dict(stop=[text]) for text in ("sat", "mat; the", "t on")),
        dict(stop=["no such", "mat;"], include_stop_str_in_output=True),
        dict(stop="cat", min_tokens=20),
    ],
    ids=str,
)
def test_stop_strings_amid_drafts(period_path: str, options: dict[str, Any]) -> None:
    """From every place in the period, so that they come at every place in a step."""
    gains = set()
    plain, engine = (make(period_path, enable_prefix_caching=False) for make in (LLMEngine, speculating))
    for start in range(1, len(PERIOD), 3):
        prompt = (PERIOD * 4)[: len(PERIOD) * 2 + start]
        params = [SamplingParams(temperature=0, max_tokens=30, **options)]
        expected, _ = last_steps(plain, prompt, params)
        actual, gain = last_steps(engine, prompt, params)
        assert actual == expected
        gains |= gain
    assert len(gains) > 1


def test_stop_tokens_and_lengths_amid_drafts(period_path: str) -> None:
    plain, engine = LLMEngine(period_path), speculating(period_path)
    assert engine.tokenizer is not None
    ids = sorted(set(engine.tokenizer(PERIOD).input_ids))
    params = [SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[i]) for i in ids]
    expected, _ = last_steps(plain, PERIOD * 2, params)
    actual, gains = last_steps(engine, PERIOD * 2, params)
    assert actual == expected and len(gains) >= 4
    params = [SamplingParams(temperature=0, max_tokens=n) for n in range(1, 30)]
    expected, _ = last_steps(plain, PERIOD * 2, params)
    actual, gains = last_steps(engine, PERIOD * 2, params)
    assert actual == expected and gains == {1, 2, 3, 4, 5, 6}


def test_end_of_sequence_amid_drafts(get_repeater: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    repeater = get_repeater("qwen3")
    shutil.copytree(repeater.path, tmp_path, dirs_exist_ok=True)
    gains = set()
    for eos in range(5):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        engine = speculating(str(tmp_path))
        for prompt in repeater.prompts:
            reference = greedy_reference(repeater.model, prompt, 24, eos_token_id=eos)
            ends, gain = last_steps(engine, prompt, [GREEDY])
            assert [tokens for _, tokens, _, _ in ends] == [reference]
            gains |= gain if reference[-1] == eos else set()
    assert len(gains) > 2


@pytest.fixture(scope="module")
def to_the_end(repeater: Checkpoint) -> list[list[int]]:
    """What Hugging Face adds to each prompt, up to the last position."""
    return [greedy_reference(repeater.model, prompt, MAX_LEN - len(prompt)) for prompt in repeater.prompts]


@pytest.mark.parametrize("max_model_len", [128, 50, 49, 48])
@pytest.mark.parametrize("count", [5, 30])
def test_up_to_the_last_position(
    repeater: Checkpoint, to_the_end: list[list[int]], max_model_len: int, count: int
) -> None:
    options = dict(max_model_len=max_model_len, block_size=8, num_blocks=-(-max_model_len // 8))
    engine = speculating(repeater.path, num_speculative_tokens=count, **options)
    pairs = zip(repeater.prompts, to_the_end, strict=True)
    prompts, expected = zip(*((prompt, end) for prompt, end in pairs if len(prompt) < max_model_len - 1), strict=True)
    outputs = run(engine, list(prompts), SamplingParams(temperature=0, max_tokens=None))
    for prompt, tokens, output in zip(prompts, expected, outputs, strict=True):
        assert output.outputs[0].token_ids == tokens[: max_model_len - len(prompt)]
        assert output.outputs[0].finish_reason == "length"
    expect_both_outcomes(engine)
    assert MAX_LEN == 128


def test_a_row_without_a_token_to_choose(repeater: Checkpoint) -> None:
    """It ends the request where it would without speculation, with what came before."""
    params = SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=[1])
    ends = []
    for options in (dict(), dict(speculation="ngram")):
        engine = LLMEngine(repeater.path, **options)
        engine.add_request("a", {"prompt_token_ids": [1, 1, 1, 3, 2] * 3}, params)
        engine._requests.by_id["a"].group.sequences[0].sampling.token_rules = TokenRules(bad_words=((1, 1, 1, 1),))
        output = finish_all(engine)["a"][-1]
        ends.append((output.outputs[0].token_ids, output.outputs[0].finish_reason, output.error))
    assert ends[0] == ends[1]
    assert ends[0][:2] == ([1, 1, 1], "error")
    assert engine.stats().num_accepted_tokens == 1


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(speculation="eagle"), ValueError, "speculation: expected None or \"ngram\", got 'eagle'"),
        (dict(speculation=True), ValueError, 'speculation: expected None or "ngram", got True'),
        (dict(num_speculative_tokens=0), ValueError, "num_speculative_tokens: expected an int >= 1, got 0"),
        (dict(num_speculative_tokens=2.0), TypeError, "num_speculative_tokens: expected an int, got 2.0"),
    ],
)
def test_wrong_arguments(repeater: Checkpoint, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLMEngine(repeater.path, **options)
