"""The write-ahead log of one file of the run log: a JSON line per row, on its way to the disk at once.

Invariants: a line that was appended survives the death of the process (it is in the kernel), and a host crash once
``sync`` returned. What the file system refuses (full disk) is kept and tried again with the next line; nothing is
written behind a torn line. Does not raise: ``problem`` says what is wrong. One thread at a time calls ``append``;
``sync`` may run beside it. Reading: `read_lines`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class WriteAheadLog:
    """Append-only; the file is created with its first line (or exists already, empty)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: OSError | None = None
        self._fd: int | None = None
        self._size = 0  # bytes of whole lines in the file
        self._synced = 0
        self._waiting: list[bytes] = []  # lines the file system has not taken yet

    def append(self, line: Any) -> None:
        """Write one JSON-able row, and before it what could not be written earlier."""
        self._waiting.append(json.dumps(line, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n")
        self._drain()

    def _drain(self) -> None:
        try:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            data = b"".join(self._waiting)
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self.problem = error
            self._cut_torn_line()
            return
        self._size += len(data)
        self._waiting.clear()
        self.problem = None

    def _cut_torn_line(self) -> None:
        """Half a line must not stay: the next one would be glued to it."""
        if self._fd is None:
            return
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            self.problem = error

    def sync(self) -> None:
        """Everything the file system has taken so far survives a host crash. Raises OSError."""
        if self._fd is not None and self._synced < self._size:
            size = self._size
            os.fsync(self._fd)
            self._synced = size

    def close(self) -> None:
        """Let go of the file, keep it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Its rows are elsewhere now."""
        self.close()
        self.path.unlink(missing_ok=True)


def read_lines(path: Path) -> list[Any]:
    """Rows of a write-ahead log up to the first line that is torn or damaged. Raises FileNotFoundError."""
    out: list[Any] = []
    for line in path.read_bytes().split(b"\n")[:-1]:  # the piece behind the last line end is empty or torn
        try:
            out.append(json.loads(line))
        except ValueError:
            break
    return out
