"""How the tests run an `LLMEngine` to its end, and what they compare of its outputs."""

from collections.abc import Sequence
from typing import Any

from checkpoints import BEGINNING, SPEECH

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.text.detokenizer import REPLACEMENT


def finish_all(engine: LLMEngine, ranked: bool = False) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left: all outputs of each request, in order. Checks what must hold whatever the load.

    ranked: whether the best outputs are returned, so that others may take their place until the end.
    """
    outputs: dict[str, list[RequestOutput]] = {}
    manager = engine.scheduler.block_manager
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        manager.check_integrity()
    for steps in outputs.values():
        assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
        if ranked:
            continue
        final = steps[-1].outputs[0]
        for step in steps:  # nothing is taken back
            assert final.token_ids[: len(step.outputs[0].token_ids)] == step.outputs[0].token_ids
            assert final.text.startswith(step.outputs[0].text)
    assert manager.num_free_blocks == manager.num_blocks
    return outputs


def run(
    engine: LLMEngine, prompts: Sequence[str | list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """The finished requests, in order. One params for all, or one each."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
        if isinstance(prompt, str):
            engine.add_request(str(i), prompt, param)
        else:
            engine.add_request(str(i), sampling_params=param, prompt_token_ids=prompt)
    outputs = finish_all(engine, any(param.use_beam_search or param.num_sequences > param.n for param in each))
    return [outputs[str(i)][-1] for i in range(len(prompts))]


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def speak(engine: LLMEngine, **params: Any) -> list[RequestOutput]:
    """Every output of one request for SPEECH."""
    engine.add_request("speech", BEGINNING, SamplingParams(**{**dict(temperature=0, max_tokens=None), **params}))
    return finish_all(engine)["speech"]


def speech_ids(engine: LLMEngine) -> list[int]:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    return tokenizer(BEGINNING + SPEECH).input_ids[len(tokenizer(BEGINNING).input_ids) :]


def words(engine: LLMEngine) -> list[str]:
    """The text of SPEECH after each of its tokens, with broken characters at the end left out."""
    tokenizer, ids = engine.tokenizer, speech_ids(engine)
    assert tokenizer is not None
    return [tokenizer.decode(ids[: n + 1]).rstrip(REPLACEMENT) for n in range(len(ids))]


def completions(outputs: list[RequestOutput]) -> list[tuple[str, list[int], str | None]]:
    """What no batch may change. A logprob may change in its last bits, which depend on how the batch was summed."""
    return [(c.text, c.token_ids, c.finish_reason) for output in outputs for c in output.outputs]
