"""The engine beside four ways to generate in transformers, in turns, on the same requests."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import transformers
from harness import print_table

from serve.run import Run
from serve.workloads import Request

STATIC_BATCH_SIZE = 16
# Without flash attention, continuous batching in transformers computes each query against the keys of the whole batch
# and masks most of them, so that large batches lose: 16 requests and 1024 tokens were the best, or within noise of it,
# of 4 to 64 and 128 to 1024; torch.compile made it slower.
PEER_BATCH_SIZE, PEER_BATCH_TOKENS, PEER_PAGE_SIZE = 16, 1024, 256
PAGED_BATCH_SIZE, PAGED_PAGE_SIZE = 256, 16  # on the paged ops, as in the engine


System = Callable[[list[Request]], Run]


class Loaded(NamedTuple):
    serve: System
    settings: str  # in words


@dataclass(frozen=True)
class BatchedRun(Run):
    num_steps: int

    @property
    def tokens_per_step(self) -> float:
        return self.num_output_tokens / self.num_steps


def measure(generate: Callable[[], list[list[int]]]) -> Run:
    cpu_started, started = time.process_time(), time.monotonic()
    token_ids = generate()
    return Run(time.monotonic() - started, time.process_time() - cpu_started, token_ids)


def generate_in_batches(model: Any, batch_size: int, requests: list[Request]) -> BatchedRun:
    """In order of arrival. Each batch is padded to its longest prompt, and runs as long as its longest output."""
    run = measure(lambda: generate_static(model, requests, batch_size))
    batches = [requests[begin : begin + batch_size] for begin in range(0, len(requests), batch_size)]
    num_steps = sum(max(request.max_tokens for request in batch) for batch in batches)
    return BatchedRun(run.seconds, run.cpu_seconds, run.token_ids, num_steps)


def generate_static(model: Any, requests: list[Request], batch_size: int) -> list[list[int]]:
    token_ids = []
    for begin in range(0, len(requests), batch_size):
        batch = requests[begin : begin + batch_size]
        prompts = [request.prompt_token_ids for request in batch]
        width = max(map(len, prompts))
        with model.device:
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


def load_model(model: str, dtype: str, device: str = "cpu") -> Any:
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
    hf_model.generation_config.eos_token_id = None  # as with ignore_eos
    return hf_model.to(device)


def load_peers(model: str, dtype: str, device: str = "cpu") -> dict[str, System]:
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it calls a missing psutil an error
    load = partial(load_model, model, dtype, device)

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
        return partial(generate_in_batches, hf_model, batch_size)

    return {
        "generate, one by one": static(1),
        f"generate, padded batches of {STATIC_BATCH_SIZE}": static(STATIC_BATCH_SIZE),
        "transformers continuous batching": partial(serve_continuous, hf_model, PEER_BATCH_SIZE, PEER_PAGE_SIZE),
        "the same on the paged ops": paged,
    }


def run_in_turns(systems: dict[str, System], requests: list[Request], num_rounds: int) -> dict[str, list[Run]]:
    """Each system's peer_runs; a peer that does not run is left out, with a line that says why."""
    warm_up = [Request(request.prompt_token_ids[:64], 2) for request in requests[:2]]
    num_tokens = [request.max_tokens for request in requests]
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for _ in range(num_rounds):
        for name in list(runs):
            try:
                systems[name](warm_up)
                run = systems[name](requests)
                if [*map(len, run.token_ids)] != num_tokens:
                    raise RuntimeError(f"{run.num_output_tokens} tokens instead of {sum(num_tokens)}")
                runs[name].append(run)
            except Exception as error:  # whatever another library raises on this machine
                if name == "engine":
                    raise
                print(f"{name}: left out, {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                del runs[name]
    return runs


def compare(runs: dict[str, list[Run]]) -> dict[str, dict[str, Any]]:
    ours = runs["engine"]
    num_tokens = ours[0].num_output_tokens
    comparison: dict[str, dict[str, Any]] = {}
    for name, peer_runs in runs.items():
        pairs = zip(ours[0].token_ids, peer_runs[0].token_ids, strict=True)
        seconds = [run.seconds for run in peer_runs]
        cpu_seconds = [run.cpu_seconds for run in peer_runs]
        comparison[name] = {
            "tokens_per_s": num_tokens / median(seconds),
            "tokens_per_cpu_s": num_tokens / median(cpu_seconds),
            "ratio": median(seconds) / median(run.seconds for run in ours),
            "cpu_ratio": median(cpu_seconds) / median(run.cpu_seconds for run in ours),
            "identical": mean(mine == theirs for mine, theirs in pairs),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
        }
    return comparison


def print_comparison(comparison: dict[str, dict[str, Any]], num_requests: int, num_rounds: int) -> None:
    rounds = f"median of {num_rounds} rounds" if num_rounds > 1 else "one round"
    title = f"first {num_requests} requests, at once; {rounds}"
    table = [[title, "tokens/s", "ours is", "tokens/CPU-s", "ours is", "same output"]]
    for name, row in comparison.items():
        rates = [f"{row['tokens_per_s']:.0f}", f"{row['ratio']:.2f}x"]
        cpu_rates = [f"{row['tokens_per_cpu_s']:.0f}", f"{row['cpu_ratio']:.2f}x"]
        table.append([name, *rates, *cpu_rates, f"{row['identical']:.0%}"])
    print_table(table)
