"""Which replica gets the next request.

Owns: the count of unfinished responses of every replica, sticky sessions, and the plan that evens the load out.

Invariants:

- a replica's load is the sum of its live leases, never below 0: a lease belongs to one epoch of its replica, and what
  arrives under an old epoch (or twice) changes nothing;
- only admitted replicas below their admission limit are chosen, at most ``max_samples`` leases at a time;
- the choice is the sticky replica unless that would leave it more than ``max_imbalance`` (in shares of capacity) above
  the least loaded; else the least loaded by load / capacity; ties rotate;
- at most ``max_sessions`` sessions are remembered, the least recently used is forgotten first.

Cost: a lazy heap of (share, last chosen); choose, acquire, release and update are O(log replicas), amortised.
Not here: talking to replicas, and what becomes of the leases that ``remove`` hands back.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridsched.errors import InternalError


class ReplicaLease(NamedTuple):
    """The right of one epoch of a replica to work on one sample. ``serial`` is unique in a balancer."""

    replica_id: str
    epoch: int
    serial: int


class Move(NamedTuple):
    """Move this lease to that replica."""

    lease: ReplicaLease
    target: str


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica carries. ``unfinished`` counts responses, ``share`` is unfinished / capacity."""

    epoch: int
    admitted: bool
    samples: int
    unfinished: int
    capacity: float
    share: float


@dataclass(slots=True)
class _Replica:
    replica_id: str
    capacity: float
    epoch: int
    admitted: bool
    leases: dict[ReplicaLease, int] = field(default_factory=dict)
    load: int = 0
    turn: int = 0  # when it was last chosen; ties go to the longest ago
    stamp: int = 0  # the heap entry that counts

    @property
    def share(self) -> float:
        return self.load / self.capacity


class LoadBalancer:
    """Chooses replicas and counts what they carry.

    max_samples: leases one replica may hold, None: no limit (``concurrent_samples_per_replica``).
    max_imbalance: how far above the least loaded a sticky choice may leave its replica, as a share of capacity.
    """

    def __init__(
        self, *, max_samples: int | None = None, max_sessions: int = 10_000, max_imbalance: float = 0.5
    ) -> None:
        if max_samples is not None and max_samples < 1:
            raise InternalError(f"load balancer: max_samples is {max_samples}; it must be at least 1")
        self.max_samples = max_samples
        self.max_sessions = max_sessions
        self.max_imbalance = max_imbalance
        self.examined = 0  #: heap entries looked at so far: the cost of choosing, for metrics and tests
        self._replicas: dict[str, _Replica] = {}
        self._heap: list[tuple[float, int, str, int]] = []
        self._sticky: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._turn = 0
        self._serial = 0
        self._stamp = 0

    # -- replicas

    def add(self, replica_id: str, capacity: float, epoch: int, *, admitted: bool = True) -> None:
        """Register a replica: ``capacity`` is the number of responses it can generate together.

        Under the epoch it already has: its leases stay, capacity and admission are taken over. Under a newer one it
        begins empty. Raises InternalError for an older epoch or a capacity that is not positive.
        """
        if not capacity > 0:
            raise InternalError(f"load balancer: replica {replica_id} has capacity {capacity}; it must be positive")
        known = self._replicas.get(replica_id)
        if known is not None and epoch < known.epoch:
            raise InternalError(f"load balancer: replica {replica_id} is at epoch {known.epoch}, not {epoch}")
        if known is None or epoch > known.epoch:
            # Last in the rotation: a newcomer does not jump the queue of ties.
            self._turn += 1
            known = _Replica(replica_id, capacity, epoch, admitted, turn=self._turn)
            self._replicas[replica_id] = known
        known.capacity, known.admitted = capacity, admitted
        self._refresh(known)

    def remove(self, replica_id: str) -> list[ReplicaLease]:
        """Cut a replica out; its live leases, oldest first, are the caller's to give to others. Unknown: []."""
        replica = self._replicas.pop(replica_id, None)
        return [] if replica is None else list(replica.leases)

    def hold(self, replica_id: str) -> None:
        """Choose it no more; its leases stay counted (weight sync). Unknown: nothing happens."""
        self._set_admitted(replica_id, False)

    def admit(self, replica_id: str) -> None:
        """Choose it again. Raises InternalError when it is not registered."""
        if replica_id not in self._replicas:
            raise InternalError(f"load balancer: replica {replica_id} is admitted before it was registered")
        self._set_admitted(replica_id, True)

    def _set_admitted(self, replica_id: str, admitted: bool) -> None:
        replica = self._replicas.get(replica_id)
        if replica is not None:
            replica.admitted = admitted
            self._refresh(replica)

    # -- choosing

    def choose(self, session: str | None, weight: int = 1, *, exclude: Collection[str] = ()) -> str | None:
        """The replica for a request of ``weight`` responses; None when no admitted replica has room.

        ``session``: requests of one session prefer the replica of the last one. Takes a turn in the rotation; the load
        is counted by ``acquire``.
        """
        least = self._least_loaded(exclude)
        if least is None:
            return None
        chosen = self._sticky_choice(session, weight, least, exclude) or least
        self._turn += 1
        chosen.turn = self._turn
        self._refresh(chosen)
        if session is not None and self.max_sessions > 0:
            self._sticky[session] = (chosen.replica_id, chosen.epoch)
            self._sticky.move_to_end(session)
            if len(self._sticky) > self.max_sessions:
                self._sticky.popitem(last=False)
        return chosen.replica_id

    def acquire(self, replica_id: str, weight: int = 1) -> ReplicaLease:
        """Count ``weight`` unfinished responses on a replica under its current epoch.

        Raises InternalError when the replica is not registered.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise InternalError(f"load balancer: no lease on replica {replica_id}: it is not registered")
        self._serial += 1
        lease = ReplicaLease(replica_id, replica.epoch, self._serial)
        replica.leases[lease] = _weight(weight)
        replica.load += weight
        self._refresh(replica)
        return lease

    def assign(self, session: str | None, weight: int = 1, *, exclude: Collection[str] = ()) -> ReplicaLease | None:
        """choose, then acquire."""
        replica_id = self.choose(session, weight, exclude=exclude)
        return None if replica_id is None else self.acquire(replica_id, weight)

    def update(self, lease: ReplicaLease, unfinished: int) -> bool:
        """Set how many responses of a lease are unfinished. False: the lease is not live (late); nothing changed."""
        replica = self._live(lease)
        if replica is None:
            return False
        replica.load += _weight(unfinished) - replica.leases[lease]
        replica.leases[lease] = unfinished
        self._refresh(replica)
        return True

    def release(self, lease: ReplicaLease) -> bool:
        """The lease ended. False: it is not live (old epoch, released before, replica gone); nothing changed."""
        replica = self._live(lease)
        if replica is None:
            return False
        replica.load -= replica.leases.pop(lease)
        self._refresh(replica)
        return True

    def clear_sticky(self) -> int:
        """Forget all sessions; returns how many there were."""
        n = len(self._sticky)
        self._sticky.clear()
        return n

    # -- looking

    def loads(self) -> dict[str, ReplicaLoad]:
        """Every registered replica, in order of registration."""
        return {
            r.replica_id: ReplicaLoad(r.epoch, r.admitted, len(r.leases), r.load, r.capacity, r.share)
            for r in self._replicas.values()
        }

    def leases(self, replica_id: str) -> dict[ReplicaLease, int]:
        """Live leases of a replica with their unfinished responses, oldest first. Unknown: {}."""
        replica = self._replicas.get(replica_id)
        return {} if replica is None else dict(replica.leases)

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._replicas

    @property
    def admitted(self) -> int:
        """Replicas that may be chosen."""
        return sum(r.admitted for r in self._replicas.values())

    def free_samples(self) -> int | None:
        """Leases that could be granted now over all admitted replicas; None: no limit."""
        if self.max_samples is None:
            return None
        return sum(max(0, self.max_samples - len(r.leases)) for r in self._replicas.values() if r.admitted)

    # -- evening out

    def moves_to_even(self, *, movable: Collection[ReplicaLease] | None = None) -> list[Move]:
        """Few moves that even the shares of the admitted replicas out; nothing is changed here.

        Each move takes a lease from the most to the least loaded replica and lowers the higher of the two shares; it
        is the one that brings the pair closest together. No lease moves twice. With equal weights and capacities no
        shorter list reaches the same evenness. ``movable``: leases that may move; None: all.
        """
        return plan_moves([r for r in self._replicas.values() if r.admitted], self.max_samples, movable)

    # -- inside

    def _live(self, lease: ReplicaLease) -> _Replica | None:
        replica = self._replicas.get(lease.replica_id)
        return replica if replica is not None and lease in replica.leases else None

    def _open(self, replica: _Replica) -> bool:
        return replica.admitted and (self.max_samples is None or len(replica.leases) < self.max_samples)

    def _refresh(self, replica: _Replica) -> None:
        """Give the replica a new heap entry; older ones are recognised by their stamp and thrown away when met."""
        self._stamp += 1
        replica.stamp = self._stamp
        if self._open(replica):
            heapq.heappush(self._heap, (replica.share, replica.turn, replica.replica_id, replica.stamp))
        if len(self._heap) > 64 + 4 * len(self._replicas):
            self._heap = [(r.share, r.turn, r.replica_id, r.stamp) for r in self._replicas.values() if self._open(r)]
            heapq.heapify(self._heap)

    def _least_loaded(self, exclude: Collection[str]) -> _Replica | None:
        aside = []
        found = None
        while self._heap:
            entry = self._heap[0]
            self.examined += 1
            replica = self._replicas.get(entry[2])
            if replica is None or replica.stamp != entry[3]:
                heapq.heappop(self._heap)
            elif entry[2] in exclude:
                aside.append(heapq.heappop(self._heap))
            else:
                found = replica
                break
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def _sticky_choice(
        self, session: str | None, weight: int, least: _Replica, exclude: Collection[str]
    ) -> _Replica | None:
        if session is None or session not in self._sticky:
            return None
        replica_id, epoch = self._sticky[session]
        replica = self._replicas.get(replica_id)
        if replica is None or replica.epoch != epoch:
            # Gone, or asleep in between: what made it worth going back to (its prefix cache) is gone too.
            del self._sticky[session]
            return None
        if replica_id in exclude or not self._open(replica):
            return None
        over = (replica.load + weight) / replica.capacity - least.share
        return replica if over <= self.max_imbalance else None


def _weight(unfinished: int) -> int:
    if unfinished < 0:
        raise InternalError(f"load balancer: {unfinished} unfinished responses; it cannot be negative")
    return unfinished


def plan_moves(
    replicas: list[_Replica], max_samples: int | None, movable: Collection[ReplicaLease] | None
) -> list[Move]:
    """See ``LoadBalancer.moves_to_even``. Ends because a lease moves at most once. O(moves log replicas)."""
    load = {r.replica_id: r.load for r in replicas}
    count = {r.replica_id: len(r.leases) for r in replicas}
    capacity = {r.replica_id: r.capacity for r in replicas}
    stay = {
        r.replica_id: [(w, lease) for lease, w in r.leases.items() if w > 0 and (movable is None or lease in movable)]
        for r in replicas
    }
    share = {i: load[i] / capacity[i] for i in load}
    high = [(-share[i], k, i) for k, i in enumerate(load)]
    low = [(share[i], k, i) for k, i in enumerate(load)]
    heapq.heapify(high)
    heapq.heapify(low)
    moves: list[Move] = []
    while high and low:
        (minus, k_src, src), (at, k_dst, dst) = high[0], low[0]
        if -minus != share[src] or not stay[src]:
            heapq.heappop(high)
            continue
        if at != share[dst] or (max_samples is not None and count[dst] >= max_samples):
            heapq.heappop(low)
            continue
        best = _best_lease(stay[src], load[src], capacity[src], load[dst], capacity[dst])
        if best is None:
            # Not even the least loaded takes one of these without becoming the higher of the two.
            heapq.heappop(high)
            continue
        weight, lease = best
        stay[src].remove(best)
        moves.append(Move(lease, dst))
        for i, k, delta in ((src, k_src, -weight), (dst, k_dst, weight)):
            load[i] += delta
            count[i] += 1 if delta > 0 else -1
            share[i] = load[i] / capacity[i]
            heapq.heappush(high, (-share[i], k, i))
            heapq.heappush(low, (share[i], k, i))
    return moves


def _best_lease(
    leases: list[tuple[int, ReplicaLease]], load_src: int, cap_src: float, load_dst: int, cap_dst: float
) -> tuple[int, ReplicaLease] | None:
    """The lease that brings both shares closest together and leaves the target below the source's present share."""
    ideal = (load_src * cap_dst - load_dst * cap_src) / (cap_src + cap_dst)
    fitting = [x for x in leases if (load_dst + x[0]) / cap_dst < load_src / cap_src]
    return min(fitting, key=lambda x: (abs(x[0] - ideal), x[1].serial), default=None)
