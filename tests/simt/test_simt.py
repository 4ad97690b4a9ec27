"""The simt device itself: small kernels run right, each with a planted bug is caught, and the twins of ptx.cuh do what
the PTX ISA says. The programs are compiled here, once as they are and once with AddressSanitizer and
UndefinedBehaviorSanitizer."""

import functools
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
COMPILE: list[str | Path] = [
    *(os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *("-DPAGEDATTN_SIMT", "-I", TESTS, "-I", TESTS / "simt/include", "-I", TESTS.parent / "csrc"),
]
# Small programs, which take longer to compile than to run.
PLAIN = ["-O1"]
SANITIZE = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
RIGHT, WRONG, ERROR = 0, 1, 2  # exit status of the programs

# Case of planted_bugs.cu -> what the run with the bug says: "expected" where the result is wrong.
CAUGHT = {
    "barrier": "expected",
    "warp_barrier": "expected",
    "uninitialised": "expected",
    "divergent_barrier": "simt: divergent barrier",
    "named_barrier": "expected",
    "missing_from_named_barrier": "simt: deadlock",
    "deadlock": "simt: deadlock",
    "exited_lanes": "simt: deadlock",
    "shuffle_mask": "simt: ",  # which of several errors is found first depends on the schedule
    "shuffle_source": "which is not in the mask",
    "fragment": "expected",
    "divergent_mma": "simt: divergence",
    "ldmatrix_alignment": "is not aligned to 16",
    "ldmatrix_outside": "ldmatrix: the address is not in the dynamic shared memory",
    "wait": "expected",
    "wait_barrier": "expected",
    "wait_count": "expected",
    "reuse": "expected",
    "copy_alignment": "is not aligned to 16",
    "bulk_init": "mbarrier_init did not come before",
    "bulk_init_fence": "fence_proxy_async is missing after mbarrier_init",
    "bulk_init_fence_thread": "fence_proxy_async is missing after mbarrier_init",
    "bulk_phase": "all arrivals of the phase have come",
    "bulk_wait": "nobody has waited for its last bulk copies",
    "bulk_bytes": "wait at mbarrier_wait",
    "bulk_reuse": "simt: deadlock",
    "bulk_fence": "this one has not called fence_proxy_async after it",
    "bulk_fence_thread": "this one has not called fence_proxy_async after it",
    "bulk_alignment": "must be multiples of 16",
    "cluster_first_sync": "may not have begun: no cluster_sync came before",
    "cluster_sync": "has written there since the last cluster_sync",
    "cluster_relaxed": "has written there since the last cluster_sync",
    "cluster_last_sync": "of the cluster has ended",
    "cluster_read": " has ended",
    "cluster_exit": "simt: deadlock: threads wait at a cluster_sync",
    "cluster_threads": "simt: deadlock",
    "cluster_rank": "map_shared: there is no block 4 in a cluster of 4",
    "cluster_alignment": "is not aligned to 8",
    "cluster_size": "expected clusters of 1 to 8 blocks that divide the grid, got (3, 1, 1)",
    "wgmma_fence": "since their last wgmma_fence",
    "wgmma_proxy_fence": "not called fence_proxy_async after its wait",
    "wgmma_proxy_fence_thread": "not called fence_proxy_async after its wait",
    "wgmma_write_after_fence": "was written to shared memory that is read here after thread",
    "wgmma_d_read": "expected",
    "wgmma_wait": "nobody has waited for its last wgmma",
    "wgmma_pending": "accumulators are still under way",
    "wgmma_strides": "wgmma: the address is not in the dynamic shared memory",
    "wgmma_descriptor": "with another descriptor",
    "wgmma_left_out": "warp 0 has left out a wgmma of its warpgroup",
    "wgmma_shared_write": "shared memory was written while",
    "wgmma_a_write": "registers were written while",
    "wgmma_d_write": "registers were written while",
    "shared_read": "expected",
    "shared_write": "of shared memory, past the end",
    "dependent": "ended without griddepcontrol_wait",
    "dependent_read": "expected",
    "threads": "expected 1 to 1024 threads",
    "shared_bytes": "232449 bytes of shared memory, at most 232448",
    "shared_bytes_not_asked": "49153 bytes of shared memory: at most 49152",
    "grid_y": "grid too large",
}
# What the sanitizers say. Without them, reads out of bounds of tensors go unseen.
CAUGHT_SANITIZED = CAUGHT | {
    "shared_read": "use-after-poison",
    "shared_write": "use-after-poison",
    "global_read": "heap-buffer-overflow",
    "global_write": "heap-buffer-overflow",
    "copy_source": "heap-buffer-overflow",
    "vector_alignment": "misaligned address",
}
SEEDS = [1, 2, 3, 4]


@dataclass
class Outcome:
    status: int
    text: str


def run(program: Path, *arguments: str, seed: int | None = None) -> Outcome:
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    environment.pop("PAGEDATTN_SIMT_SEED", None)
    if seed is not None:
        environment["PAGEDATTN_SIMT_SEED"] = str(seed)
    done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    return Outcome(done.returncode, done.stdout + done.stderr)


Compile = Callable[..., Path]


@pytest.fixture(scope="module")
def compile_program(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """compile_program(name, *options): the program of NAME.cu. The device is compiled once for programs with the same
    options."""

    @functools.cache
    def device(*options: str) -> list[Path]:
        directory = tmp_path_factory.mktemp("device")
        sources = sorted((TESTS / "simt").glob("*.cpp"))
        subprocess.run([*COMPILE, *options, "-c", *sources], check=True, cwd=directory)
        return sorted(directory.glob("*.o"))

    @functools.cache
    def program(name: str, *options: str) -> Path:
        path = tmp_path_factory.mktemp(name) / name
        kernels = ["-x", "c++", TESTS / "simt" / f"{name}.cu", "-x", "none"]
        subprocess.run([*COMPILE, *options, *kernels, *device(*options), "-o", path], check=True)
        return path

    return program


@pytest.fixture(scope="module")
def planted_bugs(compile_program: Compile) -> Path:
    return compile_program("planted_bugs", *PLAIN)


@pytest.fixture(scope="module")
def sanitized(compile_program: Compile) -> Path:
    return compile_program("planted_bugs", *SANITIZE)


def test_every_case_is_tested(planted_bugs: Path) -> None:
    assert sorted(run(planted_bugs, "--list").text.split()) == sorted(CAUGHT_SANITIZED)


@pytest.mark.parametrize("case", CAUGHT_SANITIZED)
def test_clean_kernel(planted_bugs: Path, case: str) -> None:
    for seed in SEEDS:
        assert run(planted_bugs, case, "clean", seed=seed) == Outcome(RIGHT, "")


@pytest.mark.parametrize("case", CAUGHT)
def test_bug_is_caught(planted_bugs: Path, case: str) -> None:
    for seed in SEEDS:
        outcome = run(planted_bugs, case, "bug", seed=seed)
        assert CAUGHT[case] in outcome.text
        if "simt: " in outcome.text:
            assert outcome.status == ERROR
            assert f"PAGEDATTN_SIMT_SEED={seed}\n" in outcome.text or case == "shared_bytes"
        else:
            assert outcome.status == WRONG


@pytest.mark.parametrize("case", CAUGHT_SANITIZED)
def test_sanitizers(sanitized: Path, case: str) -> None:
    assert run(sanitized, case, "clean") == Outcome(RIGHT, "")
    outcome = run(sanitized, case, "bug")
    assert outcome.status != RIGHT
    assert CAUGHT_SANITIZED[case] in outcome.text


def test_seed_repeats_the_schedule(planted_bugs: Path) -> None:
    outcomes = [run(planted_bugs, "barrier", "bug", seed=seed).text for seed in [*SEEDS, *SEEDS]]
    assert outcomes[: len(SEEDS)] == outcomes[len(SEEDS) :]
    assert len(set(outcomes)) > 1


def test_launches_differ_without_a_seed(planted_bugs: Path) -> None:
    outcome = run(planted_bugs, *["divergent_barrier", "bug"] * 3)
    assert [f"PAGEDATTN_SIMT_SEED={launch}\n" in outcome.text for launch in range(1, 5)] == [True, True, True, False]


@pytest.mark.parametrize("case", ["deadlock", "divergent_mma", "shared_write"])
def test_device_works_after_an_error(planted_bugs: Path, sanitized: Path, case: str) -> None:
    assert run(planted_bugs, case, "bug", "wait_count", "clean").status == RIGHT
    if case != "shared_write":  # AddressSanitizer ends the process
        assert run(sanitized, case, "bug", "wait_count", "clean").status == RIGHT


def test_error_says_who_waits_where(planted_bugs: Path) -> None:
    text = run(planted_bugs, "deadlock", "bug").text
    assert "warp 3: lanes 0-4 wait at __syncthreads (planted_bugs.cu:" in text
    assert "lanes 5-31 wait at __shfl_xor_sync (cuda_utils.cuh:" in text
    assert "a kernel of (pagedattn::cuda::{anonymous}::Arguments), grid (1, 1, 1), block (128, 1, 1)" in text


@pytest.mark.parametrize("options", [PLAIN, SANITIZE], ids=["plain", "sanitized"])
def test_twins(compile_program: Compile, options: list[str]) -> None:
    assert run(compile_program("twins", *options)) == Outcome(RIGHT, "")


def test_speed_is_printed(compile_program: Compile) -> None:
    outcome = run(compile_program("speed", *PLAIN))
    assert outcome.status == RIGHT
    assert len(outcome.text.splitlines()) == 5
