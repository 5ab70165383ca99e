"""What a clock is, and the one of the real world.

Owns the ``Clock`` protocol that everything in ``runtime`` is handed, and ``RealClock``. The virtual twin lives in
``hybridsched.simulation.clock``. This is the only module of ``runtime`` that may read the machine's time; the others
get a clock handed in (DESIGN.md section 3, rule 2).

Invariants: ``now`` never goes back and is on the axis of the event loop's own ``time()``, so a deadline computed from
it can be given to ``loop.call_at``; ``wall`` is for people and files and may jump.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: one to measure with, one to write down."""

    def now(self) -> float:
        """Seconds on the event loop's axis (monotonic, arbitrary zero)."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class RealClock:
    """The machine's clocks. ``now`` is ``time.monotonic``, which asyncio's standard loops use as ``time()`` too."""

    __slots__ = ()

    def now(self) -> float:
        """Seconds on the event loop's axis."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()
