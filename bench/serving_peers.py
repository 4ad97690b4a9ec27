"""What bench/serving.py compares the engine with: four ways to generate in transformers, on the same requests."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers

STATIC_BATCH_SIZE = 16
# Without flash attention, continuous batching in transformers computes each query against the keys of the whole batch
# and masks most of them, so that large batches lose: 16 requests and 1024 tokens were the best, or within noise of it,
# of 4 to 64 and 128 to 1024; torch.compile made it slower.
PEER_BATCH_SIZE, PEER_BATCH_TOKENS, PEER_PAGE_SIZE = 16, 1024, 256
PAGED_BATCH_SIZE, PAGED_PAGE_SIZE = 256, 16  # on the paged ops, as in the engine


@dataclass(frozen=True)
class Request:
    prompt_token_ids: list[int]
    max_tokens: int
    arrival: float = 0.0  # seconds after the start


@dataclass(frozen=True)
class Run:
    """What a system took for a list of requests, and the output of each."""

    seconds: float
    cpu_seconds: float
    token_ids: list[list[int]]


System = Callable[[list[Request]], Run]


def measure(generate: Callable[[], list[list[int]]]) -> Run:
    cpu_started, started = time.process_time(), time.monotonic()
    token_ids = generate()
    return Run(time.monotonic() - started, time.process_time() - cpu_started, token_ids)


def generate_static(model: Any, requests: list[Request], batch_size: int) -> list[list[int]]:
    token_ids = []
    for begin in range(0, len(requests), batch_size):
        batch = requests[begin : begin + batch_size]
        prompts = [request.prompt_token_ids for request in batch]
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        num_steps = max(request.max_tokens for request in batch)
        out = model.generate(padded, attention_mask=mask, max_new_tokens=num_steps, do_sample=False, pad_token_id=0)
        rows = out[:, width:].tolist()
        token_ids += [row[: request.max_tokens] for row, request in zip(rows, batch, strict=True)]
    return token_ids


def serve_continuous(model: Any, batch_size: int, page_size: int, requests: list[Request]) -> Run:
    """With pages for the longest request in each place of the batch, so that none is turned away."""
    longest = max(len(request.prompt_token_ids) + request.max_tokens for request in requests)
    config = transformers.ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=min(batch_size, len(requests)) * -(-longest // page_size),
        max_batch_tokens=PEER_BATCH_TOKENS,
        max_requests_per_batch=batch_size,
        allow_block_sharing=False,  # random prompts have nothing to share
        auto_switch_to_flash=False,
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager:

        def generate() -> list[list[int]]:
            for i, request in enumerate(requests):
                manager.add_request(request.prompt_token_ids, str(i), max_new_tokens=request.max_tokens)
            token_ids: dict[int, list[int]] = {}
            while len(token_ids) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.error is not None:
                    raise RuntimeError(result.error)
                if result is not None:
                    token_ids[int(result.request_id)] = result.generated_tokens
                elif not manager.is_running():
                    raise RuntimeError("its generation thread has ended")
            return [token_ids[i] for i in range(len(requests))]

        return measure(generate)


def load_peers(model: str, dtype: str) -> dict[str, System]:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it calls a missing psutil an error

    def load() -> Any:
        hf_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        hf_model.generation_config.eos_token_id = None  # as with ignore_eos
        return hf_model

    @cache
    def load_paged() -> Any:
        from pagedattn_ext.transformers import use_paged_attention  # with other versions of transformers: left out

        paged_model = load()
        use_paged_attention(paged_model)
        return paged_model

    hf_model = load()

    def paged(requests: list[Request]) -> Run:
        return serve_continuous(load_paged(), PAGED_BATCH_SIZE, PAGED_PAGE_SIZE, requests)

    def static(batch_size: int) -> System:
        return lambda requests: measure(lambda: generate_static(hf_model, requests, batch_size))

    return {
        "generate, one by one": static(1),
        f"generate, padded batches of {STATIC_BATCH_SIZE}": static(STATIC_BATCH_SIZE),
        "transformers continuous batching": partial(serve_continuous, hf_model, PEER_BATCH_SIZE, PEER_PAGE_SIZE),
        "the same on the paged ops": paged,
    }
