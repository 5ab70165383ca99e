"""What the entries of the accept log and the ledger mean, and the check of "exactly once" over them. Pure.

Accept log   {"uid", "segment": [producer, incarnation, seq], "row"}: the total order in which samples are trained.
Ledger       {"uid", "verdict", "prompt_uid", "epoch", "version": [lineage, number], "collection"}: what became of it.

Not here: files (log.py), segments (store.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hybridsched.errors import QueueError
from hybridsched.model import RowRef, SegmentId, Verdict, WeightVersion

Entry = dict[str, Any]

_SHOWN = 10  # examples a message lists


def accept_entry(sample_uid: int, ref: RowRef) -> Entry:
    """Line of the accept log for one sample."""
    return {"uid": sample_uid, "segment": list(ref.segment), "row": ref.row}


def accepted_ref(entry: Entry) -> tuple[int, RowRef]:
    """(sample_uid, row) of an accept log line. QueueError when it is none."""
    try:
        producer, incarnation, seq = entry["segment"]
        return int(entry["uid"]), RowRef(SegmentId(str(producer), str(incarnation), int(seq)), int(entry["row"]))
    except (KeyError, TypeError, ValueError) as error:
        raise QueueError(f"not an accept log entry ({error!r}): {entry!r}") from error


def ledger_entry(
    sample_uid: int, verdict: Verdict, *, prompt_uid: str, epoch: int, version: WeightVersion, collection: int
) -> Entry:
    """Line of the ledger for one sample; version and collection say when the verdict fell."""
    return {
        "uid": sample_uid,
        "verdict": verdict.value,
        "prompt_uid": prompt_uid,
        "epoch": epoch,
        "version": list(version),
        "collection": collection,
    }


@dataclass(frozen=True)
class LedgerReport:
    """Result of :func:`verify_chain`. Gaps are samples without a verdict: in flight while the run goes on."""

    n_entries: int
    verdicts: dict[str, int]
    doubled: tuple[int, ...]  #: uids with more than one verdict
    unknown: tuple[str, ...]  #: entries that are not ledger lines
    reissued: tuple[tuple[int, str], ...]  #: (epoch, prompt_uid) that more than one uid stands for
    unaccepted: tuple[int, ...]  #: trained without having been accepted
    gaps: tuple[tuple[int, int], ...]  #: ranges [first, last] of uids below the frontier without a verdict
    complete: bool  #: whether gaps count as a fault
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Exactly once holds."""
        return not self.problems

    def text(self) -> str:
        """For people."""
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items())) or "none"
        waiting = sum(last - first + 1 for first, last in self.gaps)
        lines = [f"ledger: {self.n_entries} verdicts ({verdicts}), {waiting} samples without one"]
        return "\n".join(lines + [f"  PROBLEM {problem}" for problem in self.problems])


def verify_chain(
    entries: Iterable[Entry],
    *,
    accepted: Iterable[Entry] | None = None,
    frontier: int | None = None,
    complete: bool = False,
) -> LedgerReport:
    """Check a ledger chain: exactly one verdict per uid, every prompt issued once per epoch, no gaps.

    accepted: the accept log chain; a trained sample must be in it. frontier: every uid below it was issued (None: up
    to the highest one with a verdict). complete: the run has ended, so a uid without verdict is a fault.
    """
    entries = list(entries)
    seen: Counter[int] = Counter()
    verdicts: Counter[str] = Counter()
    unknown: list[str] = []
    prompts: dict[tuple[int, str], set[int]] = {}
    trained: set[int] = set()
    for entry in entries:
        try:
            uid, verdict = int(entry["uid"]), Verdict(entry["verdict"])
        except (KeyError, TypeError, ValueError):
            unknown.append(repr(entry))
            continue
        seen[uid] += 1
        verdicts[verdict.value] += 1
        if verdict is Verdict.TRAINED:
            trained.add(uid)
        if "prompt_uid" in entry and "epoch" in entry:
            prompts.setdefault((entry["epoch"], entry["prompt_uid"]), set()).add(uid)
    doubled = tuple(sorted(uid for uid, count in seen.items() if count > 1))
    reissued = tuple(sorted(key for key, uids in prompts.items() if len(uids) > 1))
    unaccepted = () if accepted is None else tuple(sorted(trained - {accepted_ref(entry)[0] for entry in accepted}))
    gaps = _gaps(seen, max(seen, default=-1) + 1 if frontier is None else frontier)
    problems = [
        _problem("samples have more than one verdict: uid", doubled),
        _problem("entries are not ledger lines:", unknown),
        _problem("prompts were issued more than once in an epoch: (epoch, prompt)", reissued),
        _problem("samples were trained but never accepted: uid", unaccepted),
        _problem("ranges of samples have no verdict: uid", gaps) if complete else "",
    ]
    return LedgerReport(
        len(entries),
        dict(verdicts),
        doubled,
        tuple(unknown),
        reissued,
        unaccepted,
        gaps,
        complete,
        tuple(problem for problem in problems if problem),
    )


def _gaps(seen: Iterable[int], frontier: int) -> tuple[tuple[int, int], ...]:
    gaps, expected = [], 0
    for uid in [*sorted(uid for uid in seen if uid < frontier), frontier]:
        if uid > expected:
            gaps.append((expected, uid - 1))
        expected = uid + 1
    return tuple(gaps)


def _problem(what: str, found: Iterable[Any]) -> str:
    items = list(found)
    if not items:
        return ""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{len(items)} {what} {', '.join(str(item) for item in items[:_SHOWN])}{more}"
