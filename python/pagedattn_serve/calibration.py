"""Scales for an fp8 cache, from the largest keys and values that a model has on a few prompts."""

from collections.abc import Iterator, Sequence
from os import PathLike

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_serve.config import FP8_DTYPES
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.errors import ArgumentError, nth, with_place
from pagedattn_serve.execution.cache_engine import choose_cache_dtype
from pagedattn_serve.execution.model_runner import ModelRunner, StepInputs
from pagedattn_serve.requests.inputs import Prompt, split_prompts
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.held_blocks import max_held_of_group

CHUNK_SIZE = 512  # tokens of a step


@torch.inference_mode()
def calibrate_kv_scales(
    model: str | PathLike[str],
    prompts: Sequence[Prompt],
    kv_cache_dtype: str = "fp8",
    tokenizer: str | PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
) -> list[tuple[float, float]]:
    """(k_scale, v_scale) of each layer, as `kv_scales` of `LLM` and a JSON file take them.

    Runs the prompts, as `LLM.generate` takes them, with a cache in the model's dtype. The largest key and value of each
    layer become the largest numbers of `kv_cache_dtype`. A larger key or value is cut off in the fp8 cache.

    Raises ValueError without prompts, for keys or values that are not finite, and for a model that keeps latents; else
    as `LLM` and `LLM.generate`.
    """
    if kv_cache_dtype not in FP8_DTYPES:
        raise ArgumentError("kv_cache_dtype", "fp8, fp8_e4m3 or fp8_e5m2", kv_cache_dtype)
    fp8 = choose_cache_dtype(kv_cache_dtype, torch.float32)
    engine = LLMEngine(model, tokenizer=tokenizer, dtype=dtype, device=device, max_num_seqs=1)
    all_token_ids = check_prompts(engine, split_prompts(prompts))
    if not all_token_ids:
        raise ArgumentError("prompts", "at least one", "none")
    runner = engine.model_runner
    if not all(shape.has_values for shape in runner.model.cache_shapes):
        raise ArgumentError(
            "model", "one that keeps keys and values, which may be in fp8", "one that keeps latents (MLA)"
        )
    caches = runner.cache_engine.kv_caches
    largest = torch.zeros(len(caches), 2)
    for token_ids in all_token_ids:
        begin = 0
        for _ in run_alone(runner, token_ids, CHUNK_SIZE, logits=False):
            end = min(begin + CHUNK_SIZE, len(token_ids))
            slots = torch.from_numpy(slots_alone(runner, np.arange(begin, end))).to(runner.device)
            for layer, cache in enumerate(caches):
                key, value = ops.gather_cached_kv(cache.key_cache, cache.value_cache, slots[cache.group])
                absolute = torch.stack([key.abs().max(), value.abs().max()]).float().cpu()
                largest[layer] = torch.maximum(largest[layer], absolute)
            begin = end
    if not largest.isfinite().all():
        layer = int((~largest.isfinite()).any(dim=1).nonzero()[0])
        raise ArgumentError("prompts", "finite keys and values", f"NaN or infinity in layer {layer}")
    scales = torch.where(largest > 0, largest / torch.finfo(fp8).max, 1.0)
    return [(k_scale, v_scale) for k_scale, v_scale in scales.tolist()]


def check_prompts(engine: LLMEngine, prompts: list[Prompt]) -> list[list[int]]:
    """The token ids of prompts, all of which the engine takes."""
    all_token_ids = []
    for i, prompt in enumerate(prompts):
        try:
            engine.add_request("calibration", prompt, SamplingParams(max_tokens=1))
        except (TypeError, ValueError) as error:
            raise with_place(error, nth("prompt", i, len(prompts))) from None
        output = engine.abort_request("calibration")
        assert output is not None
        all_token_ids.append(output.prompt_token_ids)
    return all_token_ids


def slots_alone(runner: ModelRunner, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The slots of these tokens of the sequence in the first row, int64 [num_groups, num_tokens]."""
    blocks = runner.block_tables[:, 0].numpy().take(positions // runner.block_size, axis=1).astype(np.int64)
    return blocks * runner.block_size + positions % runner.block_size


def run_alone(runner: ModelRunner, token_ids: list[int], chunk_size: int, logits: bool = True) -> Iterator[Tensor]:
    """Run a sequence through the model in chunks, in the first blocks of a cache that nobody else uses. Yields the
    logits of each chunk, [num_tokens of the chunk, vocab_size]; without `logits`, no rows."""
    num_blocks, first = -(-len(token_ids) // runner.block_size), 0
    for table, window in zip(runner.block_tables[:, 0], runner.windows, strict=True):
        num_held = max_held_of_group(len(token_ids), window, runner.block_size, chunk_size)
        table[:num_blocks] = first + torch.arange(num_blocks) % num_held  # blocks behind the window are taken again
        first += num_held
    for begin in range(0, len(token_ids), chunk_size):
        end = min(begin + chunk_size, len(token_ids))
        positions = np.arange(begin, end)
        yield runner.run_model(
            StepInputs(
                token_ids=np.array(token_ids[begin:end]),
                positions=positions,
                slot_mappings=slots_alone(runner, positions),
                seq_lens=np.array([end], dtype=np.int32),
                query_start_loc=np.array([0, end - begin], dtype=np.int32),
                sampling_rows=np.arange(end - begin if logits else 0),
                max_seq_len=end,
                state_slots=[0],
            )
        ).logits
