"""The steps of bench/gpu_report.py: which commands they are, and how long each may take."""

import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu.commands import ROOT, Command

NUM_PROCESSES = 8
TEST_SECONDS = 60  # of a single test
SMOKE = ["tests/ops/test_cuda.py", "-k", "as_on_the_cpu"]

# Of tests/simt/twins.cu: for the GPUs that CMakeLists.txt names, and as docs/simt.md has it.
COMPILERS = {
    "cuda": [
        *("nvcc", "-std=c++20", "-O1", "--expt-relaxed-constexpr", "-I", "tests"),
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
    "decode-fp8": ("decode_kernel", "decode, GQA 32/8x128, 64 x 4096, float8_e4m3fn"),
    "decode-cluster": ("decode_cluster_kernel", "decode, MHA 32x128, 1 x 1024"),
    "merge": ("merge_kernel", "decode, GQA 32/8x128, 64 of 64 to 8192"),
    "prefill": ("prefill.*_kernel", "prefill, GQA 32/8x128, 2048 tokens"),
    "activation": ("activation_kernel", "silu_and_mul, 8192 tokens"),
    "norm": ("rms_norm_kernel", "fused_add_rms_norm, 8192 tokens"),
}
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")


@dataclass(frozen=True)
class Work:
    """The commands of each step, for a device and a folder of results."""

    device: str  # of the op tests: cuda or simt
    out: Path
    wheel: Path | None = None

    @property
    def bench_device(self) -> str:
        return "cuda" if self.device == "cuda" else "cpu"

    def python(self, name: str, arguments: Sequence[str], seconds: float) -> Command:
        path = [str(self.out / "wheel")] if self.wheel else [str(ROOT / "src"), str(ROOT / "python")]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        environment = {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        return Command(name, [sys.executable, *arguments], seconds, environment)

    def pytest(self, name: str, arguments: Sequence[str], seconds: float) -> Command:
        options = ["--device", self.device, "--junitxml", str(self.out / f"{name}.xml")]
        options += ["-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
        return self.python(name, ["-m", "pytest", "-v", *arguments, *options], seconds)

    def sanitize(self, tool: str, name: str, tests: Sequence[str]) -> Command:
        """compute-sanitizer on our kernels alone. Each tensor has an allocation of its own, so that its end is one."""
        under = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=pagedattn", "--error-exitcode", "9"]
        under += ["--report-api-errors", "no"]  # torch asks for what may not be there
        tested = self.python(name, ["-m", "pytest", "-v", *tests, "--device", self.device], 120)
        environment = {**tested.environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return Command(name, [*under, *tested.argv], tested.seconds, environment)

    def profile(self, name: str, kernel: str, target: str) -> Command:
        under = ["ncu", "--kernel-name", f"regex:{kernel}", "--launch-count", "1", "--kill", "yes"]
        under += ["--check-exit-code", "no", "--clock-control", "none"]
        under += [option for section in SECTIONS for option in ("--section", section)]
        targets = self.python(name, ["bench/targets.py", "--device", self.bench_device, "--only", target], 60)
        return Command(name, [*under, *targets.argv], targets.seconds, targets.environment)

    def build(self) -> list[list[Command]]:
        """By CMake alone: an older setuptools does not read pyproject.toml."""
        if self.wheel:
            unpack = [sys.executable, "-m", "zipfile", "-e", str(self.wheel), str(self.out / "wheel")]
            return [[Command("unpack", unpack, 60)]]
        if (ROOT / "src/pagedattn_ext" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").exists():
            return []
        folder = f"build/cmake-{sys.implementation.cache_tag}"
        configure = ["cmake", "-S", ".", "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
        return [
            [Command("configure", configure, 60)],
            [Command("compile", ["cmake", "--build", folder], 540)],
            [Command("install", ["cmake", "--install", folder, "--prefix", "src"], 30)],
        ]

    def versions(self) -> list[list[Command]]:
        twins = str(self.out / "twins")
        compiled = [*COMPILERS[self.device], "-I", "csrc", "tests/simt/twins.cu", "-o", twins]
        asked = [Command("driver", ["nvidia-smi"], 30), self.python("facts", ["bench/gpu/facts.py"], 60)]
        return [[*asked, Command("twins-compile", compiled, 60)], [Command("twins", [twins], 30)]]

    def smoke(self) -> list[list[Command]]:
        return [[self.pytest("smoke", SMOKE, 60)]]

    def suite(self) -> list[list[Command]]:
        def part(i: int) -> Command:
            chosen = ["tests/ops", "-k", "not compute_sanitizer", "--part", f"{i}/{NUM_PROCESSES}", "--maxfail", "5"]
            return self.pytest(f"suite-{i}", chosen, 240)

        return [[part(i + 1) for i in range(NUM_PROCESSES)]]

    def engine(self) -> list[list[Command]]:
        serving = ["bench/serving_cuda.py", "--device", self.bench_device, "--json", str(self.out / "serving.json")]
        groups = [[self.python("serving", serving, 90)]]
        if self.device == "cuda":  # on no other one is there a test
            groups.insert(0, [self.pytest("engine", ["tests/serving/test_cuda_engine.py", "--maxfail", "5"], 60)])
        return groups

    def targets(self) -> list[list[Command]]:
        command = ["bench/targets.py", "--device", self.bench_device, "--json", str(self.out / "targets.json")]
        return [[self.python("targets", command, 240)]]

    def tools(self) -> list[list[Command]]:
        sanitized = [self.sanitize(tool, tool, SMOKE) for tool in ("memcheck", "racecheck")]
        return [sanitized, *([self.profile(f"ncu-{name}", *what)] for name, what in PROFILED.items())]


STEPS = {
    "build": Work.build,
    "versions": Work.versions,
    "smoke": Work.smoke,
    "suite": Work.suite,
    "engine": Work.engine,
    "targets": Work.targets,
    "tools": Work.tools,
}
