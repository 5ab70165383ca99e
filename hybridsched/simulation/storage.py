"""The sample queue's storage in memory: segments and chained logs as a simulated run folder has them.

Owns ``MemoryDisk`` (what is stored, how full it is, what is wrong with it; shared by all processes of a simulated run
and surviving their deaths) and, on it, ``MemorySegmentStore`` and ``MemoryChainedLog``, which keep the semantics of
the files they stand for.

Invariants
  - A segment name is used once; writing the same samples again under it is a repeat and succeeds, others are refused.
  - A write that does not fit raises NoSpace and changes nothing.
  - What a log gives back is a copy through JSON: nobody holds a reference into a "file".
  - Faults are what the disk is told: ``capacity``, listing and opening delay for those who did not write the segment,
    ``damage``, ``lose``, ``tear``.

Samples are kept as they are (they are frozen; token arrays are not copied).
"""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridsched.errors import NoSpace, QueueError, SegmentDamaged
from hybridsched.model import RowRef, Sample, SampleRow, SegmentId, WeightVersion
from hybridsched.sample_queue.base import SegmentInfo

Entry = dict[str, Any]
_NO_VERSION = WeightVersion(-1, -1)  # as the file store has it where a sample has no token
_SEGMENT_BYTES = 16_384
_SAMPLE_BYTES = 256
_RESPONSE_BYTES = 96
_PROMPT_TOKEN_BYTES = 4
_TOKEN_BYTES = 9  # id, log-prob, mask


def _always_zero() -> float:
    return 0.0


@dataclass(slots=True)
class _Stored:
    samples: tuple[Sample, ...]
    info: SegmentInfo
    sealed_at: float
    damage: str = ""


@dataclass(slots=True)
class _LogFile:
    """One incarnation's file: header and lines, each line the JSON of one append."""

    parent: str | None
    parent_position: int
    ordinal: int
    lines: list[str] = field(default_factory=list)
    n_entries: int = 0


class MemoryDisk:
    """What a simulated run folder holds. ``now`` is the clock that delays are measured on."""

    def __init__(
        self,
        now: Callable[[], float] = _always_zero,
        *,
        capacity: float = math.inf,
        listing_delay_s: float = 0.0,
        open_delay_s: float = 0.0,
    ) -> None:
        """capacity in bytes; change it at any time. listing_delay_s: a segment is listed that much later to others
        than its writer; open_delay_s: and cannot be opened by them until then."""
        self.now = now
        self.capacity = capacity
        self.listing_delay_s = listing_delay_s
        self.open_delay_s = open_delay_s
        self.used = 0
        self.segments: dict[SegmentId, _Stored] = {}
        self.quarantined: dict[SegmentId, str] = {}
        self.logs: dict[str, dict[str, _LogFile]] = {}

    def claim(self, n_bytes: int, what: str) -> None:
        """Take space. Raises NoSpace, taking none."""
        if self.used + n_bytes > self.capacity:
            raise NoSpace(
                f"{what}: {n_bytes} bytes needed, {self.free_bytes()} free of {self.capacity:.0f} (simulated disk); "
                "admission stops until space returns"
            )
        self.used += n_bytes

    def free_bytes(self) -> int:
        """Bytes left (2**63 - 1 without a capacity)."""
        return 2**63 - 1 if math.isinf(self.capacity) else max(0, int(self.capacity) - self.used)

    def damage(self, segment: SegmentId, reason: str = "xxh3_64 of tokens/id does not match") -> None:
        """From now on reading the segment raises SegmentDamaged."""
        self._stored(segment).damage = reason

    def lose(self, segment: SegmentId) -> None:
        """The segment disappears, as if its folder had been lost."""
        self.used -= self._stored(segment).info.n_bytes
        del self.segments[segment]

    def tear(self, name: str, incarnation: str) -> None:
        """The last line of a log file is torn: a crash in the middle of an append. It is ignored by readers."""
        file = self.logs[name][incarnation]
        line = file.lines.pop()
        file.n_entries -= len(json.loads(line))
        self.used -= len(line)

    def _stored(self, segment: SegmentId) -> _Stored:
        if segment not in self.segments:
            raise QueueError(f"segment {segment} is not on the simulated disk")
        return self.segments[segment]


class MemorySegmentStore:
    """Implements ``sample_queue.base.SegmentStore`` on a ``MemoryDisk``; one instance a process."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._own: set[SegmentId] = set()

    def write(self, segment: SegmentId, samples: Sequence[Sample]) -> SegmentInfo:
        """Seal ``samples``. Raises NoSpace (nothing is left behind), QueueError for a name taken by other samples."""
        if not samples:
            raise QueueError(f"segment {segment}: a segment without samples is not written")
        there = self._disk.segments.get(segment)
        if there is not None:
            if len(there.samples) != len(samples) or any(
                a is not b for a, b in zip(there.samples, samples, strict=True)
            ):
                raise QueueError(
                    f"segment {segment}: the name is taken by other samples. Names are used once; the incarnation "
                    f"{segment.incarnation!r} was started twice."
                )
            return there.info
        n_bytes = payload_bytes(samples)
        self._disk.claim(n_bytes, f"segment {segment}")
        rows = tuple(sample_row(sample, RowRef(segment, row)) for row, sample in enumerate(samples))
        info = SegmentInfo(segment, rows, n_bytes)
        self._disk.segments[segment] = _Stored(tuple(samples), info, self._disk.now())
        self._own.add(segment)
        return info

    def read(self, segment: SegmentId, rows: Sequence[int] | None = None) -> builtins.list[Sample]:
        """See SegmentStore. Raises SegmentDamaged, QueueError (not there, not visible yet, no such row)."""
        samples = self._open(segment).samples
        if rows is None:
            return [*samples]
        outside = [row for row in rows if not 0 <= row < len(samples)]
        if outside:
            raise QueueError(f"segment {segment}: rows {outside} do not exist, it has {len(samples)}")
        return [samples[row] for row in rows]

    def info(self, segment: SegmentId) -> SegmentInfo:
        """See SegmentStore. Raises SegmentDamaged, QueueError."""
        return self._open(segment).info

    def list(self) -> builtins.list[SegmentId]:
        """Sealed segments that this process can see by now, sorted. A damaged one is listed."""
        delay = self._disk.listing_delay_s
        return sorted(s for s, stored in self._disk.segments.items() if self._visible(s, stored, delay))

    def quarantine(self, segment: SegmentId, reason: str) -> None:
        """Move aside; its bytes stay taken. Repeating it changes nothing. Raises QueueError when it was never there."""
        if segment in self._disk.quarantined:
            return
        if segment not in self._disk.segments:
            raise QueueError(f"segment {segment}: not there, so it cannot be moved to quarantine")
        del self._disk.segments[segment]
        self._disk.quarantined[segment] = reason

    def quarantined(self) -> dict[SegmentId, str]:
        """Segments moved aside, each with its first reason."""
        return dict(self._disk.quarantined)

    def remove(self, segments: Iterable[SegmentId]) -> int:
        """Delete; returns bytes freed. Those that are gone already are skipped."""
        freed = 0
        for segment in segments:
            stored = self._disk.segments.pop(segment, None)
            freed += stored.info.n_bytes if stored else 0
        self._disk.used -= freed
        return freed

    def free_bytes(self) -> int:
        """Free space of the disk."""
        return self._disk.free_bytes()

    def _visible(self, segment: SegmentId, stored: _Stored, delay_s: float) -> bool:
        return segment in self._own or self._disk.now() >= stored.sealed_at + delay_s

    def _open(self, segment: SegmentId) -> _Stored:
        stored = self._disk.segments.get(segment)
        if stored is None or not self._visible(segment, stored, self._disk.open_delay_s):
            raise QueueError(
                f"segment {segment}: not there (yet). An announced segment may take a while to appear; after that it "
                "was removed, quarantined or lost."
            )
        if stored.damage:
            raise SegmentDamaged(f"segment {segment}: {stored.damage}")
        return stored


class MemoryChainedLog:
    """Implements ``sample_queue.base.ChainedLog`` on a ``MemoryDisk``: the log ``name`` of one incarnation.

    parent: (incarnation, position) to continue from. Raises QueueError when the incarnation has a log already, or the
    parent is missing or shorter than ``position``.
    """

    def __init__(self, disk: MemoryDisk, name: str, incarnation: str, parent: tuple[str, int] | None = None) -> None:
        self._disk, self._name, self.incarnation = disk, name, incarnation
        files = disk.logs.setdefault(name, {})
        if incarnation in files:
            raise QueueError(f"{name} log: incarnation {incarnation!r} exists already; every start is a new one")
        parent_name, position = parent if parent is not None else (None, 0)
        if parent_name is not None:
            there = chain_length(disk, name, parent_name)
            if not 0 <= position <= there:
                raise QueueError(f"{name} log: cannot continue {parent_name!r} at entry {position}, it has {there}")
        files[incarnation] = _LogFile(parent_name, position, 1 + len(files))
        self._file = files[incarnation]

    def append(self, entries: Sequence[Entry]) -> int:
        """Append durably, all or nothing; returns the new position. Raises NoSpace."""
        if entries:
            line = json.dumps(list(entries), sort_keys=True)
            self._disk.claim(len(line), f"{self._name} log")
            self._file.lines.append(line)
            self._file.n_entries += len(entries)
        return self.position

    @property
    def position(self) -> int:
        """Entries in the chain."""
        return self._file.parent_position + self._file.n_entries

    def entries(self, start: int = 0) -> list[Entry]:
        """Entries along the chain from ``start``."""
        return read_chain(self._disk, self._name, self.incarnation, start)

    def close(self) -> None:
        """Nothing to close; here because files have one."""


def chain_length(disk: MemoryDisk, name: str, incarnation: str) -> int:
    """Entries along the chain of an incarnation. Raises QueueError when it has no log."""
    file = _log_file(disk, name, incarnation)
    return file.parent_position + file.n_entries


def read_chain(disk: MemoryDisk, name: str, incarnation: str, start: int = 0) -> list[Entry]:
    """Entries along the chain of an incarnation from ``start``. Raises QueueError when it has no log."""
    pieces: list[list[Entry]] = []
    end = chain_length(disk, name, incarnation)
    at: str | None = incarnation
    while at is not None and end > start:
        file = _log_file(disk, name, at)
        if end > file.parent_position:
            own = [entry for line in file.lines for entry in json.loads(line)]
            pieces.append(own[max(0, start - file.parent_position) : end - file.parent_position])
        end = min(end, file.parent_position)
        at = file.parent
    return [entry for piece in reversed(pieces) for entry in piece]


def newest_incarnation(disk: MemoryDisk, name: str) -> str | None:
    """The incarnation that opened this log last, None when nobody has."""
    files = disk.logs.get(name, {})
    return max(files, key=lambda incarnation: files[incarnation].ordinal, default=None)


def _log_file(disk: MemoryDisk, name: str, incarnation: str) -> _LogFile:
    file = disk.logs.get(name, {}).get(incarnation)
    if file is None:
        raise QueueError(f"{name} log: incarnation {incarnation!r} has none")
    return file


def payload_bytes(samples: Sequence[Sample]) -> int:
    """Size a segment of these samples has on the simulated disk, close to that of a real one."""
    total = _SEGMENT_BYTES + len(samples) * _SAMPLE_BYTES
    for sample in samples:
        total += sample.prompt_tokens.shape[0] * _PROMPT_TOKEN_BYTES
        total += len(sample.responses) * _RESPONSE_BYTES + sample.n_response_tokens * _TOKEN_BYTES
    return total


def sample_row(sample: Sample, ref: RowRef) -> SampleRow:
    """What is announced of a sample; NaN and (-1, -1) stand for "no reward" and "no token", as in the file store."""
    versions = {run.version for response in sample.responses for run in response.version_runs}
    rewards = [response.reward for response in sample.responses if response.reward is not None]
    return SampleRow(
        sample_uid=sample.sample_uid,
        prompt_uid=sample.prompt_uid,
        ref=ref,
        n_tokens=sample.n_tokens,
        oldest=min(versions, default=_NO_VERSION),
        newest=max(versions, default=_NO_VERSION),
        reward_mean=sum(rewards) / len(rewards) if rewards else math.nan,
        n_valid=len(rewards),
    )
