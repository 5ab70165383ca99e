"""Weight transport of emulated engines and trainers: takes time and carries nothing. The twin of `weight_transport`.

Owns `EmulatedSender` and `EmulatedReceiver`. Everything happens on the event loop (real or virtual), no thread, no
torch. The engine itself spends the time of a sync or hand-over in ``finish_update``; the sender spends the same beside
it. Addresses are labelled ``emulated``. Invariants: after `receive` or `read_handover` the engine holds the version; an
`abort` ends what runs within one turn of the loop, and what was cut leaves the engine without whole weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from hybridsched.config.schema import EmulatedConfig
from hybridsched.engines.base import GenerationEngine
from hybridsched.errors import WeightSyncError
from hybridsched.model import WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock

ADDRESS = "emulated:0"


class _Transfer:
    """A running transfer and why it was cut ("" = it was not)."""

    def __init__(self, work: Awaitable[None]) -> None:
        self.task = asyncio.ensure_future(work)
        self.reason = ""


class _Cuttable:
    """One transfer at a time that `abort` can end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: _Transfer | None = None

    def abort(self, reason: str) -> None:
        """End the running transfer; nothing happens when none is running."""
        if self._running is not None:
            self._running.reason = reason
            self._running.task.cancel()

    async def run(self, work: Awaitable[None], what: str) -> None:
        """Until ``work`` ended. Raises WeightSyncError when it was aborted, or what it raises."""
        self.abort(f"{what} was ordered meanwhile")
        transfer = self._running = _Transfer(work)
        try:
            await transfer.task
        except asyncio.CancelledError:
            if not transfer.reason:  # this worker itself is being cancelled
                transfer.task.cancel()
                raise
            raise WeightSyncError(f"{self._name}: {what} aborted: {transfer.reason}") from None
        finally:
            if self._running is transfer:
                self._running = None


class EmulatedSender:
    """The trainer's side."""

    def __init__(self, name: str, config: EmulatedConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._cut = _Cuttable(name)

    async def open(self, order: m.OpenSync) -> m.SyncAddress:
        """There is nothing to meet at and nothing will be sent."""
        return m.SyncAddress(ADDRESS, f"emulated.{order.attempt}", [])

    async def send(self, order: m.SendWeights) -> m.SyncDone:
        """Take ``emulated.sync_s``. Raises WeightSyncError when aborted."""
        return await self._spend(self._config.sync_s, f"sync of {order.version}")

    async def write_handover(self, order: m.WriteHandover) -> m.SyncDone:
        """Take ``emulated.handover_s``. Raises WeightSyncError when aborted."""
        return await self._spend(self._config.handover_s, f"hand-over {order.name}")

    def abort(self, reason: str) -> None:
        """End what runs."""
        self._cut.abort(reason)

    async def _spend(self, seconds: float, what: str) -> m.SyncDone:
        began = self._clock.now()
        await self._cut.run(asyncio.sleep(seconds), what)
        spent = self._clock.now() - began
        return m.SyncDone(spent, 0, {"emulated": spent})


class EmulatedReceiver:
    """The replica's side."""

    def __init__(self, name: str, engine: GenerationEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._cut = _Cuttable(name)

    async def receive(self, order: m.ReceiveWeights) -> m.SyncDone:
        """Hold ``order.version`` afterwards. Raises WeightSyncError when aborted, or what the engine raises."""
        return await self._update(order.version, order.keep_kv, f"sync of {order.version}")

    async def read_handover(self, order: m.ReadHandover) -> m.SyncDone:
        """The same from the node's trainer."""
        return await self._update(order.version, False, f"hand-over {order.name}")

    def abort(self, reason: str) -> None:
        """End what runs."""
        self._cut.abort(reason)

    async def _update(self, version: WeightVersion, keep_kv: bool, what: str) -> m.SyncDone:
        began = self._clock.now()
        await self._cut.run(self._load(version, keep_kv), what)
        spent = self._clock.now() - began
        return m.SyncDone(spent, 0, {"emulated": spent})

    async def _load(self, version: WeightVersion, keep_kv: bool) -> None:
        await self._engine.begin_update(())
        await self._engine.finish_update(version, keep_kv=keep_kv)
