"""The run log in memory: what happened in a simulation, comparable byte for byte.

Owns ``MemoryRunLog``, an ``EventSink``. Invariants: events keep their order and their virtual time; ``dump`` is
canonical (one JSON object a line, sorted keys, floats by repr, nothing that depends on memory addresses), so two runs
of one seed give equal text. Observers see every event at once: invariant checks of simulation tests hang on there.
It writes no file and forgets nothing.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridsched.runtime.clock import Clock

_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Event:
    """One event. t: seconds on the clock; number counts from 0; detail is JSON-able and nobody else's."""

    number: int
    t: float
    kind: str
    entity: str
    old: str
    new: str
    reason: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One call of ``metrics``. ``after``: events recorded before it."""

    after: int
    t: float
    step: int
    values: dict[str, float]


class MemoryRunLog:
    """Keeps everything. An observer that raises ends the run: it is a test, and the test has failed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._observers: list[Callable[[Event], None]] = []
        self.events: list[Event] = []
        self.rows: list[MetricsRow] = []

    def observe(self, observer: Callable[[Event], None]) -> None:
        """Call ``observer`` with every event from now on, right after it was recorded."""
        self._observers.append(observer)

    def event(self, kind: str, entity: str, *, old: str = "", new: str = "", reason: str = "", **detail: Any) -> None:
        """See EventSink."""
        for name, value in detail.items():
            if type(value) not in _PLAIN:
                detail[name] = canonical(value)  # now: what it refers to may change later
        event = Event(len(self.events), self._clock.now(), kind, entity, old, new, reason, detail)
        self.events.append(event)
        for observer in self._observers:
            observer(event)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See EventSink."""
        row = {name: float(value) for name, value in values.items()}
        self.rows.append(MetricsRow(len(self.events), self._clock.now(), step, row))

    def of(self, kind: str | None = None, entity: str | None = None) -> list[Event]:
        """Events of a kind, of an entity, or both, in order."""
        return [e for e in self.events if kind in (None, e.kind) and entity in (None, e.entity)]

    def dump(self) -> str:
        """Canonical text of all events and metrics, in the order in which they were recorded."""
        lines: list[str] = []
        done = 0
        for row in self.rows:
            lines.extend(map(_event_line, self.events[done : row.after]))
            done = row.after
            lines.append(_line({"metrics": row.step, "t": row.t, "values": row.values}))
        lines.extend(map(_event_line, self.events[done:]))
        return "".join(lines)


def _event_line(event: Event) -> str:
    shown = {name: getattr(event, name) for name in ("t", "kind", "entity", "old", "new", "reason", "detail")}
    return _line({name: value for name, value in shown.items() if value not in ("", {})})


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"


def canonical(value: Any) -> Any:
    """JSON-able twin of ``value``; sets are sorted, and what JSON does not know becomes the name of its type."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return canonical(value.value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(canonical(key)): canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((canonical(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return f"<{type(value).__name__}>"
