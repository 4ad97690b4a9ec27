"""What a checkpoint is, in few digits, without reading all of it."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pagedattn_serve.loading.checkpoint_files import weight_files
from pagedattn_serve.loading.gguf_file import is_gguf

WHOLE = 64 << 20  # bytes: a file of that size or less is read whole
# Of a larger file: its beginning, where safetensors and GGUF describe the tensors, and a piece out of every step.
HEADER, STEP, PIECE = 4 << 20, 1 << 20, 4096


def checkpoint_digest(directory: Path, load_format: str = "auto") -> bytes:
    """Of config.json and of the files with weights, or of the GGUF file that stands for a directory. Neither names nor
    times of files count.

    A change that lies wholly outside of the pieces that are read is not seen: of a large file, 1 byte of 256 is. Other
    training, another merge, another quantization change every piece.
    """
    files = [directory] if is_gguf(directory) else [directory / "config.json"]
    if load_format != "dummy" and not is_gguf(directory):
        files += weight_files(directory)[0]
    return digest_of(file_digest(file) for file in files)


def file_digest(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        digest.update(opened.read(WHOLE if size <= WHOLE else HEADER))
        for begin in range(HEADER, size, STEP) if size > WHOLE else ():
            opened.seek(begin)
            digest.update(opened.read(PIECE))
    return digest.digest()


def digest_of(parts: Iterable[bytes]) -> bytes:
    """One digest of several of the same size."""
    return hashlib.sha256(b"".join(parts)).digest()
