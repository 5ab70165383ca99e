"""`lookahead`: its model of a few cycles by hand-worked numbers, what it decides, and how it does in simulations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_tools import events, simulate

from hybridsched.errors import ConfigError
from hybridsched.scheduling import DynamicScheduleContext, LookaheadDynamicSchedulePolicy, build_policy
from hybridsched.scheduling.outlook import Outlook, play_forward, service_times
from hybridsched.simulation.scenario import load_scenario, play

#: R = 2, K = 2, S = 4; a sample needs 10 s, a collection trains 5 s, a sync takes 1 s; one place, one hybrid place.
PLAIN = Outlook(
    collection=2,
    collections=2,
    window=8,
    queue=0,
    served_s=(),
    service_s=(10.0,),
    places=1,
    hybrid_places=1,
    train_s=5.0,
    sync_s=1.0,
    activate_s=0.0,
    deactivate_s=0.0,
)


def test_without_lending_one_place_makes_a_sample_every_ten_seconds() -> None:
    """The fourth sample is there at 40 s; then 5 s of training and 1 s of sync. Waited: 20 s, and 15 s from 25 s on."""
    forecast = play_forward(PLAIN, None, 1)
    assert (46.0, 35.0) == (forecast.first_s, forecast.waited_s)


def test_two_places_until_four_samples_are_queued() -> None:
    """Four samples by two places: 20 s; two collections: 10 s; a sync."""
    assert 31.0 == play_forward(PLAIN, 4, 1).first_s


def test_a_switch_costs_its_time_and_what_is_aborted_goes_on() -> None:
    """Hybrids come at 2 s and leave at 12 s with one sample done there; the aborted rest waits for the one place."""
    outlook = replace(PLAIN, activate_s=2.0, deactivate_s=1.0)
    assert 2.0 + play_forward(PLAIN, 4, 1).first_s < play_forward(outlook, 4, 1).first_s


def test_running_samples_keep_what_they_have() -> None:
    begun = replace(PLAIN, served_s=(6.0,))
    assert 40.0 == play_forward(begun, None, 1).first_s


def test_the_window_stops_generation_until_the_sync() -> None:
    """A window of S: the second cycle's samples begin after the sync at 46 s and take 40 s + 6 s."""
    closed = replace(PLAIN, window=4)
    forecast = play_forward(closed, None, 2)
    assert 46.0 == forecast.first_s
    assert 2 * 46.0 == pytest.approx(forecast.cost_s, abs=10.0)
    assert play_forward(PLAIN, None, 2).cost_s < forecast.cost_s


def test_it_ends_with_the_data() -> None:
    short = replace(PLAIN, prompts_left=3, window=8)
    assert (30.0 + 2.5 + 1.0) == play_forward(short, None, 5).first_s


@settings(max_examples=60, deadline=None)
@given(
    target=st.one_of(st.none(), st.integers(0, 500)),
    window=st.integers(4, 40),
    queue=st.integers(0, 12),
    places=st.integers(1, 9),
    left=st.one_of(st.none(), st.integers(0, 20)),
    served=st.lists(st.floats(0, 50), max_size=6),
    lent=st.booleans(),
)
def test_every_forecast_ends(
    target: int | None, window: int, queue: int, places: int, left: int | None, served: list[float], lent: bool
) -> None:
    outlook = replace(
        PLAIN,
        window=window,
        queue=queue,
        places=places,
        prompts_left=left,
        served_s=tuple(served),
        service_s=(1.0, 5.0, 30.0),
        lent=lent,
    )
    forecast = play_forward(outlook, target, 3)
    assert 0 < forecast.first_s <= 10_000
    assert forecast == play_forward(outlook, target, 3)


def test_service_times_without_running_samples_are_those_completed() -> None:
    assert (1.0, 2.0, 3.0, 4.0) == service_times([4.0, 2.0, 1.0, 3.0], [], points=4)


def test_samples_still_running_are_not_forgotten() -> None:
    """Two of four are done at 1 s, two still run after 9 s: half of the samples take 9 s or more."""
    assert (1.0, 1.0, 9.0, 9.0) == service_times([1.0, 1.0], [9.0, 9.0], points=4)
    assert () == service_times([], [5.0])


def context(**changes: Any) -> DynamicScheduleContext:
    values: dict[str, Any] = {
        "required_samples": 4,
        "trigger_parameter_sync_step": 2,
        "total_generated_samples": 8,
        "expected_samples": 8,
        "buffer_samples": 4,
        "hybrid_replicas": 1,
        "standalone_replicas": 1,
        "in_flight": 4,
        "window_room": 8,
        "samples_per_replica": 4,
        "service_s": [10.0] * 32,
        "served_s": [1.0, 2.0, 3.0, 4.0],
        "train_s": [2.0, 2.0],
        "sync_s": 1.0,
        "activations": 1,
        "deactivations": 1,
        "last_activate_duration_s": 0.5,
        "last_deactivate_duration_s": 0.5,
        "weight_version": 1,
    }
    return DynamicScheduleContext(**(values | changes))


def test_a_starved_trainer_lends_and_a_busy_one_does_not() -> None:
    starved, busy = LookaheadDynamicSchedulePolicy(), LookaheadDynamicSchedulePolicy()
    assert starved.should_activate_after_step(1, False, context(train_s=[1.0, 1.0]))
    assert "switch back at" in starved.last_reason
    assert not busy.should_activate_after_step(1, False, context(train_s=[900.0, 900.0], window_room=4, queue_size=4))
    assert busy.last_reason.startswith("no lending: ")
    assert "\n" not in starved.last_reason + busy.last_reason


def test_default_answers_before_anything_is_measured() -> None:
    policy = LookaheadDynamicSchedulePolicy(0.5)
    ctx = context(service_s=[], train_s=[])
    assert policy.should_activate_after_step(0, False, ctx)
    assert policy.last_reason.startswith("not enough measured yet, as default: ")
    assert 4 == policy.deactivate_wait_samples(ctx)


def test_default_answers_while_forecasts_fit_badly() -> None:
    policy = LookaheadDynamicSchedulePolicy(max_error=0.3)
    assert policy.should_activate_after_step(1, False, context(now_s=0.0))
    policy.should_activate_after_step(2, False, context(now_s=10_000.0))
    assert "forecasts were off by" in policy.last_reason
    for version in (3, 4):  # halved each time default answers: 100 %, 50 %, 25 %
        policy.should_activate_after_step(version, False, context(now_s=10_000.0 * version))
    assert "forecasts were off by" not in policy.last_reason


def test_it_asks_again_while_much_is_missing() -> None:
    policy = LookaheadDynamicSchedulePolicy()
    policy.should_activate_after_step(1, False, context(train_s=[1.0, 1.0]))
    policy.target = 8
    policy.planned_at = 0.0
    assert not policy.should_deactivate(1, True, context())
    assert policy.should_deactivate(1, True, context(queue_size=3))


def test_no_more_hybrids_than_there_are_samples_for() -> None:
    policy = LookaheadDynamicSchedulePolicy()
    ctx = context(hybrid_replicas=6, train_s=[1.0, 1.0])
    assert policy.should_activate_after_step(1, False, ctx)
    assert 2 == policy.lend_count(ctx)  # 12 in the window, 4 places: 8 samples


def test_state_survives_json() -> None:
    policy = LookaheadDynamicSchedulePolicy(0.5)
    policy.should_activate_after_step(1, False, context())
    policy.should_activate_after_step(2, False, context(now_s=40.0))
    policy.update_after_step(2, context())
    twin = build_policy("lookahead", deactivate_ratio=0.1)
    twin.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert policy.state_dict() == twin.state_dict()
    assert None is not policy.error


@pytest.mark.parametrize("bad", [{"horizon": 0}, {"grid": 1}, {"margin": -1}, {"max_error": "much"}])
def test_impossible_knobs_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"policy 'lookahead': {next(iter(bad))}"):
        LookaheadDynamicSchedulePolicy(**bad)


def test_a_simulated_run_is_planned_and_every_decision_has_a_reason() -> None:
    run = simulate("async_training.dynamic_schedule_policy=lookahead")
    reasons = [event.reason for event in events(run, "decision")]
    assert all(reasons)
    assert any(reason.startswith("switch back at") for reason in reasons)
    assert 8 == run.summary.cycles  # type: ignore[attr-defined]


@pytest.mark.parametrize("load", ["emulated.train_fixed_s=2", "emulated.train_fixed_s=40", "emulated.wake_s=20"])
def test_it_is_no_slower_than_default(load: str) -> None:
    size = ("emulated.dataset_size=160", "emulated.response_sigma=0.5", load)
    times = {
        name: simulate(f"async_training.dynamic_schedule_policy={name}", *size).summary.wall_clock_s  # type: ignore[attr-defined]
        for name in ("default", "lookahead")
    }
    assert times["lookahead"] <= 1.01 * times["default"]


def test_a_forecast_that_leans_is_corrected() -> None:
    policy = LookaheadDynamicSchedulePolicy()
    policy.should_activate_after_step(1, False, context())
    assert policy.expected_s is not None
    policy.should_activate_after_step(2, False, context(now_s=1.2 * policy.expected_s))
    assert 1.2**0.3 == pytest.approx(policy.pace)


class Remembering(LookaheadDynamicSchedulePolicy):
    """Keeps (forecast, measured) of every cycle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycles: list[tuple[float, float]] = []

    def _compare(self, ctx: DynamicScheduleContext) -> None:
        if self.expected_s is not None and self.cycle_began_s is not None:
            self.cycles.append((self.expected_s, ctx.now_s - self.cycle_began_s))
        super()._compare(ctx)


def test_forecasts_and_the_full_simulation_agree_within_three_percent() -> None:
    """Over a run: single cycles differ by the luck of their response lengths, which nobody can foresee."""
    path = Path(__file__).parents[2] / "benchmarks" / "scenarios" / "slow_switch.yaml"
    policy = Remembering(0.6)
    play(load_scenario(path).config, policy=policy)
    assert 11 == len(policy.cycles)
    foreseen, measured = (sum(column) for column in zip(*policy.cycles, strict=True))
    assert foreseen == pytest.approx(measured, rel=0.03)
