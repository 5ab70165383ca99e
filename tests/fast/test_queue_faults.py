"""Full disks, quotas and kills in the middle of writing: nothing torn is read, nothing is left, nothing is lost."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
from queue_helpers import in_child, killed_child, make_samples, plain, segment_id

from hybridsched.errors import NoSpace
from hybridsched.sample_queue import files
from hybridsched.sample_queue.files import queue_error
from hybridsched.sample_queue.log import FileChainedLog, read_chain
from hybridsched.sample_queue.segment import read_segment
from hybridsched.sample_queue.store import FileSegmentStore

BIG = make_samples(range(4), n=8, length=4000)  # about 1.2 MB
SMALL = make_samples([7])

_MS_PRIVATE_RECURSIVE = (1 << 18) | (1 << 14)
_CLONE_NEWNS = 0x20000


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def all_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def refused(work: Callable[[], Any]) -> str:
    with pytest.raises(NoSpace) as error:
        work()
    return str(error.value)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_file_size_limit_is_no_space_and_no_death(tmp_path: Path, handler: signal.Handlers) -> None:
    def work() -> tuple[str, list[str], int, int]:
        store = FileSegmentStore(tmp_path, "run-1")
        store.write(segment_id(0), SMALL)
        signal.signal(signal.SIGXFSZ, handler)
        before = open_files()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        message = refused(lambda: store.write(segment_id(1), BIG))
        left, leaked = all_files(tmp_path), open_files() - before
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        return message, left, leaked, len(store.write(segment_id(1), BIG).rows)

    message, left, leaked, rows = in_child(work)
    assert "7.0.123-00000001.h5: no space while sealing a segment (File too large" in message
    assert (left, leaked, rows) == (["7.0.123-00000000.h5", "queue.json"], 0, 4)


def test_a_file_size_limit_inside_hdf5s_own_metadata(tmp_path: Path) -> None:
    def work() -> tuple[str, list[str], int]:
        store = FileSegmentStore(tmp_path, "run-1")
        store.write(segment_id(0), SMALL)
        before = open_files()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        message = refused(lambda: store.write(segment_id(1), SMALL))
        return message, all_files(tmp_path), open_files() - before

    message, left, leaked = in_child(work)
    assert "no space" in message
    assert (left, leaked) == (["7.0.123-00000000.h5", "queue.json"], 0)


def on_small_tmpfs(folder: Path, size: int, work: Callable[[], Any]) -> Any:
    """Run ``work`` in a child that alone sees a tmpfs of ``size`` bytes at ``folder``; it vanishes with the child."""
    libc = ctypes.CDLL(None, use_errno=True)

    def child() -> Any:
        if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, _MS_PRIVATE_RECURSIVE, None) != 0:
            return None
        if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) != 0:
            return None
        return work()

    result = in_child(child)
    if result is None:
        pytest.skip("mounting a private tmpfs needs root; the file size limit tests cover the same code")
    return result


def test_a_full_disk_in_the_middle_of_payload(tmp_path: Path) -> None:
    def work() -> tuple[str, list[str], int, int, list[int]]:
        store = FileSegmentStore(tmp_path, "run-1")
        before, free = open_files(), store.free_bytes()
        message = refused(lambda: store.write(segment_id(0), BIG))
        left = all_files(tmp_path)
        leaked = (open_files() - before, free - store.free_bytes())
        store.write(segment_id(0), SMALL)
        return message, left, *leaked, [s.sample_uid for s in store.read(segment_id(0))]

    message, left, leaked, space, uids = on_small_tmpfs(tmp_path, 512 << 10, work)
    assert "No space left on device" in message
    assert (left, leaked, uids) == (["queue.json"], 0, [7])
    assert space <= 4096  # the producer's folder


def test_a_disk_without_a_single_free_page_and_its_recovery(tmp_path: Path) -> None:
    def work() -> tuple[str, list[str], int, list[int]]:
        store = FileSegmentStore(tmp_path, "run-1")
        store.write(segment_id(0), SMALL)
        filler = tmp_path / "filler"
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                before = open_files()
        message = refused(lambda: store.write(segment_id(1), SMALL))
        left, leaked = all_files(tmp_path), open_files() - before + 1
        filler.unlink()
        store.write(segment_id(1), SMALL)
        return message, left, leaked, [s.sample_uid for s in store.read(segment_id(1))]

    message, left, leaked, uids = on_small_tmpfs(tmp_path, 256 << 10, work)
    assert "no space" in message
    assert (left, leaked, uids) == (["7.0.123-00000000.h5", "filler", "queue.json"], 0, [7])


def test_an_append_on_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    entries = [{"uid": uid, "text": "x" * 50} for uid in range(1000)]

    def work() -> tuple[str, int, int, list[int]]:
        log = FileChainedLog(tmp_path, "accept", "a")
        log.append(entries[:1])
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        message = refused(lambda: log.append(entries[1:]))
        size, position = os.path.getsize(tmp_path / "accept" / "a.jsonl"), log.position
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        log.append(entries[1:3])
        assert size < 500
        return message, position, log.position, [entry["uid"] for entry in log.entries()]

    message, failed, position, uids = in_child(work)
    assert "no space while appending" in message
    assert (failed, position, uids) == (1, 3, [0, 1, 2])
    assert len(read_chain(tmp_path, "accept", "a")) == 3


def test_the_text_of_an_hdf5_error_tells_no_space(tmp_path: Path) -> None:
    error = RuntimeError("Unable to flush file's cached information (file write failed: errno = 28, error message ...)")
    assert isinstance(queue_error(error, tmp_path / "x", "closing"), NoSpace)
    assert not isinstance(queue_error(RuntimeError("no idea"), tmp_path / "x", "closing", 10), NoSpace)
    assert isinstance(queue_error(RuntimeError("no idea"), tmp_path / "x", "closing", 1 << 60), NoSpace)


# ------------------------------------------------------------------ kill -9 at every system call


class Killer:
    """Lets the process die at its ``n``-th write, sync or rename: before it, or (torn) after half of a write."""

    def __init__(self, n: int, torn: bool) -> None:
        self.left, self.torn = n, torn
        self.pwritev, self.fsync, self.rename = os.pwritev, os.fsync, os.rename

    def install(self) -> None:
        os.pwritev, os.fsync, os.rename = self._pwritev, self._fsync, self._rename  # type: ignore[assignment]

    def _step(self, half: Callable[[], Any] = lambda: None) -> None:
        self.left -= 1
        if self.left == 0:
            if self.torn:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def _pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:
        first = views[0]
        self._step(lambda: self.pwritev(fd, [first[: len(first) // 2]], offset))
        return self.pwritev(fd, views, offset)

    def _fsync(self, fd: int) -> None:
        self._step(lambda: self.fsync(fd))
        self.fsync(fd)

    def _rename(self, source: Any, target: Any) -> None:
        self._step(lambda: self.rename(source, target))
        self.rename(source, target)


@pytest.mark.parametrize("torn", [False, True])
def test_killed_at_any_moment_a_segment_is_there_completely_or_not_at_all(tmp_path: Path, torn: bool) -> None:
    content = make_samples(range(2))
    survived, unsealed, sealed = 0, 0, 0
    for n in range(1, 200):
        folder = tmp_path / str(n)
        FileSegmentStore(folder, "run-1").write(segment_id(0), make_samples([99]))

        def work(folder: Path = folder, n: int = n) -> None:
            store = FileSegmentStore(folder, "run-1")
            files._GATHER_LIMIT = 2  # many small writes instead of one: more places to die at
            Killer(n, torn).install()
            store.write(segment_id(1), content)

        if killed_child(work) == 0:
            survived = n
            break
        store = FileSegmentStore(folder, "run-1")
        found = store.list()
        assert segment_id(0) in found
        if segment_id(1) in found:
            sealed += 1
            assert [plain(s) for s in content] == [plain(s) for s in store.read(segment_id(1))]
        else:
            unsealed += 1
            assert [segment_id(0)] == found
        store.clean_tmp("node0.0")
        store.write(segment_id(1), content)
        assert [segment_id(0), segment_id(1)] == store.list()
        assert [name for name in all_files(folder) if name.endswith(".tmp")] == []
    assert survived > 20, "every write, both syncs and the rename were hit"
    assert unsealed >= 20
    assert sealed >= 1


def test_a_leftover_that_looks_complete_is_not_adopted(tmp_path: Path) -> None:
    def work() -> None:
        store = FileSegmentStore(tmp_path, "run-1")
        killer = Killer(10**6, False)
        killer.install()
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        store.write(segment_id(0), SMALL)

    assert killed_child(work) == signal.SIGKILL
    store = FileSegmentStore(tmp_path, "run-1")
    (leftover,) = store.path(segment_id(0)).parent.iterdir()
    assert [s.sample_uid for s in read_segment(leftover)] == [7], "it is complete, and still not part of the queue"
    assert h5py.is_hdf5(leftover)
    assert store.list() == []
