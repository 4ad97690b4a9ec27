"""What the sanitizer raises."""

from collections.abc import Callable, Hashable
from functools import partial


class CacheError(RuntimeError):
    """An access that does not fit the block's owners, or what is written.

    owner, block, slot, layer: None where they are unknown or there are several. slot: within the cache, block *
    block_size + offset. op: what did it; "tables", "allocated" and so on, if what was told contradicts itself.
    """

    __module__ = str(__package__)  # where it is imported from

    def __init__(
        self,
        op: str,
        problem: str,
        *,
        owner: Hashable = None,
        block: int | None = None,
        slot: int | None = None,
        layer: Hashable = None,
    ) -> None:
        where = {"layer": layer, "block": block, "slot": slot, "owner": owner}
        told = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
        super().__init__(f"{op}: {problem} ({told})" if told else f"{op}: {problem}")
        self.op, self.owner, self.block, self.slot, self.layer = op, owner, block, slot, layer
        self._remake = partial(CacheError, op, problem, owner=owner, block=block, slot=slot, layer=layer)

    def __reduce__(self) -> tuple[Callable[[], "CacheError"], tuple[()]]:
        return self._remake, ()  # for pickle: engines run in processes of their own
