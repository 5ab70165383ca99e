"""Contracts between a node agent and whatever starts its workers, and between agents.

`processes.py` starts real processes on unix sockets, `simulation/` starts tasks; `transport/mpi.py` and
`transport/memory.py` carry envelopes between agents.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from hybridsched.runtime.messages import Envelope
from hybridsched.runtime.plan import WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended. ``reason`` is for people: signal or exit code and the last lines of its log."""

    reason: str
    clean: bool


class WorkerHandle(Protocol):
    """One running worker, as its agent sees it."""

    spec: WorkerSpec
    incarnation: str
    pid: int

    def send(self, envelope: Envelope) -> None:
        """Queue an envelope for the worker; silently dropped once it is dead (its exit is reported anyway)."""
        ...

    def send_raw(self, frame: bytes) -> None:
        """The same for an already encoded frame (relayed between agents)."""
        ...

    async def wait(self) -> WorkerExit:
        """Return when the worker is dead and everything it sent has been delivered."""
        ...

    def kill(self, reason: str) -> None:
        """End it now (SIGKILL); ``reason`` becomes part of the exit's reason."""
        ...


class Spawner(Protocol):
    """Starts workers."""

    async def spawn(
        self, spec: WorkerSpec, incarnation: str, deliver: Callable[[Envelope], None], deadline_s: float
    ) -> WorkerHandle:
        """Start a worker and wait until it is connected. ``deliver`` gets every envelope it sends.

        Raises WorkerDied or DeadlineExceeded, with the last lines of its log.
        """
        ...


class RewardPool(Protocol):
    """Scores responses in separate processes."""

    async def score(self, request: Envelope) -> Envelope:
        """Answer a RewardRequest envelope with a RewardReply envelope. Never raises for a bad reward function."""
        ...

    async def close(self) -> None:
        """End the processes."""
        ...


class Transport(Protocol):
    """Envelopes between agents (ranks). Never blocks; order is kept per pair of ranks."""

    rank: int
    size: int

    def send(self, rank: int, envelope: Envelope) -> None:
        """Queue an envelope for an agent."""
        ...

    async def run(self, deliver: Callable[[Envelope], None]) -> None:
        """Deliver arriving envelopes until cancelled."""
        ...

    async def flush(self, deadline_s: float) -> None:
        """Wait until everything queued has left this process."""
        ...


Offload = Callable[..., Awaitable[object]]
