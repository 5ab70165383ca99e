"""Utilization formulas, worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.errors import InternalError
from hybridsched.model import Tenant
from hybridsched.scheduling import utilization as u


def test_train_compute_sums_the_seven_keys_and_missing_ones_count_zero() -> None:
    timing = {"reward": 1.0, "old_log_prob": 2.0, "ref": 3.0, "adv": 0.5, "update_actor": 4.0, "gen": 99.0}
    assert u.train_compute_time_s(timing) == 10.5
    assert u.train_compute_time_s({"timing_s/update_actor": 2.0, "timing_s/gen": 5.0}) == 2.0
    assert u.train_compute_time_s({}) == 0.0


def test_train_utilization_is_a_ratio_of_sums() -> None:
    assert u.train_resource_utilization([1.0, 9.0], [10.0, 10.0]) == 0.5
    assert u.train_resource_utilization([1.0, 1.0], [1.0, 3.0]) == 0.5  # not the mean of 1 and 1/3


def test_zero_span_gives_zero_everywhere() -> None:
    assert u.train_resource_utilization([], []) == 0.0
    assert u.rollout_resource_utilization([], 5.0) == 0.0
    assert u.rollout_resource_utilization([(1.0, 4, 8)], 1.0) == 0.0
    assert u.rollout_resource_utilization([(0.0, 4, 0)], 9.0) == 0.0
    assert u.resource_utilization(0, 0, 1.0, 1.0, 0.5) == 0.0
    assert u.hybrid_rollout_share(5.0, 0.0) == 0.0
    assert u.trainer_idle_ratio(1.0, 0.0) == 0.0
    assert u.rollouter_idle_ratio(0.0, 0.0) == 0.0
    assert u.resource_utilization_exact(1.0, u.GpuSeconds(), 1.0, 2, 2, 0.0) == 0.0


@pytest.mark.parametrize(("ready", "capacity"), [(0, 0), (2, 32), (10, 100)])
def test_capacity_is_bounded_by_the_window(ready: int, capacity: int) -> None:
    assert u.rollout_capacity(ready, 16, 100) == capacity


def test_each_interval_counts_with_its_own_capacity() -> None:
    points = [(0.0, 4, 8), (2.0, 20, 16), (3.0, 0, 16)]
    # 2 s x 4 of 8, 1 s x 16 of 16 (active above capacity), 1 s x 0 of 16
    assert u.rollout_resource_utilization(points, 4.0) == (8 + 16 + 0) / (16 + 16 + 16)


def test_intervals_without_capacity_have_no_weight() -> None:
    assert u.rollout_resource_utilization([(0.0, 3, 0), (5.0, 4, 8)], 6.0) == 0.5


def test_the_seed_point_is_corrected_with_the_first_known_capacity() -> None:
    assert u.rollout_resource_utilization([(0.0, 0, None), (1.0, 8, 8)], 2.0) == 0.5
    assert u.rollout_resource_utilization([(0.0, 4, None), (1.0, 8, 8)], 2.0) == 12 / 16
    assert u.rollout_resource_utilization([(0.0, 4, None)], 2.0) == 0.0


def test_rolling_the_window_carries_counts_over_and_starts_anew() -> None:
    integral = u.CapacityIntegral(0.0, 8, 8)
    assert integral.roll(2.0) == 1.0
    integral.observe(3.0, 0, 8)
    assert integral.active_time_s(5.0) == 1.0
    assert integral.roll(5.0) == 8 / 24


def test_time_that_runs_back_is_a_bug() -> None:
    integral = u.CapacityIntegral(5.0, 1, 1)
    with pytest.raises(InternalError, match=r"time runs back from 5\.0 to 4\.0"):
        integral.observe(4.0, 1, 1)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=20))
def test_the_integral_equals_the_formula_of_the_specification(steps: list[tuple[float, int, int]]) -> None:
    times = [math.fsum(dt for dt, _, _ in steps[:k]) for k in range(len(steps) + 1)]
    points = [(times[k], active, cap) for k, (_, active, cap) in enumerate(steps)]
    spans = [times[k + 1] - times[k] for k in range(len(steps))]
    offered = sum(dt * cap for dt, (_, _, cap) in zip(spans, steps, strict=True))
    used = sum(dt * min(cap, active) for dt, (_, active, cap) in zip(spans, steps, strict=True))
    ratio = u.rollout_resource_utilization(points, times[-1])
    assert 0.0 <= ratio <= 1.0
    assert ratio == pytest.approx(used / offered if offered else 0.0, abs=1e-9)


def test_the_hybrid_share_is_clipped_and_weighted_by_the_hybrids_lent() -> None:
    assert u.hybrid_rollout_share(3.0, 12.0) == 0.25
    assert u.hybrid_rollout_share(30.0, 12.0) == 1.0
    assert u.hybrid_rollout_share(3.0, 12.0, lent=1, hybrids=2) == 0.125
    assert u.hybrid_rollout_share(3.0, 12.0, lent=0, hybrids=0) == 0.0


def test_cluster_utilization_weighs_gpu_seconds() -> None:
    # 16 + 16 GPUs, hybrids generate a quarter of the time
    assert u.resource_utilization(16, 16, 0.8, 0.9, 0.25) == pytest.approx((12 * 0.8 + 20 * 0.9) / 32)
    assert u.resource_utilization(16, 16, 0.8, 0.9, 0.0) == pytest.approx(0.85)
    assert u.resource_utilization(4, 0, 0.8, 0.9, 1.0) == pytest.approx(0.9)


def test_idle_ratios_are_clamped() -> None:
    assert [u.trainer_idle_ratio(1, 4), u.trainer_idle_ratio(9, 4)] == [0.25, 1.0]
    assert [u.rollouter_idle_ratio(3, 4), u.rollouter_idle_ratio(5, 4), u.rollouter_idle_ratio(-1, 4)] == [
        0.25,
        0.0,
        1.0,
    ]
    assert u.clip01(float("nan")) == 0.0


def test_tenancy_seconds_by_gpu_and_window() -> None:
    tenancy = u.TenancyIntegral(0.0)
    tenancy.switch(0.0, "g0", Tenant.TRAINER)
    tenancy.switch(0.0, "g1", Tenant.TRAINER)
    tenancy.switch(2.0, "g0", Tenant.HANDOVER)
    tenancy.switch(3.0, "g0", Tenant.HYBRID)
    assert tenancy.roll(10.0) == u.GpuSeconds(train=12.0, handover=1.0, rollout=7.0)
    assert tenancy.roll(11.0) == u.GpuSeconds(train=1.0, handover=0.0, rollout=1.0)
    with pytest.raises(InternalError, match="runs back"):
        tenancy.switch(10.5, "g0", Tenant.TRAINER)


def test_exact_utilization_counts_work_over_gpu_time() -> None:
    seconds = u.GpuSeconds(train=12.0, handover=1.0, rollout=7.0)
    # 2 trainer + 1 rollout GPU over 10 s: 4 s of training compute on both, rollouts 80 % of their capacity
    assert u.resource_utilization_exact(4.0, seconds, 0.8, 2, 1, 10.0) == pytest.approx((8 + 0.8 * 17) / 30)
    assert seconds.total == 20.0
