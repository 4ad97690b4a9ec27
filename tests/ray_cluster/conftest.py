"""A Ray cluster on this machine, for tests of pagedattn_serve.ray_serve: two nodes for replicas, a CPU each.

make test-ray has the environment, with Ray.
"""

import os
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve._private import api
from replicas import NODE, free_port

pytest_plugins = ["hung_tests"]

# For a machine that has other work. Ray's processes would get what others leave of the CPUs (a niceness of 15), and
# Ray Serve would replace a proxy that is not ready after 5 seconds: serve.start fails then, as it waits for the first.
MINUTES = 10
PATIENCE = {
    "RAY_worker_niceness": 0,
    "RAY_worker_register_timeout_seconds": 60 * MINUTES,
    "RAY_health_check_timeout_ms": 60_000 * MINUTES,
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": 60 * MINUTES,
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": 60 * MINUTES,
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The driver is this process, on the head, which has no room for replicas."""
    os.environ.update({name: str(value) for name, value in PATIENCE.items()})
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(**NODE, wait=False)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def url(cluster: Cluster) -> Iterator[str]:
    """Where Ray Serve listens."""
    port = free_port()
    api.HTTP_PROXY_TIMEOUT = 60 * MINUTES
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
