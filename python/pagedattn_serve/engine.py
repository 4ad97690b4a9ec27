"""The engine: requests in, one step at a time, outputs out. It joins the scheduling side and the computing side."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from pagedattn_serve.batch import ScheduledBatch
from pagedattn_serve.cache_engine import CacheEngine, bytes_per_block
from pagedattn_serve.config import CacheConfig, SchedulerConfig, check_float, check_int
from pagedattn_serve.detokenizer import IncrementalDetokenizer
from pagedattn_serve.model_runner import ModelRunner
from pagedattn_serve.models.loader import CausalLM, load_model
from pagedattn_serve.outputs import CompletionOutput, EngineStats, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduler import Scheduler
from pagedattn_serve.sequence import Sequence, SequenceStatus

DEFAULT_KV_CACHE_MEMORY = 1 << 30  # bytes


@dataclass(slots=True)
class _Request:
    prompt: str | None
    sequence: Sequence
    detokenizer: IncrementalDetokenizer | None


class LLMEngine:
    """Continuous batching over a paged cache.

    Args:
        model: a Hugging Face directory (config.json, safetensors, tokenizer).
        dtype: "auto" (the checkpoint's), "float32", "float16" or "bfloat16".
        block_size: tokens per cache block, a power of two from 8 to 64.
        num_blocks: blocks of the cache. Default: what kv_cache_memory holds, but no more than max_num_seqs sequences
            of max_model_len tokens could use.
        kv_cache_memory: bytes for the cache, default 1 GiB; not together with num_blocks.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens run through the model in one step.
        max_model_len: most tokens of a sequence, prompt and output together. Default: the model's, or what the whole
            cache holds if that is less.
        seed: of the random numbers for requests without a seed of their own.

    Raises FileNotFoundError, ValueError and TypeError as `load_model` and the configs do. Not thread-safe.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2560,
        max_model_len: int | None = None,
        seed: int = 0,
    ) -> None:
        check_int("block_size", block_size, 8, 64)
        check_int("max_num_seqs", max_num_seqs, 1)
        check_int("seed", seed, 0, 2**64 - 1)
        if num_blocks is not None and kv_cache_memory is not None:
            raise ValueError("kv_cache_memory: expected None beside num_blocks, which says the same")
        causal_lm = load_model(model, dtype)
        max_model_len = choose_max_model_len(max_model_len, causal_lm.max_model_len)
        if num_blocks is None:
            memory = DEFAULT_KV_CACHE_MEMORY if kv_cache_memory is None else kv_cache_memory
            num_blocks = choose_num_blocks(causal_lm, memory, block_size, max_num_seqs * max_model_len)
        cache_config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
        scheduler_config = SchedulerConfig(
            max_model_len=min(max_model_len, num_blocks * block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.scheduler = Scheduler(scheduler_config, cache_config)
        self.tokenizer = AutoTokenizer.from_pretrained(model) if has_tokenizer(model) else None
        self._eos_token_ids = eos_token_ids(model)
        self._vocab_size = causal_lm.lm_head.out_features
        cache_engine = CacheEngine(
            causal_lm.num_layers,
            num_blocks,
            causal_lm.num_kv_heads,
            causal_lm.head_size,
            block_size,
            causal_lm.lm_head.weight.dtype,
        )
        self.model_runner = ModelRunner(causal_lm, cache_engine, block_size, seed)
        self._requests: dict[str, _Request] = {}
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self.scheduler.config.max_model_len

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self.scheduler.has_unfinished

    def add_request(
        self,
        request_id: str,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: list[int] | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request: a prompt, or its token ids. Default sampling: `SamplingParams()`.

        arrival_time: as `time.monotonic()` gives it; default now. It enters the metrics, not the order of service.

        Raises ValueError or TypeError, with nothing queued, if the prompt is empty, too long or not text, a token id is
        not in the vocabulary, or the request id is taken.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id: expected a string, got {type(request_id).__name__}")
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
        token_ids = self._prompt_tokens(prompt, prompt_token_ids)
        if self.tokenizer is None and params.stop:
            raise ValueError("stop: expected none, as the model's directory has no tokenizer")
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        check_float("arrival_time", arrival_time)
        sequence = Sequence(request_id, token_ids, params, arrival_time)
        self.scheduler.add(sequence)
        detokenizer = None if self.tokenizer is None else IncrementalDetokenizer(self.tokenizer, token_ids)
        self._requests[request_id] = _Request(prompt, sequence, detokenizer)
        self._num_prompt_tokens += len(token_ids)

    def step(self) -> list[RequestOutput]:
        """Run one batch; returns the requests that got a token, in arrival order. Empty while prompts are computed."""
        batch = self.scheduler.schedule()
        if batch.is_empty:
            return []
        token_ids = self.model_runner.execute(batch)
        self.scheduler.mark_computed(batch)
        return self._append_tokens(batch, token_ids)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once; returns what it had so far, or None if it is unknown or finished already."""
        if self.scheduler.abort(request_id) is None:
            return None
        return self._output(self._requests.pop(request_id))

    def stats(self) -> EngineStats:
        """Queues, cache use and counts since the start."""
        manager = self.scheduler.block_manager
        return EngineStats(
            num_waiting=self.scheduler.num_waiting,
            num_running=self.scheduler.num_running,
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_used_slots=sum(sequence.num_computed_tokens for sequence in self.scheduler.running),
            num_preemptions=self.scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
        )

    def _prompt_tokens(self, prompt: str | None, token_ids: list[int] | None) -> list[int]:
        if (prompt is None) == (token_ids is None):
            raise ValueError("prompt: expected either prompt or prompt_token_ids")
        if token_ids is None:
            if not isinstance(prompt, str):
                raise TypeError(f"prompt: expected a string, got {type(prompt).__name__}")
            if self.tokenizer is None:
                raise ValueError("prompt: expected prompt_token_ids, as the model's directory has no tokenizer")
            token_ids = self.tokenizer(prompt, verbose=False).input_ids
        if not isinstance(token_ids, list):
            raise TypeError(f"prompt_token_ids: expected a list of token ids, got {type(token_ids).__name__}")
        for token_id in token_ids:
            check_int("prompt_token_ids", token_id, 0, self._vocab_size - 1)
        return list(token_ids)

    def _append_tokens(self, batch: ScheduledBatch, token_ids: list[int]) -> list[RequestOutput]:
        outputs = []
        sampled = [scheduled.sequence for scheduled in batch.sequences if scheduled.samples]
        for sequence, token_id in zip(sampled, token_ids, strict=True):
            request = self._requests[sequence.request_id]
            sequence.output_token_ids.append(token_id)
            self._num_output_tokens += 1
            if request.detokenizer is not None:
                request.detokenizer.add(token_id)
            status = self._finished_status(request)
            if status is not None:
                self.scheduler.finish(sequence, status)
                del self._requests[sequence.request_id]
            outputs.append(self._output(request))
        return outputs

    def _finished_status(self, request: _Request) -> SequenceStatus | None:
        """The status that the newest token ends the request with, if it does; text past a stop string is cut off."""
        sequence, params = request.sequence, request.sequence.sampling_params
        if sequence.output_token_ids[-1] in self._eos_token_ids and not params.ignore_eos:
            status = SequenceStatus.FINISHED_STOPPED
        elif len(sequence.output_token_ids) == params.max_tokens or sequence.num_tokens >= self.max_model_len:
            status = SequenceStatus.FINISHED_LENGTH
        else:
            status = None
        if request.detokenizer is not None:
            if status is not None:
                request.detokenizer.finish()
            stop_at = first_stop(request.detokenizer.text, params.stop_strings)
            if stop_at is not None:
                request.detokenizer.text = request.detokenizer.text[:stop_at]
                status = SequenceStatus.FINISHED_STOPPED
        return status

    def _output(self, request: _Request) -> RequestOutput:
        sequence = request.sequence
        text = "" if request.detokenizer is None else request.detokenizer.text
        if not sequence.status.is_finished and sequence.sampling_params.stop_strings:
            text = text[: len(text) - longest_stop_prefix(text, sequence.sampling_params.stop_strings)]
        completion = CompletionOutput(0, text, list(sequence.output_token_ids), sequence.status.finish_reason)
        finished = sequence.status.is_finished
        return RequestOutput(sequence.request_id, request.prompt, sequence.prompt_token_ids, [completion], finished)


def first_stop(text: str, stop_strings: tuple[str, ...]) -> int | None:
    """Where the earliest stop string begins in `text`; None if there is none."""
    return min((at for stop in stop_strings if (at := text.find(stop)) >= 0), default=None)


def longest_stop_prefix(text: str, stop_strings: tuple[str, ...]) -> int:
    """Characters at the end of `text` that begin a stop string, which the next token may complete."""
    for length in range(max(map(len, stop_strings)) - 1, 0, -1):
        if any(text.endswith(stop[:length]) for stop in stop_strings if len(stop) > length):
            return length
    return 0


def choose_max_model_len(requested: int | None, of_model: int) -> int:
    if requested is None:
        return of_model
    check_int("max_model_len", requested, 2, of_model)
    return requested


def choose_num_blocks(model: CausalLM, memory: int, block_size: int, num_useful_slots: int) -> int:
    """Blocks that fit in `memory` bytes, but no more than can be of use. ValueError if there is room for none."""
    check_int("kv_cache_memory", memory, 1)
    dtype = model.lm_head.weight.dtype
    block_bytes = bytes_per_block(model.num_layers, model.num_kv_heads, model.head_size, block_size, dtype)
    if memory < block_bytes:
        raise ValueError(f"kv_cache_memory: expected at least one block, {block_bytes} bytes, got {memory}")
    return min(memory // block_bytes, -(-num_useful_slots // block_size))


def has_tokenizer(model: str) -> bool:
    return any((Path(model) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def eos_token_ids(model: str) -> set[int]:
    """The token ids that end an output: those of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = Path(model) / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if eos is not None:
            return set(eos) if isinstance(eos, list) else {eos}
    return set()
