"""The ops that read or write paged caches, and what they do there.

A kernel in front of those of all devices checks each call. It stands in torch's dispatcher, so that no caller goes
round it: not this package, nor a compiled model, nor another package that calls the raw ops.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import _C
from ..cpu_graph import run_at_replays
from ..ops._call import NAMESPACE, raw_ops
from ._sanitizer import CacheSanitizer

IN_FRONT = torch._C.DispatchKey.BackendSelect  # which every call has, whatever its tensors
SEEN_BY = ("query_start_loc", "sliding_window", "attention_chunk")  # what decides which tokens a row sees
Arguments = dict[str, Any]
Around = Callable[[CacheSanitizer, str, Arguments], AbstractContextManager[None]]

_lock = threading.Lock()
_active: WeakSet[CacheSanitizer] = WeakSet()
_library: torch.library.Library | None = None


@contextmanager
def watching(sanitizer: CacheSanitizer) -> Iterator[None]:
    """As long as the context lasts, each op of this package that reads or writes a registered cache is checked."""
    watch(sanitizer)
    try:
        yield
    finally:
        unwatch(sanitizer)


def watch(sanitizer: CacheSanitizer) -> None:
    """`watching`, until `unwatch` or as long as the sanitizer lives."""
    global _library
    with _lock:
        _active.add(sanitizer)
        if _library is None:
            _library = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
            for name, (cache, around) in WATCHED.items():
                op = getattr(raw_ops, name).default
                _library.impl(name, _kernel(name, op, cache, around), IN_FRONT.name, with_keyset=True)  # type: ignore[no-untyped-call]


def unwatch(sanitizer: CacheSanitizer) -> None:
    """End `watch`. Once nothing is watched, calls cost what they did before."""
    global _library
    with _lock:
        _active.discard(sanitizer)
        if not _active and _library is not None:
            _library._destroy()  # type: ignore[no-untyped-call]
            _library = None


def _kernel(name: str, op: Any, cache_argument: str, around: Around) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        arguments: Arguments = dict(zip(names, args, strict=False)) | kwargs
        caches = arguments[cache_argument]
        first = caches[0] if isinstance(caches, list) and caches else caches
        found = [sanitizer for sanitizer in _active if isinstance(first, Tensor) and sanitizer.has(first)]
        checks: AbstractContextManager[None] = nullcontext()
        if found and _C.CpuGraph.is_capturing():
            checks = _at_replays(around, found[0], name, arguments)
        elif found:
            checks = around(found[0], name, arguments)
        with checks:
            return op.redispatch(keys.remove(IN_FRONT), *args, **kwargs)

    return kernel


@contextmanager
def _at_replays(around: Around, sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Iterator[None]:
    """Around a call that is captured: the checks run around the op in each replay, as long as the sanitizer watches."""
    own = tree_map_only(Tensor, Tensor.detach, arguments)  # which nobody gives other memory
    entered: list[AbstractContextManager[None]] = []

    def enter() -> None:
        entered[:] = [around(sanitizer, name, own) if sanitizer in _active else nullcontext()]
        entered[0].__enter__()

    def leave() -> None:
        entered[0].__exit__(None, None, None)

    run_at_replays(enter)
    yield
    run_at_replays(leave)


@contextmanager
def _reads(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Iterator[None]:
    tables, lens = arguments["block_tables"], arguments["seq_lens"]
    if tables.dim() == 2 and lens.shape == tables.shape[:1]:  # else the op says what is wrong
        query = _query_of(arguments)
        others = (query.shape[:-2].numel(), *(arguments.get(each) for each in SEEN_BY))

        def seen() -> tuple[Tensor, Tensor]:
            return _first_seen(arguments, lens.cpu().long()), torch.zeros(len(lens), dtype=torch.int64)

        sanitizer.check_rows(_cache_of(arguments), tables, lens, others, seen, name)
    yield


@contextmanager
def _writes(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Iterator[None]:
    with sanitizer.writing(_cache_of(arguments), arguments["slot_mapping"], name):
        yield


@contextmanager
def _gathers(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Iterator[None]:
    sanitizer.check_read_slots(arguments["key_cache"], arguments["slot_mapping"], name)
    yield


@contextmanager
def _appends(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Iterator[None]:
    key_cache, tables, cached = arguments["key_cache"], arguments["block_tables"], arguments["cached_lens"]
    if tables.dim() != 2 or cached.shape != tables.shape[:1] or not len(cached):
        yield
        return
    tables, cached = tables.cpu().long(), cached.cpu().long()
    counts = _counts(arguments["key"], arguments.get("key_start_loc"), len(cached))
    lens = cached + counts
    first = _first_seen(arguments, lens)
    sanitizer.check_read(key_cache, tables, lens, first=first, num_new=counts, op=name)
    rows = torch.repeat_interleave(counts)
    positions = torch.arange(len(rows)) - (counts.cumsum(0) - counts - cached)[rows]
    size = sanitizer.block_size
    with sanitizer.writing(key_cache, tables[rows, positions // size] * size + positions % size, name):
        yield


@contextmanager
def _copies(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Iterator[None]:
    for key_cache in arguments["key_caches"]:
        if sanitizer.has(key_cache):
            sanitizer.copied(key_cache, arguments["block_mapping"], name)
    yield


@contextmanager
def _copies_in(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Iterator[None]:
    source, target, pairs = arguments["src"], arguments["dst"], arguments["block_mapping"]
    if sanitizer.has(source):
        sanitizer.copied(target, pairs, name)
    else:
        sanitizer.copied_in(target, pairs[:, 1], name)
    yield


def _cache_of(arguments: Arguments) -> Tensor:
    return next(arguments[name] for name in ("key_cache", "kv_cache", "kv_c_cache") if name in arguments)


def _query_of(arguments: Arguments) -> Tensor:
    return arguments["q_nope"] if "q_nope" in arguments else arguments["query"]


def _counts(tokens: Tensor, start_loc: Tensor | None, num_rows: int) -> Tensor:
    """How many tokens each row has: of a ragged batch, or equally many."""
    if start_loc is not None:
        return start_loc.cpu().long().diff()
    return torch.full((num_rows,), tokens.shape[:-2].numel() // max(num_rows, 1))


def _first_seen(arguments: Arguments, lens: Tensor) -> Tensor:
    """The first token that the first query of each row sees; a row without queries sees none."""
    counts = _counts(_query_of(arguments), arguments.get("query_start_loc"), len(lens))
    begin = (lens - counts).clamp(min=0)
    first = torch.zeros_like(lens)
    if (window := arguments.get("sliding_window")) is not None:
        first = torch.maximum(first, begin - window + 1)
    if chunk := arguments.get("attention_chunk", 0):
        first = torch.maximum(first, begin // chunk * chunk)
    return torch.where(counts > 0, first, lens)


# By op: the argument by which the caches are known, and what is checked around a call.
WATCHED: dict[str, tuple[str, Around]] = {
    "paged_attention_v1": ("key_cache", _reads),
    "paged_attention_v2": ("key_cache", _reads),
    "paged_attention": ("key_cache", _reads),
    "mla_attention": ("kv_c_cache", _reads),
    "append_and_attend": ("key_cache", _appends),
    "reshape_and_cache": ("key_cache", _writes),
    "reshape_and_cache_flash": ("key_cache", _writes),
    "concat_and_cache_mla": ("kv_cache", _writes),
    "gather_cached_kv": ("key_cache", _gathers),
    "copy_blocks": ("key_caches", _copies),
    "swap_blocks": ("dst", _copies_in),
}
