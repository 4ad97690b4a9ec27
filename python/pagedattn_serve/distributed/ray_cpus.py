"""CPUs for the ranks of a model, reserved on a Ray cluster: what Ray places on this machine leaves them alone.

Ray starts none of the ranks. They share memory, so all of them are on the machine of rank 0, and its children. If this
process is killed, Ray takes the CPUs back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from pagedattn_serve.errors import ArgumentError, ArgumentImportError

OPTION = "distributed_executor_backend"
RESERVE_SECONDS = 60.0  # for a machine to have so many CPUs to spare


def reserve_cpus(num_ranks: int, cpus_per_rank: int) -> Callable[[], None]:
    """Wait until Ray has the CPUs to spare on this machine, and take them. Returns what gives them back.

    A process that has not connected to Ray is connected to the cluster of this machine, or of RAY_ADDRESS.

    Raises ImportError without Ray, and ValueError if there is no cluster, or if the CPUs are not free within
    RESERVE_SECONDS.
    """
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
    except ImportError:
        raise ArgumentImportError(OPTION, "ray: pip install 'pagedattn-ext[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            raise ArgumentError(OPTION, "mp where no Ray runs (ray start)", f"ray: {error}") from None
    node_id = ray.get_runtime_context().get_node_id()
    here = [{"ray.io/node-id": node_id}] * num_ranks
    bundles = [{"CPU": float(cpus_per_rank)}] * num_ranks
    group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=here)
    try:
        if not group.wait(RESERVE_SECONDS):
            [num_cpus] = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == node_id]
            expected = (
                f"{num_ranks * cpus_per_rank} free CPUs on this machine within {RESERVE_SECONDS:g} seconds, for "
                f"{num_ranks} ranks of {cpus_per_rank} threads"
            )
            raise ArgumentError(OPTION, expected, f"a machine of {num_cpus:g} CPUs, some of which may be taken")
    except BaseException:
        remove_placement_group(group)
        raise
    return partial(_give_back, ray, remove_placement_group, group)


def _give_back(ray: Any, remove: Callable[[Any], None], group: Any) -> None:
    if ray.is_initialized():  # else Ray has taken the CPUs back
        remove(group)
