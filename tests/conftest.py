"""Hypothesis profiles, the device fixture and the number of threads.

"ci" (default) draws the same examples every time; HYPOTHESIS_PROFILE=long searches for new ones.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import pagedattn_ext  # noqa: F401 - registers the ops, whichever test runs alone

# A busy machine is no reason to fail: no deadline, no "too slow".
settings.register_profile(
    "ci", derandomize=True, database=None, max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", max_examples=3000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# On small tensors a parallel region of a busy machine costs 100 times the work in it.
torch.set_num_threads(1)


@pytest.fixture
def several_threads() -> Iterator[None]:
    """For a test whose tensors are large enough that the op splits its work."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device an op test runs on. On "cpu" it runs under the ISA of the process (PAGEDATTN_CPU_CAPABILITY)."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("pagedattn_ext::rms_norm", request.param.upper()):
        pytest.skip(f"this build of pagedattn_ext has no {request.param} kernels")
    return torch.device(request.param)
