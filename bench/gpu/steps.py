"""The steps of bench/gpu_report.py: which commands they are, and how long each may take."""

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.commands import ROOT, Command, outcomes_of_tests

NUM_PROCESSES = 8
TEST_SECONDS = 60  # of a single test
MAX_REPEATED = 40  # tests that have failed, once more without each mechanism
SMOKE = ["tests/ops/test_smoke.py"]
SWITCH = "PAGEDATTN_CUDA_WITHOUT"
# What PAGEDATTN_CUDA_WITHOUT can leave out of attention, in the order of blame: without bulk copies there are no
# clusters.
MECHANISMS = ("wgmma", "cluster", "bulk", "pdl")
LOST_GPU = re.compile(r"^!+ the GPU is lost after (?P<test>.+?) !+$", re.MULTILINE)  # of tests/conftest.py

# Of tests/simt/twins.cu: for the GPUs that CMakeLists.txt names, and as docs/simt.md has it.
COMPILERS = {
    "cuda": [
        *("nvcc", "--threads", "0", "-std=c++20", "-O1", "--expt-relaxed-constexpr", "-I", "tests"),
        *("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a"),
        "-gencode=arch=compute_90,code=compute_90",
    ],
    "simt": [
        *("c++", "-std=c++20", "-O2", "-Wno-unknown-pragmas", "-DPAGEDATTN_SIMT"),
        *("-I", "tests", "-I", "tests/simt/include", "-x", "c++"),
        *("tests/simt/simt.cpp", "tests/simt/bulk_copy.cpp", "tests/simt/wgmma.cpp"),
    ],
}

# For Nsight Compute: a kernel, and the target in whose row it is launched first.
PROFILED = {
    "decode": ("decode_kernel", "decode, GQA 32/8x128, 64 x 4096: "),
    "prefill": ("prefill.*_kernel", "prefill, GQA 32/8x128, 2048 tokens"),
    "decode-cluster": ("decode_cluster_kernel", "decode, MHA 32x128, 1 x 1024"),
    "merge": ("merge_kernel", "decode, GQA 32/8x128, 64 of 64 to 8192"),
    "decode-fp8": ("decode_kernel", "decode, GQA 32/8x128, 64 x 4096, float8_e4m3fn"),
    "activation": ("activation_kernel", "silu_and_mul, 8192 tokens"),
    "norm": ("rms_norm_kernel", "fused_add_rms_norm, 8192 tokens"),
}
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")

# A step yields commands that run at the same time, and is sent their outcomes before it yields the next commands.
Outcomes = Sequence[dict[str, Any]]
Step = Generator[Sequence[Command], Outcomes, None]


def version_of(package: str) -> tuple[int, ...]:
    """() where it is not installed."""
    try:
        return tuple(int(number) for number in re.findall(r"\d+", importlib.metadata.version(package))[:2])
    except importlib.metadata.PackageNotFoundError:
        return ()


def time_limit_options() -> list[str]:
    """If a test takes too long, its process ends and says where. Before pytest 9 faulthandler only says where."""
    if importlib.util.find_spec("pytest_timeout"):  # by a thread: a signal waits for the call into CUDA to return
        return ["-p", "pytest_timeout", "--timeout", str(TEST_SECONDS), "--timeout-method", "thread"]
    options = ["-o", f"faulthandler_timeout={TEST_SECONDS}"]
    return [*options, "-o", "faulthandler_exit_on_timeout=true"] if version_of("pytest") >= (9,) else options


def last_test_of(text: str) -> str | None:
    """The test with which a process of pytest ended early, from what it wrote; None if it did not end early."""
    if lost := LOST_GPU.search(text):
        return lost["test"]
    outcomes = outcomes_of_tests(text)
    return next((test for test, outcome in reversed(outcomes.items()) if outcome == "unfinished"), None)


def culprits(logs: Mapping[str, str], failures: Collection[str]) -> list[str]:
    """The mechanisms to blame: tests fail with all mechanisms and pass without this one. `logs`: the same tests without
    each mechanism, and under "" without all. A test that passes whichever mechanism is left out blames none of them: it
    fails only at times."""
    passed = {word: {t for t, o in outcomes_of_tests(log).items() if o == "passed"} for word, log in logs.items()}
    blamed: set[str] = set()
    for test in failures:
        healers = [word for word in MECHANISMS if test in passed[word]]
        if healers and len(healers) < len(MECHANISMS):
            blamed.add(healers[0])
        elif not healers and test in passed[""]:
            blamed.update(MECHANISMS)
    return [word for word in MECHANISMS if word in blamed]


@dataclass
class Work:
    """The commands of each step, for a device and a folder of results."""

    device: str  # of the op tests: cuda or simt
    out: Path
    wheel: Path | None = None
    broken: list[str] = field(default_factory=list)  # mechanisms that smoke has found, left out from there on
    has_targets: bool = False  # of this run, in targets.json

    @property
    def bench_device(self) -> str:
        return "cuda" if self.device == "cuda" else "cpu"

    def python(self, name: str, arguments: Sequence[str], seconds: float, without: Sequence[str] = ()) -> Command:
        path = [str(self.out / "wheel" if self.wheel else ROOT / "src"), str(ROOT / "python")]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        environment = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else is installed there
        asked = filter(None, os.environ.get(SWITCH, "").split(","))
        if words := dict.fromkeys([*asked, *without]):
            environment[SWITCH] = ",".join(words)
        return Command(name, [sys.executable, *arguments], seconds, environment)

    def pytest(
        self, name: str, tests: Sequence[str], seconds: float, without: Sequence[str] = (), under: Sequence[str] = ()
    ) -> Command:
        """If a test ends its process, or loses the process's GPU, another process goes on behind this test."""
        options = ["-m", "pytest", "-v", *tests, "--device", self.device, "--continue-on-collection-errors"]
        command = self.python(name, [*options, *time_limit_options()], seconds, without)
        argv = [*under, *command.argv]

        def go_on(text: str) -> list[str] | None:
            test = last_test_of(text)
            return None if test is None else [*argv, "--after", test]

        return Command(name, argv, seconds, command.environment, go_on)

    def sanitize(self, tool: str, name: str, tests: Sequence[str]) -> Command:
        """compute-sanitizer on our kernels alone. Each tensor has an allocation of its own, to find its end."""
        under = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=pagedattn", "--error-exitcode", "9"]
        under += ["--report-api-errors", "no"]  # torch asks for what may not be there
        tested = self.pytest(name, tests, 120, under=under)
        environment = {**tested.environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return Command(name, tested.argv, tested.seconds, environment, tested.go_on)

    def profile(self, name: str, kernel: str, target: str) -> Command:
        under = ["ncu", "--kernel-name", f"regex:{kernel}", "--launch-count", "1", "--kill", "yes"]
        under += ["--check-exit-code", "no", "--clock-control", "none"]
        under += [option for section in SECTIONS for option in ("--section", section)]
        arguments = ["bench/targets.py", "--device", self.bench_device, "--only", target]
        targets = self.python(name, arguments, 60, self.broken)
        return Command(name, [*under, *targets.argv], targets.seconds, targets.environment)

    def measure(self, name: str, only: Sequence[str], seconds: float) -> Command:
        """Targets that targets.json lacks. If a process loses the GPU, another process measures what is left."""
        command = ["bench/targets.py", "--device", self.bench_device, "--json", str(self.out / "targets.json")]
        more = ["--go-on", *(["--only", *only] if only else [])]
        first = self.python(name, [*command, *(more if self.has_targets else more[1:])], seconds, self.broken)
        again = [sys.executable, *command, *more]
        self.has_targets = True

        def go_on(text: str) -> list[str] | None:
            """Each process notes at least one target, before it measures it."""
            return again if "required  measured\n" in text and not re.search(r"^\d+ of \d+ met", text, re.M) else None

        return Command(name, first.argv, seconds, first.environment, go_on)

    def build(self) -> Step:
        """By CMake alone: an older setuptools does not read pyproject.toml."""
        if self.wheel:
            unpack = [sys.executable, "-m", "zipfile", "-e", str(self.wheel), str(self.out / "wheel")]
            yield [Command("unpack", unpack, 60)]
        elif not (ROOT / "src/pagedattn_ext/_C.abi3.so").exists():
            folder = f"build/cmake-{sys.implementation.cache_tag}"
            configure = ["cmake", "-S", ".", "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
            yield [Command("configure", configure, 60)]
            yield [Command("compile", ["cmake", "--build", folder], 540)]
            yield [Command("install", ["cmake", "--install", folder, "--prefix", "src"], 30)]

    def versions(self) -> Step:
        twins = str(self.out / "twins")
        compiled = [*COMPILERS[self.device], "-I", "csrc", "tests/simt/twins.cu", "-o", twins]
        driver = [Command("driver", ["nvidia-smi"], 30)] if self.device == "cuda" else []
        yield [*driver, self.python("facts", ["bench/gpu/facts.py"], 60), Command("twins-compile", compiled, 60)]
        yield [Command("twins", [twins], 30)]

    def smoke(self) -> Step:
        """The smoke tests with all mechanisms, without each mechanism, and without all. A mechanism that fails is left
        out of the later steps, so that these tell about everything else."""

        def without(name: str, words: Sequence[str]) -> Command:
            return self.pytest(f"smoke-without-{name}", SMOKE, 90, words)

        words = [without(word, [word]) for word in MECHANISMS]
        outcomes = yield [self.pytest("smoke", SMOKE, 90), *words, without("all", MECHANISMS)]
        failures = {test for each in outcomes if each["name"] == "smoke" for test in each.get("failures", [])}
        if failures:
            names = {word: f"smoke-without-{word or 'all'}.log" for word in (*MECHANISMS, "")}
            logs = {word: (self.out / name).read_text(errors="replace") for word, name in names.items()}
            self.broken = culprits(logs, failures)

    def attention(self) -> Step:
        """Two processes, so that one that hangs does not cost the other's time."""
        yield [self.measure("targets-decode", ["decode, "], 60)]
        yield [self.measure("targets-prefill", ["prefill, "], 45)]

    def suite(self) -> Step:
        """A test that fails runs once more, and once without each mechanism that is not left out already."""

        def part(i: int) -> Command:
            chosen = ["tests/ops", "-k", "not compute_sanitizer", "--part", f"{i}/{NUM_PROCESSES}"]
            return self.pytest(f"suite-{i}", chosen, 240, self.broken)

        outcomes = yield [part(i + 1) for i in range(NUM_PROCESSES)]
        if failures := [test for each in outcomes for test in each.get("failures", [])][:MAX_REPEATED]:
            words = [word for word in MECHANISMS if word not in self.broken]
            again = {"suite-again": [], **{f"suite-without-{word}": [word] for word in words}}
            yield [self.pytest(name, failures, 60, [*self.broken, *word]) for name, word in again.items()]

    def targets(self) -> Step:
        yield [self.measure("targets", [], 120)]

    def mechanisms(self) -> Step:
        arguments = ["bench/mechanisms_cuda.py", "--device", self.bench_device]
        arguments += ["--json", str(self.out / "mechanisms.json")]
        yield [self.python("mechanisms", arguments, 60, self.broken)]

    def engine(self) -> Step:
        if self.device == "cuda":  # on no other one is there a test
            yield [self.pytest("engine", ["tests/serving/engine/test_cuda_engine.py"], 60, self.broken)]
        serving = ["bench/serving_cuda.py", "--device", self.bench_device, "--json", str(self.out / "serving.json")]
        yield [self.python("serving", serving, 90, self.broken)]

    def sanitizer(self) -> Step:
        """With all mechanisms, because this step is to show what is broken."""
        if self.device == "cuda":
            yield [self.sanitize(tool, tool, SMOKE) for tool in ("memcheck", "racecheck")]

    def profiles(self) -> Step:
        for name, what in PROFILED.items() if self.device == "cuda" else ():
            yield [self.profile(f"ncu-{name}", *what)]


# The most important step first.
STEPS: dict[str, Callable[[Work], Step]] = {
    "build": Work.build,
    "versions": Work.versions,
    "smoke": Work.smoke,
    "attention": Work.attention,
    "suite": Work.suite,
    "targets": Work.targets,
    "mechanisms": Work.mechanisms,
    "engine": Work.engine,
    "sanitizer": Work.sanitizer,
    "profiles": Work.profiles,
}
