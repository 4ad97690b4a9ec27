"""CacheEngine: blocks go to the host and come back, in every cache; on CUDA in the right order, whatever is late.

The order is tested on a device that is made up: streams are queues of functions, and chance says which goes on.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedattn_ext import ops
from pagedattn_serve.execution import cache_engine
from pagedattn_serve.execution.cache_engine import CacheEngine
from pagedattn_serve.models.cache_shape import CacheGroups, CacheShape, allocate_caches, group_caches
from pagedattn_serve.models.causal_lm import KVCache

SHAPES = [CacheShape(2, 12), CacheShape(1, 20), CacheShape(2, 12), CacheShape(3, 8)]
GROUPS = CacheGroups.single(SHAPES)
# Two groups of two caches each, whose blocks lie in the same two pairs of tensors.
TWO_GROUPS = group_caches([CacheShape(2, 12, window=window) for window in (5, None, None, 5)])
NUM_CACHES, NUM_BLOCKS, NUM_HOST_BLOCKS = len(SHAPES), 6, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def make_engine(device: str = "cpu", dtype: torch.dtype = torch.float32, groups: CacheGroups = GROUPS) -> CacheEngine:
    engine = CacheEngine(groups, NUM_BLOCKS, 8, dtype, device, NUM_HOST_BLOCKS)
    generator = torch.Generator().manual_seed(0)
    for cache in tensors(engine):
        bits = cache.view(torch.uint8)
        bits.copy_(torch.randint(0, 100, bits.shape, generator=generator))
    return engine


def tensors(engine: CacheEngine) -> list[Tensor]:
    """All caches, those of the device first; on the made-up device without a wait."""
    on_device = getattr(engine.kv_caches, "caches", engine.kv_caches)
    return [cache for caches in (*on_device, *engine.host_caches) for cache in caches[:2]]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_go_out_and_come_back(dtype: torch.dtype) -> None:
    engine = make_engine(dtype=dtype)
    before = [bits(cache) for cache in tensors(engine)]
    num_pools = 2 * NUM_CACHES
    engine.swap_out([(4, 0), (1, 3)])
    for device, host, old in zip(before, tensors(engine)[num_pools:], before[num_pools:], strict=False):
        assert torch.equal(bits(host[[0, 3]]), device[[4, 1]])
        assert torch.equal(bits(host[[1, 2, 4]]), old[[1, 2, 4]])
    for cache in tensors(engine)[:num_pools]:
        cache.view(torch.uint8).zero_()
    engine.swap_in([(3, 0), (0, 5)])
    for now, old in zip(tensors(engine)[:num_pools], before, strict=False):
        assert torch.equal(bits(now[[0, 5]]), old[[1, 4]])
        assert not bits(now[1:5]).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_copied_in_every_cache(dtype: torch.dtype) -> None:
    engine = make_engine(dtype=dtype)
    before = [bits(cache) for cache in tensors(engine)]
    engine.copy([(4, 0), (4, 2)])
    for now, old in zip(tensors(engine), before, strict=True):
        expected = old if now.shape[0] == NUM_HOST_BLOCKS else old[[4, 1, 4, 3, 4, 5]]
        assert torch.equal(bits(now), expected)


@pytest.mark.parametrize(("method", "pair"), [("swap_out", (0, 5)), ("swap_out", (6, 0)), ("swap_in", (0, 6))])
def test_a_block_that_there_is_not(method: str, pair: tuple[int, int]) -> None:
    engine = make_engine()
    before = [bits(cache) for cache in tensors(engine)]
    with pytest.raises(ValueError, match="swap_blocks: block_mapping"):
        getattr(engine, method)([pair])
    assert all(map(torch.equal, before, map(bits, tensors(engine))))


def test_a_pool_that_does_not_fit() -> None:
    message = (
        r"^swap_space: expected a pool that fits .* got 1,000,000,000,000 blocks of 8 tokens, 5,888,000,000,000,000 b"
    )
    with pytest.raises(MemoryError, match=message):
        CacheEngine(GROUPS, 4, 8, torch.float32, "cpu", num_host_blocks=10**12)


def test_a_pool_takes_memory_as_it_is_written() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    engine = CacheEngine(
        CacheGroups.single([CacheShape(8, 128)] * 2), 4, 16, torch.float32, "cpu", num_host_blocks=4096
    )
    assert resident() - before < 100 << 20 < sum(cache.nbytes for caches in engine.host_caches for cache in caches)


# --- a device that is made up ---


class Event:
    def __init__(self) -> None:
        self.done = False


class Stream:
    """Functions in order; one that returns False is not ready and stays where it is."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()

    def record_event(self) -> Event:
        event = Event()
        self.queue.append(lambda: setattr(event, "done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(lambda: event.done)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        pass

    def advance(self) -> bool:
        """Run what is first; whether it was ready."""
        if not self.queue or self.queue[0]() is False:
            return False
        self.queue.popleft()
        return True


class Cuda:
    """What cache_engine takes of torch.cuda, and the ops on it."""

    Event = Event

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.streams = [self.compute]

    def Stream(self, device: str) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device: str) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def enqueue(self, function: Callable[..., object], *arguments: object) -> None:
        self.current.queue.append(lambda: function(*arguments) or True)

    def swap_blocks(self, *arguments: object) -> None:
        self.enqueue(ops.swap_blocks, *arguments)

    def copy_blocks(self, *arguments: object) -> None:
        self.enqueue(ops.copy_blocks, *arguments)

    def finish(self, chance: random.Random) -> None:
        """Until all is done; some streams are slower than others."""
        weights = [chance.choice([1, 10, 1000]) for _ in self.streams]
        while any(stream.queue for stream in self.streams):
            chance.choices(self.streams, weights)[0].advance()


class HostTensor(Tensor):
    """What pin_memory and to("cuda") would do, where there is no CUDA."""

    def pin_memory(self, *_: object) -> Tensor:
        return self

    def to(self, *_: object, **__: object) -> Tensor:
        return self.as_subclass(Tensor)


@contextmanager
def made_up_cuda() -> Iterator[Cuda]:
    def allocate(*arguments: Any, **_: object) -> list[tuple[Tensor, Tensor]]:
        return allocate_caches(*arguments[:4])

    def tensor(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).as_subclass(HostTensor)

    cuda = Cuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_engine, "allocate_caches", allocate)
        patch.setattr(cache_engine, "ops", cuda)
        fake_torch = SimpleNamespace(cuda=cuda, tensor=tensor, device=torch.device, int64=torch.int64)
        patch.setattr(cache_engine, "torch", fake_torch)
        yield cuda


def compute(caches: KVCache, read: int, written: int, value: int, seen: list[float]) -> None:
    """What a layer does to its caches."""
    for cache in caches[:2]:
        seen.append(cache[read].sum().item())
        cache[written] = value


device_blocks = st.integers(0, NUM_BLOCKS - 1)
host_blocks = st.integers(0, NUM_HOST_BLOCKS - 1)
steps = st.lists(
    st.fixed_dictionaries(
        dict(
            out=st.lists(st.tuples(device_blocks, host_blocks), max_size=3, unique_by=lambda pair: pair[1]),
            come=st.lists(st.tuples(host_blocks, device_blocks), max_size=3, unique_by=lambda pair: pair[1]),
            copied=st.lists(
                st.tuples(st.integers(0, 2), st.integers(3, 5)), max_size=2, unique_by=lambda pair: pair[1]
            ),
            read=device_blocks,
            written=device_blocks,
        )
    ),
    max_size=6,
)


def run(engine: CacheEngine, steps: list[dict[str, Any]], do: Callable[..., object]) -> list[float]:
    seen: list[float] = []
    for i, step in enumerate(steps):
        if step["out"]:
            engine.swap_out(step["out"])
        if step["come"]:
            engine.swap_in(step["come"])
        if step["copied"]:
            engine.copy(step["copied"])
        for caches in engine.kv_caches:
            do(compute, caches, step["read"], step["written"], 1000 + i, seen)
    return seen


@given(steps=steps, chance=st.randoms(use_true_random=False), groups=st.sampled_from([GROUPS, TWO_GROUPS]))
def test_nothing_is_read_or_written_too_early(
    steps: list[dict[str, Any]], chance: random.Random, groups: CacheGroups
) -> None:
    """As on the CPU, where everything happens at once."""
    on_cpu = make_engine(groups=groups)
    expected = run(on_cpu, steps, lambda function, *arguments: function(*arguments))
    with made_up_cuda() as cuda:
        on_cuda = make_engine("cuda", groups=groups)
        actual = run(on_cuda, steps, cuda.enqueue)
        cuda.finish(chance)
    assert actual == expected
    assert all(map(torch.equal, tensors(on_cuda), tensors(on_cpu)))


def test_a_cache_waits_for_its_own_copies_alone() -> None:
    seen: list[float] = []
    with made_up_cuda() as cuda:
        engine = make_engine("cuda")
        engine.swap_in([(0, 0)])
        for caches in engine.kv_caches:
            cuda.enqueue(compute, caches, 0, 1, 7, seen)
        copies = cuda.streams[1]
        num_layers_done = []
        while copies.queue:
            while cuda.compute.advance():
                pass
            num_layers_done.append(len(seen) // 2)
            copies.advance()
    assert sorted(set(num_layers_done)) == list(range(NUM_CACHES))  # the last one follows the last copy
