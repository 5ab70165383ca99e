"""Reading a run log: of a live, killed or finished run, over all processes and all starts.

Owns ``RunLog``, everything in memory and in order, and the exports. Invariants: reading changes nothing and needs no
lock; a row is seen once, wherever it lies; two looks at a finished run give the same.
Does not: interpret (report/ does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hybridsched.errors import RunFolderError
from hybridsched.runlog.naming import EVENTS
from hybridsched.runlog.netcdf import write_netcdf
from hybridsched.runlog.parts import find_files, read_events, read_metrics
from hybridsched.runlog.rows import (
    SCHEMA,
    SCHEMA_VERSION,
    TEXT_COLUMNS,
    EventRow,
    MetricsRow,
    dense,
    event_table,
    metrics_table,
)

LOG_FOLDER = "log"

Row = TypeVar("Row", EventRow, MetricsRow)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Curve(NamedTuple):
    """One metric where it has a value. step: int64 [n]; value: float64 [n]; time: float64 [n], seconds (epoch)."""

    step: IntArray
    value: FloatArray
    time: FloatArray


@dataclass(frozen=True, slots=True)
class MetricTable:
    """All metrics, one row per step. step, attempt: int64 [n]; time: float64 [n]; columns: float64 [n], NaN = none."""

    step: IntArray
    time: FloatArray
    attempt: IntArray
    columns: dict[str, FloatArray]


class RunLog:
    """All rows of a run. ``event_rows`` by time; ``metric_rows`` as written, by time."""

    def __init__(self, folder: Path, event_rows: Sequence[EventRow], metric_rows: Sequence[MetricsRow]) -> None:
        self.folder = folder
        self.event_rows = _by_time(event_rows)
        self.metric_rows = _by_time(metric_rows)

    @staticmethod
    def open(run_folder: Path) -> RunLog:
        """Read what is there now. ``run_folder``: of the run, or its log folder. RunFolderError when there is none."""
        run_folder = Path(run_folder)
        folder = run_folder / LOG_FOLDER if (run_folder / LOG_FOLDER).is_dir() else run_folder
        files = find_files(folder) if folder.is_dir() else []
        if not files:
            raise RunFolderError(
                f"{run_folder}: holds no run log (no {LOG_FOLDER}/*.nc); is this the folder of a run that began?"
            )
        events: list[EventRow] = []
        metrics: list[MetricsRow] = []
        for file in files:
            if file.kind == EVENTS:
                events += read_events(folder, file)
            else:
                metrics += read_metrics(folder, file)
        return RunLog(folder, events, metrics)

    def events(self, kind: str | None = None, entity: str | None = None) -> list[EventRow]:
        """Events of a kind, of an entity, or both, by time."""
        return [row for row in self.event_rows if kind in (None, row.kind) and entity in (None, row.entity)]

    def history(self) -> list[MetricsRow]:
        """Metrics that count, one row per step, by step: what led to the present weights.

        Rows of one step (training, validation) are joined; of a metric given twice the later value holds. Steps that a
        resume or rollback went back behind are left out: a ``run restored`` event with version [lineage, number] ends
        the life of all steps above that number.
        """
        rollbacks = [(row.time, _restored_to(row)) for row in self.events("run") if row.new == "restored"]
        joined: dict[int, MetricsRow] = {}
        for row in self.metric_rows:
            if any(row.time < when and number is not None and row.step > number for when, number in rollbacks):
                continue
            before = joined.get(row.step)
            joined[row.step] = row if before is None else replace(row, values={**before.values, **row.values})
        return [joined[step] for step in sorted(joined)]

    def table(self) -> MetricTable:
        """The history as columns."""
        rows = self.history()
        return MetricTable(
            np.array([row.step for row in rows], dtype=np.int64),
            np.array([row.time for row in rows], dtype=np.float64),
            np.array([row.attempt for row in rows], dtype=np.int64),
            dense(rows),
        )

    def metrics(self) -> dict[str, Curve]:
        """The history by metric: where each has a value."""
        table = self.table()
        out: dict[str, Curve] = {}
        for name, values in table.columns.items():
            there = ~np.isnan(values)
            out[name] = Curve(table.step[there], values[there], table.time[there])
        return out

    def export_nc(self, path: Path) -> Path:
        """One NetCDF-4 file: metrics over ``step``, events (event_time, event_kind, ...) over ``event``."""
        attrs: dict[str, str | int | float] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "title": f"run log of {self.folder}",
        }
        tables = [metrics_table(self.history()), event_table(self.event_rows, "event_")]
        write_netcdf(path, tables, attrs)
        return path

    def export_parquet(self, folder: Path) -> list[Path]:
        """metrics.parquet (one row per step) and events.parquet in ``folder``, which is made when missing."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder.mkdir(parents=True, exist_ok=True)
        table = self.table()
        numbers: dict[str, Any] = {"step": table.step, "time": table.time, "attempt": table.attempt, **table.columns}
        texts = [name for name in TEXT_COLUMNS if name != "detail"]
        events: dict[str, Any] = {
            name: [getattr(row, name) for row in self.event_rows]
            for name in ("time", "now", "stream", "attempt", *texts, "detail_json")
        }
        written = []
        for name, columns in (("metrics", numbers), ("events", events)):
            pq.write_table(pa.table(columns), folder / f"{name}.parquet")
            written.append(folder / f"{name}.parquet")
        return written


def _by_time(rows: Sequence[Row]) -> list[Row]:
    """Rows of all processes by wall clock; those of one process keep their order even where the clock was set back."""
    latest: dict[tuple[str, int], float] = {}
    keyed = []
    for row in rows:
        who = (row.stream, row.attempt)
        latest[who] = max(latest.get(who, row.time), row.time)
        keyed.append((latest[who], row))
    return [row for _when, row in sorted(keyed, key=lambda pair: pair[0])]


def _restored_to(row: EventRow) -> int | None:
    version = row.detail.get("version")
    if isinstance(version, list) and len(version) == 2 and isinstance(version[1], int):
        return version[1]
    return None
