"""W1 to W7 of the closest peer (reference/peer-behaviour.md, 10): the right behaviour of the parts that decide."""

from __future__ import annotations

from collections import Counter

import pytest

from hybridsched.model import ReplicaKind
from hybridsched.scheduling import DefaultDynamicSchedulePolicy, DynamicScheduleContext, build_policy, cycle
from hybridsched.scheduling.lifecycle import ReplicaEffect, ReplicaEvent, ReplicaLifecycle, ReplicaState, advance
from hybridsched.scheduling.load_balancer import LoadBalancer
from hybridsched.scheduling.staleness import StalenessWindow

R, K = 128, 4
S = R * K


def starved(version: int) -> DynamicScheduleContext:
    """A cycle in which every sample was waited for, 0.5 s each; the queue is empty at the decision."""
    used = cycle.expected_samples(S, version)
    return DynamicScheduleContext(R, K, used, used, 51, [64.0] * K, [R] * K)


def training_bound(version: int) -> DynamicScheduleContext:
    """A cycle in which nothing was waited for; 40 samples are left in the queue."""
    used = cycle.expected_samples(S, version)
    return DynamicScheduleContext(R, K, used + 40, used, 51, [0.0] * K, [0] * K)


def cycles_until_lending(policy: DefaultDynamicSchedulePolicy) -> int:
    for version in range(1, 121):
        policy.should_activate_after_step(version, False, training_bound(version))
        policy.update_after_step(version, training_bound(version))
    for n in range(1, 100):
        if policy.should_activate_after_step(120 + n, False, starved(120 + n)):
            return n
        policy.update_after_step(120 + n, starved(120 + n))
    raise AssertionError("never lends again")


def test_w1_after_120_training_bound_cycles_two_starved_ones_bring_lending_back() -> None:
    policy = DefaultDynamicSchedulePolicy(0.3)
    assert cycles_until_lending(policy) == 2
    assert policy.deactivate_ratio == pytest.approx(0.1)


def test_w1_the_unclamped_ratio_of_published_runs_can_be_asked_for() -> None:
    policy = DefaultDynamicSchedulePolicy(0.3, compat_peer=True)
    assert cycles_until_lending(policy) > 20
    assert DefaultDynamicSchedulePolicy(compat_peer=False).compat_peer is False


def test_w2_a_cycle_without_a_generated_sample_does_not_stop_lending_for_ever() -> None:
    policy = DefaultDynamicSchedulePolicy(0.3)
    surplus, lent = [], []
    for version in range(1, 8):
        # In cycle 3 nothing was generated: all its samples were backlog. The queue is empty at every decision.
        waited = [0] * K if version == 3 else [R] * K
        generated = cycle.total_generated_samples(trained=S * version, usable=0)
        c = DynamicScheduleContext(R, K, generated, cycle.expected_samples(S, version), 51, [64.0] * K, waited)
        surplus.append(c.surplus)
        lent.append(policy.should_activate_after_step(version, False, c))
        policy.update_after_step(version, c)
    assert surplus == [0] * 7  # the peer, counting non-empty cycles, has +512 from the third on
    assert lent == [True] * 7


def test_w3_the_last_sync_does_not_lend_when_nothing_is_left_to_generate() -> None:
    policy = DefaultDynamicSchedulePolicy(0.6)
    wants = policy.should_activate_after_step(4, False, starved(4))
    assert wants is True
    decision = cycle.activate_decision(wants, hybrids=2, in_flight=0, window_room=700, prompts_left=0)
    assert decision == (False, "end of data: nothing is left to generate")


def test_w3_a_wait_for_samples_ends_at_what_can_still_come() -> None:
    wanted = DefaultDynamicSchedulePolicy(0.6).deactivate_wait_samples(starved(4))
    assert wanted == 307
    window = StalenessWindow(768)
    for uid in range(20):
        window.admitted(uid)
    prompts_left, reached = 0, []
    for uid in range(20):
        reach = cycle.reachable(window.queued, window.in_flight, window.room(), prompts_left, 3)
        reached.append(cycle.deactivate_target(wanted, reach, step_required_samples=S).value)
        window.completed(uid)
    assert reached == [20] * 20
    assert window.queued >= reached[-1]  # the wait is over, where the peer waits for 307 for ever


@pytest.mark.parametrize("name", ["default", "fixed_ratio", "static_fully_async"])
def test_w4_with_zero_capacity_somebody_is_lent_or_the_wait_is_over(name: str) -> None:
    policy = build_policy(name, deactivate_ratio=0.3, only_hybrid=True)
    c = starved(1)
    # Asleep hybrids, no standalone: a collection says so instead of waiting, and lending is on.
    target = cycle.collection_target(R, queue=5, in_flight=3, prompts_left=900, ready_replicas=0)
    assert target.starved
    wants = policy.should_activate_after_step(1, False, c)
    assert cycle.activate_decision(wants, hybrids=1, in_flight=3, window_room=9, prompts_left=900, only_hybrid=True).go
    # And a deactivation never waits for samples nobody can make.
    reach = cycle.reachable(5, 3, 9, 900, ready_replicas=0)
    assert cycle.deactivate_target(policy.deactivate_wait_samples(c), reach, step_required_samples=S).value == 0
    assert LoadBalancer().choose(None, 1) is None  # an answer at once: nothing loops inside


def test_w5_a_sync_takes_effect_while_every_place_is_taken() -> None:
    window, balancer = StalenessWindow(3), LoadBalancer(max_samples=1)
    balancer.add("s0", 8, 1)
    window.admitted(0)
    window.completed(0)
    window.taken(0)
    window.admitted(1)
    window.admitted(2)
    lease = balancer.assign(None, 8)
    assert (window.room(), balancer.choose(None, 8)) == (0, None)  # at capacity, a sample is running
    assert window.synced() == 1  # no event of that sample was needed
    assert window.room() == 1
    replica = ReplicaLifecycle("s0", ReplicaKind.STANDALONE, ReplicaState.READY, epoch=1)
    replica, effects = advance(replica, ReplicaEvent.SYNC_BEGUN)
    assert effects == (ReplicaEffect.HOLD, ReplicaEffect.PAUSE)
    assert lease is not None and balancer.update(lease, 8)  # its lease goes on through the sync


def test_w6_late_releases_of_an_old_epoch_do_not_touch_live_counts() -> None:
    balancer = LoadBalancer()
    balancer.add("h0", 64, epoch=1)
    old = [balancer.acquire("h0", 1) for _ in range(4)]
    balancer.remove("h0")
    balancer.add("h0", 64, epoch=2)
    live = [balancer.acquire("h0", 1) for _ in range(4)]
    assert [balancer.release(lease) for lease in old] == [False] * 4
    assert balancer.loads()["h0"].unfinished == 4
    assert [balancer.release(lease) for lease in live] == [True] * 4


def test_w7_sequential_requests_on_an_idle_pool_rotate() -> None:
    balancer = LoadBalancer()
    for name in ("a", "b", "c"):
        balancer.add(name, 16, 1)
    hits: Counter[str] = Counter()
    for i in range(300):
        lease = balancer.assign(f"session {i}", 1)
        assert lease is not None
        hits[lease.replica_id] += 1
        balancer.release(lease)
    assert hits == {"a": 100, "b": 100, "c": 100}
