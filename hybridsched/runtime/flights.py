"""What the rollouter remembers of a sample in flight, and of a running validation. Plain data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybridsched.model import Prompt, Purpose, SamplingParams, WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.scheduling.load_balancer import LoadBalancer, ReplicaLease

#: The weights a run starts with.
FIRST = WeightVersion(0, 0)
LEASE_TRIES = 3  #: a sample whose leases end with an error that often is given up


class Prompts(Protocol):
    """The endless prompt stream (data.stream.PromptStream)."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int) -> Prompt: ...
    def epoch_of(self, position: int) -> int: ...


@dataclass(slots=True)
class InFlight:
    """One sample between admission and completion."""

    lease: int
    uid: int
    purpose: Purpose
    replica: str
    token: ReplicaLease  #: what the load balancer counts for it
    n: int
    unfinished: int
    issue: int = 0
    parked: bool = False
    holder: str = ""  #: replica that was told to hand it over, until the new one has been heard of
    tokens: int = 0  #: of its partials, when parked
    admitted_at: float = 0.0
    retry_at: float = 0.0  #: compat: peer: not sent again before
    version: WeightVersion = FIRST  #: current when it was (re-)issued: not newer than its oldest token
    served_s: float = 0.0  #: seconds spent on replicas under earlier leases
    since: float | None = None  #: on a replica since then; None: parked

    def served(self, now: float) -> float:
        """Seconds spent on replicas so far."""
        return self.served_s + (0.0 if self.since is None else now - self.since)

    def moved(self, now: float, on_replica: bool) -> None:
        """It came onto a replica, or left it."""
        self.served_s, self.since = self.served(now), now if on_replica else None


@dataclass(slots=True)
class ValidationRun:
    """Validation samples of one version."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    next: int = 0
    again: deque[int] = field(default_factory=deque)
    results: dict[int, m.SampleCompleted] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        """Some samples have still to be sent."""
        return bool(self.again) or self.next < len(self.prompts)

    def take(self) -> int:
        """The next sample to send."""
        if self.again:
            return self.again.popleft()
        self.next += 1
        return self.next - 1

    @property
    def done(self) -> bool:
        """All samples came back."""
        return len(self.results) == len(self.prompts)


def leases_to_move(flights: Iterable[InFlight], balancer: LoadBalancer, *, everything: bool) -> dict[str, list[int]]:
    """Running training leases to abort so that the load becomes even: replica -> leases."""
    running = {f.token: f for f in flights if f.purpose is Purpose.TRAIN and not f.parked}
    chosen = list(running) if everything else [move.lease for move in balancer.moves_to_even()]
    out: dict[str, list[int]] = {}
    for token in chosen:
        if token in running:
            out.setdefault(running[token].replica, []).append(running[token].lease)
    return out
