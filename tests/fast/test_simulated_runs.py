"""Whole runs under virtual time: the real controller with emulated engines. One behaviour a test."""

from __future__ import annotations

import pytest
from sim_tools import config, events, simulate, verdicts

from hybridsched.errors import RunStalled
from hybridsched.scheduling import DynamicScheduleContext, DynamicSchedulePolicyBase
from hybridsched.simulation.storage import newest_incarnation, read_chain
from hybridsched.simulation.world import SimulatedRun


def test_a_run_trains_every_prompt_exactly_once() -> None:
    run = simulate()
    assert verdicts(run) == {"trained": 64}
    assert run.summary.version.number == 8


def test_the_same_seed_gives_the_same_event_log_byte_for_byte() -> None:
    assert simulate().log.dump() == simulate().log.dump()


def test_lending_is_faster_than_the_static_split_when_generation_is_the_bottleneck() -> None:
    lending = simulate("emulated.train_fixed_s=2").summary.wall_clock_s
    static = simulate("emulated.train_fixed_s=2", "async_training.dynamic_schedule_policy=static_fully_async")
    assert lending < 0.85 * static.summary.wall_clock_s


def test_a_cycle_whose_queue_is_full_enough_skips_hybrids_and_the_second_sync() -> None:
    """Step 3 of the method's figure: training-bound, so hybrids stay with training."""
    run = simulate("emulated.train_fixed_s=60", "emulated.dataset_size=200")
    skipped = events(run, "sync", "second sync skipped")
    assert skipped
    assert run.summary.skipped_syncs == len(skipped)
    refused = [e for e in events(run, "decision", "no") if e.entity == "activate"]
    assert refused and all(e.reason for e in refused)


def test_order_of_calls_on_activation_and_deactivation() -> None:
    run = simulate()
    calls = [e.new for e in run.log.of("switch") if e.entity == "hybrid.0"]
    one = ["add_replicas", "resume_generation_replicas", "remove_replicas", "abort_replicas", "sleep_replicas"]
    assert calls == one * (len(calls) // len(one))
    assert calls


def test_order_within_a_cycle_sync_then_decision_then_hand_over_then_lend() -> None:
    run = simulate()
    story = [(e.kind, e.new) for e in run.log.events if e.kind in ("sync", "decision", "tenancy", "pool")]
    first = story.index(("decision", "yes"))
    assert story[:first][-1] == ("sync", "done")
    lend = story[first + 1 : first + 5]
    assert lend == [("pool", "activating"), ("tenancy", "handover"), ("tenancy", "hybrid"), ("pool", "hybrid_active")]


def test_every_replica_is_aborted_at_most_once_per_sync() -> None:
    """The reserve leaves hybrids their share, so no second abort is needed to rebalance."""
    run = simulate()
    syncs = len(events(run, "sync", "begun"))
    assert len(events(run, "switch", "rebalanced")) > 0
    assert len([e for e in run.log.of("replica", "standalone.0") if e.new == "syncing"]) <= syncs


@pytest.mark.parametrize("hybrids", [1, 3])
def test_activation_with_hybrids(hybrids: int) -> None:
    run = simulate(f"trainer.n_gpus_per_node={hybrids}")
    assert run.summary.activations > 0
    lent = {len(e.detail["lent"]) for e in events(run, "switch", "activated")}
    assert lent == {hybrids}


def test_without_hybrids_nothing_is_lent() -> None:
    run = simulate("async_training.use_dynamic_resource_scheduling=false")
    assert run.summary.activations == 0
    assert verdicts(run) == {"trained": 64}


@pytest.mark.parametrize("policy", ["default", "static_fully_async", "fixed_ratio"])
def test_colocated_mode_ends_under_every_policy(policy: str) -> None:
    run = simulate("rollout.nnodes=0", f"async_training.dynamic_schedule_policy={policy}")
    assert verdicts(run) == {"trained": 64}


def test_colocated_mode_validates_on_hybrids_without_waiting_for_a_deadline() -> None:
    run = simulate("rollout.nnodes=0", "trainer.test_freq=2", validation_prompts=6)
    assert not events(run, "fault", "incomplete")
    assert len(events(run, "validation", "done")) >= 2
    assert run.summary.wall_clock_s < 1500


def test_one_response_per_prompt() -> None:
    run = simulate("actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus")
    assert verdicts(run) == {"trained": 64}


def test_sync_after_each_collection_with_no_staleness_trains_on_fresh_samples_only() -> None:
    run = simulate("async_training.trigger_parameter_sync_step=1", "async_training.staleness_threshold=0")
    ages = [row.values["staleness/age_max"] for row in run.log.rows if "staleness/age_max" in row.values]
    assert ages and max(ages) == 0


class Stubborn(DynamicSchedulePolicyBase):
    """Keeps lending for a while."""

    def __init__(self) -> None:
        self.asked = 0

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        self.asked += 1
        return self.asked % 4 == 0

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        return 1

    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        return True


def test_a_policy_that_keeps_lending_is_asked_again_and_nothing_is_collected_meanwhile() -> None:
    policy = Stubborn()
    run = SimulatedRun(config("async_training.staleness_threshold=3"), policy=policy)
    summary = run.run(limit_s=1e6)
    assert summary.trained == 64
    refused = [e for e in events(run, "decision", "no") if e.entity == "deactivate"]
    assert refused
    assert policy.asked > len(refused)


class NeverBack(Stubborn):
    """Would lend for ever."""

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        return False


def test_a_policy_that_never_takes_back_is_overruled_when_nothing_more_can_be_generated() -> None:
    run = SimulatedRun(config(), policy=NeverBack())
    assert run.run(limit_s=1e6).trained == 64
    forced = [e for e in events(run, "switch", "deactivated") if e.reason.startswith("tenancy")]
    assert forced


class Rubbish(Stubborn):
    """Answers nonsense."""

    def should_deactivate(self, *_: object) -> bool:  # type: ignore[override]
        raise ValueError("no idea")

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        return 10**9

    def should_activate_after_step(self, *_: object) -> bool:  # type: ignore[override]
        return "yes"  # type: ignore[return-value]


def test_a_policy_that_answers_rubbish_does_not_end_the_run() -> None:
    run = SimulatedRun(config(), policy=Rubbish())
    assert run.run(limit_s=1e6).trained == 64
    assert any("no idea" in e.reason for e in run.log.of("decision"))


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_every_sync_mode_ends_with_every_sample_trained(mode: str) -> None:
    assert verdicts(simulate(f"rollout.sync_mode={mode}")) == {"trained": 64}


def test_without_partial_rollout_every_response_is_of_one_version() -> None:
    run = simulate("async_training.partial_rollout=false")
    for stored in run.disk.segments.values():
        for sample in stored.samples:
            assert all(len({r.version for r in response.version_runs}) <= 1 for response in sample.responses)
    assert verdicts(run) == {"trained": 64}


def test_end_of_data_in_the_middle_of_a_cycle_trains_the_short_rest() -> None:
    run = simulate("emulated.dataset_size=61")
    assert verdicts(run) == {"trained": 61}
    assert run.summary.reason == "end of data"


def test_a_rest_smaller_than_the_data_parallel_size_is_surplus() -> None:
    run = simulate("emulated.dataset_size=65", "trainer.n_gpus_per_node=2")
    assert verdicts(run) == {"trained": 64, "surplus": 1}


def test_an_empty_data_set_ends_at_once() -> None:
    run = simulate("emulated.dataset_size=0")
    assert run.summary.trained == 0
    assert run.summary.activations == 0


@pytest.mark.timeout(600)
def test_filtered_samples_give_their_place_back_and_lending_goes_on() -> None:
    """40 % of the samples filtered for 1,000 cycles: lending still happens whenever the trainer starves."""
    run = simulate(
        "algorithm.filter_groups.enable=true",
        "emulated.reward_equal_fraction=0.4",
        "emulated.dataset_size=8000",
        "trainer.total_training_steps=1000",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        limit_s=1e8,
    )
    counts = verdicts(run)
    assert run.summary.cycles == 1000
    assert 0.35 < counts["filtered"] / sum(counts.values()) < 0.45
    activated = [e for e in events(run, "decision") if e.entity == "activate"]
    late = activated[-100:]
    assert sum(e.new == "yes" for e in late) > 50, "lending died out although generation is the bottleneck"


def test_everything_failing_stops_the_run_with_the_distribution() -> None:
    with pytest.raises(RunStalled, match="100% failed"):
        simulate("emulated.reward_failed_fraction=1", "emulated.dataset_size=1000")


def test_everything_filtered_stops_the_run_with_the_distribution() -> None:
    with pytest.raises(RunStalled, match="100% were filtered"):
        simulate(
            "algorithm.filter_groups.enable=true", "emulated.reward_equal_fraction=1", "emulated.dataset_size=1000"
        )


def test_samples_beyond_the_age_limit_are_dropped_as_stale() -> None:
    run = simulate("async_training.max_off_policy_threshold=0")
    counts = verdicts(run)
    assert counts["stale"] > 0
    assert sum(counts.values()) == 64


def test_the_age_strategy_wait_drops_fewer() -> None:
    dropped = verdicts(simulate("async_training.max_off_policy_threshold=1"))["stale"]
    waited = verdicts(
        simulate("async_training.max_off_policy_threshold=1", "async_training.max_off_policy_strategy=wait")
    )["stale"]
    assert waited <= dropped


def test_total_training_steps_ends_the_run() -> None:
    run = simulate("trainer.total_training_steps=3")
    assert run.summary.version.number == 3
    assert verdicts(run)["trained"] == 24


def test_metrics_of_a_cycle_belong_to_it_and_are_consistent() -> None:
    run = simulate()
    rows = [row for row in run.log.rows if "timing_s/step" in row.values]
    assert [row.step for row in rows] == list(range(1, 9))
    total = sum(row.values["timing_s/step"] for row in rows)
    assert total <= run.summary.wall_clock_s
    assert total > 0.8 * run.summary.wall_clock_s
    for row in rows:
        for name in ("train_resource_utilization", "rollout_resource_utilization", "resource_utilization"):
            assert 0.0 <= row.values[f"dynamic_resource/{name}"] <= 1.0


def test_the_window_is_never_exceeded_and_every_step_leaves_consistent_books() -> None:
    def audit(run: SimulatedRun) -> None:
        parts = run.parts
        assert parts is not None
        parts.window.validate()
        assert parts.window.counted <= run.derived.max_required_samples
        assert parts.rollouter.in_flight() == parts.window.in_flight

    simulate(on_step=audit)


def test_every_issued_sample_has_a_verdict_when_the_run_ends_early() -> None:
    run = simulate("trainer.total_training_steps=3", "emulated.dataset_size=400")
    chain = newest_incarnation(run.disk, "accept")
    assert chain is not None
    accepted = {entry["uid"] for entry in read_chain(run.disk, "accept", chain)}
    counts = verdicts(run)
    assert counts["trained"] == 24
    assert sum(counts.values()) >= len(accepted)
    assert run.parts is not None
    frontier = run.parts.intake.frontier
    assert (frontier.lowest, frontier.above) == (sum(counts.values()), [])
