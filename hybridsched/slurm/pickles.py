"""Files of submitted functions: pickles and the markers that say how a rank ended.

Loading a pickle runs whatever is in it. On a cluster several people share file systems, so a pickle counts only when
this user owns it and nobody else may write it. Files are written whole, for their owner only.

    JOB_submitted.pkl     function and arguments            JOB_RANK_result.pkl    ("success", value) | ("error", trace)
    JOB_RANK_exit.json    {"ok": ...}, written after the result: our own proof of how a rank ended; stays after `clean`
"""

from __future__ import annotations

import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import cloudpickle

from hybridsched.errors import UserError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def save(value: Any, path: Path) -> None:
    """Pickle. Raises what cloudpickle raises, and OSError."""
    _write_whole(path, lambda stream: cloudpickle.dump(value, stream, pickle.HIGHEST_PROTOCOL))


def load_own(path: Path) -> Any:
    """The value in a pickle of this user. Raises UserError when it is somebody else's, missing or damaged."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    with open(fd, "rb") as stream:
        found = os.fstat(stream.fileno())
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path}: belongs to user {found.st_uid}, not to you: not loaded (it could run anything)")
        if found.st_mode & _OTHERS_WRITE:
            raise UserError(f"{path}: others may write it: not loaded (it could run anything); chmod go-w it")
        try:
            return pickle.load(stream)
        except (EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{path}: is damaged ({error})") from error


def marker_of(folder: Path, job_id: str, rank: int) -> Path:
    """Where a rank says how it ended."""
    return folder / f"{job_id}_{rank}_exit.json"


def mark_end(path: Path, *, ok: bool) -> None:
    """Say how a rank ended. Raises OSError."""
    _write_whole(path, lambda stream: stream.write(json.dumps({"ok": ok}).encode()))


def end_of(path: Path) -> bool | None:
    """Whether the rank succeeded; None when it has not said anything (yet)."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return bool(data.get("ok")) if isinstance(data, dict) else None


def _write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """The file is complete or not there; mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
