"""The life of a replica, of the pool of hybrids and of a trainer GPU: literal tables, and one way to step through them.

Owns: ``STANDALONE_TABLE`` and ``HYBRID_TABLE`` (replicas), ``POOL_TABLE`` (STANDALONE_ONLY <-> HYBRID_ACTIVE),
``TENANCY_TABLE`` (who may use a trainer GPU), ``advance`` and ``diagram``.

Rules of comment, and of change:

1. A table is the only place that says what may happen. No ``if state ==`` anywhere else decides a transition.
2. An event is something that *has happened* (or was decided); effects are what the caller must do *now*, in this order.
   Effects are idempotent: "remove from the balancer" of a replica that is not there is no error.
3. An event that is not in the table raises ``IllegalTransition`` with the entity's story and changes nothing.
4. Requests go to READY only. Weights arrive in SYNCING only, and only SYNCING leads to HELD, HELD to READY.
5. Every way from ASLEEP back to work begins a new epoch: messages under an old one are void. A standalone replica that
   only passes through a sync keeps its epoch, because with ``sync_mode: keep`` so do its leases.
6. ACTIVATING and DEACTIVATING end in STANDALONE_ONLY or HYBRID_ACTIVE, whatever happens.

Not here: time, deadlines and doing anything (``runtime/resource_controller.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hybridsched.errors import InternalError
from hybridsched.model import ReplicaKind, Tenant

#: Entries an entity remembers of its own story.
STORY_LENGTH = 32


class ReplicaState(enum.Enum):
    """Where a replica is in its life."""

    STARTING = "starting"  #: process and engine come up
    ASLEEP = "asleep"  #: up, without usable weights; a hybrid holds no GPU memory (proven)
    SYNCING = "syncing"  #: receives weights; generation is paused
    HELD = "held"  #: holds the current weights, registered, takes no request yet
    READY = "ready"  #: takes requests
    DRAINING = "draining"  #: no new requests; running ones are aborted or finished, then it sleeps
    FAILED = "failed"  #: its process is gone


class ReplicaEvent(enum.Enum):
    """What happens to a replica."""

    STARTED = "started"  #: the engine is up
    SLEPT = "slept"  #: the engine holds nothing any more, measured
    SYNC_BEGUN = "sync_begun"  #: a weight sync or hand-over (or one more attempt of it) begins
    WEIGHTS_LOADED = "weights_loaded"  #: all tensors of the version are there and verified
    ADMITTED = "admitted"  #: it may generate
    DRAIN_BEGUN = "drain_begun"  #: it is taken out (deactivation, failed activation, orderly stop)
    DIED = "died"  #: process ended, or no progress within its deadline
    RESTARTED = "restarted"  #: a new process was started in its place


class ReplicaEffect(enum.Enum):
    """What the caller does after a replica's transition."""

    NEW_EPOCH = "new_epoch"  #: (done by ``advance``) leases of the old epoch are void
    REGISTER = "register"  #: known to the load balancer, held
    RESUME = "resume"  #: the engine generates again
    ADMIT = "admit"  #: the load balancer may choose it
    HOLD = "hold"  #: the load balancer chooses it no more; its leases stay counted
    PAUSE = "pause"  #: the engine stops (abort, keep or wait)
    REMOVE = "remove"  #: cut out of the load balancer
    ABORT = "abort"  #: running requests return as partials
    SLEEP = "sleep"  #: release KV cache and weights
    REISSUE = "reissue"  #: its leases go elsewhere


S, E, F = ReplicaState, ReplicaEvent, ReplicaEffect
ReplicaTable = Mapping[tuple[ReplicaState, ReplicaEvent], tuple[ReplicaState, tuple[ReplicaEffect, ...]]]

_COMMON: ReplicaTable = {
    # Waking up, or joining after a restart: a new epoch, so that nothing said before counts.
    (S.ASLEEP, E.SYNC_BEGUN): (S.SYNCING, (F.NEW_EPOCH,)),
    # One more attempt: survivors of a failed sync stay and repeat all of it.
    (S.SYNCING, E.SYNC_BEGUN): (S.SYNCING, ()),
    # First registered and held, then resumed, then admitted: a request never meets an engine that does not generate.
    (S.SYNCING, E.WEIGHTS_LOADED): (S.HELD, (F.REGISTER,)),
    (S.HELD, E.ADMITTED): (S.READY, (F.RESUME, F.ADMIT)),
    # Routing is cut first: a retried request must not come back to a replica that is leaving.
    (S.READY, E.DRAIN_BEGUN): (S.DRAINING, (F.REMOVE, F.ABORT, F.SLEEP)),
    (S.HELD, E.DRAIN_BEGUN): (S.DRAINING, (F.REMOVE, F.ABORT, F.SLEEP)),
    (S.SYNCING, E.DRAIN_BEGUN): (S.DRAINING, (F.REMOVE, F.ABORT, F.SLEEP)),
    (S.DRAINING, E.SLEPT): (S.ASLEEP, ()),
    # Death, from anywhere; a second report of the same death is normal (agent and socket both notice).
    (S.STARTING, E.DIED): (S.FAILED, ()),
    (S.ASLEEP, E.DIED): (S.FAILED, ()),
    (S.SYNCING, E.DIED): (S.FAILED, (F.REMOVE, F.REISSUE)),
    (S.HELD, E.DIED): (S.FAILED, (F.REMOVE, F.REISSUE)),
    (S.READY, E.DIED): (S.FAILED, (F.REMOVE, F.REISSUE)),
    (S.DRAINING, E.DIED): (S.FAILED, (F.REMOVE, F.REISSUE)),
    (S.FAILED, E.DIED): (S.FAILED, ()),
    (S.FAILED, E.RESTARTED): (S.STARTING, ()),
}

STANDALONE_TABLE: ReplicaTable = {
    **_COMMON,
    # Up with the weights of the model folder, which nobody may generate with: it waits for a sync.
    (S.STARTING, E.STARTED): (S.ASLEEP, ()),
    # Every sync, while generating or while still held (validation, a second sync right after a rollback).
    (S.READY, E.SYNC_BEGUN): (S.SYNCING, (F.HOLD, F.PAUSE)),
    (S.HELD, E.SYNC_BEGUN): (S.SYNCING, ()),
}

HYBRID_TABLE: ReplicaTable = {
    **_COMMON,
    # A hybrid loads once, lets go of the GPU, and only then may the trainer allocate.
    (S.STARTING, E.STARTED): (S.DRAINING, (F.SLEEP,)),
    # No sync from READY or HELD: while a hybrid is lent, the trainer holds no parameters it could send.
}

REPLICA_TABLES: Mapping[ReplicaKind, ReplicaTable] = {
    ReplicaKind.STANDALONE: STANDALONE_TABLE,
    ReplicaKind.HYBRID: HYBRID_TABLE,
}


class PoolState(enum.Enum):
    """Who generates."""

    STANDALONE_ONLY = "standalone_only"
    ACTIVATING = "activating"  #: hybrids are being lent
    HYBRID_ACTIVE = "hybrid_active"
    DEACTIVATING = "deactivating"  #: hybrids are being taken back


class PoolEvent(enum.Enum):
    """What happens to the pool of hybrids."""

    ACTIVATE_BEGUN = "activate_begun"
    ACTIVATED = "activated"  #: every lent hybrid that lives is READY (0 of 0 counts)
    ACTIVATE_FAILED = "activate_failed"  #: none could be lent, or the trainer needs its GPUs back
    DEACTIVATE_BEGUN = "deactivate_begun"
    DEACTIVATED = "deactivated"  #: all GPU memory proven released
    DEACTIVATE_UNDONE = "deactivate_undone"  #: cancelled before anything was released
    DEACTIVATE_FORCED = "deactivate_forced"  #: a hybrid did not let go in time; its process is killed


class PoolEffect(enum.Enum):
    """What the controller does after a transition of the pool."""

    HAND_OVER = "hand_over"  #: weights to the hybrids, over the tenancy of every GPU
    ADD_REPLICAS = "add_replicas"
    RESUME_GENERATION_REPLICAS = "resume_generation_replicas"
    REMOVE_REPLICAS = "remove_replicas"
    ABORT_REPLICAS = "abort_replicas"
    SLEEP_REPLICAS = "sleep_replicas"
    KILL_REPLICAS = "kill_replicas"  #: those that still hold memory
    LOAD_TRAINER = "load_trainer"  #: the trainer brings everything back
    REPORT = "report"  #: a failed transition is an event of its own


_PS, _PE, _PF = PoolState, PoolEvent, PoolEffect
_TAKE_BACK = (_PF.REMOVE_REPLICAS, _PF.ABORT_REPLICAS, _PF.SLEEP_REPLICAS)
_LEND = (_PF.ADD_REPLICAS, _PF.RESUME_GENERATION_REPLICAS)

PoolTable = Mapping[tuple[PoolState, PoolEvent], tuple[PoolState, tuple[PoolEffect, ...]]]
POOL_TABLE: PoolTable = {
    (_PS.STANDALONE_ONLY, _PE.ACTIVATE_BEGUN): (_PS.ACTIVATING, (_PF.HAND_OVER, *_LEND)),
    (_PS.ACTIVATING, _PE.ACTIVATED): (_PS.HYBRID_ACTIVE, ()),
    # Whatever was half lent goes back the whole way.
    (_PS.ACTIVATING, _PE.ACTIVATE_FAILED): (_PS.STANDALONE_ONLY, (*_TAKE_BACK, _PF.LOAD_TRAINER, _PF.REPORT)),
    (_PS.HYBRID_ACTIVE, _PE.DEACTIVATE_BEGUN): (_PS.DEACTIVATING, _TAKE_BACK),
    (_PS.DEACTIVATING, _PE.DEACTIVATED): (_PS.STANDALONE_ONLY, (_PF.LOAD_TRAINER,)),
    (_PS.DEACTIVATING, _PE.DEACTIVATE_UNDONE): (_PS.HYBRID_ACTIVE, (*_LEND, _PF.REPORT)),
    # A dead process holds no memory, so killing proves the release.
    (_PS.DEACTIVATING, _PE.DEACTIVATE_FORCED): (
        _PS.STANDALONE_ONLY,
        (_PF.KILL_REPLICAS, _PF.LOAD_TRAINER, _PF.REPORT),
    ),
}


class TenancyEvent(enum.Enum):
    """What happens to a trainer GPU."""

    HANDOVER_BEGUN = "handover_begun"
    WEIGHTS_HANDED = "weights_handed"  #: the hybrid holds its weights, checksums agree
    HANDOVER_UNDONE = "handover_undone"  #: failed or cancelled; the hybrid released everything
    RELEASE_PROVEN = "release_proven"  #: measured: the hybrid holds nothing (or its process is dead)


class TenancyEffect(enum.Enum):
    """What the trainer and the hybrid on that GPU do, in order."""

    TRAINER_KEEPS_PARAMETERS_ONLY = "trainer_keeps_parameters_only"  #: gradients, optimizer state offloaded
    HYBRID_MAPS_WEIGHTS = "hybrid_maps_weights"
    TRAINER_DROPS_PARAMETERS = "trainer_drops_parameters"
    HYBRID_MAPS_KV = "hybrid_maps_kv"
    TRAINER_LOADS_BACK = "trainer_loads_back"


_TE, _TF = TenancyEvent, TenancyEffect
TenancyTable = Mapping[tuple[Tenant, TenancyEvent], tuple[Tenant, tuple[TenancyEffect, ...]]]
TENANCY_TABLE: TenancyTable = {
    (Tenant.TRAINER, _TE.HANDOVER_BEGUN): (
        Tenant.HANDOVER,
        (_TF.TRAINER_KEEPS_PARAMETERS_ONLY, _TF.HYBRID_MAPS_WEIGHTS),
    ),
    # Only after the trainer has dropped its parameters may KV cache be mapped: the budgets are not summed.
    (Tenant.HANDOVER, _TE.WEIGHTS_HANDED): (Tenant.HYBRID, (_TF.TRAINER_DROPS_PARAMETERS, _TF.HYBRID_MAPS_KV)),
    (Tenant.HANDOVER, _TE.HANDOVER_UNDONE): (Tenant.TRAINER, (_TF.TRAINER_LOADS_BACK,)),
    (Tenant.HYBRID, _TE.RELEASE_PROVEN): (Tenant.TRAINER, (_TF.TRAINER_LOADS_BACK,)),
}


@dataclass(frozen=True, slots=True)
class ReplicaLifecycle:
    """One replica. ``epoch`` counts its activations, ``story`` is its last transitions, oldest first."""

    replica_id: str
    kind: ReplicaKind
    state: ReplicaState = ReplicaState.STARTING
    epoch: int = 0
    story: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.kind.value} replica {self.replica_id}"


@dataclass(frozen=True, slots=True)
class PoolLifecycle:
    """The pool of hybrids. ``epoch`` counts activations."""

    state: PoolState = PoolState.STANDALONE_ONLY
    epoch: int = 0
    story: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        return "hybrid pool"

    @property
    def settled(self) -> bool:
        """True when no switch is half done."""
        return self.state in (PoolState.STANDALONE_ONLY, PoolState.HYBRID_ACTIVE)


@dataclass(frozen=True, slots=True)
class GpuTenancy:
    """One trainer GPU. ``epoch`` counts hand-overs."""

    gpu: str
    state: Tenant = Tenant.TRAINER
    epoch: int = 0
    story: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For messages."""
        return f"trainer GPU {self.gpu}"


class IllegalTransition(InternalError):
    """An event that the table does not know in this state. ``entity`` is as it was; its story is in the message."""

    def __init__(self, entity: Entity, event: enum.Enum, reason: str = "") -> None:
        self.entity = entity
        self.event = event
        self.story = entity.story
        why = f" ({reason})" if reason else ""
        story = "; ".join(entity.story) or "none yet"
        super().__init__(
            f"{entity.name}: event {event.value!r}{why} is not possible in state {entity.state.value!r} "
            f"(epoch {entity.epoch}). Its story, oldest first: {story}. This is a bug in hybridsched."
        )


Entity = ReplicaLifecycle | PoolLifecycle | GpuTenancy
T = TypeVar("T", ReplicaLifecycle, PoolLifecycle, GpuTenancy)


def table_of(entity: Entity) -> Mapping[Any, tuple[Any, tuple[Any, ...]]]:
    """The table an entity lives by."""
    if isinstance(entity, ReplicaLifecycle):
        return REPLICA_TABLES[entity.kind]
    return POOL_TABLE if isinstance(entity, PoolLifecycle) else TENANCY_TABLE


#: Events that open a new epoch without saying so in their effects.
_OPENS_EPOCH = frozenset({PoolEvent.ACTIVATE_BEGUN, TenancyEvent.HANDOVER_BEGUN})


def advance(entity: T, event: enum.Enum, reason: str = "") -> tuple[T, tuple[Any, ...]]:
    """The entity after ``event``, and what to do now, in order.

    Raises IllegalTransition, carrying the entity's story, when the table does not know the event in this state.
    """
    row = table_of(entity).get((entity.state, event))
    if row is None:
        raise IllegalTransition(entity, event, reason)
    state, effects = row
    epoch = entity.epoch + (ReplicaEffect.NEW_EPOCH in effects or event in _OPENS_EPOCH)
    line = f"{entity.state.value} --{event.value}--> {state.value} [epoch {epoch}]" + (f": {reason}" if reason else "")
    story = (*entity.story, line)[-STORY_LENGTH:]
    return replace(entity, state=state, epoch=epoch, story=story), effects


def can(entity: Entity, event: enum.Enum) -> bool:
    """True when ``advance`` would not raise."""
    return (entity.state, event) in table_of(entity)


def diagram(table: Mapping[Any, tuple[Any, tuple[Any, ...]]], initial: enum.Enum | None = None) -> str:
    """The table as a mermaid state diagram, one line a row, effects after a slash; for the documentation."""
    states: type[enum.Enum] = type(next(iter(table))[0])
    first = initial if initial is not None else next(iter(states))
    lines = ["stateDiagram-v2", f"    [*] --> {first.name}"]
    for (state, event), (target, effects) in table.items():
        doing = f" / {', '.join(effect.value for effect in effects)}" if effects else ""
        lines.append(f"    {state.name} --> {target.name}: {event.value}{doing}")
    return "\n".join(lines) + "\n"
