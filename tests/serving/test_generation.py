"""End to end: the tokens of Hugging Face `generate`, whatever the cache, the budget and the company."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, Checkpoint, finish_all, greedy_reference, make_model, run, token_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.sampler import Sampler, SamplingRow
from pagedattn_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
# The longest request has 64 tokens, so 8 blocks of 8 are the least that holds it.
ENGINES: dict[str, dict[str, Any]] = {
    "large cache": dict(),
    "large blocks": dict(block_size=64, num_blocks=8),
    "small budget": dict(max_num_batched_tokens=7),
    "one token a step": dict(max_num_batched_tokens=1),
    "one at a time": dict(max_num_seqs=1),
    "small cache": dict(num_blocks=10, block_size=8),
    "smallest cache": dict(num_blocks=8, block_size=8),
    "all small": dict(num_blocks=9, block_size=8, max_num_seqs=3, max_num_batched_tokens=7),
}
PREEMPTING = {"small cache", "smallest cache", "all small"}


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_equals_hugging_face(checkpoint: Checkpoint, name: str) -> None:
    engine = LLMEngine(checkpoint.path, **ENGINES[name])
    outputs = run(engine, checkpoint.prompts, GREEDY)
    assert token_ids(outputs) == checkpoint.expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert (engine.stats().num_preemptions > 0) == (name in PREEMPTING)


def test_expected_outputs_are_worth_comparing(checkpoint: Checkpoint) -> None:
    """A model that says one thing to everybody would prove nothing."""
    assert len({tuple(tokens) for tokens in checkpoint.expected}) == len(checkpoint.expected)
    assert sum(len(set(tokens)) for tokens in checkpoint.expected) > 5 * len(checkpoint.expected)


def test_up_to_the_last_position(checkpoint: Checkpoint) -> None:
    engine = LLMEngine(checkpoint.path, max_num_batched_tokens=50)
    prompt = [i % VOCAB_SIZE for i in range(engine.max_model_len - 20)]
    [output] = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=None))
    assert output.outputs[0].token_ids == greedy_reference(checkpoint.model, prompt, 20)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_eos(checkpoint: Checkpoint, tmp_path: Path, file: str) -> None:
    early = checkpoint.expected[-1][:16]
    eos = max(early, key=early.index)  # the token that comes up latest
    assert early.index(eos) > 3
    expected = [greedy_reference(checkpoint.model, prompt, 24, eos_token_id=eos) for prompt in checkpoint.prompts]
    shutil.copytree(checkpoint.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    fields = json.loads((tmp_path / file).read_text()) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps({**fields, "eos_token_id": eos if file == "config.json" else [10**6, eos]}))

    outputs = run(LLMEngine(str(tmp_path)), checkpoint.prompts, GREEDY)
    assert token_ids(outputs) == expected
    assert len(expected[-1]) < 24 and expected[-1][-1] == eos  # it ends early, and the token is part of the output
    for output in outputs:
        assert output.outputs[0].finish_reason == ("stop" if output.outputs[0].token_ids[-1] == eos else "length")
    ignoring = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert token_ids(run(LLMEngine(str(tmp_path)), checkpoint.prompts, ignoring)) == checkpoint.expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "shape"), [("llama-gqa", dict(head_dim=24)), ("gpt2", dict(n_head=3))])
def test_half_precision(tmp_path: Path, name: str, shape: dict[str, int], dtype: str) -> None:
    """It runs with preemption, and of 40 first tokens 32 (bf16) or 38 (fp16) are those of fp32.

    No more than that: random models have close calls, and after one the rest of the output is another.
    """
    make_model(name, **shape).save_pretrained(tmp_path)  # a head size that is a multiple of 8
    prompts = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(i + 1)] for i in range(40)]
    expected = token_ids(run(LLMEngine(str(tmp_path), dtype="float32"), prompts, GREEDY))
    engine = LLMEngine(str(tmp_path), dtype=dtype, num_blocks=20, max_num_batched_tokens=30)
    actual = token_ids(run(engine, prompts, GREEDY))
    assert engine.stats().num_preemptions > 0
    assert [len(tokens) for tokens in actual] == [24] * 40
    num_equal = sum(a[0] == b[0] for a, b in zip(actual, expected, strict=True))
    assert num_equal >= (32 if dtype == "bfloat16" else 38)


def test_a_result_does_not_depend_on_the_company(checkpoint: Checkpoint) -> None:
    """Greedy and seeded requests beside each other and beside unseeded ones, alone and preempted."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.8, seed=1, max_tokens=24),
        SamplingParams(temperature=1.5, top_k=20, seed=2, max_tokens=24),
        SamplingParams(max_tokens=24),
        SamplingParams(top_p=0.9, seed=-3, max_tokens=24),
    ]
    params = [kinds[i % len(kinds)] for i in range(len(checkpoint.prompts))]
    fixed = [i for i, param in enumerate(params) if param.greedy or param.seed is not None]
    engine = LLMEngine(checkpoint.path)
    alone = [token_ids(run(engine, [checkpoint.prompts[i]], params[i]))[0] for i in fixed]
    assert engine.stats().num_preemptions == 0

    engine = LLMEngine(checkpoint.path, num_blocks=10, block_size=8, max_num_batched_tokens=20)
    together = token_ids(run(engine, checkpoint.prompts, params))
    assert engine.stats().num_preemptions > 0
    assert [together[i] for i in fixed] == alone
    backwards = token_ids(run(engine, checkpoint.prompts[::-1], params[::-1]))[::-1]
    assert [backwards[i] for i in fixed] == alone


def test_seeded_sampling_is_the_sampler_on_hugging_face_s_logits(checkpoint: Checkpoint) -> None:
    params = SamplingParams(temperature=0.9, top_k=30, top_p=0.95, seed=5, max_tokens=24)
    engine = LLMEngine(checkpoint.path, num_blocks=10, block_size=8)
    outputs = token_ids(run(engine, checkpoint.prompts, params))
    assert engine.stats().num_preemptions > 0
    for prompt, output in zip(checkpoint.prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = checkpoint.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert output == Sampler(0).sample(logits, [SamplingRow(params, i) for i in range(24)])


@settings(max_examples=30)
@given(
    options=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([8, 16, 32]),
            "max_num_seqs": st.integers(1, 10),
            "max_num_batched_tokens": st.integers(1, 60),
        }
    ),
    num_slots=st.integers(64, 200),
    # Which prompt, how many tokens, how many steps before the next one arrives; 0 tokens: aborted at that moment.
    arrivals=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 24), st.integers(0, 12)), min_size=1, max_size=14),
)
def test_any_load(
    llama: Checkpoint, options: dict[str, int], num_slots: int, arrivals: list[tuple[int, int, int]]
) -> None:
    engine = LLMEngine(llama.path, num_blocks=-(-num_slots // options["block_size"]), **options)
    results: dict[str, list[int]] = {}
    for i, (prompt, num_tokens, num_steps) in enumerate(arrivals):
        params = SamplingParams(temperature=0, max_tokens=num_tokens or 24)
        engine.add_request(str(i), sampling_params=params, prompt_token_ids=llama.prompts[prompt])
        for _ in range(num_steps):
            results.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
            engine.scheduler.block_manager.check_integrity()
        if num_tokens == 0:
            engine.abort_request(str(i))
    results.update((request_id, outputs[-1].outputs[0].token_ids) for request_id, outputs in finish_all(engine).items())
    for i, (prompt, num_tokens, _) in enumerate(arrivals):
        if num_tokens:
            assert results[str(i)] == llama.expected[prompt][:num_tokens]
        else:
            assert results.get(str(i), []) == llama.expected[prompt][: len(results.get(str(i), []))]
