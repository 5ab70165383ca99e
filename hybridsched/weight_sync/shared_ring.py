"""Memory and places of the same-node hand-over: a ring of bucket slots, the private folder, the socket's path.

Owns allocation and naming. The ring is reserved when it is made, so that a full /dev/shm or memory limit is an error
here and never a SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from hybridsched.errors import WeightSyncError
from hybridsched.weight_sync.plan import ALIGN, Bucket

_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,79}")


class Ring:
    """``nbytes`` of shared memory behind a descriptor, which it owns; two slots used in turn."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self._slot = nbytes // 2
        # Never closed by hand: torch keeps the map alive, but not locked, and closing it under a view is a segfault.
        self._flat: Any = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)

    def view(self, bucket: Bucket) -> Any:
        """The bucket's bytes as a flat uint8 tensor; what lies there changes with the next bucket of this slot."""
        start = bucket.index % 2 * self._slot
        return self._flat[start : start + bucket.nbytes]

    def close(self) -> None:
        """Give the memory back; it lives on while a tensor still views it. Idempotent."""
        if self.fd >= 0:
            self._flat = None
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def slot_bytes(plan: Sequence[Bucket]) -> int:
    """Length of one slot: the longest bucket, rounded up so that both slots are aligned."""
    longest = max((b.nbytes for b in plan), default=0)
    return max(ALIGN, (longest + ALIGN - 1) // ALIGN * ALIGN)


def make_ring(nbytes: int, scratch: Path) -> Ring:
    """Reserve a ring in memory, else as a nameless file in ``scratch``. Raises WeightSyncError if both are full."""
    refusals: list[str] = []
    for place, open_fd in (("shared memory", _memory_fd), (f"scratch folder {scratch}", lambda: _disk_fd(scratch))):
        fd = -1
        try:
            fd = open_fd()
            os.posix_fallocate(fd, 0, nbytes)
            return Ring(fd, nbytes)
        except OSError as error:
            refusals.append(f"{place}: {error.strerror or error}")
            if fd >= 0:
                os.close(fd)
    raise WeightSyncError(
        f"no room for the hand-over ring of {nbytes / 2**20:.1f} MiB ({'; '.join(refusals)}); "
        "lower weight_sync.bucket_bytes or free memory"
    )


def run_folder(run_id: str, folder: Path | None) -> Path:
    """The private folder of one run and user below ``folder`` (default: /dev/shm, else the temporary folder)."""
    shm = Path("/dev/shm")
    base = folder or (shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir()))
    return base / f"hybridsched-{os.getuid()}-{safe_name('run id', run_id)}"


def private_folder(path: Path) -> Path:
    """Make the folder with mode 0700. Raises WeightSyncError when it exists and is not ours alone."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise WeightSyncError(f"cannot make the hand-over folder {path}: {error.strerror or error}") from error
    require_own(path)
    path.chmod(0o700)
    return path


def require_own(path: Path) -> None:
    """Raises WeightSyncError unless ``path`` is a real folder of this user (not a link somebody planted)."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise WeightSyncError(f"{path} is not a folder of this user; remove it or choose another folder")


def safe_name(what: str, name: str) -> str:
    """The name itself. Raises WeightSyncError when it could leave its folder or be no file name."""
    if not _SAFE.fullmatch(name):
        raise WeightSyncError(f"{what} {name!r} may hold only letters, digits, '.', '_' and '-' (80 at most)")
    return name


def via_folder(path: Path, act: Callable[[str], Any]) -> None:
    """bind or connect to a socket whose path may be longer than the 107 bytes a socket address holds."""
    if len(os.fsencode(path)) <= 107:
        act(str(path))
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        act(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to a writer, waiting for it to appear. Raises WeightSyncError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            via_folder(path, sock.connect)
        except OSError as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise WeightSyncError(
                    f"no hand-over writer at {path} within {timeout_s:g} s: {error.strerror or error}"
                ) from error
            time.sleep(0.02)
        else:
            return sock


def _memory_fd() -> int:
    return os.memfd_create("hybridsched-handover", os.MFD_CLOEXEC)


def _disk_fd(scratch: Path) -> int:
    with tempfile.TemporaryFile(dir=scratch) as file:  # nameless from the start; nothing to sweep
        return os.dup(file.fileno())
