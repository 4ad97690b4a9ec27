"""PAGEDATTN_SANITIZE=1 beside PAGEDATTN_VLLM=1: vLLM's cache under `sanitizer`. Only `vllm_plugin` imports this module.

What is told comes from the worker, which may live in a process of its own: before each step, the blocks that vLLM's
scheduler has sent for each request of the step, and how many of its tokens are cached and new. The ops are held to it.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from .sanitizer import NO_BLOCK, CacheSanitizer, Row, watch
from .vllm_backend import PagedAttentionImpl, caches_of

NULL_BLOCK = 0  # in vLLM's tables, in place of a block that was given back


def install() -> None:
    """From now on each `CPUModelRunner` has its caches watched, from its first step on."""
    if not hasattr(CPUModelRunner._update_states, "tells_pagedattn"):
        CPUModelRunner._update_states = _and_tell(CPUModelRunner._update_states)


def _and_tell(update: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(update)
    def update_and_tell(runner: Any, scheduler_output: SchedulerOutput) -> Any:
        result = update(runner, scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            if not hasattr(runner, "_pagedattn_watched"):
                runner._pagedattn_watched = WatchedRunner(runner)
            runner._pagedattn_watched.tell(runner, scheduler_output)
        return result

    update_and_tell.tells_pagedattn = True  # type: ignore[attr-defined]
    return update_and_tell


class WatchedRunner:
    """What is told of a runner, whose caches are as they will be. Nothing here refers to the runner.

    Raises NotImplementedError if a group of layers has blocks of another size than the first layer's.
    """

    def __init__(self, runner: Any) -> None:
        names_of: dict[int, list[str]] = {}  # by address: groups of layers lie in the same memory
        caches: dict[int, Any] = {}
        for name, layer in runner.compilation_config.static_forward_context.items():
            if isinstance(getattr(layer, "impl", None), PagedAttentionImpl) and layer.impl.is_ours():
                address = layer.kv_cache.data_ptr()
                caches[address] = layer.kv_cache
                names_of.setdefault(address, []).append(name)
        num_blocks, _, block_size, _ = next(iter(caches.values())).shape
        sizes = {table.block_size for table in runner.input_batch.block_table.block_tables}
        if sizes != {block_size}:
            expected = f"expected blocks of {block_size} tokens in each group of layers, got {sorted(sizes)}"
            raise NotImplementedError(f"pagedattn_ext: PAGEDATTN_SANITIZE: {expected}")
        self.sanitizer = CacheSanitizer(num_blocks, block_size)
        for address, kv_cache in caches.items():
            self.sanitizer.register(*caches_of(kv_cache), layer=" and ".join(names_of[address]))
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        self._windows = [getattr(spec, "sliding_window", None) for spec in specs]
        self._tables: dict[str, list[list[int]]] = {}
        watch(self.sanitizer)

    def tell(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        """Raises CacheError if the tables contradict each other. Blocks of requests that are not in the step are kept:
        they may be found as prefixes, or run on later."""
        owners = list(runner.input_batch.req_ids)
        cached = runner.input_batch.num_computed_tokens_cpu[: len(owners)].tolist()
        tables = {
            owner: [*map(partial(self._held, num_cached), runner.requests[owner].block_ids, self._windows)]
            for owner, num_cached in zip(owners, cached, strict=True)
        }
        for owner, num_cached in zip(owners, cached, strict=True):
            before = self._tables.get(owner, [[] for _ in tables[owner]])
            for table, old in zip(tables[owner], before, strict=True):
                first = -(-num_cached // self.sanitizer.block_size)  # the first block without a cached token
                self.sanitizer.renewed({*table[first:]}.difference(old, (NO_BLOCK,)))
        self._tables = tables
        self.sanitizer.draw(tables, kept=range(self.sanitizer.num_blocks))
        self.sanitizer.expect(
            [
                Row(owner, num_cached, scheduler_output.num_scheduled_tokens[owner])
                for owner, num_cached in zip(owners, cached, strict=True)
            ]
        )

    def _held(self, num_cached: int, table: list[int], window: int | None) -> list[int]:
        """A table without the blocks that vLLM has given back, which the worker is not told."""
        num_gone = 0 if window is None else max(0, num_cached - window + 1) // self.sanitizer.block_size
        return [NO_BLOCK if place < num_gone or block == NULL_BLOCK else block for place, block in enumerate(table)]
