"""Imports and includes go one way: rules between the rooms of the Python packages and of csrc/, held by a test.

A room is a package or a family of modules; CONTRIBUTING.md says what each is for. KNOWS is the diagram of the Python
packages: which rooms the modules of a room may import. Within a room, imports may do anything but go round in a circle.
"""

import ast
import functools
import graphlib
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVE = ROOT / "python" / "pagedattn_serve"
SIMULATE = ROOT / "python" / "pagedattn_simulate"
EXT = ROOT / "src" / "pagedattn_ext"
CSRC = ROOT / "csrc"

# From the bottom to the top.
KNOWS: dict[str, set[str]] = {
    "data": set(),  # what users give and get, with its checks
    "scheduling": {"data"},
    "sampling": {"data"},
    "output_parsing": {"data", "sampling"},
    "models": {"data", "pagedattn_ext"},
    "loading": {"data", "models"},
    "text": {"data", "loading"},
    "requests": {"data", "scheduling", "sampling", "text", "loading"},
    "execution": {"data", "scheduling", "sampling", "loading", "models", "pagedattn_ext"},
    "distributed": {"data", "scheduling", "execution", "loading", "models", "pagedattn_ext"},
    "engine": {
        "data",
        "scheduling",
        "text",
        "output_parsing",
        "requests",
        "execution",
        "distributed",
        "loading",
        "models",
    }
    | {"pagedattn_ext"},
    "verification": {"data", "scheduling", "sampling", "execution", "distributed", "models", "engine"},
    "async_engine": {"data", "text", "requests", "distributed", "engine"},
    "server.http": {"data", "output_parsing", "async_engine"},
    "server.openai": {"data", "text", "output_parsing", "async_engine", "server.http"},
    "simulate": {"data", "scheduling"},
    "doors": {
        "data",
        "text",
        "output_parsing",
        "requests",
        "loading",
        "execution",
        "distributed",
        "engine",
        "async_engine",
        "server.http",
    }
    | {"server.openai", "simulate", "verification"},
}
# Of modules that lie in no package of a room's name. All others of pagedattn_serve are "engine".
ROOM_OF = {
    **dict.fromkeys(("errors", "config", "options", "engine_args", "sampling_params", "pooling_params"), "data"),
    **dict.fromkeys(("structured_output", "outputs", "progress", "environment", "vllm_arguments"), "data"),
    **dict.fromkeys(("", "__main__", "cli", "ray_serve"), "doors"),
}
# What a room's modules reach in no number of steps: other rooms, or modules. Nor does one in TORCH_FREE reach torch.
WALLS: dict[str, set[str]] = {
    "requests": {"models", "pagedattn_ext"},
    "execution": {"pagedattn_serve.scheduling.scheduler", "pagedattn_serve.scheduling.block_manager"},
    "distributed": {"pagedattn_serve.scheduling.scheduler", "pagedattn_serve.scheduling.block_manager"},
}
OUTSIDE = {"torch", "pagedattn_ext"}  # below all; the second imports the first
TORCH_FREE = {"data", "scheduling", "sampling", "output_parsing", "text", "simulate"}
LOADS_WITHOUT_TORCH = {"pagedattn_serve.cli", "pagedattn_serve.cli.commands", "pagedattn_simulate.cli"}  # for --help

# A family of ops is a room of csrc/ and a file of Python functions.
ROOMS = {path.stem for path in (EXT / "ops").glob("[!_]*.py")}

# Of csrc/ itself, not of a room: what kernels include.
SHARED_BY_KERNELS = {
    "cpu_vec.h",
    "cpu_float16.h",
    "cpu_float8.h",
    "cpu_memory.h",
    "cpu_rows.h",
    "cpu_math.h",
    "types.h",
    "dispatch.h",
    "cpu_transpose.h",
}


def python_files() -> dict[str, str]:
    """The text of each module, by path. A planted file is one more."""
    paths = [*SERVE.rglob("*.py"), *SIMULATE.rglob("*.py")]
    return {path.relative_to(SERVE.parent).as_posix(): path.read_text() for path in sorted(paths)}


def room_of(module: str) -> str:
    """The room of a module of ours. A package that KNOWS has not is a room without a place."""
    top, *parts = module.split(".")
    if top in OUTSIDE:
        return top
    if top == "pagedattn_simulate":
        return "doors" if parts[:1] in (["cli"], ["command"]) else "simulate"
    first = parts[0] if parts else ""
    if first == "server" and len(parts) > 1:
        return f"server.{parts[1]}"
    return ROOM_OF.get(first) or (first if first in KNOWS or len(parts) > 1 else "engine")


@functools.cache
def imported_names(source: str, package: str) -> list[tuple[str, bool]]:
    """Absolute dotted name of each import in a module of `package`, wherever it stands, and whether it is one for type
    checkers alone."""
    tree = ast.parse(source)
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {id(inner) for guard in guards for node in guard.body for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        found += [(name, id(node) in for_types) for name in names]
    return found


def import_graphs(files: dict[str, str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """What each module imports of ours, and of OUTSIDE. The first graph is what is written; the second is what
    runs: without imports for type checkers, but with the packages around each module."""
    names = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    modules = set(names.values())
    written: dict[str, set[str]] = {}
    running: dict[str, set[str]] = {}
    for path, module in names.items():
        around = module if path.endswith("/__init__.py") else module.rpartition(".")[0]
        written[module], running[module] = set(), {module.rpartition(".")[0]} & modules
        for name, for_types in imported_names(files[path], around):
            parts = name.split(".")
            prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
            target = next((each for each in prefixes if each in modules | OUTSIDE), None)
            if target is not None and target != module:
                written[module].add(target)
                running[module] |= set() if for_types else {target}
    return written, running


def reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [module]
    while ahead:
        new = graph.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def python_errors(files: dict[str, str]) -> list[str]:
    """What is wrong between rooms."""
    written, running = import_graphs(files)
    errors = []
    for module, targets in written.items():
        room = room_of(module)
        if room not in KNOWS:
            errors.append(f"{module} is in no room of KNOWS in tests/test_layering.py: give it a place there")
            continue
        for target in sorted(targets - {"torch"}):
            if room_of(target) not in KNOWS[room] | {room}:
                errors.append(f"{module} imports {target}, but {room} knows only {sorted(KNOWS[room])}")
        if room in WALLS:
            far = sorted(reachable(module, written))
            errors += [f"{module} reaches {target}" for target in far if WALLS[room] & {target, room_of(target)}]
        if room in TORCH_FREE and OUTSIDE & reachable(module, running):
            errors.append(f"{module} imports torch, or a module that does")
    try:
        graphlib.TopologicalSorter(written).prepare()
    except graphlib.CycleError as error:
        errors.append(f"imports go round: {' -> '.join(error.args[1])}")
    return errors


def ext_errors(module: str, source: str) -> list[str]:
    """Wrong imports of one module of pagedattn_ext; in pagedattn_ext.ops, a family is a room as in csrc/."""
    others = ROOMS - {room} if (room := module.removeprefix("pagedattn_ext.ops.")) in ROOMS else set()
    closed = ["pagedattn_serve", *(f"pagedattn_ext.ops.{other}" for other in others)]
    return [
        f"{module} imports {name}"
        for name, _ in imported_names(source, module.rpartition(".")[0])
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in closed)
    ]


def folder_of(path: str) -> str | None:
    """The folder of a room (attention/cpu) that a file of csrc/ lies in, at any depth; None for one that lies in the
    room itself."""
    room, *folders, _ = path.split("/") if "/" in path else ("", path)
    return f"{room}/{folders[0]}" if room in ROOMS and folders else None


def is_torch_free(path: str) -> bool:
    """Whether a file of csrc/ belongs to the kernels: kernel sources, the headers of a room, all that lies in the
    room's folders, and what they share. A header `<family>_op.h` in the room itself belongs to the ops."""
    name = posixpath.basename(path)
    if name.endswith(("_cpu.cpp", ".cu", ".cuh")):
        return True
    if path.split("/")[0] in ROOMS:
        return folder_of(path) is not None or (name.endswith(".h") and not name.endswith("_op.h"))
    return path in SHARED_BY_KERNELS


def includes(path: str, files: dict[str, str]) -> list[str]:
    """What a file includes; our own files as paths from csrc/."""
    folder = posixpath.dirname(path)
    found = []
    for quote, target in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', files[path], re.MULTILINE):
        beside = posixpath.normpath(posixpath.join(folder, target))
        found.append(beside if quote == '"' and (beside in files or target.startswith("..")) else target)
    return found


def torch_chains(path: str, files: dict[str, str], seen: set[str]) -> Iterator[str]:
    """Each way from a file to a torch header, also through our own headers, as "a.h -> b.h -> torch/c.h"."""
    seen.add(path)
    for target in includes(path, files):
        if target.startswith(("torch/", "ATen/", "c10/")):
            yield f"{path} -> {target}"
        elif target in files and target not in seen:
            yield from (f"{path} -> {chain}" for chain in torch_chains(target, files, seen))


def wall_between(path: str, target: str) -> str | None:
    """Why a file of csrc/ may not include `target`; None if it may."""
    room, folder = target.split("/")[0], folder_of(target)
    if path.split("/")[0] in ROOMS and room in ROOMS - {path.split("/")[0]}:
        return "of another room"
    if folder is not None and folder != folder_of(path):
        return f"which is for {folder} alone"
    return None


def csrc_errors(files: dict[str, str]) -> list[str]:
    """Wrong includes in csrc/, given as path -> text."""
    errors = []
    for path in sorted(files):
        for target in includes(path, files):
            if wall := wall_between(path, target):
                errors.append(f"{path} includes {target}, {wall}")
        if is_torch_free(path):
            errors += [f"a kernel file must not see torch: {chain}" for chain in torch_chains(path, files, set())]
    return errors


def test_imports_of_the_packages() -> None:
    files = python_files()
    errors = python_errors(files)
    assert not errors, "\n".join(errors)
    assert "pagedattn_serve/scheduling/scheduler.py" in files
    assert "torch" in reachable("pagedattn_serve.engine", import_graphs(files)[1])


def test_rooms_never_know_each_other() -> None:
    graphlib.TopologicalSorter(KNOWS).prepare()
    modules = set(import_graphs(python_files())[0])
    assert set().union(*KNOWS.values(), *WALLS.values(), WALLS, TORCH_FREE) <= {*KNOWS, *OUTSIDE, *modules}


def test_imports_of_pagedattn_ext() -> None:
    paths = sorted(EXT.rglob("*.py"))
    modules = {".".join(path.relative_to(EXT.parent).with_suffix("").parts): path for path in paths}
    errors = [error for module, path in modules.items() for error in ext_errors(module, path.read_text())]
    assert not errors, "\n".join(errors)


def test_includes_of_csrc() -> None:
    paths = [path for path in CSRC.rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    folders = {path.relative_to(CSRC).parts[0] for path in paths if path.parent != CSRC}
    assert folders == ROOMS if CSRC.is_dir() else not paths  # a copy for users of Python has no csrc
    assert {"attention", "linear"} < ROOMS
    errors = csrc_errors({path.relative_to(CSRC).as_posix(): path.read_text() for path in paths})
    assert not errors, "\n".join(errors)


def test_what_is_free_of_torch_loads_without_it() -> None:
    modules = {module for module in import_graphs(python_files())[0] if room_of(module) in TORCH_FREE}
    program = (
        f"import importlib, sys; sys.path.insert(0, {str(SERVE.parent)!r}); sys.modules['torch'] = None\n"
        f"for module in {sorted(modules | LOADS_WITHOUT_TORCH)}: importlib.import_module(module)\n"
        "assert 'pagedattn_ext' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PLANTED = "pagedattn_serve/{}/planted.py".format


@pytest.mark.parametrize(
    ("planted", "error"),
    [
        # up, between rooms
        ({PLANTED("scheduling"): "from pagedattn_serve.execution.model_runner import ModelRunner"}, "scheduling knows"),
        ({PLANTED("scheduling"): "from pagedattn_serve.execution import model_runner"}, "scheduling knows"),
        ({PLANTED("scheduling"): "from ..execution.sampler import sample"}, "scheduling knows"),
        ({PLANTED("scheduling"): "import pagedattn_serve.engine"}, "scheduling knows"),
        ({PLANTED("scheduling"): "from pagedattn_serve import LLM"}, "scheduling knows"),
        ({PLANTED("scheduling"): "def f():\n    from ..sampling.state import SamplingState"}, "scheduling knows"),
        ({PLANTED("models"): "from pagedattn_serve.loading.loader import load_model"}, "models knows"),
        ({PLANTED("execution"): "from pagedattn_serve.text.tokenizer import load_tokenizer"}, "execution knows"),
        ({PLANTED("server/http"): "from pagedattn_serve.server.openai.app import make_app"}, "server.http knows"),
        ({"pagedattn_serve/planted.py": "import pagedattn_simulate.workload"}, "engine knows"),
        ({"pagedattn_simulate/planted.py": "from pagedattn_serve.cli.commands import engine_args"}, "simulate knows"),
        ({PLANTED("new_room"): ""}, "is in no room"),
        # round in a circle, within a room
        ({PLANTED("models"): "from . import b", "pagedattn_serve/models/b.py": "from . import planted"}, "go round"),
        (
            {
                PLANTED("models"): "if TYPE_CHECKING:\n    from .b import B",
                "pagedattn_serve/models/b.py": "from .planted import A",
            },
            "go round",
        ),
        # over walls
        ({PLANTED("execution"): "from pagedattn_serve.scheduling.scheduler import Scheduler"}, "reaches"),
        ({PLANTED("execution"): "if TYPE_CHECKING:\n    from ..scheduling.block_manager import X"}, "reaches"),
        ({PLANTED("requests"): "from pagedattn_serve.loading.loader import load_model"}, "reaches"),
        # to torch, in any number of steps
        ({PLANTED("scheduling"): "import torch"}, "imports torch"),
        ({PLANTED("scheduling"): "def f():\n    from torch.nn import Module"}, "imports torch"),
        ({PLANTED("text"): "from ..loading import planted", PLANTED("loading"): "import torch"}, "imports torch"),
        ({PLANTED("text"): "from pagedattn_serve.loading.loader import load_model"}, "imports torch"),
        ({"pagedattn_serve/sampling/__init__.py": "import torch"}, "imports torch"),
        ({"pagedattn_simulate/planted.py": "import torch"}, "imports torch"),
    ],
)
def test_a_wrong_import_is_found(planted: dict[str, str], error: str) -> None:
    assert any(error in each for each in python_errors(python_files() | planted))


def test_right_imports_pass() -> None:
    planted = {
        "pagedattn_serve/planted.py": "import torch\nfrom .scheduling.scheduler import Scheduler",
        PLANTED("models"): "from .layers import Linear\nfrom pagedattn_ext import ops",
        PLANTED("execution"): "from ..loading.loader import load_model\nfrom ..scheduling.sequence import Sequence",
        PLANTED("scheduling"): "from collections import deque\nfrom . import scheduler",
        PLANTED("text"): "if TYPE_CHECKING:\n    import torch",
    }
    assert python_errors(python_files() | planted) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pagedattn_ext.kv_cache", "from pagedattn_serve import LLM"),
        ("pagedattn_ext.ops.cache", "import pagedattn_serve.engine"),
        ("pagedattn_ext.ops.cache", "from .attention import paged_attention"),
        ("pagedattn_ext.ops.cache", "from . import attention"),
        ("pagedattn_ext.ops.cache", "from pagedattn_ext.ops.attention import paged_attention"),
    ],
)
def test_a_wrong_import_of_the_op_package_is_found(module: str, source: str) -> None:
    assert len(ext_errors(module, source)) == 1


@pytest.mark.parametrize("module", ["pagedattn_ext.ops.__init__", "pagedattn_ext.ops.cache"])
def test_a_right_import_of_the_op_package_passes(module: str) -> None:
    assert ext_errors(module, "import torch\nfrom ._call import call\nfrom .cache import swap_blocks") == []


@pytest.mark.parametrize(
    "planted",
    [
        {"cache/cache_cpu.cpp": "#include <torch/csrc/stable/tensor.h>"},
        {"cache/cache_cuda.cu": "#include <ATen/ATen.h>"},
        {"ptx.cuh": "  #  include <c10/core/Device.h>"},
        {"cache/cache.h": '#include "door.h"'},
        {"types.h": '#include "door.h"'},
        {"cpu_vec.h": '#include "more.h"', "more.h": '#include "door.h"'},
        {"cache/cache.cpp": '#include "attention/attention.h"'},
        {"cache/cache.cpp": '#include "../attention/attention.h"'},
        {"linear/linear_op.h": '#include "attention/attention.h"'},
        {"linear/linear_cpu.cpp": '#include "linear/linear_op.h"', "linear/linear_op.h": '#include "door.h"'},
        {"linear/cpu/linear_op.h": '#include "door.h"'},
        {"cache/cpu/tile.h": '#include "attention/attention.h"'},
        {"cache/cpu/tile.h": '#include "../../attention/attention.h"'},
        {"cache/cpu/tile.h": '#include "attention/cpu/tile.h"'},
        {"cache/cpu/tile.h": '#include "door.h"'},
        {"cache/cuda/plan.cpp": "#include <torch/csrc/stable/tensor.h>"},
        {"cache/cpu/tile.h": '#include "cache/cuda/tile.cuh"', "cache/cuda/tile.cuh": ""},
        {"cache/cuda/cache_cuda.cu": '#include "../cpu/tile.h"', "cache/cpu/tile.h": ""},
        {"cache/cache.cpp": '#include "cache/cpu/tile.h"', "cache/cpu/tile.h": ""},
        {"cache/cpu/instantiations/cache_f32.cpp": '#include "cache/cuda/tile.cuh"', "cache/cuda/tile.cuh": ""},
        {"cache/cpu/instantiations/cache_f32.cpp": "#include <torch/csrc/stable/tensor.h>"},
        {"ops.h": '#include "cache/cpu/tile.h"', "cache/cpu/tile.h": ""},
    ],
)
def test_a_wrong_include_is_found(planted: dict[str, str]) -> None:
    assert len(csrc_errors({"door.h": "#include <torch/csrc/stable/tensor.h>", **planted})) == 1


def test_right_includes_pass() -> None:
    files = {
        "door.h": '#include <torch/csrc/stable/tensor.h>\n#include "types.h"',
        "types.h": "#include <cstdint>",
        "cache/cache.h": '#include "types.h"',
        "ops.h": '#include "door.h"',
        "cache/cache.cpp": '#include "cache.h"\n#include "ops.h"\n#include "../door.h"',
        "cache/cache_cpu.cpp": '#include "cache/cache.h"\n// #include <torch/all.h>',
        "cache/cpu/cache_cpu.cpp": '#include "cache/cache.h"\n#include "cache/cpu/tile.h"\n#include "types.h"',
        "cache/cpu/tile.h": '#include "../cache.h"',
        "cache/cpu/instantiations/cache_f32.cpp": '#include "cache/cpu/tile.h"',
        "linear/linear.cpp": '#include "linear/linear_op.h"',
        "linear/linear_op.h": '#include "door.h"',
        "torch_bindings.cpp": '#include "cache/cache.h"\n#include "ops.h"',
    }
    assert csrc_errors(files) == []
