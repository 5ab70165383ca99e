"""How long an engine's decode steps take, by the size of its batch, measured from outside.

Owns ``DecodeMeter``. It looks at the engine's progress whenever the worker does something and with every beat, and
books each stretch between two looks under the size of the batch meanwhile (rounded down to a power of two). What it
reports adds up: the sums of many stretches, replicas and cycles are again such a report.

Invariants: a stretch in which nothing ran, or that ``skip`` cut off, is booked nowhere; looking costs O(1) and changes
nothing in the engine. It does not know the engine's steps: a batch that shrinks between two looks counts with the mean
of both ends, and prefill is what the leases that came had to bring, not what the engine really did for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from hybridsched.model import Response
from hybridsched.runtime.clock import Clock

#: Sums of one batch size: seconds, steps, tokens decoded, tokens prefilled.
Sums = tuple[float, float, float, float]
NOTHING: Sums = (0.0, 0.0, 0.0, 0.0)


class Metered(Protocol):
    """What is looked at (engines.base.GenerationEngine)."""

    @property
    def progress(self) -> int: ...
    def running_sequences(self) -> int: ...
    def unfinished(self, key: str) -> int: ...


class DecodeMeter:
    """Looks at one engine. Sequences are taken to be admitted first come, first served."""

    def __init__(self, engine: Metered, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._sums: dict[int, Sums] = {}
        self._keys: dict[str, None] = {}
        self._at = 0.0
        self._progress = 0
        self._running = 0  # in the batch when the stretch began, and what came in since
        self._skipped = True  # the stretch that is open does not count
        self._prefill = 0  # tokens due in the engine
        self._queued: deque[int] = deque()  # tokens to prefill of sequences that may not have been admitted yet

    def enter(self, key: str, prompt_tokens: int, partials: Sequence[Response]) -> None:
        """A lease starts now: its unfinished responses will run."""
        self._look(leaving=0)
        self._keys[key] = None
        for response in partials:
            if not response.finished:
                self._queued.append(prompt_tokens + response.n_tokens)
                prompt_tokens = 0  # once for all responses

    def leave(self, key: str) -> None:
        """A lease ended just now, finished or aborted."""
        self._keys.pop(key, None)
        self._look(leaving=1)

    def look(self) -> None:
        """Book the stretch up to now and begin another one."""
        self._look(leaving=0)

    def _look(self, leaving: int) -> None:
        """leaving: sequences that ended just now."""
        now, progress, running = self._clock.now(), self._engine.progress, self._engine.running_sequences()
        work = progress - self._progress
        if work <= 0 and self._running + len(self._queued) and not self._skipped:
            return  # the engine has not come to it yet: the stretch goes on
        came = self._admitted(running)
        prefilled = min(work, self._prefill)
        self._prefill -= prefilled
        batch = max(1.0, 0.5 * (self._running + came + running + leaving))
        if work > 0 and not self._skipped and now > self._at:
            self._book(batch, now - self._at, work - prefilled, prefilled)
        if not running:
            self._prefill = 0
        self._at, self._progress, self._running, self._skipped = now, progress, running, False

    def _admitted(self, running: int) -> int:
        """How many queued sequences came into the batch meanwhile; their prefill is due."""
        waiting = max(0, sum(map(self._engine.unfinished, self._keys)) - running) if self._queued else 0
        before = len(self._queued)
        while len(self._queued) > waiting:
            self._prefill += self._queued.popleft()
        return before - len(self._queued)

    def skip(self) -> None:
        """What passes until the next look (a pause) is no decoding."""
        self._skipped = True

    def stop(self) -> None:
        """Look for the last time before a pause or an abort."""
        self.look()
        self.skip()

    def report(self) -> dict[int, Sums]:
        """Sums since the last report by size of the batch, a power of two."""
        sums, self._sums = self._sums, {}
        return sums

    def _book(self, batch: float, seconds: float, decoded: int, prefilled: int) -> None:
        size = 1 << (int(batch).bit_length() - 1)
        self._sums[size] = added(
            self._sums.get(size, NOTHING), (seconds, decoded / batch, float(decoded), float(prefilled))
        )


def added(a: Sums, b: Sums) -> Sums:
    """Sums of both."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
