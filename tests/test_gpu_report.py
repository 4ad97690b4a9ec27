"""bench/gpu_report.py with commands of a second and less: it will have a GPU for minutes, and can fail only here."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server_process import WAIT_SECONDS, children_of, is_running, wait_for
from warm_python import run_python

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


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, Path, str], None]:
    """jump(seconds, log, word): so much later it is for the report and its commands, once the log has the word."""
    import gpu.commands
    import gpu_report

    def jump(seconds: float, log: Path, word: str) -> None:
        def monotonic() -> float:
            return time.monotonic() + seconds * (log.exists() and word in log.read_text())

        for module in (gpu.commands, gpu_report):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))

    return jump


# ---- commands --------------------------------------------------------------------------------------------------------


def test_what_is_late_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: Callable[[float, Path, str], None]
) -> None:
    import gpu.commands

    monkeypatch.setattr(gpu.commands, "GRACE_SECONDS", 0.2)
    jump(100, tmp_path / "late.log", "\n\n")
    deaf = ["sh", "-c", "trap '' INT; sleep 3600 & echo $!; echo; sleep 3600"]
    commands = [gpu.commands.Command("late", deaf, 100), command("good", "-c", "print('there')", seconds=3600)]
    outcomes = {outcome["name"]: outcome for outcome in gpu.commands.run_together(commands, tmp_path)}
    assert (outcomes["late"]["status"], outcomes["good"]["status"]) == ("timed out", "passed")
    assert outcomes["late"]["seconds"] >= 100 and outcomes["late"]["exit_status"] == -9
    child = int((tmp_path / "late.log").read_text().splitlines()[-2])
    wait_for(lambda: not is_running(child))
    assert (tmp_path / "good.log").read_text().endswith("\nthere\n")


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    import gpu.commands

    leaves = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid, flush=True)"
    [outcome] = gpu.commands.run_together([command("leaves", "-c", leaves)], tmp_path)
    assert outcome["status"] == "passed"
    child = int((tmp_path / "leaves.log").read_text().splitlines()[-1])
    wait_for(lambda: not is_running(child))


def test_a_late_pytest_leaves_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: Callable[[float, Path, str], None]
) -> None:
    import gpu.commands

    monkeypatch.setattr(gpu.commands, "GRACE_SECONDS", 120)
    jump(130, tmp_path / "it.log", "::test_slow")
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_fast(): pass\ndef test_wrong(): assert False\ndef test_slow(): time.sleep(3600)\n"
    )
    late = command("it", *PYTEST, tmp_path / "test_it.py", seconds=120)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts a command in the background
    [outcome] = gpu.commands.run_together([late], tmp_path)
    signal.signal(signal.SIGINT, handler)
    assert outcome["status"] == "timed out"
    assert outcome["counts"] == {"passed": 1, "failed": 1, "unfinished": 1}
    assert [test.partition("::")[2] for test in outcome["failures"]] == ["test_wrong", "test_slow"]
    assert "def test_wrong(): assert False" in (tmp_path / "it.log").read_text()  # pytest has said why, too


def test_tests_of_a_log(tmp_path: Path) -> None:
    from gpu.commands import read_tests

    (tmp_path / "log").write_text(
        "$ python -m pytest -v tests/ops\n"
        "tests/ops/test_a.py::test_1[cuda] PASSED      [ 25%]\n"
        "tests/ops/test_a.py::test_2[cuda-paged_attention fp8] FAILED      [ 50%]\n"
        "tests/ops/test_a.py::test_3 SKIPPED (no CUDA device)    [ 75%]\n"
        "tests/ops/test_a.py::test_5 <- tests/ops/of_others.py PASSED    [ 80%]\n"
        "tests/ops/test_a.py::test_6 ++++++++++ Timeout ++++++++++\n"
        "tests/ops/test_a.py::test_4[x y] Timeout (0:01:00)!\n"
        "Thread 0x1 (most recent call first):\n"
        "FAILED tests/ops/test_a.py::test_2[cuda-paged_attention fp8] - assert 1\n"
    )
    found = read_tests(tmp_path / "log")
    assert found["counts"] == {"passed": 2, "failed": 1, "skipped": 1, "unfinished": 2}
    of_file = [test.partition("::")[2] for test in found["failures"]]
    assert of_file == ["test_2[cuda-paged_attention fp8]", "test_6", "test_4[x y]"]


def test_tests_that_are_all_skipped_have_not_passed(tmp_path: Path) -> None:
    import gpu.commands

    (tmp_path / "test_it.py").write_text("import pytest\ndef test_it(): pytest.skip('no CUDA device')\n")
    [outcome] = gpu.commands.run_together([command("it", *PYTEST, tmp_path / "test_it.py")], tmp_path)
    assert (outcome["status"], outcome["exit_status"], outcome["counts"]) == ("failed", 0, {"skipped": 1})


# ---- tests that end their process ------------------------------------------------------------------------------------

# In place of a GPU, for tests/conftest.py: once a test has lost it, nothing works in this process any more.
LOSABLE_GPU = """\
import torch
lost = []
def synchronize():
    if lost: raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.synchronize = synchronize
torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
torch.cuda.current_device = lambda: 0
torch._C._dispatch_has_kernel_for_dispatch_key = lambda *_: True
"""
TESTS_THAT_END_A_PROCESS = """\
import os
from losable_gpu import lost
def test_1(device): pass
def test_2(device): assert False
def test_3(device): lost.append(1); assert False
def test_4(device): assert not lost
def test_5(device): os._exit(9)
def test_6(device): pass
"""


def test_where_a_test_ends_its_process_another_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lost GPU all tests of a process would fail, after a crash none would run."""
    import gpu.commands
    from gpu.steps import Work

    (tmp_path / "losable_gpu.py").write_text(LOSABLE_GPU)
    (tmp_path / "test_it.py").write_text(TESTS_THAT_END_A_PROCESS)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'tests'}")
    monkeypatch.setattr(gpu.commands, "ROOT", tmp_path)
    tests = Work("cuda", tmp_path).pytest("it", ["-p", "no:cacheprovider", "--rootdir=.", "test_it.py"], 120)
    [outcome] = gpu.commands.run_together([tests], tmp_path)
    assert outcome["counts"] == {"passed": 3, "failed": 2, "unfinished": 1}, (tmp_path / "it.log").read_text()
    assert [test.partition("::")[2] for test in outcome["failures"]] == [f"test_{i}[cuda]" for i in (2, 3, 5)]
    assert outcome["status"] == "failed" and outcome["exit_status"] == 0
    log = (tmp_path / "it.log").read_text()
    assert re.findall(r"^\$ .*--after .*::(test_\d)", log, re.MULTILINE) == ["test_3", "test_5"]


def test_a_test_that_hangs_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all behind it would be lost. With what is installed here, and by faulthandler alone where it can."""
    import gpu.steps
    from gpu.commands import Command, run_together

    monkeypatch.setattr(gpu.steps, "TEST_SECONDS", 1)
    (tmp_path / "test_it.py").write_text("import time\ndef test_slow(): time.sleep(3600)\ndef test_next(): pass\n")
    options = [gpu.steps.time_limit_options()]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest_timeout" else find_spec(name))
    options.append(gpu.steps.time_limit_options())
    assert "--timeout" not in options[1]
    argv = [sys.executable, *PYTEST, str(tmp_path / "test_it.py")]
    commands = [Command(f"limit-{i}", [*argv, *limit], 240) for i, limit in enumerate(options)]
    for outcome in run_together(commands, tmp_path):
        log = (tmp_path / f"{outcome['name']}.log").read_text()
        assert (outcome["status"], outcome["counts"]) == ("failed", {"unfinished": 1}), log
        assert "test_it.py" in gpu.steps.last_test_of(log)
        assert "in test_slow" in log  # the stack


def test_what_goes_on_has_got_further() -> None:
    """A process that ends before its first test is not tried again and again."""
    from gpu.steps import Work

    tests = Work("cuda", Path("out")).pytest("it", ["tests/ops"], 60)
    assert tests.go_on is not None
    assert tests.go_on("$ python -m pytest\nImportError: no torch\n") is None
    assert tests.go_on("tests/ops/test_a.py::test_1 PASSED [10%]\n") is None
    started = "$ python -m pytest -v\ntests/ops/test_a.py::test_1 PASSED [10%]\ntests/ops/test_a.py::test_2[a b] "
    after = tests.go_on(started)
    assert after is not None and after[-2:] == ["--after", "tests/ops/test_a.py::test_2[a b]"]
    targets = Work("cuda", Path("out")).measure("targets", ["decode, "], 60)
    assert targets.go_on is not None
    assert "--go-on" not in targets.argv
    assert targets.go_on("ImportError: no torch\n") is None
    assert targets.go_on("what   required  measured\ndecode  1  2  met\n\n1 of 1 met\n") is None
    after = targets.go_on("what   required  measured\ndecode  failed: RuntimeError\n")
    assert after is not None and after[-3:] == ["--go-on", "--only", "decode, "]


# ---- what is broken --------------------------------------------------------------------------------------------------


def log_of(**outcomes: str) -> str:
    return "".join(f"tests/ops/test_smoke.py::{test} {outcome} [ 9%]\n" for test, outcome in outcomes.items())


@pytest.mark.parametrize(
    ("passes_without", "blamed"),
    [
        ({"a": "wgmma"}, ["wgmma"]),
        ({"a": "bulk cluster all"}, ["cluster"]),  # without bulk copies there are no clusters
        ({"a": "bulk all", "b": "bulk cluster all"}, ["cluster", "bulk"]),
        ({"a": "all"}, ["wgmma", "cluster", "bulk", "pdl"]),
        ({"a": ""}, []),  # no matter what
        ({"a": "wgmma cluster bulk pdl all"}, []),  # now and then
    ],
)
def test_culprits(passes_without: dict[str, str], blamed: list[str]) -> None:
    from gpu.steps import MECHANISMS, culprits

    logs = {}
    for word in (*MECHANISMS, "all"):
        of_tests = {t: "PASSED" if word in words.split() else "FAILED" for t, words in passes_without.items()}
        logs["" if word == "all" else word] = log_of(**of_tests)
    assert culprits(logs, [f"tests/ops/test_smoke.py::{test}" for test in passes_without]) == blamed


# ---- the report ------------------------------------------------------------------------------------------------------

Groups = list[list[Any]]


def run(out: Path, steps: dict[str, Groups], **options: Any) -> bool:
    from gpu.steps import Work
    from gpu_report import Report, run_report

    def step_of(groups: Groups) -> Any:
        return lambda work: (group for group in groups)

    report = Report(out, {"device": "cuda"}, **options)
    good = run_report({name: step_of(groups) for name, groups in steps.items()}, report, Work("cuda", out))
    report.finish()
    return good


def test_results_are_written_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command sees those before it; one that fails, or is not installed, is not the end."""
    from gpu.commands import Command

    look = f"import json; print(*json.load(open({str(tmp_path / 'summary.json')!r}))['steps'], flush=True)"
    steps = {
        "versions": [[command("first", "-c", look), Command("missing", ["no-such-program"], 1)]],
        "suite": [[command("second", "-c", f"{look}; raise SystemExit('wrong')")], [command("third", "-c", look)]],
    }
    assert not run(tmp_path, steps)
    assert (tmp_path / "first.log").read_text().endswith("\n\n")
    assert (tmp_path / "second.log").read_text().endswith("\nversions\nwrong\n")
    assert (tmp_path / "third.log").read_text().endswith("\nversions suite\n")
    written = summary(tmp_path)["steps"]
    assert [outcome["status"] for outcome in written["versions"]] == ["not run", "passed"]
    assert [outcome["status"] for outcome in written["suite"]] == ["failed", "passed"]
    printed = capsys.readouterr().out
    assert "missing                not run      0.0 s  no-such-program was not found\n" in printed
    assert "\n    wrong\n" in printed
    assert "\nnot run: missing\n" in printed
    assert not run(tmp_path, {"versions": steps["versions"]})  # what was not run has not passed


def test_the_archive_is_written_while_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that goes away in the midst of the longest command leaves what there was."""
    import gpu_report

    monkeypatch.setattr(gpu_report, "PACK_SECONDS", 0.0)
    pack = tmp_path / "pack.tar.gz"
    wait = (
        "import tarfile, time\nprint('begun', flush=True)\n"
        "def packed(name):\n"
        f"    with tarfile.open({str(pack)!r}) as archive:\n"
        "        return archive.extractfile(name).read() if name in archive.getnames() else b''\n"
        "while not (packed('early.log').endswith(b'done\\n') and packed('late.log').endswith(b'begun\\n')):\n"
        "    time.sleep(0.05)\n"
    )
    (tmp_path / "wait.py").write_text(wait)
    (tmp_path / "out").mkdir()
    late = command("late", tmp_path / "wait.py", seconds=240)
    assert run(tmp_path / "out", {"versions": [[command("early", "-c", "print('done')")], [late]]}, pack=pack)


def test_a_budget_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: Callable[[float, Path, str], None]
) -> None:
    """What does not fit any more is named, and what comes after it, and fits, is run."""
    import gpu.commands
    import gpu_report

    for module in (gpu.commands, gpu_report):
        monkeypatch.setattr(module, "GRACE_SECONDS", 500)
    jump(3001, tmp_path / "slow.log", "$ ")
    slow = command("slow", "-c", "import time; time.sleep(3600)", seconds=4000)
    too_long, short = command("too-long", "-c", "", seconds=20_000), command("short", "-c", "", seconds=10)
    assert not run(tmp_path, {"suite": [[too_long], [slow]], "engine": [[slow]], "targets": [[short]]}, seconds=3500)
    steps = summary(tmp_path)["steps"]
    assert [outcome["status"] for outcome in steps["suite"]] == ["not run", "timed out"]
    assert [outcome["status"] for outcome in steps["engine"]] == ["not run"]
    reason = r"(29..|3000) s of the budget were left, of 20000 s that it may take"
    assert re.fullmatch(reason, steps["suite"][0]["reason"])


def test_a_smoke_of_which_nothing_passes_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first test that fails is run once more, under compute-sanitizer; what was left out is named."""
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "test_it.py").write_text("def test_wrong(): assert False\n")
    smoke, suite = command("smoke", *PYTEST, tmp_path / "test_it.py"), command("suite", "-c", "")
    assert not run(tmp_path, {"smoke": [[smoke]], "suite": [[suite]]})
    steps = summary(tmp_path)["steps"]
    assert [outcome["name"] for outcome in steps["smoke"]] == ["smoke", "smoke-memcheck"]
    assert [outcome["status"] for outcome in steps["suite"]] == ["not run"]
    asked = (tmp_path / "smoke-memcheck.log").read_text().splitlines()
    [test] = steps["smoke"][0]["failures"]
    assert test.endswith("test_it.py::test_wrong") and test in asked and "kns=pagedattn" in asked
    printed = capsys.readouterr().out
    assert "\nnothing of smoke passed: the steps after it are left out\n" in printed and "\nnot run: suite\n" in printed


def sleeps(pid: int) -> bool:
    """Whether the process is that program already."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\x00")


def test_a_terminated_report_leaves_its_results_and_no_command(tmp_path: Path) -> None:
    program = (
        "import signal, sys; sys.path.insert(0, 'bench'); import gpu_report, gpu.commands\n"
        "sleep = gpu.commands.Command('sleep', ['sleep', '3600'], 3600)\n"
        "for name in gpu_report.STEPS: gpu_report.STEPS[name] = lambda work: (group for group in [[sleep]])\n"
        f"sys.argv[1:] = ['--out', {str(tmp_path)!r}, '--pack', {str(tmp_path / 'pack/all.tar.gz')!r}]\n"
        "sys.exit(gpu_report.main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: any(map(sleeps, children_of(process.pid))))
    [child] = children_of(process.pid)
    process.terminate()
    printed, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 128 + 15 and not is_running(child)
    assert "\n==== summary\n" in printed
    with tarfile.open(tmp_path / "pack/all.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["sleep.log", "summary.json", "summary.txt"]


# ---- all of it, with programs of milliseconds in place of Python, CUDA's tools and the compiler ----------------------

# Tests pass, but for one that needs wgmma and is broken by it, where BROKEN says so. What is measured was prepared.
FAKE_PYTHON = """\
#!/bin/sh
echo "${PAGEDATTN_CUDA_WITHOUT-all}: $*" >>"$CALLS"
case "$*" in *"-m pytest"*)
  echo "tests/ops/test_smoke.py::test_one PASSED [ 50%]"
  case "$BROKEN,$PAGEDATTN_CUDA_WITHOUT" in
    wgmma,*wgmma*|,*) echo "tests/ops/test_smoke.py::test_two PASSED [100%]" ;;
    *) echo "tests/ops/test_smoke.py::test_two FAILED [100%]"; exit 1 ;;
  esac ;;
esac
while [ $# -gt 0 ]; do
  if [ "$1" = --json ]; then cp "$RESULTS/${2##*/}" "$2"; fi
  shift
done
"""
FAKE_NVCC = """\
#!/bin/sh
echo "nvcc: $*" >>"$CALLS"
for last; do :; done
printf '#!/bin/sh\necho "twins: " >>"$CALLS"\n' >"$last"
chmod +x "$last"
"""
FAKE_TOOL = """\
#!/bin/sh
echo "${0##*/}: $*" >>"$CALLS"
echo "tests/ops/test_smoke.py::test_one PASSED [100%]"
"""


@dataclass
class Fakes:
    """A machine with all tools, none of which does anything."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        import gpu.commands
        import targets_cuda

        self.programs, self.tools, self.out = (self.folder / name for name in ("programs", "tools/2025.1", "out"))
        for folder in (self.programs, self.tools, self.folder / "results"):
            folder.mkdir(parents=True)
        self.write(self.programs / "python", FAKE_PYTHON)
        self.write(self.programs / "nvcc", FAKE_NVCC)
        for tool in ("nvidia-smi", "ncu", "compute-sanitizer"):
            self.write(self.tools / tool, FAKE_TOOL)
        with zipfile.ZipFile(self.folder / "it.whl", "w") as wheel:
            wheel.writestr("it", "")
        # As long as the real ones.
        whats = [target.what for target in targets_cuda.targets()]
        targets = [{**TARGET, "what": what, "measured": 1, "met": True, "note": "", "row": ROW} for what in whats]
        mechanisms = {"command": "python mechanisms_cuda.py", "hardware": HARDWARE, "rows": [MECHANISM] * 9}
        results = RESULTS | {"mechanisms.json": mechanisms}
        results |= {"targets.json": {**RESULTS["targets.json"], "targets": targets}}
        for name, result in results.items():
            (self.folder / "results" / name).write_text(json.dumps(result))
        self.monkeypatch.setattr(gpu.commands, "TOOL_FOLDERS", (str(self.folder / "tools/*"),))
        self.monkeypatch.setattr(sys, "executable", str(self.programs / "python"))
        for name, value in {"CALLS": "calls", "RESULTS": "results"}.items():
            self.monkeypatch.setenv(name, str(self.folder / value))
        self.monkeypatch.setenv("PATH", "/usr/bin:/bin")
        self.monkeypatch.setenv("BROKEN", "")
        self.monkeypatch.delenv("PAGEDATTN_CUDA_WITHOUT", raising=False)

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def report(self, *options: str) -> int:
        import gpu_report

        argv = ["gpu_report.py", "--out", str(self.out), "--wheel", str(self.folder / "it.whl"), *options]
        self.monkeypatch.setattr(sys, "argv", argv)
        before = signal.getsignal(signal.SIGTERM)
        try:
            return gpu_report.main()
        finally:
            signal.signal(signal.SIGTERM, before)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(tmp_path, monkeypatch)


# Of each call in turn a part that tells it.
IN_ORDER = [
    *("zipfile", "nvidia-smi|facts.py|nvcc|twins", "test_smoke.py", "--only decode, ", "--only prefill, "),
    *("--part", "targets.json --go-on$", "mechanisms_cuda.py", "test_cuda_engine.py", "serving_cuda.py"),
    *("^compute-sanitizer", "^ncu"),
]


def in_order(calls: list[str]) -> list[str]:
    """Which of IN_ORDER they are, each once for calls that follow one another."""
    kinds = [next(kind for kind in reversed(IN_ORDER) if re.search(kind, call)) for call in calls]
    return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]


def test_all_of_it(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    """The order of worth; tools that PATH does not name; one archive with everything; a summary that fits."""
    pack = fakes.folder / "back" / "all.tar.gz"
    assert fakes.report("--pack", str(pack), "--budget", "570") == 0
    calls = fakes.calls()
    assert in_order(calls) == IN_ORDER
    words = [call.partition(":")[0] for call in calls if "test_smoke.py" in call and "pytest" in call]
    assert sorted(words[:6]) == ["all", "bulk", "cluster", "pdl", "wgmma", "wgmma,cluster,bulk,pdl"]
    assert not any("--go-on" in call for call in calls if "--only decode, " in call)  # targets of an earlier run
    with tarfile.open(pack) as archive:
        names = archive.getnames()
        assert {f"{outcome['name']}.log" for step in summary(fakes.out)["steps"].values() for outcome in step} < {
            *names
        }
        results = {"targets.json", "mechanisms.json", "serving.json", "summary.json", "summary.txt"}
        assert results < {*names} and not {"twins", "wheel"} & {*names}
        packed = archive.extractfile("summary.json")
        assert packed is not None and json.load(packed) == summary(fakes.out)
    printed = capsys.readouterr().out
    last = printed[printed.index("==== summary") :]
    assert len(last) < 10_000 and "| decode, MHA 32x128, 1 x 1024 |" in last
    assert "| decode, MHA 32x128, 64 x 1024, bfloat16 | 1,000.0 | bulk | 1.20x |" in last
    assert last.endswith(f"\nresults: {pack}\n")


def test_what_is_broken_is_left_out(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    """One mechanism that does not work costs its own tests, and neither the suite nor what is measured."""
    fakes.monkeypatch.setenv("BROKEN", "wgmma")
    assert fakes.report() == 1
    calls = fakes.calls()
    assert in_order(calls) == IN_ORDER
    later = [call for call in calls if re.search(r"--part|\.json|test_cuda_engine", call)]
    assert len(later) == 8 + 5 + 1 and all(call.startswith("wgmma: ") for call in later)
    assert summary(fakes.out)["without"] == ["wgmma"]
    printed = capsys.readouterr().out
    assert "\nbroken, and left out from here on: wgmma\n" in printed
    assert "\nfailed: tests/ops/test_smoke.py::test_two\n" in printed[printed.index("==== summary") :]


def test_failures_of_the_suite_are_tried_without_each_mechanism(fakes: Fakes) -> None:
    """They say which one it was."""
    fakes.monkeypatch.setenv("BROKEN", "wgmma")
    fakes.monkeypatch.setenv("PAGEDATTN_CUDA_WITHOUT", "pdl")
    assert fakes.report("--steps", "suite") == 1
    again = [call for call in fakes.calls() if "test_smoke.py::test_two" in call]
    words = ["pdl", "pdl,bulk", "pdl,cluster", "pdl,wgmma"]
    assert sorted({call.partition(":")[0] for call in again}) == words
    outcomes = {outcome["name"]: outcome["status"] for outcome in summary(fakes.out)["steps"]["suite"]}
    assert outcomes["suite-1"] == outcomes["suite-again"] == outcomes["suite-without-bulk"] == "failed"
    assert outcomes["suite-without-wgmma"] == "passed"


def test_steps_in_the_order_asked_for(fakes: Fakes) -> None:
    assert fakes.report("--steps", "engine", "attention", "versions") == 0
    kinds = [IN_ORDER[i] for i in (0, 8, 9, 3, 4, 1)]
    assert in_order(fakes.calls()) == kinds


def test_steps_that_do_not_fit(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    """A suite of 240 s is not begun where 90 are left; what comes after it fits."""
    assert fakes.report("--budget", "100") == 1
    assert in_order(fakes.calls()) == [kind for kind in IN_ORDER if kind != "--part"]
    assert (
        "\nnot run: suite-1, suite-2, suite-3, suite-4, suite-5, suite-6, suite-7, suite-8\n" in capsys.readouterr().out
    )


def test_tools_that_are_nowhere_are_not_run(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    for tool in ("ncu", "compute-sanitizer"):
        (fakes.tools / tool).unlink()
    assert fakes.report("--steps", "sanitizer", "profiles") == 1
    printed = capsys.readouterr().out
    assert "\nnot run: memcheck, racecheck, ncu-decode, " in printed and "ncu was not found\n" in printed


@pytest.mark.parametrize("where", ["cuda", "simt"])
def test_the_commands(where: str) -> None:
    """None names a file that is not there; together they are what half an hour holds."""
    asked = [sys.executable, "bench/gpu_report.py", "--dry-run", "--device", where]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    order = [name for name in dict.fromkeys(line[0] for line in lines) if name != "build"]
    steps = ["versions", "smoke", "attention", "suite", "targets", "mechanisms", "engine"]
    assert order == steps + (["sanitizer", "profiles"] if where == "cuda" else [])
    # Those of one name and its numbers or words run at the same time.
    seconds = {re.sub(r"(smoke|suite)-.*|racecheck", r"\1", line[1]): int(line[2]) for line in lines}
    assert sum(seconds.values()) < 1800 and len({line[1] for line in lines}) == len(lines)
    for path in re.findall(r"(?:tests|bench)/[\w/]+\.\w+", done.stdout):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("option", "message"), [("--budget=0", "--budget: expected a number of seconds, got 0"), ("--steps=x", "invalid")]
)
def test_options_that_are_wrong(option: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import gpu_report

    monkeypatch.setattr(sys, "argv", ["gpu_report.py", option])
    with pytest.raises(SystemExit, match="2"):
        gpu_report.main()
    assert message in capsys.readouterr().err


def test_profiled_kernels_and_targets_exist() -> None:
    import targets_cuda
    from gpu.steps import PROFILED

    names = [target.what for target in targets_cuda.targets()]
    sources = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cu*"))
    assert len(PROFILED) == 7
    for kernel, target in PROFILED.values():
        assert re.search(rf"\b{kernel}\(", sources), kernel
        assert sum(target in name for name in names) == 1, target


def collect(part: str, *options: str) -> subprocess.CompletedProcess[str]:
    asked = ["-m", "pytest", "--collect-only", "-q", "tests/ops/test_allocate.py", "--part", part]
    return run_python(*asked, *options, cwd=ROOT)


def test_parts_are_the_whole() -> None:
    outputs = [collect(f"{i}/2").stdout for i in (1, 2)]
    parts = [set(re.findall(r"^tests/\S+::.+$", output, re.MULTILINE)) for output in outputs]
    assert len(parts[0]) > 3 and not parts[0] & parts[1]
    for part, output in zip(parts, outputs, strict=True):
        assert f"{len(part)}/{len(parts[0] | parts[1])} tests collected" in output
    other = max(parts[1])
    done = collect("1/2", "--after", other)
    assert done.returncode == 4 and f"--after: expected one of {len(parts[0])} tests, got {other}" in done.stderr


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
MECHANISM = {
    "group": "decode",
    "case": "MHA 32x128, 64 x 1024, bfloat16",
    "GB/s": 2703.4,
    "share_of_read_probe": 0.901,
    "ratio_to_without bulk": 1.2,
    "seconds": {"ours": [1e-3]},
    "note": "",
}
RESULTS: dict[str, Any] = {
    "targets.json": {
        "command": "python bench/targets.py --device cuda --json /tmp/targets.json",
        "hardware": HARDWARE,
        "targets": [
            {**TARGET, "measured": 0.954, "met": True, "note": "", "row": ROW},
            {**TARGET, "what": "decode, AVX2: GB/s", "measured": 0.95, "met": True, "note": "", "row": None},
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
| decode, AVX2 | | | | | GB/s at least 0.9: met |
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
    left_out = [{"name": "smoke", "status": "not run", "reason": "no time"}]  # what the first run had counts
    second = write_results(tmp_path / "second", {"smoke": left_out, "suite": SUITE}, "serving.json")
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
