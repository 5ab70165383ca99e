"""The story of one entity, or of a kind of thing, as lines: when, what, why.

Entities: a replica or worker (``hybrid.0``, ``trainer.0``), a sample (its uid), a segment, a weight version (``0.3``);
a kind of events in singular or plural (``decisions``, ``faults``, ``samples``, ``leases``, ...), ``pool``, ``run``,
``lending``; or both (``lease 12``). Samples are also looked up in the queue's accept log and ledger. Reads only.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridsched.errors import HybridschedError, UserError
from hybridsched.model import Response
from hybridsched.report.run_data import RunData, load_run
from hybridsched.report.text import show
from hybridsched.runlog.rows import EventRow

#: Words for several kinds of events at once.
TOPICS = {
    "pool": ("pool", "switch", "tenancy"),
    "run": ("run", "agent", "checkpoint", "validation", "cycle"),
    "lending": ("decision", "pool", "switch", "tenancy"),
}

_VERSION = re.compile(r"\d+\.\d+")
_OF_VERSION = ("sync", "checkpoint", "validation", "cycle", "fault")


def explain(run_folder: Path, entity: str) -> str:
    """The story, one line an event. UserError: nothing in the run is called so. RunFolderError: there is no run log."""
    run = load_run(run_folder)
    wanted = entity.strip()
    belongs = _chooser(run, wanted)
    lines = [_line(event, run.start) for event in run.log.event_rows if belongs(event)]
    if wanted.isdigit():
        lines += _from_queue(run, int(wanted))
    elif _VERSION.fullmatch(wanted):
        lines += _figures(run, int(wanted.split(".")[1]))
    if not lines:
        raise UserError(_nothing(run, wanted))
    began = datetime.fromtimestamp(run.start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    head = f"{wanted} in run {run.run_id}; times in seconds since {began}"
    return "\n".join([head, *lines])


def _chooser(run: RunData, wanted: str) -> Callable[[EventRow], bool]:
    """Which events belong to the story."""
    kinds = _kinds(run, wanted)
    if kinds:
        return lambda event: event.kind in kinds
    kind, _, rest = wanted.partition(" ")
    if rest and _kinds(run, kind):
        kinds = _kinds(run, kind)
        return lambda event: event.kind in kinds and event.entity == rest.strip()
    if wanted.isdigit():
        uid = int(wanted)
        return lambda event: (event.kind, event.entity) == ("sample", wanted) or event.detail.get("uid") == uid
    if _VERSION.fullmatch(wanted):
        number = wanted.split(".")[1]
        return lambda event: (
            event.kind in _OF_VERSION
            and (event.entity == wanted or (event.kind == "validation" and event.entity == number))
        )
    named = re.compile(rf"(?<![\w.]){re.escape(wanted)}(?![\w]|\.\d)")

    def mentions(event: EventRow) -> bool:
        if event.entity == wanted or event.entity.startswith(f"{wanted}/"):
            return True
        return named.search(event.reason) is not None or named.search(event.detail_json) is not None

    return mentions


def _kinds(run: RunData, word: str) -> tuple[str, ...]:
    if word in TOPICS:
        return TOPICS[word]
    known = {event.kind for event in run.log.event_rows}
    for kind in (word, word.removesuffix("s"), word.removesuffix("es"), re.sub(r"ies$", "y", word)):
        if kind in known:
            return (kind,)
    return ()


def _line(event: EventRow, zero: float) -> str:
    change = f"{event.old} -> {event.new}" if event.old and event.old != event.new else event.new
    parts = [f"{event.time - zero:10.2f}  {event.kind:<10} {event.entity:<14} {change}"]
    if event.reason:
        parts.append(f"because: {event.reason}" if event.kind in ("decision", "replica", "pool") else event.reason)
    detail = {key: value for key, value in event.detail.items() if value not in ("", None, [], {})}
    if detail:
        parts.append("(" + ", ".join(f"{key}={_short(value)}" for key, value in detail.items()) + ")")
    return "  ".join(" ".join(part.split("\n")) if index else part for index, part in enumerate(parts))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return show(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return str(value)


def _from_queue(run: RunData, uid: int) -> list[str]:
    """What the queue says of a sample: its segment, what it holds, the accept log and the ledger."""
    queue = run.folder / "queue"
    if not queue.is_dir():
        return []
    from hybridsched.sample_queue.inspection import newest_chain
    from hybridsched.sample_queue.log import ACCEPT_LOG, LEDGER

    lines: list[str] = []
    for name, tell in ((ACCEPT_LOG, _accepted), (LEDGER, _verdict)):
        try:
            entries = newest_chain(queue, name)
        except HybridschedError as error:
            lines.append(f"{'':10}  the {name} log cannot be read: {error}")
            continue
        for position, entry in enumerate(entries):
            if entry.get("uid") != uid:
                continue
            if name == ACCEPT_LOG:
                lines += _content(run, entry)
            lines.append(tell(position, entry))
    return lines


def _content(run: RunData, entry: dict[str, Any]) -> list[str]:
    """When the segment of an accepted sample was sealed, and what the sample holds while it is still on disk."""
    from hybridsched.model import SegmentId
    from hybridsched.sample_queue.inspection import open_for_reading

    try:
        segment, row = SegmentId(*entry["segment"]), int(entry["row"])
    except (KeyError, TypeError, ValueError):
        return []  # the accept log's own line shows what there is
    events = [event for event in run.log.event_rows if (event.kind, event.entity) == ("segment", str(segment))]
    lines = [_line(event, run.start) for event in events]
    try:
        store = open_for_reading(run.folder)
        if segment not in store.list():
            return [
                *lines,
                f"{'content':>10}  no longer on disk: removed once a checkpoint held what was learnt from it",
            ]
        sample = store.read(segment)[row]
    except (HybridschedError, IndexError) as error:
        return [*lines, f"{'content':>10}  cannot be read: {error}"]
    responses = sample.responses
    rewards = ", ".join("-" if response.reward is None else show(response.reward) for response in responses)
    versions = sorted({run_.version for response in responses for run_ in response.version_runs})
    lengths = ", ".join(str(len(response.token_ids)) for response in responses)
    seconds = max(response.t_end for response in responses) - min(response.t_start for response in responses)
    generated = f"by {segment.producer} under version {' and '.join(map(str, versions))} in {show(seconds)} s"
    if sample.issue:
        generated += f"; issued again {sample.issue} times"
    return [
        *lines,
        f"{'content':>10}  {len(responses)} responses, generated {generated}",
        f"{'content':>10}  rewards {rewards}; lengths {lengths} tokens; {_finishes(responses)}",
    ]


def _finishes(responses: Sequence[Response]) -> str:
    counts = Counter(response.finish.value for response in responses)
    return ", ".join(f"{count} ended by {what}" for what, count in counts.most_common())


def _accepted(position: int, entry: dict[str, Any]) -> str:
    producer, incarnation, seq = (*entry.get("segment", ()), "?", "?", "?")[:3]
    where = f"{producer}/{incarnation}-{seq:08d}" if isinstance(seq, int) else f"{producer}/{incarnation}"
    return f"{'accept log':>10}  accepted as number {position}: row {entry.get('row')} of segment {where}"


def _verdict(position: int, entry: dict[str, Any]) -> str:
    version = ".".join(str(part) for part in entry.get("version", ()))
    when = f"under version {version}, collection {entry.get('collection')}"
    age = f", {entry['age']} versions old" if "age" in entry else ""
    prompt = f"prompt {entry.get('prompt_uid')}, epoch {entry.get('epoch')}"
    return f"{'ledger':>10}  verdict {entry.get('verdict')} {when}{age} ({prompt})"


def _figures(run: RunData, number: int) -> list[str]:
    """The most telling metrics of the cycle that ended with a version."""
    shown = ("timing_s/step", "rollout/reward/mean", "dynamic_resource/mq_size", "samples/trained")
    row = next((row for row in run.log.history() if row.step == number), None)
    if row is None:
        return []
    found = {name: value for name, value in row.values.items() if name in shown or name.startswith("val/reward/")}
    if not found:
        return []
    figures = ", ".join(f"{name} {show(value)}" for name, value in found.items())
    return [f"{row.time - run.start:10.2f}  {'metrics':<10} cycle {number}: {figures}"]


def _nothing(run: RunData, wanted: str) -> str:
    words = _known(run.log.event_rows)
    close = difflib.get_close_matches(wanted, words, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    some = ", ".join(words[:20])
    if wanted.isdigit():
        return f"{run.folder}: nothing is recorded of sample {wanted} (no verdict yet, and no trouble). Known: {some}"
    return f"{run.folder}: nothing in this run is called {wanted!r}; {hint}known are {some}, and uids of samples"


def _known(events: Sequence[EventRow]) -> list[str]:
    kinds = sorted({event.kind for event in events} | set(TOPICS))
    named = ("replica", "worker", "agent", "sync", "switch")
    entities = sorted({event.entity for event in events if event.kind in named})
    return [*kinds, *(entity for entity in entities if entity not in kinds)]
