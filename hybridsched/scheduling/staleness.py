"""How far generation may run ahead of training, in total (the window) and per sample (its age).

Owns: ``StalenessWindow`` (admission), ``sample_age`` and the rules of ``max_off_policy_strategy: wait``.

Invariants of the window: in flight + queued + consumed since the last sync never exceeds ``max_required`` through an
admission; each sample counts once, in exactly one of the three; a sample that ends with another verdict than
``trained`` gives its place back at once. Only ``restored`` and ``found`` may leave more than ``max_required`` (a
rollback brings back what several cycles had consumed); then nothing is admitted until training has caught up.

Not here: validation samples (they are outside), the sample's data, and what is on disk.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping

from hybridsched.errors import InternalError
from hybridsched.model import Verdict, WeightVersion


def max_required_samples(step_required_samples: int, staleness_threshold: float) -> int:
    """int(S x (1 + staleness_threshold)).

    A product that floating point puts a hair below an integer counts as that integer: 20 x 1.15 is 23, not 22.
    """
    return math.floor(step_required_samples * (1.0 + staleness_threshold) + 1e-9)


class Place(enum.Enum):
    """Where a counted sample is."""

    IN_FLIGHT = "in_flight"  #: admitted, not completed
    QUEUED = "queued"  #: completed, not taken for training
    CONSUMED = "consumed"  #: taken for training since the last sync


class WindowError(InternalError):
    """An event that contradicts what the window knows. Nothing was changed."""


class StalenessWindow:
    """Counts samples by uid. O(1) per event, but ``synced``, which is O(consumed)."""

    def __init__(self, max_required: int) -> None:
        if max_required < 1:
            raise WindowError(f"staleness window: max_required is {max_required}; nothing could ever be admitted")
        self.max_required = max_required
        self._place: dict[int, Place] = {}
        self._count = dict.fromkeys(Place, 0)

    @property
    def in_flight(self) -> int:
        """Admitted and not completed."""
        return self._count[Place.IN_FLIGHT]

    @property
    def queued(self) -> int:
        """Completed and not taken for training."""
        return self._count[Place.QUEUED]

    @property
    def consumed(self) -> int:
        """Taken for training since the last sync."""
        return self._count[Place.CONSUMED]

    @property
    def counted(self) -> int:
        """All of them together."""
        return len(self._place)

    def room(self) -> int:
        """Samples that may be admitted now; never negative."""
        return max(0, self.max_required - self.counted)

    def place(self, uid: int) -> Place | None:
        """Where a sample is; None: not counted."""
        return self._place.get(uid)

    def admitted(self, uid: int) -> None:
        """A prompt goes into generation. Raises WindowError without room or when it is counted already."""
        if uid in self._place:
            raise WindowError(f"staleness window: sample {uid} is admitted twice (it is {self._place[uid].value})")
        if not self.room():
            raise WindowError(f"staleness window: sample {uid} is admitted with no room: {self}")
        self._put(uid, Place.IN_FLIGHT)

    def completed(self, uid: int) -> None:
        """All responses are generated and rewarded; it waits for training."""
        self._move(uid, Place.IN_FLIGHT, Place.QUEUED, "completed")

    def taken(self, uid: int) -> None:
        """Taken into a collection. It keeps its place until the next sync."""
        self._move(uid, Place.QUEUED, Place.CONSUMED, "consumed")

    def verdict(self, uid: int, verdict: Verdict) -> None:
        """What became of it. ``trained`` keeps the place until the sync; every other gives it back now.

        A trained sample that a sync has released meanwhile is no error. Raises WindowError when a sample is said to
        be trained that was not consumed, or when it is not counted and not trained.
        """
        place = self._place.get(uid)
        if verdict is Verdict.TRAINED:
            if place not in (Place.CONSUMED, None):
                raise WindowError(f"staleness window: sample {uid} is trained but was never consumed ({place.value})")
            return
        if place is None:
            raise WindowError(f"staleness window: verdict {verdict.value} for sample {uid}, which is not counted")
        self._drop(uid)

    def reissued(self, uid: int) -> None:
        """It is generated again (dead replica, damaged segment). It keeps its place and counts once, as before.

        Raises WindowError when it is not counted.
        """
        if uid not in self._place:
            raise WindowError(f"staleness window: sample {uid} is issued again but is not counted")
        self._put(uid, Place.IN_FLIGHT)

    def found(self, uid: int) -> None:
        """A durable sample turned up that nobody counted (late listing after a resume). Nothing if it is counted.

        Like ``restored`` it may leave more than ``max_required``.
        """
        if uid not in self._place:
            self._put(uid, Place.QUEUED)

    def restored(self, *, in_flight: Iterable[int] = (), queued: Iterable[int] = ()) -> None:
        """After a resume or rollback: exactly these samples are there. May leave more than ``max_required``."""
        flying, waiting = list(in_flight), list(queued)
        if len({*flying, *waiting}) != len(flying) + len(waiting):
            raise WindowError("staleness window: a sample is restored twice")
        self._place = {**dict.fromkeys(flying, Place.IN_FLIGHT), **dict.fromkeys(waiting, Place.QUEUED)}
        self._count = {Place.IN_FLIGHT: len(flying), Place.QUEUED: len(waiting), Place.CONSUMED: 0}

    def synced(self) -> int:
        """A new weight version: what was consumed counts no more. What is in flight or queued is carried over.

        Returns how many places that gave back.
        """
        done = [uid for uid, place in self._place.items() if place is Place.CONSUMED]
        for uid in done:
            self._drop(uid)
        return len(done)

    def validate(self) -> None:
        """Raise WindowError unless the counts agree with the samples."""
        actual = dict.fromkeys(Place, 0)
        for place in self._place.values():
            actual[place] += 1
        if actual != self._count:
            raise WindowError(f"staleness window: counts {self._count} differ from its samples {actual}")

    def __repr__(self) -> str:
        return (
            f"StalenessWindow({self.in_flight} in flight + {self.queued} queued + {self.consumed} consumed "
            f"of {self.max_required})"
        )

    def _move(self, uid: int, old: Place, new: Place, event: str) -> None:
        place = self._place.get(uid)
        if place is not old:
            where = "not counted" if place is None else place.value
            raise WindowError(f"staleness window: sample {uid} is {event} but was {where}, not {old.value}")
        self._put(uid, new)

    def _put(self, uid: int, place: Place) -> None:
        old = self._place.get(uid)
        if old is not None:
            self._count[old] -= 1
        self._place[uid] = place
        self._count[place] += 1

    def _drop(self, uid: int) -> None:
        self._count[self._place.pop(uid)] -= 1


def effective_number(version: WeightVersion, current: WeightVersion, forks: Mapping[int, int]) -> int:
    """The number of ``version`` as seen from ``current``: the newest common ancestor of the two.

    ``forks[lineage]`` is the number at which that lineage was opened. What an older lineage did beyond the fork was
    rolled back, so a token sampled there is as far from today's weights as the fork is; one from before is an ancestor.
    Raises InternalError for a lineage or number from the future, and for an unknown fork.
    """
    if version.lineage > current.lineage or (version.lineage == current.lineage and version.number > current.number):
        raise InternalError(f"a token of version {version} is newer than the current version {current}")
    number = version.number
    for lineage in range(version.lineage + 1, current.lineage + 1):
        if lineage not in forks:
            raise InternalError(f"the fork of lineage {lineage} is not known (known: {dict(forks)})")
        number = min(number, forks[lineage])
    return number


def sample_age(oldest: WeightVersion, current: WeightVersion, forks: Mapping[int, int]) -> int:
    """Weight versions between the oldest token of a sample and now (0: sampled with the current weights)."""
    return current.number - effective_number(oldest, current, forks)


def too_old(age: int, max_age: int | None) -> bool:
    """True when ``max_off_policy_threshold`` forbids training on it (None: no bound)."""
    return max_age is not None and age > max_age


def admit_for_wait(ahead: int, consumed: int, step_required_samples: int, max_age: int | None) -> bool:
    """Strategy ``wait``: may a prompt be admitted now, so that its turn comes before it is too old?

    ``ahead``: samples in flight or queued; ``consumed``: taken since the last sync. Taken in order, the new sample is
    trained (consumed + ahead) // S syncs from now, and its oldest token is of the current version.
    """
    return max_age is None or (consumed + ahead) // step_required_samples <= max_age


def due_before_sync(
    oldest: Mapping[int, WeightVersion], current: WeightVersion, forks: Mapping[int, int], max_age: int | None
) -> list[int]:
    """Strategy ``wait``: uids that one more sync would make too old, oldest first.

    They must be finished and taken by the last collection of this cycle. ``oldest`` holds samples in flight or queued
    with the version of their oldest token; samples without a token yet are not in it. Those too old already are in the
    list too (they came over from a rollback): finishing them gives their place back.
    """
    if max_age is None:
        return []
    ages = {uid: sample_age(version, current, forks) for uid, version in oldest.items()}
    return sorted((uid for uid, age in ages.items() if age + 1 > max_age), key=lambda uid: (-ages[uid], uid))
