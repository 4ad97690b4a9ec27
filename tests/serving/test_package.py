"""The package itself: its names, its version, and what it says where something that it needs is not installed."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest

import pagedattn_serve
from pagedattn_serve.errors import how_to_install

COMMAND = "import sys; from pagedattn_serve.cli import main; sys.exit(main())"  # as its script has it
ROOT = Path(__file__).resolve().parents[2]


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_names_and_version() -> None:
    assert dir(pagedattn_serve) == sorted(pagedattn_serve.__all__)  # nothing that the package itself imports
    assert {"LLM", "SamplingParams", "__version__"} < set(dir(pagedattn_serve))
    for name in pagedattn_serve.__all__:
        assert getattr(pagedattn_serve, name) is not None
    assert pagedattn_serve.__version__ == version("pagedattn-serve") == version("pagedattn-ext")
    with pytest.raises(AttributeError, match="module 'pagedattn_serve' has no attribute 'LMM'"):
        pagedattn_serve.LMM  # type: ignore[attr-defined]  # noqa: B018


def test_imports_that_take_long_come_with_a_model_that_needs_them(tmp_path: Path) -> None:
    """transformers with the first tokenizer; torch's compiler and the fallback for models without a file of their own
    with no native model, as each takes seconds."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    configs: dict[str, dict[str, Any]] = {
        "BloomForCausalLM": {"model_type": "bloom", "layer_norm_epsilon": 1e-5},
        "GPT2LMHeadModel": {
            "model_type": "gpt2",
            "n_positions": 8,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu",
        },
        "OPTForCausalLM": {
            "model_type": "opt",
            "max_position_embeddings": 8,
            "ffn_dim": 8,
            "word_embed_proj_dim": 4,
            "activation_function": "relu",
        },
    }
    for name, fields in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [name]} | sizes | fields))
    done = python(
        "import sys; from pathlib import Path; from pagedattn_serve import DEMO_MODEL, LLM\n"
        "from pagedattn_serve.loading.loader import build_model\n"
        "slow = ['huggingface_hub', 'transformers', 'torch._dynamo', 'pagedattn_serve.models.transformers_model']\n"
        "print([name for name in slow if name in sys.modules])\n"
        f"for model in {[str(tmp_path / name) for name in configs]}: build_model(model)\n"
        "print([name for name in slow if name in sys.modules])\n"
        "LLM(DEMO_MODEL, num_blocks=64).generate('The')\n"
        # Nor does anything take tqdm's lock between processes, which an interrupt leaves taken.
        "assert not hasattr(getattr(sys.modules.get('tqdm.std'), 'TqdmDefaultWriteLock', None), 'mp_lock')\n"
        "print([name for name in slow if name in sys.modules])\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]", "['huggingface_hub', 'transformers']"]


NEEDED = ["huggingface_hub", "numpy", "safetensors", "transformers"]
NEEDED_BY_SERVER = ["fastapi", "httptools", "jinja2", "prometheus_client", "pydantic", "uvicorn"]


# One import of torch for all. Each program runs in a child, which does as if packages were missing. What it says is its
# status, and the lines that it wrote to standard error.
IN_CHILDREN = """
import json, os, sys, tempfile, torch, traceback

def run(missing, program):
    with tempfile.TemporaryFile() as said:
        if os.fork() == 0:
            os.dup2(said.fileno(), 2)
            sys.modules.update(dict.fromkeys(missing))
            status = 0
            try:
                exec(program, {})
            except SystemExit as exit:
                status = exit.code
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.wait()[1])
        said.seek(0)
        return status, said.read().decode().splitlines()

print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
"""


MISSING = [NEEDED, *([name] for name in NEEDED)]
PLAIN = "import pagedattn_ext; from pagedattn_serve import SamplingParams, RequestOutput, DEMO_MODEL"
OFFLINE = "from pagedattn_serve import LLM"
SERVE = "import sys; from pagedattn_serve.cli import main; sys.exit(main(['serve']))"
RAY_SERVE = "import pagedattn_serve.ray_serve"
RAY_RANKS = (
    "from pagedattn_serve import DEMO_MODEL, LLM\n"
    "LLM(DEMO_MODEL, tensor_parallel_size=2, distributed_executor_backend='ray')"
)


Said = Callable[[list[str], str], tuple[int, list[str]]]


@pytest.fixture(scope="module")
def said() -> Said:
    """said(missing packages, program): status and standard error, of one of the cases here."""
    cases = [(names, program) for program in (PLAIN, OFFLINE) for names in MISSING]
    cases += [([name], program) for program in (OFFLINE, SERVE) for name in NEEDED_BY_SERVER]
    cases += [(["ray"], program) for program in (RAY_SERVE, RAY_RANKS)]
    command = [sys.executable, "-c", IN_CHILDREN, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results = [(status, lines) for status, lines in json.loads(done.stdout)]
    return lambda missing, program: results[cases.index((missing, program))]


def test_without_what_is_needed(said: Said) -> None:
    """All of its packages, or one: an ImportError that says what to do. The ops, and what needs none of them, work."""
    for names in MISSING:
        assert said(names, PLAIN) == (0, [])
        status, lines = said(names, OFFLINE)
        expected = f"ImportError: pagedattn_serve: expected {', '.join(names)}: {how_to_install()}"
        assert (status, lines[-1]) == (1, expected)


def test_what_is_needed_is_what_is_installed() -> None:
    """With the ops, of this version alone."""
    lines = [line for line in requires("pagedattn-serve") or () if "extra ==" not in line]
    lines.remove(f"pagedattn-ext=={version('pagedattn-ext')}")
    assert sorted(re.split(r"\W", line.replace("-", "_"))[0] for line in lines) == sorted(NEEDED + NEEDED_BY_SERVER)


def test_no_later_transformers_is_installed_than_was_tried() -> None:
    """The index may have a later one, in which arguments of layers have other names."""
    ops, serve = (ROOT / path for path in ("src/pagedattn_ext/transformers.py", "python/setup.py"))
    [last] = re.findall(r"^FIRST, LAST = .*, \(5, (\d+)\)", ops.read_text(), re.MULTILINE)
    bounds = [
        re.findall(r"transformers>=[\d.]+,<5\.(\d+)", path.read_text()) for path in (serve, ROOT / "pyproject.toml")
    ]
    assert {int(bound) for found in bounds for bound in found} == {int(last) + 1} and all(bounds)


def test_what_installs_an_extra_needs_no_package_index() -> None:
    """The index has no release of the project: its name may become a stranger's. Until there is a release, neither a
    message nor a page says `pip install` and the name."""
    assert how_to_install() == "in a clone of pagedattn_ext: pip install --no-build-isolation . ./python"
    assert how_to_install("gguf") == "in a clone of pagedattn_ext: pip install --no-build-isolation . './python[gguf]'"
    named = re.compile(r"pip3? install (-\S+ )*['\"]?pagedattn|pagedattn[-_](ext|serve)\[")
    folders = [ROOT / name for name in ("python", "src", "docs", "bench")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".md")]
    assert len(files) > 100
    files += [file for file in ROOT.glob("*") if file.is_file()]
    assert [str(file) for file in files if named.search(file.read_text(encoding="utf-8"))] == []


def test_python_runs_the_package_as_the_command() -> None:
    """Where the command is not on the path, and help names what was typed."""
    for arguments, status in ((["--version"], 0), (["serve", "--help"], 0), (["sevre"], 2)):
        command, module = (
            [sys.executable, *start, *arguments] for start in (["-c", COMMAND], ["-m", "pagedattn_serve"])
        )
        expected, done = (subprocess.run(each, capture_output=True, text=True) for each in (command, module))
        assert done.returncode == expected.returncode == status
        shown = (done.stdout + done.stderr).replace("python -m pagedattn_serve", "pagedattn")
        assert shown.split() == (expected.stdout + expected.stderr).split() and "__main__" not in shown
    assert done.stderr.startswith("python -m pagedattn_serve: error: ")


def test_serving_without_what_is_needed(said: Said) -> None:
    for name in NEEDED_BY_SERVER:
        assert said([name], OFFLINE) == (0, [])
        line = f"pagedattn: error: pagedattn_serve: expected {name}: {how_to_install()}"
        assert said([name], SERVE) == (1, [line])


def test_without_ray(said: Said) -> None:
    status, lines = said(["ray"], RAY_SERVE)
    assert (status, lines[-1]) == (1, f"ImportError: pagedattn_serve: expected ray: {how_to_install('ray')}")
    status, lines = said(["ray"], RAY_RANKS)
    expected = f"distributed_executor_backend: expected ray: {how_to_install('ray')}"
    assert (status, lines[-1]) == (1, f"pagedattn_serve.errors.ArgumentImportError: {expected}")
