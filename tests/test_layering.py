"""Imports and includes go one way: the diagram of the two packages and of csrc/, held by a test.

ARROWS is the diagram. A module may import what its arrows lead to, in any number of steps; nothing else of ours.
"""

import ast
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVE = ROOT / "python" / "pagedattn_serve"
EXT = ROOT / "src" / "pagedattn_ext"
CSRC = ROOT / "csrc"

# Module of pagedattn_serve -> the next ones to the right. "__init__" is the package itself, its lazy exports.
ARROWS: dict[str, set[str]] = {
    # the doors
    "__init__": {"llm", "calibration", "async_engine"},
    "__main__": {"cli"},
    "async_engine": {"async_engine.engine"},
    "async_engine.engine": {"async_engine.replicas"},
    "async_engine.replicas": {"async_engine.router", "async_engine.process_core", "distributed.cpus"},
    "async_engine.router": {"requests.prompts"},
    "async_engine.process_core": {"async_engine.core", "distributed.processes", "progress"},
    "async_engine.core": {"engine", "distributed.activity"},
    "calibration": {"engine"},
    # the HTTP server, which would serve any app
    "server": set(),
    "server.http": set(),
    "server.http.run": {"server.http.config", "server.http.connection", "server.http.sockets", "async_engine"},
    "server.http.sockets": {"errors"},
    "server.http.connection": set(),
    "server.http.middleware": {"server.http.config", "server.http.errors", "server.http.logs"},
    "server.http.status": {"async_engine", "server.http.errors"},
    "server.http.live": {"async_engine", "server.http.errors"},
    "server.http.metrics": {"server.http.logs", "server.http.errors", "outputs"},
    "server.http.logs": set(),
    "server.http.errors": {"server.http.logs"},
    "server.http.config": {"config", "options"},
    # the app: OpenAI's API
    "server.openai": set(),
    "server.openai.app": {"server.openai.completions", "server.openai.models"}
    | {"server.http.status", "server.http.live", "server.http.middleware"},
    "server.openai.completions": {"server.openai.service", "server.openai.logprobs"},
    "server.openai.models": {"server.openai.service"},
    "server.openai.service": {"server.openai.fields", "server.http.config", "server.http.metrics"}
    | {"text.chat_template", "text.token_names"},
    "server.openai.logprobs": {"outputs", "sampling_params", "text.token_names"},
    "server.openai.fields": {"server.openai.errors", "structured_output"},
    "server.openai.errors": {"server.http.errors", "async_engine"},
    "cli": {"__init__", "cli.parser", "cli.prepare"},
    # imports the commands when they run
    "cli.prepare": {"cli.generate", "cli.info", "cli.quantize", "cli.serve", "cli.simulate", "cli.options"}
    | {"distributed.torchrun", "text.tokenizer"},
    "cli.generate": {"engine"},
    "cli.serve": {"server.http.run", "server.http.logs", "server.openai.app", "loading.directory"},
    "cli.quantize": {"loading.quantize"},
    "cli.info": {"execution.cache_memory"},
    "cli.simulate": {"simulation.deployment", "simulation.files", "simulation.plot", "simulation.sweep"}
    | {"async_engine.router", "progress"}
    | {"execution.cache_memory", "text.tokenizer"},
    "ray_serve": {"cli.prepare"},
    "cli.parser": {"cli.options"},
    "cli.options": {"engine_args", "server.http.config"},
    "llm": {"engine", "text.chat_template", "progress"},
    "engine": {"engine_args", "engine_setup", "requests.inputs", "distributed.executor"},
    "engine_setup": {"execution.cache_memory"},
    "environment": set(),
    # a deployment on a simulated clock
    "simulation": set(),
    "simulation.deployment": {"simulation.simulator", "simulation.systems.paged", "simulation.systems.orca"}
    | {"simulation.systems.faster_transformer"},
    "simulation.plot": {"simulation.metrics"},
    "simulation.sweep": {"simulation.metrics"},
    "simulation.simulator": {"simulation.metrics"},
    "simulation.metrics": {"simulation.systems.system"},
    "simulation.systems": set(),
    "simulation.systems.paged": {"simulation.systems.system", "simulation.systems.steady_decodes"},
    "simulation.systems.steady_decodes": {"simulation.workload", "scheduling.scheduler"},
    "simulation.systems.orca": {"simulation.systems.system", "simulation.systems.buddy_allocator"},
    "simulation.systems.faster_transformer": {"simulation.systems.system"},
    "simulation.systems.buddy_allocator": set(),
    "simulation.systems.system": {"simulation.cost_model", "simulation.workload"},
    "simulation.files": {"simulation.workload"},
    "simulation.cost_model": {"simulation.hardware"},
    "simulation.hardware": {"config"},
    "simulation.workload": {"simulation.lengths", "simulation.beams", "config"},
    "simulation.beams": {"scheduling.beam_search"},
    "simulation.lengths": {"errors"},
    # a request from what a caller says to what it is told
    "requests": set(),
    "requests.inputs": {
        "requests.request",
        "requests.prompts",
        "loading.generation_config",
        "sampling.state",
        "text.tokenizer",
    },
    "requests.request": {
        "scheduling.beam_search",
        "scheduling.scheduler",
        "text.stop_strings",
        "text.token_names",
        "sampling_params",
        "outputs",
    },
    "requests.prompts": {"sampling_params"},
    # which sequences run, on which blocks
    "scheduling": set(),
    "scheduling.scheduler": {
        "scheduling.block_manager",
        "scheduling.prompt_lookup",
        "scheduling.prompt_pace",
        "scheduling.batch",
    },
    "scheduling.block_manager": {"scheduling.block_allocator", "scheduling.batch"},
    "scheduling.table_array": {"scheduling.sequence", "config"},
    "scheduling.block_allocator": set(),
    "scheduling.beam_search": {"errors"},
    "scheduling.batch": {"scheduling.sequence_group", "scheduling.table_array"},  # the runner reads it, too
    "scheduling.sequence_group": {"scheduling.sequence"},
    "scheduling.prompt_lookup": {"scheduling.sequence"},
    "scheduling.prompt_pace": set(),
    "scheduling.sequence": set(),
    # what decides a token: made for a request, read by the sampler
    "sampling": set(),
    "sampling.state": {"sampling.grammar", "sampling_params"},
    "sampling.grammar": {"sampling.json_schema", "structured_output"},
    "sampling.json_schema": set(),
    # the processes of a model's ranks
    "distributed": set(),
    "distributed.executor": {"distributed.workers", "execution.model_runner"},
    "distributed.workers": {"distributed.remote", "distributed.messages", "distributed.torchrun", "distributed.cpus"}
    | {"distributed.ray_placement", "distributed.processes", "distributed.activity"},  # it starts worker
    "distributed.worker": {"distributed.messages", "distributed.channel", "distributed.cpus", "distributed.activity"}
    | {"engine_setup"},
    "distributed.activity": set(),
    "distributed.remote": {"distributed.messages", "distributed.channel"},
    "distributed.ray_placement": {"distributed.worker"},
    "distributed.messages": {"distributed.hosts", "distributed.network", "scheduling.table_array"}
    | {"execution.step_runner", "config"},
    "distributed.hosts": {"distributed.process_group"},
    "distributed.process_group": {"distributed.communicator", "distributed.network", "environment", "errors"},
    "distributed.communicator": {"pagedattn_ext"},
    "distributed.torchrun": {"distributed.worker", "distributed.channel"},
    "distributed.channel": set(),
    "distributed.network": set(),
    "distributed.cpus": set(),
    "distributed.processes": set(),
    # a batch through the model
    "execution": set(),
    "execution.cache_memory": {"execution.model_runner"},
    "execution.model_runner": {"loading", "execution.sampler", "execution.step_runner", "scheduling.batch"},
    "execution.step_runner": {"execution.cache_engine", "execution.decode_graphs", "scheduling.table_array"},
    "execution.decode_graphs": {"models.causal_lm", "pagedattn_ext"},
    "execution.sampler": {"execution.logits_processors", "execution.token_masks", "outputs"},
    "execution.token_masks": {"sampling.state", "pagedattn_ext"},
    "execution.logits_processors": {"sampling.state"},
    "execution.cache_engine": {"config", "models.metadata", "pagedattn_ext"},
    # from a directory to a model
    "loading": {"loading.loader"},
    "loading.quantize": {"loading.loader", "progress"},
    "loading.loader": {"models.bloom", "models.gpt2", "models.llama", "models.opt", "models.transformers_model"}
    | {"loading.weights", "loading.plain_config", "config"},
    "loading.weights": {"loading.checkpoint_files", "loading.quantized_checkpoint", "loading.kv_scales"}
    | {"models.causal_lm", "models.linear", "progress"},
    "loading.checkpoint_files": {"loading.directory"},
    "loading.quantized_checkpoint": {"loading.directory", "models.partition"},
    "loading.kv_scales": {"config"},
    "loading.generation_config": {"loading.directory", "sampling_params"},
    "loading.plain_config": set(),
    "loading.directory": {"errors"},
    # the families and what they share
    "models": set(),
    "models.bloom": {"models.causal_lm", "models.layers"},
    "models.gpt2": {"models.causal_lm", "models.layers"},
    "models.llama": {"models.causal_lm", "models.layers"},
    "models.opt": {"models.causal_lm", "models.layers"},
    "models.transformers_model": {"models.causal_lm", "models.layers", "models.transformers_slices", "progress"},
    "models.transformers_slices": {"models.partition", "models.transformers_trial", "environment"},
    "models.transformers_trial": {"pagedattn_ext"},
    "models.causal_lm": {"models.metadata", "models.partition"},
    "models.linear": {"models.partition", "pagedattn_ext"},
    "models.partition": {"models.quantization", "errors"},
    "models.quantization": {"pagedattn_ext"},
    "models.layers": {"models.metadata", "models.partition", "models.rope", "pagedattn_ext"},
    "models.rope": set(),
    "models.metadata": set(),
    # between text and token ids
    "text": set(),
    "text.chat_template": {"config", "text.messages"},
    "text.detokenizer": set(),
    "text.messages": {"errors"},
    "text.stop_strings": set(),
    "text.token_names": {"text.detokenizer"},
    "text.tokenizer": {"loading.directory", "loading.plain_config"},
    # plain data that users hold and any room may read
    "engine_args": {"config", "options"},
    "options": set(),
    "progress": set(),
    "outputs": {"errors"},
    "sampling_params": {"structured_output"},
    "structured_output": {"config"},
    "config": {"errors"},
    "errors": set(),
    # the op package: nothing of ours to its right
    "pagedattn_ext": set(),
}


def room(name: str) -> set[str]:
    """The modules of a room of pagedattn_serve, its __init__ among them."""
    return {module for module in ARROWS if f"{module}.".startswith(f"{name}.")}


# What a room never knows, in any number of steps: modules of ours, and torch for those in TORCH_FREE.
PLAIN_DATA = {"errors", "config", "options", "sampling_params", "structured_output", "outputs"}
DOORS = room("cli") | room("server")
DOORS |= room("async_engine") | {"__init__", "llm", "calibration", "engine"}
WALLS: dict[str, set[str]] = {
    "engine": room("simulation"),
    "requests": DOORS | room("execution") | room("models") | {"pagedattn_ext"},
    "scheduling": DOORS
    | room("requests")
    | room("sampling")
    | room("execution")
    | room("models")
    | room("text")
    | {"sampling_params", "structured_output", "outputs", "pagedattn_ext"},
    "sampling": DOORS | room("requests") | room("scheduling") | room("execution") | room("models") | room("text"),
    "distributed": DOORS | room("requests") | room("text") | {"scheduling.scheduler", "scheduling.block_manager"},
    "execution": DOORS
    | room("requests")
    | room("text")
    | room("distributed")
    | {"scheduling.scheduler", "scheduling.block_manager"},
    "loading": DOORS | room("requests") | room("execution") | room("scheduling") | room("text"),
    "models": DOORS | room("requests") | room("execution") | room("scheduling") | room("text") | room("loading"),
    "server.http": room("server.openai"),
    "simulation": DOORS
    | room("requests")
    | room("sampling")
    | room("distributed")
    | room("execution")
    | room("loading")
    | room("models")
    | room("text")
    | {"pagedattn_ext"},
    "text": DOORS
    | room("requests")
    | room("execution")
    | room("models")
    | {"loading.loader"}
    | room("scheduling")
    | {"pagedattn_ext"},
}
TORCH_FREE = room("scheduling") | room("simulation") | room("text") | room("sampling") | PLAIN_DATA

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
}


def reachable(module: str) -> set[str]:
    """All modules that the arrows of `module` lead to."""
    found: set[str] = set()
    ahead = list(ARROWS[module])
    while ahead:
        target = ahead.pop()
        if target not in found:
            found.add(target)
            ahead.extend(ARROWS[target])
    return found


def imported_names(source: str, package: str) -> Iterator[str]:
    """Absolute dotted name of each import in a module of `package`, wherever it stands (TYPE_CHECKING counts)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str | None:
    """The key of ARROWS that an imported name belongs to: its longest listed prefix. None if it is not ours."""
    top, *parts = name.split(".")
    if top == "pagedattn_ext":
        return top
    if top != "pagedattn_serve":
        return None
    for length in range(len(parts), 0, -1):
        if (module := ".".join(parts[:length])) in ARROWS:
            return module
    return "__init__"


def serve_errors(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Wrong imports of one module of pagedattn_serve."""
    if module not in ARROWS:
        return [
            f"{module} is not in ARROWS of tests/test_layering.py: give it a place in the diagram, then a line there"
        ]
    path = "pagedattn_serve" if module == "__init__" else f"pagedattn_serve.{module}"
    allowed = reachable(module) | {module}
    errors = []
    for name in imported_names(source, path if is_package else path.rpartition(".")[0]):
        target = module_of(name)
        if target is not None and target not in allowed:
            errors.append(f"{module} imports {name}, but its arrows lead only to {sorted(allowed - {module})}")
        if module in TORCH_FREE and name.split(".")[0] == "torch":
            errors.append(f"{module} imports {name}, but must stay free of torch")
    return errors


def ext_errors(module: str, source: str) -> list[str]:
    """Wrong imports of one module of pagedattn_ext; in pagedattn_ext.ops, a family is a room as in csrc/."""
    others = ROOMS - {room} if (room := module.removeprefix("pagedattn_ext.ops.")) in ROOMS else set()
    closed = ["pagedattn_serve", *(f"pagedattn_ext.ops.{other}" for other in others)]
    return [
        f"{module} imports {name}"
        for name in imported_names(source, module.rpartition(".")[0])
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


def test_imports_of_pagedattn_serve() -> None:
    errors = []
    for path in sorted(SERVE.rglob("*.py")):
        is_package = path.name == "__init__.py"
        parts = path.relative_to(SERVE).with_suffix("").parts
        module = ".".join(parts[:-1] if is_package and len(parts) > 1 else parts)
        errors += serve_errors(module, path.read_text(), is_package=is_package)
    assert not errors, "\n".join(errors)
    assert (SERVE / "scheduling" / "scheduler.py").exists()


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


def test_scheduling_loads_without_torch() -> None:
    modules = sorted(room("scheduling") | room("simulation") | PLAIN_DATA | {"engine_args", "cli.parser"})
    program = (
        f"import importlib, sys; sys.path.insert(0, {str(SERVE.parent)!r}); sys.modules['torch'] = None\n"
        f"for module in {modules}: importlib.import_module('pagedattn_serve.' + module)\n"
        "assert 'pagedattn_ext' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_arrows_never_go_back() -> None:
    for module in ARROWS:
        assert module not in reachable(module), f"{module} can reach itself"


@pytest.mark.parametrize("name", WALLS)
def test_a_room_knows_nothing_behind_its_walls(name: str) -> None:
    assert room(name)
    for module in room(name):
        assert not reachable(module) & WALLS[name], module


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("scheduling.scheduler", "import torch"),
        ("scheduling.batch", "from torch.nn import Module"),
        ("scheduling.scheduler", "from pagedattn_serve.execution.model_runner import ModelRunner"),
        ("scheduling.scheduler", "from pagedattn_serve.execution import model_runner"),
        ("scheduling.scheduler", "from pagedattn_serve import execution"),
        ("scheduling.scheduler", "from ..execution import sampler"),
        ("scheduling.scheduler", "from ..execution.sampler import sample"),
        ("scheduling.scheduler", "import pagedattn_serve.engine"),
        ("scheduling.scheduler", "from pagedattn_serve import LLM"),
        ("scheduling.scheduler", "def f():\n    from pagedattn_serve.execution.cache_engine import CacheEngine"),
        ("scheduling.block_manager", "import pagedattn_ext"),
        ("scheduling.block_allocator", "from pagedattn_serve.scheduling.block_manager import BlockManager"),
        ("execution.model_runner", "if TYPE_CHECKING:\n    from pagedattn_serve.scheduling.scheduler import Scheduler"),
        ("execution.cache_engine", "from pagedattn_serve.scheduling.block_manager import BlockManager"),
        ("execution.sampler", "from pagedattn_serve.text.tokenizer import load_tokenizer"),
        ("models.layers", "from pagedattn_serve.models.llama import Llama"),
        ("models.llama", "from ..execution.model_runner import ModelRunner"),
        ("models.llama", "from .gpt2 import Block"),
        ("text.detokenizer", "import torch"),
        ("text.detokenizer", "from pagedattn_serve.scheduling.sequence import Sequence"),
        ("planted", ""),
        ("text.planted", ""),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(serve_errors(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "engine",
            "import torch\nfrom pagedattn_serve.scheduling.scheduler import Scheduler\n"
            "from .scheduling.sequence import Sequence",
        ),
        ("models.llama", "from .layers import Linear\nfrom pagedattn_ext import ops"),
        ("execution.model_runner", "from pagedattn_serve.loading.loader import load_model"),
        ("scheduling.scheduler", "from collections import deque\nfrom pagedattn_serve.scheduling import batch"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert serve_errors(module, source) == []


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
