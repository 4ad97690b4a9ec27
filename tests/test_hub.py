"""The package as a kernel of Hugging Face's hub (release/hub.py), and several copies of it in one process. Without
`kernels`; tests/adopters/test_hub_kernel.py loads it as users do."""

import ast
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import pagedattn_ext

ROOT = Path(__file__).resolve().parents[1]
HAS_CUDA = bool(pagedattn_ext.build_info()["cuda_arches"])


def python(program: str, *arguments: object) -> list[str]:
    """Lines that a child prints, which must end well."""
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    options = ["--cuda", "13.0"] if HAS_CUDA else []
    printed = subprocess.check_output([sys.executable, ROOT / "release" / "hub.py", out, *options], text=True)
    [folder] = (out / "build").iterdir()
    assert printed == f"{folder}\n"
    return folder


def test_files_of_a_variant(variant: Path) -> None:
    backend = "cu130" if HAS_CUDA else "cpu"
    assert variant.name.startswith(f"torch-stable-abi210-{backend}-") and variant.name.endswith("-linux")
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["id"].isidentifier() and metadata["backend"]["type"] == ("cuda" if HAS_CUDA else "cpu")
    assert bool(metadata["backend"].get("archs")) == HAS_CUDA
    files = list(variant.rglob("*.py"))
    assert len(files) > 40
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not any(name.split(".")[0] in ("pagedattn_ext", "transformers", "vllm") for name in names), file


def test_a_variant_for_another_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binary of its wheel, and the same modules; what is no such wheel is refused before anything is written."""
    monkeypatch.syspath_prepend(ROOT / "release")
    from hub import write_variant

    wheel = tmp_path / f"pagedattn_ext-{pagedattn_ext.__version__}-cp311-abi3-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("pagedattn_ext/_C.abi3.so", b"of another processor")
    folder = write_variant(tmp_path / "hub", wheel=wheel)
    assert folder == tmp_path / "hub" / "build" / "torch-stable-abi210-cpu-aarch64-linux"
    assert (folder / "pagedattn_ext" / "_C.abi3.so").read_bytes() == b"of another processor"
    assert (folder / "pagedattn_ext" / "ops" / "__init__.py").exists()

    with pytest.raises(SystemExit, match=r"--wheel: expected a file pagedattn_ext-.*, got serve\.whl"):
        write_variant(tmp_path / "refused", wheel=Path("serve.whl"))
    assert not (tmp_path / "refused").exists()


BESIDE = """
import importlib, pkgutil, sys
from importlib.util import module_from_spec, spec_from_file_location
import torch

def load(name, folder):
    spec = spec_from_file_location(name, f"{folder}/__init__.py")
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

sys.modules["pagedattn_ext"] = None
first, second = (load(name, sys.argv[1]) for name in ("first", "second"))
for module in pkgutil.walk_packages(first.__path__, "first."):
    importlib.import_module(module.name)
del sys.modules["pagedattn_ext"]
import pagedattn_ext

torch.manual_seed(0)
query, key, value = torch.randn(1, 4, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
for kernel in (first, second):
    caches = torch.zeros(4, 2, 16, 16, 4), torch.zeros(4, 2, 64, 16)
    kernel.reshape_and_cache(key, value, *caches, torch.arange(3), "auto", 1.0, 1.0)
    out = torch.empty_like(query)
    kernel.paged_attention_v1(out, query, *caches, 2, 0.125, tables, lens, 16, 3, None, "auto", 1.0, 1.0)
    expected = pagedattn_ext.ops.paged_attention_v1(query, *caches, tables, lens, scale=0.125)
    weight = kernel.ops.pack_linear_weight(torch.eye(64))
    compiled = torch.compile(kernel.ops.linear_packed, fullgraph=True, backend="aot_eager")(key, weight, 64)
    ones, graph = torch.ones(64), sys.modules[f"{kernel.__name__}.pagedattn_ext"].CPUGraph()
    with torch.inference_mode(), graph.capture():
        kernel.ops.rms_norm(key, ones)
    print(torch.equal(out, expected), torch.equal(compiled, key), len(graph._capture.steps))  # one: its own op
print(*sorted({name.split("::")[0] for name in torch._C._dispatch_get_all_op_names() if name.endswith("::rms_norm")}))
"""


def test_several_copies_in_a_process(variant: Path) -> None:
    """Two of the hub under names of their own, and the installed one: each has its ops, with their fake kernels."""
    namespaces = "aten first_pagedattn_ext pagedattn_ext second_pagedattn_ext"
    assert python(BESIDE, variant) == ["True True 1", "True True 1", namespaces]


TWICE = """
import sys, torch, pagedattn_ext
for name in [name for name in sys.modules if name.split(".")[0] == "pagedattn_ext"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
try:
    import pagedattn_ext
except ImportError as error:
    print(error)
"""


def test_a_second_copy_under_the_same_name_is_refused(tmp_path: Path) -> None:
    shutil.copytree(Path(pagedattn_ext.__file__).parent, tmp_path / "pagedattn_ext")
    assert python(TWICE, tmp_path) == [
        "pagedattn_ext: expected one copy of this package in a process, got a second one, whose ops torch could not "
        "tell from those of the first: import one of them, or one as part of another package"
    ]
