"""LLM.generate: what goes in, in which order it comes out, and that an error leaves nothing behind."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Checkpoint
from engine_runs import completions, token_ids

from pagedattn_serve import LLM, LLMEngine, PoolingParams, SamplingParams
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.execution.sampler import SamplerOutput

GREEDY = SamplingParams(temperature=0, max_tokens=10)
BEAMS = SamplingParams(use_beam_search=True, n=2, temperature=0)


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
    assert completions([alone]) == completions([one]) != completions([other])
    tokenizer = text_llm.get_tokenizer()
    assert tokenizer is not None
    for output in (one, other):
        assert output.prompt_token_ids == tokenizer(output.prompt).input_ids
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_a_tuple_of_prompts(text_llm: LLM) -> None:
    listed = text_llm.generate(["the cat", "é"], GREEDY, use_tqdm=False)
    assert completions(text_llm.generate(("the cat", "é"), GREEDY, use_tqdm=False)) == completions(listed)
    token_ids = tuple(output.prompt_token_ids for output in listed)
    by_ids = text_llm.generate(prompt_token_ids=token_ids, sampling_params=GREEDY, use_tqdm=False)
    assert completions(by_ids) == completions(listed)


def test_every_form_of_prompts(text_llm: LLM) -> None:
    texts = ["the cat", "é é é"]
    expected = text_llm.generate(texts, GREEDY, use_tqdm=False)
    ids = [output.prompt_token_ids for output in expected]
    several: list[Any] = [
        [{"prompt": text} for text in texts],
        tuple({"prompt_token_ids": each} for each in ids),
        ids,
        tuple(map(tuple, ids)),
        [np.array(each) for each in ids],
        [torch.tensor(each) for each in ids],
        [texts[0], ids[1]],
        [{"prompt_token_ids": ids[0]}, texts[1]],
    ]
    for prompts in several:
        assert completions(text_llm.generate(prompts, GREEDY, use_tqdm=False)) == completions(expected)
    for prompt in (ids[0], tuple(ids[0]), np.array(ids[0]), torch.tensor(ids[0]), {"prompt": texts[0]}):
        assert completions(text_llm.generate(prompt, GREEDY, use_tqdm=False)) == completions(expected[:1])
    by_ids = text_llm.generate(prompt_token_ids=ids[0], sampling_params=GREEDY, use_tqdm=False)
    assert completions(by_ids) == completions(expected[:1])
    rows = text_llm.generate(np.array([ids[0], ids[0]]), GREEDY, use_tqdm=False)
    assert completions(rows) == 2 * completions(expected[:1])


def test_a_prompt_with_its_text_and_its_ids(text_llm: LLM) -> None:
    """The ids count; the text is shown."""
    ids = text_llm.llm_engine.tokenize("the cat")
    [expected] = text_llm.generate("the cat", GREEDY, use_tqdm=False)
    [output] = text_llm.generate({"prompt": "the hat", "prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("the hat", ids)
    assert completions([output]) == completions([expected])


def test_the_same_prompt_several_times(text_llm: LLM) -> None:
    outputs = text_llm.generate(["the cat"] * 5, GREEDY, use_tqdm=False)
    assert len({output.request_id for output in outputs}) == 5
    assert completions(outputs) == 5 * completions(text_llm.generate("the cat", GREEDY, use_tqdm=False))


def test_one_token_and_more_than_there_is_room_for(llm: LLM, llama: Checkpoint) -> None:
    """The cache holds 80 tokens, so that is where all end that want more."""
    lengths = [1, None, 10**9, 1, 1000, 1, None, 2**63]
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    outputs = llm.generate(None, params, prompt_token_ids=llama.prompts, use_tqdm=False)
    for output, prompt, expected, length in zip(outputs, llama.prompts, llama.expected, lengths, strict=True):
        ids = output.outputs[0].token_ids
        assert len(ids) == (1 if length == 1 else 80 - len(prompt)) and ids[:24] == expected[: len(ids)]
        assert output.outputs[0].finish_reason == "length"
    expect_empty(llm)


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
        (dict(prompts=["a"], sampling_params=(GREEDY, GREEDY)), ValueError, "sampling_params: .* 1 prompts, got 2"),
        (dict(prompts=["a"], sampling_params=0.5), TypeError, "^prompt 1 of 1: sampling_params: .*float"),
        (dict(prompts="a", sampling_params=[]), ValueError, "sampling_params: .* 1 prompts, got 0"),
        (dict(prompts=["a", "b"], sampling_params=[GREEDY, {}]), TypeError, "^prompt 2 of 2: sampling_params: .*dict"),
        (dict(prompts="a", sampling_params=PoolingParams()), TypeError, "^prompt 1 of 1: .* SamplingParams, got Pool"),
        (dict(prompts=b"a"), TypeError, "^prompts: expected a string or a list of strings, got bytes"),
        (dict(prompts=5), TypeError, "^prompts: .*got int"),
        (dict(prompts={"a": 1}), ValueError, "^prompt 1 of 1: expected a dict with prompt, .*got a$"),
        (dict(prompts=["a", {}]), ValueError, "^prompt 2 of 2: expected a dict with prompt, .*got none$"),
        (dict(prompts=[1, "a"]), TypeError, "^prompt 1 of 1: prompt_token_ids: expected an int, got 'a'"),
        (dict(prompts=["a", 1]), TypeError, "^prompt 2 of 2: expected a string, token ids or a dict, got int"),
        (dict(prompts=np.array(5)), TypeError, "^prompts: expected a string .*got int"),
        (dict(prompts={"a", "b"}), TypeError, "^prompts: .*got set"),
        (dict(prompts=(prompt for prompt in "ab")), TypeError, "^prompts: .*got generator"),
        (dict(prompts=None, sampling_params=GREEDY), ValueError, "^prompts: expected either"),
        (dict(prompts=None, prompt_token_ids=None), ValueError, "^prompts: expected either"),
        (dict(prompts=[], prompt_token_ids=[]), ValueError, "^prompts: expected either"),
        (dict(prompts=""), ValueError, "^prompt 1 of 1: expected 1 to 127 tokens .* got 0$"),
        (dict(prompts="b" * 500), ValueError, "^prompt 1 of 1: expected 1 to 127 tokens .* got 500$"),
        (dict(prompts="b" * 500, sampling_params=BEAMS), ValueError, "^prompt 1 of 1: expected 1 to 127 .* got 500$"),
        # The last of several is wrong: those before it must not stay.
        (dict(prompts=["a", "b", ""]), ValueError, "^prompt 3 of 3: expected 1 to 127 tokens"),
        (dict(prompts=["a", "b", "b" * 500]), ValueError, "^prompt 3 of 3: expected 1 to 127 tokens"),
        (dict(prompts=["a", "", "b", "c"]), ValueError, "^prompt 2 of 4: expected 1 to 127 tokens"),
        (dict(prompts=["a", 5]), TypeError, "^prompt 2 of 2: expected a string, token ids or a dict, got int"),
        (dict(prompts=["a", b"b"]), TypeError, "^prompt 2 of 2: expected a string, token ids or a dict, got bytes"),
        (dict(prompts=["a", ["b"]]), TypeError, "^prompt 2 of 2: prompt_token_ids: expected an int, got 'b'"),
        (dict(prompts=["a", None]), ValueError, "^prompt 2 of 2: expected either"),
        (dict(prompt_token_ids=[[1, 2], [3, 300]]), ValueError, "^prompt 2 of 2: prompt_token_ids: .*279.*got 300"),
        (dict(prompt_token_ids=[[1], []]), ValueError, "^prompt 2 of 2: expected 1 to 127 tokens .* got 0$"),
        (dict(prompt_token_ids=[[1], "a"]), TypeError, "^prompt 2 of 2: prompt_token_ids: expected a list"),
        (dict(prompt_token_ids=[[1], [2.0]]), TypeError, "^prompt 2 of 2: prompt_token_ids: expected an int"),
        (dict(prompt_token_ids="a"), TypeError, "^prompt_token_ids: expected a list of lists, got str"),
        (dict(prompt_token_ids=[[1], 2]), TypeError, "^prompt 2 of 2: prompt_token_ids: expected a list"),
        (dict(prompt_token_ids={1, 2}), TypeError, "^prompt_token_ids: expected a list of lists, got set"),
        (dict(prompt_token_ids=5), TypeError, "^prompt_token_ids: expected a list of lists, got int"),
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


@pytest.mark.parametrize("params", [0, "", False, np.array([1, 2]), GREEDY])
def test_params_of_an_embedding_of_a_wrong_type(text_llm: LLM, params: Any) -> None:
    """Those that are False, too: they are no default."""
    with pytest.raises(TypeError, match=r"^prompt 1 of 1: pooling_params: expected PoolingParams, got "):
        text_llm.embed("the", params, use_tqdm=False)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_middle_leaves_nothing_behind(
    llm: LLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    execute, num_calls = llm.llm_engine.model_runner.execute, 0

    def fail_at_the_fifth(batch: Any) -> SamplerOutput:
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


def test_calls_of_several_threads_wait_for_each_other(llm: LLM, llama: Checkpoint) -> None:
    def generate(i: int) -> list[int]:
        [output] = llm.generate(None, GREEDY, prompt_token_ids=[llama.prompts[i % 8]], use_tqdm=False)
        return list(output.outputs[0].token_ids)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(generate, range(40))) == [llama.expected[i % 8][:10] for i in range(40)]
    expect_empty(llm)


def test_a_call_from_within_a_call(llm: LLM, llama: Checkpoint) -> None:
    def nested(_: object, logits: torch.Tensor) -> torch.Tensor:
        llm.generate(None, GREEDY, prompt_token_ids=[[1]], use_tqdm=False)
        return logits

    params = SamplingParams(max_tokens=2, logits_processors=[nested])
    [output] = llm.generate(None, params, prompt_token_ids=[[1]], use_tqdm=False)
    assert output.error is not None and "got one from within a call" in output.error
    test_one_params_for_all_and_two_calls_in_a_row(llm, llama)


# --- the arguments ---


def arguments(function: Any) -> list[tuple[str, Any]]:
    """Names and defaults of those that may be given by position, in order."""
    parameters = inspect.signature(function).parameters.values()
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [(parameter.name, parameter.default) for parameter in parameters if parameter.kind is kind]


def test_arguments_of_the_constructor() -> None:
    """Those of the engine, in the same order, as its docstring lists them."""
    assert arguments(LLM) == [
        ("model", inspect.Parameter.empty),
        ("tokenizer", None),
        ("dtype", "auto"),
        ("device", "auto"),
        ("block_size", 16),
        ("kv_cache_memory", None),
        ("num_blocks", None),
        ("max_num_seqs", 256),
        ("max_num_batched_tokens", 2560),
        ("max_model_len", None),
        ("swap_space", 4),
        ("gpu_memory_utilization", 0.9),
        ("seed", 0),
        ("tensor_parallel_size", 1),
        ("enforce_eager", False),
        ("trust_remote_code", False),
        ("preemption_mode", "auto"),
        ("enable_prefix_caching", True),
        ("scheduling_policy", "fcfs"),
        ("kv_cache_dtype", "auto"),
        ("kv_scales", None),
        ("speculation", None),
        ("num_speculative_tokens", 5),
        ("quantization", None),
        ("max_beam_width", 32),
        ("distributed_executor_backend", "mp"),
        ("prefix_cache_dir", None),
        ("prefix_cache_dir_size", 10 << 30),
        ("allow_download", False),
        ("load_format", "auto"),
        ("cpu_memory_utilization", None),
        ("pipeline_parallel_size", 1),
    ]
    assert inspect.signature(LLM) == inspect.signature(LLMEngine)
    assert EngineArgs.__doc__ is not None
    places = [EngineArgs.__doc__.index(f"\n    {name}: ") for name, _ in arguments(LLM)]
    assert places == sorted(places)


def test_arguments_of_generate() -> None:
    assert arguments(LLM.generate)[1:] == [
        ("prompts", None),
        ("sampling_params", None),
        ("prompt_token_ids", None),
        ("use_tqdm", True),
    ]


def test_every_argument_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a value of its own, by position: one in another's place would be seen."""
    seen: dict[str, Any] = {}

    def record(self: LLMEngine, *args: Any, **kwargs: Any) -> None:
        seen.update(inspect.signature(real).bind(self, *args, **kwargs).arguments)

    real = LLMEngine.__init__
    monkeypatch.setattr(LLMEngine, "__init__", record)
    values: list[Any] = ["m", "t", "bfloat16", "cuda:1", 32, None, 9, 3, 77, 66, 1.5, 0.5, 8, 1, True, False, "swap"]
    values += [False, "priority", "fp8", "s", "ngram", 2, "int4", 7, "ray", None, 5, True, "dummy", None, 4]
    LLM(*values)
    del seen["self"]
    assert seen == {name: value for (name, _), value in zip(arguments(LLM), values, strict=True)}


def test_positional_arguments(text_model: str, llama: Checkpoint) -> None:
    llm = LLM(llama.path, text_model, "float32", "cpu", 8, None, 30, 5, 100, 64, 0, 0.5, 3)
    assert llm.get_tokenizer() is not None
    engine = llm.llm_engine
    assert (engine.stats().num_blocks, engine.max_model_len) == (30, 64)
    config = engine.scheduler.config
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (5, 100)
    outputs = llm.generate(None, GREEDY, llama.prompts, False)
    assert token_ids(outputs) == [full[:10] for full in llama.expected]


def test_get_tokenizer(llm: LLM, text_llm: LLM) -> None:
    assert llm.get_tokenizer() is None
    tokenizer = text_llm.get_tokenizer()
    assert tokenizer is text_llm.llm_engine.tokenizer is not None
    assert tokenizer.decode(tokenizer("the cat 🙂").input_ids) == "the cat 🙂"
