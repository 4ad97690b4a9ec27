"""Plants known bugs, one at a time, and shows which tests catch each: make mutants; or some of them:
.venv/bin/python tests/mutants/run.py no_copy_on_write window_of_many_rows

Beside this file lies one patch a bug. Its first lines say what is wrong then, and the line "Tests:" with what arguments
pytest is to find it. A line "Needs:" names the instruction set of the kernel that has the bug: on a machine without it,
the bug is left out, and counts neither as caught nor as missed. The bugs are planted in a copy of the checkout,
build/mutants, which is compiled anew where a bug is in csrc/, for the instruction set of this machine alone: the copy
takes minutes at first.

Exit status 1 if a bug is not caught, if a patch does not fit any more, or if its tests fail without it.
"""

import argparse
import filecmp
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagedattn_ext import _C

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPY = ROOT / "build" / "mutants"


@dataclass(frozen=True)
class Mutant:
    """A bug: the patch that plants it, and what is to catch it."""

    patch: Path
    description: str
    pytest_arguments: tuple[str, ...]
    needs: str | None  # a CPU capability without which the bug does nothing
    files: tuple[str, ...]  # that the patch changes, as paths from the root

    @property
    def name(self) -> str:
        return self.patch.stem

    @property
    def needs_build(self) -> bool:
        return any(file.startswith("csrc/") for file in self.files)


def read_mutant(patch: Path) -> Mutant:
    """Raises ValueError if the patch says not what it breaks, where, and which tests are to see it."""
    head, separator, changes = patch.read_text().partition("--- a/")
    lines = head.splitlines()
    arguments = [line.removeprefix("Tests:").split() for line in lines if line.startswith("Tests:")]
    needs = [line.removeprefix("Needs:").strip() for line in lines if line.startswith("Needs:")]
    description = " ".join(line for line in lines if line and not line.startswith(("Tests:", "Needs:")))
    files = [line.removeprefix("+++ b/").split("\t")[0] for line in changes.splitlines() if line.startswith("+++ b/")]
    if not (separator and files and description and len(arguments) == 1 and arguments[0]):
        raise ValueError(f"{patch.name}: expected a description, one line 'Tests: ...' and a patch with a/ and b/")
    return Mutant(patch, description, tuple(arguments[0]), needs[0] if needs else None, tuple(files))


def all_mutants() -> list[Mutant]:
    return [read_mutant(patch) for patch in sorted(HERE.glob("*.patch"))]


def apply_patch(tree: Path, patch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """git apply in a folder that git must not take for a part of the repository around it."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    environment.pop("GIT_DIR", None)
    command = ["git", "apply", *options, str(patch)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def bring_up_to_date() -> None:
    """The copy gets the files of the checkout as they are, and keeps what was built from files that are the same."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = {name for name in listed if (ROOT / name).is_file()}
    for name in files:
        source, target = ROOT / name, COPY / name
        if not target.exists() or not filecmp.cmp(source, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for folder in ("csrc", "python", "src", "tests"):
        for path in (COPY / folder).rglob("*"):
            name = path.relative_to(COPY).as_posix()
            if path.is_file() and name not in files and path.suffix not in (".pyc", ".so"):
                path.unlink()


def build(with_simt: bool) -> str:
    """What the compiler said, if it failed."""
    environment = {"CMAKE_ARGS": "-DPAGEDATTN_CUDA=OFF -DPAGEDATTN_CPU_CAPABILITIES=native"} | os.environ
    commands = [[sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]]
    if with_simt:
        cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or "cmake"
        build_folder = COPY / "build" / f"cmake-{sys.implementation.cache_tag}"
        commands.append([cmake, "--build", str(build_folder), "--target", "simt"])
    for command in commands:
        done = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return (done.stdout + done.stderr)[-2000:]
    return ""


def run_tests(mutant: Mutant) -> tuple[int, list[str], str]:
    """pytest's exit status, the tests that failed, and all that it said."""
    environment = os.environ | {"PYTHONPATH": f"{COPY / 'src'}:{COPY / 'python'}", "HYPOTHESIS_PROFILE": "unshrunk"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-rfE", *mutant.pytest_arguments]
    done = subprocess.run(command, cwd=COPY, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.partition("= short test summary info =")[2].splitlines()  # above may be logs that say ERROR
    failed = [line.split(" - ")[0].split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return done.returncode, failed, done.stdout + done.stderr


@contextmanager
def planted(mutant: Mutant, with_simt: bool) -> Iterator[None]:
    """The copy with the bug, compiled. Afterwards the bug is taken out and the copy is compiled again, as the next bug
    may be in Python alone.

    Raises ValueError if the patch does not fit, or what it makes does not compile.
    """
    done = apply_patch(COPY, mutant.patch)
    if done.returncode:
        raise ValueError(f"the patch does not fit: {done.stderr.strip()}")
    try:
        if mutant.needs_build and (error := build(with_simt)):
            raise ValueError(f"it does not compile:\n{error}")
        yield
    finally:
        for name in mutant.files:
            shutil.copyfile(ROOT / name, COPY / name)  # newer than what was built with the bug
        if mutant.needs_build and (error := build(with_simt)):
            sys.exit(f"the checkout does not compile any more:\n{error}")


def try_mutant(mutant: Mutant, with_simt: bool) -> tuple[bool, str]:
    """Whether the bug is caught, and by which tests or why not. Raises ValueError as `planted` does."""
    with planted(mutant, with_simt):
        status, failed, said = run_tests(mutant)
    if status == 0:
        return False, "NOT CAUGHT"
    if status < 0:
        return True, f"the tests' process dies ({signal.Signals(-status).name})"
    if status != 1 or not failed:  # 1 is that tests failed; all else that they did not run as they should
        return False, f"pytest ended with {status}:\n{said[-2000:]}"
    return True, f"{len(failed)} tests fail: " + ", ".join(failed[:3]) + (", ..." if len(failed) > 3 else "")


def can_run(mutant: Mutant) -> bool:
    """Whether this machine runs the kernel that has the bug."""
    return mutant.needs is None or mutant.needs in _C.available_cpu_capabilities()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the mutants to try (default: all)")
    parser.add_argument("--baseline", action="store_true", help="run the tests without the bugs first: they must pass")
    arguments = parser.parse_args()
    mutants = all_mutants()
    if unknown := set(arguments.names) - {mutant.name for mutant in mutants}:
        parser.error(f"NAME: expected names of patches in {HERE}, got {', '.join(sorted(unknown))}")
    if arguments.names:
        mutants = [mutant for mutant in mutants if mutant.name in arguments.names]
    num_named = len(mutants)
    for mutant in mutants:
        if not can_run(mutant):
            print(f"left out  {mutant.name}: needs {mutant.needs}: not run here")
    mutants = [mutant for mutant in mutants if can_run(mutant)]
    with_simt = any("simt" in " ".join(mutant.pytest_arguments) for mutant in mutants)
    bring_up_to_date()
    if error := build(with_simt):
        sys.exit(f"the checkout does not compile without a bug:\n{error}")
    num_caught = 0
    for mutant in mutants:
        started = time.monotonic()
        if arguments.baseline and (result := run_tests(mutant))[0]:
            is_caught, text = False, f"its tests fail without it:\n{result[2][-2000:]}"
        else:
            try:
                is_caught, text = try_mutant(mutant, with_simt)
            except ValueError as error:
                is_caught, text = False, str(error)
        num_caught += is_caught
        seconds = time.monotonic() - started
        print(f"{'caught' if is_caught else 'FAILED'}  {mutant.name} ({seconds:.0f} s): {text}", flush=True)
    left_out = f", {num_named - len(mutants)} are not planted" if len(mutants) < num_named else ""
    print(f"{num_caught} of {len(mutants)} planted bugs are caught{left_out}")
    sys.exit(num_caught < len(mutants))


if __name__ == "__main__":
    main()
