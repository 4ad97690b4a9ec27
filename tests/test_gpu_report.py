"""bench/gpu_report.py with commands of a second: it will have a GPU for minutes, and can fail only here."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ["-m", "pytest", "-v", "-p", "no:cacheprovider"]


@pytest.fixture(autouse=True)
def bench_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to load


def command(name: str, *arguments: str | Path, seconds: float = 60) -> Any:
    from gpu.commands import Command

    return Command(name, [sys.executable, *map(str, arguments)], seconds)


def summary(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text())


def is_running(pid: int) -> bool:
    """A process that has ended and waits for its parent is none."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# ---- commands --------------------------------------------------------------------------------------------------------


def test_what_is_late_is_killed_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu.commands

    monkeypatch.setattr(gpu.commands, "GRACE_SECONDS", 0.2)
    deaf = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()
    commands = [command("late", "-c", deaf, seconds=1.5), command("good", "-c", "print('there')")]
    outcomes = {outcome["name"]: outcome for outcome in gpu.commands.run_together(commands, tmp_path)}
    assert time.monotonic() - started < 20
    assert (outcomes["late"]["status"], outcomes["good"]["status"]) == ("timed out", "passed")
    assert outcomes["late"]["seconds"] >= 1.5 and outcomes["late"]["exit_status"] == -9
    child = int((tmp_path / "late.log").read_text().splitlines()[-1])
    assert not is_running(child)
    assert (tmp_path / "good.log").read_text().endswith("\nthere\n")


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    import gpu.commands

    leaves = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    [outcome] = gpu.commands.run_together([command("leaves", "-c", leaves)], tmp_path)
    assert outcome["status"] == "passed"
    child = int((tmp_path / "leaves.log").read_text().splitlines()[-1])
    time.sleep(0.1)
    assert not is_running(child)


def test_a_late_pytest_leaves_its_results(tmp_path: Path) -> None:
    import gpu.commands

    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_fast(): pass\ndef test_wrong(): assert False\ndef test_slow(): time.sleep(60)\n"
    )
    xml = tmp_path / "it.xml"
    late = command("it", *PYTEST, tmp_path / "test_it.py", "--junitxml", xml, seconds=12)
    [outcome] = gpu.commands.run_together([late], tmp_path)
    assert outcome["status"] == "timed out"
    assert outcome["counts"] == {"passed": 1, "failed": 1, "unfinished": 1}
    assert [test.partition("::")[2] for test in outcome["failures"]] == ["test_wrong", "test_slow"]
    assert 'name="test_fast"' in xml.read_text()


def test_tests_of_a_log(tmp_path: Path) -> None:
    from gpu.commands import read_tests

    (tmp_path / "log").write_text(
        "$ python -m pytest -v tests/ops\n"
        "tests/ops/test_a.py::test_1[cuda] PASSED      [ 25%]\n"
        "tests/ops/test_a.py::test_2[cuda-paged_attention fp8] FAILED      [ 50%]\n"
        "tests/ops/test_a.py::test_3 SKIPPED (no CUDA device)    [ 75%]\n"
        "tests/ops/test_a.py::test_4[x y] Timeout (0:01:00)!\n"
        "Thread 0x1 (most recent call first):\n"
        "FAILED tests/ops/test_a.py::test_2[cuda-paged_attention fp8] - assert 1\n"
    )
    found = read_tests(tmp_path / "log")
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "unfinished": 1}
    failures = ["tests/ops/test_a.py::test_2[cuda-paged_attention fp8]", "tests/ops/test_a.py::test_4[x y]"]
    assert found["failures"] == failures


def test_tests_that_are_all_skipped_have_not_passed(tmp_path: Path) -> None:
    import gpu.commands

    (tmp_path / "test_it.py").write_text("import pytest\ndef test_it(): pytest.skip('no CUDA device')\n")
    [outcome] = gpu.commands.run_together([command("it", *PYTEST, tmp_path / "test_it.py")], tmp_path)
    assert (outcome["status"], outcome["exit_status"], outcome["counts"]) == ("failed", 0, {"skipped": 1})


# ---- the report ------------------------------------------------------------------------------------------------------


def run(out: Path, steps: dict[str, Any]) -> bool:
    from gpu.steps import Work
    from gpu_report import Report, run_report

    return run_report(steps, Report(out, {"device": "cuda"}), Work("cuda", out))


def test_results_are_written_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command sees those before it; one that fails, or is not installed, is not the end."""
    from gpu.commands import Command

    look = f"import json; print(*json.load(open({str(tmp_path / 'summary.json')!r}))['steps'])"
    steps = {
        "versions": [[command("first", "-c", look), Command("missing", ["no-such-program"], 1)]],
        "suite": [[command("second", "-c", f"{look}; raise SystemExit('wrong')")], [command("third", "-c", look)]],
    }
    assert not run(tmp_path, steps)
    assert (tmp_path / "first.log").read_text().endswith("\n\n")
    assert (tmp_path / "second.log").read_text().endswith("\nversions\nwrong\n")
    assert (tmp_path / "third.log").read_text().endswith("\nversions suite\n")
    written = summary(tmp_path)["steps"]
    assert [outcome["status"] for outcome in written["versions"]] == ["skipped", "passed"]
    assert [outcome["status"] for outcome in written["suite"]] == ["failed", "passed"]
    printed = capsys.readouterr().out
    assert "missing                skipped      0.0 s  no-such-program was not found\n" in printed
    assert "\n    wrong\n" in printed
    assert run(tmp_path, {"versions": steps["versions"]})  # what is not installed is no failure


def test_a_failing_smoke_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first test that fails is run once more, under compute-sanitizer."""
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "test_it.py").write_text("def test_right(): pass\ndef test_wrong(): assert False\n")
    smoke, suite = command("smoke", *PYTEST, tmp_path / "test_it.py"), command("suite", "-c", "")
    assert not run(tmp_path, {"smoke": [[smoke]], "suite": [[suite]]})
    steps = summary(tmp_path)["steps"]
    assert [outcome["name"] for outcome in steps["smoke"]] == ["smoke", "smoke-memcheck"] and "suite" not in steps
    asked = (tmp_path / "smoke-memcheck.log").read_text().splitlines()
    [test] = steps["smoke"][0]["failures"]
    assert test.endswith("test_it.py::test_wrong") and test in asked and "kns=pagedattn" in asked
    assert capsys.readouterr().out.endswith("smoke has failed: the steps after it are left out\n")


def test_a_terminated_report_leaves_no_command_running(tmp_path: Path) -> None:
    program = (
        "import signal, sys; sys.path.insert(0, 'bench'); import gpu_report, gpu.commands\n"
        "sleep = gpu.commands.Command('sleep', ['sleep', '61.25'], 60)\n"
        "for name in gpu_report.STEPS: gpu_report.STEPS[name] = lambda work: [[sleep]]\n"
        f"sys.argv[1:] = ['--out', {str(tmp_path)!r}]; sys.exit(gpu_report.main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not (tmp_path / "sleep.log").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    process.terminate()
    assert process.wait(timeout=30) == 128 + 15
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert b"sleep\x0061.25\x00" not in commands


@pytest.mark.parametrize("where", ["cuda", "simt"])
def test_the_commands(where: str) -> None:
    """None names a file that is not there; together they are what half an hour holds."""
    asked = [sys.executable, "bench/gpu_report.py", "--dry-run", "--device", where]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    names = [line.split()[0] for line in lines]
    order = [name for name in dict.fromkeys(names) if name != "build"]
    assert order == ["versions", "smoke", "suite", "engine", "targets", "tools"]
    assert names.count("suite") == 8
    seconds = {name: int(line.split()[1]) for name, line in zip(names, lines, strict=True)}  # a suite runs at once
    assert sum(seconds.values()) < 1800
    for path in re.findall(r"(?:tests|bench)/[\w/]+\.\w+", done.stdout):
        assert (ROOT / path).exists(), path


def test_profiled_kernels_and_targets_exist() -> None:
    import targets_cuda
    from gpu.steps import PROFILED

    names = [target.what for target in targets_cuda.targets()]
    sources = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cu*"))
    assert len(PROFILED) == 7
    for kernel, target in PROFILED.values():
        assert re.search(rf"\b{kernel}\(", sources), kernel
        assert sum(target in name for name in names) == 1, target


def collect(part: str) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/ops/test_allocate.py", "--part", part]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)


def test_parts_are_the_whole() -> None:
    outputs = [collect(f"{i}/2").stdout for i in (1, 2)]
    parts = [set(re.findall(r"^tests/\S+::.+$", output, re.MULTILINE)) for output in outputs]
    assert len(parts[0]) > 3 and not parts[0] & parts[1]
    for part, output in zip(parts, outputs, strict=True):
        assert f"{len(part)}/{len(parts[0] | parts[1])} tests collected" in output


def test_a_part_that_is_none() -> None:
    done = collect("3/2")
    assert done.returncode == 4 and "argument --part: invalid" in done.stderr


def test_a_wrong_wheel_is_refused(tmp_path: Path) -> None:
    asked = [sys.executable, "bench/gpu_report.py", "--dry-run", "--wheel", str(tmp_path / "none.whl")]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--wheel: expected a wheel, got " in done.stderr


# ---- docs ------------------------------------------------------------------------------------------------------------

HARDWARE = {"gpu": "NVIDIA H100, 132 SMs", "cpu": "a CPU", "torch": "2.11.0"}
ROW = {
    "GB/s": 2703.4,
    "share_of_read_probe": 0.901,
    "ratio_to_SDPA": 0.954,
    "seconds": {"ours": [3e-3, 1e-3, 2e-3]},
    "note": "SDPA: flash",
}
TARGET = {"what": "decode, MHA, 64 x 4096: vs SDPA", "required": 0.9, "at_most": False}
RESULTS: dict[str, Any] = {
    "targets.json": {
        "command": "python bench/targets.py --device cuda --json /tmp/targets.json",
        "hardware": HARDWARE,
        "targets": [
            {**TARGET, "measured": 0.954, "met": True, "note": "", "row": ROW},
            {**TARGET, "what": "gelu_new: share of the probe", "error": "RuntimeError: a | b\nand more"},
        ],
    },
    "serving.json": {
        "command": "python bench/serving_cuda.py",
        "hardware": HARDWARE,
        "num_requests": 64,
        "peers": {
            "engine": {"tokens_per_s": 12345.6, "ratio": 1},
            "generate": {"tokens_per_s": 1000, "ratio": 12.3456},
        },
    },
}
SUITE = [
    {"name": f"suite-{i}", "status": status, "counts": {"passed": 700, "failed": i}}
    for i, status in enumerate(["passed", "failed", "timed out"])
]
EXPECTED = """\
- smoke: 24 passed
- suite: 2,100 passed, 3 failed; suite-1 failed; suite-2 timed out

NVIDIA H100, 132 SMs, torch 2.11.0; `python bench/targets.py --device cuda`:

| what | us | rate | of the probe | beside | target |
|---|---|---|---|---|---|
| decode, MHA, 64 x 4096 | 2,000.0 | 2,703 GB/s | 90% (read) | SDPA 0.95x (SDPA: flash) | vs SDPA at least 0.9: met |
| gelu_new | | | | | RuntimeError: a / b and more |

NVIDIA H100, 132 SMs, torch 2.11.0; `python bench/serving_cuda.py`:

| 64 requests, bfloat16 | tokens/s | the engine is |
|---|---|---|
| engine | 12,346 | 1.00x |
| generate | 1,000 | 12.35x |
"""


def write_results(folder: Path, steps: dict[str, Any], *names: str) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"steps": steps}))
    for name in names:
        (folder / name).write_text(json.dumps(RESULTS[name]))
    return folder


def test_docs(tmp_path: Path) -> None:
    import gpu.docs

    smoke = [{"name": "smoke", "status": "passed", "counts": {"passed": 24}}]
    first = write_results(tmp_path / "first", {"smoke": smoke, "suite": []}, "targets.json")
    second = write_results(tmp_path / "second", {"suite": SUITE}, "serving.json")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{gpu.docs.BEGIN}\nold\n{gpu.docs.END}\n\nafter\n")
    for _ in range(2):  # the second time changes nothing
        gpu.docs.write([first, second], page)
        assert page.read_text() == f"before\n\n{gpu.docs.BEGIN}\n\n{EXPECTED}\n{gpu.docs.END}\n\nafter\n"


def test_docs_of_one_run_without_numbers(tmp_path: Path) -> None:
    import gpu.docs

    assert [*gpu.docs.measured([write_results(tmp_path / "only", {"suite": SUITE[1:2]})])] == [
        "- suite: 700 passed, 1 failed; suite-1 failed"
    ]


def test_docs_that_cannot_be_written(tmp_path: Path) -> None:
    import gpu.docs

    page = tmp_path / "page.md"
    page.write_text("no markers\n")
    with pytest.raises(SystemExit, match=r"page\.md: expected <!-- measured: begin -->"):
        gpu.docs.write([], page)
    page.write_text(f"{gpu.docs.BEGIN}{gpu.docs.END}")
    with pytest.raises(SystemExit, match=r"expected summary\.json of bench/gpu_report\.py"):
        gpu.docs.write([tmp_path], page)
    assert page.read_text() == f"{gpu.docs.BEGIN}{gpu.docs.END}"


def test_the_page_has_its_markers() -> None:
    import gpu.docs

    text = (ROOT / "docs/cuda-kernels.md").read_text()
    assert text.count(gpu.docs.BEGIN) == text.count(gpu.docs.END) == 1
