"""A Ray cluster on this machine, for tests of pagedattn_serve.ray_serve: two nodes for replicas, a CPU each.

make test-ray has the environment, with Ray.
"""

from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from replicas import NODE, free_port

pytest_plugins = ["hung_tests"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The driver is this process, on the head, which has no room for replicas."""
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
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
