"""One kind of rows (events or metrics) of one process: buffer, write-ahead log, HDF5 files, one after another.

Invariants
    Every row is in the write-ahead log of its file, or in the sealed file, at any moment.
    `append` only touches memory and appends a line; HDF5 is written by `write`, from a snapshot, so that a thread can
    write while rows arrive. One thread at a time appends, one at a time writes (the owner holds locks for both).
    A sealed file is never touched again; its write-ahead log is removed after it is durable.

Does not: decide when to write (writer.py), read anything back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridsched.runlog.naming import LogFile
from hybridsched.runlog.netcdf import Table, write_netcdf
from hybridsched.runlog.wal import WriteAheadLog

Row = TypeVar("Row")


@dataclass(slots=True)
class _Part(Generic[Row]):
    """One file under construction."""

    name: LogFile
    wal: WriteAheadLog
    rows: list[Row] = field(default_factory=list)
    written: int = 0  #: rows in the HDF5 file as it is on disk


class Series(Generic[Row]):
    """All files of one kind, of one incarnation of one stream."""

    def __init__(
        self,
        folder: Path,
        first: LogFile,
        line_of: Callable[[Row], list[Any]],
        table_of: Callable[[Sequence[Row]], Table],
        attrs: Mapping[str, str | int | float],
        rows_per_file: int,
    ) -> None:
        self._folder, self._line_of, self._table_of = folder, line_of, table_of
        self._attrs, self._rows_per_file = attrs, rows_per_file
        self._full: list[_Part[Row]] = []
        self._open = self._begin(first)

    def _begin(self, name: LogFile) -> _Part[Row]:
        return _Part(name, WriteAheadLog(self._folder / name.wal))

    @property
    def problem(self) -> OSError | None:
        """Why rows are only in memory, if they are."""
        return self._open.wal.problem

    def append(self, row: Row) -> None:
        """Take one row."""
        part = self._open
        part.rows.append(row)
        part.wal.append(self._line_of(row))
        if len(part.rows) >= self._rows_per_file:
            self._full.append(part)
            name = part.name
            self._open = self._begin(LogFile(name.stream, name.kind, name.incarnation, name.number + 1))

    def sync(self) -> None:
        """Rows appended so far survive a host crash. Raises OSError."""
        for part in [*self._full, self._open]:
            part.wal.sync()

    def seal_full(self) -> None:
        """Write files that are full. Raises OSError or RuntimeError; then nothing is lost and it can be tried again."""
        while self._full:
            self._seal(self._full[0])
            del self._full[0]

    def write_open(self) -> None:
        """Rewrite the file in progress when it has new rows. Raises as `seal_full`."""
        part = self._open
        count = len(part.rows)  # rows that arrive from here on wait for the next time
        if count > part.written:
            self._write(part, part.rows[:count], sealed=False)
            part.written = count

    def close(self) -> None:
        """Seal everything. Raises as `seal_full`; the write-ahead logs stay then, and hold the rows."""
        self.seal_full()
        part = self._open
        if part.rows:
            self._seal(part)
        else:
            part.wal.remove()

    def abandon(self) -> None:
        """Let go of all files as they are."""
        for part in [*self._full, self._open]:
            part.wal.close()

    def _seal(self, part: _Part[Row]) -> None:
        self._write(part, part.rows, sealed=True)
        part.wal.remove()

    def _write(self, part: _Part[Row], rows: Sequence[Row], *, sealed: bool) -> None:
        described = {**self._attrs, "number": part.name.number, "sealed": int(sealed)}
        write_netcdf(self._folder / part.name.data, [self._table_of(rows)], described)
