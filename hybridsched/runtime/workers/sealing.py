"""From finished samples to durable segments: when to seal, and what happens while the disk is full.

Owns: one replica's segment writer. Invariants: only sealed rows are told durable, in order; nothing finished is dropped
when the disk is full, it is kept and tried again. Does not decide what is worth storing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from hybridsched.errors import NoSpace
from hybridsched.model import Sample
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import CONTROLLER
from hybridsched.sample_queue.base import SegmentInfo


class Writer(Protocol):
    """What the worker needs of a segment writer (sample_queue.writer.SegmentWriter)."""

    def add(self, sample: Sample) -> object: ...
    def due(self, now: float) -> str | None: ...
    def seal(self, reason: str) -> SegmentInfo: ...
    @property
    def pending(self) -> int: ...


class Sealer:
    """Seals by bytes, count, age, version change (the writer's rules) or when asked."""

    def __init__(
        self,
        endpoint: Endpoint,
        writer: Writer,
        clock: Clock,
        offload: Callable[..., Awaitable[object]],
        age_s: float,
        space_retry_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._writer = writer
        self._clock = clock
        self._offload = offload
        self._age_s = age_s
        self._space_retry_s = space_retry_s
        self._one = asyncio.Lock()
        self._added = asyncio.Event()
        self._blocked = False

    def add(self, sample: Sample) -> None:
        """A finished sample."""
        self._writer.add(sample)
        self._added.set()

    async def seal(self, reason: str) -> None:
        """Seal what is pending (nothing: returns at once); while the disk is full keep it and try again.

        Bounded by its callers' deadlines and by the run itself: losing finished samples is not an option.
        """
        async with self._one:
            while self._writer.pending:
                try:
                    info = await self._offload(self._writer.seal, reason)
                except NoSpace as full:
                    self._blocked = True
                    self._endpoint.tell(CONTROLLER, m.SpaceReport(True, str(full), self._writer.pending))
                    await asyncio.sleep(self._space_retry_s)
                    continue
                if self._blocked:
                    self._blocked = False
                    self._endpoint.tell(CONTROLLER, m.SpaceReport(False, "space again", 0))
                assert isinstance(info, SegmentInfo)
                self._endpoint.tell(CONTROLLER, m.SegmentSealed(info.segment, info.rows, info.n_bytes, reason))

    async def run(self) -> None:
        """Seal whenever something is due, until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            while self._writer.pending:
                reason = self._writer.due(self._clock.now())
                if reason is not None:
                    await self.seal(reason)
                    continue
                try:
                    async with asyncio.timeout(self._age_s):
                        await self._added.wait()
                    self._added.clear()
                except TimeoutError:
                    continue
