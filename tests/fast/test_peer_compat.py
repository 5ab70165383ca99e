"""`async_training.compat: peer`: what published runs did and we do otherwise. One difference a test."""

from __future__ import annotations

from sim_tools import config, events, simulate, verdicts

from hybridsched.simulation.world import SimulatedRun

PEER = "async_training.compat=peer"
LENDING = ("async_training.dynamic_schedule_deactivate_ratio=0.6", "emulated.train_fixed_s=2")


def test_every_sample_still_gets_exactly_one_verdict() -> None:
    run = simulate(PEER, *LENDING)
    assert verdicts(run) == {"trained": 64}


def test_a_sync_that_lends_aborts_twice_once_for_the_weights_and_once_to_spread_requests() -> None:
    peer, ours = simulate(PEER, *LENDING), simulate(*LENDING)
    moved = [int(e.reason.split()[0]) for e in events(peer, "switch", "rebalanced")]
    assert moved and max(moved) > 0
    assert all("parked requests" in e.reason for e in events(ours, "switch", "rebalanced"))


def test_an_aborted_request_comes_back_a_second_later() -> None:
    """Without lending, and with a sync that is over before: its requests are aborted when it begins."""
    static = ("async_training.use_dynamic_resource_scheduling=false", "emulated.sync_s=0.2")
    assert set(_pauses(simulate(*static))) == {0.2}
    assert set(_pauses(simulate(PEER, *static))) == {1.0}


def test_samples_are_enough_only_at_the_next_poll() -> None:
    """Hybrids are taken back whole seconds after the wait began."""
    waits = [row.values["timing_s/wait_for_enough_samples"] for row in simulate(PEER, *LENDING).log.rows]
    real = [w for w in waits if w > 0]
    assert real
    assert all(abs(w - round(w)) < 1e-6 for w in real)


def test_a_replica_takes_more_requests_than_its_share_when_hybrids_leave() -> None:
    """Aborted requests go at once to who is left, with and without compat: what is started is bounded in total."""
    assert _most_leases(PEER, *LENDING) > 3
    assert _most_leases(*LENDING) > 3


def _pauses(run: SimulatedRun) -> list[float]:
    """Tenths of seconds from the begin of each sync but the first and the last to the next activity of a replica."""
    log = run.log.events
    begun = [i for i, e in enumerate(log) if (e.kind, e.new) == ("sync", "begun")][1:-1]
    after = (next(e.t for e in log[i:] if (e.kind, e.new) == ("activity", "rollout")) - log[i].t for i in begun)
    return [round(seconds, 1) for seconds in after]


class _Watch:
    """The most leases one replica ever had."""

    most = 0

    def __call__(self, run: SimulatedRun) -> None:
        assert run.parts is not None
        loads = run.parts.balancer.loads().values()
        self.most = max([self.most, *(load.samples for load in loads)])


def _most_leases(*overrides: str) -> int:
    watch = _Watch()
    run = SimulatedRun(config(*overrides))
    run.log.observe(lambda _event: watch(run) if run.parts is not None else None)
    run.run(limit_s=1e6)
    return watch.most
