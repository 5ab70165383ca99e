"""The small decisions of the training cycle: total for any answer of a policy, each with its reason."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.scheduling import DynamicScheduleContext, StaticFullyAsyncPolicy, cycle

anything = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.booleans()
)


@pytest.mark.parametrize(
    ("queue", "in_flight", "room", "left", "ready", "expected"),
    [
        (10, 5, 20, 100, 2, 35),
        (10, 5, 20, 3, 2, 18),
        (10, 5, 20, 0, 2, 15),
        (10, 5, 20, None, 2, 35),
        (10, 5, 0, None, 2, 15),
        (10, 5, 20, 100, 0, 0),
    ],
)
def test_reachable(queue: int, in_flight: int, room: int, left: int | None, ready: int, expected: int) -> None:
    assert cycle.reachable(queue, in_flight, room, left, ready) == expected


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (100, 100),
        (99.9, 99),
        (0, 0),
        (-5, 0),
        (-1075.2, 0),
        (float("nan"), 0),
        (None, 0),
        ("many", 0),
        (float("inf"), 512),
        (np.int64(7), 7),
        (np.float32(7.5), 7),
        (True, 1),
    ],
)
def test_a_policys_number_is_made_an_integer_from_zero(answer: Any, value: int) -> None:
    assert cycle.sane_samples(answer, 512).value == value


def test_an_odd_answer_is_named_in_the_reason() -> None:
    assert "None" in cycle.deactivate_target(None, 100, step_required_samples=512).reason
    assert "negative" in cycle.deactivate_target(-3, 100, step_required_samples=512).reason
    assert "NaN" in cycle.deactivate_target(math.nan, 100, step_required_samples=512).reason


def test_the_target_is_the_policys_capped_at_what_is_reachable() -> None:
    assert cycle.deactivate_target(307, 500, step_required_samples=512) == (307, "policy wants 307")
    capped = cycle.deactivate_target(307, 40, step_required_samples=512, policy_reason="ratio 0.6")
    assert capped == (40, "ratio 0.6; only 40 are reachable")


@pytest.mark.parametrize("answer", [0, 1, None, 10**9])
def test_without_standalone_replicas_every_policy_waits_for_a_whole_cycle(answer: Any) -> None:
    assert cycle.deactivate_target(answer, 900, step_required_samples=512, only_hybrid=True).value == 512
    assert cycle.deactivate_target(answer, 100, step_required_samples=512, only_hybrid=True).value == 100


@given(anything, st.integers(0, 2000), st.booleans())
def test_for_any_answer_the_wait_can_end(answer: Any, reach: int, only_hybrid: bool) -> None:
    target = cycle.deactivate_target(answer, reach, step_required_samples=512, only_hybrid=only_hybrid)
    assert 0 <= target.value <= reach
    assert target.reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"window_room": 0}, "window is full"),
        ({"prompts_left": 0}, "end of data"),
        ({"lent_for_s": 60.0}, "deadlines.lending_s"),
        ({"lent_replicas": 0}, "alive"),
    ],
)
def test_lending_is_ended_by_force_only_for_tenancy(change: dict[str, Any], word: str) -> None:
    facts = {"window_room": 5, "prompts_left": 9, "lent_for_s": 59.0, "lending_s": 60.0, "lent_replicas": 2, **change}
    forced = cycle.deactivation_forced(**facts)
    assert forced.go is bool(word) and word in forced.reason
    assert forced.reason.startswith("tenancy") is bool(word)


def test_a_policy_may_keep_lending_until_it_is_forced() -> None:
    free, forced = cycle.Decision(False, ""), cycle.Decision(True, "tenancy: full")
    assert cycle.deactivate_decision(False, free) == (False, "policy: keep lending")
    assert cycle.deactivate_decision(False, forced) == forced
    assert cycle.deactivate_decision(True, forced, "mine") == (True, "mine")
    assert cycle.deactivate_decision(None, free).go is True


@pytest.mark.parametrize(
    ("answer", "change", "go"),
    [
        (True, {}, True),
        (False, {}, False),
        (None, {}, False),
        (np.True_, {}, True),
        (np.array([1, 0]), {}, False),
        (True, {"hybrids": 0}, False),
        (True, {"prompts_left": 0}, True),  # something is still in flight
        (True, {"prompts_left": 0, "in_flight": 0}, False),
        (True, {"window_room": 0}, True),
        (True, {"window_room": 0, "in_flight": 0}, False),
        (True, {"prompts_left": None}, True),
        (False, {"only_hybrid": True}, True),
        (False, {"only_hybrid": True, "prompts_left": 0, "in_flight": 0}, False),
    ],
)
def test_lending_needs_a_policy_a_hybrid_and_something_to_generate(
    answer: Any, change: dict[str, Any], go: bool
) -> None:
    facts = {"hybrids": 2, "in_flight": 3, "window_room": 10, "prompts_left": 50, **change}
    decision = cycle.activate_decision(answer, **facts)
    assert decision.go is go and decision.reason


@pytest.mark.parametrize(
    ("answer", "value"), [(None, 4), (2, 2), (0, 0), (-1, 0), (9, 4), (2.7, 2), ("x", 4), (math.inf, 4), (math.nan, 4)]
)
def test_the_number_of_hybrids_lent_is_kept_in_range(answer: Any, value: int) -> None:
    assert cycle.lend_count(answer, 4).value == value


# -- collecting


@pytest.mark.parametrize(
    ("queue", "in_flight", "left", "ready", "samples", "short", "starved"),
    [
        (0, 0, 500, 2, 128, False, False),
        (0, 0, None, 2, 128, False, False),
        (50, 30, 48, 2, 128, False, False),
        (50, 30, 47, 2, 127, True, False),
        (50, 0, 0, 2, 50, True, False),
        (0, 0, 0, 2, 0, True, False),
        (50, 0, 0, 0, 50, True, False),  # all there is is there: nobody needs to generate
        (128, 0, 500, 0, 128, False, False),
        (127, 1, 500, 0, 128, False, True),
        (0, 3, 0, 0, 3, True, True),
    ],
)
def test_collection_target(
    queue: int, in_flight: int, left: int | None, ready: int, samples: int, short: bool, starved: bool
) -> None:
    target = cycle.collection_target(128, queue, in_flight, left, ready)
    assert (target.samples, target.short, target.starved) == (samples, short, starved)
    assert target.reason


@given(st.integers(1, 40), st.integers(0, 100), st.integers(0, 50), st.integers(0, 50), st.integers(0, 2))
def test_a_collection_that_is_not_starved_can_be_filled(
    required: int, queue: int, in_flight: int, left: int, ready: int
) -> None:
    target = cycle.collection_target(required, queue, in_flight, left, ready)
    assert target.samples <= (queue + in_flight + left if ready or target.starved else queue)
    assert target.short is (queue + in_flight + left < required)


def test_end_of_data() -> None:
    assert cycle.nothing_to_generate(0, 0) is True
    assert [cycle.nothing_to_generate(0, 1), cycle.nothing_to_generate(1, 0), cycle.nothing_to_generate(None, 0)] == [
        False
    ] * 3
    assert [cycle.end_of_data(0, 0, 1), cycle.end_of_data(0, 0, 0), cycle.end_of_data(None, 0, 0)] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("samples", "dp", "action"),
    [(4, 4, "train"), (5, 4, "train"), (3, 4, "surplus"), (0, 1, "surplus"), (1, 1, "train")],
)
def test_the_last_short_collection(samples: int, dp: int, action: str) -> None:
    assert cycle.last_collection_action(samples, dp) == action


def test_what_a_policy_is_told() -> None:
    assert [cycle.expected_samples(512, v) for v in (0, 1, 2)] == [512, 512, 1024]
    assert cycle.total_generated_samples(1024, 30) == 1054
    assert [cycle.step_wait_samples(128, q) for q in (0, 100, 128, 300)] == [128, 28, 0, 0]
    assert cycle.buffer_samples(512, 0.1) == 51


def test_the_surplus_at_a_decision_is_the_queue() -> None:
    s, version, queue = 512, 7, 33
    c = DynamicScheduleContext(
        128, 4, cycle.total_generated_samples(s * version, queue), cycle.expected_samples(s, version), 51
    )
    assert c.surplus == queue


# -- asking


class Broken(StaticFullyAsyncPolicy):
    def lend_count(self, ctx: DynamicScheduleContext) -> int | None:
        raise RuntimeError("no idea")


def test_an_exception_in_a_policy_becomes_a_reason() -> None:
    c = DynamicScheduleContext(1, 1, 0, 1, 0, hybrid_replicas=3)
    policy = Broken()
    assert cycle.ask(lambda: policy.lend_count(c), 7, policy) == (7, "policy raised RuntimeError: no idea")
    amount = cycle.ask_lend_count(policy, c)
    assert amount.value == 3 and "no idea" in amount.reason


def test_a_reason_of_an_earlier_decision_is_not_reused() -> None:
    policy = StaticFullyAsyncPolicy()
    c = DynamicScheduleContext(1, 1, 0, 1, 0)
    assert cycle.ask(lambda: policy.deactivate_wait_samples(c), 0, policy) == (0, "static: at once")
    assert cycle.ask(lambda: policy.lend_count(c), 0, policy) == (None, "")
