"""Collects a producer's completed samples and seals them as segments. Synchronous; the caller owns time and threads.

Invariants
    Samples leave the writer in the order in which they came, and only when their segment is durable.
    Sequence numbers are dense: the next one is used up only by success. A batch whose sealing failed keeps its content
    and its number, so trying again later repeats exactly the same write.
    A batch never mixes samples of different newest weight versions, so that a stale segment is stale as a whole.

``add`` may run in one thread (the event loop) while ``seal`` runs in another; two seals at once are refused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridsched.errors import InternalError
from hybridsched.model import Sample, SegmentId, WeightVersion
from hybridsched.sample_queue.base import SegmentInfo, SegmentStore

_ROW_BYTES = 96  # of one response in /responses and /runs, and about what a sample's metadata takes


@dataclass
class _Batch:
    since: float
    version: WeightVersion | None
    samples: list[Sample] = field(default_factory=list)
    n_bytes: int = 0
    closed: str = ""  # why nothing is added any more; empty while open


def payload_bytes(sample: Sample) -> int:
    """About what a sample takes in a segment: 9 bytes per response token, 4 per prompt token, and its rows."""
    tokens = sample.n_response_tokens
    return 9 * tokens + 4 * int(sample.prompt_tokens.shape[0]) + _ROW_BYTES * (1 + len(sample.responses))


def newest_version(sample: Sample) -> WeightVersion | None:
    """The version of the newest token, None when there is no token."""
    return max((run.version for response in sample.responses for run in response.version_runs), default=None)


class SegmentWriter:
    """One producer's side of the queue. ``now`` is any monotonic clock in seconds.

    To drain: ``while writer.pending: announce(writer.seal("drain"))``.
    """

    def __init__(
        self,
        store: SegmentStore,
        producer: str,
        incarnation: str,
        *,
        seal_bytes: int,
        seal_samples: int,
        seal_age_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._producer, self._incarnation = store, producer, incarnation
        self._seal_bytes, self._seal_samples, self._seal_age_s = seal_bytes, seal_samples, seal_age_s
        self._now = now
        self._batches: deque[_Batch] = deque()
        self._seq = 0
        self._sealing = threading.Lock()

    def add(self, sample: Sample) -> list[str]:
        """Take a completed sample; returns why sealing is due now ([] = not yet): "version", "bytes", "samples"."""
        version = newest_version(sample)
        reasons = []
        last = self._batches[-1] if self._batches else None
        if last is not None and not last.closed and last.version != version:
            last.closed = "version"
            reasons.append("version")
        if last is None or last.closed:
            last = _Batch(self._now(), version)
            last.samples.append(sample)
            last.n_bytes = payload_bytes(sample)
            self._batches.append(last)
        else:
            last.samples.append(sample)
            last.n_bytes += payload_bytes(sample)
        if last.n_bytes >= self._seal_bytes:
            last.closed = "bytes"
        elif len(last.samples) >= self._seal_samples:
            last.closed = "samples"
        return [*reasons, last.closed] if last.closed else reasons

    def due(self, now: float | None = None) -> str | None:
        """Why the oldest batch should be sealed now: a reason of :meth:`add`, or "age"; None = not yet."""
        if not self._batches:
            return None
        oldest = self._batches[0]
        if oldest.closed:
            return oldest.closed
        moment = self._now() if now is None else now
        return "age" if moment - oldest.since >= self._seal_age_s else None

    def seal(self, reason: str) -> SegmentInfo:
        """Seal the oldest batch; durable on return. On NoSpace or QueueError the samples stay: seal again later.

        InternalError when nothing is pending (look at ``pending`` or ``due`` first) or a seal is already running.
        """
        if not self._sealing.acquire(blocking=False):
            raise InternalError(f"segment writer of {self._producer}: a seal is already running")
        try:
            if not self._batches:
                raise InternalError(f"segment writer of {self._producer}: nothing to seal ({reason})")
            batch = self._batches[0]
            batch.closed = batch.closed or reason or "seal"
            segment = SegmentId(self._producer, self._incarnation, self._seq)
            info = self._store.write(segment, batch.samples)
            self._batches.popleft()
            self._seq += 1
            return info
        finally:
            self._sealing.release()

    @property
    def pending(self) -> int:
        """Samples that are not durable yet."""
        return sum(len(batch.samples) for batch in tuple(self._batches))

    @property
    def pending_bytes(self) -> int:
        """About how much memory they hold."""
        return sum(batch.n_bytes for batch in tuple(self._batches))

    @property
    def pending_batches(self) -> int:
        """Segments it takes to make them durable."""
        return len(self._batches)

    @property
    def next_seq(self) -> int:
        """Number of the next segment."""
        return self._seq

    def oldest_age(self, now: float | None = None) -> float:
        """Seconds since the oldest pending sample came; 0 when there is none."""
        if not self._batches:
            return 0.0
        return (self._now() if now is None else now) - self._batches[0].since
