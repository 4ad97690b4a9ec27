"""The wheels of WHEELS (a folder) as strangers have them: the ops beside torch alone, the engine beside what it needs.

Environments are made of links to the packages of the Python that runs the tests, so nothing is downloaded.
"""

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(os.environ["WHEELS"]).resolve()
[OPS_WHEEL], [SERVE_WHEEL] = WHEELS.glob("pagedattn_ext-*.whl"), WHEELS.glob("pagedattn_serve-*.whl")
TESTERS = ["pytest", "pytest-timeout", "hypothesis"]


def needed_by(names: list[str]) -> set[str]:
    """Distributions, and all that they require."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            required = [Requirement(line) for line in distribution(name).requires or ()]
            names += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


class Environment:
    def __init__(self, folder: Path, wheels: list[Path], packages: list[str]) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        [self.site_packages] = folder.glob("lib/python3*/site-packages")
        for name in needed_by(packages):
            for file in distribution(name).files or ():
                top, target = file.parts[0], self.site_packages / file.parts[0]
                if top != ".." and not target.exists():
                    target.symlink_to(Path(str(distribution(name).locate_file(top))))
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet", "--no-index"]
        subprocess.run([*pip, *wheels], check=True)  # with what they require, which must be there

    def run(self, *command: object) -> str:
        """What the command prints; it runs outside of this repository, and knows nothing of it."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
        done = subprocess.run(
            [str(self.bin / str(command[0])), *map(str, command[1:])],
            capture_output=True,
            text=True,
            cwd=self.bin,
            env=environment | {"HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_the_ops_beside_torch_alone(tmp_path: Path) -> None:
    """Each op has its schema, runs, and has a function; threads and imports."""
    ops = Environment(tmp_path / "ops", [OPS_WHEEL], ["torch", *TESTERS])
    where = ops.run("python", "-c", "import pagedattn_ext; print(pagedattn_ext.__file__)")
    assert where == f"{ops.site_packages}/pagedattn_ext/__init__.py\n"
    tests = ROOT / "tests" / "ops" / "test_registration.py"
    smoke = "schema or every_op or import or names"
    said = ops.run("python", "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", tests, "-k", smoke)
    assert " passed" in said


def test_the_engine(tmp_path: Path) -> None:
    engine = Environment(tmp_path / "engine", [OPS_WHEEL, SERVE_WHEEL], needs_of_the_engine())
    said = engine.run("pagedattn", "generate", "--prompt", "The for statement", "--max-tokens", "16")
    assert "The for statement" in said
    assert engine.run("pagedattn", "--version") == f"pagedattn-serve {SERVE_WHEEL.name.split('-')[1]}\n"


def needs_of_the_engine() -> list[str]:
    lines = [Requirement(line) for line in distribution("pagedattn-serve").requires or ()]
    return ["torch", *(each.name for each in lines if each.marker is None and each.name != "pagedattn-ext")]


@pytest.mark.parametrize("wheel, folder", [(OPS_WHEEL, "src"), (SERVE_WHEEL, "python")], ids=["ops", "engine"])
def test_a_wheel_has_every_file_of_the_repository(wheel: Path, folder: str) -> None:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT / folder, text=True).splitlines()
    files = {name for name in tracked if name.startswith("pagedattn")}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name and name[-1] != "/"}
    assert packed - {"pagedattn_ext/_C.abi3.so"} == files and len(files) > 50


@pytest.mark.parametrize("wheel, limit", [(OPS_WHEEL, 5), (SERVE_WHEEL, 10)], ids=["ops", "engine"])
def test_sizes(wheel: Path, limit: int) -> None:
    """A wheel with CUDA kernels has no limit."""
    if WHEELS.name == "cuda":
        pytest.skip("with CUDA")
    assert wheel.stat().st_size < limit * 10**6
