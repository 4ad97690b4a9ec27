"""The engine: requests in, one step at a time, outputs out. It joins the scheduling side and the computing side."""

import secrets
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial, wraps
from inspect import currentframe
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from pagedattn_ext.switches import is_on
from pagedattn_serve.distributed.executor import Executor
from pagedattn_serve.distributed.torchrun import serve_as_rank
from pagedattn_serve.distributed.workers import Workers
from pagedattn_serve.engine_args import EngineArgs, takes_options
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError
from pagedattn_serve.execution.block_store import BlockStore, open_block_store
from pagedattn_serve.execution.cache_engine import HostMemoryError
from pagedattn_serve.execution.engine_setup import (
    choose_device,
    leave_out_for_states,
    limit_to_cache,
    limit_to_memory,
    limit_to_model,
    too_large,
)
from pagedattn_serve.execution.fingerprint import fingerprint
from pagedattn_serve.execution.model_runner import BatchRunner, ModelRunner
from pagedattn_serve.loading.directory import model_directory
from pagedattn_serve.loading.fingerprint import checkpoint_digest
from pagedattn_serve.loading.generation_config import eos_token_ids, generation_defaults
from pagedattn_serve.loading.loader import choose_kv_scales, load_model
from pagedattn_serve.loading.pooling import read_pooling
from pagedattn_serve.models.partition import SINGLE
from pagedattn_serve.outputs import CacheMap, EngineStats, RequestOutput, RequestState
from pagedattn_serve.progress import Report
from pagedattn_serve.requests.inputs import InputProcessor, Prompt, RequestArgs
from pagedattn_serve.requests.request import Request
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import ScheduledBatch, SequenceGroup, TableArray
from pagedattn_serve.stored_prefixes import StoredPrefixes
from pagedattn_serve.text.tokenizer import load_tokenizer, turn_end_token_ids
from pagedattn_serve.unfinished_requests import UnfinishedRequests

OnLoading = Callable[[int, int, int], object]  # of a rank, how many weights are loaded, and the number of all
P = ParamSpec("P")
T = TypeVar("T")


def interruptible(method: Callable[Concatenate["LLMEngine", P], T]) -> Callable[Concatenate["LLMEngine", P], T]:
    """For the methods that change requests, queues or blocks. An interrupt, which is any exception that is no
    `Exception`, may leave these half changed: then the engine begins anew, without requests. Raises RuntimeError for a
    call from within a call, such as one by a callable of logits_processors."""

    @wraps(method)
    def call(engine: "LLMEngine", /, *args: P.args, **kwargs: P.kwargs) -> T:
        engine._refuse_nested_call()
        engine._settle()
        try:
            engine._frame_of_call = currentframe()
            try:
                return method(engine, *args, **kwargs)
            finally:
                engine._frame_of_call = None
        except Exception:
            raise
        except BaseException as interrupt:
            engine._is_broken = True
            # An interrupt amid `torch.inference_mode.__exit__` leaves the mode on for as long as the frame of that call
            # lives. An interactive shell keeps the traceback, and with it the frame.
            traceback.clear_frames(interrupt.__traceback__)
            raise

    return call


class LLMEngine:
    """Continuous batching over a paged cache. The arguments are those of `EngineArgs`, which says what they mean.

    Raises FileNotFoundError, ValueError and TypeError as `load_model` and the configs do. Not thread-safe, but for
    `tokenize`, `detokenize` and `inputs`. A method that changes something raises RuntimeError for a call from within a
    call, such as one by a callable of logits_processors.

    KeyboardInterrupt, or another exception that is no `Exception`, may come at any point of a call. It ends all
    unfinished requests as aborted, whoever added them: their outputs are lost, their blocks are free, their ids may be
    taken again, and no cached prefix is left. The engine is as good as new. An `Exception` of the caller's own, such as
    a handler of SIGALRM raises, leaves the engine in order, too. It may become the error of the request that it meets,
    and amid an abort it ends all requests.
    """

    # `from_engine_args` sets it before `__init__`, whose arguments are the options alone, as in vLLM.
    _on_loading: OnLoading | None = None

    @takes_options(EngineArgs)
    def __init__(self, args: EngineArgs) -> None:
        model_config, cache_config, parallel_config, scheduler_config = args.create_engine_configs()
        serve_as_rank(parallel_config.num_ranks)  # and not come back, in ranks that torchrun has started
        device = choose_device(model_config.device)
        directory = model_directory(model_config.model, model_config.allow_download)
        load_format = model_config.load_format
        is_sanitized = is_on("PAGEDATTN_SANITIZE")
        with ExitStack() as undo:
            workers, partition = None, SINGLE
            on_loading: Report | None = None if self._on_loading is None else partial(self._on_loading, 0)
            if parallel_config.num_ranks > 1:
                model_config = replace(model_config, device=device)
                workers = Workers(parallel_config, model_config, cache_config, scheduler_config, self._on_loading)
                undo.callback(workers.close)
                partition, device = workers.partition, workers.device
                on_loading = on_loading and workers.tell_loading
            self.tokenizer = load_tokenizer(directory, model_config.tokenizer, model_config.allow_download)
            end_token_ids = frozenset(eos_token_ids(directory) | turn_end_token_ids(self.tokenizer))
            defaults = generation_defaults(directory)
            pooling = read_pooling(directory)
            causal_lm = load_model(
                directory, model_config.dtype, device, model_config.quantization, partition, on_loading, load_format
            )
            layers = causal_lm.layers_of_caches()
            scales = choose_kv_scales(args.kv_cache_dtype, args.kv_scales, directory, layers, load_format)
            scheduler_config = limit_to_model(scheduler_config, causal_lm)
            cache_config, scheduler_config = leave_out_for_states(cache_config, scheduler_config, causal_lm)
            cache_config = limit_to_memory(replace(cache_config, kv_scales=scales), causal_lm, scheduler_config, device)
            if workers is not None:
                cache_config = workers.smallest(cache_config)
            scheduler_config = limit_to_cache(scheduler_config, cache_config)
            seed = secrets.randbits(64) if model_config.seed is None else model_config.seed
            enforce_eager = model_config.enforce_eager
            tables = TableArray(scheduler_config, cache_config)
            try:
                if workers is not None:
                    workers.order_caches(cache_config, scheduler_config)
                    enforce_eager = enforce_eager or not workers.has_graphs
                model_runner = ModelRunner(causal_lm, cache_config, tables, device, seed, enforce_eager)
                executor: BatchRunner = model_runner if workers is None else Executor(workers, model_runner)
                scheduler = Scheduler(scheduler_config, cache_config, tables)
            except HostMemoryError:
                raise
            except (MemoryError, RuntimeError) as error:  # the allocator decides which of the two it raises
                raise too_large(causal_lm, cache_config, error) from None
            undo.pop_all()
        inputs = InputProcessor(
            self.tokenizer,
            causal_lm.vocab_size,
            scheduler_config.max_model_len,
            end_token_ids,
            defaults,
            pooling,
            causal_lm.embedding_size,
            generates=bool(causal_lm.head),
        )
        self._fingerprint = partial(
            fingerprint,
            partial(checkpoint_digest, directory, load_format),
            causal_lm,
            cache_config,
            device,
            model_config.quantization,
            parallel_config.tensor_parallel_size,
            () if workers is None else workers.facts,
        )
        store = None
        if cache_config.prefix_cache_dir is not None:
            store = open_block_store(self.system_fingerprint, model_runner, cache_config)
        if is_sanitized:
            from pagedattn_serve.sanitized_runner import SanitizedRunner

            executor = SanitizedRunner(executor, model_runner, scheduler.block_manager)
        self._join(model_runner, executor, scheduler, inputs, store)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, on_loading: OnLoading | None = None) -> Self:
        """on_loading: is called with (rank, done, total), some times, as each rank loads its weights; without it a
        terminal shows the progress of rank 0. Raises as `LLMEngine` does, and TypeError for anything but EngineArgs."""
        if not isinstance(engine_args, EngineArgs):
            raise ArgumentTypeError("engine_args", "EngineArgs", type(engine_args).__name__)
        engine = cls.__new__(cls)
        engine._on_loading = on_loading
        engine.__init__(**vars(engine_args))  # type: ignore[misc]
        return engine

    def _join(
        self,
        model_runner: ModelRunner,
        executor: BatchRunner,
        scheduler: Scheduler,
        inputs: InputProcessor,
        store: BlockStore | None = None,
    ) -> None:
        self.model_runner = model_runner  # of rank 0
        self.executor = executor
        self.scheduler = scheduler
        self.inputs = inputs
        self._stored: StoredPrefixes | None = None
        if store is not None:
            self._stored = StoredPrefixes(store, scheduler.block_manager.prefixes, model_runner.cache_engine)
        self._requests = UnfinishedRequests(scheduler)
        self._batch: ScheduledBatch | None = None  # scheduled but not finished: the next step runs the batch
        self._is_broken = False  # requests, queues or blocks are half changed
        self._frame_of_call: FrameType | None = None  # of an interruptible method; or, after an interrupt, an old one
        self._num_prompt_tokens = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._execute_seconds = 0.0

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self.scheduler.config.max_model_len

    @cached_property
    def system_fingerprint(self) -> str:
        """All that decides which bits a request gets, in a few digits: weights and their format, the dtype of the
        cache, kernels, instruction set, ranks, versions. Where it is equal, a seed gives the same tokens and logprobs;
        docs/deterministic.md has the limits."""
        return self._fingerprint()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a request that brings none. The model's generation_config.json gives them;
        `SamplingParams()` gives the rest.

        Such a request also obeys what generation_config.json says and `SamplingParams` cannot: max_length (prompt and
        output together; max_tokens is then None), bad_words_ids and suppress_tokens.
        """
        return self.inputs.defaults.params

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids that a prompt of this text has. Any thread may call this at any time.

        Raises ValueError without a tokenizer or for a text that UTF-8 cannot write, TypeError for anything but a text.
        """
        return self.inputs.texts.tokenize(text, add_special_tokens)

    def detokenize(self, token_ids: Any) -> str:
        """The text of token ids, special tokens included. Any thread may call this at any time.

        token_ids: in any form that a prompt's token ids may have. Raises ValueError if the model's directory has no
        tokenizer or there is no such token, TypeError if the ids are no ints.
        """
        return self.inputs.texts.detokenize(token_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        self._settle()
        return self.scheduler.has_unfinished

    @takes_options(RequestArgs)
    def add_request(self, args: RequestArgs) -> None:
        """Queue a request. The arguments are those of `RequestArgs`, which says what they mean.

        Raises ValueError or TypeError, with nothing queued, if the prompt is empty, too long or not text, a token id is
        not in the vocabulary, the request id is taken, or no output can be held to the structured_output; ImportError
        for structured_output without llguidance. Requests that were queued before go on.
        """
        self.queue_request(self.make_request(args))

    def make_request(self, args: RequestArgs) -> Request:
        """The first half of `add_request`, which takes long for long prompts, and where blocks of the prompt lie on
        disk. Any thread may call this at any time."""
        request = self.inputs.make_request(args)
        if self._stored is not None:
            request.stored = self._stored.read(request.group.sequences[0])
        return request

    @interruptible
    def queue_request(self, request: Request) -> None:
        """The second half of `add_request`. Raises ValueError, with nothing queued, if the request id is taken or
        `Scheduler.add` refuses the request."""
        group = request.group
        try:
            self.scheduler.add(group)
            self._requests.by_id[group.request_id] = request
            self._num_prompt_tokens += len(group.prompt_token_ids)
            stored, request.stored = request.stored, None
            # The blocks of a batch that failed are free, and still to be copied.
            if self._stored is not None and stored is not None and self._batch is None:
                self._stored.insert(*stored)
        except Exception:
            if self.scheduler.has(group):  # otherwise the scheduler has refused the request
                self._requests.by_id.pop(group.request_id, None)
                self._begin_anew()
            raise

    @interruptible
    def register_prefix(self, prefix: Prompt) -> int:
        """Keep the blocks of a prefix that many prompts begin with, once a prompt has computed these blocks.

        prefix: in any form that a prompt may have. Only full blocks are kept. Returns how many tokens of the prefix lie
        in full blocks. A prompt without cache_salt shares the blocks whose token ids it begins with. Fewer blocks are
        shared if the text of the prefix ends within a token of the prompt.

        Raises ValueError or TypeError, with nothing kept, if enable_prefix_caching is False, the prefix is no prompt to
        serve, or the registered prefixes would leave too little of the cache for a sequence of max_model_len, or, of a
        model that keeps states, too few state slots for max_num_seqs sequences.
        """
        if not self.scheduler.block_manager.prefixes.is_on:
            raise ArgumentError("enable_prefix_caching", "True for prefixes to be kept", "False")
        _, token_ids = self.inputs.prompt_tokens(prefix)
        if not 0 < len(token_ids) < self.max_model_len:
            raise ArgumentError("prefix", f"1 to {self.max_model_len - 1} tokens", len(token_ids))
        return self.scheduler.pin_prefix(token_ids)

    @interruptible
    def step(self) -> list[RequestOutput]:
        """Run one batch. Returns an output of each request that ended, and without FINAL_ONLY of each that got tokens.

        The list may be empty while prompts are computed. After an `Exception` of the model or of a tokenizer,
        `fail_batch` says what becomes of the requests.
        """
        started = time.monotonic()
        if self._batch is not None and not self.executor.can_run_again:
            self._restart(self._requests.by_id)
        if self._batch is None:
            self._batch = self._schedule()
        scheduled = time.monotonic()
        batch = self._batch
        sampled = self.executor.execute(batch)
        executed = time.monotonic()
        try:
            self.scheduler.mark_computed(batch, executed - scheduled)
            outputs = self._requests.append_tokens(batch, sampled)
            self._batch = None
        except Exception:
            self._is_broken = True  # the batch cannot run again: some of its requests may have their tokens
            raise
        if self._stored is not None:
            self._stored.write_some()
        self._num_steps += 1
        self._execute_seconds += executed - scheduled
        self._step_seconds += time.monotonic() - started
        return outputs

    def _schedule(self) -> ScheduledBatch:
        """The next batch. After an exception all requests wait: blocks that the batch would have computed are already
        among those that other prompts find."""
        try:
            return self.scheduler.schedule()
        except Exception:
            self._begin_anew()
            raise

    def fail_batch(self, error: str) -> list[RequestOutput]:
        """After a step that raised: end the requests of its batch with `error`; returns their last outputs.

        All other requests wait and are computed anew, because the cache may hold anything. If the step raised before
        there was a batch, no request is to blame and none ends.
        """
        self._refuse_nested_call()
        batch, self._is_broken = self._batch, True  # until all is in order again
        request_ids = set()
        if batch is not None:
            request_ids = {scheduled.sequence.request_id for scheduled in batch.sequences}
            request_ids.update(group.request_id for group in batch.outgrown)
        failed = [request for request_id, request in self._requests.by_id.items() if request_id in request_ids]
        self._restart(self._requests.by_id)
        outputs = self._requests.fail(failed, error)
        self._is_broken = False
        return outputs

    def flush(self, waits: bool = True) -> None:
        """With prefix_cache_dir: let all blocks be written that belong there; see `StoredPrefixes.write_all`. While a
        batch that failed is still to run, none is written: its blocks are found already, and do not hold their tokens
        yet."""
        self._settle()
        if self._stored is not None and self._batch is None:
            self._stored.write_all(waits)

    def get_num_unfinished_requests(self) -> int:
        """Requests that wait or run."""
        self._settle()
        return len(self._requests.by_id)

    @overload
    def abort_request(self, request_id: str) -> RequestOutput | None: ...
    @overload
    def abort_request(self, request_id: list[str] | tuple[str, ...] | set[str]) -> list[RequestOutput]: ...
    def abort_request(
        self, request_id: str | list[str] | tuple[str, ...] | set[str]
    ) -> RequestOutput | list[RequestOutput] | None:
        """End a request at once; returns its last output, or None if the request is unknown or finished already.

        Of several ids, ends each request; returns a list with the last outputs of the requests that were unfinished.
        """
        if isinstance(request_id, list | tuple | set):
            ended = [self.abort_request(each) for each in request_id]
            return [output for output in ended if output is not None]
        if not isinstance(request_id, str):
            raise ArgumentTypeError("request_id", "a string or a list of strings", type(request_id).__name__)
        return self._abort(request_id)

    @interruptible
    def _abort(self, request_id: str) -> RequestOutput | None:
        request = self._requests.by_id.get(request_id)
        if request is None:
            return None
        try:
            if self._batch is not None:
                self._restart(self._requests.by_id)  # because the request may be in the batch
            return self._requests.abort(request)
        except Exception:
            self._is_broken = True
            raise

    def check_health(self) -> None:
        """Raise ExecutorDeadError if a rank of the model has died. A step says that as well; this is for idle times."""
        self.executor.check_health()

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
            num_state_slots=manager.states.num_slots,
            num_used_state_slots=manager.states.num_used_slots,
            num_used_slots=manager.num_used_slots(),
            num_recomputes=scheduler.num_recomputes,
            num_swaps=scheduler.num_swaps,
            num_looked_up_tokens=scheduler.num_looked_up_tokens,
            num_found_tokens=scheduler.num_found_tokens,
            num_read_blocks=0 if self._stored is None else self._stored.num_read,
            num_written_blocks=0 if self._stored is None else self._stored.num_written,
            num_proposed_tokens=scheduler.num_proposed_tokens,
            num_accepted_tokens=scheduler.num_accepted_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._requests.num_output_tokens,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            execute_seconds=self._execute_seconds,
        )

    def cache_map(self) -> CacheMap:
        """All unfinished requests, and which of them holds which block of the cache."""
        self._settle()
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        groups = [*scheduler.running, *scheduler.swapped, *scheduler.waiting]
        sequences = [group.sequences for group in groups]
        host_owners = manager.host_block_owners(sequences)
        return CacheMap(
            blocks=tuple(manager.block_states()),
            owners=tuple(manager.block_owners(sequences)),
            host_blocks=tuple("free" if owner < 0 else "swapped" for owner in host_owners),
            host_owners=tuple(host_owners),
            requests=tuple(map(_state, groups)),
        )

    def _refuse_nested_call(self) -> None:
        frame = None if self._frame_of_call is None else currentframe()
        while frame is not None:
            if frame is self._frame_of_call:
                raise RuntimeError(
                    "LLMEngine: expected a call after the end of the last one, got one from within a call"
                )
            frame = frame.f_back

    def _settle(self) -> None:
        """Begin anew after a call that was interrupted. If an interrupt comes here, the next call begins anew."""
        if self._is_broken:
            self._restart({})
            self._is_broken = False

    def _begin_anew(self) -> None:
        """After an exception that left queues or blocks half changed: all requests wait."""
        self._is_broken = True  # until all is in order again
        self._restart(self._requests.by_id)
        self._is_broken = False

    def _restart(self, requests: dict[str, Request]) -> None:
        """Let these requests wait without blocks, whatever state things are in, and forget all other requests."""
        self._requests.by_id = requests
        self._batch = None
        self.scheduler.restart([request.group for request in requests.values() if request.group.sequences])


def _state(group: SequenceGroup) -> RequestState:
    num_output_tokens = sum(len(sequence.output_token_ids) for sequence in group.sequences)
    state = group.sequences[0].status.value
    return RequestState(group.request_id, state, len(group.prompt_token_ids), num_output_tokens)
