"""Finding the files of a run log in a folder and reading the rows of one of them, whatever state it was left in.

A file has up to two forms: the HDF5 file (as of its last write) and its write-ahead log. Each holds a prefix of the
same rows, so the longer one is the truth: normally the log of the file in progress, but after a crash of the host the
HDF5 file may be ahead of a log whose last pages never reached the disk. Nothing is changed here.
"""

from __future__ import annotations

from pathlib import Path

from hybridsched.runlog.naming import LogFile, parse_file
from hybridsched.runlog.netcdf import read_netcdf
from hybridsched.runlog.rows import EventRow, MetricsRow, parse_event, parse_metrics, rows_of_events, rows_of_metrics
from hybridsched.runlog.wal import read_lines


def find_files(folder: Path) -> list[LogFile]:
    """All files of the run log in ``folder``, in the order of writing within each stream and kind."""
    found = (parse_file(path.name) for path in folder.iterdir())
    return sorted({entry[0] for entry in found if entry is not None})


def read_events(folder: Path, file: LogFile) -> list[EventRow]:
    """Rows of one events file; what cannot be read is left out. Raises nothing for missing or damaged files."""
    who = (file.stream, file.incarnation)
    logged = [parse_event(line, *who) for line in _lines(folder / file.wal)]
    if logged and (folder / file.data).exists():
        stored = _stored_events(folder, file)
        return stored if len(stored) > len(logged) else logged
    # Without a log the file is sealed; and a log that vanished meanwhile was sealed between our two looks.
    return logged or _stored_events(folder, file)


def read_metrics(folder: Path, file: LogFile) -> list[MetricsRow]:
    """Rows of one metrics file; as `read_events`."""
    who = (file.stream, file.incarnation)
    logged = [parse_metrics(line, *who) for line in _lines(folder / file.wal)]
    if logged and (folder / file.data).exists():
        stored = _stored_metrics(folder, file)
        return stored if len(stored) > len(logged) else logged
    return logged or _stored_metrics(folder, file)


def _lines(path: Path) -> list[list[object]]:
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        return []
    whole = []
    for line in lines:
        if not isinstance(line, list) or len(line) < 4:
            break  # valid JSON that is no row: the log is damaged from here on
        whole.append(line)
    return whole


def _stored_events(folder: Path, file: LogFile) -> list[EventRow]:
    try:
        columns, _attrs = read_netcdf(folder / file.data)
        return rows_of_events(columns, file.stream, file.incarnation)
    except (OSError, KeyError):
        return []


def _stored_metrics(folder: Path, file: LogFile) -> list[MetricsRow]:
    try:
        columns, _attrs = read_netcdf(folder / file.data)
        return rows_of_metrics(columns, file.stream, file.incarnation)
    except (OSError, KeyError):
        return []
