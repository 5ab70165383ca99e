"""`hybridsched queue fsck`: does everything on disk fit together? Reads only, changes nothing.

Checked: the queue's header; every segment (all checksums, its name against its content); sequence gaps; samples in
several segments; the accept log against segments and ledger; the ledger chain ("exactly once"); quarantine, files of
others, leftovers.

A *problem* is damage or a broken promise and makes ``ok`` False. A *note* is normal in a run that was interrupted
(twins of re-issued samples, gaps after garbage collection, unfinished temporary files, quarantined segments).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hybridsched.errors import QueueError, RunFolderError
from hybridsched.model import RowRef, SegmentId
from hybridsched.sample_queue.inspection import newest_chain, open_for_reading
from hybridsched.sample_queue.ledger import Entry, LedgerReport, accepted_ref, verify_chain
from hybridsched.sample_queue.log import ACCEPT_LOG, LEDGER, log_headers
from hybridsched.sample_queue.segment import verify_segment
from hybridsched.sample_queue.store import QUEUE_FOLDER, FileSegmentStore


@dataclass
class FsckReport:
    """What was found. ``damaged`` maps a segment to its error, ``twins`` a uid to all rows that hold it."""

    run_folder: Path
    n_segments: int = 0
    n_samples: int = 0
    n_bytes: int = 0
    n_accepted: int = 0
    damaged: dict[SegmentId, str] = field(default_factory=dict)
    twins: dict[int, list[RowRef]] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)
    quarantined: dict[SegmentId, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    leftovers: list[str] = field(default_factory=list)
    ledger: LedgerReport | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No damage, no broken promise."""
        return not self.problems

    def text(self) -> str:
        """For people: one line per finding, the verdict last."""
        lines = [
            f"{self.run_folder}: {self.n_segments} segments, {self.n_samples} samples, {self.n_bytes} bytes, "
            f"{self.n_accepted} accepted"
        ]
        if self.ledger is not None:
            lines.append(self.ledger.text().splitlines()[0])
        lines += [f"note     {note}" for note in self.notes]
        lines += [f"PROBLEM  {problem}" for problem in self.problems]
        lines.append("ok" if self.ok else f"{len(self.problems)} problems")
        return "\n".join(lines)


def fsck(run_folder: Path, *, complete: bool = False) -> FsckReport:
    """Check the queue of a run. complete: the run has ended, so every issued sample must have a verdict."""
    report = FsckReport(Path(run_folder))
    try:
        store = open_for_reading(report.run_folder)
    except (RunFolderError, QueueError) as error:
        report.problems.append(str(error))
        return report
    rows = _check_segments(store, report)
    _note_the_rest(store, report)
    accepted, verdicts = _read_logs(report, store.run_id)
    if accepted is not None:
        _check_accepted(report, accepted, verdicts or [], rows)
    if verdicts is not None:
        _check_ledger(report, verdicts, accepted, complete)
    return report


def _check_segments(store: FileSegmentStore, report: FsckReport) -> dict[SegmentId, list[int]]:
    """Verify all segments; returns the uids of each intact one by row."""
    uids: dict[SegmentId, list[int]] = {}
    where: defaultdict[int, list[RowRef]] = defaultdict(list)
    for segment in store.list():
        report.n_segments += 1
        try:
            summary = verify_segment(store.path(segment))
        except QueueError as error:
            report.damaged[segment] = str(error)
            report.problems.append(f"segment {segment}: {error}")
            continue
        except FileNotFoundError:
            report.notes.append(f"segment {segment} disappeared while fsck ran")
            continue
        report.n_samples += len(summary.rows)
        report.n_bytes += summary.n_bytes
        uids[segment] = [row.sample_uid for row in summary.rows]
        for row in summary.rows:
            where[row.sample_uid].append(row.ref)
    report.twins = {uid: refs for uid, refs in sorted(where.items()) if len(refs) > 1}
    return uids


def _note_the_rest(store: FileSegmentStore, report: FsckReport) -> None:
    """Twins, gaps, quarantine, foreign files, leftovers."""
    for uid, refs in report.twins.items():
        report.notes.append(f"sample {uid} is in {len(refs)} rows (it was re-issued): {_refs(refs)}")
    report.quarantined = store.quarantined()
    for segment, reason in report.quarantined.items():
        report.notes.append(f"quarantined {segment}: {reason}")
    report.foreign = store.foreign()
    report.notes += [f"foreign file {text}" for text in report.foreign]
    folder = report.run_folder / QUEUE_FOLDER / "seg"
    report.leftovers = sorted(str(path.relative_to(folder)) for path in folder.glob("*/.*.tmp"))
    report.notes += [f"unfinished file {name} (its producer removes it at its next start)" for name in report.leftovers]
    numbers: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for segment in [*store.list(), *report.quarantined]:
        numbers[segment.producer, segment.incarnation].add(segment.seq)
    for (producer, incarnation), seen in sorted(numbers.items()):
        missing = sorted(set(range(min(seen), max(seen))) - seen)
        if missing:
            report.gaps.append(f"{producer}/{incarnation}: {', '.join(map(str, missing))}")
    report.notes += [f"gap in sequence numbers of {gap} (removed, or not visible yet)" for gap in report.gaps]


def _read_logs(report: FsckReport, run_id: str) -> tuple[list[Entry] | None, list[Entry] | None]:
    queue = report.run_folder / QUEUE_FOLDER
    chains: list[list[Entry] | None] = []
    for name in (ACCEPT_LOG, LEDGER):
        try:
            report.problems += [
                f"{name} log of incarnation {header.incarnation} belongs to run {header.run_id!r}"
                for header in log_headers(queue, name)
                if header.run_id != run_id
            ]
            chains.append(newest_chain(queue, name))
        except QueueError as error:
            report.problems.append(str(error))
            chains.append(None)
    return chains[0], chains[1]


def _check_accepted(
    report: FsckReport, accepted: Iterable[Entry], verdicts: Iterable[Entry], uids: dict[SegmentId, list[int]]
) -> None:
    """Every accepted row that still waits for its verdict must be readable and hold the sample it was accepted as."""
    done = {entry.get("uid") for entry in verdicts}
    first: dict[int, int] = {}
    for position, entry in enumerate(accepted):
        report.n_accepted += 1
        try:
            uid, ref = accepted_ref(entry)
        except QueueError as error:
            report.problems.append(f"accept log entry {position}: {error}")
            continue
        if uid in first:
            report.problems.append(f"sample {uid} was accepted twice: at {first[uid]} and {position}")
            continue
        first[uid] = position
        there = uids.get(ref.segment)
        if there is None:
            if uid not in done and ref.segment not in report.damaged:
                state = "is quarantined" if ref.segment in report.quarantined else "is gone"
                report.problems.append(
                    f"sample {uid} was accepted and has no verdict, but segment {ref.segment} {state}"
                )
        elif not 0 <= ref.row < len(there) or there[ref.row] != uid:
            report.problems.append(f"accept log entry {position}: row {ref.row} of {ref.segment} is not sample {uid}")


def _check_ledger(report: FsckReport, verdicts: list[Entry], accepted: list[Entry] | None, complete: bool) -> None:
    try:
        report.ledger = verify_chain(verdicts, accepted=accepted, complete=complete)
    except QueueError:
        report.ledger = verify_chain(verdicts, complete=complete)  # the damaged accept entry is reported already
    report.problems += [f"ledger: {problem}" for problem in report.ledger.problems]


def _refs(refs: Iterable[RowRef]) -> str:
    return ", ".join(f"{ref.segment} row {ref.row}" for ref in refs)
