"""An append-only log on disk, chained at forks: the accept log and the ledger. Implements base.ChainedLog.

One file per controller incarnation, ``<folder>/<name>/<incarnation>.jsonl``:

    {"log":"accept","run_id":"r","incarnation":"b","ordinal":2,"parent":"a","parent_position":120}
    {"position":120,"crc32":1234567,"entries":[{...},{...}]}           one line per append
    ...

Invariants
    One append is one line, one write, one fsync: after a crash it is there as a whole or not at all. Only the last
    line of a file can be torn, and it was never acknowledged, so it is ignored; any other damaged line is an error.
    A file is written by the incarnation that created it and never again. A later incarnation names its parent and the
    position at which it goes on; lines behind that position stay in the parent's file, but not in the chain.

Not here: what the entries mean (ledger.py). One thread at a time appends.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridsched.errors import QueueError
from hybridsched.sample_queue import files

Entry = dict[str, Any]

ACCEPT_LOG = "accept"
LEDGER = "ledger"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class LogHeader:
    """First line of a log file. ``ordinal`` counts the incarnations of this log from 1; the highest is the newest."""

    log: str
    run_id: str
    incarnation: str
    ordinal: int
    parent: str | None
    parent_position: int


class FileChainedLog:
    """The log of one controller incarnation, open for appending.

    parent: (incarnation, position) this one continues from, None for a fresh run. Creates the file; QueueError when
    the incarnation has one already, when the parent is missing or shorter than ``position``, or when the log is of
    another run. durability as in the configuration: "host-crash" fsyncs every append.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        incarnation: str,
        parent: tuple[str, int] | None = None,
        durability: str = "host-crash",
        *,
        run_id: str = "",
    ) -> None:
        self._folder, self._name, self.incarnation = Path(folder), name, incarnation
        self._durable = durability == "host-crash"
        self._broken = ""
        parent_name, self._position = parent if parent is not None else (None, 0)
        if parent_name is not None:
            self._check_parent(parent_name, self._position, run_id)
        ordinal = 1 + max((header.ordinal for header in log_headers(self._folder, name)), default=0)
        self.header = LogHeader(name, run_id, incarnation, ordinal, parent_name, self._position)
        self._path = _path(self._folder, name, incarnation)
        self._fd, self._size = self._create()

    def _check_parent(self, parent: str, position: int, run_id: str) -> None:
        header = _read_header(_path(self._folder, self._name, parent))
        if header.run_id != run_id:
            raise QueueError(
                f"{_path(self._folder, self._name, parent)}: is the log of run {header.run_id!r}, not {run_id!r}"
            )
        if position < 0:
            raise QueueError(f"{self._name} log: a fork position cannot be negative ({position})")
        there = chain_length(self._folder, self._name, parent)
        if position > there:
            raise QueueError(
                f"{_path(self._folder, self._name, parent)}: the checkpoint continues at entry {position}, but only "
                f"{there} are there: the log lost its end, or the checkpoint is of another run. Resume from an older "
                "checkpoint."
            )

    def _create(self) -> tuple[int, int]:
        data = files.json_bytes({slot: getattr(self.header, slot) for slot in LogHeader.__slots__}) + b"\n"
        try:
            files.make_folder(self._path.parent, self._durable)
            files.create_exclusive(self._path, data, self._durable)
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), len(data)
        except FileExistsError as error:
            raise QueueError(
                f"{self._path}: exists already. Every start of the controller is a new incarnation with its own file."
            ) from error
        except OSError as error:
            raise files.queue_error(error, self._path, "creating the log", len(data)) from error

    def append(self, entries: Sequence[Entry]) -> int:
        """Append durably, all or nothing; returns the new position. On NoSpace nothing was appended: try again."""
        if self._fd < 0 or self._broken:
            raise QueueError(f"{self._path}: {self._broken or 'is closed'}; the controller has to start anew")
        if not entries:
            return self._position
        line = _line(self._position, entries)
        try:
            with files.surviving_file_size_limit():
                files.write_fully(self._fd, line)
                if self._durable:
                    os.fdatasync(self._fd)
        except OSError as error:
            self._take_back()
            raise files.queue_error(error, self._path, "appending", len(line)) from error
        self._size += len(line)
        self._position += len(entries)
        return self._position

    def _take_back(self) -> None:
        """Remove a half-written line, so that the next append does not follow a torn one."""
        try:
            os.ftruncate(self._fd, self._size)
            if self._durable:
                os.fsync(self._fd)
        except OSError as error:
            self._broken = f"a failed append could not be taken back ({error})"

    @property
    def position(self) -> int:
        """Entries in the chain."""
        return self._position

    def entries(self, start: int = 0) -> list[Entry]:
        """Entries along the chain from ``start``."""
        return read_chain(self._folder, self._name, self.incarnation, start)

    def close(self) -> None:
        """Close the file. Idempotent; appending afterwards is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ------------------------------------------------------------------ reading


def read_chain(folder: Path, name: str, incarnation: str, start: int = 0) -> list[Entry]:
    """Entries from ``start`` along the chain that ends with ``incarnation``. QueueError names file and line."""
    parts: list[list[Entry]] = []
    for header, end in _ancestry(folder, name, incarnation):
        if end is not None and end <= start:
            break
        first = max(header.parent_position, start)
        own = [
            entry
            for position, entry in _own_entries(_path(folder, name, header.incarnation), header)
            if position >= first and (end is None or position < end)
        ]
        if end is not None and first + len(own) < end:
            raise QueueError(
                f"{_path(folder, name, header.incarnation)}: ends at entry {first + len(own)}, but a later incarnation "
                f"continues at {end}: the log lost lines"
            )
        parts.append(own)
    return [entry for part in reversed(parts) for entry in part]


def chain_length(folder: Path, name: str, incarnation: str) -> int:
    """Entries in the chain of ``incarnation``; only its own file is read."""
    path = _path(folder, name, incarnation)
    header = _read_header(path)
    return header.parent_position + sum(1 for _ in _own_entries(path, header))


def log_headers(folder: Path, name: str) -> list[LogHeader]:
    """Headers of all incarnations of a log, oldest first."""
    return sorted((_read_header(path) for path in (Path(folder) / name).glob("*.jsonl")), key=lambda h: h.ordinal)


def _ancestry(folder: Path, name: str, incarnation: str) -> Iterator[tuple[LogHeader, int | None]]:
    """Headers from ``incarnation`` up to the first, each with the position at which its child took over."""
    end: int | None = None
    seen: set[str] = set()
    current: str | None = incarnation
    while current is not None:
        path = _path(folder, name, current)
        if current in seen:
            raise QueueError(f"{path}: its chain of parents runs in a circle")
        seen.add(current)
        header = _read_header(path)
        yield header, end
        # A fork below this file's own start lies in an ancestor: none of this file's lines are in the chain.
        end = header.parent_position if end is None else min(end, header.parent_position)
        current = header.parent


def _path(folder: Path, name: str, incarnation: str) -> Path:
    if not _NAME.fullmatch(incarnation):
        raise QueueError(f"incarnation {incarnation!r} cannot name a file: use letters, digits, '.', '_' and '-'")
    return Path(folder) / name / f"{incarnation}.jsonl"


def _line(position: int, entries: Sequence[Entry]) -> bytes:
    body = files.json_bytes(list(entries))
    return b'{"position":%d,"crc32":%d,"entries":%b}\n' % (position, zlib.crc32(body), body)


def _read_header(path: Path) -> LogHeader:
    try:
        with open(path, "rb") as file:
            return LogHeader(**json.loads(file.readline()))
    except FileNotFoundError as error:
        raise QueueError(f"{path}: not there; the chain of the log is broken") from error
    except (OSError, ValueError, TypeError) as error:
        raise QueueError(f"{path}: line 1: the header is damaged: {error}") from error


def _own_entries(path: Path, header: LogHeader) -> Iterator[tuple[int, Entry]]:
    """(position, entry) of one file; a torn last line is left out."""
    position = header.parent_position
    with open(path, "rb") as file:
        lines = [line + b"\n" for line in file.read().split(b"\n")]
    lines[-1] = lines[-1][:-1]  # what follows the last line end: nothing, or a line that was cut off
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines[1:], start=2):
        entries = _parse_line(line, position)
        if isinstance(entries, str):
            if number == len(lines):
                return
            raise QueueError(
                f"{path}: line {number}: damaged ({entries}). Restore the file, or resume from a "
                f"checkpoint that ends before entry {position}."
            )
        for entry in entries:
            yield position, entry
            position += 1


def _parse_line(line: bytes, position: int) -> list[Entry] | str:
    """Entries of a line, or what is wrong with it."""
    try:
        batch = json.loads(line)
        entries, found, expected = batch["entries"], batch["position"], batch["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        return f"not a log line: {error}"
    if not line.endswith(b"\n"):
        return "cut off"
    if zlib.crc32(line[line.index(b'"entries":') + 10 : -2]) != expected:
        return "its crc32 does not fit"
    if found != position or not isinstance(entries, list):
        return f"it starts at entry {found}, not at {position}"
    return entries
