"""The controller's side of the sample queue: completed -> durable -> accepted -> taken -> verdict.

Owns: the accept log, the ledger, the queue of accepted rows, and which prompts are done. Invariants: the first durable
row of a uid wins, whatever lease made it; a row is taken only after its accept-log entry is durable; every uid gets
one verdict along the ledger chain; entries of both logs are written in order by one scribe task. Does not know
replicas or policies.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridsched.errors import DeadlineExceeded, NoSpace, QueueError
from hybridsched.model import RowRef, SampleRow, SegmentId, Verdict, WeightVersion
from hybridsched.runlog.base import EventSink
from hybridsched.runtime.frontier import Frontier
from hybridsched.runtime.signal import Signal
from hybridsched.sample_queue.base import ChainedLog, SegmentInfo, SegmentStore
from hybridsched.sample_queue.ledger import accept_entry, ledger_entry

Offload = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Completed:
    """Generated and rewarded, not yet durable."""

    replica: str
    incarnation: str
    n_tokens: int


class Intake:
    """Bookkeeping of finished samples."""

    def __init__(
        self,
        store: SegmentStore,
        accept_log: ChainedLog,
        ledger: ChainedLog,
        frontier: Frontier,
        offload: Offload,
        log: EventSink,
        changed: Signal,
        describe: Callable[[int], tuple[str, int]],
        when: Callable[[], tuple[WeightVersion, int]],
    ) -> None:
        """describe: (prompt_uid, epoch) of a sample; when: (weight version, collections trained) now."""
        self.store = store
        self.accept_log = accept_log
        self.ledger = ledger
        self.frontier = frontier
        self._offload = offload
        self._log = log
        self._changed = changed
        self._describe = describe
        self._when = when
        self.completed: dict[int, Completed] = {}
        self.queue: deque[SampleRow] = deque()
        self.counts: Counter[str] = Counter()
        self._accepted: set[int] = set()
        self._known: set[SegmentId] = set()
        self._rows_left: dict[SegmentId, int] = {}
        self._spent: dict[SegmentId, int] = {}  # fully consumed segments -> ledger position
        self._to_accept: deque[SampleRow] = deque()
        self._to_ledger: list[dict[str, Any]] = []
        self._wake = asyncio.Event()
        self._written = Signal()
        self._busy = False
        self.closed = False  #: the run ends: rows that become durable now wait for a resume
        self.blocked = ""  #: why the logs cannot be written now

    # --- what is there --------------------------------------------------------------------------------------------

    def available(self) -> int:
        """Completed and unconsumed samples (durable or not): what policies wait for."""
        return len(self.completed) + len(self.queue) + len(self._to_accept)

    def holds(self, uid: int) -> bool:
        """True when this sample needs no generation any more."""
        return uid in self.completed or uid in self._accepted or uid in self.frontier

    def held_uids(self) -> set[int]:
        """Samples above the frontier's lowest position that need no generation."""
        return {*self.completed, *self._accepted, *self.frontier.above}

    # --- arrivals -------------------------------------------------------------------------------------------------

    def on_completed(self, uid: int, completed: Completed) -> None:
        """A worker finished a sample that goes to the queue."""
        if uid not in self._accepted and uid not in self.frontier:
            self.completed[uid] = completed

    def on_sealed(self, segment: SegmentId, rows: Sequence[SampleRow]) -> list[int]:
        """Rows are durable. Returns the new uids; twins of known ones are reported and left."""
        if segment in self._known or self.closed:
            return []
        self._known.add(segment)
        fresh: list[int] = []
        self._rows_left[segment] = len(rows)
        for row in rows:
            if row.sample_uid in self._accepted or row.sample_uid in self.frontier:
                self.counts["twin"] += 1
                self._spend(row)
                self._log.event("sample", str(row.sample_uid), new="twin", reason=f"already there; row of {segment}")
                continue
            fresh.append(row.sample_uid)
            self.completed.pop(row.sample_uid, None)
            self._accepted.add(row.sample_uid)
            self._to_accept.append(row)
        self._wake.set()
        return fresh

    def lost_with(self, replica: str, incarnation: str) -> list[int]:
        """Completed samples that died with a worker before they were durable; forgotten here."""
        gone = [u for u, c in self.completed.items() if c.replica == replica and c.incarnation == incarnation]
        for uid in gone:
            del self.completed[uid]
        return gone

    async def unannounced(self, producer: str | None = None) -> list[SegmentInfo]:
        """Directory listing as fallback: sealed segments nobody announced. Unreadable ones are quarantined."""
        names: list[SegmentId] = await self._offload(self.store.list)
        found: list[SegmentInfo] = []
        for name in names:
            if name in self._known or (producer is not None and name.producer != producer):
                continue
            try:
                found.append(await self._offload(self.store.info, name))
            except QueueError as error:
                await self.quarantine(name, str(error))
        return found

    def unaccept(self, uids: Iterable[int]) -> None:
        """Rows of these uids are lost; they are generated again."""
        self._accepted.difference_update(uids)

    def waiting_uids(self) -> list[int]:
        """Accepted and not taken, in order."""
        return [row.sample_uid for row in self.queue] + [row.sample_uid for row in self._to_accept]

    async def quarantine(self, segment: SegmentId, reason: str) -> list[int]:
        """Move a damaged segment aside; returns the uids whose rows are lost (to be issued again)."""
        self._known.add(segment)
        self._log.event("segment", str(segment), new="quarantined", reason=reason)
        self.counts["quarantined"] += 1
        await self._offload(self.store.quarantine, segment, reason)
        lost = [row.sample_uid for row in self.queue if row.ref.segment == segment]
        self.queue = deque(row for row in self.queue if row.ref.segment != segment)
        lost += [row.sample_uid for row in self._to_accept if row.ref.segment == segment]
        self._to_accept = deque(row for row in self._to_accept if row.ref.segment != segment)
        self._accepted.difference_update(lost)
        self._rows_left.pop(segment, None)
        return lost

    def missing(self, need: int) -> dict[str, list[int]]:
        """Who must flush so that ``need`` rows are durable: replica -> uids; empty when flushing cannot help."""
        durable = len(self.queue) + len(self._to_accept)
        if durable >= need or durable + len(self.completed) < need:
            return {}
        holders: dict[str, list[int]] = {}
        for uid, completed in self.completed.items():
            holders.setdefault(completed.replica, []).append(uid)
        return holders

    # --- departures -----------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[SampleRow]:
        """The next ``count`` accepted rows, in accept order."""
        return [self.queue.popleft() for _ in range(count)]

    def put_back(self, rows: Sequence[SampleRow]) -> None:
        """Rows taken but not trained go to the front again."""
        self.queue.extendleft(reversed(rows))

    def verdict(self, uid: int, verdict: Verdict, *, row: SampleRow | None = None, **detail: Any) -> None:
        """Give a sample its verdict; the ledger line is written by the scribe (`settled` waits for it)."""
        if not self.frontier.add(uid):
            self._log.event("sample", str(uid), new="twin", reason=f"second verdict {verdict.value} ignored")
            return
        self.counts[verdict.value] += 1
        self._accepted.discard(uid)
        self.completed.pop(uid, None)
        prompt_uid, epoch = self._describe(uid)
        version, collection = self._when()
        line = ledger_entry(uid, verdict, prompt_uid=prompt_uid, epoch=epoch, version=version, collection=collection)
        self._to_ledger.append({**line, **detail})
        if row is not None:
            self._spend(row)
        self._wake.set()

    def _spend(self, row: SampleRow) -> None:
        left = self._rows_left.get(row.ref.segment, 0) - 1
        if left > 0:
            self._rows_left[row.ref.segment] = left
            return
        self._rows_left.pop(row.ref.segment, None)
        self._spent[row.ref.segment] = self.ledger.position + len(self._to_ledger)

    # --- the scribe -----------------------------------------------------------------------------------------------

    async def scribe(self, space_retry_s: float) -> None:
        """Write both logs in order, until cancelled. A full disk is waited out; nothing is dropped."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._write()
            except NoSpace as full:
                if not self.blocked:
                    self._log.event("fault", "controller", new="disk full", reason=str(full))
                self.blocked = str(full)
                await asyncio.sleep(space_retry_s)
                self._wake.set()
                continue
            if self.blocked:
                self.blocked = ""
                self._log.event("fault", "controller", new="space again")

    async def settled(self, deadline_s: float, blocked_s: float) -> None:
        """Return when everything given so far is in the logs; ``blocked_s`` bounds the wait for space on a full disk.

        Raises DeadlineExceeded.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self._to_accept or self._to_ledger or self._busy:
            self._wake.set()
            left = began + (blocked_s if self.blocked else deadline_s) - loop.time()
            if left <= 0:
                raise DeadlineExceeded(
                    f"accept log and ledger could not be written for {loop.time() - began:.0f} s: "
                    f"{self.blocked or 'the file system does not answer (deadlines.call_s)'}"
                )
            await self._written.wait(min(left, deadline_s))

    async def _write(self) -> None:
        self._busy = True
        try:
            while self._to_accept or self._to_ledger:
                await self._write_accepted()
                pending = self._to_ledger  # a rollback meanwhile starts another list
                if lines := list(pending):
                    await self._offload(self.ledger.append, lines)
                    del pending[: len(lines)]
        finally:
            self._busy = False
            self._written.notify()

    async def _write_accepted(self) -> None:
        rows = list(self._to_accept)
        if not rows:
            return
        await self._offload(self.accept_log.append, [accept_entry(row.sample_uid, row.ref) for row in rows])
        kept = set(map(id, self._to_accept))
        for row in rows:
            if id(row) in kept:  # not quarantined meanwhile
                self._to_accept.popleft()
                self.queue.append(row)
        self._changed.notify()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def removable(self, ledger_position: int) -> list[SegmentId]:
        """Segments whose every row had its verdict before this ledger position (garbage collection)."""
        return [segment for segment, position in self._spent.items() if position <= ledger_position]

    def forget(self, segments: Iterable[SegmentId]) -> None:
        """These segments were removed from disk."""
        for segment in segments:
            self._spent.pop(segment, None)

    def restore(self, rows: Mapping[SegmentId, Sequence[SampleRow]], accepted: Sequence[RowRef], position: int) -> int:
        """After a resume or rollback: queue every durable row whose uid is not done.

        ``accepted`` gives the order: the accept log of the incarnation before, whole. Only its first ``position``
        entries are in the chain of the new one; rows of later entries are entered again, and so are rows it does not
        name, in order of their segments. Verdicts that are not in the ledger yet are void. Returns how many rows are
        queued.
        """
        meanwhile = [row for row in (*self.queue, *self._to_accept) if row.ref.segment not in rows]
        by_ref = {row.ref: row for segment_rows in [*rows.values(), meanwhile] for row in segment_rows}
        kept = [by_ref[ref] for ref in accepted[:position] if ref in by_ref]
        behind = [by_ref[ref] for ref in accepted[position:] if ref in by_ref]
        named = {row.ref for row in [*kept, *behind]}
        late = [row for ref, row in by_ref.items() if ref not in named]
        self.queue.clear()
        self._to_accept.clear()
        self._to_ledger = []
        self._accepted.clear()
        self._known.update(rows)
        self._rows_left = dict(Counter(row.ref.segment for row in by_ref.values()))
        for row in kept:
            self._queue_restored(row, durable_entry=True)
        for row in [*behind, *late]:
            self._queue_restored(row, durable_entry=False)
        # Finished samples that live workers have yet to seal stay; those the checkpoint knows as done do not.
        self.completed = {
            uid: done for uid, done in self.completed.items() if uid not in self._accepted and uid not in self.frontier
        }
        return len(self.queue) + len(self._to_accept)

    def _queue_restored(self, row: SampleRow, *, durable_entry: bool) -> None:
        if row.sample_uid in self.frontier or row.sample_uid in self._accepted:
            self._spend(row)
            return
        self._accepted.add(row.sample_uid)
        if durable_entry:
            self.queue.append(row)
        else:
            self._to_accept.append(row)
            self._wake.set()
