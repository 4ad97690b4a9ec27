"""The engine on a GPU: in fp32 it says what it says on the CPU, whatever moves between GPU and host meanwhile."""

from statistics import mean
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, SMALL, Checkpoint
from engine_runs import completions, run, token_ids

from pagedattn_serve import DEMO_MODEL, SamplingParams, StructuredOutput
from pagedattn_serve.engine import LLMEngine

pytestmark = pytest.mark.devices("cuda")

PROMPTS = ['"""Return the', "def main() -> None:\n", "A list of", "import", "The quick brown fox " * 8]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def engines(device: torch.device, model: str, **options: Any) -> tuple[LLMEngine, LLMEngine]:
    """The same on the GPU and on the CPU."""
    on_gpu = LLMEngine(model, device=str(device), dtype="float32", **options)
    return on_gpu, LLMEngine(model, device="cpu", dtype="float32", **options)


def test_demo_model(device: torch.device) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2)
    actual, expected = (run(engine, PROMPTS, greedy) for engine in engines(device, str(DEMO_MODEL), num_blocks=200))
    assert completions(actual) == completions(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
def test_random_models(device: torch.device, checkpoint: Checkpoint) -> None:
    """The tokens are Hugging Face's, too; half of the prompts wait for a place, and some give theirs up."""
    params = SamplingParams(temperature=0, max_tokens=24)
    for options in {"num_blocks": 40}, SMALL | {"num_blocks": 10}:
        engine = LLMEngine(checkpoint.path, device=str(device), dtype="float32", **options)
        outputs = run(engine, checkpoint.prompts, params)
        assert token_ids(outputs) == checkpoint.expected


def test_swapping(device: torch.device) -> None:
    """Blocks go to pinned memory and come back on a stream of their own."""
    options = dict(num_blocks=24, block_size=8, max_num_seqs=4, preemption_mode="swap", enable_prefix_caching=False)
    on_gpu, on_cpu = engines(device, str(DEMO_MODEL), **options)
    actual, expected = (run(engine, PROMPTS, GREEDY) for engine in (on_gpu, on_cpu))
    assert completions(actual) == completions(expected)
    assert on_gpu.stats().num_swaps == on_cpu.stats().num_swaps > 0


def test_sampling(device: torch.device) -> None:
    """A request's seed decides, not its batch. Random numbers are the device's: other ones than on the CPU."""
    params = [SamplingParams(temperature=0.8, top_p=0.9, max_tokens=24, n=2, seed=i) for i in range(len(PROMPTS))]
    engine = LLMEngine(str(DEMO_MODEL), device=str(device), dtype="float32", num_blocks=200)
    alone = [run(engine, [prompt], param)[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    assert completions(run(engine, PROMPTS, params)) == completions(alone)


def test_structured_output(device: torch.device) -> None:
    """Masks are filled in pinned memory while the GPU works."""
    pytest.importorskip("llguidance")
    form = StructuredOutput(regex="([a-z]{2,5} ){3}end")
    params = SamplingParams(temperature=0, max_tokens=40, structured_output=form)
    actual, expected = (run(engine, PROMPTS, params) for engine in engines(device, str(DEMO_MODEL), num_blocks=200))
    assert completions(actual) == completions(expected)
    assert all(output.outputs[0].text.endswith("end") for output in actual)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_dtypes(device: torch.device, dtype: str, kv_cache_dtype: str) -> None:
    """Rounding may change any token; a text is about as likely as on the CPU."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)

    def mean_logprob(where: str) -> float:
        engine = LLMEngine(str(DEMO_MODEL), device=where, dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_blocks=200)
        [output] = run(engine, [" ".join(PROMPTS)], params)
        assert output.prompt_logprobs is not None
        return mean(each.logprob for of_token in output.prompt_logprobs[1:] for each in of_token.values())

    assert mean_logprob(str(device)) == pytest.approx(mean_logprob("cpu"), abs=0.05)
