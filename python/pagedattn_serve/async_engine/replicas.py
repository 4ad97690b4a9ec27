"""`Replicas`: several engine cores that look like one to `AsyncLLMEngine`, each a process with the whole model."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING

from pagedattn_serve.async_engine.core import EngineDeadError, EngineFacts, News, ReplicaDeadError
from pagedattn_serve.async_engine.news_wire import numbers_of
from pagedattn_serve.async_engine.process_core import ProcessCore
from pagedattn_serve.async_engine.router import Router
from pagedattn_serve.config import MAX_REPLICAS, check_int
from pagedattn_serve.distributed.processes import cpus_of_rank, numa_nodes
from pagedattn_serve.distributed.torchrun import rank_of_torchrun
from pagedattn_serve.engine_args import EngineArgs
from pagedattn_serve.errors import ArgumentError, describe
from pagedattn_serve.outputs import EngineStats, ReplicaStatus
from pagedattn_serve.requests.inputs import RequestArgs

if TYPE_CHECKING:
    from pagedattn_serve.engine import LLMEngine

logger = logging.getLogger(__name__)

FIRST_PAUSE = 1.0  # seconds before a replica that died is started anew; each further time doubles the pause
LONGEST_PAUSE = 60.0
STEADY_SECONDS = 300.0  # a replica that has run for so long begins with the first pause again


@dataclass(slots=True)
class Replica:
    """One of the cores, and what was last heard of it.

    core: the process that runs, or the last one that did; while a new one loads the model, the new one.
    error: what ended the last core, until a new one runs. started: when the core began to run, by time.monotonic.
    pause: seconds of the last pause before a new core was made; 0 if there was none.
    hang: what hangs, and how; None if nothing does.
    """

    index: int
    core: ProcessCore
    stats: EngineStats = field(init=False)
    num_waiting: int = 0
    is_running: bool = False
    error: str | None = None
    num_restarts: int = 0
    started: float = 0.0
    pause: float = 0.0
    hang: str | None = None


class Replicas:
    """A `Core` of several processes. A request goes to the replica that the `Router` chooses.

    If a replica dies, its requests are refused with `ReplicaDeadError`, the others go on, and it is started anew: after
    FIRST_PAUSE seconds, and if it dies again and again after up to LONGEST_PAUSE. What `call` did to its engine is
    gone. If a replica hangs, the news say which requests are stuck, and the other replicas get the requests that come.

    Args:
        engine_args, initializer: of each core, as for `ProcessCore`, but for the seed (`seed_of_replica`).
        num_replicas: how many cores, each with its share of the threads. All load the model at the same time.

    facts, first_stats: set by `wait_until_loaded`.
    """

    facts: EngineFacts
    first_stats: EngineStats

    def __init__(
        self, engine_args: EngineArgs, num_replicas: int, initializer: Callable[[], object] | None = None
    ) -> None:
        check_int("data_parallel_size", num_replicas, 1, MAX_REPLICAS)
        if rank_of_torchrun(engine_args.num_ranks) is not None:
            expected = "1 with ranks that torchrun has started, which are those of one engine"
            raise ArgumentError("data_parallel_size", expected, num_replicas)
        self.engine_args = engine_args
        self._initializer = initializer
        self._num_replicas = num_replicas
        self._replicas: list[Replica] = []
        try:
            for index in range(num_replicas):
                self._replicas.append(Replica(index, self._make_core(index)))
        except BaseException:
            self.kill()
            raise
        self._router = Router(Random())
        self._replica_of_call: dict[int, Replica] = {}
        self._revivals: set[asyncio.Task[None]] = set()
        # Loading waits in a thread: the threads of the event loop tokenize.
        self._loading = ThreadPoolExecutor(num_replicas, "pagedattn-load")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = False
        self._has_told_end = False

    def wait_until_loaded(self) -> None:
        """Wait until all replicas take requests. Raises what `ProcessCore.wait_until_loaded` does, and ValueError for
        replicas on CUDA; then no replica is left."""
        try:
            self._load_all()
            for replica in self._replicas:
                replica.stats = replica.core.first_stats
            self.facts = self._replicas[0].core.facts
            if self.facts.device.startswith("cuda"):
                expected = "1 on CUDA, where all replicas would take the same device"
                raise ArgumentError("data_parallel_size", expected, self._num_replicas)
        except BaseException:
            self.kill()
            raise
        self.first_stats = self._sum_of_stats()

    def _load_all(self) -> None:
        """Wait for all at once: the log has what each says, and the first that fails ends all."""
        with ThreadPoolExecutor(self._num_replicas, "pagedattn-load") as pool:
            try:
                for loaded in as_completed([pool.submit(each.core.wait_until_loaded) for each in self._replicas]):
                    loaded.result()
            except BaseException:
                self.kill()  # or the threads would go on
                raise

    def kill(self) -> None:
        """End all processes at once."""
        for replica in self._replicas:
            replica.core.kill()

    # ---- what `AsyncLLMEngine` asks of a core -----------------------------------------------------------------------

    def status(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(each.core.pid, each.is_running, each.error, each.num_restarts, each.stats, each.hang)
            for each in self._replicas
        ]

    async def start(self, deliver: Callable[[News], None], finish: Callable[[str | None], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver, self._finish = deliver, finish
        self._stopped = asyncio.Event()
        for replica in self._replicas:
            await self._start(replica)

    def add(self, key: int, args: RequestArgs) -> None:
        """Raises TypeError for what cannot go to another process; then the caller has to `abort` the request. At least
        one replica has to run."""
        self._replicas[self._router.add(key, args.prompt, args.cache_salt)].core.add(key, args)

    def replica_of(self, key: int) -> int:
        """Which replica has an unfinished request."""
        return self._router.replica_of(key)

    def abort(self, key: int, is_left: bool) -> None:
        self._replicas[self._router.replica_of(key)].core.abort(key, is_left)
        if is_left:
            self._router.end(key)

    def call(self, key: int, f: Callable[["LLMEngine"], object], replica: int) -> None:
        """Raises TypeError for what cannot go to another process, and ReplicaDeadError if the replica does not run."""
        called = self._replicas[replica]
        if not called.is_running:
            raise death_of(called)
        called.core.call(key, f)
        self._replica_of_call[key] = called

    def cancel(self, key: int) -> None:
        if (replica := self._replica_of_call.pop(key, None)) is not None:
            replica.core.cancel(key)

    def stop(self) -> None:
        self._is_stopping = True
        if self._loop is None or self._loop.is_closed():
            self.kill()
            return
        self._stopped.set()
        for replica in self._replicas:
            if replica.is_running:
                replica.core.stop()
            else:
                replica.core.interrupt_loading()
        self._tell_end()

    async def join(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            await asyncio.gather(*self._revivals)
            await asyncio.gather(*(replica.core.join() for replica in self._replicas))
            self._loading.shutdown()

    def _make_core(self, index: int, num_restarts: int = 0) -> ProcessCore:
        engine_args = replace(self.engine_args, seed=seed_of_replica(self.engine_args.seed, index, num_restarts))
        initializer = partial(begin_on_share, index, self._num_replicas, self._initializer)
        core = ProcessCore(engine_args, initializer)
        core.replica = index
        return core

    # ---- the replicas -----------------------------------------------------------------------------------------------

    async def _start(self, replica: Replica) -> None:
        """Let a core that has loaded the model run."""
        replica.core.on_hang = partial(self._take_hang, replica)
        await replica.core.start(partial(self._take, replica), partial(self._end, replica))
        replica.stats = replica.core.first_stats
        replica.error = None
        replica.is_running = True
        replica.started = time.monotonic()
        self._router.start(replica.index, self.facts.num_tokens(replica.stats.num_blocks))
        self._tell_stuck()

    def _take(self, replica: Replica, news: News) -> None:
        """Pass on what a replica tells, with the stats of all."""
        for key, output in news.outputs:
            if output.finished:
                self._router.end(key)
            else:
                self._router.begin(key)
        for key, _ in news.refused:
            self._router.end(key)
        for key, _, _ in news.results:
            self._replica_of_call.pop(key, None)
        replica.stats, replica.num_waiting = news.stats, news.num_waiting
        news.stats, news.num_waiting = self._sum_of_stats(), sum(each.num_waiting for each in self._replicas)
        self._deliver(news)

    def _take_hang(self, replica: Replica) -> None:
        """A core hangs, or goes on."""
        replica.hang = replica.core.hang
        if not replica.is_running:
            return
        if replica.hang is None:
            logger.warning("replica %d goes on", replica.index)
            self._router.resume(replica.index)
        else:
            logger.error("replica %d hangs: %s", replica.index, replica.hang)
            self._router.suspend(replica.index)
        self._tell_stuck()

    def _tell_stuck(self) -> None:
        """Of the requests of replicas that hang, if a replica is well."""
        if any(each.is_running and each.hang is None for each in self._replicas):
            news = self._news()
            hanging = [each.index for each in self._replicas if each.is_running and each.hang is not None]
            news.stuck = [key for index in hanging for key in self._router.keys_of(index)]
            self._deliver(news)

    def _news(self) -> News:
        return News(self._sum_of_stats(), sum(each.num_waiting for each in self._replicas))

    def _end(self, replica: Replica, error: str | None) -> None:
        """A core has ended, and with it all that it had in hand."""
        assert self._loop is not None
        replica.is_running = False
        replica.hang = None
        replica.num_waiting = 0
        replica.stats = replica.core.first_stats
        replica.error = error
        death = EngineDeadError("the engine was shut down") if error is None else death_of(replica)
        news = self._news()
        news.refused = [(key, death) for key in self._router.keys_of(replica.index)]
        calls = [key for key, each in self._replica_of_call.items() if each is replica]
        news.results = [(key, None, death) for key in calls]
        for key in calls:
            del self._replica_of_call[key]
        self._router.forget(replica.index)
        self._deliver(news)
        if self._is_stopping:
            self._tell_end()
            return
        revival = self._loop.create_task(self._revive(replica))
        self._revivals.add(revival)
        revival.add_done_callback(self._revivals.discard)

    def _tell_end(self) -> None:
        """The last replica has stopped."""
        if not any(each.is_running for each in self._replicas) and not self._has_told_end:
            self._has_told_end = True
            self._finish(None)

    async def _revive(self, replica: Replica) -> None:
        """Start a replica anew, until it runs or all are stopped."""
        if time.monotonic() - replica.started > STEADY_SECONDS:
            replica.pause = 0.0
        while True:
            replica.pause = min(2 * replica.pause or FIRST_PAUSE, LONGEST_PAUSE)
            logger.error(
                "replica %d died: %s; it is started anew in %g seconds", replica.index, replica.error, replica.pause
            )
            await replica.core.join()
            if await self._are_stopped_within(replica.pause):
                return
            replica.num_restarts += 1
            try:
                replica.core = self._make_core(replica.index, replica.num_restarts)
                await asyncio.get_running_loop().run_in_executor(self._loading, replica.core.wait_until_loaded)
            except Exception as error:
                if self._is_stopping:
                    return
                replica.error = describe(error)
            else:
                if self._is_stopping:
                    replica.core.kill()
                    return
                await self._start(replica)
                logger.warning("replica %d runs again, as process %d", replica.index, replica.core.pid)
                return

    async def _are_stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _sum_of_stats(self) -> EngineStats:
        return total([each.stats for each in self._replicas])


def seed_of_replica(seed: int | None, replica: int | str, num_restarts: int = 0) -> int | None:
    """The seed of a replica's engine, so that no two engines draw the same random numbers. The first engine of all has
    the given seed. None stays None.

    replica: its index, or the name that Ray Serve has for it.
    """
    if seed is None or (replica, num_restarts) == (0, 0):
        return seed
    return int.from_bytes(blake2b(f"{seed} {replica} {num_restarts}".encode(), digest_size=8).digest())


def begin_on_share(index: int, num_replicas: int, initializer: Callable[[], object] | None) -> None:
    """In a replica's process: take a share of threads and NUMA nodes, or all would be in each other's way."""
    import torch  # here: the process of `Replicas` needs none

    torch.set_num_threads(max(1, torch.get_num_threads() // num_replicas))
    cpus = cpus_of_rank(index, num_replicas, numa_nodes(os.sched_getaffinity(0)))
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    if initializer is not None:
        initializer()


def death_of(replica: Replica) -> ReplicaDeadError:
    return ReplicaDeadError(f"replica {replica.index} died: {replica.error}")


def total(stats: list[EngineStats]) -> EngineStats:
    """The sum of all counts."""
    return EngineStats(*map(sum, zip(*map(numbers_of, stats), strict=True)))
