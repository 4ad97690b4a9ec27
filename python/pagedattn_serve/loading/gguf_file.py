"""A GGUF file, the format of llama.cpp: its metadata, and where in the file each tensor lies. No weights are read.

The package `gguf` knows the types of tensors. Its own reader takes seconds for the metadata of a large vocabulary,
where this one takes a tenth of a second, and its errors name no file.
"""

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

from pagedattn_serve.errors import ArgumentImportError, how_to_install

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # of the first tensor's place
SHORTEST_KEY = 13  # bytes of a key of metadata and its value: a name's length, one byte for each, a type
SHORTEST_TENSOR = 32  # bytes that say where a tensor of one dimension lies
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # of a text, before its bytes
# Of the other types of metadata, by number.
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

T = TypeVar("T")


def is_gguf(path: str | PathLike[str]) -> bool:
    """Whether a path is meant to be a GGUF file: by its name, or by the first bytes of a file of another name."""
    path = Path(path)
    if path.suffix == SUFFIX:
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


@dataclass(slots=True, frozen=True)
class TensorPlace:
    """Where a tensor lies, and what it is.

    type: as llama.cpp names it in lower case, such as "q4_0". shape: as torch has it; the file has it reversed.
    begin, num_bytes: of the tensor in the file. row_bytes: of the last dimension.
    """

    type: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    row_bytes: int


@dataclass(slots=True, frozen=True)
class Texts:
    """Where a list of texts begins in a file, and how many there are: most files have 100,000 that few callers want."""

    begin: int
    length: int


class GgufFile:
    """The metadata and the tensors of a file, by name. Of a list of texts the metadata says only where it lies.

    Raises ValueError, with the name of the file, for what is no GGUF file, ends too early, or holds tensors of a type
    that the package `gguf` does not know; ArgumentImportError without this package.
    """

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorPlace]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        path = Path(path).expanduser()
        types = known_types()
        with path.open("rb") as opened:
            if opened.seek(0, 2) == 0:
                raise unreadable(path, "the file is empty")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                header = Header(path, content, types)
                return cls(path, *header.checked(header.read))

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str)

    def texts(self, key: str) -> list[str]:
        """A list of texts in the metadata, such as the tokens. Raises ValueError if there is no such list."""
        place = self.get(key, Texts)
        with self.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header = Header(self.path, content, {}, place.begin)
            return header.checked(lambda: [header.text() for _ in range(place.length)])

    def floats(self, name: str) -> list[float]:
        """The elements of a small tensor. Raises ValueError for one that is not in fp32."""
        place = self.tensors[name]
        if place.type != "f32":
            raise unreadable(self.path, f"expected {name} in f32, got {place.type}")
        with self.path.open("rb") as opened:
            opened.seek(place.begin)
            return list(struct.unpack(f"<{place.num_bytes // 4}f", opened.read(place.num_bytes)))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """A value of the metadata. Raises ValueError for a value of another type, and without a default for none."""
        value = self.metadata.get(key)
        if value is None and default is not ...:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(each.__name__ for each in kinds)
            raise ValueError(f"{key}: expected {names} in the metadata of {self.path}, got {value!r:.80}")
        return value


class Header:
    """Reads what comes before the tensors, from the beginning to the end.

    types: elements and bytes of a block of each type, by number, with the type's name.
    """

    def __init__(
        self, path: Path, content: mmap.mmap, types: Mapping[int, tuple[str, int, int]], place: int = 0
    ) -> None:
        self.path = path
        self.content = content
        self.types = types
        self.place = place

    def checked(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (struct.error, OverflowError):
            raise self.too_short() from None
        except UnicodeDecodeError as error:
            raise unreadable(self.path, f"its metadata has a text that is not UTF-8 ({error.reason})") from None

    def read(self) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
        if (magic := self.content[: len(MAGIC)]) != MAGIC:
            raise unreadable(self.path, f"expected the bytes {MAGIC!r} at its beginning, got {magic!r}")
        self.place = len(MAGIC)
        version = self.number("I")
        if version not in VERSIONS:
            expected = " or ".join(map(str, VERSIONS))
            got = f"{version}, a file of the other byte order" if version & 0xFFFF == 0 else f"{version}"
            raise unreadable(self.path, f"expected version {expected} of the format, got {got}")
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        self.check_room(num_keys * SHORTEST_KEY + num_tensors * SHORTEST_TENSOR)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.text()
            metadata[key] = self.value(self.number("I"))
        found = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise unreadable(self.path, f"expected a general.alignment of 1 byte or more, got {alignment!r:.80}")
        begin = -(-self.place // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        for name, type_number, shape, offset in found:
            if name in tensors:
                raise unreadable(self.path, f"it has two tensors {name}")
            tensors[name] = self.locate(name, type_number, shape, begin + offset)
        return metadata, tensors

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, num_dimensions = self.text(), self.number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise unreadable(self.path, f"expected up to {MAX_DIMENSIONS} dimensions of {name}, got {num_dimensions}")
        reversed_shape = [self.number("Q") for _ in range(num_dimensions)]
        type_number, offset = self.number("I"), self.number("Q")
        return name, type_number, tuple(reversed_shape[::-1]), offset

    def locate(self, name: str, type_number: int, shape: tuple[int, ...], begin: int) -> TensorPlace:
        if type_number not in self.types:
            raise unreadable(self.path, f"{name} is of type {type_number}, which the package gguf does not know")
        type_name, block_size, block_bytes = self.types[type_number]
        row = shape[-1] if shape else 1
        if row % block_size or row == 0:
            raise unreadable(self.path, f"expected rows of whole blocks of {block_size} of {name}, got {list(shape)}")
        row_bytes = row // block_size * block_bytes
        num_bytes = prod(shape[:-1]) * row_bytes
        if (end := begin + num_bytes) > len(self.content):
            raise unreadable(
                self.path, f"it is cut off: {name} ends at byte {end:,}, the file at {len(self.content):,}"
            )
        return TensorPlace(type_name, shape, begin, num_bytes, row_bytes)

    def number(self, format: str) -> Any:
        [value] = struct.unpack_from(f"<{format}", self.content, self.place)
        self.place += struct.calcsize(f"<{format}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.check_room(length)
        begin, self.place = self.place, self.place + length
        return self.content[begin : self.place].decode()

    def value(self, type_number: int) -> Any:
        """A number, a text, a list of numbers, or Texts."""
        if type_number in FORMATS:
            return self.number(FORMATS[type_number])
        if type_number == STRING:
            return self.text()
        if type_number != ARRAY:
            raise unreadable(self.path, f"its metadata has a value of the unknown type {type_number}")
        element_type, length = self.number("I"), self.number("Q")
        if element_type in FORMATS:
            format = f"<{length}{FORMATS[element_type]}"
            self.check_room(length)
            values = struct.unpack_from(format, self.content, self.place)
            self.place += struct.calcsize(format)
            return list(values)
        if element_type != STRING:
            raise unreadable(self.path, f"its metadata has a list of the unknown type {element_type}")
        self.check_room(length * 8)
        begin, place = self.place, self.place
        unpack, content = LENGTH.unpack_from, self.content
        for _ in range(length):
            [num_bytes] = unpack(content, place)
            place += num_bytes + LENGTH.size
        self.place = place
        return Texts(begin, length)

    def check_room(self, num_bytes: int) -> None:
        if num_bytes > len(self.content) - self.place:
            raise self.too_short()

    def too_short(self) -> ValueError:
        return unreadable(self.path, f"it is cut off after {len(self.content):,} bytes, before its first tensor")


def known_types() -> dict[int, tuple[str, int, int]]:
    """Of each type of tensors, by number: its name, the elements of a block and the bytes of one."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        expected = f"the package gguf for a file in the format GGUF ({how_to_install('gguf')})"
        raise ArgumentImportError("model", expected, "no such package") from None
    return {int(kind): (kind.name.lower(), *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def unreadable(path: Path, reason: str) -> ValueError:
    return ValueError(f"model: cannot read {path}: {reason}")
