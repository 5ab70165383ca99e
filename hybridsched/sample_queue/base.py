"""Contracts of the sample queue: what a store of segments and a chained log are. Files and memory implement them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridsched.model import Sample, SampleRow, SegmentId


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What is announced when a segment is sealed: enough to accept its rows without opening it."""

    segment: SegmentId
    rows: tuple[SampleRow, ...]
    n_bytes: int


class SegmentStore(Protocol):
    """Sealed, immutable segments. Methods are synchronous; callers hand them to `offload`."""

    def write(self, segment: SegmentId, samples: Sequence[Sample]) -> SegmentInfo:
        """Seal ``samples`` under a never-used name; durable on return. Raises NoSpace (nothing is left behind)."""
        ...

    def read(self, segment: SegmentId, rows: Sequence[int] | None = None) -> list[Sample]:
        """Samples of a segment (all, or the given rows in the given order). Raises SegmentDamaged, QueueError."""
        ...

    def info(self, segment: SegmentId) -> SegmentInfo:
        """Rows of a segment without token payload. Raises SegmentDamaged."""
        ...

    def list(self) -> list[SegmentId]:
        """All sealed segments of this run, sorted. Ignores temporary and foreign files."""
        ...

    def quarantine(self, segment: SegmentId, reason: str) -> None:
        """Move a damaged segment aside."""
        ...

    def remove(self, segments: Iterable[SegmentId]) -> int:
        """Delete segments (garbage collection); returns bytes freed."""
        ...

    def free_bytes(self) -> int:
        """Free space where segments go."""
        ...


class ChainedLog(Protocol):
    """An append-only log of JSON objects, one file per controller incarnation, chained at forks.

    The chain of an incarnation is: its parent's chain up to the fork position, then its own lines. Positions count
    entries along the chain. A torn last line is ignored.
    """

    def append(self, entries: Sequence[dict[str, Any]]) -> int:
        """Append durably; returns the new position."""
        ...

    @property
    def position(self) -> int:
        """Entries in the chain."""
        ...

    def entries(self, start: int = 0) -> list[dict[str, Any]]:
        """Entries along the chain from ``start``."""
        ...
