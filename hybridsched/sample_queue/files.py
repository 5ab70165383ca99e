"""Durable files: the few primitives everything in the sample queue (and the owner fence) is built from.

Invariants
    A file gets its final name only when its whole content is on disk: write a hidden ``.tmp`` name, fsync, rename (or
    link), fsync the folder. Nobody ever reads or adopts a ``.tmp``.
    "No space" (ENOSPC, EDQUOT, EFBIG) always surfaces as :class:`NoSpace`, whatever library noticed it, and never
    kills the process (a file size limit would, by SIGXFSZ).

Not here: file formats, policies about names.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridsched.errors import NoSpace, QueueError

NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ERRNO_IN_TEXT = re.compile(r"errno = (\d+)")
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "afs")
_GATHER_LIMIT = min(1024, os.sysconf("SC_IOV_MAX")) if "SC_IOV_MAX" in os.sysconf_names else 16

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only; not in os
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def queue_error(error: Exception, path: Path, doing: str, need: int = 0) -> QueueError:
    """Translate what the OS or HDF5 raised while writing ``path``: NoSpace, or QueueError for everything else.

    HDF5 raises RuntimeError without errno when closing on a full disk, so the text and, last, the free space decide.
    """
    code = error.errno if isinstance(error, OSError) else None
    found = _ERRNO_IN_TEXT.search(str(error))
    if code is None and found:
        code = int(found.group(1))
    if code in NO_SPACE_ERRNOS or (code is None and need > free_bytes(path.parent)):
        why = os.strerror(code) if code is not None else "less space free than the file needs"
        return NoSpace(
            f"{path}: no space while {doing} ({why}; {need} bytes wanted, {free_bytes(path.parent)} free). "
            "Nothing was left behind and nothing is lost: free space or raise the quota (or `ulimit -f`), it is tried "
            "again."
        )
    return QueueError(f"{path}: {doing} failed: {error}. Check the file system and the permissions of the folder.")


def free_bytes(folder: Path) -> int:
    """Bytes an unprivileged user can still write under ``folder``."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def fsync_folder(folder: Path) -> None:
    """Make creations, renames and removals in ``folder`` survive a host crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, durable: bool) -> None:
    """Create ``folder`` and its missing parents; durable: each new name is fsynced into its parent."""
    if folder.is_dir():
        return
    make_folder(folder.parent, durable)
    folder.mkdir(exist_ok=True)
    if durable:
        fsync_folder(folder.parent)


@contextmanager
def surviving_file_size_limit() -> Iterator[None]:
    """Writing beyond RLIMIT_FSIZE gives EFBIG here, in any thread, instead of death by SIGXFSZ.

    Python ignores that signal at start, but embedding programs and MPI launchers may have put the default back. The
    signal is directed at the writing thread, so it is blocked for this thread and swallowed before unblocking.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})
    try:
        yield
    finally:
        while signal.SIGXFSZ not in before and signal.SIGXFSZ in signal.sigpending():
            if signal.sigtimedwait({signal.SIGXFSZ}, 0) is None:
                break
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def gather_write(fd: int, pieces: Sequence[npt.NDArray[Any]], offset: int) -> None:
    """Write contiguous arrays one after another at ``offset`` without joining them first. Handles short writes."""
    rest: list[Any] = [piece for piece in pieces if piece.nbytes]
    while rest:
        batch = rest[:_GATHER_LIMIT]
        written = os.pwritev(fd, batch, offset)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += written
        done = 0
        while done < len(batch) and written >= batch[done].nbytes:
            written -= batch[done].nbytes
            done += 1
        rest = rest[done:]
        if written:
            rest[0] = memoryview(rest[0]).cast("B")[written:]


def start_writeback(fd: int) -> None:
    """Ask the kernel to begin writing dirty pages to the disk now, without waiting: a later fsync has less to do.

    Only a hint; where it is not available, or the file system has no use for it, nothing happens.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def write_fully(fd: int, data: bytes) -> None:
    """``os.write`` until everything is written."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def temporary_name(path: Path) -> Path:
    """Where ``path`` is prepared: hidden, in the same folder."""
    return path.with_name(f".{path.name}.tmp")


def publish(temporary: Path, final: Path, durable: bool) -> None:
    """Give a complete, fsynced file its final name.

    A network file system may repeat a rename whose answer got lost; the repeat fails with ENOENT although the first
    one worked. So a failure counts as success when the final name holds exactly our file.
    """
    ours = os.stat(temporary)
    try:
        os.rename(temporary, final)
    except FileNotFoundError:
        there = os.stat(final)
        if (there.st_size, there.st_ino) != (ours.st_size, ours.st_ino):
            raise
    if durable:
        fsync_folder(final.parent)


def create_exclusive(path: Path, data: bytes, durable: bool) -> None:
    """Create ``path`` with ``data``, complete from its first moment; raises FileExistsError if the name is taken.

    Of several processes (on several hosts) that try, exactly one succeeds: ``link`` is atomic and never overwrites.
    Where the file system has no hard links, O_EXCL decides, and the content follows.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with surviving_file_size_limit():
            _write_new(temporary, data, flags, durable)
            try:
                os.link(temporary, path)
            except FileExistsError:
                # A lost answer again: the link is ours when both names are one file.
                if not os.path.samefile(temporary, path):
                    raise
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _write_new(path, data, flags, durable)
        if durable:
            fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _write_new(path: Path, data: bytes, flags: int, durable: bool) -> None:
    fd = os.open(path, flags, 0o644)
    try:
        write_fully(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def json_bytes(value: Any) -> bytes:
    """One line of JSON in UTF-8 without line end. TypeError or ValueError when ``value`` is not JSON."""
    try:
        return _JSON.encode(value).encode()
    except UnicodeEncodeError:  # lone surrogates are not UTF-8, but survive as escapes
        return _JSON_ESCAPED.encode(value).encode()


def _plain(value: Any) -> Any:
    """``default`` hook of json.dumps: numpy scalars and arrays become numbers and lists; all else is refused."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be stored as JSON")


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)
_JSON_ESCAPED = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), default=_plain)


def lists_late(folder: Path) -> bool:
    """True when ``folder`` is on a file system whose clients cache directory contents (NFS and its like)."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    where = f"{folder.resolve()}/"
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ").rstrip("/") + "/"
        if where.startswith(point) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind.startswith(_NETWORK_FILE_SYSTEMS)


def refresh_listing(folder: Path) -> None:
    """Make an NFS client look at ``folder`` anew: setting its own mode again drops the cached attributes."""
    try:
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode))
    except (PermissionError, FileNotFoundError):
        return  # not the owner, or not there (yet): the cache runs out by itself within a minute
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
