"""Hypothesis profiles, the devices that op tests run on, and the number of threads.

"ci" (default) draws other examples in each run; what fails is printed as a line @reproduce_failure(...), which brings
the example back above the test. HYPOTHESIS_PROFILE=long searches for long. "unshrunk" is "ci" without the minutes that
it takes to make a failing example small. "few" draws fewer, for `make sanitize`.

pytest --device cpu|simt|cuda (may be repeated; default cpu): a test with the fixture `device` runs on each of them. Its
mark `devices(...)` leaves some out. A test without the fixture runs if cpu is among the devices. "cpu" is the best
instruction set of this machine, or that of PAGEDATTN_CPU_CAPABILITY; cpu-avx2 and the like name one; cpu-all is each
that this machine has, one after the other. Beyond avx512 few kernels have code of their own for each: with cpu-all a
test runs on those that its mark `code_for(...)` names, and without the mark on avx512_bf16 and amx.

A case with the mark `long` runs with --long, in `make test-long`. A test with the mark `sweep` walks through a grid of
sizes: --sweep-step 7 runs every seventh case, in `make sanitize`, where a call takes ten times as long.

--threads 4: in `make sanitize-threads`, where little work is enough for several threads.

pytest --part 3/8: every eighth of these tests, from the third on, for eight processes that share them. --after TEST: of
them, those behind TEST, for a process that goes on where another one ended.
"""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from op_table import DEVICES, EVERY_CPU, OPS, load_simt, num_simt_launches

pytest_plugins = ["hung_tests"]

# They have environments of their own, and leave this file out: make test-clients, test-ray, test-adopters,
# test-models, test-wheels.
collect_ignore = ["adopters", "clients", "ray_cluster", "real_models", "wheels"]

# A busy machine is no reason to fail: no deadline, no "too slow".
settings.register_profile(
    "ci", database=None, max_examples=30, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", max_examples=3000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("few", settings.get_profile("ci"), max_examples=8)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A shell that runs pytest in the background makes it ignore interrupts, and so the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Else Inductor compiles a program for each instruction set, to see whether it runs: 6 seconds of CPU time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# On small tensors a parallel region of a busy machine costs 100 times the work in it.
torch.set_num_threads(1)


@pytest.fixture
def several_threads() -> None:
    """For a test whose tensors are large enough that the op splits its work."""
    torch.set_num_threads(3)


@pytest.fixture(scope="module")
def exact_weights() -> Iterator[None]:
    """Packed weights in memory of their own: AddressSanitizer sees a read past their end. In huge pages, they share a
    mapping with other tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedattn_ext.ops.linear.empty_huge_pages", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    devices = [*DEVICES, *EVERY_CPU, "cpu-all"]
    parser.addoption("--device", action="append", choices=devices, help="where the op tests run (default: cpu)")
    parser.addoption("--long", action="store_true", help="with the cases that are marked long")
    parser.addoption("--sweep-step", type=int, default=1, metavar="N", help="of a sweep's cases every N-th")
    parser.addoption("--part", type=part_of, default=(1, 1), metavar="I/N", help="one of N parts of the tests")
    parser.addoption("--after", metavar="TEST", help="of these tests, those behind TEST")
    parser.addoption("--threads", type=int, default=1, metavar="N", help="of torch, in each test")


def part_of(text: str) -> tuple[int, int]:
    part, num_parts = map(int, text.split("/"))
    if not 1 <= part <= num_parts:
        raise ValueError
    return part, num_parts


def devices_of(config: pytest.Config) -> list[str]:
    asked = config.getoption("device") or ["cpu"]
    return [device for name in asked for device in (EVERY_CPU if name == "cpu-all" else [name])]


BEYOND_AVX512 = {"avx512_vnni", "avx512_bf16", "amx"}


def kind_of(device: str) -> str:
    return "cpu" if device in EVERY_CPU else device


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "devices(*names): the devices that a test with the fixture `device` is for")
    config.addinivalue_line("markers", "code_for(*names): beyond avx512, what its kernels have code of their own for")
    config.addinivalue_line("markers", "long: a case for pytest --long alone")
    config.addinivalue_line("markers", "sweep: a test of which --sweep-step leaves cases out")
    config.addinivalue_line("markers", "timeout: of pytest-timeout, without which there are no limits")
    if "simt" in devices_of(config):
        load_simt()


def devices_for(node: pytest.Item | pytest.Function, config: pytest.Config) -> list[str]:
    mark = node.get_closest_marker("devices")
    names = [name for name in devices_of(config) if mark is None or kind_of(name) in mark.args]
    if "cpu-all" in (config.getoption("device") or []):
        code_for = node.get_closest_marker("code_for")
        without = BEYOND_AVX512.difference(("avx512_bf16", "amx") if code_for is None else code_for.args)
        names = [name for name in names if name.removeprefix("cpu-") not in without]
    return names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        devices = devices_for(metafunc.definition, metafunc.config)
        metafunc.parametrize("device", devices, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases_of: defaultdict[str, int] = defaultdict(int)

    def runs(item: pytest.Item) -> bool:
        if item.get_closest_marker("long") and not config.getoption("long"):
            return False
        if item.get_closest_marker("sweep"):
            test = item.nodeid.partition("[")[0]
            cases_of[test] += 1
            if (cases_of[test] - 1) % config.getoption("sweep_step"):
                return False
        if "device" in item.fixturenames:
            return bool(devices_for(item, config))
        return "cpu" in map(kind_of, devices_of(config))

    part, num_parts = config.getoption("part")
    chosen = [item for item in items if runs(item)][part - 1 :: num_parts]
    if (test := config.getoption("after")) is not None:
        names = [item.nodeid for item in chosen]
        if test not in names:
            raise pytest.UsageError(f"--after: expected one of {len(names)} tests, got {test}")
        chosen = chosen[names.index(test) + 1 :]
    config.hook.pytest_deselected(items=[*set(items) - set(chosen)])
    items[:] = chosen


@pytest.fixture(scope="module", autouse=True)
def freeze_what_was_imported() -> None:
    """No collection of garbage looks at what the files before have imported: each full one would take 0.3 seconds after
    Inductor has run. Transformers' continuous batching collects often, and so do the tests of leaks."""
    gc.collect()
    gc.freeze()


LAUNCHES_BEFORE = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.set_num_threads(item.config.getoption("threads"))
    OPS.select(item.callspec.params.get("device", "cpu") if hasattr(item, "callspec") else "cpu")
    if OPS.namespace == "pagedattn_simt":
        item.stash[LAUNCHES_BEFORE] = num_simt_launches()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and LAUNCHES_BEFORE in item.stash and "PAGEDATTN_SIMT_SEED" not in os.environ:
        first, last = item.stash[LAUNCHES_BEFORE] + 1, num_simt_launches()
        seeds = f"Launches {first} to {last}: PAGEDATTN_SIMT_SEED={last} gives each the schedule of the last one."
        report.sections.append(("simt", seeds))
    if report.failed and "cuda" in devices_of(item.config) and is_gpu_lost():
        item.session.shouldfail = f"the GPU is lost after {item.nodeid}"  # bench/gpu/steps.py reads it
    return report


def is_gpu_lost() -> bool:
    """After an illegal address and the like every call of the process fails: no failure is one of its own any more."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # RuntimeError, or torch.AcceleratorError
        return True
    return False


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where an op test has its tensors: on the CPU for every "cpu...", and for "simt"."""
    if request.param != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("pagedattn_ext::rms_norm", "CUDA"):
        pytest.skip("this build of pagedattn_ext has no CUDA kernels")
    return torch.device("cuda", torch.cuda.current_device())
