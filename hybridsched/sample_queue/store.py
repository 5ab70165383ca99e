"""The folder of sealed segments of one run: names, discovery, quarantine and removal. Implements base.SegmentStore.

    <run>/queue/queue.json                                  whose queue it is; written once
    <run>/queue/seg/<producer>/<incarnation>-<seq>.h5       sealed and immutable
    <run>/queue/seg/<producer>/.<...>.h5.tmp                only its own producer touches it
    <run>/queue/quarantine/<producer>/<...>.h5 and .reason.json

Invariants
    A name is used once. Writing the same content again under its name is recognised as a repeat and succeeds; other
    content is refused. Readers open announced or listed names only and never probe for the next one: NFS clients
    remember for a while that a name did not exist.
    Files of another run, temporary files and files that are no segments are never read as samples; ``foreign()``
    reports them.

Not here: who may delete what and when (the controller), what a segment looks like inside (segment.py).
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from hybridsched.errors import QueueError, RunFolderError
from hybridsched.model import Sample, SegmentId
from hybridsched.sample_queue import files
from hybridsched.sample_queue.base import SegmentInfo
from hybridsched.sample_queue.segment import (
    SegmentHeader,
    SegmentSummary,
    column_checksums,
    read_segment,
    segment_header,
    segment_info,
    write_segment,
)

Durability = Literal["host-crash", "process-crash"]
T = TypeVar("T")

QUEUE_FOLDER = "queue"
QUEUE_SCHEMA_VERSION = 1
_SEGMENT_NAME = re.compile(r"(?P<incarnation>[A-Za-z0-9_][A-Za-z0-9._-]*)-(?P<seq>\d{8,})\.h5")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class FileSegmentStore:
    """Segments as files under ``run_folder``. Safe to use from several processes and threads, one writer per producer.

    create=False (tools): the queue must exist already, and nothing is written.
    Raises RunFolderError when the folder holds the queue of another run.
    """

    def __init__(
        self,
        run_folder: Path,
        run_id: str,
        durability: Durability = "host-crash",
        *,
        create: bool = True,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.run_id = run_id
        self._durable = durability == "host-crash"
        self._wall_ns = wall_ns
        self._queue = Path(run_folder) / QUEUE_FOLDER
        self._segments = self._queue / "seg"
        self._quarantine = self._queue / "quarantine"
        self._run_of: dict[SegmentId, str] = {}  # by segment: the run it says it belongs to ("" = unreadable)
        self._foreign: set[str] = set()
        if create:
            self._create_queue()
        else:
            _check_queue(self._queue, read_queue_header(self._queue), run_id)
        self._lists_late = files.lists_late(self._queue)
        if os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in {"TRUE", "1", "BEST_EFFORT"}:
            warnings.warn(
                "HDF5_USE_FILE_LOCKING forces HDF5 file locks. Sealed segments need none, and on many cluster file "
                "systems locking fails: unset it, or set it to FALSE.",
                stacklevel=2,
            )

    def _create_queue(self) -> None:
        try:
            files.make_folder(self._segments, self._durable)
            header = {"schema_version": QUEUE_SCHEMA_VERSION, "run_id": self.run_id, "created_unix_ns": self._wall_ns()}
            if not (self._queue / "queue.json").exists():
                with contextlib.suppress(FileExistsError):  # another process was faster: its header is checked below
                    files.create_exclusive(self._queue / "queue.json", files.json_bytes(header) + b"\n", self._durable)
        except OSError as error:
            raise files.queue_error(error, self._queue / "queue.json", "creating the queue") from error
        _check_queue(self._queue, read_queue_header(self._queue), self.run_id)

    # -------------------------------------------------------------- names

    def path(self, segment: SegmentId) -> Path:
        """Where a segment lies. QueueError when producer or incarnation cannot be a file name."""
        for what, name in (("producer", segment.producer), ("incarnation", segment.incarnation)):
            if not _NAME.fullmatch(name):
                raise QueueError(f"{what} {name!r} cannot name a file: use letters, digits, '.', '_' and '-'")
        return self._segments / segment.producer / f"{segment.incarnation}-{segment.seq:08d}.h5"

    # -------------------------------------------------------------- writing

    def write(self, segment: SegmentId, samples: Sequence[Sample], created_unix_ns: int | None = None) -> SegmentInfo:
        """Seal ``samples``; durable on return. Raises NoSpace (nothing is left behind), QueueError."""
        path = self.path(segment)
        now = self._wall_ns()
        header = SegmentHeader(self.run_id, segment, now if created_unix_ns is None else created_unix_ns, now)
        try:
            files.make_folder(path.parent, self._durable)
            taken = path.exists()
        except OSError as error:
            raise files.queue_error(error, path, "preparing the producer's folder", 4096) from error
        summary = self._repeat(path, samples, header) if taken else None
        if summary is None:
            summary = write_segment(path, samples, header, durable=self._durable)
        self._run_of[segment] = self.run_id
        return SegmentInfo(segment, summary.rows, summary.n_bytes)

    def _repeat(self, path: Path, samples: Sequence[Sample], header: SegmentHeader) -> SegmentSummary:
        """The segment that is there already, if it is this one (an earlier attempt failed after its rename)."""
        there = segment_info(path)
        if there.header.run_id != header.run_id or there.checksums != column_checksums(samples):
            raise QueueError(
                f"{path}: the name is taken by other samples. Names are used once; the incarnation "
                f"{header.segment.incarnation!r} was started twice."
            )
        if self._durable:
            try:
                files.fsync_folder(path.parent)
            except OSError as error:
                raise files.queue_error(error, path, "syncing its folder") from error
        return there

    def clean_tmp(self, producer: str) -> builtins.list[Path]:
        """Remove what an earlier incarnation of ``producer`` left unfinished. Only the producer itself may call it."""
        removed = []
        for path in sorted((self.path(SegmentId(producer, "x", 0)).parent).glob(".*.tmp")):
            path.unlink(missing_ok=True)
            removed.append(path)
        return removed

    # -------------------------------------------------------------- reading

    def read(self, segment: SegmentId, rows: Sequence[int] | None = None) -> builtins.list[Sample]:
        """All samples, or the given rows in that order. Raises SegmentDamaged, QueueError (e.g. not visible yet)."""
        return self._reading(segment, lambda path: read_segment(path, rows))

    def info(self, segment: SegmentId) -> SegmentInfo:
        """Rows without token payload. Raises SegmentDamaged, QueueError."""
        summary = self._reading(segment, segment_info)
        return SegmentInfo(segment, summary.rows, summary.n_bytes)

    def _reading(self, segment: SegmentId, read: Callable[[Path], T]) -> T:
        path = self.path(segment)
        try:
            result = self._opened(path, read)
        except FileNotFoundError as error:
            raise QueueError(
                f"{path}: not there (yet). An announced segment may take a minute to appear on a network file system; "
                "after that it was removed, quarantined, or its producer wrote to another folder."
            ) from error
        if segment not in self._run_of:
            self._learn_run(segment)
        run = self._run_of.get(segment, "")
        if run not in ("", self.run_id):
            raise QueueError(f"{path}: belongs to run {run!r}, not {self.run_id!r}; it is ignored")
        return result

    def _opened(self, path: Path, read: Callable[[Path], T]) -> T:
        try:
            return read(path)
        except FileNotFoundError:
            files.refresh_listing(path.parent)
            return read(path)

    # -------------------------------------------------------------- discovery

    def list(self) -> builtins.list[SegmentId]:
        """All sealed segments of this run, sorted. A damaged one is listed: reading it says what is wrong."""
        found: builtins.list[SegmentId] = []
        self._foreign.clear()
        for producer, entry in self._entries():
            segment = _parse(producer, entry)
            if segment is None:
                if not entry.startswith("."):
                    self._foreign.add(f"{producer}/{entry}: not a segment name")
                continue
            if segment not in self._run_of:
                self._learn_run(segment)
            run = self._run_of.get(segment)
            if run is not None and run not in ("", self.run_id):
                self._foreign.add(f"{producer}/{entry}: belongs to run {run!r}")
            elif run is not None:
                found.append(segment)
        return sorted(found)

    def foreign(self) -> tuple[str, ...]:
        """What the last :meth:`list` ignored, each with the reason."""
        return tuple(sorted(self._foreign))

    def _entries(self) -> Iterator[tuple[str, str]]:
        if self._lists_late:
            files.refresh_listing(self._segments)
        for folder in os.scandir(self._segments):
            if not folder.is_dir():
                self._foreign.add(f"{folder.name}: not a producer's folder")
                continue
            if self._lists_late:
                files.refresh_listing(Path(folder.path))
            yield from ((folder.name, entry.name) for entry in os.scandir(folder.path))

    def _learn_run(self, segment: SegmentId) -> None:
        """Remember which run a segment says it belongs to (segments are immutable: asked once)."""
        path = self.path(segment)
        try:
            header = segment_header(path)
        except FileNotFoundError:
            return  # removed since it was listed
        except QueueError:  # damaged or of a newer format: listed, and reading it says what is wrong
            self._run_of[segment] = ""
            return
        named = header.segment == segment
        self._run_of[segment] = header.run_id if named else f"{header.run_id} (copied from {header.segment})"

    # -------------------------------------------------------------- moving and removing

    def quarantine(self, segment: SegmentId, reason: str) -> None:
        """Move a damaged segment aside, with the reason beside it. Repeating it changes nothing."""
        path = self.path(segment)
        target = self._quarantine / segment.producer / path.name
        try:
            files.make_folder(target.parent, self._durable)
            note = {"segment": str(segment), "reason": reason, "unix_ns": self._wall_ns()}
            with contextlib.suppress(FileExistsError):  # the first reason stays
                files.create_exclusive(
                    target.with_suffix(".reason.json"), files.json_bytes(note) + b"\n", self._durable
                )
            try:
                os.rename(path, target)
            except FileNotFoundError:
                if not target.exists():
                    raise
            if self._durable:
                files.fsync_folder(path.parent)
                files.fsync_folder(target.parent)
        except OSError as error:
            raise files.queue_error(error, path, "moving it to quarantine") from error

    def quarantined(self) -> dict[SegmentId, str]:
        """Segments moved aside, each with its reason."""
        return quarantined(self._queue)

    def remove(self, segments: Iterable[SegmentId]) -> int:
        """Delete segments; returns bytes freed. Those that are gone already are skipped."""
        freed = 0
        for segment in segments:
            path = self.path(segment)
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise files.queue_error(error, path, "removing it") from error
            freed += size
            self._run_of.pop(segment, None)
        return freed

    def free_bytes(self) -> int:
        """Free space where segments go."""
        return files.free_bytes(self._queue)


def read_queue_header(queue: Path) -> dict[str, object]:
    """queue.json. Raises RunFolderError when there is none or it is damaged."""
    path = queue / "queue.json"
    try:
        header = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise RunFolderError(f"{path}: not there, so {queue.parent} is not the folder of a run") from error
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: cannot be read: {error}. It is written once, when the run begins.") from error
    if not isinstance(header, dict) or not isinstance(header.get("run_id"), str):
        raise RunFolderError(f"{path}: has no run_id: {header!r}")
    return header


def quarantined(queue: Path) -> dict[SegmentId, str]:
    """Segments of a queue folder that were moved aside, each with its reason."""
    found = {}
    for path in sorted((queue / "quarantine").glob("*/*.h5")):
        segment = _parse(path.parent.name, path.name)
        note = path.with_suffix(".reason.json")
        if segment is not None:
            found[segment] = _reason(note)
    return found


def _reason(note: Path) -> str:
    try:
        return str(json.loads(note.read_bytes())["reason"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"reason unknown ({note.name} cannot be read: {error})"


def _check_queue(queue: Path, header: dict[str, object], run_id: str) -> None:
    if header["run_id"] != run_id:
        raise RunFolderError(
            f"{queue / 'queue.json'}: this is the queue of run {header['run_id']!r}, not of {run_id!r}. Use another "
            "run folder (trainer.default_local_dir), or resume that run."
        )
    version = header.get("schema_version")
    if not isinstance(version, int) or version > QUEUE_SCHEMA_VERSION:
        raise QueueError(f"{queue / 'queue.json'}: version {version}, this hybridsched knows {QUEUE_SCHEMA_VERSION}")


def _parse(producer: str, name: str) -> SegmentId | None:
    found = _SEGMENT_NAME.fullmatch(name)
    if not found or not _NAME.fullmatch(producer):
        return None
    segment = SegmentId(producer, found["incarnation"], int(found["seq"]))
    return segment if name == f"{segment.incarnation}-{segment.seq:08d}.h5" else None
