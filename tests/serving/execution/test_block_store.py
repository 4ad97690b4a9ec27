"""Blocks on disk: what comes back is what was written, and nothing else ever does."""

import logging
import os
import resource
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from server_process import WAIT_SECONDS

from pagedattn_serve.execution import block_store
from pagedattn_serve.execution.block_store import BlockFiles, BlockStore, Bytes

NUM_BYTES = 1000
FINGERPRINT, OTHER = "0123456789abcdef" * 2, "f" * 32
KEY, KEY_OF_GROUP = bytes(range(16)), bytes(range(16)) + b"\x01"


def block(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(256, size=NUM_BYTES, dtype=np.uint8)


def files_in(path: Path, fingerprint: str = FINGERPRINT, max_bytes: int = 1 << 20) -> BlockFiles:
    return BlockFiles(path, fingerprint, NUM_BYTES, max_bytes)


def file_of(path: Path, key: bytes = KEY) -> Path:
    return path / FINGERPRINT / f"{key.hex()}.safetensors"


def read(files: BlockFiles, key: bytes) -> Bytes | None:
    found = np.zeros(NUM_BYTES, dtype=np.uint8)
    return found if files.read(key, found) else None


def same(found: Bytes | None, expected: Bytes) -> bool:
    return found is not None and found.dtype == np.uint8 and np.array_equal(found, expected)


def test_blocks_come_back(tmp_path: Path) -> None:
    files = files_in(tmp_path / "made" / "for us")
    for seed, key in enumerate((KEY, KEY_OF_GROUP)):
        assert read(files, key) is None
        files.write(key, block(seed))
    assert file_of(tmp_path / "made" / "for us").stat().st_mode & 0o777 == 0o600
    for reader in (files, files_in(tmp_path / "made" / "for us")):
        assert reader.keys == {KEY, KEY_OF_GROUP}
        assert same(read(reader, KEY), block(0)) and same(read(reader, KEY_OF_GROUP), block(1))
    with safe_open(file_of(tmp_path / "made" / "for us"), "np") as opened:  # as others read it
        assert set(opened.keys()) == {"block", "seal"} and same(opened.get_tensor("block"), block(0))


def damages(written: bytes) -> dict[str, bytes]:
    """What may stand in a file in the place of what was written."""
    begin = len(written) - NUM_BYTES - block_store.SEAL_BYTES
    wrong = {f"first {end} bytes": written[:end] for end in (0, 1, 8, begin, begin + 1, len(written) - 1)}
    wrong |= {"a byte more": written + b"\0", "twice": written * 2, "text": b"no block" * 200}
    for place in (0, 8, begin - 1, begin, begin + NUM_BYTES // 2, begin + NUM_BYTES, len(written) - 1):
        wrong[f"bit of byte {place}"] = written[:place] + bytes([written[place] ^ 16]) + written[place + 1 :]
    return wrong


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of block(0) under KEY."""
    path = tmp_path_factory.mktemp("written")
    files_in(path).write(KEY, block(0))
    return file_of(path).read_bytes()


def test_a_wrong_file_is_ignored(tmp_path: Path, written: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """With one warning. The next write puts it right."""
    for name, content in damages(written).items():
        files = files_in(tmp_path)
        file_of(tmp_path).write_bytes(content)
        files.scan()
        assert files.keys == {KEY}
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert read(files, KEY) is None, name
        [record] = caplog.records
        assert record.getMessage().startswith(f"prefix_cache_dir: {file_of(tmp_path)} is ignored: "), name
        files.scan()
        assert files.keys == set()
        files.write(KEY, block(1))
        assert files.keys == {KEY} and same(read(files, KEY), block(1))


def test_a_file_in_the_place_of_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A block of another key, so of another salt, or of another model, which somebody has copied."""
    files_in(tmp_path).write(KEY, block(0))
    files_in(tmp_path, OTHER).write(KEY_OF_GROUP, block(0))
    shutil.copy(file_of(tmp_path), file_of(tmp_path, bytes(16)))
    shutil.copy(tmp_path / OTHER / f"{KEY_OF_GROUP.hex()}.safetensors", tmp_path / FINGERPRINT)
    file_of(tmp_path, b"\1" * 16).mkdir()
    os.mkfifo(file_of(tmp_path, b"\2" * 16))
    files = files_in(tmp_path)
    assert len(files.keys) == 5
    for key in (bytes(16), KEY_OF_GROUP, b"\1" * 16, b"\2" * 16):
        assert read(files, key) is None
    assert len(caplog.records) == 4
    assert same(read(files, KEY), block(0))


def test_reading_leaves_no_descriptor_open(tmp_path: Path, written: bytes) -> None:
    """Be the file right, wrong or gone."""
    files = files_in(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for content in (written, written[:-1]):
        file_of(tmp_path).write_bytes(content)
        assert (read(files, KEY) is None) == (content != written)
    file_of(tmp_path).unlink()
    assert read(files, KEY) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_two_engines_share_a_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = files_in(tmp_path), files_in(tmp_path)
    first.write(KEY, block(0))
    second.write(KEY, block(0))
    assert same(read(first, KEY), block(0))
    second.write(KEY_OF_GROUP, block(1))
    first.scan()
    assert same(read(first, KEY_OF_GROUP), block(1))
    file_of(tmp_path).unlink()
    assert read(first, KEY) is None and KEY not in first.keys
    second.scan()
    assert second.keys == {KEY_OF_GROUP}
    assert caplog.records == []  # a file that has gone is nothing to worry about


def test_a_wrong_file_that_was_put_right_may_go_and_come_back(tmp_path: Path, written: bytes) -> None:
    files = files_in(tmp_path)
    file_of(tmp_path).write_bytes(written[:-1])
    assert read(files, KEY) is None
    files.write(KEY, block(0))
    file_of(tmp_path).unlink()
    assert read(files, KEY) is None
    files_in(tmp_path).write(KEY, block(0))
    files.scan()
    assert files.keys == {KEY}


def test_what_waits_to_be_written_counts_as_there(tmp_path: Path) -> None:
    """Or a block that waits while the thread looks at the disk would be asked for, and written, once more."""
    files = files_in(tmp_path)
    files.expect(KEY)
    files.scan()
    assert read(files, KEY) is None and files.keys == {KEY}
    files.write(KEY, block(0))
    assert same(read(files, KEY), block(0))
    file_of(tmp_path).unlink()
    files.scan()
    assert files.keys == set()


def test_what_was_not_used_for_longest_goes(tmp_path: Path, written: bytes) -> None:
    """Of the files of all models, and never anything else."""
    file_bytes = len(written)
    others = files_in(tmp_path, OTHER)
    others.write(KEY, block(9))
    os.utime(tmp_path / OTHER / f"{KEY.hex()}.safetensors", (0, 0))
    foreign = [tmp_path / "notes.txt", tmp_path / FINGERPRINT / "model.safetensors", tmp_path / "models" / "a"]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x" * file_bytes)
    files = files_in(tmp_path, max_bytes=5 * file_bytes)
    keys = [bytes([i]) * 16 for i in range(5)]
    for i, key in enumerate(keys[:4]):
        files.write(key, block(i))
        os.utime(file_of(tmp_path, key), (i + 1, i + 1))
    assert same(read(files, keys[0]), block(0))  # which makes it the last one used
    files.write(keys[4], block(4))
    # The sixth file was one too many, and room is made for one more.
    assert files.keys == {keys[0], keys[2], keys[3], keys[4]}
    assert read(others, KEY) is None and others.keys == set()
    assert all(file.exists() for file in foreign)
    total = sum(file.stat().st_size for file in tmp_path.glob(f"{FINGERPRINT}/{'[0-9a-f]' * 32}.safetensors"))
    assert total <= 5 * file_bytes
    assert files_in(tmp_path, max_bytes=3 * file_bytes).keys == {keys[0], keys[4]}  # at once, and with room for more
    with pytest.raises(ValueError, match=rf"^prefix_cache_dir_size: expected at least {file_bytes} bytes, .*, got 99$"):
        files_in(tmp_path, max_bytes=99)


def test_no_more_goes_than_has_to(tmp_path: Path, written: bytes) -> None:
    """Where blocks of another engine are larger."""
    other = BlockFiles(tmp_path, OTHER, 10 * NUM_BYTES, 1 << 20)
    other.write(KEY, np.zeros(10 * NUM_BYTES, dtype=np.uint8))
    os.utime(tmp_path / OTHER / f"{KEY.hex()}.safetensors", (0, 0))
    files = files_in(tmp_path, max_bytes=10 * len(written))
    for i in range(6):
        files.write(bytes([i]) * 16, block(i))
    assert len(files.keys) == 6 and not list((tmp_path / OTHER).iterdir())


def test_a_disk_that_takes_no_more(tmp_path: Path, written: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and the engine goes on; nothing half written is left."""
    files = files_in(tmp_path)
    files.expect(KEY)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(written) - 1, limits[1]))
    try:
        files.write(KEY, block(0))
        files.write(KEY_OF_GROUP, block(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.getMessage()[:36] for record in caplog.records] == ["prefix_cache_dir: a block was not wr"]
    assert files.keys == set() and list((tmp_path / FINGERPRINT).iterdir()) == []
    files.write(KEY, block(0))
    assert same(read(files, KEY), block(0))
    shutil.rmtree(tmp_path / FINGERPRINT)
    (tmp_path / FINGERPRINT).touch()
    files.write(KEY, block(0))
    assert files.keys == set() and len(caplog.records) == 2


@pytest.mark.parametrize("removed", [".", FINGERPRINT])
def test_a_directory_that_is_removed(tmp_path: Path, removed: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is made again, for this user alone."""
    path = tmp_path / "blocks"
    files = files_in(path)
    files.write(KEY, block(0))
    shutil.rmtree(path / removed)
    files.write(KEY_OF_GROUP, block(1))
    assert read(files, KEY) is None and same(read(files, KEY_OF_GROUP), block(1))
    assert file_of(path).parent.stat().st_mode & 0o777 == 0o700
    assert caplog.records == []


def test_what_an_interrupted_write_leaves(tmp_path: Path, written: bytes) -> None:
    """It is never found, and goes when it is old: another engine may be amid a write."""
    files_in(tmp_path)
    old, new = (tmp_path / FINGERPRINT / f"{name}.tmp" for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(written)
    hours_ago = time.time() - 2 * block_store.OLD_SECONDS
    os.utime(old, (hours_ago, hours_ago))
    assert files_in(tmp_path).keys == set()
    assert [file.exists() for file in (old, new)] == [False, True]


def test_a_store_that_is_collected_by_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As garbage is, whichever thread allocates. Catches a thread that waits for its own end, or for its own lock."""
    files = files_in(tmp_path)
    stores = [BlockStore(files, NUM_BYTES)]
    write = files.write

    def last_write(key: bytes, of_key: Bytes) -> None:
        write(key, of_key)
        stores.clear()

    monkeypatch.setattr(files, "write", last_write)
    errors: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: errors.append(error))
    [thread] = [each for each in threading.enumerate() if each.name == "pagedattn-store"]
    stores[0].put(KEY, block(0))
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive() and not errors


def test_a_forked_process_ends_without_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a child that waits at its end for a thread that it has not got."""
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    store = BlockStore(files_in(tmp_path), NUM_BYTES)
    monkeypatch.undo()
    [thread] = [each for each in threading.enumerate() if each.name == "pagedattn-store"]
    queue = store._queue
    del store
    assert thread.is_alive() and queue.empty()
    queue.put(None)
    thread.join(WAIT_SECONDS)


def test_a_thread_writes(tmp_path: Path) -> None:
    """All that was put is written when `wait` returns, and when the store ends."""
    store = BlockStore(files_in(tmp_path), NUM_BYTES)
    keys = [bytes([i]) * 16 for i in range(50)]
    for i, key in enumerate(keys[:30]):
        assert store.has_room
        store.put(key, block(i))
        assert key in store.keys
    store.wait()
    assert files_in(tmp_path).keys == set(keys[:30])
    found = store.read([*keys[:3], keys[40], keys[4]])  # what follows a gap is of no use
    assert list(found) == keys[:3] and all(same(found[key], block(i)) for i, key in enumerate(keys[:3]))
    for i, key in enumerate(keys[30:], 30):
        store.put(key, block(i))
    del store
    assert files_in(tmp_path).keys == set(keys)
