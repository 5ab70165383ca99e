"""The folder of one start of a run, `RUN/attempts/<k>/`: what launcher and agents tell each other through it.

    attempt.json       by the launcher, before anything starts: secret, mark, lifeline (readable by the owner only)
    config.yaml        by the launcher, only when this start differs from config/resolved.yaml (fewer nodes)
    stop.json          by the launcher of a Slurm step: rank 0 is to end in order, the run goes on in a later start
    agent-<rank>.json  by each agent when it can take signals: which process it is
    result.json        by rank 0 at the end of the run: the only proof of success
    exit-<rank>.json   by each agent at its end: exit code, and what went wrong
    logs/              agent-<rank>.log, WORKER-INCARNATION.log, launcher.log
    attempts/latest    link to the newest attempt

Owns names and formats of these files, but for result.json, which is `runtime.build`'s. Files are written whole or not
at all. Does not: decide what follows from them (the launch loop does).
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridsched.errors import FaultError, RunFolderError
from hybridsched.sample_queue.files import refresh_listing

RESULT_FILE = "result.json"  #: written by runtime.build
BEAT_LINE = "@beat"  #: what rank 0 prints now and then where its launcher cannot see the process
ATTEMPT_FILE = "attempt.json"
_WISH_FILE = "stop.json"
_LATEST = "latest"
_MAX_RACES = 64


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """What every process of the attempt has to know. ``launcher``: its lifeline tag, "" when it is not on this host.

    nodes: of a Slurm step, by rank: an agent finds its own rank here, whatever order Slurm started the tasks in.
    """

    run_id: str
    attempt: int
    secret: str
    launch: str
    launcher: str
    socket_dir: str  #: private folder of the launcher's host; "": agents make their own
    config: str = "config/resolved.yaml"  #: what this attempt works with, below the run folder
    nodes: tuple[str, ...] = ()
    batch_host: str = ""  #: node of the launch loop, in a Slurm job
    batch_address: str = ""  #: HOST:PORT at which that node's Slurm daemon answers
    can_requeue: bool = False  #: the job may be put back into the queue
    note: str = ""  #: what is different this time, for people


@dataclass(frozen=True, slots=True)
class Ending:
    """How one process, or a whole attempt, ended. ``kind``, ``text``: of the error, "" when there was none.

    suspects: ranks whose nodes may be lost.
    """

    exit_code: int
    kind: str = ""
    text: str = ""
    traceback: str = ""
    rank: int = 0
    suspects: tuple[int, ...] = ()


def new_attempt(run_folder: Path, run_id: str, launch: str, launcher: str, socket_dir: str) -> tuple[Path, AttemptInfo]:
    """Create the next attempt's folder and make it the latest. Raises RunFolderError.

    ``launch`` is of the launcher; the attempt's own mark has its number in it.
    """
    parent = run_folder / "attempts"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_MAX_RACES):
            known = [int(entry.name) for entry in os.scandir(parent) if entry.name.isdigit()]
            number = max(known, default=0) + 1
            folder = parent / str(number)
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue  # another launcher took the number
            (folder / "logs").mkdir()
            info = AttemptInfo(run_id, number, secrets.token_hex(16), f"{launch}.{number}", launcher, socket_dir)
            write_attempt(folder, info)
            _point(parent / _LATEST, str(number))
            return folder, info
    except OSError as error:
        raise RunFolderError(
            f"{parent}: cannot be written: {error.strerror or error}; make room, or correct it"
        ) from error
    raise RunFolderError(f"{parent}: {_MAX_RACES} other launchers took a number in turn; start only one")


def write_attempt(folder: Path, info: AttemptInfo) -> None:
    """attempt.json, readable by the owner only."""
    _write(folder / ATTEMPT_FILE, asdict(info), private=True)


def read_attempt(folder: Path) -> AttemptInfo:
    """attempt.json. Raises FaultError."""
    data = _read(folder / ATTEMPT_FILE)
    try:
        if data is None:
            return _missing(folder / ATTEMPT_FILE)
        return AttemptInfo(**{**data, "nodes": tuple(data.get("nodes", ()))})
    except TypeError as error:
        raise FaultError(f"{folder / ATTEMPT_FILE}: written by another version of hybridsched ({error})") from error


def write_wish(folder: Path) -> None:
    """Ask rank 0 for an orderly end."""
    _write(folder / _WISH_FILE, {"stop": "requeue"})


def read_wish(folder: Path, *, late: bool = False) -> bool:
    """Whether an orderly end is asked for. late: on a network file system, which remembers what was not there."""
    if late:
        refresh_listing(folder)
    return _read(folder / _WISH_FILE) is not None


def write_agent(folder: Path, rank: int, tag: str) -> None:
    """An agent says which process it is (`lifeline.tag_of`)."""
    _write(folder / f"agent-{rank}.json", {"process": tag})


def read_agent(folder: Path, rank: int) -> str | None:
    """The agent's process; None when it has not come so far."""
    data = _read(folder / f"agent-{rank}.json")
    return None if data is None else str(data.get("process", "")) or None


def write_exit(folder: Path, ending: Ending) -> None:
    """How the agent of ``ending.rank`` ended."""
    _write(folder / f"exit-{ending.rank}.json", asdict(ending))


def read_exits(folder: Path) -> list[Ending]:
    """Of all agents that said it, by rank."""
    endings = []
    for path in sorted(folder.glob("exit-*.json")):
        data = _read(path)
        if data is not None:
            known = {key: data[key] for key in Ending.__dataclass_fields__ if key in data}
            endings.append(Ending(**{**known, "suspects": tuple(known.get("suspects", ()))}))
    return sorted(endings, key=lambda ending: ending.rank)


def read_result(folder: Path) -> Ending | None:
    """result.json of rank 0; None when the run did not come to an end of its own."""
    data = _read(folder / RESULT_FILE)
    if data is None or "exit_code" not in data:
        return None
    error = data.get("error") or {}
    code = int(data["exit_code"])
    if code == 0 and not data.get("ok"):
        code = 1
    suspects = tuple(int(rank) for rank in error.get("suspects", ()))
    kind, text, trace = (str(error.get(key, "")) for key in ("kind", "text", "traceback"))
    return Ending(code, kind, text, trace, suspects=suspects)


def _missing(path: Path) -> AttemptInfo:
    raise FaultError(f"{path}: is missing; agents are started by the launch loop (hybridsched run)")


def _read(path: Path) -> dict[str, Any] | None:
    """None: not there, or not whole (a shared filesystem may show a file before its content)."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _write(path: Path, data: dict[str, Any], *, private: bool = False) -> None:
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
    with open(fd, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(data, indent=1) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(tmp, path)


def _point(link: Path, target: str) -> None:
    """Repoint a link without a moment at which it is not there."""
    tmp = link.with_name(f".{link.name}.{os.getpid()}")
    tmp.unlink(missing_ok=True)
    tmp.symlink_to(target)
    os.replace(tmp, link)
