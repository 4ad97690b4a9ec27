"""docs/from-vllm.md has every argument of vLLM's classes and calls, and every field of its outputs."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, AsyncEngineArgs, AsyncLLMEngine, CompletionOutput, RequestOutput, SamplingParams
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-vllm.md").read_text()


def public(names: Any) -> list[str]:
    return [name for name in names if not name.startswith("_") and name not in ("self", "kwargs")]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(public(each.name for each in dataclasses.fields(AsyncEngineArgs)), id="AsyncEngineArgs"),
        pytest.param(public(SamplingParams.__struct_fields__), id="SamplingParams"),
        pytest.param(public(BeamSearchParams.__struct_fields__), id="BeamSearchParams"),
        pytest.param(
            public(each.name for each in dataclasses.fields(StructuredOutputsParams)), id="StructuredOutputsParams"
        ),
        pytest.param(public(each.name for each in dataclasses.fields(CompletionOutput)), id="CompletionOutput"),
        *(
            pytest.param(public(inspect.signature(function).parameters), id=function.__qualname__)
            for function in (
                *(LLM.__init__, LLM.generate, LLM.chat, LLM.beam_search, RequestOutput.__init__),
                *(AsyncLLMEngine.from_engine_args, AsyncLLMEngine.generate, SamplingParams.from_optional),
            )
        ),
    ],
)
def test_every_name_is_on_the_page(names: list[str]) -> None:
    assert [name for name in names if f"`{name}" not in PAGE and f"{name}`" not in PAGE] == []
