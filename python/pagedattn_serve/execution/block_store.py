"""Blocks of the cache on disk, so that prompts find them after a restart, or when they have fallen out of the cache.

    PATH/<fingerprint>/<key>.safetensors

The fingerprint is a hash of all that the content of a block depends on beside its tokens: the engine's
`system_fingerprint` and all weights (`weights_digest.py`). The key is the block's own (`BlockManager`). So a block is
looked for by its name, and several engines may share the directory.

A file is written under another name, and renamed when it is whole. It has two tensors, both uint8: `block`, the bytes
of the block in each cache, one after the other; and `seal`, a hash of fingerprint and key and of the CRC-32 of the
block. What does not fit its seal is never used. The files of a folder are of one size, and begin with the same header.

When all files together take more than they may, those that were not used for longest go.
"""

import logging
import os
import re
import tempfile
import time
import weakref
import zlib
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread, current_thread

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.execution.weights_digest import weights_digest
from pagedattn_serve.loading.directory import prefix_cache_directory

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

FOLDER = re.compile(r"[0-9a-f]{32}")
FILE = re.compile(r"([0-9a-f]{32}|[0-9a-f]{34})\.safetensors")  # a key has one byte more in most groups of layers
SEAL_BYTES = 16
SCAN_SECONDS = 60.0  # between looks at what other engines have written and removed
OLD_SECONDS = 3600.0  # a file that was not renamed for so long never will be
KEPT_SHARE = 0.9  # of the bytes that may be taken, when files had to go
READ_BYTES = 1 << 30  # of a prompt, at most
STEP_BYTES = 32 << 20  # that are taken from the cache between two steps, at most
QUEUE_BYTES = 256 << 20  # that wait to be written, at most
WAIT_SECONDS = 60.0  # for the disk, when the engine has nothing else to do


class BlockFiles:
    """The files of one fingerprint, and the bound for those of all. A thread writes; any thread may read.

    keys: of the blocks that are there, as far as is known, and of those that wait to be written. A block may be gone
        when it is read.

    Raises ArgumentError for a bound below the size of a file, ArgumentOSError for a directory that cannot be written.
    """

    def __init__(self, path: Path, fingerprint: str, block_bytes: int, max_bytes: int) -> None:
        self.keys: set[bytes] = set()
        self._waiting: set[bytes] = set()  # keys of blocks that are to be written
        self.num_read = self.num_written = 0
        self._max_bytes = max_bytes
        self._path, self._directory = path, path / fingerprint
        self._fingerprint = fingerprint.encode()
        empty = {"block": torch.zeros(block_bytes, dtype=torch.uint8), "seal": torch.zeros(SEAL_BYTES).byte()}
        self._header = save(empty)[: -block_bytes - SEAL_BYTES]
        self._file_bytes = len(self._header) + block_bytes + SEAL_BYTES
        if max_bytes < self._file_bytes:
            expected = f"at least {self._file_bytes} bytes, the size of the file of a block"
            raise ArgumentError("prefix_cache_dir_size", expected, max_bytes)
        self._num_bytes = 0  # of all files, at the last look, and what was written since
        self._bad: set[bytes] = set()  # keys of files that are of no use
        self._has_warned = False  # of a disk that does not take files
        prefix_cache_directory(self._directory)
        self._remove_old()
        self.scan()
        self._make_room()

    def expect(self, key: bytes) -> None:
        """Count the block as there: `write` will be called for it."""
        self._waiting.add(key)
        self.keys.add(key)

    def read(self, key: bytes, block: Bytes) -> bool:
        """Read what was written under the key into `block`, [block_bytes]. False if it is not there, or is not what was
        written; then `block` may hold anything."""
        file = self._file(key)
        header, seal = bytearray(len(self._header)), bytearray(SEAL_BYTES)
        try:
            opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # even of a pipe that somebody has put there
            try:
                num_bytes = os.readv(opened, [header, block.data, seal, bytearray(1)])
            finally:
                os.close(opened)
            if num_bytes != self._file_bytes:
                raise ValueError(f"expected {self._file_bytes} bytes, got {num_bytes if num_bytes else 'none'}")
            if header != self._header:
                raise ValueError("expected another header")
            if seal != self._seal(key, block):
                raise ValueError("its seal does not fit")
        except FileNotFoundError:
            if key not in self._waiting:
                self.keys.discard(key)
            return False
        except (OSError, ValueError) as error:
            logger.warning("prefix_cache_dir: %s is ignored: %s", file, error)
            self._bad.add(key)
            self.keys.discard(key)
            return False
        now = time.time_ns()
        with suppress(OSError):  # the file may be another user's, or gone
            os.utime(file, ns=(now, now))
        self.num_read += 1
        return True

    def write(self, key: bytes, block: Bytes) -> None:
        """Make the file of a block. If the disk does not take the file, a warning says so, once."""
        try:
            try:
                self._write_file(key, block)
            except FileNotFoundError:  # somebody has removed the directory
                prefix_cache_directory(self._directory)
                self._write_file(key, block)
        except OSError as error:
            self._waiting.discard(key)
            self.keys.discard(key)
            if not self._has_warned:
                logger.warning("prefix_cache_dir: a block was not written to %s: %s", self._directory, error)
            self._has_warned = True
            return
        self._has_warned = False
        self._bad.discard(key)
        self.keys.add(key)
        self._waiting.discard(key)
        self.num_written += 1
        self._num_bytes += self._file_bytes
        self._make_room()

    def _write_file(self, key: bytes, block: Bytes) -> None:
        unfinished = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, suffix=".tmp", delete=False) as opened:
                unfinished = opened.name
                opened.write(self._header)
                opened.write(block.data)
                opened.write(self._seal(key, block))
            os.replace(unfinished, self._file(key))
        except OSError:
            if unfinished is not None:
                with suppress(OSError):
                    os.unlink(unfinished)
            raise

    def scan(self) -> None:
        """Look what is there."""
        found = {bytes.fromhex(entry.name.partition(".")[0]) for entry in _entries(self._directory, FILE)}
        self.keys |= found - self._bad
        self.keys -= self.keys.copy() - found - self._waiting
        self._num_bytes = sum(num_bytes for _, num_bytes, _ in self._all_files())

    def _make_room(self) -> None:
        """Remove what was not used for longest, if there is more than the bound."""
        if self._num_bytes <= self._max_bytes:
            return
        files = sorted(self._all_files())
        num_bytes = sum(of_file for _, of_file, _ in files)
        for _, of_file, file in files:
            if num_bytes <= self._max_bytes * KEPT_SHARE:
                break
            with suppress(OSError):  # another engine may have removed it
                os.unlink(file)
            num_bytes -= of_file
        self.scan()

    def _all_files(self) -> list[tuple[int, int, str]]:
        """The time of the last use, the size and the path of each file, of all fingerprints."""
        files = []
        for directory in _entries(self._path, FOLDER):
            for entry in _entries(directory.path, FILE):
                with suppress(OSError):
                    status = entry.stat()
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
        return files

    def _remove_old(self) -> None:
        """Remove what an engine left that ended amid a write."""
        for file in self._directory.glob("*.tmp"):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > OLD_SECONDS:
                    file.unlink()

    def _file(self, key: bytes) -> str:
        return f"{self._directory}/{key.hex()}.safetensors"

    def _seal(self, key: bytes, block: Bytes) -> bytes:
        crc = zlib.crc32(block.data).to_bytes(4, "big")
        return blake2b(self._fingerprint + key + crc, digest_size=SEAL_BYTES).digest()


def _entries(directory: str | Path, names: re.Pattern[str]) -> list["os.DirEntry[str]"]:
    """What lies in a directory under such names. Nothing else in it is ever touched."""
    with suppress(OSError), os.scandir(directory) as entries:
        return [entry for entry in entries if names.fullmatch(entry.name)]
    return []


Jobs = SimpleQueue[tuple[bytes, Bytes] | Event | None]  # a block to write; whom to tell that all is written; None ends


class BlockStore:
    """`BlockFiles`, and a thread that writes what one other thread puts. The thread ends with this object and with the
    process, when all is written.

    keys: of the blocks on disk, and of those that are to be written.
    num_at_once: blocks to put between two steps, at most.
    """

    def __init__(self, files: BlockFiles, block_bytes: int) -> None:
        self.files = files
        self.keys = files.keys
        self.num_at_once = max(1, STEP_BYTES // block_bytes)
        self._block_bytes = block_bytes
        self._max_queued = max(self.num_at_once, QUEUE_BYTES // block_bytes)
        self._queue: Jobs = SimpleQueue()
        thread = Thread(target=_write_all, args=(files, self._queue), name="pagedattn-store", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._queue, thread, os.getpid())

    @property
    def has_room(self) -> bool:
        """Whether `num_at_once` blocks may be put."""
        return self._queue.qsize() + self.num_at_once <= self._max_queued

    def put(self, key: bytes, block: Bytes) -> None:
        """Let a block be written, if there is room."""
        self.files.expect(key)
        self._queue.put((key, block))

    def wait(self) -> bool:
        """Return when all is written that was put before; or after WAIT_SECONDS, with False."""
        written = Event()
        self._queue.put(written)
        return written.wait(WAIT_SECONDS)

    def read(self, keys: list[bytes]) -> dict[bytes, Bytes]:
        """The blocks of these keys, up to the first that is not there; not more than may lie in memory beside the
        cache. Those after a gap are looked at all the same: `keys` loses those that are of no use."""
        keys = keys[: max(1, READ_BYTES // self._block_bytes)]
        memory = np.empty((len(keys), self._block_bytes), dtype=np.uint8)  # at once: in few large pages
        blocks: dict[bytes, Bytes] = {}
        has_gap = False
        for key, block in zip(keys, memory, strict=True):
            if not self.files.read(key, block):
                has_gap = True
            elif not has_gap:
                blocks[key] = block
        return blocks


def _write_all(files: BlockFiles, queue: Jobs) -> None:
    """The thread."""
    scan_due = time.monotonic() + SCAN_SECONDS
    while True:
        with suppress(Empty):
            item = queue.get(timeout=SCAN_SECONDS)
            if item is None:
                return
            if isinstance(item, Event):
                item.set()
            else:
                files.write(*item)
        if time.monotonic() >= scan_due:
            files.scan()
            scan_due = time.monotonic() + SCAN_SECONDS


def _end(queue: Jobs, thread: Thread, owner: int) -> None:
    """owner: the process that has the thread. One that was forked has not."""
    if os.getpid() == owner:
        queue.put(None)
        if thread is not current_thread():  # the garbage may be collected there
            thread.join(WAIT_SECONDS)


def open_block_store(system_fingerprint: str, runner: ModelRunner, cache_config: CacheConfig) -> BlockStore:
    """The store in `prefix_cache_dir`. Raises ArgumentError where blocks cannot be kept on disk."""
    path, model = cache_config.prefix_cache_dir, runner.model
    assert path is not None
    if runner.device != "cpu":
        raise ArgumentError("prefix_cache_dir", f"None on {runner.device}: blocks on disk are for the CPU", path)
    if model.states:
        raise ArgumentError("prefix_cache_dir", f"None, as {model.architecture} keeps states beside its blocks", path)
    block_bytes = runner.cache_engine.block_bytes
    facts = f"{system_fingerprint} {cache_config.windows} {block_bytes} ".encode() + weights_digest(model)
    name = blake2b(facts, digest_size=16).hexdigest()
    files = BlockFiles(Path(path).expanduser(), name, block_bytes, cache_config.prefix_cache_dir_size)
    logger.info("prefix_cache_dir: %d blocks in %s", len(files.keys), Path(path, name))
    return BlockStore(files, block_bytes)
