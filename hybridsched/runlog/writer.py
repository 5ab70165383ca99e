"""The run log of one process as HDF5 files: complete at any moment, also after kill -9.

Owns ``HDF5RunLog``, an `EventSink`. Every row is a line of a write-ahead log before `event` or `metrics` returns; the
owner calls `maybe_flush` about once a second (also from a thread), which fsyncs these lines, rewrites the open HDF5
files every ``flush_s`` and seals full ones. A later incarnation turns what a killed one left behind into sealed files.

Invariants: nothing here raises into the caller after construction (a full disk costs no row: it waits in memory, the
reason is in `problem` and, once, in Python's log); files are described in naming.py, their content in rows.py.
Does not: mirror to other tools (mirrors.py), read (reader.py), keep time (clocks are handed in).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybridsched.errors import RunFolderError
from hybridsched.runlog.naming import EVENTS, KINDS, METRICS, LogFile, is_stream_name
from hybridsched.runlog.netcdf import Table, write_netcdf
from hybridsched.runlog.parts import find_files, read_events, read_metrics
from hybridsched.runlog.rows import (
    SCHEMA,
    SCHEMA_VERSION,
    EventRow,
    MetricsRow,
    event_line,
    event_table,
    metrics_line,
    metrics_table,
    to_json,
)
from hybridsched.runlog.series import Series

_LOG = logging.getLogger("hybridsched.runlog")
_SYNC_S = 1.0
_Attrs = Mapping[str, str | int | float]


class HDF5RunLog:
    """Events and metrics of one process.

    folder: made when missing. stream: who writes, e.g. "controller"; one process at a time per stream. wall, now:
    clocks in seconds (epoch, monotonic). flush_s: how old the HDF5 files may be. attrs: go into every file.
    Raises RunFolderError when the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        stream: str,
        *,
        run_id: str,
        wall: Callable[[], float],
        now: Callable[[], float],
        flush_s: float = 10.0,
        rows_per_file: int = 4096,
        attrs: _Attrs | None = None,
    ) -> None:
        if not is_stream_name(stream):
            raise ValueError(f"{stream!r} cannot name a stream of the run log: use letters, digits, dots, dashes")
        self._wall, self._now, self._flush_s = wall, now, flush_s
        self._state, self._io = threading.Lock(), threading.Lock()
        self._closed = False
        self._warned = False
        self._flushed = self._synced = now()
        self.problem = ""  #: why the files lag behind; "" when they do not
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.incarnation = _claim(folder, stream)  #: which start of this stream, from 1
        except OSError as error:
            raise RunFolderError(
                f"{folder}: the run log cannot be written: {error.strerror}; check permissions and free space"
            ) from error
        described: dict[str, str | int | float] = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        described |= {"title": f"{stream} of run {run_id}", "run_id": run_id, "stream": stream, **(attrs or {})}
        self._guard(lambda: _adopt(folder, stream, self.incarnation, described))
        described["incarnation"] = self.incarnation
        first = {kind: LogFile(stream, kind, self.incarnation, 0) for kind in KINDS}
        self._events: Series[EventRow] = Series(
            folder, first[EVENTS], event_line, event_table, {**described, "kind": EVENTS}, rows_per_file
        )
        self._metrics: Series[MetricsRow] = Series(
            folder, first[METRICS], metrics_line, metrics_table, {**described, "kind": METRICS}, rows_per_file
        )

    def event(self, kind: str, entity: str, *, old: str = "", new: str = "", reason: str = "", **detail: Any) -> None:
        """See EventSink. After `close`: ignored."""
        text = to_json(detail) if detail else "{}"
        with self._state:
            if not self._closed:
                self._events.append(EventRow(self._wall(), self._now(), kind, entity, old, new, reason, text))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See EventSink. Several rows of one step are allowed. After `close`: ignored."""
        numbers = {name: _number(value) for name, value in values.items()}
        with self._state:
            if not self._closed:
                self._metrics.append(MetricsRow(self._wall(), self._now(), step, numbers))

    def maybe_flush(self) -> bool:
        """Do what is due; True when HDF5 files were rewritten. Call it often, from any one thread at a time or more."""
        with self._io:
            if self._closed:
                return False
            now = self._now()
            if now - self._synced >= _SYNC_S:
                self._synced = now
                self._guard(self._sync)
            due = now - self._flushed >= self._flush_s
            if due:
                self._flushed = now
            self._guard(lambda: self._write(everything=due))
            return due

    def flush(self) -> None:
        """Everything so far is in the HDF5 files and on the disk."""
        with self._io:
            if not self._closed:
                self._flushed = self._synced = self._now()
                self._guard(self._sync)
                self._guard(lambda: self._write(everything=True))

    def close(self) -> None:
        """Seal the files. What cannot be written stays in the write-ahead logs, which readers know."""
        with self._io:
            with self._state:
                if self._closed:
                    return
                self._closed = True
            for series in (self._events, self._metrics):
                self._guard(series.close)
                series.abandon()

    def _sync(self) -> None:
        self._events.sync()
        self._metrics.sync()

    def _write(self, *, everything: bool) -> None:
        for series in (self._events, self._metrics):
            series.seal_full()
            if everything:
                series.write_open()

    def _guard(self, act: Callable[[], None]) -> None:
        """Carry out; a failure becomes `problem` and one warning: whoever reports must not stop a run."""
        try:
            act()
        except (OSError, RuntimeError) as error:  # RuntimeError: how HDF5 reports a full disk when closing
            self.problem = f"{type(error).__name__}: {error}"
        else:
            waiting = next((s.problem for s in self._all() if s.problem is not None), None)
            self.problem = "" if waiting is None else f"{type(waiting).__name__}: {waiting}"
        if self.problem and not self._warned:
            _LOG.warning("the run log cannot be written and waits in memory: %s", self.problem)
        self._warned = bool(self.problem)

    def _all(self) -> list[Series[Any]]:
        return [getattr(self, name) for name in ("_events", "_metrics") if hasattr(self, name)]


def _claim(folder: Path, stream: str) -> int:
    """The next incarnation: creating its first write-ahead log takes it, so two starts cannot take the same."""
    while True:
        known = [file.incarnation for file in find_files(folder) if file.stream == stream]
        incarnation = max(known, default=0) + 1
        try:
            open(folder / LogFile(stream, EVENTS, incarnation, 0).wal, "xb").close()
        except FileExistsError:
            continue
        return incarnation


def _adopt(folder: Path, stream: str, incarnation: int, attrs: _Attrs) -> None:
    """What a killed incarnation left in write-ahead logs becomes sealed files."""
    for file in find_files(folder):
        wal = folder / file.wal
        if file.stream != stream or file.incarnation >= incarnation or not wal.exists():
            continue
        described = {**attrs, "incarnation": file.incarnation, "kind": file.kind, "number": file.number, "sealed": 1}
        table: Table | None = None
        if file.kind == EVENTS and (events := read_events(folder, file)):
            table = event_table(events)
        elif file.kind == METRICS and (metrics := read_metrics(folder, file)):
            table = metrics_table(metrics)
        if table is not None:
            write_netcdf(folder / file.data, [table], described)
        wal.unlink()


def _number(value: object) -> float:
    """A metric as float; NaN (missing) for what is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return float("nan")
