"""distributed_executor_backend="ray": CPUs of the head, on which the driver is, for the ranks of a model."""

import gc

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from replicas import BODY, TEXT
from server_process import wait_for

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams
from pagedattn_serve.distributed import ray_cpus


def make_llm() -> LLM:
    """Two ranks of one thread each: all CPUs of the head."""
    torch.set_num_threads(2)
    options = {"dtype": "float32", "num_blocks": 64, "distributed_executor_backend": "ray"}
    return LLM(DEMO_MODEL, tensor_parallel_size=2, **options)


def num_free_cpus() -> float:
    return ray.available_resources().get("CPU", 0)


def test_ranks_on_reserved_cpus(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cpus, "RESERVE_SECONDS", 1)
    before = num_free_cpus()
    llm = make_llm()
    wait_for(lambda: num_free_cpus() == before - 2)
    params = SamplingParams(temperature=0, max_tokens=BODY["max_tokens"])
    assert llm.generate(BODY["prompt"], params, use_tqdm=False)[0].outputs[0].text == TEXT
    with pytest.raises(ValueError, match="expected 2 free CPUs on this machine within 1 seconds, for 2 ranks of 1 thr"):
        make_llm()
    del llm
    gc.collect()
    wait_for(lambda: num_free_cpus() == before)
