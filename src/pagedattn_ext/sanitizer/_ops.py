"""The ops that read or write paged caches, and what they do there.

A kernel in front of those of all devices checks each call. It stands in torch's dispatcher, so that no caller goes
round it: not this package, nor a compiled model, nor another package that calls the raw ops.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import _C
from ..cpu_graph import run_at_replays
from ..ops._call import NAMESPACE, overloads, tensors_in
from ._access import ReadRows, Told
from ._sanitizer import CacheSanitizer
from ._watched_cache import slot_dim_of

IN_FRONT = torch._C.DispatchKey.BackendSelect  # which every call has, whatever its tensors
SEEN_BY = ("query_start_loc", "sliding_window", "attention_chunk")  # what decides which tokens a row sees
Arguments = dict[str, Any]
Check = Callable[[CacheSanitizer, str, Arguments], Callable[[], None] | None]  # returns what to do after the op

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
            for name, (caches, check) in WATCHED.items():
                op = overloads[name]
                _library.impl(name, _kernel(name, op, caches, check), IN_FRONT.name, with_keyset=True)  # type: ignore[no-untyped-call]


def unwatch(sanitizer: CacheSanitizer) -> None:
    """End `watch`. Once nothing is watched, calls cost what they did before."""
    global _library
    with _lock:
        _active.discard(sanitizer)
        if not _active and _library is not None:
            _library._destroy()  # type: ignore[no-untyped-call]
            _library = None


def _kernel(name: str, op: Any, cache_arguments: tuple[str, ...], check: Check) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    has = CacheSanitizer.has if check in (_copies, _swaps) else CacheSanitizer.has_slots_of  # blocks, or slots

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        arguments: Arguments = dict(zip(names, args, strict=False)) | kwargs
        caches = tensors_in([arguments[argument] for argument in cache_arguments])
        found = [sanitizer for sanitizer in _active if any(has(sanitizer, cache) for cache in caches)]
        if not found:
            return op.redispatch(keys.remove(IN_FRONT), *args, **kwargs)
        begin = _begin_at_replays if _C.CpuGraph.is_capturing() else _begin
        ends = [begin(sanitizer, name, check, arguments) for sanitizer in found]
        results = op.redispatch(keys.remove(IN_FRONT), *args, **kwargs)
        for end in ends:
            end()
        return results

    return kernel


def _begin(sanitizer: CacheSanitizer, name: str, check: Check, arguments: Arguments) -> Callable[[], None]:
    return check(sanitizer, name, arguments) or _do_nothing


def _begin_at_replays(sanitizer: CacheSanitizer, name: str, check: Check, arguments: Arguments) -> Callable[[], None]:
    """For a call that is captured: the checks run around the op in each replay, as long as the sanitizer watches."""
    own = tree_map_only(Tensor, Tensor.detach, arguments)  # which nobody gives other memory
    ends: list[Callable[[], None]] = []

    def begin() -> None:
        ends[:] = [_begin(sanitizer, name, check, own) if sanitizer in _active else _do_nothing]

    run_at_replays(begin)
    return lambda: run_at_replays(lambda: ends[0]())


def _do_nothing() -> None:
    pass


def _reads(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> None:
    tables, lens = arguments["block_tables"], arguments["seq_lens"]
    if not _have_rows(arguments, tables, lens):
        return

    def rows() -> ReadRows:
        ends: list[int] = lens.tolist()
        return ReadRows(ends, _first_seen(arguments, ends), [0] * len(ends))

    _check_rows(sanitizer, _cache_of(arguments), (tables, lens, *_what_rows_see(arguments)), tables, rows, name)


def _writes(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Callable[[], None]:
    return sanitizer.begin_write(_cache_of(arguments), arguments["slot_mapping"], name)


def _gathers(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> None:
    sanitizer.check_read_slots(arguments["key_cache"], arguments["slot_mapping"], name)


def _appends(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> Callable[[], None] | None:
    key_cache, tables, cached = arguments["key_cache"], arguments["block_tables"], arguments["cached_lens"]
    if not _have_rows(arguments, tables, cached):
        return None
    begins: list[int] = cached.tolist()
    counts = _counts(arguments["key"], arguments.get("key_start_loc"), len(begins))
    ends = [begin + count for begin, count in zip(begins, counts, strict=True)]

    def rows() -> ReadRows:
        return ReadRows(ends, _first_seen(arguments, ends), counts)

    _check_rows(sanitizer, key_cache, (tables, *ends, *_what_rows_see(arguments)), tables, rows, name)
    return sanitizer.begin_write(key_cache, _slots(key_cache, tables, begins, ends), name)


def _check_rows(
    sanitizer: CacheSanitizer,
    cache: Tensor,
    told: Told,
    tables: Tensor,
    rows: Callable[[], ReadRows],
    name: str,
) -> None:
    """Tables of blocks as tables. Tables of other pages, such as of one token, as the slots that are read."""
    if cache.shape[slot_dim_of(cache)] == sanitizer.block_size:
        sanitizer.check_rows(cache, told, tables, rows, name)
        return
    lens, first, num_new = rows()
    ends = [length - new for length, new in zip(lens, num_new, strict=True)]
    sanitizer.check_read_slots(cache, _slots(cache, tables, first, ends), name)


def _slots(cache: Tensor, tables: Tensor, begins: list[int], ends: list[int]) -> Tensor:
    """The slots of the tokens [begin, end) of each row, as far as its table has them."""
    size = cache.shape[slot_dim_of(cache)]
    slots = [
        table[i // size] * size + i % size
        for table, begin, end in zip(tables.tolist(), begins, ends, strict=True)
        for i in range(begin, min(end, len(table) * size))
    ]
    return torch.tensor(slots, dtype=torch.int64)


def _copies(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> None:
    for key_cache in arguments["key_caches"]:
        if sanitizer.has(key_cache):
            sanitizer.copied(key_cache, arguments["block_mapping"], name)


def _swaps(sanitizer: CacheSanitizer, name: str, arguments: Arguments) -> None:
    source, target, pairs = arguments["src"], arguments["dst"], arguments["block_mapping"]
    if not sanitizer.has(target):
        sanitizer.copied_out(source, pairs[:, 0], name)
    elif not sanitizer.has(source):
        sanitizer.copied_in(target, pairs[:, 1], name)
    else:
        sanitizer.copied(target, pairs, name)


def _cache_of(arguments: Arguments) -> Tensor:
    return next(arguments[name] for name in ("key_cache", "kv_cache", "kv_c_cache") if name in arguments)


def _query_of(arguments: Arguments) -> Tensor:
    return arguments["q_nope"] if "q_nope" in arguments else arguments["query"]


def _what_rows_see(arguments: Arguments) -> tuple[Tensor | int | None, ...]:
    """What decides which tokens a row sees, beside its length."""
    return _query_of(arguments).shape[:-2].numel(), *(arguments.get(name) for name in SEEN_BY)


def _have_rows(arguments: Arguments, tables: Tensor, lens: Tensor) -> bool:
    """Whether what is told of rows is of as many rows; else the op says what is wrong."""
    for name in ("query_start_loc", "key_start_loc"):
        start_loc = arguments.get(name)
        if start_loc is not None and start_loc.shape != (len(tables) + 1,):
            return False
    return tables.dim() == 2 and lens.shape == tables.shape[:1]


def _counts(tokens: Tensor, start_loc: Tensor | None, num_rows: int) -> list[int]:
    """How many tokens each row has: of a ragged batch, or equally many."""
    if start_loc is not None:
        return [end - begin for begin, end in pairwise(start_loc.tolist())]
    return [tokens.shape[:-2].numel() // max(num_rows, 1)] * num_rows


def _first_seen(arguments: Arguments, lens: list[int]) -> list[int]:
    """The first token that the first query of each row sees; a row without queries sees none."""
    window, chunk = arguments.get("sliding_window"), arguments.get("attention_chunk", 0)
    first = []
    for length, count in zip(
        lens, _counts(_query_of(arguments), arguments.get("query_start_loc"), len(lens)), strict=True
    ):
        begin = max(length - count, 0)
        by_window = 0 if window is None else begin - window + 1
        by_chunk = begin // chunk * chunk if chunk else 0
        first.append(max(by_window, by_chunk, 0) if count > 0 else length)
    return first


# By op: the arguments by which the caches are known, and what is checked at a call.
WATCHED: dict[str, tuple[tuple[str, ...], Check]] = {
    "paged_attention_v1": (("key_cache",), _reads),
    "paged_attention_v2": (("key_cache",), _reads),
    "paged_attention": (("key_cache",), _reads),
    "mla_attention": (("kv_c_cache",), _reads),
    "append_and_attend": (("key_cache",), _appends),
    "reshape_and_cache": (("key_cache",), _writes),
    "reshape_and_cache_flash": (("key_cache",), _writes),
    "concat_and_cache_mla": (("kv_cache",), _writes),
    "gather_cached_kv": (("key_cache",), _gathers),
    "copy_blocks": (("key_caches",), _copies),
    "swap_blocks": (("src", "dst"), _swaps),
}
