"""Replica, pool and tenancy tables: every edge that is not in them raises and changes nothing."""

from __future__ import annotations

import enum
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.errors import InternalError
from hybridsched.model import ReplicaKind, Tenant
from hybridsched.scheduling.lifecycle import (
    HYBRID_TABLE,
    POOL_TABLE,
    REPLICA_TABLES,
    STANDALONE_TABLE,
    STORY_LENGTH,
    TENANCY_TABLE,
    GpuTenancy,
    IllegalTransition,
    PoolEffect,
    PoolEvent,
    PoolLifecycle,
    PoolState,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaLifecycle,
    ReplicaState,
    TenancyEffect,
    TenancyEvent,
    advance,
    can,
    diagram,
    table_of,
)

S, E, F = ReplicaState, ReplicaEvent, ReplicaEffect


def entities() -> list[tuple[Any, type[enum.Enum], type[enum.Enum]]]:
    return [
        (ReplicaLifecycle("s0", ReplicaKind.STANDALONE), ReplicaState, ReplicaEvent),
        (ReplicaLifecycle("h0", ReplicaKind.HYBRID), ReplicaState, ReplicaEvent),
        (PoolLifecycle(), PoolState, PoolEvent),
        (GpuTenancy("n0:0"), Tenant, TenancyEvent),
    ]


EDGES = [
    pytest.param(type(e)(**{**{f: getattr(e, f) for f in e.__slots__}, "state": s, "epoch": 3, "story": ("x",)}), event)
    for e, states, events in entities()
    for s, event in product(states, events)
]


@pytest.mark.parametrize(("entity", "event"), EDGES)
def test_an_edge_is_taken_as_the_table_says_or_raises_with_the_story(entity: Any, event: enum.Enum) -> None:
    row = table_of(entity).get((entity.state, event))
    if row is not None:
        after, effects = advance(entity, event, "why")
        assert (after.state, effects) == row
        assert after.story[0] == "x" and after.story[-1].endswith(": why")
        return
    assert not can(entity, event)
    before = (entity.state, entity.epoch, entity.story)
    with pytest.raises(IllegalTransition) as caught:
        advance(entity, event)
    assert isinstance(caught.value, InternalError)
    assert caught.value.story == ("x",) and "oldest first: x" in str(caught.value)
    assert entity.name in str(caught.value)
    assert (entity.state, entity.epoch, entity.story) == before


def test_most_edges_are_illegal() -> None:
    legal = [len(t) for t in (STANDALONE_TABLE, HYBRID_TABLE, POOL_TABLE, TENANCY_TABLE)]
    assert legal == [19, 17, 7, 4]


def walk(entity: Any, *events: enum.Enum) -> tuple[Any, list[Any]]:
    done = []
    for event in events:
        entity, effects = advance(entity, event)
        done.append(effects)
    return entity, done


def test_a_hybrid_is_lent_and_taken_back() -> None:
    hybrid, effects = walk(
        ReplicaLifecycle("h0", ReplicaKind.HYBRID),
        E.STARTED, E.SLEPT, E.SYNC_BEGUN, E.WEIGHTS_LOADED, E.ADMITTED, E.DRAIN_BEGUN, E.SLEPT,
    )  # fmt: skip
    assert (hybrid.state, hybrid.epoch) == (S.ASLEEP, 1)
    assert effects == [
        (F.SLEEP,), (), (F.NEW_EPOCH,), (F.REGISTER,), (F.RESUME, F.ADMIT), (F.REMOVE, F.ABORT, F.SLEEP), (),
    ]  # fmt: skip


def test_every_activation_is_a_new_epoch() -> None:
    hybrid, _ = walk(ReplicaLifecycle("h0", ReplicaKind.HYBRID), E.STARTED, E.SLEPT)
    for epoch in range(1, 5):
        hybrid, _ = walk(hybrid, E.SYNC_BEGUN, E.SYNC_BEGUN, E.WEIGHTS_LOADED, E.ADMITTED, E.DRAIN_BEGUN, E.SLEPT)
        assert hybrid.epoch == epoch


def test_a_standalone_replica_keeps_its_epoch_through_syncs_and_gets_a_new_one_after_death() -> None:
    first = ReplicaLifecycle("s0", ReplicaKind.STANDALONE)
    ready, _ = walk(first, E.STARTED, E.SYNC_BEGUN, E.WEIGHTS_LOADED, E.ADMITTED)
    synced, effects = walk(ready, E.SYNC_BEGUN, E.WEIGHTS_LOADED, E.ADMITTED)
    assert (synced.state, synced.epoch) == (S.READY, 1)
    assert effects[0] == (F.HOLD, F.PAUSE)
    again, effects = walk(synced, E.DIED, E.DIED, E.RESTARTED, E.STARTED, E.SYNC_BEGUN, E.WEIGHTS_LOADED, E.ADMITTED)
    assert effects[:2] == [(F.REMOVE, F.REISSUE), ()]
    assert (again.state, again.epoch) == (S.READY, 2)


def test_a_hybrid_that_is_lent_cannot_be_synced() -> None:
    assert not can(ReplicaLifecycle("h0", ReplicaKind.HYBRID, S.READY), E.SYNC_BEGUN)


@pytest.mark.parametrize("kind", list(ReplicaKind))
def test_ready_is_reached_only_through_weights(kind: ReplicaKind) -> None:
    table = REPLICA_TABLES[kind]
    assert {s for (s, _), (to, _) in table.items() if to is S.READY} == {S.HELD}
    assert {s for (s, _), (to, _) in table.items() if to is S.HELD} == {S.SYNCING}


@pytest.mark.parametrize(("kind", "state"), list(product(ReplicaKind, ReplicaState)))
def test_a_replica_may_die_anywhere(kind: ReplicaKind, state: ReplicaState) -> None:
    after, effects = advance(ReplicaLifecycle("r", kind, state), E.DIED)
    assert after.state is S.FAILED
    holds_leases = state in (S.SYNCING, S.HELD, S.READY, S.DRAINING)
    assert effects == ((F.REMOVE, F.REISSUE) if holds_leases else ())


@given(st.sampled_from(list(ReplicaKind)), st.lists(st.sampled_from(list(ReplicaEvent)), max_size=80))
def test_from_anywhere_a_replica_can_come_back_to_work(kind: ReplicaKind, events: list[ReplicaEvent]) -> None:
    replica = ReplicaLifecycle("r", kind)
    for event in events:
        epoch = replica.epoch
        if can(replica, event):
            replica, _ = advance(replica, event)
        assert replica.epoch in (epoch, epoch + 1)
        assert len(replica.story) <= STORY_LENGTH
    replica, _ = walk(replica, E.DIED, E.RESTARTED, E.STARTED)
    if kind is ReplicaKind.HYBRID:
        replica, _ = advance(replica, E.SLEPT)
    epoch = replica.epoch
    replica, _ = walk(replica, E.SYNC_BEGUN, E.WEIGHTS_LOADED, E.ADMITTED)
    assert (replica.state, replica.epoch) == (S.READY, epoch + 1)


def test_a_switch_of_the_pool_ends_on_one_of_both_sides_and_a_failed_one_is_reported() -> None:
    ends = {to for (s, _), (to, _) in POOL_TABLE.items() if s in (PoolState.ACTIVATING, PoolState.DEACTIVATING)}
    assert ends == {PoolState.STANDALONE_ONLY, PoolState.HYBRID_ACTIVE}
    failed = {PoolEvent.ACTIVATE_FAILED, PoolEvent.DEACTIVATE_UNDONE, PoolEvent.DEACTIVATE_FORCED}
    assert all((PoolEffect.REPORT in effects) == (event in failed) for (_, event), (_, effects) in POOL_TABLE.items())


def test_deactivation_cuts_routing_then_aborts_then_sleeps() -> None:
    pool, effects = walk(PoolLifecycle(), PoolEvent.ACTIVATE_BEGUN, PoolEvent.ACTIVATED, PoolEvent.DEACTIVATE_BEGUN)
    assert not pool.settled
    assert effects[0] == (PoolEffect.HAND_OVER, PoolEffect.ADD_REPLICAS, PoolEffect.RESUME_GENERATION_REPLICAS)
    assert effects[2] == (PoolEffect.REMOVE_REPLICAS, PoolEffect.ABORT_REPLICAS, PoolEffect.SLEEP_REPLICAS)
    pool, _ = walk(pool, PoolEvent.DEACTIVATED)
    assert (pool.state, pool.settled, pool.epoch) == (PoolState.STANDALONE_ONLY, True, 1)


def test_kv_cache_is_mapped_only_after_the_trainer_dropped_its_parameters() -> None:
    gpu, effects = walk(GpuTenancy("n0:0"), TenancyEvent.HANDOVER_BEGUN, TenancyEvent.WEIGHTS_HANDED)
    assert gpu.state is Tenant.HYBRID
    assert TenancyEffect.HYBRID_MAPS_KV not in effects[0]
    assert effects[1] == (TenancyEffect.TRAINER_DROPS_PARAMETERS, TenancyEffect.HYBRID_MAPS_KV)
    gpu, effects = walk(gpu, TenancyEvent.RELEASE_PROVEN)
    assert (gpu.state, effects) == (Tenant.TRAINER, [(TenancyEffect.TRAINER_LOADS_BACK,)])


@pytest.mark.parametrize(
    ("table", "first"),
    [
        (STANDALONE_TABLE, "STARTING"),
        (HYBRID_TABLE, "STARTING"),
        (POOL_TABLE, "STANDALONE_ONLY"),
        (TENANCY_TABLE, "TRAINER"),
    ],
)
def test_the_diagram_shows_every_row_once(table: Any, first: str) -> None:
    lines = diagram(table).splitlines()
    assert lines[:2] == ["stateDiagram-v2", f"    [*] --> {first}"]
    assert len(lines) == 2 + len(table) == len(set(lines))


def test_a_line_of_the_diagram() -> None:
    assert "    READY --> DRAINING: drain_begun / remove, abort, sleep" in diagram(HYBRID_TABLE).splitlines()
