"""The files that hold the weights of a checkpoint, *.safetensors or pytorch_model*.bin: which are read, and their
tensors. The rule is the same for every family, and as in transformers where transformers has one."""

import logging
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.loading.directory import WEIGHTS, config_fields, read_json
from pagedattn_serve.loading.gguf_file import GgufFile, is_gguf
from pagedattn_serve.loading.gguf_weights import open_gguf
from pagedattn_serve.loading.quantization_config import quantization_config
from pagedattn_serve.loading.scaled_floats import dtype_of, scaled_floats

INDEX = ".index.json"  # the end of the name of a file that says which file has which tensor
# In order of preference: the file with all weights, and the index that takes its place if there are several files.
# If none of these is there, those of the first pattern of WEIGHTS that fits are read.
WEIGHT_FILES = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
NAMED_BY_CONFIG = "transformers_weights"  # the field of config.json with the name of another file, or index
SHOWN = 8  # names in a warning

logger = logging.getLogger(__name__)

Tensors = dict[str, Callable[[], Tensor]]  # by name; calling an entry reads the data of the tensor


class OpenFiles:
    """The *.safetensors files that tensors are read from. After `close`, the next tensor opens its file again.

    Pages of a file that were read count as memory of the process until the file is closed and its tensors are gone.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self, file: Path) -> list[str]:
        names: list[str] = self._opened(file).keys()
        return names

    def read(self, file: Path, name: str) -> Tensor:
        tensor: Tensor = self._opened(file).get_tensor(name)
        return tensor

    def close(self) -> None:
        self._open.clear()

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


def open_checkpoint(directory: Path, open_files: OpenFiles) -> Tensors:
    """Every tensor of the checkpoint, memory-mapped where the format allows it. Weights that are floats with scales are
    the floats that they stand for.

    directory: or a GGUF file, of which some tensors are Blocks. Raises ValueError for a file that cannot be read, and
    for a tensor of which two files hold different ones.
    """
    if is_gguf(directory):
        return open_gguf(GgufFile.open(directory))
    tensors: Tensors = {}
    file_of: dict[str, Path] = {}
    for file in weight_files(directory)[0]:
        found = open_file(file, open_files)
        for name in sorted(tensors.keys() & found.keys()):
            if not is_same(tensors[name](), found[name]()):
                raise ValueError(
                    f"model: expected one {name} in {directory}, got different ones in {file_of[name].name} and "
                    f"{file.name}"
                )
        tensors |= found
        file_of |= dict.fromkeys(found, file)
    if (floats := scaled_floats(quantization_config(directory))) is not None:
        return floats.open(tensors, dtype_of(config_fields(directory)))
    return tensors


def open_file(file: Path, open_files: OpenFiles) -> Tensors:
    try:
        if file.suffix == ".safetensors":
            return {name: partial(open_files.read, file, name) for name in open_files.names(file)}
        # Before torch 1.6 it was another format, which cannot be mapped.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        if not isinstance(state, dict):
            raise ValueError(f"expected a dict of tensors, got {type(state).__name__}")
        return {str(name): partial(state.__getitem__, name) for name in state}
    # The message of the first advises to run the code in the file; torch's reader meets the others in damaged files.
    except (pickle.UnpicklingError, LookupError, AssertionError, AttributeError, TypeError):
        raise ValueError(
            f"model: cannot read the weights in {file}: expected tensors, as torch saves them, got something else"
        ) from None
    except (SafetensorError, EOFError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0] or "it ends too early"
        raise ValueError(f"model: cannot read the weights in {file}: {reason}") from None


def is_same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.dtype == other.dtype and torch.equal(one, other)


def weight_files(directory: Path) -> tuple[list[Path], Path | None]:
    """The files that hold the weights, and the index that names them; None if no index does. Raises FileNotFoundError
    if there are none, or if the index names one that is not there."""
    for name in (*named_by_config(directory), *WEIGHT_FILES):
        file = directory / name
        if file.is_file():
            return (shards(file), file) if name.endswith(INDEX) else ([file], None)
    for pattern in WEIGHTS:  # files of any other name are shards without an index
        if files := sorted(directory.glob(pattern)):
            return files, None
    names = " or ".join(name for name in WEIGHT_FILES if not name.endswith(INDEX))
    raise FileNotFoundError(f"model: expected {names} in {directory}, found neither")


def named_by_config(directory: Path) -> list[str]:
    """The name of the file that config.json says has the weights, if config.json says so."""
    name = read_json(directory / "config.json").get(NAMED_BY_CONFIG)
    if name is None:
        return []
    is_name = isinstance(name, str) and Path(name).name == name
    if not is_name or not name.endswith((".safetensors", f".safetensors{INDEX}")) or not (directory / name).is_file():
        raise ArgumentError(NAMED_BY_CONFIG, f"the name of a safetensors file or index in {directory}", repr(name))
    return [name]


def shards(index: Path) -> list[Path]:
    """The files that an index names."""
    weight_map = read_json(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"weight_map: expected the files of tensors in {index}, got {weight_map!r:.80}")
    files = [index.parent / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"model: expected {file.name} in {index.parent}, as {index.name} names it")
    return files


def warn_of_other_weights(directory: Path) -> None:
    """One warning that names the files with weights, and indexes of such, which are not read."""
    if is_gguf(directory):
        return
    files, index = weight_files(directory)
    found = {file for pattern in WEIGHTS for end in ("", INDEX) for file in directory.glob(pattern + end)}
    others = sorted(file.name for file in found - {*files, index})
    if others:
        shown = ", ".join(others[:SHOWN]) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
        read = files[0].name if len(files) == 1 else f"{len(files)} files"
        by = "" if index is None else f", as {index.name} says"
        logger.warning("%s: the weights are those in %s%s; not read: %s", directory, read, by, shown)
