"""A few sync cycles played forward from the numbers a policy is told: when would they end if hybrids were taken back
at this or that queue length?

Owns ``Outlook`` (the situation) and ``play_forward``. Where ``scheduling/forecast.py`` knows every sequence of one
replica, this model knows only what the controller measures: replicas are *places* for samples, and a sample needs the
seconds of work other samples were seen to need (``service_times``: completed ones, and those still in flight as lower
limits, so that long samples are not forgotten because they are not done yet). How fast work goes follows the load: all
replicas share the samples evenly, and more samples on each make all of them slower (``LoadModel``). No more are started
than there are places; those of a hybrid that leaves go on elsewhere at once. Events are the completions of the samples
of a few cycles; more than ``GRAIN`` samples a cycle are played in groups, so a decision costs the same at any size.

Invariants: pure and deterministic (durations are quantiles taken in golden-ratio order, nothing is drawn); samples are
conserved; every loop ends because each turn completes a sample, trains a collection or ends.

Not here: replicas of different speed, tokens, weights, and which plan to choose.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from hybridsched.scheduling.load import LoadModel

#: Samples a cycle is played with at most; larger cycles are played in groups of samples.
GRAIN = 64
_GOLDEN = 0.6180339887498949
#: What is left of a sample that is older than all that completed, as a share of the longest.
_OVERDUE = 0.1


@dataclass(frozen=True, slots=True)
class Outlook:
    """The situation right after a sync (``lent``: after the activation). Counts are samples, times seconds."""

    collection: int  #: R
    collections: int  #: K
    window: int  #: in flight + queued + consumed since the sync stay below this
    queue: int
    served_s: tuple[float, ...]  #: of samples in flight: time spent on replicas
    service_s: tuple[float, ...]  #: ascending: time a sample needs at mean load, each equally likely
    places: int  #: of standalone replicas
    hybrid_places: int
    train_s: float  #: one collection
    sync_s: float
    activate_s: float
    deactivate_s: float
    prompts_left: int | None = None
    lent: bool = False
    load: LoadModel = field(default_factory=LoadModel)
    per_replica: int = 1  #: places of one replica


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan comes to. ``first_s``: end of the first cycle; ``cost_s``: end of all, less what is worked ahead."""

    first_s: float
    cost_s: float
    waited_s: float


def service_times(completed: Sequence[float], running: Sequence[float], points: int = 48) -> tuple[float, ...]:
    """Quantiles of the time a sample needs, ascending (Kaplan-Meier: who is still running needs longer than so far).

    Empty when nothing has completed. What outlives every completed sample is put at the largest time seen.
    """
    if not completed:
        return ()
    ended = sorted(
        [(t, True) for t in completed] + [(t, False) for t in running], key=lambda pair: (pair[0], not pair[1])
    )
    steps: list[tuple[float, float]] = []  # (time, share that needs longer)
    alive, share = len(ended), 1.0
    for time, done in ended:
        if done:
            share *= 1.0 - 1.0 / alive
            steps.append((time, share))
        alive -= 1
    longest = max(ended[-1][0], steps[-1][0])
    out: list[float] = []
    index = 0
    for point in range(points):
        level = 1.0 - (point + 0.5) / points
        while index < len(steps) and steps[index][1] > level:
            index += 1
        out.append(steps[index][0] if index < len(steps) else longest)
    return tuple(out)


def play_forward(
    outlook: Outlook, target: int | None, cycles: int, places: int | None = None, *, draws: int = 1
) -> Forecast:
    """Play ``cycles`` sync cycles with lending until ``target`` samples are queued (None: no lending).

    places: of the hybrids that are lent (None: all). The first cycle starts as the outlook says. draws: orders in which
    durations are dealt out; the forecast is the mean over them, so that a plan does not win by its luck.
    """
    more = outlook.hybrid_places if places is None else places
    played = [_Play(outlook, target, more, draw / draws).run(cycles) for draw in range(draws)]
    first, cost, waited = (math.fsum(column) / draws for column in zip(*map(astuple, played), strict=True))
    return Forecast(first, cost, waited)


class _Play:
    """The state while it is played. ``g`` samples count as one; ``work`` is seconds of work at mean load so far."""

    def __init__(self, outlook: Outlook, target: int | None, hybrid_places: int, luck: float) -> None:
        o = outlook
        g = self.g = max(1, math.ceil(o.collection * o.collections / GRAIN))
        self.o, self.luck = o, luck
        self.need = max(1, round(o.collection / g))
        self.window = max(self.need * o.collections, round(o.window / g))
        self.target = None if target is None else target / g
        self.alone = max(0, round(o.places / g))
        self.more = max(1, round(hybrid_places / g))
        self.left = math.inf if o.prompts_left is None else float(round(o.prompts_left / g))
        self.queue = round(o.queue / g)
        self.t = self.waited = self.work = 0.0
        self.consumed = self.issued = 0
        self.lent = o.lent and target is not None
        if self.lent:
            self.alone += self.more
        self.ends: list[float] = [self._remaining(age) for age in o.served_s[::g]]  # heap, in work
        heapq.heapify(self.ends)
        self._fill()

    def _quantile(self, low: float) -> float:
        """The next duration, of the share of samples above ``low``."""
        times = self.o.service_s
        self.issued += 1
        u = (0.5 + self.luck + self.issued * _GOLDEN) % 1.0
        return times[min(len(times) - 1, int((low + u * (1.0 - low)) * len(times)))]

    def _remaining(self, age: float) -> float:
        times = self.o.service_s
        below = bisect.bisect_right(times, age) / len(times)
        if below >= 1.0:
            return _OVERDUE * times[-1]
        return max(0.0, self._quantile(below) - age)

    def _slowness(self) -> float:
        """Seconds per second of work with what runs now."""
        if self.o.load.fixed_share >= 1.0 and self.o.load.max_load == math.inf:
            return 1.0
        return self.o.load.slowness(len(self.ends) * self.o.per_replica / max(1, self.alone))

    def _fill(self) -> None:
        while len(self.ends) < self.alone:
            if self.left <= 0 or self.queue + self.consumed + len(self.ends) >= self.window:
                return
            self.left -= 1
            heapq.heappush(self.ends, self.work + self._quantile(0.0))

    def _next(self) -> float:
        """When the next sample completes."""
        return self.t + max(0.0, self.ends[0] - self.work) * self._slowness()

    def _complete_one(self) -> None:
        self.t = self._next()
        self.work = max(self.work, heapq.heappop(self.ends))
        self.queue += 1
        self._fill()

    def _until(self, t: float) -> None:
        while self.ends and self._next() <= t:
            self._complete_one()
        if self.ends:
            self.work += max(0.0, t - self.t) / self._slowness()
        self.t = t

    def _until_queued(self, wanted: float) -> None:
        while self.queue < wanted and self.ends:
            self._complete_one()

    def _lend(self) -> None:
        if not self.lent:
            self._until(self.t + self.o.activate_s)
            self.alone += self.more
            self._fill()
        assert self.target is not None
        self._until_queued(self.target)
        self.alone, self.lent = self.alone - self.more, False
        self._until(self.t + self.o.deactivate_s)

    def run(self, cycles: int) -> Forecast:
        first = 0.0
        for _ in range(cycles):
            began_waiting = self.waited
            lends = self.target is not None and (self.lent or self.left > 0 or bool(self.ends))
            if lends:
                self._lend()
            for _collection in range(self.o.collections):
                before = self.t
                self._until_queued(self.need)
                self.waited += self.t - before
                taken = min(self.need, self.queue)
                if not taken:
                    break
                self.queue -= taken
                self.consumed += taken
                self._until(self.t + self.o.train_s * taken / self.need)
            self.t += self.o.sync_s  # nobody generates
            self.consumed = 0
            self._fill()
            first = first or self.t
            starved = lends or self.waited > began_waiting
            if not (self.queue or self.ends):
                return Forecast(first, self.t, self.waited)
        return Forecast(first, self.t - (self._ahead() if starved else 0.0), self.waited)

    def _ahead(self) -> float:
        """What is queued or begun, in seconds of all places: generation that later cycles need not wait for."""
        times = self.o.service_s
        mean = math.fsum(times) / len(times)
        begun = math.fsum(max(0.0, mean - (end - self.work)) for end in self.ends)
        return (self.queue * mean + begun) / (self.alone + (self.more if self.target is not None else 0))
