"""The three built-in policies as a decision table, the public API, and policy state."""

from __future__ import annotations

import ast
import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.errors import ConfigError
from hybridsched.scheduling import (
    DefaultDynamicSchedulePolicy,
    DynamicScheduleContext,
    DynamicSchedulePolicyBase,
    FixedRatioDynamicSchedulePolicy,
    StaticFullyAsyncPolicy,
    build_policy,
    register_policy,
    registered_policies,
)
from hybridsched.scheduling.policies.switch_cost import SwitchCost
from hybridsched.scheduling.policy_state import decode_like, encode

R, K = 128, 4
S = R * K


def ctx(surplus: int = 0, version: int = 1, **fields: Any) -> DynamicScheduleContext:
    expected = S * max(1, version)
    return DynamicScheduleContext(R, K, expected + surplus, expected, 51, **fields)


class Rollouter:
    def __init__(self) -> None:
        self.calls = 0

    def rebalance_requests(self) -> None:
        self.calls += 1


# -- context and registry


def test_context_has_the_fields_of_the_specification_in_order() -> None:
    c = DynamicScheduleContext(128, 4, 700, 512, 51, [1.5], [3], True, 2.0, 1.0)
    assert (c.required_samples, c.trigger_parameter_sync_step, c.total_generated_samples) == (128, 4, 700)
    assert (c.expected_samples, c.buffer_samples, c.step_wait_times, c.step_wait_samples) == (512, 51, [1.5], [3])
    assert (c.only_hybrid, c.last_activate_duration_s, c.last_deactivate_duration_s) == (True, 2.0, 1.0)
    assert (c.step_required_samples, c.surplus) == (512, 188)


def test_context_defaults_are_not_shared_and_step_required_samples_is_no_argument() -> None:
    first, second = ctx(), ctx()
    first.step_wait_times.append(1.0)
    assert second.step_wait_times == []
    with pytest.raises(TypeError):
        DynamicScheduleContext(1, 1, 0, 0, 0, step_required_samples=5)  # type: ignore[call-arg]


def test_all_three_policies_are_registered_by_default() -> None:
    known = registered_policies()
    assert known["default"] is DefaultDynamicSchedulePolicy
    assert known["static_fully_async"] is StaticFullyAsyncPolicy
    assert known["fixed_ratio"] is FixedRatioDynamicSchedulePolicy


def test_build_policy_hands_on_only_what_the_constructor_accepts() -> None:
    @register_policy("test_bare")
    class Bare(StaticFullyAsyncPolicy):
        def __init__(self, width: int = 1) -> None:
            self.width = width
            self.only_hybrid = False

    policy = build_policy("test_bare", width=3, deactivate_ratio=0.7, only_hybrid=True)
    assert vars(policy) == {"width": 3, "only_hybrid": False}


def test_build_policy_names_the_nearest_policy() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fixed_ratio'"):
        build_policy("fixed_rato")


def test_build_policy_names_a_missing_argument() -> None:
    @register_policy("test_needs")
    class Needs(StaticFullyAsyncPolicy):
        def __init__(self, horizon: int) -> None:
            self.horizon = horizon

    with pytest.raises(ConfigError, match="needs horizon"):
        build_policy("test_needs")


def test_an_abstract_policy_is_refused_with_the_methods_it_lacks() -> None:
    @register_policy("test_abstract")
    class Half(DynamicSchedulePolicyBase):
        def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
            return True

    with pytest.raises(ConfigError, match="deactivate_wait_samples, should_activate_after_step"):
        build_policy("test_abstract")


def test_a_taken_name_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ConfigError, match="'default' is taken"):

        @register_policy("default")
        class Other(StaticFullyAsyncPolicy):
            pass

    assert registered_policies()["default"] is DefaultDynamicSchedulePolicy


def test_something_else_than_a_policy_cannot_be_registered() -> None:
    with pytest.raises(ConfigError, match="no subclass"):
        register_policy("test_int")(int)  # type: ignore[type-var]


def test_the_example_of_the_specification_runs_with_its_import_line_changed() -> None:
    source = """
from hybridsched.scheduling import (
    DynamicSchedulePolicyBase,
    DynamicScheduleContext,
    register_policy,
)

@register_policy("my_policy")
class MyDynamicSchedulePolicy(DynamicSchedulePolicyBase):

    def __init__(self, deactivate_ratio: float = 0.5, only_hybrid: bool = False):
        self.deactivate_ratio = deactivate_ratio
        self.only_hybrid = only_hybrid

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        return is_hybrid_active

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        return int(ctx.required_samples * ctx.trigger_parameter_sync_step * self.deactivate_ratio)

    def should_activate_after_step(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext):
        return ctx.total_generated_samples < ctx.expected_samples + ctx.buffer_samples
"""
    exec(compile(source, "my_policy.py", "exec"), {"__name__": "my_policy"})
    policy = build_policy("my_policy", deactivate_ratio=0.25, only_hybrid=False)
    assert policy.should_deactivate(1, True, ctx()) is True
    assert policy.deactivate_wait_samples(ctx()) == 128
    assert policy.should_activate_after_step(1, False, ctx(surplus=50)) is True
    assert policy.should_activate_after_step(1, False, ctx(surplus=51)) is False
    policy.request_rebalance(1, ctx())
    policy.update_after_step(1, ctx())
    assert policy.lend_count(ctx()) is None
    assert policy.state_dict() == {"deactivate_ratio": 0.25}


# -- default


def test_default_takes_hybrids_back_exactly_when_they_are_lent() -> None:
    policy = DefaultDynamicSchedulePolicy()
    assert [policy.should_deactivate(3, active, ctx()) for active in (True, False)] == [True, False]


@pytest.mark.parametrize(("ratio", "samples"), [(0.0, 0), (0.3, 153), (0.6, 307), (1.0, 512)])
def test_default_waits_for_the_integer_part_of_ratio_times_s(ratio: float, samples: int) -> None:
    assert DefaultDynamicSchedulePolicy(ratio).deactivate_wait_samples(ctx()) == samples


def test_default_lends_at_the_start_because_nothing_was_measured() -> None:
    policy = DefaultDynamicSchedulePolicy()
    assert policy.should_activate_after_step(0, False, DynamicScheduleContext(R, K, 0, S, 51)) is True


@pytest.mark.parametrize(
    ("surplus", "wait_s", "waited", "lend"),
    [
        (0, 10.0, 100, True),  # 153.6 x 0.1 s = 15.4 s > 10 s
        (50, 10.0, 100, True),  # 103.6 x 0.1 s = 10.4 s > 10 s
        (54, 10.0, 100, False),  # 99.6 x 0.1 s < 10 s
        (153, 10.0, 100, False),  # 0.6 x 0.1 s
        (154, 1e9, 1, False),  # no gap, whatever waiting costs
        (400, 10.0, 100, False),
        (153, 1000.0, 10, True),  # 0.6 x 100 s = 60 s
        (0, 0.0, 0, True),  # not measured: 1000 s per sample
        (154, 0.0, 0, False),
    ],
)
def test_default_lends_when_the_shortfall_in_seconds_exceeds_the_switch_cost(
    surplus: int, wait_s: float, waited: int, lend: bool
) -> None:
    policy = DefaultDynamicSchedulePolicy(0.3)
    c = ctx(surplus, step_wait_times=[wait_s], step_wait_samples=[waited])
    assert policy.should_activate_after_step(1, False, c) is lend
    assert policy.last_reason


def test_default_keeps_the_last_measured_sample_time_when_a_cycle_did_not_wait() -> None:
    policy = DefaultDynamicSchedulePolicy(0.3)
    policy.should_activate_after_step(1, False, ctx(step_wait_times=[1.0, 1.0], step_wait_samples=[10, 10]))
    assert policy.per_sample_s == 0.1
    policy.should_activate_after_step(2, False, ctx(step_wait_times=[3.0], step_wait_samples=[0]))
    assert policy.per_sample_s == 0.1


@pytest.mark.parametrize(
    ("waited", "ratio"),
    [(1, 0.32), (10, 0.32), (26, 0.3 + 26 / 512), (51, 0.3 + 51 / 512), (52, 0.4), (512, 0.4), (0, 0.28)],
)
def test_default_adapts_the_ratio_by_the_share_of_samples_waited_for(waited: int, ratio: float) -> None:
    policy = DefaultDynamicSchedulePolicy(0.3)
    policy.update_after_step(1, ctx(step_wait_times=[1.0], step_wait_samples=[waited]))
    assert policy.deactivate_ratio == pytest.approx(ratio, abs=1e-12)


def test_default_updates_once_per_version() -> None:
    policy = DefaultDynamicSchedulePolicy(0.3)
    for _ in range(5):
        policy.update_after_step(1, ctx())
    assert policy.deactivate_ratio == pytest.approx(0.28)
    policy.update_after_step(2, ctx())
    assert policy.deactivate_ratio == pytest.approx(0.26)


def test_default_does_not_adapt_at_version_0_because_no_cycle_has_ended() -> None:
    policy = DefaultDynamicSchedulePolicy(0.3)
    policy.update_after_step(0, ctx(version=0))
    assert policy.deactivate_ratio == 0.3


@given(st.lists(st.integers(0, 600), max_size=200), st.floats(0, 1))
def test_default_ratio_stays_between_0_and_1(waits: list[int], ratio: float) -> None:
    policy = DefaultDynamicSchedulePolicy(ratio)
    for version, waited in enumerate(waits, start=1):
        policy.update_after_step(version, ctx(step_wait_samples=[waited], step_wait_times=[1.0]))
        assert 0 <= policy.deactivate_ratio <= 1


def test_default_without_standalone_replicas_always_lends_whole_cycles_and_never_adapts() -> None:
    policy = DefaultDynamicSchedulePolicy(0.3, only_hybrid=True)
    assert policy.should_activate_after_step(5, False, ctx(surplus=9999)) is True
    assert policy.deactivate_wait_samples(ctx()) == S
    policy.update_after_step(1, ctx())
    assert policy.deactivate_ratio == 1.0


def test_default_switch_cost_is_the_mean_of_the_last_three_pairs() -> None:
    policy = DefaultDynamicSchedulePolicy()
    assert policy.switch_cost.seconds == 10.0
    for version, pair in enumerate([(30.0, 30.0), (1.0, 2.0), (2.0, 2.0), (3.0, 2.0)], start=1):
        policy.update_after_step(version, ctx(last_activate_duration_s=pair[0], last_deactivate_duration_s=pair[1]))
    assert list(policy.switch_cost.pairs) == [3.0, 4.0, 5.0]
    assert policy.switch_cost.seconds == 4.0


def test_default_and_fixed_ratio_ask_for_a_rebalance_and_static_does_not() -> None:
    makers: list[Callable[[], DynamicSchedulePolicyBase]] = [
        DefaultDynamicSchedulePolicy,
        FixedRatioDynamicSchedulePolicy,
        StaticFullyAsyncPolicy,
    ]
    calls = []
    for make in makers:
        policy, rollouter = make(), Rollouter()
        policy.request_rebalance(1, ctx())  # nobody attached yet: nothing happens
        policy._rollouter = rollouter
        policy.request_rebalance(1, ctx())
        calls.append(rollouter.calls)
    assert calls == [1, 1, 0]


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"deactivate_ratio": 1.2}, "deactivate_ratio"),
        ({"deactivate_ratio": float("nan")}, "deactivate_ratio"),
        ({"deactivate_ratio": "0.3"}, "deactivate_ratio"),
        ({"increase_min": 0.2}, "increase_max"),
        ({"switch_history": 0}, "switch_history"),
        ({"initial_switch_cost_s": float("inf")}, "initial_switch_cost_s"),
    ],
)
def test_impossible_knobs_are_refused_by_name(kwargs: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_policy("default", **kwargs)


# -- switch cost


def test_a_deactivation_ends_the_activation_of_an_earlier_cycle() -> None:
    cost = SwitchCost(3, 10.0)
    cost.observe(5.0, 0.0)  # lent
    cost.observe(7.0, 1.0)  # taken back after 1 s, lent again in 7 s
    assert list(cost.pairs) == [6.0]
    cost.observe(0.0, 2.0)  # taken back, not lent again
    assert list(cost.pairs) == [6.0, 9.0]


def test_half_a_pair_is_no_switch() -> None:
    cost = SwitchCost(3, 10.0)
    cost.observe(5.0, 0.0)
    assert cost.seconds == 10.0
    lonely = SwitchCost(3, 10.0)
    lonely.observe(0.0, 5.0)
    assert lonely.seconds == 10.0


def test_a_pair_is_counted_once_however_often_it_is_shown() -> None:
    cost = SwitchCost(3, 10.0)
    for _ in range(5):
        cost.observe(3.0, 2.0)
    assert list(cost.pairs) == [5.0]


def test_a_changed_activation_implies_the_deactivation_in_between() -> None:
    cost = SwitchCost(3, 10.0)
    cost.observe(3.0, 0.0)
    cost.observe(4.0, 2.0)
    cost.observe(5.0, 2.0)  # lent again, so it was taken back, in 2 s as before
    assert list(cost.pairs) == [5.0, 6.0]


def test_with_counts_equal_durations_are_new_switches() -> None:
    cost = SwitchCost(3, 10.0)
    cost.observe(4.0, 0.0, 1, 0)
    cost.observe(4.0, 1.0, 2, 1)
    cost.observe(4.0, 1.0, 3, 2)
    cost.observe(4.0, 1.0, 3, 2)
    assert list(cost.pairs) == [5.0, 5.0]


# -- fixed_ratio and static


@pytest.mark.parametrize(("surplus", "lend"), [(0, True), (153, True), (154, False), (600, False)])
def test_fixed_ratio_lends_on_the_gap_alone(surplus: int, lend: bool) -> None:
    policy = FixedRatioDynamicSchedulePolicy(0.3)
    cheap = ctx(surplus, step_wait_times=[1e-9], step_wait_samples=[1], last_activate_duration_s=1e9)
    assert policy.should_activate_after_step(1, False, cheap) is lend


def test_fixed_ratio_never_changes_its_ratio() -> None:
    policy = FixedRatioDynamicSchedulePolicy(0.4)
    for version in range(1, 30):
        policy.update_after_step(version, ctx(step_wait_samples=[512], step_wait_times=[9.0]))
    assert (policy.deactivate_ratio, policy.deactivate_wait_samples(ctx())) == (0.4, 204)


def test_static_gives_back_at_once_and_never_lends() -> None:
    policy = StaticFullyAsyncPolicy(deactivate_ratio=0.9)
    assert policy.should_deactivate(1, True, ctx()) is True
    assert policy.deactivate_wait_samples(ctx()) == 0
    assert policy.should_activate_after_step(1, False, ctx(surplus=-500)) is False


@pytest.mark.parametrize("name", ["default", "fixed_ratio", "static_fully_async"])
@pytest.mark.parametrize("told_by", ["constructor", "context"])
def test_every_policy_runs_the_colocated_loop_without_standalone_replicas(name: str, told_by: str) -> None:
    policy = build_policy(name, deactivate_ratio=0.3, only_hybrid=told_by == "constructor")
    c = ctx(surplus=700, only_hybrid=told_by == "context")
    assert policy.should_activate_after_step(3, False, c) is True
    assert policy.deactivate_wait_samples(c) == S


# -- state


def test_default_state_survives_json_and_decides_the_same() -> None:
    policy = DefaultDynamicSchedulePolicy(0.3)
    for version in range(1, 8):
        c = ctx(step_wait_times=[float(version)], step_wait_samples=[3 * version])
        c.last_activate_duration_s, c.last_deactivate_duration_s = 1.0 + version, 0.5 * version
        policy.should_activate_after_step(version, False, c)
        policy.update_after_step(version, c)
    twin = DefaultDynamicSchedulePolicy(0.9)
    twin.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert twin.state_dict() == policy.state_dict()
    twin.update_after_step(7, ctx())  # the same version again, after a resume: nothing
    assert twin.deactivate_ratio == policy.deactivate_ratio


def test_a_state_of_standalone_replicas_does_not_break_a_run_without_them() -> None:
    twin = DefaultDynamicSchedulePolicy(only_hybrid=True)
    twin.load_state_dict(DefaultDynamicSchedulePolicy(0.2).state_dict())
    assert twin.deactivate_wait_samples(ctx()) == S


def test_base_state_holds_public_and_private_plain_attributes() -> None:
    class Learner(StaticFullyAsyncPolicy):
        def __init__(self) -> None:
            self.only_hybrid = True
            self._seen: deque[int] = deque([1, 2], maxlen=2)
            self.by_version = {1: (0.5, "a")}
            self.tags = {"x", "y"}
            self.machine = object()
            self._rollouter = Rollouter()

    first, second = Learner(), Learner()
    first._seen.append(3)
    first.by_version[2] = (0.25, "b")
    state = json.loads(json.dumps(first.state_dict()))
    assert set(state) == {"_seen", "by_version", "tags"}
    second.load_state_dict(state)
    assert (second._seen, second._seen.maxlen) == (deque([2, 3]), 2)
    assert second.by_version == {1: (0.5, "a"), 2: (0.25, "b")}
    assert second.tags == {"x", "y"}


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=9) | st.integers(), inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_data_survives_json(value: Any) -> None:
    back = decode_like(json.loads(json.dumps(encode(value))), None)
    assert (back, type(back)) == (value, type(value))


# -- the house


def test_deciding_code_imports_nothing_that_acts() -> None:
    import hybridsched.scheduling as package

    below = {"hybridsched.errors", "hybridsched.model", "hybridsched.scheduling"}
    acting = {
        "os",
        "io",
        "time",
        "random",
        "asyncio",
        "threading",
        "socket",
        "subprocess",
        "pathlib",
        "datetime",
        "uuid",
    }
    for path in Path(package.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                root = name.partition(".")[0]
                ours = root == "hybridsched" and ".".join(name.split(".")[:2]) in below
                assert ours or (root in sys.stdlib_module_names and root not in acting), f"{path}: {name}"
