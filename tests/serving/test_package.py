"""The package itself: its names, its version, and what it says where the extra is not installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pagedattn_serve

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_names_and_version() -> None:
    assert dir(pagedattn_serve) == sorted(pagedattn_serve.__all__)  # nothing that the package itself imports
    assert {"LLM", "SamplingParams", "__version__"} < set(dir(pagedattn_serve))
    for name in pagedattn_serve.__all__:
        assert getattr(pagedattn_serve, name) is not None
    assert pagedattn_serve.__version__ == PROJECT["version"]
    with pytest.raises(AttributeError, match="module 'pagedattn_serve' has no attribute 'LMM'"):
        pagedattn_serve.LMM  # type: ignore[attr-defined]  # noqa: B018


def test_imports_that_take_long_come_with_a_model_that_needs_them() -> None:
    """transformers with the first model, the fallback for models without a file of their own with none of the demo."""
    done = python(
        "import sys; from pagedattn_serve import DEMO_MODEL, LLM\n"
        "slow = ['huggingface_hub', 'transformers', 'pagedattn_serve.models.transformers_model']\n"
        "print([name for name in slow if name in sys.modules])\n"
        "LLM(DEMO_MODEL, num_blocks=64)\n"
        "print([name for name in slow if name in sys.modules])\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "['huggingface_hub', 'transformers']"]


EXTRA = ["huggingface_hub", "numpy", "safetensors", "tqdm", "transformers"]
SERVER_EXTRA = ["fastapi", "httptools", "jinja2", "prometheus_client", "pydantic", "uvicorn"]


@pytest.mark.parametrize("missing", [EXTRA, *([name] for name in EXTRA)], ids=lambda names: "-".join(names))
def test_without_the_extra(missing: list[str]) -> None:
    """All of its packages, or one: an ImportError that says what to do. The ops, and what needs none of them, work."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing}));"
    done = python(f"{hide} from pagedattn_serve import LLM")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last == f"ImportError: pagedattn_serve: expected {', '.join(missing)}: pip install 'pagedattn-ext[serve]'"
    plain = python(
        f"{hide} import pagedattn_ext; from pagedattn_serve import SamplingParams, RequestOutput, DEMO_MODEL"
    )
    assert plain.returncode == 0, plain.stderr


def test_the_extra_is_what_the_project_says() -> None:
    named = [requirement.split(">=")[0].replace("-", "_") for requirement in PROJECT["optional-dependencies"]["serve"]]
    assert named == sorted(EXTRA + SERVER_EXTRA)


@pytest.mark.parametrize("missing", SERVER_EXTRA)
def test_serving_without_the_extra(missing: str) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None;"
    done = python(f"{hide} from pagedattn_serve.cli import main; sys.exit(main(['serve']))")
    assert done.returncode == 1
    expected = f"pagedattn: error: pagedattn_serve: expected {missing}: pip install 'pagedattn-ext[serve]'"
    assert done.stderr.splitlines() == [expected]
    assert python(f"{hide} from pagedattn_serve import LLM").returncode == 0
