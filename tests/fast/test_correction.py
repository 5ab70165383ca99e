"""Importance weights, rejection, gap statistics and version lags by hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hybridsched.config.schema import RolloutCorrectionConfig
from hybridsched.model import WeightVersion
from hybridsched.trainers.correction import LAG_BINS, GapStatistics, correct, importance_weights, needs_prox
from hybridsched.trainers.version_history import KEPT, VersionHistory

PROX = np.array([-1.0, -1.0 + math.log(2), -1.0 - math.log(4)])
ROLLOUT = np.full(3, -1.0)


def test_token_weights_are_ratios_of_probabilities():
    assert [1.0, 2.0, 0.25] == pytest.approx(importance_weights(PROX, ROLLOUT, "token").tolist())


def test_a_sequence_weight_is_the_product_over_its_actions():
    assert [0.5] * 3 == pytest.approx(importance_weights(PROX, ROLLOUT, "sequence").tolist())


def test_weights_of_hopeless_sequences_stay_finite():
    weights = importance_weights(np.zeros(2), np.full(2, -400.0), "sequence")
    assert [math.exp(20)] * 2 == pytest.approx(weights.tolist())


def test_decoupled_weights_are_truncated_from_above_only():
    config = RolloutCorrectionConfig(bypass_mode=False, rollout_is="token", rollout_is_threshold=1.5)
    result = correct(PROX, ROLLOUT, config)
    assert [1.0, 1.5, 0.25] == pytest.approx(result.weights.tolist())
    assert (1, [True] * 3) == (result.truncated, result.keep.tolist())


def test_decoupled_without_importance_sampling_weighs_nothing():
    assert [1.0] * 3 == correct(PROX, ROLLOUT, RolloutCorrectionConfig(bypass_mode=False)).weights.tolist()


def test_bypass_has_no_weights():
    assert [1.0] * 3 == correct(PROX, ROLLOUT, RolloutCorrectionConfig(rollout_is="token")).weights.tolist()


@pytest.mark.parametrize(
    ("level", "upper", "lower", "keep"),
    [
        ("token", 1.9, 0.2, [True, False, True]),
        ("token", 3.0, None, [True, True, False]),  # below 1/3
        ("token", 4.0001, None, [True, True, True]),
        ("sequence", 4.0, None, [True, True, True]),  # product 0.5
        ("sequence", 1.5, None, [False, False, False]),  # below 1/1.5
    ],
)
def test_rejection_keeps_weights_between_the_thresholds(level, upper, lower, keep):
    config = RolloutCorrectionConfig(rollout_rs=level, rollout_rs_threshold=upper, rollout_rs_threshold_lower=lower)
    assert keep == correct(PROX, ROLLOUT, config).keep.tolist()


def test_rejection_does_not_hide_damaged_weights():
    config = RolloutCorrectionConfig(rollout_rs="token")
    assert [True] == correct(np.array([np.nan]), np.array([-1.0]), config).keep.tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, False), ({"rollout_rs": "token"}, True), ({"bypass_mode": False}, True)],
)
def test_log_probs_before_the_update_are_computed_only_when_needed(config, expected):
    assert expected == needs_prox(RolloutCorrectionConfig(**config))


def test_effective_sample_size_and_kl():
    gap = GapStatistics.empty()
    # w = 1 and 3: ess = (1 + 3)^2 / (2 (1 + 9)) = 0.8; kl = -(0 + ln 3) / 2; k3 = (0 + 3 - 1 - ln 3) / 2
    gap.add(np.array([-2.0, -2.0 + math.log(3)]), np.array([-2.0, -2.0]), np.array([0, 2]))
    metrics = gap.metrics()
    assert 0.8 == pytest.approx(metrics["rollout_corr/ess"])
    assert -math.log(3) / 2 == pytest.approx(metrics["rollout_corr/kl"])
    assert (2 - math.log(3)) / 2 == pytest.approx(metrics["rollout_corr/k3_kl"])
    assert 2.0 == pytest.approx(metrics["rollout_corr/weight_mean"])
    assert {0: 0.0, 2: pytest.approx(-math.log(3))} == gap.lag_kl()


def test_very_old_actions_share_the_last_bin():
    gap = GapStatistics.empty()
    gap.add(np.array([-1.0, -2.0]), np.array([0.0, 0.0]), np.array([LAG_BINS - 1, 1000]))
    assert {LAG_BINS - 1: 1.5} == gap.lag_kl()


def test_no_actions_give_no_metrics():
    gap = GapStatistics.empty()
    gap.add(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    assert ({}, {}) == (gap.metrics(), gap.lag_kl())


def test_lags_in_versions_and_optimizer_steps():
    history = VersionHistory()
    history.begin(WeightVersion(0, 0), 0)
    history.begin(WeightVersion(0, 1), 4)
    now = WeightVersion(0, 2)
    history.begin(now, 8)
    assert (0, 1) == history.lags(now, now, 9)
    assert (2, 9) == history.lags(WeightVersion(0, 0), now, 9)


def test_tokens_of_a_dead_lineage_count_at_its_fork():
    history = VersionHistory([(0, 4, 16), (0, 5, 20)])  # as loaded from the checkpoint of version 5
    now = WeightVersion(1, 6)
    history.begin(now, 24)
    assert (1, 5) == history.lags(WeightVersion(0, 7), now, 25)  # 0.7 was lost with the rollback: counts as 0.5
    assert (2, 9) == history.lags(WeightVersion(0, 4), now, 25)


def test_history_is_bounded_and_survives_a_checkpoint():
    history = VersionHistory()
    for number in range(KEPT + 10):
        history.begin(WeightVersion(0, number), number)
    entries = history.entries()
    assert (KEPT, (0, 10, 10)) == (len(entries), entries[0])
    assert entries == VersionHistory(entries).entries()
