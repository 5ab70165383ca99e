"""Names of the run log: files of a stream, and metric names as NetCDF variable names. Pure.

Files of one process (stream ``controller``), kept apart by kind (``events``, ``metrics``), by incarnation (one start
of the process) and by number within it; no name is ever used for different content by two processes:

    controller-events-002-000005.nc            HDF5: rows of file 5, sealed or as of the last flush
    controller-events-002-000005.wal.jsonl     the same rows, one JSON line each, until the .nc is sealed

Variable names are ``[a-z0-9_]+``. ``variable_name`` is injective and ``metric_name`` its inverse: "/" becomes "__", and
what has no place in such a name becomes "_x<hex>_" (``val/reward/mean@8`` -> ``val__reward__mean_x40_8``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EVENTS, METRICS = "events", "metrics"
KINDS = (EVENTS, METRICS)

#: Columns next to the metrics that a metric of the same name must not hide.
RESERVED = frozenset({"step", "time", "now", "attempt", "event"})

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")
_TOKEN = re.compile(r"_x([0-9a-f]+)_|__|.", re.DOTALL)
_FILE = re.compile(r"(?P<stream>.+)-(?P<kind>events|metrics)-(?P<incarnation>\d{3,})-(?P<number>\d{6,})(?P<end>\..+)")
_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

DATA_END, WAL_END = ".nc", ".wal.jsonl"


@dataclass(frozen=True, slots=True, order=True)
class LogFile:
    """One file of a stream; sorts in the order of writing within a stream and kind."""

    stream: str
    kind: str
    incarnation: int
    number: int

    @property
    def stem(self) -> str:
        """Name without ending."""
        return f"{self.stream}-{self.kind}-{self.incarnation:03d}-{self.number:06d}"

    @property
    def data(self) -> str:
        """Name of the HDF5 file."""
        return self.stem + DATA_END

    @property
    def wal(self) -> str:
        """Name of the write-ahead log."""
        return self.stem + WAL_END


def parse_file(name: str) -> tuple[LogFile, str] | None:
    """(file, ending) of a file name; None for names that are not ours (temporary files, exports)."""
    found = _FILE.fullmatch(name)
    if found is None or found["end"] not in (DATA_END, WAL_END):
        return None
    return LogFile(found["stream"], found["kind"], int(found["incarnation"]), int(found["number"])), found["end"]


def is_stream_name(name: str) -> bool:
    """True when ``name`` can name a stream."""
    return _STREAM.fullmatch(name) is not None


def variable_name(metric: str) -> str:
    """The NetCDF variable name of a metric. ``metric`` is not empty."""
    if metric in RESERVED:
        return _escaped(metric[0]) + metric[1:]
    return "".join(_piece(metric, index) for index in range(len(metric)))


def metric_name(variable: str) -> str:
    """Inverse of ``variable_name``."""
    return "".join(_decoded(token) for token in _TOKEN.finditer(variable))


def _piece(text: str, index: int) -> str:
    char = text[index]
    if char == "/":
        return "__"
    if char in _PLAIN:
        return char if index or not char.isdigit() else _escaped(char)
    if char == "_":
        # A bare underscore only between plain characters: next to "/", an escape or "x" it could be read otherwise.
        before, after = text[index - 1 : index], text[index + 1 : index + 2]
        return char if before in _PLAIN and after in _PLAIN and after != "x" else _escaped(char)
    return _escaped(char)


def _escaped(char: str) -> str:
    return f"_x{ord(char):x}_"


def _decoded(token: re.Match[str]) -> str:
    if token[1] is not None:
        return chr(int(token[1], 16))
    return "/" if token[0] == "__" else token[0]
