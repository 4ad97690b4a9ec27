"""Steps as CPU graphs: the same bits as without, for every family and number of sequences."""

import pytest
import torch
from checkpoints import FAMILIES, VARIANTS, Checkpoint
from engine_runs import run, token_ids

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.execution import decode_graphs
from pagedattn_serve.outputs import RequestOutput
from pagedattn_serve.sampling_params import SamplingParams


def count_model_calls(engine: LLMEngine) -> list[int]:
    """A list that gets the number of tokens of each call of the model, captured ones among them."""
    calls: list[int] = []
    model = engine.model_runner.model
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    return calls


def what_it_says(outputs: list[RequestOutput]) -> list[tuple[list[int], object]]:
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]


# What a cache holds hangs on no family, and its kernels are those of the op tests: fp8 for one of each family.
@pytest.mark.parametrize(
    ("checkpoint", "kv_cache_dtype"),
    [*((name, "auto") for name in VARIANTS), *((name, "fp8") for name in FAMILIES)],
    indirect=["checkpoint"],
)
def test_every_family(checkpoint: Checkpoint, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that end one after the other, in a cache with room for all of them and in one with room for some; two
    sequences more than a graph may have."""
    monkeypatch.setattr(decode_graphs, "MAX_SEQUENCES", 8)
    prompts = (checkpoint.prompts * 2)[:10]
    params = [SamplingParams(max_tokens=3 + i, temperature=0, logprobs=2) for i in range(len(prompts))]
    for num_blocks in (64, 10):
        options = dict(kv_cache_dtype=kv_cache_dtype, block_size=8, num_blocks=num_blocks)
        eager, engine = (LLMEngine(checkpoint.path, enforce_eager=enforce, **options) for enforce in (True, False))
        calls = count_model_calls(engine)
        assert what_it_says(run(engine, prompts, params)) == what_it_says(run(eager, prompts, params))
        num_calls = len(calls)
        run(engine, prompts[:1], params[-1])
        assert len(calls) <= num_calls + 2, "a prompt, and the capture for one sequence if there was none"


def test_memory_of_graphs_is_bounded(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of sequences that come and go. Would catch a server whose graphs take more memory with each number, a
    graph that is given up while its number still comes, and results that a given-up graph has left wrong."""
    eager, engine = (LLMEngine(llama.path, enforce_eager=enforce) for enforce in (True, False))
    greedy = SamplingParams(max_tokens=8, temperature=0)
    run(engine, llama.prompts[:4], greedy)
    graphs = engine.model_runner._graphs
    assert graphs is not None
    sizes = {num_seqs: graph.num_bytes for (_, num_seqs), (graph, _) in graphs._graphs.items()}
    assert sizes[4] > 0
    monkeypatch.setattr(decode_graphs, "MAX_BYTES", 2 * sizes[4])
    for num_seqs in (3, 4, 2, 4, 1, 4):
        prompts = llama.prompts[:num_seqs]
        assert token_ids(run(engine, prompts, greedy)) == token_ids(run(eager, prompts, greedy))
        assert sum(graph.num_bytes for graph, _ in graphs._graphs.values()) <= 2 * sizes[4]
        assert list(graphs._graphs)[-1] == (0, num_seqs)
    calls = count_model_calls(engine)
    run(engine, llama.prompts[:4], greedy)
    assert 4 not in calls, "no capture for a number that came just before"
    monkeypatch.setattr(decode_graphs, "MAX_BYTES", 0)
    assert token_ids(run(engine, llama.prompts[:3], greedy)) == token_ids(run(eager, llama.prompts[:3], greedy))
    assert list(graphs._graphs) == [(0, 3)], "the last graph stays, whatever it takes"


def test_quantized_and_16_bits(llama: Checkpoint) -> None:
    for options in (dict(quantization="int8"), dict(quantization="int4"), dict(dtype="bfloat16")):
        eager, engine = (LLMEngine(llama.path, enforce_eager=enforce, **options) for enforce in (True, False))
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
        assert what_it_says(run(engine, llama.prompts[:3], params)) == what_it_says(
            run(eager, llama.prompts[:3], params)
        )


def test_several_threads(llama: Checkpoint, several_threads: None) -> None:
    engine = LLMEngine(llama.path)
    greedy = SamplingParams(max_tokens=20, temperature=0)
    torch.set_num_threads(2)
    first = token_ids(run(engine, llama.prompts[:2], greedy))
    torch.set_num_threads(1)
    assert token_ids(run(engine, llama.prompts[:2], greedy)) == first == [ids[:20] for ids in llama.expected[:2]]


def test_a_capture_that_is_interrupted(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request's step captures again."""
    engine = LLMEngine(llama.path)
    greedy, prompt = SamplingParams(max_tokens=9, temperature=0), llama.prompts[5]
    engine.add_request("a", None, greedy, prompt)
    engine.step()
    layer = next(module for module in engine.model_runner.model.modules() if "MLP" in type(module).__name__)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.has_unfinished_requests()
    assert token_ids(run(engine, [prompt], greedy)) == token_ids(run(LLMEngine(llama.path), [prompt], greedy))
