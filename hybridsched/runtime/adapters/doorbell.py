"""Wakes the agents of one host: "look, there is a message for you". MPI itself has nothing to wait on.

Owns one unix datagram socket per rank in a private folder. A ring is a hint and carries nothing: one that gets lost
only means that the other agent looks a little later, so ringing never blocks and never fails.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path


class Doorbell:
    """The bell of one rank, and the way to those of the others."""

    def __init__(self, folder: Path, rank: int) -> None:
        """folder: the same for all ranks of the host, private, of short path."""
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self._path(rank))

    def ring(self, rank: int) -> None:
        """Wake another rank."""
        try:
            self._socket.sendto(b"", self._path(rank))
        except OSError:
            return  # not there yet, gone, or rung so often that it is awake

    def answer(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` in the running event loop when somebody rings."""

        def rung() -> None:
            self._silence()
            wake()

        asyncio.get_running_loop().add_reader(self._socket, rung)

    def close(self) -> None:
        """Take the bell away. The event loop must not use it any more."""
        self._socket.close()

    def _silence(self) -> None:
        while True:
            try:
                self._socket.recv(1)
            except BlockingIOError:
                return

    def _path(self, rank: int) -> str:
        return os.fspath(self._folder / f"bell-{rank}")
