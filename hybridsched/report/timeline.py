"""What every replica and trainer GPU did when: intervals from events. Pure.

A row of the picture is a replica on rollout nodes, or a trainer GPU. A hybrid replica has no row of its own: while it
is lent (READY), its trainer GPUs do what it does. Before and after, the trainer's own activity counts (``switch`` while
GPUs change hands). A process that is gone leaves a gap.

Invariants: intervals of a row do not overlap and are in order; equal neighbours are one interval; none is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hybridsched.runlog.rows import EventRow

#: What a row can be doing, in the order of legends.
ACTIVITIES = ("rollout", "train", "sync", "switch", "wait", "idle")


class Interval(NamedTuple):
    """From ``start`` to ``end`` (seconds since the epoch) somebody did ``what``."""

    start: float
    end: float
    what: str

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end - self.start


Timeline = dict[str, list[Interval]]


class _Tracks:
    """Open and closed intervals of all rows."""

    def __init__(self) -> None:
        self.done: Timeline = {}
        self._now: dict[str, tuple[float, str]] = {}

    def doing(self, row: str) -> str:
        return self._now.get(row, (0.0, ""))[1]

    def set(self, row: str, time: float, what: str) -> None:
        """From ``time`` on; "" ends what was."""
        since, before = self._now.get(row, (time, ""))
        if before == what:
            return
        self._close(row, since, time, before)
        if what:
            self._now[row] = (time, what)
            self.done.setdefault(row, [])
        else:
            self._now.pop(row, None)

    def close_all(self, time: float) -> None:
        for row in list(self._now):
            self.set(row, time, "")

    def _close(self, row: str, since: float, time: float, what: str) -> None:
        if not what or time <= since:
            return
        done = self.done[row]
        if done and (done[-1].end, done[-1].what) == (since, what):  # what was between them took no time
            since = done.pop().start
        done.append(Interval(since, time, what))


def timeline(events: Sequence[EventRow], end: float | None = None) -> Timeline:
    """Intervals of every row: standalone replicas first, then trainer GPUs. end: None takes the last event's time."""
    under = _gpus_under(events)
    tracks = _Tracks()
    ready: set[str] = set()
    last = time = events[0].time if events else 0.0
    for event in events:
        time = max(time, event.time)  # a clock set back must not give negative lengths
        if event.kind == "run":
            if event.new == "started":
                tracks.close_all(last)
                ready.clear()
            elif event.new in ("finished", "stopped", "failed"):
                tracks.close_all(time)
        elif event.kind == "activity":
            _on_activity(tracks, event, time, under, ready)
        elif event.kind == "replica":
            _on_replica(tracks, event, time, under, ready)
        elif event.kind == "tenancy" and event.new == "hybrid" and not under:
            tracks.set(event.entity, time, "rollout")  # whose hybrid it is cannot be told: it is lent, that is sure
        elif event.kind == "worker" and event.new == "exited":
            tracks.set(event.entity, time, "")
        last = time
    tracks.close_all(last if end is None else max(last, end))
    return {row: tracks.done[row] for row in sorted(tracks.done, key=_row_order) if tracks.done[row]}


def _on_activity(
    tracks: _Tracks, event: EventRow, time: float, under: Mapping[str, Sequence[str]], ready: set[str]
) -> None:
    if not event.entity.startswith("hybrid."):
        tracks.set(event.entity, time, event.new)
    elif event.entity in ready:
        for gpu in under.get(event.entity, ()):
            tracks.set(gpu, time, event.new)


def _on_replica(
    tracks: _Tracks, event: EventRow, time: float, under: Mapping[str, Sequence[str]], ready: set[str]
) -> None:
    if event.new == "ready":
        ready.add(event.entity)
    elif event.entity in ready:
        ready.discard(event.entity)
        for gpu in under.get(event.entity, ()):
            if tracks.doing(gpu) == "rollout":  # it died: nobody uses the GPU until it is taken back
                tracks.set(gpu, time, "idle")


def _gpus_under(events: Sequence[EventRow]) -> dict[str, list[str]]:
    """Trainer GPUs of every hybrid: equally many each, in order; {} when they do not divide evenly."""
    rows = {event.entity for event in events if event.kind in ("activity", "worker", "replica")}
    trainers = sorted((row for row in rows if row.startswith("trainer.")), key=_row_order)
    hybrids = sorted((row for row in rows if row.startswith("hybrid.")), key=_row_order)
    if not hybrids or len(trainers) % len(hybrids):
        return {}
    each = len(trainers) // len(hybrids)
    return {hybrid: trainers[i * each : (i + 1) * each] for i, hybrid in enumerate(hybrids)}


def _row_order(row: str) -> tuple[int, str, int, str]:
    kind, _, index = row.partition(".")
    return ({"standalone": 0, "trainer": 1}.get(kind, 2), kind, int(index) if index.isdigit() else 0, row)


def kind_of(row: str) -> str:
    """standalone.3 -> standalone."""
    return row.partition(".")[0]


def shares(rows: Timeline, start: float | None = None, end: float | None = None) -> dict[str, dict[str, float]]:
    """Share of time per activity, for each kind of row: {"standalone": {"rollout": 0.93, ...}, "trainer": {...}}."""
    seconds: dict[str, dict[str, float]] = {}
    for row, intervals in rows.items():
        sums = seconds.setdefault(kind_of(row), dict.fromkeys(ACTIVITIES, 0.0))
        for interval in clip(intervals, start, end):
            sums[interval.what] = sums.get(interval.what, 0.0) + interval.seconds
    out: dict[str, dict[str, float]] = {}
    for kind, sums in seconds.items():
        total = sum(sums.values())
        if total > 0:
            out[kind] = {what: value / total for what, value in sums.items()}
    return out


def clip(intervals: Iterable[Interval], start: float | None, end: float | None) -> list[Interval]:
    """The parts between ``start`` and ``end``."""
    out = []
    for interval in intervals:
        low = interval.start if start is None else max(interval.start, start)
        high = interval.end if end is None else min(interval.end, end)
        if high > low:
            out.append(Interval(low, high, interval.what))
    return out


def thin(intervals: Sequence[Interval], bins: int) -> list[Interval]:
    """At most ``bins`` intervals for a picture of that many pixels: each pixel shows what took most of its time."""
    if len(intervals) <= bins:
        return list(intervals)
    start, end = intervals[0].start, intervals[-1].end
    width = (end - start) / bins
    time_of: list[dict[str, float]] = [{} for _ in range(bins)]
    for interval in intervals:
        first = min(bins - 1, int((interval.start - start) / width))
        last = min(bins - 1, int((interval.end - start) / width))
        for index in range(first, last + 1):
            low = max(interval.start, start + index * width)
            high = min(interval.end, start + (index + 1) * width)
            if high > low:
                time_of[index][interval.what] = time_of[index].get(interval.what, 0.0) + high - low
    out: list[Interval] = []
    for index, times in enumerate(time_of):
        if sum(times.values()) < width / 2:
            continue  # mostly a gap
        what = max(times, key=lambda name: times[name])
        low, high = start + index * width, start + (index + 1) * width
        if out and out[-1].what == what and abs(out[-1].end - low) < width / 2:
            out[-1] = Interval(out[-1].start, high, what)
        else:
            out.append(Interval(low, high, what))
    return out
