"""Agents of one process talk through memory: simulation and tests. Latency is virtual, order per pair is kept.

`faults` may drop, repeat or delay envelopes (deterministic simulation tests); by default every envelope arrives once.
A delayed one is overtaken by later ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from hybridsched.runtime.messages import Envelope

#: (from rank, to rank, envelope) -> how often it arrives, or after which seconds more than the latency (one a copy).
Faults = Callable[[int, int, Envelope], int | Sequence[float]]


class MemoryNetwork:
    """The wire between all ranks of one simulated run."""

    def __init__(self, size: int, *, latency_s: float = 0.0005, faults: Faults | None = None) -> None:
        self.size = size
        self.latency_s = latency_s
        self._faults = faults
        self._deliver: dict[int, Callable[[Envelope], None]] = {}
        self._early: dict[int, list[Envelope]] = {}

    def transport(self, rank: int) -> MemoryTransport:
        """The end of the wire at ``rank``."""
        return MemoryTransport(self, rank)

    def send(self, src: int, dst: int, envelope: Envelope) -> None:
        """Deliver after the latency; kept until the other end runs."""
        copies = 1 if self._faults is None else self._faults(src, dst, envelope)
        loop = asyncio.get_running_loop()
        for late_s in (0.0,) * copies if isinstance(copies, int) else copies:
            loop.call_later(self.latency_s + late_s, self._arrive, dst, envelope)

    def attach(self, rank: int, deliver: Callable[[Envelope], None]) -> None:
        """The agent of ``rank`` listens now."""
        self._deliver[rank] = deliver
        for envelope in self._early.pop(rank, []):
            deliver(envelope)

    def detach(self, rank: int) -> None:
        """The agent of ``rank`` is gone; envelopes for it are lost."""
        self._deliver[rank] = lambda _envelope: None

    def _arrive(self, rank: int, envelope: Envelope) -> None:
        deliver = self._deliver.get(rank)
        if deliver is None:
            self._early.setdefault(rank, []).append(envelope)
        else:
            deliver(envelope)


class MemoryTransport:
    """Transport of one agent over a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.rank = rank
        self.size = network.size
        self._network = network

    def send(self, rank: int, envelope: Envelope) -> None:
        """Queue an envelope for another agent."""
        self._network.send(self.rank, rank, envelope)

    async def run(self, deliver: Callable[[Envelope], None]) -> None:
        """Deliver until cancelled."""
        self._network.attach(self.rank, deliver)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._network.detach(self.rank)

    async def flush(self, deadline_s: float) -> None:
        """Let what was sent arrive."""
        await asyncio.sleep(min(deadline_s, 2 * self._network.latency_s))
