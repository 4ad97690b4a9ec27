"""vLLM's arguments and names: what docs/from-vllm.md says of each is what the code does."""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import pagedattn_serve
from pagedattn_serve import (
    DEMO_MODEL,
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    GuidedDecodingParams,
    LLMEngine,
    SamplingParams,
    StructuredOutput,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from pagedattn_serve.vllm_arguments import (
    ASYNC_CALL_ARGUMENTS,
    ASYNC_ENGINE_ARGUMENTS,
    BEAM_SEARCH_ARGUMENTS,
    CALL_ARGUMENTS,
    CHAT_ARGUMENTS,
    ENGINE_ARGUMENTS,
    ENGINE_NAMES,
    FORM_ARGUMENTS,
    NONE_IS_DEFAULT,
    POOLING_ARGUMENTS,
    PROMPT_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    SAMPLING_NAMES,
    Argument,
    refuse,
)

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "from-vllm.md").read_text()
GREEDY = SamplingParams(temperature=0, max_tokens=4)

# What takes the arguments of each table, and under which heading of the page the table stands.
TABLES: dict[str, tuple[Mapping[str, Argument], Callable[..., Any]]] = {
    "LLM, EngineArgs and AsyncEngineArgs": (ENGINE_ARGUMENTS, lambda **one: EngineArgs("model", **one)),
    "SamplingParams": (SAMPLING_ARGUMENTS, SamplingParams),
    "StructuredOutputsParams": (FORM_ARGUMENTS, lambda **one: StructuredOutputsParams(regex="a", **one)),
    "LLM.generate": (CALL_ARGUMENTS, lambda **one: refuse(one, CALL_ARGUMENTS, "LLM.generate")),
    "LLM.chat": (CHAT_ARGUMENTS, lambda **one: refuse(one, CHAT_ARGUMENTS, "LLM.chat")),
    "LLM.beam_search": (BEAM_SEARCH_ARGUMENTS, lambda **one: refuse(one, BEAM_SEARCH_ARGUMENTS, "LLM.beam_search")),
    "LLM.embed and LLM.score": (POOLING_ARGUMENTS, lambda **one: refuse(one, POOLING_ARGUMENTS, "LLM.embed")),
    "Prompts": (PROMPT_ARGUMENTS, lambda **one: refuse(one, PROMPT_ARGUMENTS, "prompt")),
    "AsyncLLMEngine.from_engine_args": (
        ASYNC_ENGINE_ARGUMENTS,
        lambda **one: refuse(one, ASYNC_ENGINE_ARGUMENTS, "from_engine_args"),
    ),
    "AsyncLLMEngine.generate": (ASYNC_CALL_ARGUMENTS, lambda **one: refuse(one, ASYNC_CALL_ARGUMENTS, "generate")),
}
CASES = [
    pytest.param(take, name, argument, id=f"{heading}-{name}")
    for heading, (arguments, take) in TABLES.items()
    for name, argument in arguments.items()
]


def table_of(heading: str) -> list[str]:
    """The rows of the table under a heading that has the columns of `rows_of`."""
    section = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    table = re.search(r"^\| taken \| for any other value \|\n\|---\|---\|\n((?:\|.*\n)*)", section[1], re.MULTILINE)
    assert table is not None, heading
    return table[1].splitlines()


def rows_of(arguments: Mapping[str, Argument]) -> list[str]:
    """A row for all arguments with the same advice."""
    names_of: dict[tuple[str, bool], list[str]] = {}
    for name, (values, instead) in arguments.items():
        shown = "".join(f" {'=' if i == 0 else 'or'} `{value!r}`" for i, value in enumerate(values or ()))
        names_of.setdefault((instead, values is None), []).append(f"`{name}`{shown}")
    return [
        f"| {'; '.join(names)} | {f'(any value is taken: {instead})' if takes_any else instead} |"
        for (instead, takes_any), names in names_of.items()
    ]


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_says_what_the_code_does(heading: str) -> None:
    rows = rows_of(TABLES[heading][0])
    assert table_of(heading) == rows, "\n".join(rows)


@pytest.mark.parametrize(("take", "name", "argument"), CASES)
def test_a_value_that_means_what_happens_here(take: Callable[..., Any], name: str, argument: Argument) -> None:
    values = (None, *([object()] if argument.values is None else argument.values))
    for value in values:
        assert take(**{name: value}) == take()


@pytest.mark.parametrize(("take", "name", "argument"), [each for each in CASES if each.values[2].values is not None])
def test_any_other_value_is_refused_with_advice(take: Callable[..., Any], name: str, argument: Argument) -> None:
    for value in (object(), "another", 12345, ["another"]):
        with pytest.raises(ValueError, match=f"^{name}: expected .*{re.escape(argument.instead)}"):
            take(**{name: value})


@pytest.mark.parametrize("take", [take for _, take in TABLES.values()])
def test_an_argument_that_vllm_has_not(take: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'enable_lorra'"):
        take(enable_lorra=None)


def test_zero_is_no_false() -> None:
    assert EngineArgs("model", cpu_offload_gb=0.0) == EngineArgs("model")  # type: ignore[call-arg]
    for wrong in ({"cpu_offload_gb": False}, {"enable_lora": 0}, {"enable_chunked_prefill": 1}):
        with pytest.raises(ValueError, match="expected"):
            EngineArgs("model", **wrong)  # type: ignore[arg-type]


# ---- names and values that become others ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_vllm", "here"),
    [
        ({"kv_cache_memory_bytes": 1 << 20}, {"kv_cache_memory": 1 << 20}),
        ({"num_gpu_blocks_override": 7}, {"num_blocks": 7}),
        ({"spec_method": "ngram", "spec_tokens": 3}, {"speculation": "ngram", "num_speculative_tokens": 3}),
        ({name: None for name in ENGINE_NAMES}, {}),
        ({name: None for name in NONE_IS_DEFAULT}, {}),
        ({"distributed_executor_backend": "uni"}, {}),
        ({"speculative_config": None}, {}),
        ({"speculative_config": {"method": "ngram"}}, {"speculation": "ngram"}),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 4,
                    "prompt_lookup_min": 2,
                    "prompt_lookup_max": 4,
                }
            },
            {"speculation": "ngram", "num_speculative_tokens": 4},
        ),
    ],
)
def test_engine_arguments_of_other_names(of_vllm: dict[str, Any], here: dict[str, Any]) -> None:
    assert EngineArgs("model", **of_vllm) == EngineArgs("model", **here)
    assert all(name in PAGE for name in [*of_vllm, *here])


@pytest.mark.parametrize(
    ("of_vllm", "message"),
    [
        ({"kv_cache_memory_bytes": 1, "kv_cache_memory": 1}, "kv_cache_memory_bytes: expected None beside kv_cache"),
        ({"speculative_config": {"method": "eagle"}}, "speculative_config: expected {.*only speculation by n-grams"),
        ({"speculative_config": {"method": "ngram", "draft": 1}}, "speculative_config: expected {"),
        ({"speculative_config": "ngram"}, "speculative_config: expected {.*got 'ngram'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "num_speculative_tokens: expected"),
        ({"quantization": "awq"}, "quantization: expected None, .*leave it out for a quantized checkpoint"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "distributed_executor_backend: expected"),
        (
            {"distributed_executor_backend": "uni", "pipeline_parallel_size": 2},
            "distributed_executor_backend: expected",
        ),
    ],
)
def test_what_no_option_can_say(of_vllm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EngineArgs("model", **of_vllm)


def test_an_engine_is_made_of_vllm_s_arguments() -> None:
    assert AsyncEngineArgs is EngineArgs
    args: dict[str, Any] = {"enable_chunked_prefill": True, "kv_cache_memory_bytes": 1 << 20, "disable_log_stats": True}
    for llm_engine in (LLM(DEMO_MODEL, **args).llm_engine, LLMEngine(DEMO_MODEL, **args)):
        assert llm_engine.stats().num_blocks < 500


def test_sampling_params_of_other_names() -> None:
    assert (StructuredOutputsParams, GuidedDecodingParams) == (StructuredOutput, StructuredOutput)
    form = StructuredOutputsParams(choice=["a", "b"], json_object=None)  # type: ignore[arg-type]
    for name in SAMPLING_NAMES:
        assert SamplingParams(**{name: form}).structured_output is form  # type: ignore[arg-type]
    tight = StructuredOutputsParams(json={}, disable_any_whitespace=True)  # type: ignore[call-arg]
    assert tight == StructuredOutput(json={}, whitespace_pattern="")
    assert StructuredOutputsParams(regex="a", disable_any_whitespace=True) == StructuredOutput(regex="a")  # type: ignore[call-arg]


def test_from_optional_and_clone() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, max_tokens=None, seed=None)
    assert params == SamplingParams(top_p=0.5, max_tokens=None)
    assert params.clone() == params and params.clone() is not params
    assert SamplingParams.from_optional() == SamplingParams()


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO_MODEL, num_blocks=64, scheduling_policy="priority")


def test_prompts_and_cached_tokens(llm: LLM) -> None:
    text = "The with statement is used to wrap the execution of a block with methods defined by a context manager."
    ids = llm.llm_engine.tokenize(text)
    prompts: list[Any] = [
        TextPrompt(prompt=text),
        TokensPrompt(prompt_token_ids=ids),
        {"prompt": text, "cache_salt": "x"},
    ]
    found = []
    for prompt in prompts:
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == ids
        found.append(output.num_cached_tokens)
    assert found == [0, (len(ids) - 1) // 16 * 16, 0] and found[1] > 0
    with pytest.raises(ValueError, match=r"multi_modal_data: expected None .*models here take text alone"):
        llm.generate({"prompt": text, "multi_modal_data": {"image": 1}}, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 1 of 1: expected a dict with prompt, prompt_token_ids or both"):
        llm.generate({"cache_salt": "x"}, GREEDY, use_tqdm=False)


def test_no_cached_tokens_without_prefix_caching() -> None:
    llm = LLM(DEMO_MODEL, num_blocks=64, enable_prefix_caching=False)
    outputs = [llm.generate("A class definition " * 9, GREEDY, use_tqdm=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


def test_priorities(llm: LLM) -> None:
    alone = LLM(DEMO_MODEL, num_blocks=64, scheduling_policy="priority", max_num_seqs=1)
    outputs = alone.generate(["A", "B", "C"], GREEDY, use_tqdm=False, priority=[1, 0, -1])
    times = [output.metrics.finished_time for output in outputs]
    assert times == sorted(times, reverse=True)
    assert llm.generate("A", GREEDY, use_tqdm=False, priority=3)
    with pytest.raises(ValueError, match="priority: expected one for all or one for each of 2 prompts, got 1"):
        llm.generate(["A", "B"], GREEDY, use_tqdm=False, priority=[0])
    plain = LLM(DEMO_MODEL, num_blocks=64)
    assert plain.generate(["A", "B"], GREEDY, use_tqdm=False, priority=[0, 0])
    with pytest.raises(ValueError, match='prompt 2 of 2: priority: expected 0, as the scheduling policy is "fcfs"'):
        plain.generate(["A", "B"], GREEDY, use_tqdm=False, priority=[0, 1])


def test_calls_refuse_what_is_not_here(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "A class"}]
    for call in (
        lambda: llm.generate("A", GREEDY, lora_request=1),
        lambda: llm.chat(conversation, GREEDY, lora_request=1),
        lambda: llm.beam_search("A", BeamSearchParams(2, 4), lora_request=1),
    ):
        with pytest.raises(ValueError, match=r"^lora_request: expected None \(merge the adapter"):
            call()
    assert llm.generate("A", GREEDY, use_tqdm=False, lora_request=None)
    assert llm.chat(conversation, GREEDY, use_tqdm=False, lora_request=None, tools=None, priority=0)


def test_variables_of_a_chat_template(llm: LLM) -> None:
    template = "{{ messages[0].content }}{% if shout %}!{% endif %}"
    conversation = [{"role": "user", "content": "A class"}]
    for variables, prompt in ((None, "A class"), ({"shout": True}, "A class!")):
        [output] = llm.chat(
            conversation, GREEDY, use_tqdm=False, chat_template=template, chat_template_kwargs=variables
        )
        assert output.prompt == prompt
    with pytest.raises(ValueError, match="chat_template_kwargs: expected variables of the template, got tokenize"):
        llm.chat(conversation, GREEDY, chat_template=template, chat_template_kwargs={"tokenize": True})
    with pytest.raises(TypeError, match="chat_template_kwargs: expected a dict with names, got list"):
        llm.chat(conversation, GREEDY, chat_template=template, chat_template_kwargs=["shout"])  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 4])
def test_beam_search(llm: LLM, width: int) -> None:
    prompts: list[Any] = [TextPrompt(prompt="The with"), "A class"]
    outputs = llm.beam_search(prompts, BeamSearchParams(width, 8))
    params = SamplingParams(temperature=0, max_tokens=8)
    if width > 1:
        params = SamplingParams(n=width, use_beam_search=True, early_stopping="never", temperature=0, max_tokens=8)
    for output, expected in zip(outputs, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len(output.sequences) == width
        for beam, other in zip(output.sequences, expected.outputs, strict=True):
            assert beam.tokens == expected.prompt_token_ids + other.token_ids
            assert beam.cum_logprob == other.cumulative_logprob
            assert beam.text is not None and expected.prompt is not None and beam.text.startswith(expected.prompt)
    [few] = llm.beam_search("A class", BeamSearchParams(width, 8, allowed_token_ids=[341, 397]))
    assert all(set(beam.tokens[-8:]) <= {341, 397} for beam in few.sequences)
    with pytest.raises(ValueError, match=r"priority: expected .*2.*, got 1"):
        llm.beam_search(prompts, BeamSearchParams(width, 8), priority=[0])
    with pytest.raises(TypeError, match="params: expected BeamSearchParams, got SamplingParams"):
        llm.beam_search(prompts, params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="beam_width: expected an int >= 1, got 0"):
        BeamSearchParams(0, 8)


def test_the_first_requests_start_the_engine() -> None:
    async def read(engine: AsyncLLMEngine, name: str) -> str:
        outputs = [output async for output in engine.generate("A class", GREEDY, name, lora_request=None)]
        return outputs[-1].outputs[0].finish_reason or ""

    async def main() -> None:
        args = AsyncEngineArgs(DEMO_MODEL, num_blocks=64, enable_log_requests=False)  # type: ignore[call-arg]
        engine = AsyncLLMEngine.from_engine_args(args, start_engine_loop=True)
        assert await asyncio.gather(*(read(engine, str(i)) for i in range(3))) == ["length"] * 3
        with pytest.raises(RuntimeError, match="start: expected to be called once"):
            await engine.start()
        with pytest.raises(ValueError, match="lora_request: expected None"):
            await anext(engine.generate("A class", lora_request=1))
        await engine.shutdown()

    asyncio.run(main())
    with pytest.raises(ValueError, match="stat_loggers: expected None"):
        AsyncLLMEngine.from_engine_args(EngineArgs(DEMO_MODEL), stat_loggers=[print])


# ---- what the page says of names ------------------------------------------------------------------------------------


def test_the_page_has_every_name() -> None:
    """Every public name that vLLM has too, and every option and parameter that is here."""
    for name in re.findall(r"^\| `from vllm[\w.]* import (\w+)` \| `(?:pagedattn_serve\.)?(\w+)`", PAGE, re.MULTILINE):
        assert hasattr(pagedattn_serve, name[1]), name
    own = inspect.signature(EngineArgs).parameters.keys() | inspect.signature(SamplingParams).parameters.keys()
    own |= {each.name for each in fields(BeamSearchParams)}
    assert [name for name in sorted(own) if f"`{name}`" not in PAGE] == []
