"""Where Ray places the ranks of a model, and how it starts those on other machines.

All ranks are on this machine if it has CPUs for them; else they are on as few machines as possible, this one among
them, the same number on each. Ray starts the ranks on other machines, and has no part in their steps. The CPUs are a
placement group: what else Ray places leaves them alone. If this process ends, however it ends, Ray kills the ranks that
it has started and takes the CPUs back.
"""

import time
from typing import Any

from pagedattn_serve.distributed.channel import Address
from pagedattn_serve.errors import ArgumentError, ArgumentImportError, ExecutorDeadError, describe, how_to_install

OPTION = "distributed_executor_backend"
RESERVE_SECONDS = 60.0  # for machines to have so many CPUs to spare
POLL_SECONDS = 0.2


class RayPlacement:
    """CPUs for the ranks of a model, on one machine or several.

    num_hosts: the machines; this one is the first. ip: the address of this machine, for the others.
    """

    def __init__(self, num_ranks: int, cpus_per_rank: int) -> None:
        """Wait until Ray has the CPUs to spare, and take them. A process that has not connected to Ray is connected to
        the cluster of this machine, or of RAY_ADDRESS.

        Raises ImportError without Ray, and ValueError if there is no cluster, or if the CPUs are not free within
        RESERVE_SECONDS.
        """
        self._ray = connected_ray()
        self._num_ranks = num_ranks
        self._cpus_per_rank = cpus_per_rank
        self._ranks: dict[Any, int] = {}  # of the calls in which they run
        self._actors: list[Any] = []
        self.ip: str = self._ray.util.get_node_ip_address()
        self._here: str = self._ray.get_runtime_context().get_node_id()
        deadline = time.monotonic() + RESERVE_SECONDS
        while not (num_hosts := self._choose_num_hosts()):
            if time.monotonic() > deadline:
                raise self._refusal()
            time.sleep(POLL_SECONDS)
        self.num_hosts = num_hosts
        self._reserve(deadline)

    def start(self, rank: int, address: Address, key: bytes) -> None:
        """Let a rank of another machine start, and connect to this address."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = rank // (self._num_ranks // self.num_hosts)
        strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
        actor = self._ray.remote(num_cpus=self._cpus_per_rank, scheduling_strategy=strategy)(RemoteRank).remote()
        self._actors.append(actor)
        self._ranks[actor.serve.remote(rank, address, key)] = rank

    def check(self) -> None:
        """Raise ExecutorDeadError if a rank that was started has ended."""
        ended, _ = self._ray.wait([*self._ranks], timeout=0)
        for call in ended:
            rank = self._ranks[call]
            try:
                self._ray.get(call)
            except Exception as error:
                *_, reason = str(error).splitlines() or [describe(error)]  # behind Ray's tracebacks
                raise ExecutorDeadError(f"rank {rank} could not start: {reason}") from None
            raise ExecutorDeadError(f"rank {rank} has ended")

    def give_back(self) -> None:
        """The ranks that Ray has started are killed."""
        if self._ray.is_initialized():  # else Ray has taken the CPUs back
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)

    def _choose_num_hosts(self) -> int | None:
        """The fewest machines that have CPUs for all ranks, free or taken; None if there are not enough."""
        here, *others = self._machines()
        for num_hosts in range(1, self._num_ranks + 1):
            needed = self._cpus_of_host(num_hosts)
            num_others = sum(cpus >= needed for cpus in others)
            if self._num_ranks % num_hosts == 0 and here >= needed and num_others >= num_hosts - 1:
                return num_hosts
        return None

    def _machines(self) -> list[float]:
        """Their CPUs, of this machine first."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        nodes.sort(key=lambda node: node["NodeID"] != self._here)
        return [node["Resources"].get("CPU", 0) for node in nodes]

    def _cpus_of_host(self, num_hosts: int) -> int:
        return self._num_ranks // num_hosts * self._cpus_per_rank

    def _reserve(self, deadline: float) -> None:
        from ray.util.placement_group import placement_group

        bundles = [{"CPU": float(self._cpus_of_host(self.num_hosts))}] * self.num_hosts
        places = [{"ray.io/node-id": self._here}, *[{}] * (self.num_hosts - 1)]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=places)
        try:
            # Ray takes whole seconds, and does not wait at all for less than one.
            if not self._group.wait(max(1, round(deadline - time.monotonic()))):
                raise self._refusal()
        except BaseException:
            self.give_back()
            raise

    def _refusal(self) -> ArgumentError:
        ranks, cpus = self._num_ranks, self._cpus_per_rank
        here, *others = self._machines()
        expected = (
            f"{ranks * cpus} CPUs that are free within {RESERVE_SECONDS:g} seconds, on this machine or the same number "
            f"on each of several, for {ranks} ranks of {cpus} threads"
        )
        got = f"{here:g} on this machine" + (
            f" and {', '.join(f'{each:g}' for each in others)} on others" * bool(others)
        )
        return ArgumentError(OPTION, expected, f"{got}, some of which may be taken")


class RemoteRank:
    """The actor of a rank: its process serves rank 0, and ends with it."""

    def serve(self, rank: int, address: Address, key: bytes) -> None:
        from pagedattn_serve.distributed.worker import serve_remote_rank  # which imports torch

        serve_remote_rank(rank, address, key)


def connected_ray() -> Any:
    """The module, connected to a cluster."""
    try:
        import ray
    except ImportError:
        raise ArgumentImportError(OPTION, f"ray: {how_to_install('ray')}") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            raise ArgumentError(OPTION, "mp where no Ray runs (ray start)", f"ray: {error}") from None
    return ray
