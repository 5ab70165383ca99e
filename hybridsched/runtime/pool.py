"""All replicas of a run as the controller sees them: lifecycle, process, incarnation, and their place in the balancer.

Owns: one `ReplicaLifecycle` per replica and the log line of every transition. Invariants: the balancer knows exactly
the READY replicas; a transition that the table does not allow raises and changes nothing. Does not call workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridsched.model import ReplicaKind
from hybridsched.runlog.base import EventSink
from hybridsched.runtime.plan import RunPlan, replica_kind
from hybridsched.scheduling.lifecycle import (
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLifecycle,
    ReplicaState,
    advance,
    can,
)
from hybridsched.scheduling.load_balancer import LoadBalancer

_ACTIVITY = {
    ReplicaState.STARTING: "switch",
    ReplicaState.SYNCING: "sync",
    ReplicaState.HELD: "idle",
    ReplicaState.DRAINING: "switch",
    ReplicaState.ASLEEP: "idle",
    ReplicaState.FAILED: "idle",
}


class Pool:
    """Lifecycles of all replicas."""

    def __init__(self, plan: RunPlan, balancers: Sequence[LoadBalancer], capacity: int, log: EventSink) -> None:
        self._balancers = balancers
        self._capacity = capacity
        self._log = log
        self._replicas = {
            w.worker: ReplicaLifecycle(w.worker, replica_kind(w.worker)) for w in plan.workers if w.kind != "trainer"
        }
        self._ready: dict[str, ReplicaKind] = {}  # READY ones, in the order they became so
        self.incarnation: dict[str, str] = {}
        self.on_ready_change: Callable[[str], None] | None = None

    def __contains__(self, worker: str) -> bool:
        return worker in self._replicas

    def __getitem__(self, replica: str) -> ReplicaLifecycle:
        return self._replicas[replica]

    def names(self, kind: ReplicaKind | None = None, states: Sequence[ReplicaState] | None = None) -> list[str]:
        """Replicas of a kind in one of these states, in plan order."""
        return [
            name
            for name, life in self._replicas.items()
            if (kind is None or life.kind is kind) and (states is None or life.state in states)
        ]

    def ready(self, kind: ReplicaKind | None = None) -> list[str]:
        """Replicas that take requests."""
        return [name for name, its_kind in self._ready.items() if kind is None or its_kind is kind]

    @property
    def n_ready(self) -> int:
        """How many replicas take requests. O(1): asked on every completed sample."""
        return len(self._ready)

    def process_up(self, replica: str, incarnation: str) -> None:
        """A worker process connected."""
        self.incarnation[replica] = incarnation

    def process_gone(self, replica: str) -> None:
        """A worker process ended."""
        self.incarnation.pop(replica, None)

    def is_up(self, replica: str) -> bool:
        """True while its process is connected."""
        return replica in self.incarnation

    def incarnation_of(self, replica: str) -> str:
        """Of the connected process; "" when there is none."""
        return self.incarnation.get(replica, "")

    def can(self, replica: str, event: ReplicaEvent) -> bool:
        """True when the table allows it now."""
        return can(self._replicas[replica], event)

    def advance(self, replica: str, event: ReplicaEvent, reason: str = "") -> tuple[ReplicaEffect, ...]:
        """Step one replica; the balancer's share of the effects is done here, the rest is returned."""
        before = self._replicas[replica]
        after, effects = advance(before, event, reason)
        self._replicas[replica] = after
        turned = (before.state is ReplicaState.READY) != (after.state is ReplicaState.READY)
        if after.state is ReplicaState.READY:
            self._ready[replica] = after.kind
        else:
            self._ready.pop(replica, None)
        for effect in effects:
            self._balance(effect, after)
        self._log.event(
            "replica",
            replica,
            old=before.state.value,
            new=after.state.value,
            reason=reason,
            event=event.value,
            epoch=after.epoch,
        )
        activity = _ACTIVITY.get(after.state)
        if activity is not None and after.state is not before.state:
            self._log.event("activity", replica, new=activity)
        if turned and self.on_ready_change is not None:
            self.on_ready_change(replica)
        return effects

    def _balance(self, effect: ReplicaEffect, replica: ReplicaLifecycle) -> None:
        for balancer in self._balancers:
            if effect is ReplicaEffect.REGISTER:
                balancer.add(replica.replica_id, self._capacity, replica.epoch, admitted=False)
            elif effect is ReplicaEffect.ADMIT:
                balancer.admit(replica.replica_id)
            elif effect is ReplicaEffect.HOLD:
                balancer.hold(replica.replica_id)
            elif effect is ReplicaEffect.REMOVE:
                balancer.remove(replica.replica_id)
