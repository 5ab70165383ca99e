"""The two kinds of rows of a run log: how they look in memory, as a JSON line and as HDF5 columns. Pure.

Owns the columns and their meaning; all three forms hold the same. Adding a column is allowed, readers ignore what they
do not know. Numbers may be NaN or infinite (JSON lines use Python's spelling of them).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridsched.runlog.naming import metric_name, variable_name
from hybridsched.runlog.netcdf import SECONDS_SINCE_EPOCH, Table, Variable

SCHEMA, SCHEMA_VERSION = "hybridsched.runlog", 1

TEXT_COLUMNS = {
    "kind": "what kind of thing happened",
    "entity": "whom it happened to",
    "old": "state before",
    "new": "state after, or what happened",
    "reason": "why",
    "detail": "more, as a JSON object",
}
_TIME = {"units": SECONDS_SINCE_EPOCH, "long_name": "wall clock", "standard_name": "time", "calendar": "standard"}
_NOW = {"units": "s", "long_name": "monotonic clock of the process that wrote the row"}


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event. time: seconds since the epoch; now: seconds on the writer's monotonic clock; detail_json: an object.

    stream and attempt say who wrote it: the process, and which of its starts (counted from 1).
    """

    time: float
    now: float
    kind: str
    entity: str
    old: str
    new: str
    reason: str
    detail_json: str = "{}"
    stream: str = ""
    attempt: int = 0

    @property
    def detail(self) -> dict[str, Any]:
        """The detail as an object; {} when it is damaged."""
        try:
            value = json.loads(self.detail_json)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One call of ``metrics``: values by metric name, of one step."""

    time: float
    now: float
    step: int
    values: dict[str, float]
    stream: str = ""
    attempt: int = 0


def event_line(row: EventRow) -> list[Any]:
    """JSON-able form."""
    return [row.time, row.now, row.kind, row.entity, row.old, row.new, row.reason, row.detail_json]


def metrics_line(row: MetricsRow) -> list[Any]:
    """JSON-able form."""
    return [row.time, row.now, row.step, row.values]


def parse_event(line: Sequence[Any], stream: str, attempt: int) -> EventRow:
    """Inverse of ``event_line``. ValueError, TypeError or IndexError when it is none."""
    kind, entity, old, new, reason, detail = (str(text) for text in line[2:8])
    return EventRow(float(line[0]), float(line[1]), kind, entity, old, new, reason, detail, stream, attempt)


def parse_metrics(line: Sequence[Any], stream: str, attempt: int) -> MetricsRow:
    """Inverse of ``metrics_line``, except that NaN counts as absent. Raises as `parse_event`."""
    values = {str(name): float(value) for name, value in dict(line[3]).items() if value == value}
    return MetricsRow(float(line[0]), float(line[1]), int(line[2]), values, stream, attempt)


def event_table(rows: Sequence[EventRow], prefix: str = "") -> Table:
    """Columns over the dimension ``event``. ``prefix`` goes before the other columns' names (to sit beside metrics)."""
    columns = {
        "event": Variable(np.arange(len(rows), dtype=np.int64), {"long_name": "number of the event"}),
        f"{prefix}time": Variable(np.array([row.time for row in rows], dtype=np.float64), _TIME),
        f"{prefix}now": Variable(np.array([row.now for row in rows], dtype=np.float64), _NOW),
    }
    for name, meaning in TEXT_COLUMNS.items():
        attribute = "detail_json" if name == "detail" else name
        columns[prefix + name] = Variable([getattr(row, attribute) for row in rows], {"long_name": meaning})
    return Table("event", columns)


def metrics_table(rows: Sequence[MetricsRow]) -> Table:
    """Columns over the dimension ``step`` (values of which may repeat); NaN where a row has no such metric."""
    columns = {
        "step": Variable(np.array([row.step for row in rows], dtype=np.int64), {"long_name": "sync cycle"}),
        "time": Variable(np.array([row.time for row in rows], dtype=np.float64), _TIME),
        "now": Variable(np.array([row.now for row in rows], dtype=np.float64), _NOW),
    }
    for name, values in dense(rows).items():
        columns[variable_name(name)] = Variable(values, {"long_name": name, "units": unit_of(name)})
    return Table("step", columns, ("time", "now"))


def dense(rows: Sequence[MetricsRow]) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """All metrics that occur, in order of first occurrence: float64 [rows], NaN where absent."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    out = {name: np.full(len(rows), np.nan) for name in names}
    for index, row in enumerate(rows):
        for name, value in row.values.items():
            out[name][index] = value
    return out


def rows_of_events(columns: Mapping[str, Variable], stream: str, attempt: int) -> list[EventRow]:
    """Inverse of ``event_table`` (columns as read from a file). KeyError when a column is missing."""
    times, nows = (np.asarray(columns[name].values, dtype=float).tolist() for name in ("time", "now"))
    texts = [list(columns[name].values) for name in TEXT_COLUMNS]
    return [parse_event(row, stream, attempt) for row in zip(times, nows, *texts, strict=True)]


def rows_of_metrics(columns: Mapping[str, Variable], stream: str, attempt: int) -> list[MetricsRow]:
    """Inverse of ``metrics_table``, except that NaN counts as absent. KeyError when a column is missing."""
    times, nows, steps = (np.asarray(columns[name].values).tolist() for name in ("time", "now", "step"))
    names = [name for name in columns if name not in ("time", "now", "step")]
    metric = [str(columns[name].attrs.get("long_name", metric_name(name))) for name in names]
    values = np.array([columns[name].values for name in names], dtype=np.float64).reshape(len(names), len(steps))
    return [
        MetricsRow(
            float(times[i]),
            float(nows[i]),
            int(steps[i]),
            {name: float(v) for name, v in zip(metric, values[:, i], strict=True) if not np.isnan(v)},
            stream,
            attempt,
        )
        for i in range(len(steps))
    ]


def unit_of(metric: str) -> str:
    """CF unit of a metric by its name; "1" for shares and counts."""
    if metric.startswith("timing_s/") or metric.endswith(("_s", "_time", "seconds")):
        return "s"
    if metric.endswith(("/bytes", "_bytes")):
        return "byte"
    return "1"


def to_json(value: Any) -> str:
    """``value`` as JSON in ASCII; what JSON does not know becomes a number, a list, or its text."""
    try:
        return json.dumps(value, default=_plain, ensure_ascii=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:  # keys that are no strings, cycles: say so rather than lose the event
        return json.dumps({"unstorable": f"{type(error).__name__}: {error}"}, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return str(value)
