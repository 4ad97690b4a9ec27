"""mini-sglang's engine on a CPU, by the substitutions of `mini_sglang_on_cpu`: transformers' tokens, also by graphs."""

from pathlib import Path
from types import SimpleNamespace

import mini_sglang_on_cpu  # noqa: F401, before minisgl
import pytest
import torch
from minisgl import core
from minisgl.distributed import info
from minisgl.llm import LLM
from minisgl.scheduler import scheduler
from small_checkpoints import generate, make_prompts, save_model

BATCHES = [
    make_prompts([300, 1, 7, 255, 256, 257, 517]),
    make_prompts([300, 257, 517], shared=260),  # the radix cache has what they share
]
NUM_TOKENS = 20


GREEDY = core.SamplingParams(max_tokens=NUM_TOKENS)
OF_ONE_TOKEN = core.SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_k=1, top_p=0.9)  # FlashInfer's sampling


@pytest.mark.parametrize("backend", ["fa", "fi"])
def test_tokens_of_generate(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_TP_INFO", None)  # an engine expects to be the only one of its process
    monkeypatch.setattr(core, "_GLOBAL_CTX", None)
    monkeypatch.setattr(scheduler, "load_tokenizer", lambda path: SimpleNamespace(eos_token_id=-1, decode=str))
    model = save_model(tmp_path, head_dim=64)
    sizes = {"num_page_override": 4096, "max_seq_len_override": 1024, "cuda_graph_bs": [1, 4, 8]}
    llm = LLM(str(tmp_path), dtype=torch.float32, attention_backend=backend, **sizes)

    kinds: set[tuple[str, bool]] = set()  # of rows: their phase, and whether the cache has had what is before them
    prepare_metadata = llm.engine.attn_backend.prepare_metadata

    def see_kinds(batch: core.Batch) -> None:
        kinds.update((batch.phase, req.cached_len > 0) for req in batch.reqs)
        prepare_metadata(batch)

    monkeypatch.setattr(llm.engine.attn_backend, "prepare_metadata", see_kinds)
    for prompts, params in zip(BATCHES, (GREEDY, OF_ONE_TOKEN), strict=True):
        expected = [generate(model, prompt, NUM_TOKENS) for prompt in prompts]
        outputs = llm.generate(prompts, params)
        assert [output["token_ids"] for output in outputs] == expected
        assert min(len(set(tokens)) for tokens in expected) > 5
    assert kinds == {("prefill", False), ("prefill", True), ("decode", True)}
    llm.shutdown()
