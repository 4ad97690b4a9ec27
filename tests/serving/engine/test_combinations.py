"""All mechanisms of the engine together: in fp32 its output is Hugging Face's, whichever of them are at work, on one
rank and on two."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from engine_runs import run, token_ids
from transformers import PreTrainedModel

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.sequence import ScheduledBatch

PLENTY = 400  # blocks of 8 tokens


class Watch:
    """Counts what the steps of an engine do."""

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_chunks = self.num_copies = self.num_swapped_in = 0
        schedule = engine.scheduler.schedule

        def watched() -> ScheduledBatch:
            batch = schedule()
            self.num_chunks += sum(scheduled.num_samples == 0 for scheduled in batch.sequences)
            self.num_copies += len(batch.blocks_to_copy)
            self.num_swapped_in += len(batch.blocks_to_swap_in)
            engine.scheduler.block_manager.check_integrity()
            return batch

        monkeypatch.setattr(engine.scheduler, "schedule", watched)


def expect_preemptions(engine: LLMEngine, watch: Watch, mode: str, small: bool) -> None:
    stats = engine.stats()
    if mode == "recompute":
        assert (stats.num_recomputes > 0) == small
    else:  # what finds the pool full, which is as large as the cache, is computed again
        assert stats.num_recomputes < max(stats.num_swaps, 1)
    assert (stats.num_swaps > 0) == (watch.num_swapped_in > 0) == (small and mode == "swap")
    assert (stats.num_used_blocks, stats.num_used_host_blocks) == (0, 0)


pytestmark = pytest.mark.usefixtures("ranks")

ON_ONE_RANK = list(product([1], [False, True], [False, True], ["recompute", "swap"], [False, True], [1, 4]))
ON_TWO_RANKS = [
    (2, caches, caches, mode, True, n) for caches in (False, True) for mode, n in (("recompute", 1), ("swap", 4))
]


@pytest.mark.parametrize(
    ("tensor_parallel_size", "prefix_caching", "chunked", "mode", "small", "n"), ON_ONE_RANK + ON_TWO_RANKS
)
def test_greedy_equals_hugging_face(
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    tensor_parallel_size: int,
    prefix_caching: bool,
    chunked: bool,
    mode: str,
    small: bool,
    n: int,
) -> None:
    engine = LLMEngine(
        llama.path,
        block_size=8,
        num_blocks=(10 if n == 1 else 20) if small else PLENTY,
        max_model_len=64,
        max_num_batched_tokens=19 if chunked else 2560,
        enable_prefix_caching=prefix_caching,
        preemption_mode=mode,
        tensor_parallel_size=tensor_parallel_size,
    )
    watch = Watch(engine, monkeypatch)
    params = SamplingParams(temperature=0, n=n, max_tokens=24, ignore_eos=True)
    outputs = run(engine, [prompt for prompt in llama.prompts for _ in range(2)], params)
    for i, output in enumerate(outputs):
        assert [completion.token_ids for completion in output.outputs] == [llama.expected[i // 2]] * n
    expect_preemptions(engine, watch, mode, small)
    assert (engine.stats().num_found_tokens > 0) == prefix_caching
    assert (watch.num_chunks > 0) == chunked or small  # a sequence that comes back may have to wait for its end
    assert (watch.num_copies > 0) == (n > 1)


BEAMS: list[dict[str, Any]] = [
    dict(num_beams=2),
    dict(num_beams=4, length_penalty=0.0, early_stopping=True, num_return_sequences=3),
    dict(num_beams=6, length_penalty=2.0, early_stopping="never", num_return_sequences=6),
    dict(num_beams=4, length_penalty=-1.0, num_return_sequences=2),
]


@pytest.mark.parametrize("options", BEAMS)
@pytest.mark.parametrize(
    ("tensor_parallel_size", "mode", "small", "prefix_caching"),
    [
        *((1, "swap", False, False), (1, "swap", True, True), (1, "recompute", True, True)),
        *((1, "recompute", True, False), (2, "swap", True, True)),
    ],
)
def test_beam_search_equals_hugging_face(
    llama: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    tensor_parallel_size: int,
    mode: str,
    small: bool,
    prefix_caching: bool,
) -> None:
    """With two tokens that end a beam, of which some come early and some never."""
    eos = sorted({llama.expected[0][3], llama.expected[1][9]})
    width = options["num_beams"]
    n = options.get("num_return_sequences", 1)
    engine = LLMEngine(
        llama.path,
        block_size=8,
        num_blocks=8 + 2 * width if small else PLENTY,
        max_model_len=64,
        max_num_batched_tokens=29 if small else 2560,
        enable_prefix_caching=prefix_caching,
        preemption_mode=mode,
        tensor_parallel_size=tensor_parallel_size,
    )
    engine.inputs._eos_token_ids = frozenset(eos)
    watch = Watch(engine, monkeypatch)
    params = SamplingParams(
        temperature=0,
        use_beam_search=True,
        n=n,
        best_of=width,
        length_penalty=options.get("length_penalty", 1.0),
        early_stopping=options.get("early_stopping", False),
        max_tokens=20,
    )
    outputs = run(engine, llama.prompts, params)
    lengths = set()
    for prompt, output in zip(llama.prompts, outputs, strict=True):
        expected = beams_of(llama.model, tuple(prompt), tuple(eos), tuple(options.items()))
        assert token_ids([output]) == expected[:1]
        assert [completion.token_ids for completion in output.outputs] == expected
        lengths |= {len(tokens) for tokens in expected}
    assert len(lengths) > 1 or params.length_penalty > 1  # which favours those that do not end
    expect_preemptions(engine, watch, mode, small)
    assert watch.num_copies > 0


@cache
def beams_of(
    model: PreTrainedModel, prompt: tuple[int, ...], eos: tuple[int, ...], options: tuple[tuple[str, Any], ...]
) -> list[list[int]]:
    """Hugging Face's beams without what they are padded with."""
    token_ids = torch.tensor([prompt])
    padding = model.config.vocab_size - 1
    assert padding not in eos
    out = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=list(eos),
        pad_token_id=padding,
        **dict(options),
    )
    beams = []
    for row in out[:, len(prompt) :].tolist():
        ends = [i for i, token_id in enumerate(row) if token_id in eos]
        beams.append(row[: ends[0] + 1] if ends else row)
    return beams


@pytest.mark.parametrize(("tensor_parallel_size", "mode"), [(1, "recompute"), (1, "swap"), (2, "swap")])
def test_seeded_samples_do_not_depend_on_the_batch(llama: Checkpoint, tensor_parallel_size: int, mode: str) -> None:
    """n outputs of a request with a seed differ from each other, and are the same alone, in a batch, and preempted."""
    params = SamplingParams(n=3, best_of=4, seed=5, max_tokens=20, logprobs=1)
    alone = [run(LLMEngine(llama.path, max_model_len=64), [prompt], params)[0] for prompt in llama.prompts[:4]]
    engine = LLMEngine(
        llama.path,
        block_size=8,
        num_blocks=20,
        max_model_len=64,
        preemption_mode=mode,
        tensor_parallel_size=tensor_parallel_size,
    )
    together = run(engine, llama.prompts[:4] * 3, params)
    assert engine.stats().num_preemptions > 0
    for i, output in enumerate(together):
        texts = [completion.token_ids for completion in output.outputs]
        assert texts == [completion.token_ids for completion in alone[i % 4].outputs]
        assert len({tuple(tokens) for tokens in texts}) == 3
        scores = [completion.cumulative_logprob for completion in output.outputs]
        assert scores == sorted(scores, reverse=True)
