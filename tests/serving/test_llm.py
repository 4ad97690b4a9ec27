"""LLM.generate: what goes in, in which order it comes out, and that an error leaves nothing behind."""

from typing import Any

import pytest
from checkpoints import Checkpoint, token_ids

from pagedattn_serve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture
def llm(llama: Checkpoint) -> LLM:
    return LLM(llama.path, num_blocks=10, block_size=8)


@pytest.fixture
def text_llm(text_model: str) -> LLM:
    return LLM(text_model, num_blocks=50)


def expect_empty(llm: LLM) -> None:
    assert not llm.llm_engine.has_unfinished_requests()
    assert (llm.llm_engine.stats().num_waiting, llm.llm_engine.stats().num_running) == (0, 0)
    manager = llm.llm_engine.scheduler.block_manager
    manager.check_integrity()
    assert manager.num_used_blocks == 0
    assert llm.generate([], GREEDY) == []


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, llama: Checkpoint) -> None:
    lengths = [24, 1, 10, 3, 24, 2, 5, 7]  # they finish in another order
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    outputs = llm.generate(None, params, prompt_token_ids=llama.prompts, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == llama.prompts
    assert token_ids(outputs) == [full[:length] for full, length in zip(llama.expected, lengths, strict=True)]
    assert all(output.finished and output.prompt is None for output in outputs)
    assert len({output.request_id for output in outputs}) == len(outputs)
    expect_empty(llm)


def test_one_params_for_all_and_two_calls_in_a_row(llm: LLM, llama: Checkpoint) -> None:
    for prompts in (slice(0, 5), slice(3, 8)):
        outputs = llm.generate(None, GREEDY, prompt_token_ids=llama.prompts[prompts], use_tqdm=False)
        assert token_ids(outputs) == [full[:10] for full in llama.expected[prompts]]
    expect_empty(llm)


def test_no_params_is_the_default(llm: LLM, llama: Checkpoint) -> None:
    [output] = llm.generate(prompt_token_ids=llama.prompts[:1], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens


def test_nothing_in_nothing_out(llm: LLM, text_llm: LLM) -> None:
    assert llm.generate([]) == llm.generate([], GREEDY) == llm.generate([], []) == []
    assert llm.generate(prompt_token_ids=[]) == text_llm.generate([]) == []


def test_texts(text_llm: LLM) -> None:
    [alone] = text_llm.generate("the cat", GREEDY, use_tqdm=False)
    one, other = text_llm.generate(["the cat", "🙂 é"], GREEDY, use_tqdm=False)
    assert (alone.prompt, one.prompt, other.prompt) == ("the cat", "the cat", "🙂 é")
    assert alone.outputs == one.outputs != other.outputs
    tokenizer = text_llm.llm_engine.tokenizer
    assert tokenizer is not None
    for output in (one, other):
        assert output.prompt_token_ids == tokenizer(output.prompt).input_ids
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_progress_is_shown_if_asked_for(text_llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    text_llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    text_llm.generate(["a", "b"], GREEDY)
    out, err = capfd.readouterr()
    assert out == "" and "2/2" in err


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (dict(), ValueError, "prompts: expected either"),
        (dict(prompts=["a"], prompt_token_ids=[[1]]), ValueError, "prompts: expected either"),
        (dict(prompts=["a", "b"], sampling_params=[GREEDY]), ValueError, "sampling_params: .* 2 prompts, got 1"),
        (dict(prompts=[], sampling_params=[GREEDY]), ValueError, "sampling_params: .* 0 prompts, got 1"),
        (dict(prompts=["a", "b"], sampling_params=(GREEDY, GREEDY)), TypeError, "sampling_params: .*tuple"),
        (dict(prompts=["a"], sampling_params=0.5), TypeError, "sampling_params: .*float"),
        # The last of several is wrong: those before it must not stay.
        (dict(prompts=["a", "b", ""]), ValueError, "expected 1 to 127 tokens"),
        (dict(prompts=["a", "b", "b" * 500]), ValueError, "expected 1 to 127 tokens"),
        (dict(prompts=["a", 5]), TypeError, "prompt: expected a string, got int"),
        (dict(prompts=["a", None]), ValueError, "prompt"),
        (dict(prompt_token_ids=[[1, 2], [3, 300]]), ValueError, "prompt_token_ids: .*279.*got 300"),
        (dict(prompt_token_ids=[1, 2]), TypeError, "prompt_token_ids"),  # one list where a list of lists is due
    ],
)
def test_an_error_comes_before_anything_runs(
    text_llm: LLM, args: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        text_llm.generate(**args, use_tqdm=False)
    assert text_llm.llm_engine.stats().num_output_tokens == 0
    expect_empty(text_llm)
    [output] = text_llm.generate("the", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 10


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_middle_leaves_nothing_behind(
    llm: LLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    execute, num_calls = llm.llm_engine.model_runner.execute, 0

    def fail_at_the_fifth(batch: Any) -> list[int]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            raise error("here")
        return execute(batch)

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.model_runner, "execute", fail_at_the_fifth)
        with pytest.raises(error, match="here"):
            llm.generate(None, GREEDY, prompt_token_ids=llama.prompts, use_tqdm=False)
    assert num_calls == 5 and llm.llm_engine.stats().num_output_tokens > 0
    expect_empty(llm)
    outputs = llm.generate(None, GREEDY, prompt_token_ids=llama.prompts, use_tqdm=False)
    assert token_ids(outputs) == [full[:10] for full in llama.expected]


def test_a_request_of_somebody_else_in_the_engine(llm: LLM, llama: Checkpoint) -> None:
    """`llm.llm_engine` is open to all: generate returns its own outputs, all of them."""
    llm.llm_engine.add_request("mine", sampling_params=SamplingParams(max_tokens=1), prompt_token_ids=[1])
    params = [SamplingParams(temperature=0, max_tokens=length) for length in (3, 5, 10)]
    outputs = llm.generate(None, params, prompt_token_ids=llama.prompts[:3], use_tqdm=False)
    assert token_ids(outputs) == [full[:n] for full, n in zip(llama.expected, (3, 5, 10), strict=False)]
