"""The engine: requests in, one step at a time, outputs out. It joins the scheduling side and the computing side."""

import logging
import re
import secrets
import time
from dataclasses import replace
from os import PathLike
from typing import Any, overload

import torch

import pagedattn_ext
from pagedattn_serve.beam_request import BeamRequest
from pagedattn_serve.checkpoint import model_directory
from pagedattn_serve.completion import OutputRules
from pagedattn_serve.config import CacheConfig, SchedulerConfig, check_bool, check_float, check_int
from pagedattn_serve.execution.cache_engine import choose_cache_dtype
from pagedattn_serve.execution.cache_memory import (
    DEFAULT_CPU_MEMORY,
    block_bytes_of,
    choose_num_blocks,
    choose_num_host_blocks,
    cuda_memory,
    num_useful_blocks,
)
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.execution.sampler import SamplerOutput
from pagedattn_serve.generation_config import eos_token_ids, generation_defaults
from pagedattn_serve.models.kv_scales import GivenScales
from pagedattn_serve.models.loader import choose_kv_scales, load_model
from pagedattn_serve.models.packed_linear import pack_linear_layers
from pagedattn_serve.outputs import EngineStats, RequestOutput
from pagedattn_serve.prompts import Prompt, text_or_ids, to_ids
from pagedattn_serve.request import Request
from pagedattn_serve.sampling_params import SamplingParams, TokenRules
from pagedattn_serve.scheduling.batch import ScheduledBatch
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence_group import SequenceGroup
from pagedattn_serve.text.tokenizer import bad_word_ids, load_tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over a paged cache.

    Args:
        model: a Hugging Face directory (config.json; safetensors or pytorch_model.bin; tokenizer), "~" is the home; or
            the name of a repository that lies in Hugging Face's cache.
        tokenizer: a directory with another tokenizer than the model's.
        dtype: "auto" (the checkpoint's), "float32" or "float", "float16" or "half", "bfloat16"; or torch's.
        device: "auto" (CUDA where there is a device and this build has the kernels, else the CPU), "cpu", "cuda" or
            "cuda:N".
        block_size: tokens per cache block, a power of two from 8 to 256.
        kv_cache_memory: bytes for the cache. Default: 1 GiB on the CPU, on CUDA what gpu_memory_utilization leaves;
            but no more than max_num_seqs sequences of max_model_len tokens could use.
        num_blocks: blocks of the cache; not together with kv_cache_memory.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens run through the model in one step.
        max_model_len: most tokens of a sequence, prompt and output together. Default: the model's, or what the whole
            cache holds if that is less.
        swap_space: GiB of host memory for the blocks of requests that are swapped out.
        gpu_memory_utilization: share of the CUDA device that weights, activations and cache may take, in (0, 1].
        seed: of the random numbers for requests without a seed of their own; None takes an arbitrary one.
        tensor_parallel_size: 1, as one device is all that is used yet.
        enforce_eager: True or False, which are the same here: nothing is compiled or captured in graphs.
        trust_remote_code: False, as a checkpoint's own code is never run.
        preemption_mode: what becomes of the blocks of a request that makes room for others: "recompute" drops them and
            computes them again later, "swap" moves them to host memory while swap_space lasts, "auto" swaps where a
            request has several sequences.
        enable_prefix_caching: whether a prompt that begins as others did takes their blocks instead of computing them.
        scheduling_policy: "fcfs", first come first served, or "priority".
        kv_cache_dtype: "auto" (the model's), or "fp8" = "fp8_e4m3" or "fp8_e5m2": half the cache of 16 bits.
        kv_scales: what keys and values are divided by in an fp8 cache: a pair (k_scale, v_scale), a list of one for
            each layer, as `calibrate_kv_scales` gives it, or a JSON file with either. Default: the checkpoint's, else
            1.
        speculation: "ngram" guesses that a sequence that repeats its last few tokens goes on as it did before, and lets
            the model verify the guesses in one step: the same tokens, in fewer steps where text recurs. None: off.
        num_speculative_tokens: most tokens guessed for a sequence in a step.

    Raises FileNotFoundError, ValueError and TypeError as `load_model` and the configs do. Not thread-safe.

    A call that is interrupted (KeyboardInterrupt, at any point) has happened or it has not; what it was about to return
    may be lost. The next call puts things in order, for which the requests may have to be computed anew.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        tokenizer: str | PathLike[str] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        num_blocks: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2560,
        max_model_len: int | None = None,
        swap_space: float = 4,
        gpu_memory_utilization: float = 0.9,
        seed: int | None = 0,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
        preemption_mode: str = "auto",
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fcfs",
        kv_cache_dtype: str = "auto",
        kv_scales: GivenScales | None = None,
        speculation: str | None = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        check_int("block_size", block_size, 8, 256)
        check_int("max_num_seqs", max_num_seqs, 1)
        check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        if seed is None:
            seed = secrets.randbits(64)
        check_int("seed", seed, 0, 2**64 - 1)
        check_float("swap_space", swap_space)
        if swap_space < 0:
            raise ValueError(f"swap_space: expected a number >= 0, got {swap_space}")
        check_float("gpu_memory_utilization", gpu_memory_utilization)
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization: expected a share in (0, 1], got {gpu_memory_utilization}")
        if num_blocks is not None and kv_cache_memory is not None:
            raise ValueError("kv_cache_memory: expected None beside num_blocks, which says the same")
        if check_bool("trust_remote_code", trust_remote_code):
            raise ValueError("trust_remote_code: expected False, as running a checkpoint's own code is not supported")
        check_bool("enforce_eager", enforce_eager)
        check_int("tensor_parallel_size", tensor_parallel_size, 1)
        if tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size: expected 1, as more are not supported, got {tensor_parallel_size}")
        choose_cache_dtype(kv_cache_dtype, torch.float32)  # raises before anything is read
        device = choose_device(device)
        directory = model_directory(model)
        self.tokenizer = load_tokenizer(directory, tokenizer)
        self._eos_token_ids = frozenset(eos_token_ids(directory))
        self._defaults = generation_defaults(directory)
        causal_lm = load_model(directory, dtype, device)
        self._vocab_size = causal_lm.vocab_size
        scales = choose_kv_scales(kv_cache_dtype, kv_scales, directory, causal_lm.num_layers)
        if device == "cpu":
            pack_linear_layers(causal_lm, causal_lm.dtype)
        max_model_len = choose_max_model_len(max_model_len, causal_lm.max_model_len)
        scheduler_config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=scheduling_policy,
            preemption_mode=preemption_mode,
            speculation=speculation,
            num_speculative_tokens=num_speculative_tokens,
        )
        if num_blocks is None:
            memory = kv_cache_memory
            if memory is None and device == "cpu":
                memory = DEFAULT_CPU_MEMORY
            elif memory is None:
                memory = cuda_memory(
                    causal_lm, scheduler_config, block_size, device, gpu_memory_utilization, kv_cache_dtype
                )
            num_blocks = choose_num_blocks(
                causal_lm, memory, block_size, num_useful_blocks(scheduler_config, block_size), kv_cache_dtype
            )
        cache_config = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=choose_num_host_blocks(causal_lm, swap_space, block_size, scheduler_config, kv_cache_dtype),
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_dtype=kv_cache_dtype,
            kv_scales=scales,
        )
        scheduler_config = limit_to_cache(scheduler_config, cache_config)
        try:
            self.model_runner = ModelRunner(causal_lm, scheduler_config, cache_config, device, seed)
            self.scheduler = Scheduler(scheduler_config, cache_config)
        except (MemoryError, RuntimeError) as error:  # which of the two it is depends on the allocator
            if str(error).startswith("swap_space:"):
                raise
            num_bytes = num_blocks * block_bytes_of(causal_lm, block_size, kv_cache_dtype)
            raise MemoryError(
                f"num_blocks: expected a cache that fits in memory, got {num_blocks:,} blocks of {block_size} tokens, "
                f"{num_bytes:,} bytes ({str(error).partition(chr(10))[0] or 'out of memory'})"
            ) from None
        # Which requests there are, in order of arrival, is said here alone. The scheduler's queues and blocks follow
        # from it; `_settle` makes them again if a call was interrupted while it changed them.
        self._requests: dict[str, Request] = {}
        self._settled = True
        self._batch: ScheduledBatch | None = None  # scheduled and not run to its end: the next step runs it
        self._in_step: list[tuple[Request, Any]] = []  # and what to rewind them to
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._execute_seconds = 0.0

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self.scheduler.config.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a request that brings none: what generation_config.json in the model's directory says, and for the
        rest `SamplingParams()`.

        What they cannot say holds for requests without parameters as well: a max_length, which counts the prompt too
        (max_tokens is None here), bad_words_ids and suppress_tokens.
        """
        return self._defaults.params

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        self._settle()
        return self.scheduler.has_unfinished

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: Any | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request: a prompt, or its token ids. Default sampling: `get_default_sampling_params()`.

        prompt: a text; token ids in a list, tuple, array or tensor; {"prompt": text} or {"prompt_token_ids": ids}.
        arrival_time: as `time.monotonic()` gives it; default now. It enters the metrics, not the order of service.
        priority: with the scheduling policy "priority", the lower the earlier it is served. So that nobody waits for
            ever, a request is passed by no more than the next 10,000 that come for each level that they are better.

        Raises ValueError or TypeError, with nothing queued, if the prompt is empty, too long or not text, a token id is
        not in the vocabulary, or the request id is taken. Requests that were queued before go on.
        """
        self.queue_request(
            self.make_request(request_id, prompt, sampling_params, prompt_token_ids, arrival_time, priority)
        )

    def make_request(
        self,
        request_id: str,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: Any | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> Request:
        """The first half of `add_request`, which takes its time with a long prompt: a request that is not queued yet.

        Any thread may call it, at any time. The arguments are those of `add_request`; so are the errors, but for those
        of `queue_request`.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id: expected a string, got {type(request_id).__name__}")
        params = self._defaults.params if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        check_float("arrival_time", arrival_time)
        check_int("priority", priority, -(2**31), 2**31 - 1)
        text, token_ids = self._prompt_tokens(prompt, prompt_token_ids)
        if self.tokenizer is None and params.stop:
            raise ValueError("stop: expected none, as the model's directory has no tokenizer")
        params.check_token_ids(self._vocab_size)
        token_rules = self._token_rules(params, () if sampling_params is not None else self._defaults.bad_words)
        max_len = self.max_model_len
        if sampling_params is None and self._defaults.max_length is not None:
            max_len = min(max_len, max(self._defaults.max_length, len(token_ids) + 1))
        room = max_len - len(token_ids)
        rules = OutputRules(
            params=params,
            tokenizer=self.tokenizer if params.detokenize else None,
            eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
            stop_token_ids=frozenset(params.stop_ids),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        )
        group = SequenceGroup(request_id, token_ids, params, arrival_time, priority)
        group.sequences[0].token_rules = token_rules
        return (BeamRequest if params.use_beam_search else Request)(text, group, rules)

    def queue_request(self, request: Request) -> None:
        """The other half of `add_request`: put what `make_request` made where its turn is.

        Raises ValueError, with nothing queued, if the request id is taken or `Scheduler.add` finds no place for it.
        """
        group = request.group
        self._settle()
        self._settled = False
        try:
            self.scheduler.add(group)
        except ValueError:
            self._settled = True  # nothing was changed
            raise
        self._requests[group.request_id] = request
        self._num_prompt_tokens += len(group.prompt_token_ids)
        self._settled = True

    def register_prefix(self, prefix: Prompt) -> int:
        """Keep the blocks of a prefix that many prompts begin with, once one of them has computed these.

        prefix: in any of the forms of a prompt. Returns how many of its tokens lie in full blocks, which are what is
        kept; 0 if it is shorter than a block. Prompts share those that they begin with as token ids: where the text of
        the prefix ends within what a prompt has as one token, these end earlier.

        Raises ValueError or TypeError, with nothing kept, if enable_prefix_caching is False, it is not a prompt that
        could be served, or registered prefixes would leave too little of the cache for a sequence of max_model_len.
        """
        if not self.scheduler.block_manager.prefix_caching:
            raise ValueError("enable_prefix_caching: expected True for prefixes to be kept, got False")
        _, token_ids = self._prompt_tokens(prefix, None)
        if not 0 < len(token_ids) < self.max_model_len:
            raise ValueError(f"prefix: expected 1 to {self.max_model_len - 1} tokens, got {len(token_ids)}")
        self._settle()
        return self.scheduler.pin_prefix(token_ids)

    def step(self) -> list[RequestOutput]:
        """Run one batch; returns the requests that got tokens or ended. Empty while prompts are computed."""
        self._settle()
        started = time.monotonic()
        if self._batch is None:
            self._settled = False
            self._batch = self.scheduler.schedule()
            self._settled = True
        scheduled = time.monotonic()
        batch = self._batch
        sampled = SamplerOutput() if batch.is_empty else self.model_runner.execute(batch)
        executed = time.monotonic()
        self._settled = False
        self.scheduler.mark_computed(batch)
        outputs = self._append_tokens(batch, sampled)
        self._batch = None
        self._num_steps += 1
        self._execute_seconds += executed - scheduled
        self._step_seconds += time.monotonic() - started
        self._settled = True
        return outputs

    def fail_batch(self, error: str) -> list[RequestOutput]:
        """After a step that raised: end the requests of its batch with `error`; returns what they have.

        The others wait and are computed anew, as the cache may hold anything. If the step raised before it had a batch,
        no request is to blame and none ends.
        """
        batch, self._settled = self._batch, False
        self._settle()
        if batch is None:
            return []
        request_ids = {scheduled.sequence.request_id for scheduled in batch.sequences}
        request_ids.update(group.request_id for group in batch.outgrown)
        failed = [self._requests[request_id] for request_id in self._requests if request_id in request_ids]
        self._settled = False
        self._in_step = [(request, request.mark()) for request in failed]
        for request in failed:
            request.fail(error, self.scheduler)
        outputs = self._end_step(time.monotonic())
        self._settled = True
        return outputs

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        self._settle()
        return len(self._requests)

    @overload
    def abort_request(self, request_id: str) -> RequestOutput | None: ...
    @overload
    def abort_request(self, request_id: list[str] | tuple[str, ...] | set[str]) -> list[RequestOutput]: ...
    def abort_request(
        self, request_id: str | list[str] | tuple[str, ...] | set[str]
    ) -> RequestOutput | list[RequestOutput] | None:
        """End a request at once; returns what it had so far, or None if it is unknown or finished already.

        Of several ids, ends each of them; returns a list for those that were unfinished.
        """
        if isinstance(request_id, list | tuple | set):
            ended = [self.abort_request(each) for each in request_id]
            return [output for output in ended if output is not None]
        if not isinstance(request_id, str):
            raise TypeError(f"request_id: expected a string or a list of strings, got {type(request_id).__name__}")
        self._settle()
        request = self._requests.get(request_id)
        if request is None:
            return None
        if self._batch is not None:
            self._settled = False
            self._settle()  # as the batch may have the request in it
        self._settled = False
        del self._requests[request_id]
        self.scheduler.abort(request_id)
        self._settled = True
        request.metrics.finished_time = time.monotonic()
        return request.output()

    def stats(self) -> EngineStats:
        """Queues, cache use and counts since the start."""
        self._settle()
        scheduler = self.scheduler
        manager = scheduler.block_manager
        return EngineStats(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_swapped=len(scheduler.swapped),
            num_running_sequences=sum(len(group.sequences) for group in scheduler.running),
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_blocks_without_sharing=manager.num_table_entries,
            num_cached_blocks=manager.num_cached_blocks,
            num_host_blocks=manager.num_host_blocks,
            num_used_host_blocks=manager.num_used_host_blocks,
            num_used_slots=manager.num_used_slots(),
            num_recomputes=scheduler.num_recomputes,
            num_swaps=scheduler.num_swaps,
            num_looked_up_tokens=scheduler.num_looked_up_tokens,
            num_found_tokens=scheduler.num_found_tokens,
            num_proposed_tokens=scheduler.num_proposed_tokens,
            num_accepted_tokens=scheduler.num_accepted_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            execute_seconds=self._execute_seconds,
        )

    def _prompt_tokens(self, prompt: Prompt | None, token_ids: Any | None) -> tuple[str | None, list[int]]:
        """The prompt's text, None if it came as token ids, and its token ids."""
        if (prompt is None) == (token_ids is None):
            raise ValueError("prompt: expected either prompt or prompt_token_ids")
        text, ids = text_or_ids(prompt) if token_ids is None else (None, to_ids(token_ids))
        if ids is None:
            assert text is not None
            ids = self._tokenize(text)
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(f"prompt_token_ids: expected an int in [0, {self._vocab_size - 1}], got {token_id}")
        return text, ids

    def _token_rules(self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> TokenRules:
        """What `params` leave to the tokenizer and the model; bad_words: more of them."""
        if params.bad_words:
            if self.tokenizer is None:
                raise ValueError("bad_words: expected none, as the model's directory has no tokenizer")
            bad_words = (*bad_words, *bad_word_ids(self.tokenizer, params.bad_word_strings))
        end_token_ids = params.stop_ids if params.ignore_eos else (*self._eos_token_ids, *params.stop_ids)
        return TokenRules(end_token_ids, bad_words)

    def _tokenize(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("prompt: expected prompt_token_ids, as the model's directory has no tokenizer")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt: expected text that UTF-8 can write, got {error}") from None
        return list(self.tokenizer(text, verbose=False).input_ids)

    def _append_tokens(self, batch: ScheduledBatch, sampled: SamplerOutput) -> list[RequestOutput]:
        tokens = list(zip(sampled.token_ids, sampled.logprobs, sampled.top_logprobs, sampled.candidates, strict=True))
        requests: list[Request] = []
        ends: list[int] = []  # of their rows, which follow each other
        drafts_of: dict[Request, tuple[int, ...]] = {}
        num_rows = 0
        for scheduled in batch.sequences:
            if scheduled.num_samples:
                request = self._requests[scheduled.sequence.request_id]
                num_rows += scheduled.num_samples + len(scheduled.draft_token_ids)
                if requests and requests[-1] is request:
                    ends[-1] = num_rows
                else:
                    requests.append(request)
                    ends.append(num_rows)
                if scheduled.draft_token_ids:
                    drafts_of[request] = scheduled.draft_token_ids
        outgrown = [self._requests[group.request_id] for group in batch.outgrown]
        self._in_step = [(request, request.mark()) for request in (*requests, *outgrown)]
        now = time.monotonic()
        first = num_added = 0
        for request, end in zip(requests, ends, strict=True):
            if drafts_of and request in drafts_of:
                num_tokens = num_verified(drafts_of[request], range(first, end), sampled)
                add_tokens = request.add_verified
            else:
                num_tokens, add_tokens = end - first, request.add_tokens
            rows, first = range(first, first + num_tokens), end
            if sampled.errors and (errors := [sampled.errors[row] for row in rows if row in sampled.errors]):
                request.fail(errors[0], self.scheduler)
                continue
            try:
                num_added += add_tokens(tokens[rows.start : rows.stop], self.scheduler)
            except Exception as error:  # of its logits, or whatever a tokenizer raises: the others go on
                text = f"{type(error).__name__}: {error}"
                has_trace = not isinstance(error, FloatingPointError)  # that of the logits shows nothing
                logger.error("request %r ends: %s", request.group.request_id, text, exc_info=has_trace)
                request.fail(text, self.scheduler)
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
        for request in outgrown:
            num_blocks = self.scheduler.block_manager.num_blocks
            request.fail(f"its sequences need more than all {num_blocks} blocks of the cache", self.scheduler)
        outputs = self._end_step(now)
        self._num_output_tokens += num_added
        return outputs

    def _end_step(self, now: float) -> list[RequestOutput]:
        """What the requests of the step got; those that are finished are forgotten."""
        outputs = []
        for request, _ in self._in_step:
            if not request.group.sequences:
                request.metrics.finished_time = now
            outputs.append(request.output())
        self._in_step = []  # now the step has happened: an interrupt no longer takes it back
        for output in outputs:
            if output.finished:
                del self._requests[output.request_id]
        return outputs

    def _settle(self) -> None:
        """After a call that was interrupted: as before it, or as after it. Unfinished requests wait, without blocks.

        An interrupt in here leaves things to the next call.
        """
        if self._settled:
            return
        for request, mark in self._in_step:
            request.rewind(mark)
        self._in_step = []
        self._batch = None
        self._requests = {i: each for i, each in self._requests.items() if not each.is_finished}
        self.scheduler.restart([request.group for request in self._requests.values()])
        self.model_runner.block_tables.clear()
        self._settled = True


def num_verified(drafts: tuple[int, ...], rows: range, sampled: SamplerOutput) -> int:
    """How many of a sequence's rows count: the first, and one after each draft as far as the drafts are what was drawn.

    Then a token was drawn from the model's distribution after the true tokens, as if there had been no drafts (and with
    its own random numbers, so that a seed gives the same ones). A row with an error is left for the next step.
    """
    for i, row in enumerate(rows):
        if row in sampled.errors:
            return max(i, 1)
        if i == len(drafts) or sampled.token_ids[row] != drafts[i]:
            return i + 1
    raise AssertionError(f"{len(drafts)} drafts, but {len(rows)} rows")


def choose_device(name: str) -> str:
    has_cuda = bool(pagedattn_ext.build_info()["cuda_arches"]) and torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if name != "cpu" and not has_cuda:
        reason = "torch finds no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
        if not pagedattn_ext.build_info()["cuda_arches"]:
            reason = "this build of pagedattn_ext has no CUDA kernels"
        raise ValueError(f"device: expected cpu ({reason}), got {name}")
    return name


def choose_max_model_len(requested: int | None, of_model: int) -> int:
    if requested is None:
        return of_model
    check_int("max_model_len", requested, 2, of_model)
    return requested


def limit_to_cache(config: SchedulerConfig, cache_config: CacheConfig) -> SchedulerConfig:
    """max_model_len cut to what the whole cache holds: a longer sequence could never end."""
    num_slots = cache_config.num_blocks * cache_config.block_size
    if config.max_model_len <= num_slots:
        return config
    logger.warning("max_model_len: cut from %d to %d tokens, all that the cache holds", config.max_model_len, num_slots)
    return replace(config, max_model_len=num_slots)
